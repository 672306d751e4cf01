"""A compile table as text: one cell of it per target, or one line per kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multiattn.inspect.build import Compilation, ordered
from multiattn.inspect.facts import Facts
from multiattn.inspect.mix import EX2, Counts
from multiattn.inspect.options import table
from multiattn.plan.arch import GPU_ARCHS

LEGEND = (
    "Registers of a thread and the share of the warps that an SM can hold, for the kernel with most of the work. "
    "+spills: loads and stores of local memory in the hot loops of all kernels of a launch. r: refused, e: error, "
    "listed below."
)


def short(entry: Compilation) -> str:
    """The text of a table's cell."""
    if not entry.ok:
        return "r" if entry.reasons else "e"
    kernel, spilled = entry.main, sum(it.hot_spills for it in entry.kernels)
    spills = f" +{spilled}" if spilled else ""
    return f"{kernel.registers}{spills} {percent(kernel.share)}"


def percent(share: float) -> str:
    """A share of a whole, with a decimal where it has one."""
    return f"{round(100 * share, 1):g}%"


def text_table(entries: Sequence[Compilation]) -> str:
    """A row per direction, backend, variant and problem, a column per target; then what is missing."""
    arches = [arch for arch in GPU_ARCHS if any(entry.request.arch == arch for entry in entries)]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for entry in ordered(entries):
        it = entry.request
        rows.setdefault((it.direction, it.backend, it.variant or "best", it.what), {})[it.arch] = short(entry)
    body = [(*key, *(found.get(arch, "-") for arch in arches)) for key, found in rows.items()]
    legend = [LEGEND] if any(entry.ok for entry in entries) else []
    drawn = table(body, ("direction", "backend", "variant", "problem", *arches))
    return "\n\n".join([drawn, *legend, *listed(entries)])


def listed(entries: Sequence[Compilation]) -> list[str]:
    """Each distinct reason or error, with the requests that it refused."""
    found: dict[str, list[str]] = {}
    for entry in ordered(entries):
        if not entry.ok:
            found.setdefault(("error: " if entry.error else "") + entry.text, []).append(str(entry.request))
    return ["\n".join(f"- {text} [{', '.join(whose)}]" for text, whose in found.items())] if found else []


def detailed(entries: Sequence[Compilation]) -> str:
    """A line per kernel."""
    rows = [_details(entry, kernel) for entry in ordered(entries) for kernel in entry.kernels]
    return "\n\n".join([table([tuple(row.values()) for row in rows], tuple(rows[0])) if rows else "", *listed(entries)])


def _details(entry: Compilation, kernel: Facts) -> dict[str, Any]:
    return {
        "backend": entry.request.backend,
        "arch": entry.request.arch,
        "problem": f"{entry.request.direction} {entry.request.what}",
        "variant": entry.variant,
        "config": entry.config,
        "kernel": kernel.name,
        "threads": kernel.threads,
        "registers": kernel.registers,
        "spills": f"{kernel.hot_spills} + {kernel.other_spills}",
        "stack [B]": kernel.stack_bytes,
        "smem [B]": f"{kernel.static_smem_bytes} + {kernel.dynamic_smem_bytes}",
        "blocks": f"{kernel.blocks}, {kernel.limiter}",
        "warps": percent(kernel.share),
        "code [B]": kernel.code_bytes,
        "MMA": kernel.main_mma or "none",
        "others / ALU / ex2 / FLOP per MMA": ratios(kernel.hot),
        "seconds": f"{kernel.seconds:.2f}",
    }


def ratios(hot: Counts) -> str:
    """For each matrix multiplication of the hot loops: other instructions, of these FP32 and integer, ex2; its FLOP.

    A dash for what is not known: tcgen05's instructions do not name their shape.
    """
    values = (hot.per_tensor(), hot.per_tensor("FP32", "INT"), hot.per_tensor(EX2))
    flop = hot.flop_per_tensor
    return " / ".join([*("-" if it is None else f"{it:.1f}" for it in values), "-" if flop is None else f"{flop:.0f}"])
