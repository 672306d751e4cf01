"""The last step of a sweep: its fastest once more, few and alone, in readings long enough to tell 1 % apart.

A sweep has dozens of candidates in the same turns, and its readings are short. On a power-limited chip the slow ones
cool it for whoever comes next: of two sweeps on an H200 at D=256 N=16k the same config lost 2.5 % in one and nothing
in the other (2026-11-22).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from bench.matrix import Cell
from bench.run import Machine
from bench.timing import Budget
from bench.tune import Trial, ranked, time_cell

FINAL_BUDGET = Budget(rounds=21, sample_ms=16.0, warmup_ms=30.0)

Ranking = Sequence[Trial]
"""The trials of one cell, fastest first, with those that failed and the yardstick."""
_Kind = tuple[str, int, str, str, str, bool]
_Way = tuple[str, object]


def with_finals(
    swept: Iterable[tuple[Cell, list[Trial]]],
    machine: Machine,
    count: int,
    may_be_rule: Callable[[Trial], bool],
) -> Iterator[tuple[Cell, list[Trial]]]:
    """A sweep's cells as they are done; then, where `count` is not 0, each of them once more, after its finals."""
    rankings: dict[Cell, Ranking] = {}
    for cell, ranking in swept:
        rankings[cell] = ranking
        yield cell, ranking
    if count:
        yield from finals(rankings, machine, count, may_be_rule)


def finals(
    rankings: Mapping[Cell, Ranking],
    machine: Machine,
    count: int,
    may_be_rule: Callable[[Trial], bool],
    budget: Budget = FINAL_BUDGET,
) -> Iterator[tuple[Cell, list[Trial]]]:
    """Yield each cell's ranking anew, as it is done, with the finalists alone timed; as it was where none of them ran.

    Finalists of each variant are, of what may be a rule, the `count` fastest in the mean over cells that differ in
    their length only (and the batch that goes with it), as rules prefer what serves several of them; and each cell's
    fastest, that may be a rule and at all, and its rule's choice. What all had before is their `first_tflops`: it
    compares with none of the new rates.
    """
    for _, cells in groupby(sorted(rankings, key=_kind), key=_kind):
        alike = {cell: rankings[cell] for cell in cells}
        ways = finalists(alike.values(), count, may_be_rule)
        for cell, ranking in alike.items():
            chosen = [it for it in ranking if it.tflops and _way(it) in ways]
            others = [it for it in ranking if it.variant and not (it.tflops and _way(it) in ways)]
            timed = time_cell(cell, [_again(it) for it in chosen], machine, budget) if chosen else []
            ran = any(it.tflops for it in timed if it.variant)
            yield cell, ranked([*timed, *(_out(it, ranking) for it in others)]) if ran else list(ranking)


def finalists(rankings: Iterable[Ranking], count: int, may_be_rule: Callable[[Trial], bool]) -> set[_Way]:
    """The variants and configs that `finals` times, of cells that are alike. In a mean what has no rate counts as 0."""
    shares: dict[_Way, list[float]] = {}
    found: set[_Way] = set()
    for ranking in rankings:
        for variant in dict.fromkeys(it.variant for it in ranking if it.variant and it.tflops):
            timed = [it for it in ranked(ranking) if it.variant == variant and it.tflops]
            fitting = [it for it in timed if may_be_rule(it)]
            found |= {_way(it) for it in (timed[0], *fitting[:1], *(it for it in timed if it.is_rule))}
            for trial in fitting:
                shares.setdefault(_way(trial), []).append(_share(trial, ranking))
    for variant in dict.fromkeys(way[0] for way in shares):
        of_variant = [way for way in shares if way[0] == variant]
        found |= set(sorted(of_variant, key=lambda way: -sum(shares[way]))[:count])
    return found


def _kind(cell: Cell) -> _Kind:
    return cell.direction, cell.head_dim, cell.heads_text, cell.dtype, cell.layout, cell.causal


def _way(trial: Trial) -> _Way:
    return trial.variant, trial.config


def _share(trial: Trial, ranking: Ranking) -> float:
    """Its rate over the fastest of its variant."""
    return (trial.tflops or 0.0) / max(it.tflops or 0.0 for it in ranking if it.variant == trial.variant)


def _out(trial: Trial, ranking: Ranking) -> Trial:
    """One that is not timed again: as it was where it failed, else without its rate."""
    if not trial.tflops:
        return trial
    return _again(trial, failure=f"no finalist: {_share(trial, ranking):.3f} of the fastest before")


def _again(trial: Trial, failure: str = "") -> Trial:
    return replace(trial.untimed(failure), first_tflops=trial.tflops)
