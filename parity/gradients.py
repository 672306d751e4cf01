"""The truth of dq, dk and dv in fp64, and how far from it a backward may be.

The rule is that of `parity.tolerance`. Its naive error is the larger of two, both against fp64:

- *autograd*: eager attention in the kernel's own dtype, differentiated by PyTorch;
- *what is saved*: the exact backward of what the best possible forward hands over. It gets out rounded to its dtype,
  lse to fp32, and the row sums of ``dout * out`` as fp32 adds them up. Autograd does not pay for these: where softmax
  has one weight of 1, it finds ``dp - delta = 0`` exactly, and a backward that is fed with a rounded out cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from multiattn.problem import Problem
from multiattn.reference import reference, reference_backward
from parity.tolerance import CHUNK, Expected, derive_budget, probe_rounding, truncation

GRAD_CHUNK = CHUNK // 4
"""Scores held at a time: differentiating fp64 attention holds about eight tensors of them, 2 GiB in all."""


Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

Differentiate = Callable[
    [Problem, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], Tensors3
]
"""dq, dk and dv of some rows of queries: of the Problem of all, and these rows' q, k, v, dout and dlse."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradTruth:
    """The truth of a problem's dq, dk and dv, for a gradient of out and perhaps one of lse."""

    dq: Expected
    dk: Expected
    dv: Expected

    @property
    def all(self) -> tuple[Expected, Expected, Expected]:
        """dq, dk and dv, the order in which a backward writes them."""
        return self.dq, self.dk, self.dv

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None = None,
        *,
        causal: bool,
        scale: float | None,
    ) -> GradTruth:
        """The truth of one problem; q, k, v, causal and scale as for `Truth.of`.

        dout ``[B, Hq, Sq, D]`` is like out, dlse ``[B, Hq, Sq]`` fp32 or None. Raises ValueError where naive has
        overflown in most places.
        """
        problem = Problem.of(q, k, v, causal=causal, scale=scale)
        tensors = (q, k, v, dout, dlse, problem)
        truth = differentiate_in_chunks(*tensors, exactly, keep=torch.float64)
        naive = differentiate_in_chunks(*tensors, by_autograd, keep=q.dtype)
        saved = differentiate_in_chunks(*tensors, from_what_is_saved, keep=torch.float32)
        terms = {"dq": problem.seq_kv, "dk": problem.seq_q * problem.group, "dv": problem.seq_q * problem.group}
        expected = (
            Expected(
                name=name,
                truth=want,
                budget=derive_budget(
                    (of_naive, of_saved), want, atol=probe_rounding(want, q.dtype) + truncation(want, terms[name])
                ),
            )
            for name, want, of_naive, of_saved in zip(terms, truth, naive, saved, strict=True)
        )
        return cls(**{each.name: each for each in expected})


def exactly(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Tensors3:
    """The formulas in fp64, on an out and an lse in fp64."""
    options = {"causal": problem.causal, "scale": problem.scale, "compute_dtype": torch.float64}
    out, lse = reference(q, k, v, **options)  # type: ignore[arg-type]
    return reference_backward(q, k, v, out, lse, dout, dlse=dlse, **options)  # type: ignore[arg-type]


def by_autograd(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Tensors3:
    """PyTorch's gradients of eager attention whose every intermediate has the dtype of q."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    with torch.enable_grad():
        out, lse = reference(*leaves, causal=problem.causal, scale=problem.scale, compute_dtype=q.dtype)
    results, upstream = [out], [dout]
    if dlse is not None:
        results.append(lse)
        upstream.append(dlse.to(q.dtype))
    dq, dk, dv = torch.autograd.grad(results, leaves, upstream)
    return dq, dk, dv


def from_what_is_saved(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Tensors3:
    """The formulas in fp64, on out and lse as a forward stores them and with what fp32 makes of ``dp - delta``.

    Both are sums of D products: after a random walk of D roundings of an ulp, sqrt(D) of them. It is added to dlse,
    as that is what is subtracted from delta.
    """
    options = {"causal": problem.causal, "scale": problem.scale, "compute_dtype": torch.float64}
    out, lse = reference(q, k, v, **options)  # type: ignore[arg-type]
    out, lse = out.to(q.dtype), lse.float()
    ulps = math.sqrt(problem.head_dim) * torch.finfo(torch.float32).eps
    noise = ulps * (dout.double() * out.double()).abs().sum(dim=-1)
    dlse = noise if dlse is None else dlse + noise
    return reference_backward(q, k, v, out, lse, dout, dlse=dlse, **options)  # type: ignore[arg-type]


def differentiate_in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    problem: Problem,
    differentiate: Differentiate,
    *,
    keep: torch.dtype,
) -> Tensors3:
    """dq, dk and dv in the dtype `keep`, a few query rows at a time, as `reference_in_chunks` does forward.

    Rows of queries that see no key are left out, as they have dq = 0 and add nothing: autograd would make NaN of
    ``log(0)``. dk and dv are added up over the rows in fp64.
    """
    dq = torch.zeros(q.shape, dtype=keep, device=q.device)
    dk, dv = (torch.zeros(k.shape, dtype=torch.float64, device=q.device) for _ in range(2))
    row = max(1, problem.batch * problem.heads_q * max(problem.seq_kv, problem.head_dim))
    rows = max(1, GRAD_CHUNK // row)
    start = max(0, -problem.causal_offset) if problem.causal else 0
    if problem.seq_kv == 0 or problem.is_empty:
        start = problem.seq_q
    for first in range(start, problem.seq_q, rows):
        last = min(first + rows, problem.seq_q)
        keys = last + problem.causal_offset if problem.causal else problem.seq_kv
        dq[:, :, first:last], part_dk, part_dv = differentiate(
            problem,
            q[:, :, first:last],
            k[:, :, :keys],
            v[:, :, :keys],
            dout[:, :, first:last],
            None if dlse is None else dlse[:, :, first:last],
        )
        dk[:, :, :keys] += part_dk
        dv[:, :, :keys] += part_dv
    return dq, dk.to(keep), dv.to(keep)
