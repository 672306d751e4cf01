"""The candidates of a problem: variants that may run it, with their rules' configs and with others worth timing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import (
    Backend,
    Direction,
    Plan,
    TunedChoice,
    Variant,
    find_variant,
    make_plan,
    plan_variant,
)
from multiattn.plan.config import Config, select
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to run a problem; `config` None is that of the variant's rule."""

    backend: str
    variant: str
    config: Config | None
    problem: Problem
    arch: Arch
    direction: Direction

    @property
    def name(self) -> str:
        """``cuda/wgmma``, and a config that is not the rule's."""
        of_rule = f"{self.backend}/{self.variant}"
        return of_rule if self.config is None else f"{of_rule} {self.config}"

    def plan(self, problem: Problem | None = None) -> Plan | tuple[Reason, ...]:
        """The Plan, of its own problem or of another, or every reason why there is none."""
        backend = registry.get(self.backend)
        variant = find_variant(backend, self.variant, self.direction)
        return plan_variant(backend, variant, problem or self.problem, self.arch, self.config, direction=self.direction)


def configs_of(
    backend: Backend, variant: Variant, problem: Problem, arch: Arch, direction: Direction
) -> list[Config | None]:
    """None, for the rule's own config, and every other one that is worth timing."""
    own = plan_variant(backend, variant, problem, arch, direction=direction)
    configs = dict.fromkeys(backend.op(direction).candidates(variant, problem, arch))
    return [None, *(it for it in configs if not isinstance(own, Plan) or it != own.config)]


def bundled_choice(backend: Backend, problem: Problem, arch: Arch, direction: Direction) -> str | None:
    """The variant that the package's own rules choose; None where none can run the problem."""
    try:
        return make_plan(backend, problem, arch, direction=direction, probe=False).variant
    except Unsupported:
        return None


def candidates_of(
    name: str,
    problem: Problem,
    arch: Arch,
    direction: Direction,
    *,
    variants: Sequence[str] = (),
    most: int | None,
    known: Sequence[TunedChoice] = (),
) -> list[Candidate]:
    """The candidates of one backend, those first that its rules choose, then the nearest to them.

    All variants that may run the problem come with their rules' configs. Other configs are those of `variants`, or of
    the variant that the rules choose: at most `most`. With `most` None they are all, of every variant if `variants` is
    empty. `known` was best before: a shorter sweep does not lose it.
    """
    backend = registry.get(name)
    candidate = functools.partial(Candidate, backend=name, problem=problem, arch=arch, direction=direction)
    chosen = bundled_choice(backend, problem, arch, direction)
    first: list[Candidate] = []
    others: list[list[Candidate]] = []
    for variant in backend.op(direction).offered:
        if variants and variant.name not in variants and variant.name != chosen:
            continue
        configs = configs_of(backend, variant, problem, arch, direction)
        tried = [candidate(variant=variant.name, config=it) for it in configs]
        able = [it for it in tried if isinstance(it.plan(), Plan)]
        first += [it for it in able if it.config is None]
        more = [it for it in able if it.config is not None]
        if variant.name in (variants or (chosen,)) or (most is None and not variants):
            rule, _ = select(variant.rules, problem, arch) if variant.rules else (None, ())
            others.append(_nearest_first(more, None if rule is None else rule.config))
    first.sort(key=lambda it: it.variant != chosen)
    before = [
        candidate(variant=it.variant, config=it.config)
        for it in known
        if it.config is not None and (not variants or it.variant in variants)
    ]
    able = [it for it in before if isinstance(it.plan(), Plan)]
    return list(dict.fromkeys([*first, *able, *in_turn(others)[:most]]))


def _nearest_first(found: Sequence[Candidate], rule: Config | None) -> list[Candidate]:
    """By the number of fields in which a config differs from the rule's."""
    if rule is None:
        return list(found)
    own = _flat(rule)

    def changes(it: Candidate) -> int:
        other = _flat(it.config)
        return sum(own.get(name) != other.get(name) for name in own.keys() | other.keys())

    return sorted(found, key=changes)


def _flat(config: Config | None) -> dict[str, Any]:
    fields = {} if config is None else asdict(config)
    return {
        f"{name}.{inner}": its
        for name, value in fields.items()
        for inner, its in (value.items() if isinstance(value, dict) else (("", value),))
    }


def in_turn(lists: Iterable[Sequence[Candidate]]) -> list[Candidate]:
    """The first of each, then the second of each, and so on: whatever comes first of them is fair to all."""
    return [it for row in itertools.zip_longest(*lists) for it in row if it is not None]
