"""Tables of docs/hopper.md and docs/languages.md, made from bench/results and the backends' data.

A dash stands for what was not measured, or for a kernel that does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tabulate import tabulate

from bench import host, readme
from bench.languages import LANGUAGES, NO_TURNS, PEERS, Language, Turns, turns
from bench.matrix import SUITES, Cell
from bench.report import describe, figure, provenance
from bench.results import Row, load, one_run
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, GPU_ARCHS
from multiattn.plan.backend import DIRECTIONS, Direction

GPU_FOLDER = "h200"
OURS = "cuda"
NOTHING = "-"
NOT_MEASURED = "Not measured yet."
TITLES = tuple(language.title for language in LANGUAGES)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    return tabulate([[str(it) for it in row] for row in rows], headers, tablefmt="github", disable_numparse=True)


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """None of no ratios."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def _rows(path: Path) -> list[Row]:
    return load(path) if path.exists() else []


# ---------------------------------------------------------------- CUDA on Hopper beside its peers


def _ratios(rows: Iterable[Row], regime: str) -> dict[Cell, tuple[float, dict[str, Row]]]:
    """Per cell: TFLOPS of CUDA over those of the faster peer in the same turns, and the rows."""
    found: dict[Cell, dict[str, Row]] = {}
    for row in one_run(it for it in rows if it.regime == regime and it.contender in (OURS, *PEERS)):
        if row.measured is not None:
            found.setdefault(row.cell, {})[row.contender] = row
    ratios = {}
    for cell, its in found.items():
        rates = {name: row.measured.tflops for name, row in its.items() if row.measured is not None}
        if set(rates) == {OURS, *PEERS}:
            ratios[cell] = rates[OURS] / max(rates[name] for name in PEERS), its
    return ratios


def peers_block(results: Path) -> str:
    """A line per cell of the suite `standard`, back to back."""
    found = _ratios(_rows(results / GPU_FOLDER / "peers" / "standard.json"), "device")
    if not found:
        return NOT_MEASURED
    rows = [
        (cell.head_dim, cell.mask, cell.seq, *(figure(its[name]) for name in (OURS, *PEERS)), f"{ratio:.2f}")
        for cell, (ratio, its) in sorted(found.items(), key=lambda item: _place(item[0]))
    ]
    told = table(("D", "mask", "N", OURS, *PEERS, "ratio"), rows)
    return told + "\n\n" + "\n".join(provenance([row for _, its in found.values() for row in its.values()]))


def peers_summary(results: Path) -> str:
    """A line per suite and regime: the geometric mean and the least ratio."""
    folder = results / GPU_FOLDER
    suites = (
        ("`standard`, back to back", folder / "peers" / "standard.json", "device"),
        ("`standard`, CUDA graph", folder / "peers" / "standard.json", "graph"),
        ("`heldout`, back to back", folder / "heldout.json", "device"),
    )
    rows = []
    for title, path, regime in suites:
        ratios = {cell: ratio for cell, (ratio, _) in _ratios(_rows(path), regime).items()}
        mean, least = geometric_mean(list(ratios.values())), min(ratios, key=lambda cell: ratios[cell], default=None)
        worst = f"{ratios[least]:.3f}, {least.key}" if least is not None else NOTHING
        rows.append((title, len(ratios), f"{mean:.3f}" if mean is not None else NOTHING, worst))
    return table(("suite", "cells", "geometric mean", "least ratio, and where"), rows)


# ---------------------------------------------------------------- languages


def language_blocks(results: Path) -> Mapping[str, Callable[[], str]]:
    """The tables of docs/languages.md."""
    gpu = results / GPU_FOLDER
    return {
        "forward": lambda: speed_block(gpu / "standard.json", SUITES["standard"]),
        "backward": lambda: speed_block(gpu / "backward.json", SUITES["backward"]),
        "host": lambda: host_block(gpu / "host.json"),
        "head_dims": head_dims_block,
    }


def _place(cell: Cell) -> tuple[int, bool, int]:
    return cell.head_dim, cell.causal, cell.seq


def speed_block(path: Path, cells: Sequence[Cell]) -> str:
    """Per head_dim and mask: the geometric mean over lengths of each language's TFLOPS over the fastest peer's."""
    found = turns(path, cells)
    rows = []
    for (head_dim, mask), members in groupby(sorted(cells, key=_place), lambda cell: (cell.head_dim, cell.mask)):
        mine = [found.get(cell, NO_TURNS) for cell in members]
        rows.append((head_dim, mask, *(_mean(mine, title) for title in TITLES)))
    rows.append(("all", "", *(_mean([found.get(cell, NO_TURNS) for cell in cells], title) for title in TITLES)))
    measured = [row for it in found.values() for row in it.ours.values() if row.measured is not None]
    return table(("D", "mask", *TITLES), rows) + "\n\n" + ("\n".join(provenance(measured)) or NOT_MEASURED)


def _mean(members: Sequence[Turns], title: str) -> str:
    """With the count of cells where some have no ratio."""
    ratios = [ratio for it in members if (ratio := it.ratio(title)) is not None]
    mean = geometric_mean(ratios)
    if mean is None:
        return NOTHING
    return f"{mean:.2f}" if len(ratios) == len(members) else f"{mean:.2f} ({len(ratios)} of {len(members)} cells)"


def host_block(path: Path) -> str:
    """Microseconds of each kind of call, by contender."""
    if not path.exists():
        return NOT_MEASURED
    setup, costs = host.load(path)
    return f"{host.table(costs, form='github')}\n\n{host.measured_cell(path).key}. {describe(setup)}"


def head_dims_block() -> str:
    """The head_dims that each language takes on each arch, the CPU included."""
    arches = ("cpu", *GPU_ARCHS)
    rows = [
        (language.title, direction, *(_head_dims(language, direction, arch) for arch in arches))
        for language in LANGUAGES
        for direction in DIRECTIONS
    ]
    return table(("language", "direction", *arches), rows)


def _head_dims(language: Language, direction: Direction, arch: str) -> str:
    backend = registry.get(language.backend)
    able: set[int] = set()
    for variant in language.offered(direction):
        if arch in variant.capability.arches:
            able |= set(readme.supported_head_dims(backend, variant, ARCHS[arch], direction)[0])
    return readme.ranges(sorted(able)) or NOTHING
