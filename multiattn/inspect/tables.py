"""A compile table as text: one cell of it per target, one line per kernel on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from multiattn.inspect.build import Entry, ordered
from multiattn.inspect.facts import Facts
from multiattn.inspect.mix import Counts
from multiattn.plan.arch import GPU_ARCHS
from multiattn.plan.backend import DIRECTIONS

LEGEND = (
    "Registers a thread and the share of the warps that an SM can hold, of the kernel with most of the work; +spills: "
    "loads and stores of local memory in the hot loops of all kernels of a launch; r: refused, e: error, listed below."
)
DETAILS = (
    "backend",
    "arch",
    "problem",
    "variant",
    "config",
    "kernel",
    "threads",
    "registers",
    "spills",
    "stack [B]",
    "smem [B]",
    "blocks",
    "warps",
    "code [B]",
    "MMA",
    "others / ALU / ex2 / FLOP per MMA",
    "seconds",
)


def short(entry: Entry) -> str:
    """What stands in a table's cell."""
    if not entry.ok:
        return "r" if entry.reasons else "e"
    kernel, spilled = entry.main, sum(it.hot_spills for it in entry.kernels)
    spills = f" +{spilled}" if spilled else ""
    return f"{kernel.registers}{spills} {percent(kernel.share)}"


def percent(share: float) -> str:
    """A share of a whole, with a decimal where it has one."""
    return f"{round(100 * share, 1):g}%"


def text_table(entries: Sequence[Entry], *, form: str = "simple") -> str:
    """A row per backend, head_dim and mask, a column per target, a table per direction; then what is not there."""
    parts = []
    for direction in DIRECTIONS:
        mine = [entry for entry in ordered(entries) if entry.cell.direction == direction]
        if mine:
            parts += [f"{direction.capitalize()}", _pivot(mine, form)]
    if any(entry.ok for entry in entries):
        parts.append(LEGEND)
    return "\n\n".join([*parts, *listed(entries)])


def _pivot(entries: Sequence[Entry], form: str) -> str:
    arches = [arch for arch in GPU_ARCHS if any(entry.cell.arch == arch for entry in entries)]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for entry in entries:
        cell = entry.cell
        rows.setdefault((cell.backend, cell.variant or "best", cell.what), {})[cell.arch] = short(entry)
    body = [(*key, *(found.get(arch, "-") for arch in arches)) for key, found in rows.items()]
    return tabulated(body, ("backend", "variant", "problem", *arches), form)


def listed(entries: Sequence[Entry]) -> list[str]:
    """Each distinct reason or error, with the cells that it is of."""
    found: dict[str, list[str]] = {}
    for entry in ordered(entries):
        if not entry.ok:
            found.setdefault(("error: " if entry.error else "") + entry.text, []).append(str(entry.cell))
    return ["\n".join(f"- {text} [{', '.join(cells)}]" for text, cells in found.items())] if found else []


def detailed(entries: Sequence[Entry], *, form: str = "simple") -> str:
    """A line per kernel."""
    body = [_details(entry, kernel) for entry in ordered(entries) for kernel in entry.kernels]
    return "\n\n".join([tabulated(body, DETAILS, form), *listed(entries)])


def _details(entry: Entry, kernel: Facts) -> tuple[Any, ...]:
    cell = entry.cell
    return (
        cell.backend,
        cell.arch,
        f"{cell.direction} {cell.what}",
        entry.variant,
        entry.config,
        kernel.name,
        kernel.threads,
        kernel.registers,
        f"{kernel.hot_spills} + {kernel.other_spills}",
        kernel.stack_bytes,
        f"{kernel.static_smem_bytes} + {kernel.dynamic_smem_bytes}",
        f"{kernel.blocks}, {kernel.limiter}",
        percent(kernel.share),
        kernel.code_bytes,
        kernel.main_mma or "none",
        ratios(kernel.hot),
        f"{kernel.seconds:.2f}",
    )


def ratios(hot: Counts) -> str:
    """For each matrix multiplication of the hot loops: other instructions, of these FP32 and integer, ex2; its FLOP.

    A dash for what is not known: tcgen05's instructions do not name their shape.
    """
    values = (hot.others_per_tensor, hot.alu_per_tensor, hot.ex2_per_tensor)
    flop = hot.flop_per_tensor
    return " / ".join([*("-" if it is None else f"{it:.1f}" for it in values), "-" if flop is None else f"{flop:.0f}"])


def tabulated(body: Sequence[Sequence[Any]], headers: Sequence[str], form: str) -> str:
    """The rows as a table: tabulate's, or plain columns where the report extra is not installed."""
    draw: Callable[..., str]
    try:
        from tabulate import tabulate as draw
    except ImportError:
        return "\n".join("  ".join(map(str, row)) for row in [headers, *body])
    return draw(body, headers=headers, tablefmt=form, disable_numparse=True)
