"""Choice of tile as data: a table of `Rule`s, the first that fits a problem on an arch gives the config.

A rule carries its evidence. There is no catch-all row: an arch without a rule is unsupported until it gets one.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

from multiattn.packed import USUAL_LENGTH
from multiattn.plan.arch import Arch
from multiattn.plan.features import Features
from multiattn.plan.waves import Side, Walk
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
        return _words_of(self)

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The kernels that take most of a launch's time; none where nobody has said what they are."""
        return ()

    def busy(self, problem: Problem, arch: Arch) -> float:
        """How busy SMs are where heads take turns, as a share of what they are where all run at a time."""
        return 1.0

    def walk(self, owns: Side, *pieces: float, **more: Any) -> Walk:
        """A kernel with these tiles."""
        rows, step = (self.tile_m, self.tile_n) if owns == "q" else (self.tile_n, self.tile_m)
        return Walk(owns=owns, rows=rows, step=step, pieces=pieces, **more)


@functools.lru_cache(maxsize=1024)
def _words_of(config: Config) -> str:
    values = ((field, getattr(config, field.name)) for field in fields(config))
    return " ".join(f"{field.name}={value}" for field, value in values if value != field.default)


C = TypeVar("C", bound=Config)

SECTOR_BYTES = 32
"""The least that one access reads from device memory."""

COMPILED = "compiled, not measured: "
"""Starts the `why` of a rule that was never timed on its GPUs: only what the compilers say of it is known."""


# ---------------------------------------------------------------- conditions of rules


class Case(NamedTuple):
    """A rule, and the problem, the arch and the call that it may be for."""

    rule: Rule[Any]
    problem: Problem
    arch: Arch
    named: bool
    """The caller asked for the variant by its name."""
    features: Features
    """The features of the problem."""

    @property
    def is_ragged(self) -> bool:
        """True if the last block of keys is not full, or may be."""
        return self.features.keys == "packed" or self.problem.seq_kv % self.rule.config.tile_n != 0

    @property
    def lone_heads(self) -> int:
        """Heads of all sequences, if keys are in no cache and no query heads share them; 0 for named variants."""
        is_lone = self.problem.cache is None and self.problem.group == 1
        return self.problem.batch * self.problem.heads_q if is_lone and not self.named else 0

    def of_all_heads(self, heads: int, length: int) -> int:
        """Queries, or keys, of all heads of all sequences; no limit holds for named variants."""
        return sys.maxsize if self.named else self.problem.batch * heads * length

    def unless_divided(self, number: int) -> int | None:
        """A batch or a length, of which rules may know nothing where a caller says into how many parts keys go."""
        return number if self.problem.asked_splits is None else None


Bound = Any
Fact = Callable[[Case], Any]


class Condition(NamedTuple):
    """How a field of a rule, its bound, is compared with one fact of a case."""

    fact: Fact
    """None where no rule may ask for it."""
    words: Callable[[Rule[Any]], str]
    """The problems that the rule is for."""
    holds: Callable[[Bound, Any], bool]
    covers: Callable[[Bound, Bound], bool]
    """True if the first bound allows all that the second does."""
    absent: Bound = None
    """The bound that allows everything."""

    def why_not(self, bound: Bound, case: Case) -> str | None:
        """The problems that the rule is for, where this one is not among them."""
        if bound == self.absent:
            return None
        if (value := self.fact(case)) is None:
            return "for calls that leave the number of parts to the plan: batches and lengths choose no tiles of others"
        return None if self.holds(bound, value) else self.words(case.rule)


def _field(condition: Condition, **default: Bound) -> Any:
    return field(metadata={CONDITION: condition}, **default)


def _least(fact: Fact, words: Callable[[Rule[Any]], str], *, default: Bound = 0) -> Any:
    """A field that is the least value."""
    return _field(Condition(fact=fact, words=words, holds=operator.le, covers=operator.le, absent=0), default=default)


def _most(fact: Fact, words: Callable[[Rule[Any]], str], *, default: int | None = None) -> Any:
    """A field that is the most that a value may be; None is no limit."""

    def covers(mine: int | None, others: int | None) -> bool:
        return mine is None or (others is not None and others <= mine)

    return _field(Condition(fact=fact, words=words, holds=operator.ge, covers=covers), default=default)


def _only(fact: Fact, words: Callable[[Rule[Any]], str]) -> Any:
    """A field that is the one value; None for all."""

    def covers(mine: Bound, others: Bound) -> bool:
        return mine in (None, others)

    return _field(Condition(fact=fact, words=words, holds=operator.eq, covers=covers), default=None)


def _either(name: str, fact: Fact, yes: str, no: str) -> Any:
    """A field that is True, False, or None for both, with the words of the first two."""
    return _only(fact, lambda rule: yes if getattr(rule, name) else no)


CONDITION = "condition"
"""The key of a field's `Condition` among its metadata."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(Generic[C]):
    """Where a config applies, and why: GPU, date, shape, alternative; or that it is a guess.

    A field with a `Condition` limits the problems that it is for. They are asked in this order.
    """

    arches: tuple[str, ...] = _field(
        Condition(
            fact=lambda it: it.arch.name,
            words=lambda rule: f"for {', '.join(rule.arches)}",
            holds=operator.contains,
            covers=lambda mine, others: set(others) <= set(mine),
        )
    )
    config: C
    why: str
    head_dim_min: int = _least(lambda it: it.problem.width, lambda rule: rule.head_dims, default=1)
    """The least that the wider of head_dim and head_dim_v may be, as `head_dim_max` is the most."""
    head_dim_max: int = _most(lambda it: it.problem.width, lambda rule: rule.head_dims, default=256)
    head_dim_v_max: int | None = _most(
        lambda it: it.features.head_dim_v, lambda rule: f"for values of up to {rule.head_dim_v_max} columns"
    )
    """The most that head_dim_v may be; None is no limit but `head_dim_max`."""
    whole_sectors: bool | None = _only(
        lambda it: has_whole_sectors(
            math.gcd(it.features.head_dim, it.features.head_dim_v), it.problem.torch_dtype.itemsize
        ),
        lambda rule: (
            f"for rows {'of' if rule.whole_sectors else 'other than'} a whole number of {SECTOR_BYTES}-byte sectors"
        ),
    )
    """True for rows of head_dim elements that are whole sectors, False for the others, None for both."""
    ragged: bool | None = _only(
        lambda it: it.is_ragged,
        lambda rule: f"for lengths of keys that {rule.config.tile_n} {'does not divide' if rule.ragged else 'divides'}",
    )
    """For keys whose last block, of the config's `tile_n`, is not full, or for those of full blocks; None for both."""
    banded: bool | None = _either("banded", lambda it: it.features.mask != "full", "for causal", "for full")
    """For problems whose mask hides keys, which is a band of diagonals, or for those without a mask; None for both."""
    scored: bool | None = _either("scored", lambda it: it.problem.has_score, "for modified scores", "for plain scores")
    """For problems whose scores an expression changes, or for those without one; None for both."""
    reads_keys: bool | None = _only(
        lambda it: it.problem.reads_keys,
        lambda rule: f"for scores that read {'an' if rule.reads_keys else 'no'} element for each key",
    )
    """For expressions that read an element of a tensor for each key, or for those that do not; None for both."""
    packed: bool | None = _either(
        "packed", lambda it: it.features.keys == "packed", "for packed batches", "for batches [B, H, S, D]"
    )
    """For packed batches, or for ``[B, H, S, D]``; None for both."""
    block_multiple: int | None = _field(
        Condition(
            fact=lambda it: 0 if it.features.blocks is None else it.features.blocks.queries,
            words=lambda rule: (
                f"for block masks in blocks of multiples of {rule.block_multiple} queries"
                if rule.block_multiple
                else "for calls without a block mask"
            ),
            holds=lambda multiple, queries: queries > 0 and queries % multiple == 0 if multiple else not queries,
            covers=lambda mine, others: mine in (None, others) or bool(mine and others and others % mine == 0),
        ),
        default=None,
    )
    """For block masks whose blocks have a multiple of so many queries; 0 for calls without one, None for all calls."""
    mapped: bool | None = _either(
        "mapped",
        lambda it: it.problem.fits_tensor_maps,
        "for tensors that TMA can walk",
        "for tensors that it cannot",
    )
    """For problems with `Problem.fits_tensor_maps`, or for the others; None for both."""
    cached: bool | None = _either(
        "cached", lambda it: it.problem.cache is not None, "for caches", "for keys that are in no cache"
    )
    """For keys in a cache, or for those that are not; None for both."""
    stored: bool | None = _either(
        "stored",
        lambda it: it.features.stored is not None,
        "for caches of 8-bit numbers",
        "for numbers of the dtype of q",
    )
    """For caches of 8-bit numbers, or for those of the dtype of q, and for keys in no cache; None for both."""
    page_multiple: int = _field(
        Condition(
            fact=lambda it: 0 if it.problem.cache is None else it.problem.cache.page or 0,
            words=lambda rule: f"for pages of multiples of {rule.page_multiple} keys",
            holds=lambda multiple, page: page % multiple == 0,
            covers=lambda mine, others: others % mine == 0,
            absent=1,
        ),
        default=1,
    )
    """For caches whose pages hold a multiple of so many keys, or that have no pages; and for keys in no cache."""
    rows_min: int = _least(lambda it: it.problem.rows, lambda rule: rule.rows)
    """The least `Problem.rows`, as `rows_max` is the most; None is no limit."""
    rows_max: int | None = _most(lambda it: it.problem.rows, lambda rule: rule.rows)
    lone_max: int | None = _most(
        lambda it: it.lone_heads, lambda rule: f"for up to {rule.lone_max} heads that share no keys"
    )
    """The most heads of all sequences, if keys are in no cache and no query heads share them; None is no limit. Callers
    that name the variant may have more."""
    queries_min: int = _least(
        lambda it: it.of_all_heads(it.problem.heads_q, it.problem.seq_q),
        lambda rule: f"for {rule.queries_min} queries of all heads and more",
    )
    """The least queries of all heads. Callers that name the variant may have fewer; so it is with `keys_min`."""
    queries_max: int | None = _most(
        lambda it: it.problem.batch * it.problem.heads_q * it.problem.seq_q,
        lambda rule: f"for up to {rule.queries_max} queries of all heads",
    )
    """The most queries of all heads, whoever asks: the variant has another rule for more."""
    keys_min: int = _least(
        lambda it: it.of_all_heads(it.problem.heads_kv, it.problem.seq_kv),
        lambda rule: f"for {rule.keys_min} keys of all heads and more",
    )
    busy_min: float = _least(
        lambda it: 1.0 if it.named else it.rule.config.busy(it.problem, it.arch),
        lambda rule: f"for turns of heads that keep SMs busy for {rule.busy_min:.0%} of the time that all heads would",
    )
    """The least `Config.busy`. Callers that name the variant may have less."""
    dtype: str | None = _only(lambda it: it.features.dtype, lambda rule: f"for {rule.dtype}")
    seq_min: int = _least(lambda it: it.unless_divided(length_of(it.problem)), lambda rule: rule.lengths)
    """The least `length_of` a problem, as `seq_max` is the most; None is no limit."""
    seq_max: int | None = _most(lambda it: it.unless_divided(length_of(it.problem)), lambda rule: rule.lengths)
    batch_max: int | None = _most(
        lambda it: it.unless_divided(it.problem.batch), lambda rule: f"for batches of up to {rule.batch_max}"
    )
    smem_min: int = _least(
        lambda it: it.arch.smem_per_block if it.arch.is_gpu else sys.maxsize,
        lambda rule: f"for {rule.smem_min} bytes of shared memory a block and more",
    )
    """Bytes of shared memory that a block must be able to have."""
    only_named: bool = _least(  # last: its evidence is told only where it would be the rule
        lambda it: it.named, lambda rule: f"for callers that name the variant ({rule.why})", default=False
    )
    """Applies only where the caller names the variant, as another variant is as good or better."""

    @property
    def head_dims(self) -> str:
        """The head_dims that it is for, in words."""
        return f"for D in {self.head_dim_min}..{self.head_dim_max}"

    @property
    def rows(self) -> str:
        """The numbers of rows, in words."""
        return f"for {self.rows_min} to {self.rows_max or 'any number of'} queries of the heads that share a key"

    @property
    def lengths(self) -> str:
        """The lengths, in words."""
        return f"for lengths in {self.seq_min}..{self.seq_max or ''}"

    def reject(
        self, problem: Problem, arch: Arch, *, named: bool = True, features: Features | None = None
    ) -> str | None:
        """Why this rule does not apply to `problem` on `arch`, or None when it does."""
        case = Case(self, problem, arch, named, features or Features.of(problem))
        found = (it.why_not(getattr(self, name), case) for name, it in conditions().items())
        return next(filter(None, found), None)

    def covers(self, other: Rule[C]) -> bool:
        """True if it applies wherever `other` does, so that `other` after it would never be chosen."""
        is_comparable = self.ragged is None or self.config.tile_n == other.config.tile_n
        return is_comparable and all(
            it.covers(getattr(self, name), getattr(other, name)) for name, it in conditions().items()
        )

    def __str__(self) -> str:
        return f"{self.config}: {self.why}"


@functools.cache
def conditions() -> Mapping[str, Condition]:
    """The conditions of a rule by the names of its fields, in order."""
    return {it.name: it.metadata[CONDITION] for it in fields(Rule) if CONDITION in it.metadata}


def length_of(problem: Problem) -> int:
    """The length by which rules choose: the longer of Sq and Skv, of a window twice its keys where that is less.

    A causal query sees half of its sequence, one with a window all of that: tiles are as long. H200, 2026-11-25, window
    1024 at D=64, N=16k: 11 % (Triton) and 14 % (cuTile, backward) faster than with the rules of N, at most 3 % slower
    elsewhere.
    """
    length, reach = max(problem.seq_q, problem.seq_kv), problem.reach
    if problem.packing is not None:
        length, reach = USUAL_LENGTH, problem.band.reach(USUAL_LENGTH, USUAL_LENGTH)
    return min(length, 2 * (sum(reach) + 1)) if problem.is_two_sided else length


def has_whole_sectors(head_dim: int, itemsize: int) -> bool:
    """True if a row of head_dim elements, of `itemsize` bytes each, is a whole number of sectors."""
    return head_dim * itemsize % SECTOR_BYTES == 0


def select(
    rules: Sequence[Rule[C]], problem: Problem, arch: Arch, *, named: bool = True
) -> tuple[Rule[C] | None, tuple[str, ...]]:
    """The first rule that applies, or None; and those for this arch that were passed over before it, with why.

    `named`: the caller asked for the variant of these rules by its name.
    """
    rejected: list[str] = []
    features = Features.of(problem)
    for rule in rules:
        why = rule.reject(problem, arch, named=named, features=features)
        if why is None:
            return rule, tuple(rejected)
        if arch.name in rule.arches:
            rejected.append(f"rule {rule.config}: {why}")
    return None, tuple(rejected)
