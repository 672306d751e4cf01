"""Choice of tile as data: a table of `Rule`s, the first that fits a problem on an arch gives the config.

A rule carries its evidence. There is no catch-all row: an arch without a rule is unsupported until it gets one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from multiattn.packed import USUAL_LENGTH
from multiattn.plan.arch import Arch
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

SECTOR_BYTES = 32
"""The least that one access reads from device memory."""

COMPILED = "compiled, not measured: "
"""Starts the `why` of a rule that was never timed on its GPUs: only what the compilers say of it is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(Generic[C]):
    """Where a config applies, and why: GPU, date, shape, alternative; or that it is a guess."""

    arches: tuple[str, ...]
    config: C
    why: str
    head_dim_min: int = 1
    head_dim_max: int = 256
    whole_sectors: bool | None = None
    """True for rows of head_dim elements that are whole sectors, False for the others, None for both."""
    ragged: bool | None = None
    """For keys whose last block, of the config's `tile_n`, is not full, or for those of full blocks; None for both."""
    banded: bool | None = None
    """For problems whose mask hides keys, which is a band of diagonals, or for those without a mask; None for both."""
    scored: bool | None = None
    """For problems whose scores an expression changes, or for those without one; None for both."""
    reads_keys: bool | None = None
    """For expressions that read an element of a tensor for each key, or for those that do not; None for both."""
    packed: bool | None = None
    """For packed batches, or for ``[B, H, S, D]``; None for both."""
    cached: bool | None = None
    """For keys in a cache, or for those that are not; None for both."""
    page_multiple: int = 1
    """For caches whose pages hold a multiple of so many keys, or that have no pages; and for keys in no cache."""
    rows_min: int = 0
    """The least `Problem.rows`, as `rows_max` is the most; None is no limit."""
    rows_max: int | None = None
    lone_max: int | None = None
    """The most heads of all sequences, if keys are in no cache and no query heads share them; None is no limit. Callers
    that name the variant may have more."""
    dtype: str | None = None
    seq_min: int = 0
    """The least `length_of` a problem, as `seq_max` is the most; None is no limit."""
    seq_max: int | None = None
    batch_max: int | None = None
    smem_min: int = 0
    """Bytes of shared memory that a block must be able to have."""
    only_named: bool = False
    """Applies only where the caller names the variant, as another variant is as good or better."""

    def reject(self, problem: Problem, arch: Arch, *, named: bool = True) -> str | None:
        """Why this rule does not apply to `problem` on `arch`, or None when it does."""
        if arch.name not in self.arches:
            return f"for {', '.join(self.arches)}"
        if not self.head_dim_min <= problem.head_dim <= self.head_dim_max:
            return f"for D in {self.head_dim_min}..{self.head_dim_max}"
        if self.whole_sectors not in (None, has_whole_sectors(problem.head_dim, problem.torch_dtype.itemsize)):
            which = "of" if self.whole_sectors else "other than"
            return f"for rows {which} a whole number of {SECTOR_BYTES}-byte sectors"
        if self.ragged not in (None, problem.packing is not None or problem.seq_kv % self.config.tile_n != 0):
            divides = "does not divide" if self.ragged else "divides"
            return f"for lengths of keys that {self.config.tile_n} {divides}"
        if self.banded not in (None, problem.is_banded):
            return "for causal" if self.banded else "for full"
        if self.scored not in (None, problem.has_score):
            return "for modified scores" if self.scored else "for plain scores"
        if self.reads_keys not in (None, problem.reads_keys):
            return f"for scores that read {'an' if self.reads_keys else 'no'} element for each key"
        if self.packed not in (None, problem.packing is not None):
            return "for packed batches" if self.packed else "for batches [B, H, S, D]"
        if self.cached not in (None, problem.cache is not None):
            return "for caches" if self.cached else "for keys that are in no cache"
        page = None if problem.cache is None else problem.cache.page
        if page is not None and page % self.page_multiple:
            return f"for pages of multiples of {self.page_multiple} keys"
        if problem.rows < self.rows_min or (self.rows_max is not None and problem.rows > self.rows_max):
            return f"for {self.rows_min} to {self.rows_max or 'any number of'} queries of the heads that share a key"
        lone = problem.batch * problem.heads_q if problem.cache is None and problem.group == 1 else 0
        if self.lone_max is not None and lone > self.lone_max and not named:
            return f"for up to {self.lone_max} heads that share no keys"
        if self.dtype not in (None, problem.dtype):
            return f"for {self.dtype}"
        limits = (self.seq_min or None, self.seq_max, self.batch_max)
        if problem.asked_splits is not None and any(it is not None for it in limits):
            return "for calls that leave the number of parts to the plan: batches and lengths choose no tiles of others"
        seq = length_of(problem)
        if seq < self.seq_min or (self.seq_max is not None and seq > self.seq_max):
            return f"for lengths in {self.seq_min}..{self.seq_max or ''}"
        if self.batch_max is not None and problem.batch > self.batch_max:
            return f"for batches of up to {self.batch_max}"
        if arch.is_gpu and arch.smem_per_block < self.smem_min:
            return f"for {self.smem_min} bytes of shared memory a block and more"
        if self.only_named and not named:  # last: its evidence is told only where it would be the rule
            return f"for callers that name the variant ({self.why})"
        return None

    def covers(self, other: Rule[C]) -> bool:
        """True if it applies wherever `other` does, so that `other` after it would never be chosen."""
        longest, theirs = (rule.seq_max if rule.seq_max is not None else sys.maxsize for rule in (self, other))
        most, its_most = (rule.rows_max if rule.rows_max is not None else sys.maxsize for rule in (self, other))
        lone, its_lone = (rule.lone_max if rule.lone_max is not None else sys.maxsize for rule in (self, other))
        optional = (
            *("whole_sectors", "ragged", "banded", "scored", "reads_keys", "packed", "cached"),
            *("dtype", "batch_max"),
        )
        return (
            set(other.arches) <= set(self.arches)
            and self.head_dim_min <= other.head_dim_min
            and other.head_dim_max <= self.head_dim_max
            and self.seq_min <= other.seq_min
            and theirs <= longest
            and other.page_multiple % self.page_multiple == 0
            and self.rows_min <= other.rows_min
            and its_most <= most
            and its_lone <= lone
            and self.smem_min <= other.smem_min
            and not self.only_named
            and (self.ragged is None or self.config.tile_n == other.config.tile_n)
            and all(getattr(self, name) in (None, getattr(other, name)) for name in optional)
        )

    def __str__(self) -> str:
        return f"{self.config}: {self.why}"


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
    for rule in rules:
        why = rule.reject(problem, arch, named=named)
        if why is None:
            return rule, tuple(rejected)
        if arch.name in rule.arches:
            rejected.append(f"rule {rule.config}: {why}")
    return None, tuple(rejected)
