"""docs/targets.md: what the compilers make of every kernel for every target, and what each device could reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.environment import results_root
from bench.expected import Record
from multiattn.inspect import tables
from multiattn.inspect.build import Entry, ordered
from multiattn.inspect.cells import HEAD_DIMS, MASKS, SEQ
from multiattn.inspect.facts import Facts
from multiattn.inspect.roofline import HIDDEN, TOKENS, Measurement, best_measured, bounds, read_results
from multiattn.inspect.tables import LEGEND, listed, short
from multiattn.plan.arch import GPU_ARCHS, GPUS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction
from multiattn.problem import Problem

SEQS = (1024, 4096, 16384)
"""Lengths of the predicted ceilings."""

INTRO = f"""# Every target architecture, compiled

Made by `make expected` from `bench/expected/` and `bench/results/`; do not edit. `python -m bench targets` draws the
same as a page per target.

Everything here is **compiled, not measured**, with no GPU, but for the columns that say *measured*: each backend's best
variant in bf16, at {TOKENS // 1024}k tokens in sequences of {SEQ}, heads x head_dim = {HIDDEN}. `python -m multiattn
compile` makes the same table of any problem."""


def page(recorded: Mapping[str, Record]) -> str:
    """The page, from the record of every target."""
    entries = [entry for record in recorded.values() for entry in record.entries]
    parts = [INTRO, _compilers(recorded)]
    for direction in DIRECTIONS:
        mine = [entry for entry in ordered(entries) if entry.cell.direction == direction]
        parts += [
            f"## {direction.capitalize()}",
            table(mine, short),
            LEGEND,
            f"### Tensor cores and loads, {direction}",
            table([entry for entry in mine if entry.cell.head_dim == WIDEST_COMMON], machinery),
            f"At D={WIDEST_COMMON}. MMAs: the instruction that most of the work is in, and which generation it is of.",
            f"### Instructions of the hot loops for each of the tensor core's, {direction}",
            table([entry for entry in mine if entry.cell.head_dim == WIDEST_COMMON], ratios),
            "All others / FP32 and integer / ex2 / its own FLOP. One wgmma does the work of many mma.sync.",
        ]
    parts += listed(entries)
    parts += ["## What each device could reach", ROOFLINE, ceilings(measured())]
    return "\n\n".join(parts) + "\n"


WIDEST_COMMON = 128

ROOFLINE = f"""TFLOPS that no kernel passes at the clock of the stated peak: the tensor cores, the special-function
units (one ex2 a score) or device memory are busy that long; what binds is named where it is not the tensor cores.
`multiattn/roofline.py` has the formulas, `python -m multiattn roofline` any problem. *Measured*: the best of ours in
`bench/results/`, and its share of the ceiling; a dash where nobody has measured on such a device. bf16,
{TOKENS // 1024}k tokens, heads x head_dim = {HIDDEN}."""


def table(entries: Sequence[Entry], show: Any, *, form: str = "github") -> str:
    """A row per backend, head_dim and mask, a column per target."""
    arches = [arch for arch in GPU_ARCHS if any(entry.cell.arch == arch for entry in entries)]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for entry in entries:
        cell = entry.cell
        rows.setdefault((cell.backend, str(cell.head_dim), cell.mask), {})[cell.arch] = (
            show(entry) if entry.ok else short(entry)
        )
    body = [(*key, *(found.get(arch, "-") for arch in arches)) for key, found in rows.items()]
    return tabulate(body, headers=("backend", "D", "mask", *arches), tablefmt=form, disable_numparse=True)


def machinery(entry: Entry) -> str:
    """The MMA that most of a kernel's work is in, and how it loads."""
    return describe_machinery(entry.main)


def describe_machinery(kernel: Facts) -> str:
    """The same of one kernel."""
    loads = ", ".join(name for name in ("TMA load", "cp.async") if name in kernel.features)
    return f"{kernel.main_mma or 'no tensor core'}, {loads or 'plain loads'}"


def ratios(entry: Entry) -> str:
    """What `tables.ratios` says of the kernel that most of the work is in."""
    return tables.ratios(entry.main.hot)


def ceilings(measurements: Sequence[Measurement]) -> str:
    """A row per device, direction, head_dim and mask; a pair of columns per length."""
    headers = ["device", "arch", "direction", "D", "mask"]
    for seq in SEQS:
        headers += [f"N={seq}", "measured"]
    body = []
    for gpu in GPUS:
        for direction in DIRECTIONS:
            for head_dim in HEAD_DIMS:
                for mask in MASKS:
                    cells = [ceiling_cells(gpu, direction, head_dim, mask, seq, measurements) for seq in SEQS]
                    body.append((gpu.name, gpu.arch, direction, head_dim, mask, *(it for pair in cells for it in pair)))
    return tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)


def ceiling_cells(
    gpu: Any, direction: Direction, head_dim: int, mask: str, seq: int, measurements: Sequence[Measurement]
) -> tuple[str, str]:
    """The ceiling with what binds, and the best of ours with its share of it."""
    problem = matrix_problem(head_dim, mask, seq)
    roof = bounds(problem, gpu, direction)
    binds = "" if roof.bound_by == "tensor" else f" {roof.bound_by}"
    best = best_measured(measurements, problem, gpu, direction)
    share = "-" if best is None else f"{best.tflops:.0f} {best.contender}, {100 * best.tflops / roof.tflops:.0f} %"
    return f"{roof.tflops:.0f}{binds}", share


def matrix_problem(head_dim: int, mask: str, seq: int) -> Problem:
    """A cell of the matrix: 16k tokens, heads * head_dim = 2048, bf16."""
    heads, causal = HIDDEN // head_dim, mask == "causal"
    return Problem.contiguous(batch=TOKENS // seq, heads_q=heads, seq_q=seq, head_dim=head_dim, causal=causal)


def measured() -> tuple[Measurement, ...]:
    """Every timing of ours on record."""
    return read_results(result_files())


def result_files() -> list[Path]:
    """The suites on record that time the matrix, each cell in one run: rows of two runs are not to be compared."""
    return sorted(path for path in results_root().glob("*/*.json") if path.stem in ("standard", "backward"))


def _compilers(recorded: Mapping[str, Record]) -> str:
    lines = [
        f"{name}: {', '.join(dict.fromkeys(record.compilers[name] for record in recorded.values()))}"
        for name in BACKENDS
    ]
    return f"Compilers: {'; '.join(lines)}."
