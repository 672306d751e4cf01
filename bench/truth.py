"""The true results of a cell, and whether a contender's are right: parity's own budgets, forward and backward."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from bench.contenders import GRADS, Results, Tensors
from bench.matrix import Cell
from multiattn.plan.backend import Plan
from parity.gradients import GradTruth
from parity.tolerance import Expected, Mismatch, Truth, adds_up_in_fp16, deviate

PEER_SLACK = 8.0
"""A peer's error may pass our budget this far before it counts as another computation than the cell's."""


@dataclass(frozen=True, kw_only=True)
class Truths:
    """The truth of a cell, of the directions that it has."""

    forward: Truth | None
    backward: GradTruth | None

    @functools.cached_property
    def lse_in_halves(self) -> Expected:
        """lse for Plans that add scores up in fp16; few ask for it."""
        assert self.forward is not None
        return self.forward.lse_in_halves()

    def expected(self, name: str, who: object) -> Expected:
        """The truth of one result, with the budget of a Plan or a peer."""
        if name == "lse" and isinstance(who, Plan) and who.direction == "forward" and adds_up_in_fp16(who):
            return self.lse_in_halves
        found: Expected = getattr(self.backward if name in GRADS else self.forward, name)
        return found


def truth_of(cell: Cell, tensors: Tensors, *, last_entry: bool = False) -> Truths:
    """The results that contenders in a cell must compute from these tensors.

    With `last_entry` only those of the last batch entry: the one that a wrong decoding of the grid spoils, at a
    fraction of the work. Its tensors have batch size 1.
    """
    dout = cell.dout(tensors[0].device)
    q, k, v, dout = (tensor[-1:] if last_entry else tensor for tensor in (*tensors, dout))
    return Truths(
        forward=Truth.of(q, k, v, causal=cell.causal, scale=None) if cell.direction != "bwd" else None,
        backward=GradTruth.of(q, k, v, dout, causal=cell.causal, scale=None) if cell.direction != "fwd" else None,
    )


def check(results: Results, truths: Truths, who: object, *, strict: bool = True) -> float:
    """The share of its budget that the worst of some results uses; Mismatch if it is too much.

    `strict` is parity's own rule. A peer may round as it likes, but must compute the same thing.
    """
    ratios = []
    for name, result in results.items():
        expected = truths.expected(name, who)
        deviation = expected.check(result, who) if strict else deviate(result, expected.truth)
        ratios.append(expected.ratio(deviation))
        if not strict and (deviation.strangers or ratios[-1] > PEER_SLACK):
            raise Mismatch(
                f"computes something else: {name} has an error of {ratios[-1]:.3g} times the budget, "
                f"{deviation.strangers} elements NaN or inf"
            )
    return max(ratios)
