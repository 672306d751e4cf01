"""``python -m bench docs [--check]``: the generated tables and pictures of README.md and docs/.

They are made of bench/results, bench/compiled and the backends' data. A page marks a table with
``<!-- generated:NAME -->`` and ``<!-- /generated -->``; `pages` says what makes each. A dash stands for what was not
measured, or for a kernel that does not exist.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from bench import decode, host, ladder, models, pictures, record, report, scaling
from bench.comparison import auto_backend, compared, comparison_block, verdict_block
from bench.docs_support import features_block, support_block
from bench.matrix import SUITES, Cell, InputError
from bench.page.extras import targets
from bench.results import RESULTS, ROOT, Row, load, newest
from multiattn.triton import GLUON_VARIANTS

Blocks = Mapping[str, Callable[[], str]]
MARKED = re.compile(r"(<!-- generated:([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


GPU_FOLDER = "h200"
SHOWN_SEQS = (1024, 4096, 16384)
PEERS = ("sdpa-cudnn", "fa4")
"""The peers that ours are compared with: the fastest two."""
FEATURE_PEERS = ("fa4", "flex", "cudnn-frontend")
"""The peers that have most of the features."""
LADDER_HEAD_DIMS = {"triton": (128,), "cutile": (128,), "cuda": (64, 512)}


def _place(row: Row) -> tuple[int, bool, int]:
    return row.cell.head_dim, row.cell.causal, row.cell.seq


# ---------------------------------------------------------------- compiled


def targets_block() -> str:
    """Registers, spills in hot loops and occupancy of each backend's best variant, by head_dim and arch."""
    recorded, lines = record.load_all(), dict[tuple[str, ...], list[str]]()
    for it in targets(recorded):
        text = report.NOTHING if it["value"] is None else f"{it['label']} {100 * it['value']:.3g}%"
        lines.setdefault((it["backend"], it["direction"], it["d"]), []).append(text)
    rows = [(*place, *texts) for place, texts in lines.items()]
    return report.markdown(("backend", "direction", "D", *recorded), rows)


# ---------------------------------------------------------------- what was measured


def results_block(results: Path) -> str:
    """A section for each GPU: forward, backward and its memory, features, packed batches, models, the host's cost."""
    parts = []
    for folder in sorted((path for path in results.glob("*") if path.is_dir()), reverse=True):
        sections = {title: "\n\n".join(filter(None, made)) for title, made in _sections(folder)}
        if any(sections.values()):
            parts.append(f"## {folder.name.upper()}")
            parts += [f"### {title}, {folder.name.upper()}\n\n{text}" for title, text in sections.items() if text]
    return "\n\n".join(parts) or report.NOT_MEASURED


def _sections(folder: Path) -> Iterator[tuple[str, list[str]]]:
    forward = [row for row in newest(folder / "standard.json") if "/" not in row.contender]
    yield "Forward", [_speed_table(forward, "forward")]
    training = newest(folder / "backward.json")
    yield "Backward", [_speed_table(training, "backward"), report.memory_summary(training)]
    yield "Masks and scores", features_tables(newest(folder / "features.json"))
    yield "Packed batches", features_tables(newest(folder / "packed.json"))
    sizes = "B = 1, 16 heads (of top16 64 on 4, of packed batches 64 on 8)"
    yield "Block masks", features_tables(newest(folder / "lists.json"), sizes)
    if (folder / "models.json").exists():
        yield "Models", [models_table(models.load(folder / "models.json"))]
    if (folder / "host.json").exists():
        found = host.load(folder / "host.json")
        told = f"Host cost of one warm call, {found.environment.gpu}, {found.cell.key}:"
        yield "Host cost", [told, found.table("github")]


PLACE: Mapping[str, report.Column] = {
    "D": lambda cell, _: str(cell.widths),
    "mask": lambda cell, _: cell.mask,
    "N": lambda cell, _: cell.seq,
}


def _speed_table(rows: Sequence[Row], what: str) -> str:
    """TFLOPS back to back at some lengths; nothing where nothing was measured."""
    chosen = [row for row in rows if row.regime == "device" and row.cell.seq in SHOWN_SEQS]
    names, where = report.timed_names(chosen), "\n".join(report.provenance(chosen))
    table = report.cells_table(sorted(chosen, key=_place), {**PLACE, **report.rates(names, report.figure)})
    told = f"TFLOPS, {what}, 16k tokens, H*D = 2048, back to back:\n\n{table}\n\n{where}"
    return told if names else ""


def _auto(cell: Cell, its: Mapping[str, Row]) -> str:
    return auto_backend(cell, next(iter(its.values())).environment.arch)


def _over_auto(peer: str, cell: Cell, its: Mapping[str, Row]) -> str:
    return report.over(its.get(_auto(cell, its)), its.get(peer))


def features_tables(rows: Sequence[Row], sizes: str = "B = 1, H*D = 2048") -> list[str]:
    """TFLOPS by visible pairs of windows and features, one table a direction, and what ``auto`` runs over peers."""
    tables = []
    for title, direction in (("forward", "fwd"), ("backward", "bwd")):
        chosen = [it for it in rows if it.regime == "device" and it.tflops and it.cell.direction == direction]
        timed = report.timed_names(chosen)
        columns: dict[str, report.Column] = {
            "mask and feature": lambda cell, _: cell.attention,
            "D": PLACE["D"],
            "N": PLACE["N"],
            **report.rates(timed, lambda row: report.figure(row) if row else report.NOTHING),
            "auto": _auto,
            **{f"auto / {name}": partial(_over_auto, name) for name in FEATURE_PEERS if name in timed},
        }
        told = f"TFLOPS over visible pairs, {title}, {sizes}, back to back:"
        tables += [told, report.cells_table(chosen, columns), *report.provenance(chosen)] if chosen else []
    return tables


def models_table(runs: Sequence[models.ModelRun]) -> str:
    """Thousands of tokens a second of each attention in each model."""
    told = "Thousands of tokens a second, random weights, bf16, 8 layers, a training step without optimizer:"
    where = []
    for run in runs:
        names = ", ".join(dict.fromkeys(row.model for row in run.rows))
        release = ", ".join(f"{name} {number}" for name, number in run.versions.items())
        where.append(f"{names}: {release}. {report.describe(run.environment)}")
    return "\n\n".join((told, models.table_text(runs, "github"), *where))


def over_peers(rows: Iterable[Row], name_of: Callable[[Row], str]) -> dict[str, dict[Cell, float]]:
    """By name and cell, TFLOPS of the best row over those of the fastest of PEERS; rows named "" are left out."""
    found: dict[str, dict[Cell, float]] = {}
    for cell, its in report.by_cell(rows).items():
        peer = max((its[name].tflops for name in PEERS if name in its), default=0.0)
        for row in its.values():
            if peer and (name := name_of(row)):
                ratios = found.setdefault(name, {})
                ratios[cell] = max(row.tflops / peer, ratios.get(cell, 0.0))
    return found


def _cuda_over_peers(rows: Iterable[Row]) -> dict[Cell, float]:
    return over_peers(rows, lambda row: row.contender if row.contender == "cuda" else "").get("cuda", {})


def peers_block(results: Path) -> str:
    """CUDA beside its peers, a line for each cell of the suite `standard`, back to back."""
    rows = report.timed(results / GPU_FOLDER / "peers" / "standard.json")
    ratios = _cuda_over_peers(rows)
    chosen = sorted((row for row in rows if row.cell in ratios), key=_place)
    columns = {**PLACE, **report.rates(("cuda", *PEERS), report.figure), "ratio": lambda cell, _: f"{ratios[cell]:.2f}"}
    return "\n\n".join((report.cells_table(chosen, columns), *report.provenance(rows))) if rows else report.NOT_MEASURED


def peers_summary(results: Path) -> str:
    """CUDA over its peers: the geometric mean and the least ratio of each suite and regime."""
    rows = []
    for title, name, regime in (
        ("`standard`, back to back", "peers/standard.json", "device"),
        ("`standard`, CUDA graph", "peers/standard.json", "graph"),
        ("`heldout`, back to back", "heldout.json", "device"),
    ):
        ratios = _cuda_over_peers(report.timed(results / GPU_FOLDER / name, regime))
        least = min(ratios, key=lambda cell: ratios[cell], default=None)
        worst = report.NOTHING if least is None else f"{ratios[least]:.3f}, {least.key}"
        rows.append((title, len(ratios), report.mean_text([*ratios.values()], 3), worst))
    return report.markdown(("suite", "cells", "geometric mean", "least ratio, and where"), rows)


# ---------------------------------------------------------------- languages


LANGUAGES = ("cuTile", "plain Triton", "Gluon", "CUDA C++")


def language_of(row: Row) -> str:
    """The language of a kernel, empty for a peer's. Triton has two, and only the variant tells them apart."""
    backend, variant = row.contender.partition("/")[0], str((row.plan or {}).get("variant"))
    if backend == "triton":
        return "Gluon" if variant in GLUON_VARIANTS else "plain Triton"
    return {"cutile": "cuTile", "cuda": "CUDA C++"}.get(backend, "")


def speed_block(gpu: Path) -> str:
    """The geometric mean over lengths of each language's TFLOPS over the fastest peer's, by head_dim and mask."""
    groups: dict[tuple[object, str], dict[str, list[Cell]]] = {}
    columns: dict[str, tuple[str, Mapping[Cell, float]]] = {}
    told: list[str] = []
    for suite, direction in (("standard", "forward"), ("backward", "backward")):
        rows = report.timed(gpu / f"{suite}.json")
        ratios = over_peers(rows, language_of)
        columns |= {f"{it}, {direction}": (suite, ratios[it]) for it in LANGUAGES if it in ratios}
        for cell in sorted(SUITES[suite], key=lambda it: (it.head_dim, it.causal)):
            groups.setdefault((cell.head_dim, cell.mask), {}).setdefault(suite, []).append(cell)
        told += [it for it in report.provenance(row for row in rows if language_of(row)) if it not in told]
    groups["all", ""] = {suite: [*SUITES[suite]] for suite in ("standard", "backward")}
    lines: list[list[object]] = []
    for place, members in groups.items():
        lines.append([*place])
        for suite, its in columns.values():
            found = [its[cell] for cell in members[suite] if cell in its]
            counted = f" ({len(found)} of {len(members[suite])} cells)" if 0 < len(found) < len(members[suite]) else ""
            lines[-1].append(report.mean_text(found, 2) + counted)
    return "\n\n".join((report.markdown(("D", "mask", *columns), lines), "\n".join(told)))


# ---------------------------------------------------------------- ladders


def ladder_block(results: Path, backend: str) -> str:
    """The rungs of a chain by length, or for CUDA the best point of each axis."""
    rows = [row for path in sorted(results.glob(f"*/ladder_{backend}.json")) for row in load(path)]
    rows = [row for row in rows if row.cell.head_dim in LADDER_HEAD_DIMS[backend]]
    made = ladder.axes_tables(rows) if backend == "cuda" else ladder.length_tables(rows, backend)
    return "\n\n".join(f"**{it.title}**\n\n{report.write(it, 'github')}" for it in made) or report.NOT_MEASURED


def pages(results: Path = RESULTS) -> Mapping[str, Blocks]:
    """The tables of each page, by the names in its markers."""
    gpu = results / GPU_FOLDER
    beside_peers = functools.cache(partial(compared, results))
    return {
        "README.md": {
            "picture": partial(pictures.element, pictures.H200, results, "docs/pictures/"),
            "support": features_block,
            "verdict": lambda: verdict_block(beside_peers()),
        },
        "docs/support.md": {"features": features_block, "support": support_block},
        "docs/results.md": {
            **{
                f"picture_{name}": partial(pictures.element, picture, results, "pictures/")
                for name, picture in zip(("128", "64", "256", "h100"), pictures.PICTURES, strict=True)
            },
            "comparison": lambda: comparison_block(beside_peers()),
            "peers": partial(peers_summary, results),
            "results": partial(results_block, results),
        },
        "docs/decode.md": {"decode": partial(decode.block, gpu / "decode.json")},
        "docs/hopper.md": {"peers": partial(peers_block, results)},
        "docs/languages.md": {"speed": partial(speed_block, gpu)},
        "docs/ladder.md": {
            **{f"{name}_lengths": partial(ladder_block, results, name) for name in ("triton", "cutile")},
            "cuda_axes": partial(ladder_block, results, "cuda"),
        },
        "docs/scaling.md": {
            "assumptions": scaling.assumptions,
            "forward": partial(scaling.block, gpu, "fwd"),
            "backward": partial(scaling.block, gpu, "bwd"),
        },
        "docs/targets.md": {"targets": targets_block},
    }


def render(text: str, blocks: Blocks) -> str:
    """The text with every marked table made again; InputError where no marker is, or nothing generates one."""

    def replacement(match: re.Match[str]) -> str:
        name = match[2]
        if name not in blocks:
            raise InputError(f"<!-- generated:{name} -->: nothing generates it; allowed {', '.join(blocks)}")
        return f"{match[1]}\n{blocks[name]()}\n\n{match[3]}"

    new, count = MARKED.subn(replacement, text)
    if not count:
        raise InputError("there is no <!-- generated:NAME --> ... <!-- /generated --> table")
    return new


def update_all(*, check: bool, root: Path = ROOT) -> list[Path]:
    """Write every page and picture, or with `check` only compare. Returns those that were stale."""
    texts = {root / name: render((root / name).read_text(), blocks) for name, blocks in pages(RESULTS).items()}
    specs = {root / path: spec for path, spec in pictures.specifications(RESULTS)}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    undrawn = [path for path, it in specs.items() if not (path.exists() and pictures.is_current(path.read_text(), it))]
    if not check:
        for path in stale:
            path.write_text(texts[path])
        for path in undrawn:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pictures.render(specs[path]))
    return [*stale, *undrawn]
