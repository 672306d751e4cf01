"""What a cell's results must be, and whether a contender's are: parity's own budgets, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bench.contenders import Results, Tensors
from bench.matrix import Cell
from multiattn.plan.backend import Plan
from parity.gradients import GradTruth
from parity.tolerance import Expected, Mismatch, Truth, adds_up_in_fp16, deviate

Truths = Mapping[str, Expected]
"""By the names of `bench.contenders.Results`: those that the direction of a cell has."""

IN_HALVES = "lse of scores in fp16"
"""What lse is of a Plan that adds scores up in fp16."""

PEER_SLACK = 8.0
"""A peer's error may pass our budget this far before it counts as another computation than the cell's."""


def truth_of(cell: Cell, tensors: Tensors, *, last_entry: bool = False) -> Truths:
    """What the contenders in a cell must compute from these tensors.

    With `last_entry` only that of the batch: the one that a wrong decoding of the grid spoils, at a fraction of the
    work. Its tensors have batch size 1.
    """
    dout = cell.dout(tensors[0].device) if cell.direction != "fwd" else None
    if last_entry:
        q, k, v = (tensor[-1:] for tensor in tensors)
        dout = None if dout is None else dout[-1:]
    else:
        q, k, v = tensors
    truths: dict[str, Expected] = {}
    in_halves: Callable[[], Expected] | None = None
    if cell.direction != "bwd":
        forward = Truth.of(q, k, v, causal=cell.causal, scale=None)
        truths |= {"out": forward.out, "lse": forward.lse}
        in_halves = forward.lse_in_halves
    if dout is not None:
        backward = GradTruth.of(q, k, v, dout, causal=cell.causal, scale=None)
        truths |= {"dq": backward.dq, "dk": backward.dk, "dv": backward.dv}
    return _Truths(truths, in_halves)


class _Truths(dict[str, Expected]):
    """What is asked for by few, `IN_HALVES`, is computed when it is asked for."""

    def __init__(self, truths: Truths, in_halves: Callable[[], Expected] | None) -> None:
        super().__init__(truths)
        self._in_halves = in_halves

    def __missing__(self, name: str) -> Expected:
        if name != IN_HALVES or self._in_halves is None:
            raise KeyError(name)
        self[name] = self._in_halves()
        return self[name]


def check(results: Results, truths: Truths, who: object, *, strict: bool = True) -> float:
    """The share of its budget that the worst of some results uses; Mismatch if it is too much.

    `strict` is parity's own rule. A peer may round as it likes, but must compute the same thing.
    """
    coarse = isinstance(who, Plan) and who.direction == "forward" and adds_up_in_fp16(who)
    return max(
        _check(truths[IN_HALVES if coarse and name == "lse" else name], result, who, strict=strict)
        for name, result in results.items()
    )


def _check(expected: Expected, result: torch.Tensor, who: object, *, strict: bool) -> float:
    if strict:
        return expected.ratio(expected.check(result, who))
    deviation = deviate(result, expected.truth)
    ratio = expected.ratio(deviation)
    if deviation.strangers or ratio > PEER_SLACK:
        raise Mismatch(
            f"computes something else: {expected.name} has an error of {ratio:.3g} times the budget, "
            f"{deviation.strangers} elements NaN or inf"
        )
    return ratio
