"""The ladder of the forward kernel as data: what each rung does that the one below does not. Imports no cuTile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from multiattn.cutile.configs import CutileConfig
from multiattn.plan.ladder import LadderStep, Rung


@dataclass(frozen=True, kw_only=True, slots=True)
class CutileStep(LadderStep):
    """A rung's flags. Some are constants of the kernel, by the same name; the rest limit the config."""

    flush_to_zero: bool = False
    """exp2 takes a subnormal number for zero: one instruction, with no scaling around it."""
    k_transposed: bool = False
    """K comes transposed out of memory, by the order of its load: no tile is turned around in registers."""
    latency_hints: bool = False
    """The config's latencies of k and v: how far ahead their loads are issued, to hide behind the products."""
    approximate_division: bool = False
    """A multiplication by an approximate reciprocal, flushing to zero; else an IEEE division an element."""
    occupancy_hint: bool = False
    """The config's blocks per SM, for which the compiler saves registers and shared memory."""
    lazy_max: bool = False
    """The config's lazy_max, and its pipeline, which needs that."""
    static_grid: bool = False
    """The config's scheduler: blocks may take tile after tile."""
    q_in_registers: bool = False
    """The config's q_in_registers."""

    def limit(self, config: CutileConfig) -> CutileConfig:
        """The config less what this step does not do."""
        return replace(
            config,
            k_latency=config.k_latency if self.latency_hints else None,
            v_latency=config.v_latency if self.latency_hints else None,
            occupancy=config.occupancy if self.occupancy_hint else None,
            lazy_max=config.lazy_max and self.lazy_max,
            pipeline=config.pipeline if self.lazy_max else "plain",
            scheduler=config.scheduler if self.static_grid else "one_tile",
            q_in_registers=config.q_in_registers and self.q_in_registers,
        )


_MATH = CutileStep(exp2=True, flush_to_zero=True, scale_after_max=True)
_MEMORY = replace(_MATH, k_transposed=True, latency_hints=True)
_FULL = replace(
    _MEMORY, approximate_division=True, occupancy_hint=True, lazy_max=True, static_grid=True, q_in_registers=True
)

STEPS: Mapping[str, Rung[CutileStep]] = {
    "full": Rung(
        parent="memory",
        summary="approximate division, lazy maxima, grid and blocks per SM as measured; tileiras picks how to load",
        step=_FULL,
    ),
    "memory": Rung(
        parent="math",
        summary="K loaded transposed, k and v as far ahead as their latencies say: loads hide behind the products",
        step=_MEMORY,
    ),
    "math": Rung(
        parent="basic",
        summary="exp2 of one multiply-add a score: log2(e) is in the scale, which is applied after the row's maximum",
        step=_MATH,
    ),
    "basic": Rung(
        parent=None,
        summary="FlashAttention-2 as written: natural exp, K transposed in registers, IEEE division, no hints",
        step=CutileStep(),
    ),
}
"""Every rung by name. Those that need no naming come first: no other rung has them as its parent."""
