"""Ladders of the languages' forward kernels as data: each rung does something that the one below does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Generic, TypeVar

from multiattn.plan import remedies
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config, Rule
from multiattn.plan.support import Capability, Reason
from multiattn.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderStep:
    """The features of a rung: a kernel gets some of them as constants, the others limit the config."""

    exp2: bool = False
    """Weights are powers of two, log2(e) being part of the scale: one multiplication a score less than with e."""
    scale_after_max: bool = False
    """Scale and subtraction of the maximum are one fused multiply-add a score, not a product and a difference."""

    @property
    def ln_base(self) -> float:
        """The natural logarithm of what weights are powers of, 2 or e."""
        return math.log(2.0) if self.exp2 else 1.0

    def limit(self, config: Any) -> Any:
        """The config less what this step does not do."""
        raise NotImplementedError

    def why_not(self, config: Config) -> list[Reason]:
        """A reason for every field of a config that asks for what this step does not do: what is planned is run."""
        limited = self.limit(config)
        return [
            Reason(code="config", got=f"{name}={asked}", allowed=f"{name}={done} in this variant", hint=remedies.CONFIG)
            for name in (field.name for field in fields(config))
            if (asked := getattr(config, name)) != (done := getattr(limited, name))
        ]


StepT = TypeVar("StepT", bound=LadderStep)
ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung(Generic[StepT]):
    """A step, and where in the ladder it stands."""

    parent: str | None
    summary: str
    step: StepT


def rung_variants(
    steps: Mapping[str, Rung[StepT]],
    config_type: type[Config],
    *,
    capability_of: Callable[[StepT], Capability],
    rules_of: Callable[[str], tuple[Rule[Any], ...]],
    fits: Callable[[Problem, Arch, Any], tuple[Reason, ...]],
    workspace: Callable[[Problem, Config | None], int] = lambda problem, config: 0,
) -> tuple[Variant, ...]:
    """The Variant of each rung. One that leads to another is selected only by name.

    Args:
        steps: the rungs by name.
        config_type: of the configs of all rungs.
        capability_of: what a step accepts.
        rules_of: the rules of a rung, by its name.
        fits: as `Variant.fits`, whatever the rung; so is `workspace`.
    """

    def variant(name: str, rung: Rung[StepT]) -> Variant:
        return Variant(
            name=name,
            summary=rung.summary,
            capability=capability_of(rung.step),
            config_type=config_type,
            rules=rules_of(name),
            flags=tuple(asdict(rung.step).items()),
            parent=rung.parent,
            workspace=workspace,
            only_named=any(other.parent == name for other in steps.values()),
            fits=lambda problem, arch, config: (*fits(problem, arch, config), *rung.step.why_not(config)),
        )

    return tuple(variant(name, rung) for name, rung in steps.items())


def rung_rules(
    own: Mapping[str, tuple[Rule[ConfigT], ...]], name: str, step: LadderStep, *, top: str
) -> tuple[Rule[ConfigT], ...]:
    """The rules of a rung: its own, then those of the `top` of its ladder, less what its step does not do."""
    mine = own.get(name, ())
    rest = (rule for rule in own[top] if name != top and not any(it.covers(rule) for it in mine))
    limited = (replace(rule, config=step.limit(rule.config), why=f"not swept, as {top}: {rule.why}") for rule in rest)
    return (*mine, *limited)
