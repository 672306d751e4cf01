"""The truth of a case, forward: by the rule of `multiattn.truth.tolerance`, with what a Plan may be held to beside."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from multiattn.block_mask import BlockLists
from multiattn.mask import Window, band_of
from multiattn.operands import Operands, Options
from multiattn.plan.backend import Plan, variant_of
from multiattn.problem import Problem, problem_of
from multiattn.score import BoundScore
from multiattn.score.expression import apply, const, walk
from multiattn.score.expression import replace as exchange
from multiattn.sequences import NO_INDICES, Batching, Indices
from multiattn.truth.tolerance import (
    CHUNK,
    NAIVE_FACTOR,
    PRODUCTS_AT_ONCE,
    Allowance,
    Deviation,
    Expected,
    Mismatch,
    derive_budget,
    deviate,
    expected_forward,
    lse_atol,
    probe_rounding,
    reference_in_chunks,
    rows_of,
    softcap_factor,
    truncation,
)

__all__ = [
    "CHUNK",
    "NAIVE_FACTOR",
    "PRODUCTS_AT_ONCE",
    "TANH_ERROR",
    "Allowance",
    "Cached",
    "Deviation",
    "Expected",
    "Mismatch",
    "Packed",
    "Truth",
    "adds_up_in_fp16",
    "derive_budget",
    "deviate",
    "lse_of_sums_in_halves",
    "operands_and_problem",
    "probe_rounding",
    "reference_in_chunks",
    "rows_of",
    "softcap_factor",
    "takes_rough_tanh",
    "truncation",
    "with_rough_tanh",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """The truth of a case's out and lse."""

    out: Expected
    lse: Expected
    lse_in_halves: Callable[[], Expected]
    """lse, as scores that are added up in fp16 allow it; computed when asked."""
    lse_of_rough_tanh: Callable[[], Expected]
    """lse, as a GPU's own tanh allows it."""

    @property
    def all(self) -> tuple[Expected, Expected]:
        """out and lse."""
        return self.out, self.lse

    def of_plan(self, plan: Plan) -> tuple[Expected, Expected]:
        """out and lse, as a Plan may be held to.

        Where the tensor core adds scores up in fp16, which only a caller who names it gets, lse is held to naive
        attention that does the same. So it is where scores go through the tanh of a GPU.
        """
        if adds_up_in_fp16(plan):
            return self.out, self.lse_in_halves()
        return (self.out, self.lse_of_rough_tanh()) if takes_rough_tanh(plan) else self.all

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        window: Window | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        score: BoundScore | None = None,
        blocks: BlockLists | None = None,
        packed: Packed | None = None,
        cached: Cached | None = None,
    ) -> Truth:
        """The truth of one problem, from `multiattn.reference` in fp64, fp32 (for lse) and the inputs' dtype (for out).

        Raises ValueError where naive has overflown in most places: such inputs cannot be judged.
        """
        operands, problem = operands_and_problem(
            q, k, v, causal=causal, window=window, scale=scale, sinks=sinks, score=score, blocks=blocks, packed=packed,
            cached=cached,
        )  # fmt: skip
        out, lse = expected_forward(operands, problem)
        truth, atol = lse.truth, lse_atol(lse.truth, problem.head_dim)

        @functools.cache
        def in_halves() -> Expected:
            naive = lse_of_sums_in_halves(operands, problem)
            return replace(lse, budget=derive_budget((naive,), truth, atol=atol))

        @functools.cache
        def of_rough_tanh() -> Expected:
            _, naive = reference_in_chunks(operands, with_rough_tanh(problem), torch.float32)
            return replace(lse, budget=derive_budget((naive,), truth, atol=atol))

        out = replace(out, may_be_nan=_columns_of_nonfinite(v, problem))
        return cls(out=out, lse=lse, lse_in_halves=in_halves, lse_of_rough_tanh=of_rough_tanh)


class Packed(NamedTuple):
    """The sequences of a packed batch."""

    cu_seqlens: tuple[torch.Tensor, torch.Tensor]
    """The starts of queries, and those of keys."""
    batching: Batching


class Cached(NamedTuple):
    """The sequences of a call with a cache."""

    tensors: tuple[torch.Tensor, ...]
    """Tensors that say where keys and queries are: `Batching.names`."""
    batching: Batching


def indices_of(blocks: BlockLists | None, packed: Packed | None, cached: Cached | None) -> Indices:
    """The lists of a block mask, and what says where sequences are, as operands."""
    if cached is not None:
        return Indices(**dict(zip(cached.batching.names, cached.tensors, strict=True)))
    lists = NO_INDICES if blocks is None else Indices(**blocks.named)
    return lists if packed is None else Indices(*packed.cu_seqlens, *lists[2:])


def operands_and_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    window: Window | None,
    scale: float | None,
    sinks: torch.Tensor | None,
    score: BoundScore | None,
    slots: tuple[int, ...] = (),
    blocks: BlockLists | None = None,
    deterministic: bool = False,
    packed: Packed | None = None,
    cached: Cached | None = None,
) -> tuple[Operands, Problem]:
    """The inputs of a call, and its Problem; captured tensors in `slots` want a gradient."""
    captured = () if score is None else score.tensors
    operands = Operands(q, k, v, sinks=sinks, captured=captured, indices=indices_of(blocks, packed, cached))
    options, batch = Options(*band_of(causal, window).window, scale).with_score(score), packed or cached
    options = options._replace(
        gradient_slots=slots,
        blocks=None if blocks is None else blocks.spec,
        batching=None if batch is None else batch.batching,
        deterministic=deterministic,
    )
    if cached is not None:
        return operands, problem_of(operands, options)  # a decode step has no mask, as a call plans it
    return operands, Problem.of_operands(operands, options)


def _columns_of_nonfinite(v: torch.Tensor, problem: Problem) -> torch.Tensor | None:
    """The columns of out ``[B, Hq, 1, D]`` that NaN or inf in v may reach as NaN; None where v is finite.

    A kernel multiplies a hidden key's value by a weight of zero, which makes NaN of what is not finite: of that column
    in rows of the same tile, and of a visible inf whose weight rounds to zero. Not so from another sequence.
    """
    if problem.batching is not None:
        return None
    columns = (~v.isfinite()).any(dim=2, keepdim=True)
    return columns.repeat_interleave(problem.group, dim=1) if bool(columns.any()) else None


def adds_up_in_fp16(plan: Plan) -> bool:
    """True if a Plan's variant has the tensor core add up in fp16."""
    return dict(variant_of(plan).flags).get("accumulator") == "fp16"


TANH_ERROR = 2.0**-11
"""The largest relative error of a GPU's ``tanh.approx.f32`` (PTX ISA, "Floating Point Instructions: tanh")."""


def takes_rough_tanh(plan: Plan) -> bool:
    """True if a Plan's scores go through a GPU's own tanh."""
    score = plan.problem.score
    if score is None or score.program.score is None or not plan.arch.is_gpu:
        return False
    return any(node.op in ("tanh", "sigmoid") for node in walk(score.program.score))


def with_rough_tanh(problem: Problem) -> Problem:
    """The problem with every tanh, and every sigmoid, too large by as much as a GPU's may be."""
    assert problem.score is not None
    program = problem.score.program
    assert program.score is not None
    off = const(1.0 + TANH_ERROR)
    rough = {it: apply("mul", it, off) for it in walk(program.score) if it.op in ("tanh", "sigmoid")}
    changed = replace(program, score=exchange(program.score, rough))
    return replace(problem, score=problem.score._replace(program=changed))


def lse_of_sums_in_halves(operands: Operands, problem: Problem) -> torch.Tensor:
    """lse in fp64 of scores that are added up in fp16, `PRODUCTS_AT_ONCE` products at a time, as mma.m16n8k16 does.

    Of plain scores, with a mask and sinks.
    """
    q, k, _ = operands.qkv
    wide_k = k.float().repeat_interleave(problem.group, dim=1)
    lse = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device)
    rows = max(1, CHUNK // max(1, problem.batch * problem.heads_q * problem.seq_kv))
    visible = problem.band.visible(problem.seq_q, problem.seq_kv, q.device)
    for first in range(0, problem.seq_q, rows):
        part = q[:, :, first : first + rows].float()
        scores = part.new_zeros((*part.shape[:3], problem.seq_kv), dtype=torch.float16)
        for some in range(0, problem.head_dim, PRODUCTS_AT_ONCE):
            dims = slice(some, some + PRODUCTS_AT_ONCE)
            scores = (scores.float() + part[..., dims] @ wide_k[..., dims].mT).half()
        scaled = (scores.double() * problem.scale).masked_fill(~visible[first : first + rows], -math.inf)
        if operands.sinks is not None:
            column = operands.sinks.double()[:, None, None].expand(*scaled.shape[:3], 1)
            scaled = torch.cat((scaled, column), dim=-1)
        lse[:, :, first : first + rows] = torch.logsumexp(scaled, dim=-1)
    return lse
