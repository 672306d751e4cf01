"""``python -m bench docs [--check]``: the generated tables and pictures of README.md and docs/.

They are made of bench/results, bench/compiled and the backends' data. A page marks a table with
``<!-- generated:NAME -->`` and ``<!-- /generated -->``; `pages` says what makes each. A dash stands for what was not
measured, or for a kernel that does not exist.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal

from bench import decode, host, ladder, layout_docs, models, pictures, record, scaling
from bench.comparison import NOT_MEASURED, auto_backend, compared, comparison_block, verdict_block
from bench.docs_support import LANGUAGES, features_block, head_dims_block, language_of, support_block
from bench.layout_docs import Blocks
from bench.matrix import SUITES, Cell, InputError
from bench.record_kernels import main_of
from bench.report import describe, figure, markdown, memory_summary, provenance, write
from bench.results import RESULTS, ROOT, Row, load, one_run
from multiattn.inspect.layout_svg import draw
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, make_plan
from multiattn.problem import Problem

MARKED = re.compile(r"(<!-- generated:([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


GPU_FOLDER = "h200"
NOTHING = "-"
SHOWN_SEQS = (1024, 4096, 16384)
PEERS = ("sdpa-cudnn", "fa4")
"""The peers that ours are compared with: the fastest two."""
FEATURE_PEERS = ("fa4", "flex")
"""The peers that have most of the features."""
LADDER_HEAD_DIMS = {"triton": (128,), "cutile": (128,), "cuda": (64, 512)}


def _language(row: Row) -> str:
    return language_of(row.contender.partition("/")[0], str((row.plan or {}).get("variant")))


def _rows(path: Path) -> list[Row]:
    return one_run(load(path)) if path.exists() else []


def _place(cell: Cell) -> tuple[int, bool, int]:
    return cell.head_dim, cell.causal, cell.seq


def geometric_mean(ratios: Sequence[float], digits: int) -> str:
    """The geometric mean for a table."""
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.{digits}f}" if ratios else NOTHING


# ---------------------------------------------------------------- compiled


def targets_block() -> str:
    """Registers, spills in hot loops and occupancy of each backend's best variant, by head_dim and arch."""
    recorded = record.load_all()
    rows = [
        (name, direction, head_dim, *(_compiled(it, name, direction, head_dim, arch) for arch, it in recorded.items()))
        for direction in DIRECTIONS
        for name in BACKENDS
        for head_dim in (64, 128, 256)
    ]
    return markdown(("backend", "direction", "D", *recorded), rows)


def _compiled(found: record.Record, backend: str, direction: Direction, head_dim: int, arch: str) -> str:
    problem = Problem.contiguous(batch=4, heads_q=16, seq_q=4096, head_dim=head_dim, causal=True)
    plan = make_plan(registry.get(backend), problem, by_name(arch), direction=direction, probe=False)
    kernels = found.kernels_of(plan)
    if not kernels:
        return NOTHING
    main, spills = main_of(kernels), sum(it.hot_spills for it in kernels)
    return f"{main.registers}{f' +{spills}' if spills else ''} {100 * main.share:.3g}%"


# ---------------------------------------------------------------- what was measured


def results_block(results: Path) -> str:
    """A section for each GPU: forward, backward and its memory, features, packed batches, models, the host's cost."""
    parts = []
    for folder in sorted((path for path in results.glob("*") if path.is_dir()), reverse=True):
        sections = {title: "\n\n".join(filter(None, made)) for title, made in _sections(folder)}
        if any(sections.values()):
            parts.append(f"## {folder.name.upper()}")
            parts += [f"### {title}, {folder.name.upper()}\n\n{text}" for title, text in sections.items() if text]
    return "\n\n".join(parts) or NOT_MEASURED


def _sections(folder: Path) -> Iterator[tuple[str, list[str]]]:
    forward = [row for row in _rows(folder / "standard.json") if "/" not in row.contender]
    yield "Forward", [_speed_table(forward, "forward")]
    training = _rows(folder / "backward.json")
    yield "Backward", [_speed_table(training, "backward"), memory_summary(training)]
    yield "Masks and scores", features_tables(_rows(folder / "features.json"))
    yield "Packed batches", features_tables(_rows(folder / "packed.json"))
    if (folder / "models.json").exists():
        yield "Models", [models_table(models.load(folder / "models.json"))]
    if (folder / "host.json").exists():
        found = host.load(folder / "host.json")
        told = f"Host cost of one warm call, {found.environment.gpu}, {found.cell.key}:"
        yield "Host cost", [told, found.table("github")]


def _speed_table(rows: Sequence[Row], what: str) -> str:
    """TFLOPS back to back at some lengths; nothing where nothing was measured."""
    chosen = [row for row in rows if row.regime == "device" and row.cell.seq in SHOWN_SEQS]
    timed = {row.contender for row in chosen if row.tflops}
    names = [name for name in dict.fromkeys(row.contender for row in chosen) if name in timed]
    found = {(row.cell, row.contender): row for row in chosen}
    lines = [
        (cell.head_dim, cell.mask, cell.seq, *(figure(found.get((cell, name))) for name in names))
        for cell in sorted({row.cell for row in chosen}, key=_place)
    ]
    table = markdown(("D", "mask", "N", *names), lines)
    told = f"TFLOPS, {what}, 16k tokens, H*D = 2048, back to back:\n\n{table}\n\n" + "\n".join(provenance(chosen))
    return told if names else ""


def features_tables(rows: Sequence[Row]) -> list[str]:
    """TFLOPS by visible pairs of windows and features, one table a direction, and what ``auto`` runs over two peers."""
    timed, tables = [row for row in rows if row.regime == "device" and row.tflops], []
    for title, direction in (("forward", "fwd"), ("backward", "bwd")):
        chosen = [row for row in timed if row.cell.direction == direction]
        names = list(dict.fromkeys(row.contender for row in chosen))
        found = {(row.cell, row.contender): row for row in chosen}
        lines = []
        for cell in dict.fromkeys(row.cell for row in chosen):
            auto = auto_backend(cell, chosen[0].environment.arch, "forward" if direction == "fwd" else "backward")
            ours = found.get((cell, auto))
            figures = (figure(found[cell, name]) if (cell, name) in found else NOTHING for name in names)
            ratios = (_ratio(ours, found.get((cell, name))) for name in FEATURE_PEERS)
            lines.append((cell.attention, cell.head_dim, cell.seq, *figures, auto, *ratios))
        header = ("mask and feature", "D", "N", *names, "auto", *(f"auto / {name}" for name in FEATURE_PEERS))
        told = f"TFLOPS over visible pairs, {title}, B = 1, H*D = 2048, back to back:"
        tables += [told, markdown(header, lines), *provenance(chosen)] if chosen else []
    return tables


def models_table(runs: Sequence[models.ModelRun]) -> str:
    """Thousands of tokens a second of each attention in each model."""
    told = "Thousands of tokens a second, random weights, bf16, 8 layers, a training step without optimizer:"
    where = []
    for run in runs:
        names = ", ".join(dict.fromkeys(row.model for row in run.rows))
        release = ", ".join(f"{name} {number}" for name, number in run.versions.items())
        where.append(f"{names}: {release}. {describe(run.environment)}")
    return "\n\n".join((told, models.table_text(runs, "github"), *where))


def _ratio(row: Row | None, peer: Row | None) -> str:
    return NOTHING if row is None or peer is None else f"{row.tflops / peer.tflops:.2f}"


def over_peers(rows: Iterable[Row], name_of: Callable[[Row], str]) -> dict[str, dict[Cell, float]]:
    """By name and cell, TFLOPS of the best row over those of the fastest of PEERS; rows named "" are left out."""
    best: dict[str, dict[Cell, float]] = {}
    for row in rows:
        rates = best.setdefault("" if row.contender in PEERS else name_of(row) or "left out", {})
        rates[row.cell] = max(row.tflops, rates.get(row.cell, 0.0))
    peers = best.pop("", {})
    return {name: {cell: it / peers[cell] for cell, it in its.items() if cell in peers} for name, its in best.items()}


def _timed(path: Path, regime: str = "device") -> list[Row]:
    return [row for row in _rows(path) if row.regime == regime and row.tflops]


def _cuda_over_peers(rows: Iterable[Row]) -> dict[Cell, float]:
    return over_peers(rows, lambda row: row.contender if row.contender == "cuda" else "").get("cuda", {})


def peers_block(results: Path) -> str:
    """CUDA beside its peers, a line for each cell of the suite `standard`, back to back."""
    rows, names = _timed(results / GPU_FOLDER / "peers" / "standard.json"), ("cuda", *PEERS)
    found, ratios = {(row.cell, row.contender): row for row in rows}, _cuda_over_peers(rows)
    lines = []
    for cell in sorted(ratios, key=_place):
        rates = (figure(found.get((cell, name))) for name in names)
        lines.append((cell.head_dim, cell.mask, cell.seq, *rates, f"{ratios[cell]:.2f}"))
    table = markdown(("D", "mask", "N", *names, "ratio"), lines)
    return "\n\n".join((table, *provenance(rows))) if rows else NOT_MEASURED


def peers_summary(results: Path) -> str:
    """CUDA over its peers: the geometric mean and the least ratio of each suite and regime."""
    rows = []
    for title, name, regime in (
        ("`standard`, back to back", "peers/standard.json", "device"),
        ("`standard`, CUDA graph", "peers/standard.json", "graph"),
        ("`heldout`, back to back", "heldout.json", "device"),
    ):
        ratios = _cuda_over_peers(_timed(results / GPU_FOLDER / name, regime))
        least = min(ratios, key=lambda cell: ratios[cell], default=None)
        worst = NOTHING if least is None else f"{ratios[least]:.3f}, {least.key}"
        rows.append((title, len(ratios), geometric_mean(list(ratios.values()), 3), worst))
    return markdown(("suite", "cells", "geometric mean", "least ratio, and where"), rows)


# ---------------------------------------------------------------- languages


def speed_block(path: Path, cells: Sequence[Cell]) -> str:
    """The geometric mean over lengths of each language's TFLOPS over the fastest peer's, by head_dim and mask."""
    rows = _timed(path)
    ratios = over_peers(rows, _language)

    def line(*place: object, members: Sequence[Cell]) -> list[object]:
        parts = list(place)
        for its in (ratios.get(language, {}) for language in LANGUAGES):
            found = [its[cell] for cell in members if cell in its]
            counted = f" ({len(found)} of {len(members)} cells)" if 0 < len(found) < len(members) else ""
            parts.append(geometric_mean(found, 2) + counted)
        return parts

    by_place = groupby(sorted(cells, key=_place), lambda cell: (cell.head_dim, cell.mask))
    table = [line(*place, members=list(members)) for place, members in by_place]
    told = provenance(row for row in rows if _language(row))
    return "\n\n".join((markdown(("D", "mask", *LANGUAGES), [*table, line("all", "", members=cells)]), "\n".join(told)))


def host_block(path: Path) -> str:
    """Microseconds of each kind of call, by contender."""
    if not path.exists():
        return NOT_MEASURED
    found = host.load(path)
    return f"{found.table('github')}\n\n{found.cell.key}. {describe(found.environment)}"


# ---------------------------------------------------------------- ladders


def ladder_block(results: Path, backend: str) -> str:
    """The rungs of a chain by length, or for CUDA the best point of each axis."""
    rows = [row for path in sorted(results.glob(f"*/ladder_{backend}.json")) for row in load(path)]
    rows = [row for row in rows if row.cell.head_dim in LADDER_HEAD_DIMS[backend]]
    made = ladder.axes_tables(rows) if backend == "cuda" else ladder.length_tables(rows, backend)
    return "\n\n".join(f"**{it.title}**\n\n{write(it, 'github')}" for it in made) or NOT_MEASURED


# ---------------------------------------------------------------- on paper


def scaling_block(folder: Path, direction: Literal["fwd", "bwd"]) -> str:
    """One pass over many GPUs, as predicted from the speed of one."""
    return scaling.block(folder, direction) or NOT_MEASURED


def pages(results: Path = RESULTS) -> Mapping[str, Blocks]:
    """The tables of each page, by the names in its markers."""
    gpu = results / GPU_FOLDER
    beside_peers = functools.cache(partial(compared, results))
    return {
        "README.md": {
            "picture": partial(pictures.element, pictures.H200, results, "docs/pictures/"),
            "support": features_block,
            "verdict": lambda: verdict_block(beside_peers()),
            "comparison": lambda: comparison_block(beside_peers()),
        },
        "docs/support.md": {"features": features_block, "support": support_block},
        "docs/results.md": {
            "picture_128": partial(pictures.element, pictures.H200, results, "pictures/"),
            "picture_64": partial(pictures.element, pictures.H200_D64, results, "pictures/"),
            "picture_256": partial(pictures.element, pictures.H200_D256, results, "pictures/"),
            "picture_h100": partial(pictures.element, pictures.H100, results, "pictures/"),
            "comparison": lambda: comparison_block(beside_peers()),
            "peers": partial(peers_summary, results),
            "results": partial(results_block, results),
        },
        "docs/decode.md": {"decode": partial(decode.block, gpu / "decode.json")},
        "docs/hopper.md": {"peers": partial(peers_block, results)},
        "docs/languages.md": {
            "forward": partial(speed_block, gpu / "standard.json", SUITES["standard"]),
            "backward": partial(speed_block, gpu / "backward.json", SUITES["backward"]),
            "host": partial(host_block, gpu / "host.json"),
            "head_dims": head_dims_block,
        },
        "docs/ladder.md": {
            "triton_lengths": partial(ladder_block, results, "triton"),
            "cutile_lengths": partial(ladder_block, results, "cutile"),
            "cuda_axes": partial(ladder_block, results, "cuda"),
        },
        "docs/scaling.md": {
            "assumptions": scaling.assumptions,
            "forward": partial(scaling_block, gpu, "fwd"),
            "backward": partial(scaling_block, gpu, "bwd"),
        },
        "docs/targets.md": {"targets": targets_block},
        "docs/swizzle.md": layout_docs.SWIZZLE,
        "docs/fragments.md": layout_docs.FRAGMENTS,
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


def update_all(*, check: bool, root: Path = ROOT, results: Path = RESULTS) -> list[Path]:
    """Write every page and picture, or with `check` only compare. Returns those that were stale."""
    texts = {root / name: render((root / name).read_text(), blocks) for name, blocks in pages(results).items()}
    texts |= {root / "docs" / name: draw(tile) for name, tile in layout_docs.PICTURES.items()}
    specs = {root / path: spec for path, spec in pictures.specifications(results)}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    undrawn = [path for path, it in specs.items() if not (path.exists() and pictures.is_current(path.read_text(), it))]
    if not check:
        for path in stale:
            path.write_text(texts[path])
        for path in undrawn:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pictures.render(specs[path]))
    return [*stale, *undrawn]
