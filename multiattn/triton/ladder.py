"""The ladder of the forward kernel as data: what each rung does that the one below does not. Imports no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from multiattn.plan.ladder import LadderStep, Rung


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonStep(LadderStep):
    """The features of a rung. The kernel gets them whole, as a constant; those it does not test limit the config."""

    descriptor: bool = False
    """k and v come through TMA descriptors: one thread asks for a tile, no registers hold addresses."""
    pipelined: bool = False
    """As many blocks of keys in flight as the config has stages: loads hide behind the products."""
    reciprocal: bool = False
    """One approximate reciprocal a row, and a product an element; else an IEEE division an element."""
    heads_together: bool = False
    """Tiles of the config's number of heads alternate in launch order: short masked ones fill the tail."""
    registers: bool = False
    """The config's limit to the registers of a thread: more blocks on an SM."""

    def limit(self, config: Any) -> Any:
        """The config less what this step does not do."""
        return replace(
            config,
            stages=config.stages if self.pipelined else 1,
            heads_together=config.heads_together if self.heads_together else 1,
            registers=config.registers if self.registers else None,
        )


_MATH = TritonStep(exp2=True, scale_after_max=True)
_POINTER_MEMORY = replace(_MATH, pipelined=True)
_MEMORY = replace(_POINTER_MEMORY, descriptor=True)
_POINTER_FULL, _FULL = (
    replace(step, reciprocal=True, heads_together=True, registers=True) for step in (_POINTER_MEMORY, _MEMORY)
)

STEPS: Mapping[str, Rung[TritonStep]] = {
    "full": Rung(
        parent="memory",
        summary="TMA descriptors; one reciprocal a row, heads share the L2 cache, more blocks by a cap on registers",
        step=_FULL,
    ),
    "pointer_full": Rung(
        parent="pointer_memory",
        summary="pointers (any stride, any alignment); one reciprocal a row, heads share the L2 cache",
        step=_POINTER_FULL,
    ),
    "memory": Rung(
        parent="math",
        summary="k and v through TMA descriptors, pipelined: loads hide behind products and need no address registers",
        step=_MEMORY,
    ),
    "pointer_memory": Rung(
        parent="math",
        summary="k and v through pointers, pipelined: loads hide behind the products",
        step=_POINTER_MEMORY,
    ),
    "math": Rung(
        parent="basic",
        summary="exp2 of one multiply-add a score: log2(e) is in the scale, which is applied after the row's maximum",
        step=_MATH,
    ),
    "basic": Rung(
        parent=None,
        summary="FlashAttention-2 as written: natural exp, no loads in flight, IEEE division",
        step=TritonStep(),
    ),
}
"""Every rung by name. Those that need no naming come first: no other rung has them as its parent."""
