"""docs/hopper.md: its tables, made of the results of one GPU. ``python -m bench readme`` writes them.

Of a file that is not there a block says so: the page can be made before everything is measured.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench import profile, readme, tune_results
from bench.environment import ROOT
from bench.errors import InputError
from bench.flops import rate_text
from bench.matrix import Cell
from bench.report import describe, figure, provenance
from bench.results import Row, load, one_run, read
from bench.tune_results import Sweep, Tried
from multiattn.cuda import exp2

PAGE = ROOT / "docs" / "hopper.md"
GPU_FOLDER = "h200"
"""Of bench/results: whose measurements the page shows."""
PEERS_FOLDER = "peers"
"""In it: few contenders in long readings, as slow ones leave the chip cool for the others."""
BACKEND, VARIANT = "cuda", "wgmma"
PEERS = ("sdpa-cudnn", "fa4")
PROBES_SCHEMA = 1
SIXTEENTHS = 16
STALLS_SHOWN = 4
NAME_LENGTH = 40


def blocks(results: Path) -> Mapping[str, Callable[[], str]]:
    """What generates each block of the page."""
    folder = results / GPU_FOLDER
    peers = folder / PEERS_FOLDER
    return {
        "standard": lambda: peers_block(peers / "standard.json"),
        "graph": lambda: peers_block(peers / "standard.json", regime="graph"),
        "variants": lambda: variants_block(peers / "standard.json", regime="graph"),
        "heldout": lambda: peers_block(peers / "heldout.json", every_size=True),
        "techniques": lambda: techniques_block(folder / f"{tune_results.PREFIX}{BACKEND}.json"),
        "exp2": exp2_block,
        "cycles": lambda: cycles_block(folder / f"{profile.PREFIX}{VARIANT}.json"),
        "probes": lambda: probes_block(folder / "hopper_probes.json"),
    }


def update(results: Path, *, check: bool) -> bool:
    """Whether the page was current; unless `check`, it is afterwards."""
    return readme.update_page(PAGE, blocks(results), check=check)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    return tabulate([[str(it) for it in row] for row in rows], headers, tablefmt="github", disable_numparse=True)


def _missing(path: Path, what: str = "") -> str:
    """What a block says that has nothing to show."""
    names = path.parts[-3:] if path.parent.name == PEERS_FOLDER else path.parts[-2:]
    name = f"`bench/results/{'/'.join(names)}`"
    return f"Not measured yet: {name} {what or 'is not there'}."


# ---------------------------------------------------------------- beside the peers


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Ours in one cell, and what there is of the peers in the same turns."""

    cell: Cell
    ours: Row
    peers: Mapping[str, Row]

    @property
    def rows(self) -> list[Row]:
        """All of it."""
        return [self.ours, *self.peers.values()]

    @property
    def ratio(self) -> float | None:
        """Our TFLOPS over the faster peer's; None where one side has none, or another variant ran."""
        theirs = [row.measured.tflops for row in self.peers.values() if row.measured is not None]
        if self.ours.measured is None or not theirs or not _is_hopper(self.ours):
            return None
        return self.ours.measured.tflops / max(theirs)


def comparisons(rows: Iterable[Row], regime: str = "device") -> list[Comparison]:
    """The forward cells that there is a row of ours of, in the order of the page; of each its newest run with a peer.

    Where the variant of this page did not run, what the backend ran or said instead. None where it ran nowhere.
    """
    made = []
    for cell, by_name in _by_cell(rows, regime, lambda row: row.contender in PEERS).items():
        rows_of_ours = [by_name[it] for it in (BACKEND, f"{BACKEND}/{VARIANT}") if it in by_name]
        if rows_of_ours:
            ours = next(filter(_is_hopper, rows_of_ours), rows_of_ours[0])
            peers = {it: by_name[it] for it in PEERS if it in by_name}
            made.append(Comparison(cell=cell, ours=ours, peers=peers))
    if not any(_is_hopper(it.ours) for it in made):
        return []
    return sorted(made, key=lambda it: _place(it.cell))


def _by_cell(rows: Iterable[Row], regime: str, wanted: Callable[[Row], bool]) -> dict[Cell, dict[str, Row]]:
    """Of each forward cell the rows of one run by contender: of the newest that timed what is wanted, where one did."""
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        if row.regime == regime and row.cell.direction == "fwd":
            cells.setdefault(row.cell, []).append(row)
    found = {}
    for cell, members in cells.items():
        runs = {row.run for row in members if wanted(row) and row.measured is not None}
        kept = [it for it in members if not runs or it.run in runs or not it.run]
        found[cell] = {row.contender: row for row in one_run(kept)}
    return found


def _fastest_variant(rows: Iterable[Row]) -> Row | None:
    """Of the backend's variants other than that of this page, asked for by name."""
    timed = [(row.measured.tflops, row) for row in rows if _is_other_variant(row) and row.measured is not None]
    return max(timed, key=lambda it: it[0])[1] if timed else None


def _is_other_variant(row: Row) -> bool:
    return row.contender.startswith(f"{BACKEND}/") and not _is_hopper(row)


def _is_hopper(row: Row) -> bool:
    """Whether a row is of the variant of this page: by its Plan, or by its name where no Plan came about."""
    return row.plan["variant"] == VARIANT if row.plan is not None else row.contender == f"{BACKEND}/{VARIANT}"


def _figure_of_ours(row: Row | None) -> str:
    """TFLOPS, with the variant where it is another one."""
    if row is None or row.plan is None or _is_hopper(row):
        return figure(row)
    return f"{figure(row)} ({row.plan['variant']})"


def _place(cell: Cell) -> tuple[Any, ...]:
    return cell.head_dim, cell.dtype, cell.heads_kv or 0, cell.causal, cell.seq, cell.batch


def peers_block(path: Path, *, regime: str = "device", every_size: bool = False) -> str:
    """TFLOPS of ours and of each peer by cell, the ratio to the faster one, and what ratios come to by head_dim."""
    if not path.exists():
        return _missing(path)
    found = comparisons(load(path), regime)
    if not found:
        return _missing(path, f"has no row of {BACKEND}'s variant {VARIANT} in the {regime} regime")
    more = ("B", "H", "dtype") if every_size else ()
    rows = []
    for it in found:
        cell = it.cell
        sizes = (cell.batch, cell.heads_text, cell.dtype) if every_size else ()
        peers = (figure(it.peers.get(name)) for name in PEERS)
        ours = _figure_of_ours(it.ours)
        rows.append((cell.head_dim, cell.mask, cell.seq, *sizes, ours, *peers, _ratio(it.ratio)))
    headers = ("D", "mask", "N", *more, f"{BACKEND} {VARIANT}", *PEERS, "ratio")
    return "\n\n".join([table(headers, rows), _summary(found), _provenance(row for it in found for row in it.rows)])


def _provenance(rows: Iterable[Row]) -> str:
    return "\n".join(provenance([row for row in rows if row.measured is not None]))


def headline(results: Path) -> str:
    """README's table: of each comparison with the peers how many cells, the geometric mean of ratios, and the least."""
    folder = results / GPU_FOLDER / PEERS_FOLDER
    rows: list[tuple[object, ...]] = []
    shown: list[Row] = []
    for name, regime, what in (
        ("standard", "device", "back to back"),
        ("standard", "graph", "graph replay"),
        ("heldout", "device", "back to back"),
    ):
        path = folder / f"{name}.json"
        if not path.exists():
            return _missing(path)
        found = comparisons(load(path), regime)
        rated = [(it.ratio, it.cell) for it in found if it.ratio is not None]
        if not rated:
            return _missing(path, f"has no ratio in the {regime} regime")
        cells, *ratios, _ = _totals(found)
        least, cell = min(rated, key=lambda it: it[0])
        rows.append((f"`{name}`, {what}", f"{cells} of {len(found)}", *ratios, f"{least:.3f}, {cell.key}"))
        shown += [row for it in found for row in it.rows]
    headers = ("suite", "cells", "geometric mean", "below 1.00", "least ratio, and where")
    return "\n\n".join([table(headers, rows), _provenance(shown)])


def variants_block(path: Path, *, regime: str) -> str:
    """TFLOPS of ours and of the fastest of the backend's other variants by cell, the ratio, and the least of these.

    From runs in which both took turns; peers may have been in them or not.
    """
    if not path.exists():
        return _missing(path)
    found = []
    for cell, by_name in _by_cell(load(path), regime, _is_other_variant).items():
        ours, other = by_name.get(f"{BACKEND}/{VARIANT}"), _fastest_variant(by_name.values())
        if ours is not None and ours.measured is not None and other is not None and other.measured is not None:
            found.append((cell, ours, other, ours.measured.tflops / other.measured.tflops))
    if not found:
        return _missing(path, f"has no run of {BACKEND}'s variants together in the {regime} regime")
    found.sort(key=lambda it: _place(it[0]))
    rows = [
        (cell.head_dim, cell.mask, cell.seq, figure(ours), _figure_of_ours(other), _ratio(ratio))
        for cell, ours, other, ratio in found
    ]
    cell, _, _, least = min(found, key=lambda it: it[3])
    verdict = "never slower than" if least >= 1 else "slower in places than"
    where = f"at D={cell.head_dim} {cell.mask} N={cell.seq}"
    told = f"{VARIANT} is {verdict} the variants that took turns with it: the least ratio is {least:.3f}, {where}."
    headers = ("D", "mask", "N", f"{BACKEND} {VARIANT}", "other variant", "ratio")
    return "\n\n".join([table(headers, rows), told, _provenance(row for it in found for row in it[1:3])])


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _summary(found: Sequence[Comparison]) -> str:
    """`_totals` by head_dim and of all."""
    by_head_dim = [(f"{key}", list(members)) for key, members in groupby(found, lambda it: it.cell.head_dim)]
    rows = [(name, *_totals(members)) for name, members in (*by_head_dim, ("all", found))]
    return table(("D", "cells", "geometric mean", "below 1.00", "without a ratio"), rows)


def _totals(found: Sequence[Comparison]) -> tuple[int, str, int, int]:
    """How many have a ratio, the geometric mean of ratios, how many are below 1, and how many have none."""
    ratios = [it.ratio for it in found if it.ratio is not None]
    return len(ratios), _ratio(geometric_mean(ratios)), sum(it < 1 for it in ratios), len(found) - len(ratios)


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


# ---------------------------------------------------------------- one field at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A candidate that differs from its sweep's winner in one field; `ratio` of TFLOPS, if there is one."""

    field: str
    winner: Any
    other: Any
    ratio: float | None
    failed: bool = False
    """Whether it has no time at all; else, without a ratio, none of the winner's turns."""


def winner_of(sweep: Sweep) -> Tried | None:
    """The fastest candidate; None where nothing was timed."""
    timed = [it for it in sweep.tried if it.tflops and it.config is not None]
    return max(timed, key=lambda it: it.tflops or 0.0, default=None)


def changes(sweep: Sweep) -> list[Change]:
    """Every candidate that is one field away from the winner, by field."""
    best = winner_of(sweep)
    if best is None or best.config is None or not best.tflops:
        return []
    found = []
    for it in sweep.tried:
        config = it.config or {}
        differs = [name for name, value in best.config.items() if config.get(name) != value]
        if it.config is not None and len(differs) == 1:
            (name,) = differs
            failed = not it.tflops and not it.first_tflops
            ratio = _over(it, best)
            found.append(Change(field=name, winner=best.config[name], other=config[name], ratio=ratio, failed=failed))
    order = list(best.config)
    return sorted(found, key=lambda it: order.index(it.field))


def _over(it: Tried, best: Tried) -> float | None:
    """The ratio of two rates of the same turns: the finals where both were in them, else those with all candidates."""
    for rate, rate_of_best in ((it.tflops, best.tflops), (it.first_tflops, best.first_tflops)):
        if rate and rate_of_best:
            return rate / rate_of_best
    return None


def techniques_block(path: Path) -> str:
    """Per length: the winner of each sweep, and what changing one field of it costs."""
    if not path.exists():
        return _missing(path)
    sweeps = [it for it in tune_results.load(path) if it.variant == VARIANT and it.cell.direction == "fwd"]
    sweeps = sorted((it for it in sweeps if winner_of(it) is not None), key=lambda it: (it.cell.seq, _place(it.cell)))
    if not sweeps:
        return _missing(path, f"has no timed sweep of {VARIANT}")
    parts = []
    for seq, members in groupby(sweeps, lambda it: it.cell.seq):
        parts += [f"N={seq}. The fastest config of each sweep:", *_of_length(list(members))]
    setups = dict.fromkeys(describe(it.environment) for it in sweeps)
    return "\n\n".join([*parts, "\n".join(setups)])


def _of_length(sweeps: Sequence[Sweep]) -> list[str]:
    winners, columns = [], []
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for number, sweep in enumerate(sweeps):
        best = winner_of(sweep)
        assert best is not None
        others = "" if sweep.yardstick_tflops is None else rate_text(sweep.yardstick_tflops)
        config = best.name.removeprefix(f"{sweep.backend}/{sweep.variant} ")
        winners.append((_column(sweep, sweeps), config, rate_text(best.tflops or 0.0), f"{sweep.yardstick} {others}"))
        columns.append(_column(sweep, sweeps))
        for change in changes(sweep):
            key = (change.field, _value(change.field, change.winner), _value(change.field, change.other))
            untold = "failed" if change.failed else ""
            lines.setdefault(key, {})[number] = untold if change.ratio is None else f"{change.ratio:.3f}"
    order = {name: place for place, name in enumerate(dict.fromkeys(name for name, _, _ in lines))}
    rows = [
        (f"`{name}`", f"{was} → {now}", *(lines[name, was, now].get(number, "") for number in range(len(sweeps))))
        for name, was, now in sorted(lines, key=lambda key: order[key[0]])
    ]
    headers = ("D, mask", "config", "TFLOPS", "beside it")
    told = [table(headers, winners)]
    if rows:
        told += ["One field changed, TFLOPS over the winner's:", table(("field", "change", *columns), rows)]
    return told


def _column(sweep: Sweep, beside: Sequence[Sweep]) -> str:
    """``128 causal``; with the rest of its cell where that is not enough."""
    name = f"{sweep.cell.head_dim} {sweep.cell.mask}"
    alike = [it for it in beside if f"{it.cell.head_dim} {it.cell.mask}" == name]
    return name if len(alike) == 1 else f"{sweep.cell.key}"


def _value(field: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if field == "exp2_fma_fraction":
        return f"{SIXTEENTHS * value:g}/{SIXTEENTHS}"
    return f"{value}"


# ---------------------------------------------------------------- exp2


def exp2_block() -> str:
    """The polynomial's errors, by degree and by band of x: of a model that is bit for bit the kernel's."""
    return f"{exp2.degrees_table()}\n\n{exp2.table()}"


# ---------------------------------------------------------------- cycles

TITLES: tuple[tuple[str, str], ...] = (
    (r"gpu__time_duration", "duration, as ncu gave it"),
    (r"sm__(inst_executed_)?pipe_tensor\w*(_active)?\..*pct", "tensor pipe active, %"),
    (r"sm__inst_executed_pipe_xu\..*pct", "XU pipe (MUFU: exponentials), %"),
    (r"sm__inst_executed_pipe_fma\w*\..*pct", "FMA pipe, %"),
    (r"sm__inst_executed_pipe_alu\..*pct", "ALU pipe, %"),
    (r"(sm|smsp)__(inst_issued|issue_active|inst_executed)\..*pct", "issue slots busy, %"),
    (r"sm__warps_active\..*pct", "achieved occupancy, %"),
    (r"lts__t(hroughput|\w*)\..*pct", "L2 throughput, %"),
    (r"dram__throughput\..*pct", "DRAM throughput, %"),
)
"""What rows of metrics are called, by a pattern of the metric's name, in their order; others keep their name alone."""

STALL = re.compile(r"issue_stalled_(?P<reason>[a-z0-9_]+?)(_per_issue_active|_per_warp_active)?(\.\w+)*$")


def cycles_block(path: Path) -> str:
    """What Nsight Compute counted, a column for each launch; reasons for stalls as shares of all of them."""
    if not path.exists():
        return _missing(path)
    try:
        data = json.loads(path.read_text())
        setup = {} if isinstance(data, list) else data
        launches = [dict(it) for it in (data if isinstance(data, list) else data["launches"])]
        metrics = [{str(name): value for name, value in it["metrics"].items()} for it in launches]
        columns = [_launch_name(it, launches) for it in launches]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: no list of kernel, cell and metrics: {type(error).__name__}: {error}") from None
    names = dict.fromkeys(name for it in metrics for name in it if not STALL.search(name))
    rows: list[Sequence[str]] = [
        (_metric_title(name), *(_number(it.get(name)) for it in metrics)) for name in sorted(names, key=_metric_place)
    ]
    stalls = [_top_stalls(it) for it in metrics]
    if any(stalls):
        rows.append(("stalls, most first", *stalls))
    kernels = ", ".join(f"`{name}`" for name in dict.fromkeys(str(it["kernel"]) for it in launches))
    told = f"Kernels: {kernels}. "
    return "\n\n".join([table(("counted by ncu", *columns), rows), told + _setup([setup, *launches])])


def _launch_name(launch: Mapping[str, Any], launches: Sequence[Mapping[str, Any]]) -> str:
    cell = launch["cell"]
    name = Cell(**cell).key if isinstance(cell, dict) else str(cell)
    kernel = str(launch["kernel"])
    if sum(it["cell"] == cell for it in launches) == 1:
        return name
    return f"{kernel if len(kernel) <= NAME_LENGTH else kernel[:NAME_LENGTH] + '...'}, {name}"


def _metric_place(name: str) -> tuple[int, str]:
    return next((place for place, (form, _) in enumerate(TITLES) if re.match(form, name)), len(TITLES)), name


def _metric_title(name: str) -> str:
    title = next((title for form, title in TITLES if re.match(form, name)), "")
    return f"{title} (`{name}`)" if title else f"`{name}`"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "" if value is None else str(value)


def _top_stalls(metrics: Mapping[str, Any]) -> str:
    """``long_scoreboard 31 %, wait 20 %``: shares of the reasons that were counted."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if (match := STALL.search(name)) and isinstance(value, (int, float)) and "not_issued" not in name:
            found[match["reason"]] = float(value)
    total = sum(found.values())
    top = sorted(found, key=lambda reason: -found[reason])[:STALLS_SHOWN]
    return ", ".join(f"{reason} {100 * found[reason] / total:.0f} %" for reason in top) if total else ""


def _setup(told: Iterable[Mapping[str, Any]]) -> str:
    """GPU, date and commit, as a file has them; or that it has not."""
    found = {
        ", ".join(
            f"{'commit ' if name == 'commit' else ''}{it[name]}" for name in ("gpu", "date", "commit") if it.get(name)
        )
        for it in told
    }
    return "; ".join(sorted(filter(None, found))) or "On which GPU, when and of which commit the file does not say"


# ---------------------------------------------------------------- probes


def probes_block(path: Path) -> str:
    """For each probe what it is, and TFLOPS with it over those without, each as a share of cuDNN's in its own run."""
    if not path.exists():
        return _missing(path)

    def told(data: dict[str, Any]) -> str:
        parts = [_probe(probe) for probe in data["probes"]]
        return "\n\n".join([*parts, f"{data['labels']} {_setup([data])}."])

    return read(path, f"a file of probes of schema {PROBES_SCHEMA}", PROBES_SCHEMA, told)


def _probe(probe: Mapping[str, Any]) -> str:
    lengths = sorted({point["seq"] for point in probe["points"]})
    lines: dict[tuple[int, bool, str], dict[int, str]] = {}
    ratios = []
    for point in probe["points"]:
        with_it, without = point["with"], point["without"]
        ratio = with_it["tflops"] / with_it["peer"] / (without["tflops"] / without["peer"])
        ratios.append(ratio)
        text = f"{ratio:.2f} ({rate_text(with_it['tflops'])}, {rate_text(without['tflops'])})"
        lines.setdefault((point["head_dim"], point["causal"], point["label"]), {})[point["seq"]] = text
    rows = [
        (head_dim, "causal" if causal else "full", label, *(line.get(seq, "") for seq in lengths))
        for (head_dim, causal, label), line in lines.items()
    ]
    headers = ("D", "mask", "compared", *(f"N={seq}" for seq in lengths))
    mean = f"Geometric mean of the ratio: {_ratio(geometric_mean(ratios))}, over {len(ratios)} cells."
    mean += f" Of commit {probe['commit']}." if "commit" in probe else ""
    return f"**{probe['name']}.** {probe['what']} {mean}\n\n{table(headers, rows)}"
