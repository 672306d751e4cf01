"""The README's comparison: each backend over the fastest peer, its geometric mean and its worst cell, by GPU."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import models
from bench.decode_cells import DecodeCell
from bench.matrix import Cell
from bench.report import NOT_MEASURED, NOTHING, by_cell, fastest, markdown, timed
from bench.results import Row, is_ours
from bench.verdicts import runs_now
from multiattn.operands import Options
from multiattn.plan.arch import by_name
from multiattn.plan.backend import BACKENDS
from multiattn.plan.choice import choose
from multiattn.plan.support import Unsupported

AUTO = "auto"
GPU_FOLDERS = ("h200", "h100")
TITLES = {"triton": "Triton", "cutile": "cuTile", "cuda": "CUDA", AUTO: "`auto`"}
PEER_TITLES = {
    "sdpa-cudnn": "cuDNN", "cudnn": "cuDNN", "fa3": "FA3", "fa3-vllm": "FA3", "fa4": "FA4",
    "flex": "Flex", "flashinfer": "FlashInfer", "sdpa": "SDPA", "flex_attention": "Flex",
    "flash_attention_4": "FA4", "cudnn-frontend": "cuDNN Frontend",
}  # fmt: skip
MODES = {"training": "training a model", "prefill": "prefill of a model"}
OLD = "†"
"""Stands by ratios of kernels that have been replaced."""
LEVEL = 0.02
"""How far from 1 a mean may be and still count as level."""


PARTS = {
    "forward": ("standard", "fwd", "device"),
    "backward": ("backward", "bwd", "device"),
    "decode": ("decode", "fwd", "graph"),
    "masks and scores, forward": ("features", "fwd", "device"),
    "masks and scores, backward": ("features", "bwd", "device"),
    "packed, forward": ("packed", "fwd", "device"),
    "packed, backward": ("packed", "bwd", "device"),
    "block masks, forward": ("lists", "fwd", "device"),
    "block masks, backward": ("lists", "bwd", "device"),
}
"""The lines of the table by title: each has the cells of a results file in one direction and regime."""


class Ratio(NamedTuple):
    """One cell: how many times as fast as the fastest peer of the same turns, and its short name."""

    value: float
    where: str
    cell: Cell | None = None
    """None for a model."""
    is_old: bool = False
    """The backend would run another kernel now than the one that was timed."""


@functools.cache
def auto_backend(cell: Cell, arch: str) -> str:
    """The backend that ``auto`` runs in a cell, by the data alone."""
    try:
        return choose(cell.problem, by_name(arch), Options(), cell.pass_of, probe=False)[0].backend
    except Unsupported:
        return NOTHING


def short_name(cell: Cell) -> str:
    """The few words that tell cells of one file apart: ``D128 causal 16k``."""
    length = f"{cell.seq // 1024}k" if cell.seq >= 1024 and cell.seq % 1024 == 0 else str(cell.seq)
    if isinstance(cell, DecodeCell):
        kind = "mixed" if cell.mixed else f"{cell.queries} quer{'y' if cell.queries == 1 else 'ies'}"
        return f"D{cell.widths} {kind} B{cell.batch} {length} keys {cell.cache}"
    return f"D{cell.widths} {cell.attention.replace('_', ' ')} {length}"


def over_best_peer(rows: Iterable[Row]) -> dict[str, list[Ratio]]:
    """The ratios of ``auto`` and of each backend, over cells in which it and a peer were timed in the same turns."""
    found: dict[str, list[Ratio]] = {name: [] for name in (AUTO, *BACKENDS)}
    for cell, its in by_cell(rows).items():
        peer = fastest(its.values(), ours=False)
        if peer is None:
            continue
        picked = auto_backend(cell, peer.environment.arch)
        for name, ratios in found.items():
            row = its.get(picked if name == AUTO else name)
            if row is not None:
                is_old = not isinstance(cell, DecodeCell) and not runs_now(row)
                ratios.append(Ratio(row.tflops / peer.tflops, short_name(cell), cell, is_old))
    return found


def told(ratios: Sequence[Ratio], cells: int) -> str:
    """``**1.16** (0.983)``: the mean, the least and where that is; also the number of cells where it is not of all."""
    if not ratios:
        return NOTHING
    least = min(ratios, key=lambda it: it.value)
    some = f", {len(ratios)} cells" if len(ratios) < cells else ""
    return f"**{mean_of(ratios):.2f}**{mark_of(ratios)} ({least.value:.3f})<br>{least.where}{some}"


def peers_of(timed: Iterable[tuple[str, object]]) -> str:
    """The peers of (contender, cell) pairs in words, with the number of cells of those that are not in all."""
    cells: set[object] = set()
    found: dict[str, set[object]] = {}
    for name, cell in timed:
        cells.add(cell)
        if not is_ours(name) and name != models.IMPLEMENTATIONS[0]:
            found.setdefault(PEER_TITLES.get(name, name), set()).add(cell)
    order = dict.fromkeys([*PEER_TITLES.values(), *sorted(found)])
    told = {name: f" ({len(its)} cells)" if len(its) < len(cells) else "" for name, its in found.items()}
    return ", ".join(f"{name}{told[name]}" for name in order if name in told)


class Compared(NamedTuple):
    """The ratios of one part on one GPU, by backend."""

    part: str
    gpu: str
    cells: int
    ratios: Mapping[str, Sequence[Ratio]]
    peers: str


def compared(results: Path) -> list[Compared]:
    """All parts on all GPUs that were measured."""
    return [*_of_kernels(results), *_of_models(results)]


def comparison_block(found: Sequence[Compared]) -> str:
    """A line for each part and GPU, a column for ``auto`` and each backend."""
    if not found:
        return NOT_MEASURED
    lines = []
    for it in found:
        texts = (told(it.ratios.get(name, ()), it.cells) for name in (AUTO, *BACKENDS))
        lines.append((f"{it.part}, {it.gpu}", it.cells, *texts, it.peers))
    table = markdown(("what, GPU", "cells", *(TITLES[name] for name in (AUTO, *BACKENDS)), "peers"), lines)
    if OLD not in table:
        return table
    return f"{table}\n\n{OLD} Some of these cells were timed before the backend had the kernel that it runs there now."


def verdict_block(found: Sequence[Compared]) -> str:
    """The means of ``auto``: faster than the fastest peer, level with it, slower; then each backend's slower ones."""
    level = f"Level, within {LEVEL:.0%}"
    lists: dict[str, list[str]] = {"Faster": [], level: [], "Slower": []}
    for part, by_gpu in by_part(found, AUTO).items():
        means = list(map(mean_of, by_gpu.values()))
        title = "Slower" if min(means) < 1 - LEVEL else "Faster" if max(means) > 1 + LEVEL else level
        lists[title].append(f"{part} ({means_text(by_gpu)})")
    lists["Slower when you name it"] = [
        f"{TITLES[name]} in {part} ({means_text(by_gpu)})"
        for name in BACKENDS
        for part, by_gpu in by_part(found, name).items()
        if min(map(mean_of, by_gpu.values())) < 1 - LEVEL
    ]
    lines = [f"- **{title}:** {'; '.join(its)}." for title, its in lists.items() if its]
    if any(OLD in line for line in lines):
        lines[-1] += f" {OLD} Some cells were timed with kernels that have been replaced since."
    return "\n".join(lines) or NOT_MEASURED


def by_part(found: Sequence[Compared], name: str) -> dict[str, dict[str, Sequence[Ratio]]]:
    """The ratios of one backend, or of ``auto``, by part and GPU."""
    parts: dict[str, dict[str, Sequence[Ratio]]] = {}
    for it in found:
        if ratios := it.ratios.get(name):
            parts.setdefault(it.part, {})[it.gpu] = ratios
    return parts


def means_text(by_gpu: Mapping[str, Sequence[Ratio]]) -> str:
    """``H200 1.16, H100 1.14``."""
    return ", ".join(f"{gpu} {mean_of(its):.2f}{mark_of(its)}" for gpu, its in by_gpu.items())


def mean_of(ratios: Sequence[Ratio]) -> float:
    """The geometric mean."""
    return statistics.geometric_mean(it.value for it in ratios)


def mark_of(ratios: Sequence[Ratio]) -> str:
    """A dagger where some were timed with a kernel that has been replaced."""
    return OLD if any(it.is_old for it in ratios) else ""


def _of_kernels(results: Path) -> Iterator[Compared]:
    for (title, (stem, direction, regime)), folder in itertools.product(PARTS.items(), GPU_FOLDERS):
        rows = [row for row in timed(results / folder / f"{stem}.json", regime) if row.cell.direction == direction]
        ratios = over_best_peer(rows)
        if ratios[AUTO]:
            peers = peers_of((row.contender, row.cell) for row in rows)
            yield Compared(title, folder.upper(), len({row.cell for row in rows}), ratios, peers)


def _of_models(results: Path) -> Iterator[Compared]:
    for (mode, title), folder in itertools.product(MODES.items(), GPU_FOLDERS):
        path = results / folder / "models.json"
        runs = models.load(path) if path.exists() else ()
        rows = [row for run in runs for row in run.rows if row.mode == mode and row.tokens_per_s is not None]
        ours = [row for row in rows if row.implementation == models.IMPLEMENTATIONS[0]]
        ratios = [Ratio(it, row.model) for row in ours if (it := models.over_others(row, rows)) is not None]
        if ratios:
            peers = peers_of((row.implementation, row.model) for row in rows)
            yield Compared(title, folder.upper(), len({row.model for row in rows}), {AUTO: ratios}, peers)
