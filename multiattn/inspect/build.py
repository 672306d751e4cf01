"""Compile cells in parallel processes, with no GPU: what the compilers made of each, or why there is nothing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from multiattn.inspect import store
from multiattn.inspect.cells import Cell, find_plan
from multiattn.inspect.facts import Facts, read_kernel
from multiattn.inspect.pool import Outcome, run_isolated
from multiattn.plan import backend as registry
from multiattn.plan.backend import Plan
from multiattn.plan.support import Reason, Unsupported
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.run import cache

TIMEOUT_S = 300.0
"""For one cell: three kernels of the slowest compiler take a tenth of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What came of one cell: kernels, or reasons, or an error."""

    cell: Cell
    variant: str = ""
    config: str = ""
    why: str = ""
    """Of the rule that chose the config."""
    kernels: tuple[Facts, ...] = ()
    reasons: tuple[Reason, ...] = ()
    error: str = ""
    cached: bool = False
    """Whether nothing was compiled for this."""

    def __post_init__(self) -> None:
        if bool(self.kernels) + bool(self.reasons) + bool(self.error) != 1:
            raise ValueError(f"an entry has kernels, or carries reasons, or carries an error; got {self}")

    @property
    def ok(self) -> bool:
        """Whether all of it was compiled."""
        return bool(self.kernels)

    @property
    def seconds(self) -> float:
        """That the compilers took, when they did."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def main(self) -> Facts:
        """The kernel that most of the work is in: the one with the most tensor-core instructions in its hot loops."""
        return max(self.kernels, key=lambda kernel: (kernel.hot.tensor, kernel.code_bytes))

    @property
    def text(self) -> str:
        """One line: what each kernel uses, or why there is none."""
        if self.ok:
            return "; ".join(map(str, self.kernels))
        return "; ".join(map(str, self.reasons)) or self.error.strip().splitlines()[0]

    def as_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        """An entry of what `as_dict` gave, through JSON or not."""
        given = {
            "cell": Cell.from_dict(data["cell"]),
            "kernels": tuple(map(Facts.from_dict, data["kernels"])),
            "reasons": tuple(Reason(**reason) for reason in data["reasons"]),
        }
        return cls(**{**data, **given})


def compile_cell(cell: Cell, *, fresh: bool = False) -> Entry:
    """Compile one cell here, or find what was read of it before. The compiler's own exception passes through."""
    plan = find_plan(cell)
    if isinstance(plan, Unsupported):
        return Entry(cell=cell, reasons=plan.reasons)
    known = None if fresh else find_kept(cell, plan)
    if known is not None:
        return known
    if lacking := _lacking(plan):
        return Entry(cell=cell, reasons=lacking)
    kernels = store.compiled(plan, fresh=fresh)
    entry = entry_of(cell, plan, tuple(read_kernel(kernel, plan) for kernel in kernels))
    store.put(kept_at(plan), json.dumps([asdict(kernel) for kernel in entry.kernels]).encode())
    return entry


def entry_of(cell: Cell, plan: Plan, kernels: tuple[Facts, ...], *, cached: bool = False) -> Entry:
    """What came of a cell that has a plan."""
    return Entry(cell=cell, variant=plan.variant, config=str(plan.config), why=plan.why, kernels=kernels, cached=cached)


def find_kept(cell: Cell, plan: Plan) -> Entry | None:
    """What the cache has of a cell; None where it has nothing, or nothing that can be read."""
    try:
        kernels = tuple(map(Facts.from_dict, json.loads(kept_at(plan).read_text())))
    except (OSError, ValueError, KeyError, TypeError):  # not there, or cut off by a full disk: it is made again
        return None
    return entry_of(cell, plan, kernels, cached=True) if kernels else None


def kept_at(plan: Plan) -> Path:
    """Where the cache has what was read of a plan's cubins."""
    return cache.directory() / f"{store.reading_key(store.compile_key(plan))}.json"


def _lacking(plan: Plan) -> tuple[Reason, ...]:
    reasons = registry.get(plan.backend).probe_compiler()
    if find_cuobjdump() is None:
        hint = "pip install nvidia-cuda-cuobjdump"
        reasons += (Reason(code="cuobjdump", got="none", allowed="one that reads cubins", hint=hint),)
    return reasons


def build(
    wanted: Sequence[Cell],
    *,
    jobs: int,
    timeout_s: float = TIMEOUT_S,
    fresh: bool = False,
    function: Callable[..., Entry] = compile_cell,
) -> Iterator[Entry]:
    """Yield what came of each cell as it ends, what the cache has first; the rest is compiled in `jobs` processes.

    Nothing hangs, and a crash is its own cell's. With `fresh` all of it is compiled again. ValueError for a cache that
    cannot be written to.
    """
    if problem := store.why_unusable():
        raise ValueError(problem)
    missing = []
    for cell in wanted:
        plan = find_plan(cell)
        known = None if fresh or isinstance(plan, Unsupported) else find_kept(cell, plan)
        if known is None:
            missing.append(cell)
        else:
            yield known
    work = functools.partial(function, fresh=True) if fresh else function
    for outcome in run_isolated(work, missing, jobs=min(jobs, max(1, len(missing))), timeout_s=timeout_s):
        yield _entry(outcome)


def _entry(outcome: Outcome[Cell, Entry]) -> Entry:
    return outcome.result if outcome.result is not None else Entry(cell=outcome.item, error=outcome.error or "no word")


def ordered(entries: Sequence[Entry]) -> list[Entry]:
    """By direction, backend, variant, head_dim, mask and arch, whatever order they ended in."""
    return sorted(entries, key=lambda entry: entry.cell.place)
