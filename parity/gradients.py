"""The truth of a case's gradients, by the rule of `multiattn.truth.gradients`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from multiattn.block_mask import BlockLists
from multiattn.mask import Window
from multiattn.score import BoundScore
from multiattn.truth.gradients import by_autograd, differentiate_in_chunks, exactly, expected_gradients
from parity.tolerance import Expected, Packed, operands_and_problem

__all__ = ["GradTruth", "by_autograd", "differentiate_in_chunks", "exactly"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradTruth:
    """The truth of a problem's gradients, for a gradient of out and perhaps one of lse."""

    dq: Expected
    dk: Expected
    dv: Expected
    dsinks: Expected | None = None
    dcaptured: tuple[Expected, ...] = ()

    @property
    def all(self) -> tuple[Expected, ...]:
        """dq, dk and dv, dsinks where there are sinks, and dcaptured: the order of `parity.tensors.Gradients.all`."""
        of_sinks = () if self.dsinks is None else (self.dsinks,)
        return (self.dq, self.dk, self.dv, *of_sinks, *self.dcaptured)

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None = None,
        *,
        causal: bool = False,
        window: Window | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        score: BoundScore | None = None,
        slots: tuple[int, ...] = (),
        blocks: BlockLists | None = None,
        packed: Packed | None = None,
        chunk: int | None = None,
    ) -> GradTruth:
        """The truth of one problem; q, k, v and the options as for `Truth.of`.

        dout ``[B, Hq, Sq, D]`` is like out, dlse ``[B, Hq, Sq]`` fp32 or None. `chunk` scores are held at a time,
        by default `multiattn.truth.gradients.GRAD_CHUNK`. Raises ValueError where naive has overflown in most places.
        """
        inputs, problem = operands_and_problem(
            q, k, v, causal=causal, window=window, scale=scale, sinks=sinks, score=score, slots=slots, blocks=blocks,
            packed=packed,
        )  # fmt: skip
        expected = expected_gradients(inputs._replace(dout=dout, dlse=dlse), problem, slots, chunk=chunk)
        return cls(dcaptured=tuple(expected.pop(f"dcaptured{slot}") for slot in slots), **expected)
