"""The tolerance, derived and never typed, and the comparisons that raise when it is exceeded.

With ``err(x) = |x - ref64|``, a kernel passes when ``max err <= 2 * max err(naive) + atol`` and the same for the RMS,
where `naive` is eager attention in the kernel's own dtypes and ``atol = 2 * max|(ref + 0.3 - 0.3) - ref|`` in the
output's dtype (the rule of FlashAttention 3 and 4's tests). Positions and kinds of NaN and inf must match.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from multiattn.layout import shape_of_out
from multiattn.operands import Operands, Options
from multiattn.problem import Problem, options_of
from multiattn.reference import attend, attend_each
from multiattn.score.eager import Part
from multiattn.sequences import rows_of_sequences

NAIVE_FACTOR = 2
"""How much worse than naive a kernel may round."""

LSE_ROUNDINGS = 4
"""fp32 roundings of lse itself, ``(max * scale_log2 + log2(sum)) * ln(2)``, of an epsilon each.

Three round by half of one each; an approximate log2 is off by two, 2^-22 absolute, which ln(2) makes less of.
"""

PRODUCTS_AT_ONCE = 16
"""Products of fp16 or bf16 that an mma adds to an accumulator: k of m16n8k16 and of wgmma."""

CHUNK = 1 << 27
"""Elements compared, or scores held, at a time: 1 GiB in fp64, so that a tensor past 2^31 elements fits."""


class Mismatch(AssertionError):  # noqa: N818 - an assertion, as pytest shows it: what was found, not what broke
    """A result is not within its budget; the message has the worst coordinate, both values and the budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """How far one tensor is from another over elements that are finite in both; zeros where there are none."""

    max: float
    rms: float
    worst: int = 0
    """Flat index of the largest deviation."""
    strangers: int = 0
    """Elements that are NaN or inf in one tensor and something else in the other."""
    first_stranger: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """The deviation from the truth that a tensor is allowed."""

    max: float
    rms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The truth of one result in fp64, and how far from it a kernel may be."""

    name: str
    truth: torch.Tensor
    budget: Allowance
    may_be_nan: torch.Tensor | None = None
    """Where NaN passes, whatever the truth: a bool that broadcasts to it; None for nowhere."""

    def judge(self, got: torch.Tensor) -> torch.Tensor:
        """`got`, with the truth in place of each NaN that passes."""
        if self.may_be_nan is None:
            return got
        return torch.where(self.may_be_nan & got.isnan(), self.truth.to(got.dtype), got)

    def check(self, got: torch.Tensor, who: object) -> Deviation:
        """The deviation of `got` from the truth; Mismatch if it exceeds the budget. `who` is named, a Plan say."""
        deviation = deviate(self.judge(got), self.truth)
        complaint = self.complaint(got, deviation)
        if complaint:
            raise Mismatch(f"{complaint}\n  {who}")
        return deviation

    def complaint(self, got: torch.Tensor, deviation: Deviation) -> str:
        """The fault of `got`, given its deviation from the truth: the worst place, both values, the budget."""
        if deviation.strangers:
            hint = "NaN is also what an element reads that was never written"
            return (
                f"{self.name} has NaN or inf in the wrong places: {deviation.strangers} of {got.numel()} elements, "
                f"first {self._at(got, deviation.first_stranger)} ({hint})"
            )
        for what, error, allowed in (
            ("max", deviation.max, self.budget.max),
            ("rms", deviation.rms, self.budget.rms),
        ):
            if error > allowed:
                where = self._at(got, deviation.worst)
                return f"{self.name} is off: {what} error {error:.3e}, allowed {allowed:.3e}, worst {where}"
        return ""

    def ratio(self, deviation: Deviation) -> float:
        """The share of the budget that a deviation uses: at most 1 passes, and inf is NaN in a wrong place."""
        if deviation.strangers:
            return math.inf
        _, error, allowed = self.tighter(deviation)
        return _divide(error, allowed)

    def tighter(self, deviation: Deviation) -> tuple[str, float, float]:
        """The one of max and rms that uses more of its budget, with the error and its limit."""
        pairs = ("max", deviation.max, self.budget.max), ("rms", deviation.rms, self.budget.rms)
        return max(pairs, key=lambda pair: _divide(pair[1], pair[2]))

    def _at(self, got: torch.Tensor, index: int) -> str:
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), got.shape))
        return f"at {list(where)}: got {float(got[where]):.6g}, want {float(self.truth[where]):.6g}"


def probe_rounding(truth: torch.Tensor, dtype: torch.dtype) -> float:
    """``2 * max|(ref + 0.3 - 0.3) - ref|`` in `dtype`: what one addition may cost a value of this size."""
    largest = 0.0
    for part in torch.split(truth.flatten(), CHUNK):
        rounded = part[part.isfinite()].to(dtype)
        if rounded.numel():
            largest = max(largest, float(((rounded + 0.3 - 0.3) - rounded).abs().max()))
    return 2 * largest


def softcap_factor(problem: Problem) -> float:
    """How much more than without a score may be off through a softcap, 3 for 2: as in FlashAttention's tests."""
    return 1.5 if problem.score is not None and "softcap" in problem.score.program.scalars else 1.0


def truncation(truth: torch.Tensor, terms: int) -> float:
    """The loss of tensor cores in a sum of `terms` products: half an ulp of fp32 each time they add to it.

    They add `PRODUCTS_AT_ONCE` products at a time and round toward zero, so losses do not cancel (Fasi, Higham,
    Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021). Nothing beside a rounding of the
    result, until there are millions of terms: on the H200 the same 1.5 % were missing of 2^23 in all three backends.
    """
    largest = 0.0
    for part in torch.split(truth.flatten(), CHUNK):
        finite = part[part.isfinite()]
        if finite.numel():
            largest = max(largest, float(finite.abs().max()))
    return terms / PRODUCTS_AT_ONCE * torch.finfo(torch.float32).eps / 2 * largest


def lse_atol(truth: torch.Tensor, head_dim: int) -> float:
    """As for out, but no less than the roundings of lse itself: naive may be right by luck where rows are few.

    And what tensor cores lose of a score, which is a sum of head_dim products.
    """
    finite = truth[truth.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 0.0
    own = LSE_ROUNDINGS * torch.finfo(torch.float32).eps * max(size, 1.0)
    return max(probe_rounding(truth, torch.float32), own) + truncation(finite, head_dim)


def derive_budget(naives: Sequence[torch.Tensor], truth: torch.Tensor, *, atol: float) -> Allowance:
    """The budget that follows from the worst error of some naive results.

    Where one has NaN and the truth has not it says nothing, which only tightens this: PyTorch 2.13's bf16 matmul on x86
    was seen to carry NaN of one row of the left matrix into the row above it.
    """
    deviations = [deviate(naive, truth) for naive in naives]
    for naive, deviation in zip(naives, deviations, strict=True):
        if 2 * deviation.strangers > truth.numel():
            raise ValueError(
                f"naive {naive.dtype} attention has NaN or inf in {deviation.strangers} of {truth.numel()} elements "
                f"where the truth has something else: no tolerance can be derived from it"
            )
    return Allowance(
        max=NAIVE_FACTOR * max(deviation.max for deviation in deviations) + atol,
        rms=NAIVE_FACTOR * max(deviation.rms for deviation in deviations) + atol,
    )


def rows_of(
    problem: Problem, operands: Operands, first: int, last: int, entry: int = 0
) -> tuple[Operands, Options, Part, slice]:
    """Attention of the queries [first, last): their inputs, with their own mask, and the keys that they see.

    `entry` is the number of the first batch entry, or of the sequence.
    """
    band, keys = problem.band.of_rows(first, last, problem.seq_q, problem.seq_kv)
    q, k, v = operands.qkv
    part = Part(first, keys.start, problem.seq_q, problem.seq_kv, entry)
    rows = operands._replace(q=q[:, :, first:last], k=k[:, :, keys], v=v[:, :, keys])
    return rows, options_of(problem)._replace(left=band.left, right=band.right), part, keys


def row_elements(problem: Problem) -> int:
    """The most elements that a tensor of the reference has for one query of all heads and batch entries."""
    return max(1, problem.batch * problem.heads_q * max(problem.seq_kv, problem.head_dim, problem.head_dim_v))


def reference_in_chunks(
    operands: Operands, problem: Problem, compute_dtype: torch.dtype, entry: int = 0
) -> tuple[torch.Tensor, ...]:
    """`multiattn.reference` over a few query rows at a time, and the keys that they see, in `compute_dtype`."""
    if problem.batching is not None:
        return _of_sequences_in_chunks(operands, problem, compute_dtype)
    rows = max(1, CHUNK // row_elements(problem))
    q = operands.q
    if problem.seq_q <= rows and not entry:
        return attend(operands, options_of(problem), compute_dtype)
    out = torch.empty(shape_of_out(q.shape, operands.v.shape), dtype=compute_dtype, device=q.device)
    of_rows = [torch.empty(q.shape[:3], dtype=compute_dtype, device=q.device) for _ in problem.forward_results[1:]]
    for first in range(0, problem.seq_q, rows):
        last = min(first + rows, problem.seq_q)
        some, options, part, _ = rows_of(problem, operands, first, last, entry)
        for whole, its in zip((out, *of_rows), attend(some, options, compute_dtype, part), strict=True):
            whole[:, :, first:last] = its
    return out, *of_rows


def _of_sequences_in_chunks(
    operands: Operands, problem: Problem, compute_dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """`reference_in_chunks` of each sequence. Rows of none are empty ones, or with a cache NaN, as before a kernel."""

    def attend_one(own: Operands, options: Options, part: Part) -> tuple[torch.Tensor, ...]:
        return reference_in_chunks(own, Problem.of_operands(own, options), compute_dtype, part.first_entry)

    found = attend_each(operands, options_of(problem), compute_dtype, attend_one)
    if problem.cache is not None and (starts := operands.indices.cu_seqlens_q) is not None:
        unused = ~rows_of_sequences(starts, operands.q.shape[2])
        for it in found:
            it[:, :, unused] = torch.nan
    return found


def deviate(got: torch.Tensor, want: torch.Tensor) -> Deviation:
    """How far `got` is from `want`, element by element in fp64, whatever their dtypes."""
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}")
    largest, worst, squares, finite_count = 0.0, 0, 0.0, 0
    strangers, first_stranger = 0, 0
    for start, a, b in _parts(got, want):
        finite = a.isfinite() & b.isfinite()
        error = torch.where(finite, (a - b).abs(), 0.0)
        part_largest, part_worst = error.max(dim=0)
        if float(part_largest) > largest:
            largest, worst = float(part_largest), start + int(part_worst)
        squares += float(error.square().sum())
        finite_count += int(finite.sum())
        strange = ~finite & ~(a.isnan() & b.isnan()) & (a != b)
        found = int(strange.sum())
        if found and not strangers:
            first_stranger = start + int(strange.to(torch.int8).argmax())
        strangers += found
    rms = math.sqrt(squares / finite_count) if finite_count else 0.0
    return Deviation(max=largest, rms=rms, worst=worst, strangers=strangers, first_stranger=first_stranger)


def _parts(got: torch.Tensor, want: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(first flat index, part of got, part of want) in fp64."""
    flat_got, flat_want = got.flatten(), want.flatten()
    for start in range(0, got.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        yield start, flat_got[part].double(), flat_want[part].double()


def _divide(error: float, allowed: float) -> float:
    if error == 0.0:
        return 0.0
    return error / allowed if allowed else math.inf


def expected_forward(operands: Operands, problem: Problem) -> tuple[Expected, ...]:
    """The results of a problem, from `multiattn.reference` in fp64, fp32 (for sums, row maxima) and q's dtype.

    Raises ValueError where naive has overflown in most places: such inputs cannot be judged.
    """
    dtype = operands.q.dtype
    out, *of_rows = reference_in_chunks(operands, problem, torch.float64)
    naive_out, *_ = reference_in_chunks(operands, problem, dtype)
    _, *naive_of_rows = reference_in_chunks(operands, problem, torch.float32)
    atol = softcap_factor(problem) * probe_rounding(out, dtype)
    return (
        Expected(name="out", truth=out, budget=derive_budget((naive_out,), out, atol=atol)),
        *(
            Expected(name=name, truth=it, budget=derive_budget((naive,), it, atol=lse_atol(it, problem.head_dim)))
            for name, it, naive in zip(problem.forward_results[1:], of_rows, naive_of_rows, strict=True)
        ),
    )
