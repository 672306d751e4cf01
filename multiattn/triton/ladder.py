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
    """k and v come through TMA descriptors where the config says so: one thread asks for a tile, no registers hold
    addresses."""
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
            descriptors=config.descriptors and self.descriptor,
        )


_MATH = TritonStep(exp2=True, scale_after_max=True)
_MEMORY = replace(_MATH, pipelined=True, descriptor=True)

STEPS: Mapping[str, Rung[TritonStep]] = {
    "full": Rung(
        parent="memory",
        summary="one reciprocal a row, heads share the L2 cache, more blocks by a cap on registers",
        step=replace(_MEMORY, reciprocal=True, heads_together=True, registers=True),
    ),
    "memory": Rung(
        parent="math",
        summary="k and v through TMA descriptors where there are any, pipelined: loads hide behind the products",
        step=_MEMORY,
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
