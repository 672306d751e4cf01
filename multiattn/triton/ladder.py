"""The ladder of the forward kernel as data: what each rung does that the one below does not. Imports no Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from multiattn.plan.support import Reason
from multiattn.triton.configs import TritonConfig

GROUPS: Mapping[str, tuple[str, ...]] = {
    "math": ("exp2", "scale_after_max"),
    "memory": ("descriptor", "pipelined"),
    "finish": ("reciprocal", "heads_together", "registers"),
}
"""Fields of `TritonStep` by what they save: between a rung and its parent, fields of one group differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonStep:
    """The features of a rung. The kernel gets them whole, as a constant; those it does not test limit the config."""

    exp2: bool = False
    """Weights are powers of two, log2(e) being part of the scale: one multiplication a score less than with e."""
    scale_after_max: bool = False
    """Scale and subtraction of the maximum are one fused multiply-add a score, not a product and a difference."""
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

    @property
    def ln_base(self) -> float:
        """The natural logarithm of what weights are powers of, 2 or e."""
        return math.log(2.0) if self.exp2 else 1.0

    def limit(self, config: TritonConfig) -> TritonConfig:
        """The config less what this step does not do."""
        return replace(
            config,
            num_stages=config.num_stages if self.pipelined else 1,
            heads_together=config.heads_together if self.heads_together else 1,
            registers=config.registers if self.registers else None,
        )

    def why_not(self, config: TritonConfig) -> list[Reason]:
        """A reason for every field of a config that asks for what this step does not do: what is planned is run."""
        limited = self.limit(config)
        return [
            Reason(code="config", got=f"{name}={asked}", allowed=f"{name}={done} in this variant")
            for name in (field.name for field in fields(config))
            if (asked := getattr(config, name)) != (done := getattr(limited, name))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonRung:
    """A step, and where in the ladder it stands."""

    parent: str | None
    summary: str
    step: TritonStep


_MATH = TritonStep(exp2=True, scale_after_max=True)
_POINTER_MEMORY = replace(_MATH, pipelined=True)
_MEMORY = replace(_POINTER_MEMORY, descriptor=True)
_POINTER_FULL, _FULL = (
    replace(step, reciprocal=True, heads_together=True, registers=True) for step in (_POINTER_MEMORY, _MEMORY)
)

STEPS: Mapping[str, TritonRung] = {
    "full": TritonRung(
        parent="memory",
        summary="TMA descriptors; one reciprocal a row, heads share the L2 cache, more blocks by a cap on registers",
        step=_FULL,
    ),
    "pointer_full": TritonRung(
        parent="pointer_memory",
        summary="pointers (any stride, any alignment); one reciprocal a row, heads share the L2 cache",
        step=_POINTER_FULL,
    ),
    "memory": TritonRung(
        parent="math",
        summary="k and v through TMA descriptors, pipelined: loads hide behind products and need no address registers",
        step=_MEMORY,
    ),
    "pointer_memory": TritonRung(
        parent="math",
        summary="k and v through pointers, pipelined: loads hide behind the products",
        step=_POINTER_MEMORY,
    ),
    "math": TritonRung(
        parent="basic",
        summary="exp2 of one multiply-add a score: log2(e) is in the scale, which is applied after the row's maximum",
        step=_MATH,
    ),
    "basic": TritonRung(
        parent=None,
        summary="FlashAttention-2 as written: natural exp, no loads in flight, IEEE division",
        step=TritonStep(),
    ),
}
"""Every rung by name. First come those that a caller gets without naming one: they are nobody's parent."""
