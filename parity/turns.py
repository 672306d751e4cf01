"""The turns of cases on a CPU: a variant with a config, dealt out so that each of them meets each kind of case.

A `Way` is a variant with one of its configs: those of its rules for any arch, those that a sweep would try, and both
with tiles so small that a case has several. A case goes the way that it shows most of: pairs of a kind of case (a mask,
a layout) and a choice of a way (a variant, a tile, a flag), and pairs of two choices. What the first turns of all cases
have not shown, a second turn of some case shows.

Nothing is drawn: a deal is the same on every machine.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from multiattn.block_mask import BlockSpec
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, CPU
from multiattn.plan.backend import Backend, Direction, Plan, Variant, find_variant, plan_variant
from multiattn.plan.config import Config
from multiattn.problem import Problem
from multiattn.triton import GLUON_VARIANTS
from parity.case import Case
from parity.kinds import code_kinds_of, elements_of, is_slow, kinds_of

SWEPT = tuple(ARCHS[name] for name in ("sm80", "sm90", "sm100"))
"""Arches whose sweeps, together, try all that is tried anywhere."""
SIZES = tuple(
    Problem.contiguous(batch=2, heads_q=8, heads_kv=2, seq_q=1000, head_dim=head_dim, causal=causal)
    for head_dim in (64, 72, 104, 128, 192, 256, 512)
    for causal in (False, True)
)
"""Problems that sweeps are asked for."""
LISTED = tuple(
    replace(it, blocks=BlockSpec(64, 64, has_full=False), lists=((2, 8, 16), (2, 8, 16, 16)) * 2) for it in SIZES[::2]
)
"""As some of them, with a block mask. A config that fits none of all is no way."""
SMALL: Mapping[str, tuple[int, int]] = {
    "tile_m": (2, 16),
    "tile_n": (2, 16),
    "heads_together": (4, 3),
    "stages": (2, 3),
    "stream_k": (32, 5),
}
"""Ends of the names of fields that a small way has divided by the first number, but no less than the second."""
SMALLER = (tuple(SMALL), ("tile_n", "stages", "heads_together"), ("heads_together", "stream_k"))
"""Fields that small ways change together: some kernels have tiles of one size."""
UNSEEN = ("warps", "latency", "registers", "occupancy", "blocks_per_sm", "stages")
"""Ends of the names of fields that interpreters of tiles do not look at."""
FEW = 3
"""An integer with so many values at most is a choice, like a flag."""
QUICK = GLUON_VARIANTS
"""Variants that a CPU runs as quickly with any head_dim."""
TRIED = 24
"""Cases of a kind, the cheapest, that a choice which is still to be seen with it is tried on."""
SHORT = 64
"""Cases of fewer keys take a further turn only where there is no other."""
ANY = "any case"
"""The kind of all cases."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Way:
    """A variant with a config, None for that of its rule."""

    variant: Variant
    config: Config | None
    choices: frozenset[str]
    """The variant, and the fields of the config that are choices, each with its value."""
    numbers: frozenset[str] = frozenset()
    """The other fields with their values, of which each need be seen once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """The plans of each case: its turns, first to last."""

    by_day: Mapping[str, tuple[Plan, ...]]
    at_night: Mapping[str, tuple[Plan, ...]]
    """The turns of cases that have none by day."""
    shown: Mapping[str, frozenset[str]]
    """The kinds of cases, and the other choices, that each choice was seen with."""
    missing: frozenset[str]
    """Choices and numbers that no case has."""

    def plan(self, case: Case, turn: int) -> Plan | None:
        """The plan of a turn, by day or at night; None where the case has none."""
        plans = self.by_day.get(case.name) or self.at_night.get(case.name, ())
        return plans[turn] if turn < len(plans) else None

    @property
    def turns(self) -> int:
        """The most turns of a case."""
        return max(map(len, self.by_day.values()), default=1)


def deal(name: str, direction: Direction, cases: Sequence[tuple[Case, Problem]]) -> Deal:
    """Deal the cases among the ways of a backend."""
    dealer = _Dealer(registry.get(name), direction)
    by_day = dealer.take_more(cases, dealer.take_all(cases, is_day=True))
    rest = [it for it in cases if it[0].name not in by_day]
    return Deal(
        by_day=by_day,
        at_night=dealer.take_all(rest, is_day=False),
        shown={name: dealer.names_of(bits) for name, bits in dealer.shown.items()},
        missing=frozenset(it for way in dealer.ways for it in (*way.choices, *way.numbers) if not dealer.shown[it]),
    )


class _Dealer:
    """Deals cases, and keeps what each choice was seen with: kinds of cases and other choices, a bit each."""

    def __init__(self, backend: Backend, direction: Direction) -> None:
        self.backend, self.direction = backend, direction
        self.ways = [*ways_of(backend, direction)]
        self.shown: dict[str, int] = defaultdict(int)
        self._bits: dict[str, int] = {}
        self._choices = {way: self._bits_of(way.choices) for way in self.ways}
        self._plans: dict[tuple[str, Way], Plan | None] = {}

    def take_all(self, cases: Sequence[tuple[Case, Problem]], *, is_day: bool) -> dict[str, tuple[Plan, ...]]:
        """A turn of each case that can go any way."""
        taken = {it.name: self._take(it, problem, self._open(it) if is_day else self.ways) for it, problem in cases}
        return {name: (plan,) for name, plan in taken.items() if plan is not None}

    def take_more(
        self, cases: Sequence[tuple[Case, Problem]], taken: Mapping[str, tuple[Plan, ...]]
    ) -> dict[str, tuple[Plan, ...]]:
        """With further turns of the cheapest cases that show what has not been shown."""
        turns = dict(taken)
        of_kind: dict[str, list[tuple[Case, Problem]]] = defaultdict(list)
        for case, problem in sorted(cases, key=lambda it: (it[0].lengths[2] < SHORT, elements_of(it[0]))):
            for kind in (ANY, *code_kinds_of(case)) if case.name in taken else ():
                of_kind[kind].append((case, problem))
        choices = sorted({it for way in self.ways for it in way.choices if "tile_" not in it})
        numbers = sorted({it for way in self.ways for it in (*way.numbers, *way.choices)} - {*choices})
        for value, kind in (*itertools.product(choices, sorted(of_kind)), *((it, ANY) for it in numbers)):
            for case, problem in sorted(of_kind[kind], key=lambda it: len(turns[it[0].name]))[:TRIED]:
                if self.shown[value] & self._bits_of([kind]):
                    break
                plan = self._take(case, problem, [it for it in self._open(case) if value in it.choices | it.numbers])
                turns[case.name] = (*turns[case.name], *(() if plan is None else (plan,)))
        return turns

    def names_of(self, bits: int) -> frozenset[str]:
        """The kinds and choices that bits stand for."""
        return frozenset(name for name, bit in self._bits.items() if bits & bit)

    def _open(self, case: Case) -> list[Way]:
        """The ways that a case may go by day."""
        if case.nightly:
            return []
        if is_slow(case) and self.backend.name != "cutile":
            return [way for way in self.ways if way.variant.name in QUICK]
        return self.ways

    def _take(self, case: Case, problem: Problem, ways: Iterable[Way]) -> Plan | None:
        """The plan of the way that the case shows most of; None where it can go none."""
        bits = self._bits_of((ANY, *kinds_of(case)))
        for way in sorted(ways, key=lambda it: -self._gain(it, bits)):
            if (plan := self._plan(case, problem, way)) is not None:
                for it in (*way.choices, *way.numbers):
                    self.shown[it] |= bits | self._choices[way]
                return plan
        return None

    def _gain(self, way: Way, bits: int) -> int:
        bits |= self._choices[way]
        pairs = sum((bits & ~self.shown[it]).bit_count() for it in way.choices)
        return pairs + sum(not self.shown[it] for it in way.numbers)

    def _bits_of(self, names: Iterable[str]) -> int:
        bits = 0
        for name in names:
            bits |= self._bits.setdefault(name, 1 << len(self._bits))
        return bits

    def _plan(self, case: Case, problem: Problem, way: Way) -> Plan | None:
        if (case.name, way) not in self._plans:
            found = plan_variant(self.backend, way.variant, problem, CPU, way.config, direction=self.direction)
            able = isinstance(found, Plan) and (way.config is None or _fits(way.variant, problem, way.config))
            self._plans[case.name, way] = found if able else None  # type: ignore[assignment]
        return self._plans[case.name, way]


# ---------------------------------------------------------------- ways


def ways_of(backend: Backend, direction: Direction) -> Iterator[Way]:
    """Ways of all variants that have every pair of choices, and of each variant that of its rule."""
    op = backend.op(direction)
    for name in op.spanning or [it.name for it in op.variants]:
        variant = find_variant(backend, name, direction)
        if CPU.name not in variant.capability.arches:
            continue
        configs: dict[Config, None] = dict.fromkeys(rule.config for rule in variant.rules)
        for problem, arch in itertools.product(SIZES, SWEPT):
            if not variant.capability.why_not(problem, arch):
                configs |= dict.fromkeys(op.candidates(variant, problem, arch))
        configs |= dict.fromkeys(smaller(it, ends) for it, ends in itertools.product([*configs], SMALLER))
        fitting = [it for it in configs if any(_fits(variant, problem, it) for problem in (*SIZES, *LISTED))]
        interpreted = backend.name != "cuda" and name not in QUICK
        yield Way(variant=variant, config=None, choices=frozenset({name}))
        yield from _fewest(_apart(variant, fitting, interpreted=interpreted))


def _fits(variant: Variant, problem: Problem, config: Config) -> bool:
    """True if a GPU and the CPU take it: more shared memory than any GPU has is beyond what addresses reach."""
    arches = (it for it in (*SWEPT[::-1], *ARCHS.values()) if it.is_gpu and it.name in variant.capability.arches)
    config = variant.settle(problem, CPU, config)
    return not variant.fits(problem, CPU, config) and any(not variant.fits(problem, it, config) for it in arches)


def smaller(config: Any, ends: Iterable[str]) -> Any:
    """A config with less of what has these ends of names; it need not be legal."""
    changes = {}
    for name, value in _values(config):
        if is_dataclass(value):
            changes[name] = smaller(value, ends)
        for divisor, least in (SMALL[end] for end in ends if name.endswith(end) and value is not None):
            changes[name] = min(value, max(value // divisor, least))
    return replace(config, **changes)


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    return ((it.name, getattr(config, it.name)) for it in fields(config))


def _flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in _values(config):
        if is_dataclass(value):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _apart(variant: Variant, configs: Sequence[Config], *, interpreted: bool) -> list[Way]:
    """A way of each config; of several that differ in nothing that the CPU looks at, one."""
    seen: dict[str, set[Any]] = defaultdict(set)
    flat = [[it for it in _flat(config) if not (interpreted and it[0].endswith(UNSEEN))] for config in configs]
    for name, value in itertools.chain.from_iterable(flat):
        seen[name].add(value)
    few = {
        name
        for name, all_of in seen.items()
        if "tile_" in name or len(all_of) <= FEW or any(isinstance(it, str) for it in all_of)
    }
    made: dict[frozenset[str], Way] = {}
    for config, values in zip(configs, flat, strict=True):
        named = {it: f"{type(config).__name__}.{it}={value}" for it, value in values}
        choices = frozenset({variant.name, *(text for it, text in named.items() if it in few)})
        numbers = frozenset(text for it, text in named.items() if it not in few)
        made.setdefault(choices | numbers, Way(variant=variant, config=config, choices=choices, numbers=numbers))
    return [*made.values()]


def _fewest(ways: list[Way]) -> Iterator[Way]:
    """Some of those ways, which together have every pair of choices and every number."""
    wanted = {it: _pairs(it) for it in ways}
    left = set().union(*wanted.values())
    while left:
        best = max(wanted, key=lambda it: len(wanted[it] & left))
        left -= wanted[best]
        yield best


def _pairs(way: Way) -> set[object]:
    return {*itertools.combinations(sorted(way.choices), 2), *way.numbers}
