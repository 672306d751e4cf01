"""The truth of gradients in fp64, and how far from it a backward may be.

The rule is that of `multiattn.truth.tolerance`. Its naive error is the largest of these, against fp64:

- *autograd*: eager attention in the kernel's own dtype, differentiated by PyTorch;
- *what is saved*: the exact backward of what the best possible forward hands over. It gets out rounded to its dtype,
  lse to fp32, and the row sums of ``dout * out`` as fp32 adds them up. Autograd does not pay for these: where softmax
  has one weight of 1, it finds ``dp - delta = 0`` exactly, and a backward that is fed with a rounded out cannot.
- *another out*, of captured tensors alone: each of their few numbers is one walk of out's roundings, which may end
  near 0 by chance. So also what out's nearest values but one make of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from multiattn.operands import INPUTS, Operands, Options
from multiattn.problem import Problem, options_of
from multiattn.reference import attend, differentiate, sequences
from multiattn.score.eager import Part
from multiattn.truth.tolerance import (
    CHUNK,
    Expected,
    derive_budget,
    probe_rounding,
    row_elements,
    rows_of,
    softcap_factor,
    truncation,
)

GRAD_CHUNK = CHUNK // 4
"""Scores held at a time: differentiating fp64 attention holds about eight tensors of them, 2 GiB in all."""


Grads = tuple[torch.Tensor, ...]
"""dq, dk and dv, dsinks where there are sinks, and the gradients of captured tensors."""

Differentiate = Callable[[Operands, Options, Part | None], Grads]
"""Gradients of some rows of queries: of their tensors, with their own mask, and where they are from."""


def exactly(given: Operands, options: Options, part: Part | None) -> Grads:
    """The formulas in fp64, on an out and an lse in fp64."""
    out, lse = attend(given, options, torch.float64, part)
    return differentiate(given._replace(out=out, lse=lse), options, torch.float64, part)


def by_autograd(given: Operands, options: Options, part: Part | None) -> Grads:
    """PyTorch's gradients of eager attention whose every intermediate has the dtype of q."""
    inputs = [tensor.detach() for tensor in given.inputs]
    some = Operands.of_inputs(inputs, options.inputs)
    leaves = [it for it in (*some.qkv, some.sinks) if it is not None]
    leaves += [some.captured[slot] for slot in options.gradient_slots]
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.enable_grad():
        out, lse = attend(some, options, given.q.dtype, part)
    results, upstream = [out], [given.dout]
    if given.dlse is not None:
        results.append(lse)
        upstream.append(given.dlse.to(given.q.dtype))
    pairs = [pair for pair in zip(results, upstream, strict=True) if pair[0].requires_grad]
    moved, by = zip(*pairs, strict=True)
    return torch.autograd.grad(moved, leaves, by, allow_unused=True, materialize_grads=True)


def from_what_is_saved(given: Operands, options: Options, part: Part | None, *, nearest: bool = True) -> Grads:
    """The formulas in fp64, on out and lse as a forward stores them and with what fp32 makes of ``dp - delta``.

    Not `nearest`, elements of out have the value of their dtype that is nearest but one.

    Both are sums of D products: after a random walk of D roundings of an ulp, sqrt(D) of them. It is added to dlse,
    as that is what is subtracted from delta.
    """
    out, lse = attend(given, options, torch.float64, part)
    stored, lse = out.to(given.q.dtype), lse.float()
    if not nearest:
        away = (out - stored).sign() * stored.sign()  # from zero, in which bits count up
        stored = (stored.view(torch.int16) + away.to(torch.int16)).view(stored.dtype)
    out = stored
    ulps = math.sqrt(given.v.shape[3]) * torch.finfo(torch.float32).eps
    assert given.dout is not None
    noise = ulps * (given.dout.double() * out.double()).abs().sum(dim=-1)
    dlse = noise if given.dlse is None else given.dlse + noise
    return differentiate(given._replace(out=out, lse=lse, dlse=dlse), options, torch.float64, part)


def differentiate_in_chunks(
    given: Operands,
    problem: Problem,
    differentiate_rows: Differentiate,
    *,
    keep: torch.dtype,
    chunk: int | None = None,
    entry: int = 0,
) -> Grads:
    """Gradients in the dtype `keep`, a few query rows at a time, as `reference_in_chunks` does forward.

    Rows of queries that see no key, nor a sink, are left out, as they have dq = 0 and add nothing: autograd would make
    NaN of ``log(0)``. All but dq are added up over the rows in fp64.
    """
    q = given.q
    dq = torch.zeros(q.shape, dtype=keep, device=q.device)
    summed = [*given.inputs[1 : INPUTS + problem.has_sinks]]
    summed += [given.captured[slot] for slot in (problem.score.gradients if problem.score is not None else ())]
    sums = [torch.zeros(it.shape, dtype=torch.float64, device=q.device) for it in summed]
    rows = max(1, (chunk or GRAD_CHUNK) // row_elements(problem))
    if problem.packing is not None:
        return _differentiate_sequences(given, problem, differentiate_rows, dq, sums, keep=keep, chunk=chunk)
    start = 0 if problem.has_sinks else max(0, -problem.diagonal - problem.reach[1])
    if problem.is_empty or (problem.seq_kv == 0 and not problem.has_sinks):
        start = problem.seq_q
    for first in range(start, problem.seq_q, rows):
        last = min(first + rows, problem.seq_q)
        some, options, part, keys = rows_of(problem, given, first, last, entry)
        some = some._replace(
            dout=None if given.dout is None else given.dout[:, :, first:last],
            dlse=None if given.dlse is None else given.dlse[:, :, first:last],
        )
        dq[:, :, first:last], dk, dv, *others = differentiate_rows(some, options, part)
        for total, its in zip((sums[0][:, :, keys], sums[1][:, :, keys], *sums[2:]), (dk, dv, *others), strict=True):
            total += its
    return (dq, *(total.to(keep) for total in sums))


def _differentiate_sequences(
    given: Operands,
    problem: Problem,
    differentiate_rows: Differentiate,
    dq: torch.Tensor,
    sums: list[torch.Tensor],
    *,
    keep: torch.dtype,
    chunk: int | None,
) -> Grads:
    """Gradients of a packed batch, a sequence at a time, into dq and the other `sums`, which are zero."""
    for own, options, place, (_, rows, keys) in sequences(given, options_of(problem)):
        found = differentiate_in_chunks(
            own,
            Problem.of_operands(own, options),
            differentiate_rows,
            keep=torch.float64,
            chunk=chunk,
            entry=place.first_entry,
        )
        dq[:, :, rows] = found[0]
        for total, its in zip((*(it[:, :, keys] for it in sums[:2]), *sums[2:]), found[1:], strict=True):
            total += its
    return (dq, *(total.to(keep) for total in sums))


def expected_gradients(
    operands: Operands, problem: Problem, slots: tuple[int, ...] = (), *, chunk: int | None = None
) -> dict[str, Expected]:
    """The gradients of a problem by name: dq, dk and dv, dsinks where there are sinks, those of captured `slots`.

    `operands` has dout and dlse, or None for it. `chunk` scores are held at a time, by default `GRAD_CHUNK`. Raises
    ValueError where naive has overflown in most places.
    """
    dtype = operands.q.dtype
    truth = differentiate_in_chunks(operands, problem, exactly, keep=torch.float64, chunk=chunk)
    naive = differentiate_in_chunks(operands, problem, by_autograd, keep=dtype, chunk=chunk)
    saved = differentiate_in_chunks(operands, problem, from_what_is_saved, keep=torch.float32, chunk=chunk)
    naives = [naive, saved]
    if slots:
        other = functools.partial(from_what_is_saved, nearest=False)
        found = differentiate_in_chunks(operands, problem, other, keep=torch.float32, chunk=chunk)
        naives.append((*saved[: -len(slots)], *found[-len(slots) :]))
    rows = problem.seq_q * problem.group
    terms = {"dq": problem.seq_kv, "dk": rows, "dv": rows}
    if problem.has_sinks:
        terms["dsinks"] = problem.batch * problem.seq_q
    captured = [f"dcaptured{slot}" for slot in slots]
    entries, most_q, most_kv = problem.lengths
    scores = entries * problem.heads_q * most_q * most_kv
    terms |= {name: scores // max(1, operands.captured[it].numel()) for name, it in zip(captured, slots, strict=True)}
    return {
        name: Expected(
            name=name,
            truth=want,
            budget=derive_budget(
                of_naives,
                want,
                atol=softcap_factor(problem) * probe_rounding(want, dtype) + truncation(want, terms[name]),
            ),
        )
        for name, want, *of_naives in zip(terms, truth, *naives, strict=True)
    }
