"""Choice of tile as data: a table of `Rule`s, the first that fits a problem on an arch gives the config.

A rule carries its evidence. There is no catch-all row: an arch without a rule is unsupported until it gets one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from multiattn.arch import Arch
from multiattn.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Launch parameters every backend has; each backend adds its own (stages, warps, occupancy).

    `tile_m` is queries and `tile_n` keys per block, both in rows.
    """

    tile_m: int
    tile_n: int

    def __str__(self) -> str:
        """Every field that is not at its default."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return " ".join(f"{field.name}={value}" for field, value in values if value != field.default)


C = TypeVar("C", bound=Config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(Generic[C]):
    """Where a config applies, and why: GPU, date, shape, alternative; or that it is a guess."""

    arches: tuple[str, ...]
    config: C
    why: str
    head_dim_min: int = 1
    head_dim_max: int = 256
    causal: bool | None = None

    def reject(self, problem: Problem, arch: Arch) -> str | None:
        """Why this rule does not apply to `problem` on `arch`, or None when it does."""
        if arch.name not in self.arches:
            return f"for {', '.join(self.arches)}"
        if not self.head_dim_min <= problem.head_dim <= self.head_dim_max:
            return f"for D in {self.head_dim_min}..{self.head_dim_max}"
        if self.causal not in (None, problem.causal):
            return "for causal" if self.causal else "for full"
        return None

    def __str__(self) -> str:
        return f"{self.config}: {self.why}"


def select(rules: Sequence[Rule[C]], problem: Problem, arch: Arch) -> Rule[C] | None:
    """The first rule that applies, or None."""
    return next((rule for rule in rules if rule.reject(problem, arch) is None), None)
