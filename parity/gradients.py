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
from typing import Any

import torch

from multiattn.mask import Band, Window, band_of
from multiattn.problem import INPUTS, Operands, Problem
from multiattn.reference import reference, reference_backward
from parity.tolerance import CHUNK, Expected, derive_budget, probe_rounding, truncation

GRAD_CHUNK = CHUNK // 4
"""Scores held at a time: differentiating fp64 attention holds about eight tensors of them, 2 GiB in all."""


Grads = tuple[torch.Tensor, ...]
"""dq, dk and dv, and dsinks where there are sinks."""

Differentiate = Callable[[Problem, Band, Operands], Grads]
"""Gradients of some rows of queries: of the Problem of all, these rows' mask, and their tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradTruth:
    """The truth of a problem's gradients, for a gradient of out and perhaps one of lse."""

    dq: Expected
    dk: Expected
    dv: Expected
    dsinks: Expected | None = None

    @property
    def all(self) -> tuple[Expected, ...]:
        """dq, dk and dv, and dsinks where there are sinks: the order of `parity.tensors.Gradients.all`."""
        known = (self.dq, self.dk, self.dv)
        return known if self.dsinks is None else (*known, self.dsinks)

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
    ) -> GradTruth:
        """The truth of one problem; q, k, v and the options as for `Truth.of`.

        dout ``[B, Hq, Sq, D]`` is like out, dlse ``[B, Hq, Sq]`` fp32 or None. Raises ValueError where naive has
        overflown in most places.
        """
        operands = Operands(q, k, v, dout=dout, dlse=dlse, sinks=sinks)
        problem = Problem.of_operands(operands, band_of(causal, window), scale)
        truth = differentiate_in_chunks(operands, problem, exactly, keep=torch.float64)
        naive = differentiate_in_chunks(operands, problem, by_autograd, keep=q.dtype)
        saved = differentiate_in_chunks(operands, problem, from_what_is_saved, keep=torch.float32)
        rows = problem.seq_q * problem.group
        terms = {"dq": problem.seq_kv, "dk": rows, "dv": rows, "dsinks": problem.batch * problem.seq_q}
        expected = (
            Expected(
                name=name,
                truth=want,
                budget=derive_budget(
                    (of_naive, of_saved), want, atol=probe_rounding(want, q.dtype) + truncation(want, terms[name])
                ),
            )
            for name, want, of_naive, of_saved in zip(terms, truth, naive, saved, strict=False)
        )
        return cls(**{each.name: each for each in expected})


def _options(problem: Problem, band: Band, given: Operands, compute_dtype: torch.dtype) -> Any:
    return {"window": band.window, "scale": problem.scale, "sinks": given.sinks, "compute_dtype": compute_dtype}


def exactly(problem: Problem, band: Band, given: Operands) -> Grads:
    """The formulas in fp64, on an out and an lse in fp64."""
    options = _options(problem, band, given, torch.float64)
    out, lse = reference(*given.qkv, **options)
    assert given.dout is not None
    return reference_backward(*given.qkv, out, lse, given.dout, dlse=given.dlse, **options)


def by_autograd(problem: Problem, band: Band, given: Operands) -> Grads:
    """PyTorch's gradients of eager attention whose every intermediate has the dtype of q."""
    leaves = [tensor.detach().requires_grad_() for tensor in given.inputs]
    options = _options(problem, band, Operands.of_inputs(leaves), given.q.dtype)
    with torch.enable_grad():
        out, lse = reference(*leaves[:INPUTS], **options)
    results, upstream = [out], [given.dout]
    if given.dlse is not None:
        results.append(lse)
        upstream.append(given.dlse.to(given.q.dtype))
    return torch.autograd.grad(results, leaves, upstream)


def from_what_is_saved(problem: Problem, band: Band, given: Operands) -> Grads:
    """The formulas in fp64, on out and lse as a forward stores them and with what fp32 makes of ``dp - delta``.

    Both are sums of D products: after a random walk of D roundings of an ulp, sqrt(D) of them. It is added to dlse,
    as that is what is subtracted from delta.
    """
    options = _options(problem, band, given, torch.float64)
    out, lse = reference(*given.qkv, **options)
    out, lse = out.to(given.q.dtype), lse.float()
    ulps = math.sqrt(problem.head_dim) * torch.finfo(torch.float32).eps
    assert given.dout is not None
    noise = ulps * (given.dout.double() * out.double()).abs().sum(dim=-1)
    dlse = noise if given.dlse is None else given.dlse + noise
    return reference_backward(*given.qkv, out, lse, given.dout, dlse=dlse, **options)


def differentiate_in_chunks(
    given: Operands, problem: Problem, differentiate: Differentiate, *, keep: torch.dtype
) -> Grads:
    """Gradients in the dtype `keep`, a few query rows at a time, as `reference_in_chunks` does forward.

    Rows of queries that see no key, nor a sink, are left out, as they have dq = 0 and add nothing: autograd would make
    NaN of ``log(0)``. All but dq are added up over the rows in fp64.
    """
    q, k, v = given.qkv
    dq = torch.zeros(q.shape, dtype=keep, device=q.device)
    sums = [torch.zeros(it.shape, dtype=torch.float64, device=q.device) for it in given.inputs[1:]]
    row = max(1, problem.batch * problem.heads_q * max(problem.seq_kv, problem.head_dim))
    rows = max(1, GRAD_CHUNK // row)
    start = 0 if problem.has_sinks else max(0, -problem.diagonal - problem.reach[1])
    if problem.is_empty or (problem.seq_kv == 0 and not problem.has_sinks):
        start = problem.seq_q
    for first in range(start, problem.seq_q, rows):
        last = min(first + rows, problem.seq_q)
        band, keys = problem.band.of_rows(first, last, problem.seq_q, problem.seq_kv)
        some = slice(first, last)
        part = given._replace(
            q=q[:, :, some],
            k=k[:, :, keys],
            v=v[:, :, keys],
            dout=None if given.dout is None else given.dout[:, :, some],
            dlse=None if given.dlse is None else given.dlse[:, :, some],
        )
        dq[:, :, some], dk, dv, *dsinks = differentiate(problem, band, part)
        for total, its in zip((sums[0][:, :, keys], sums[1][:, :, keys], *sums[2:]), (dk, dv, *dsinks), strict=True):
            total += its
    return (dq, *(total.to(keep) for total in sums))
