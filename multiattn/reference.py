"""The semantics of attention, eager: any device, any dtype in, any compute dtype. Truth for tests, not for speed."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from multiattn.block_mask import BlockLists, of_one_sequence, seen_blocks
from multiattn.layout import shape_of_out
from multiattn.mask import KINDS
from multiattn.meant import refuse_call
from multiattn.operands import GRADIENTS, Operands, Options
from multiattn.plan.backend import BACKENDS, REFERENCE, Backend, Launcher, Op, Plan, Variant
from multiattn.plan.support import Capability, Reason
from multiattn.problem import Problem, options_of
from multiattn.progress import NOTE, LongWork
from multiattn.score import BoundScore, eager
from multiattn.score.eager import Part
from multiattn.score.transforms import is_wrapped
from multiattn.sequences import NO_INDICES, SCALES, Indices
from multiattn.signatures import ReferenceOptions, ReferenceResults, dense_call, names_of, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAMES, _RESULTS = names_of(ReferenceOptions), names_of(ReferenceResults)


@takes(ReferenceResults)
def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *extra: NoReturn,
    **options: Unpack[ReferenceResults],
) -> tuple[torch.Tensor, ...]:
    """Attention as the contract defines it, in plain differentiable PyTorch.

    ``out = softmax(s + mask) @ v`` and ``lse = log(sum(exp(s + mask)))``, natural log. The scores s are
    ``scale * q @ k^T``, changed by softcap, ALiBi, bias and `score_mod`, in this order.

    Args:
        q: ``[B, Hq, Sq, D]``, floating point.
        k: ``[B, Hkv, Skv, D]``, with ``Hq % Hkv == 0``.
        v: ``[B, Hkv, Skv, Dv]``; Dv need not be D.
        causal: Aligned at the bottom right: query i sees key j when ``j <= i + Skv - Sq``.
        window, softcap, alibi_slopes, bias, sinks, score_mod, block_mask: As for `multiattn.fmha`.
        scale: A finite number. None is ``1/sqrt(D)``.
        compute_dtype: The dtype of every intermediate and of all results. float64 gives the truth; the inputs' own
            dtype gives the rounding that a naive implementation commits.
        return_max: Also return the largest score of each row, as `multiattn.fmha` does.

    Returns:
        out ``[B, Hq, Sq, Dv]`` and lse ``[B, Hq, Sq]``. A row that sees no key has ``out = 0`` and ``lse = -inf``, or
        its sink. Only visible keys count: a NaN or inf in a masked key's row of k or v reaches nothing.

    Raises:
        TypeError, ValueError: As `multiattn.fmha`.
    """
    if extra or v is None or not _RESULTS.issuperset(options):
        refuse_call(reference, extra, options, q=q, k=k, v=v)
    operands, asked, dtype = _asked(Operands(q, k, v), options)
    return attend(operands, asked._replace(row_max=options.get("return_max", False)), dtype)


def _asked(operands: Operands, options: ReferenceOptions) -> tuple[Operands, Options, torch.dtype]:
    """The operands and options of a call, and its dtype to compute in, which is checked first."""
    dtype = options.get("compute_dtype", torch.float32)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"compute_dtype: got {dtype!r}; allowed floating-point dtypes; torch.float64 gives the truth")
    return *dense_call(operands, {"deterministic": False, **options}), dtype


def attend(
    operands: Operands, options: Options, compute_dtype: torch.dtype, part: Part | None = None
) -> tuple[torch.Tensor, ...]:
    """`reference` of operands and options; `part` says where q, k and v are from, if they are parts of sequences."""
    with _told(Problem.of_any(operands, options), operands.q.device):
        return _attend(operands, options, compute_dtype, part)


def _attend(
    operands: Operands, options: Options, compute_dtype: torch.dtype, part: Part | None
) -> tuple[torch.Tensor, ...]:
    if options.batching is not None:

        def attend_one(own: Operands, its: Options, place: Part) -> tuple[torch.Tensor, ...]:
            return _attend(own, its, compute_dtype, place)

        return attend_each(operands, options, compute_dtype, attend_one)
    return _attend_dense(Problem.of_any(operands, options), operands, compute_dtype, part)


_TOLD_ELEMENTS = 1 << 30
"""Products of a query's and a key's elements from which a caller may have to wait on a CPU: fewer take well under two
seconds of one core."""


def _told(problem: Problem, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Tells a caller who waits for a large problem on a CPU; nothing of it is in a graph that is being compiled."""
    if torch.compiler.is_compiling() or device.type != "cpu":
        return contextlib.nullcontext()
    rows = problem.batch * problem.heads_q * problem.seq_q
    if rows * problem.seq_kv * problem.width < _TOLD_ELEMENTS:
        return contextlib.nullcontext()
    return LongWork("computing the reference on the CPU", kind="reference", note=NOTE)


def _attend_dense(
    problem: Problem, operands: Operands, compute_dtype: torch.dtype, part: Part | None
) -> tuple[torch.Tensor, ...]:
    from einops import rearrange, repeat  # here and below: a sixth of the time that importing the package takes

    sinks = operands.sinks
    q, k, v = (tensor.to(compute_dtype) for tensor in operands.qkv)
    k, v = (repeat(tensor, "b h s d -> b (h group) s d", group=problem.group) for tensor in (k, v))

    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * problem.scale
    scores, visible = _modify(scores, problem, operands, part)
    scores = scores.masked_fill(~visible, -math.inf)
    largest = (_largest(scores),) if problem.row_max else ()

    if sinks is not None:  # one more column, of zeros in v
        column = repeat(sinks.to(compute_dtype), "h -> b h i 1", b=problem.batch, i=problem.seq_q)
        scores = torch.cat((scores, column), dim=-1)
        visible = torch.nn.functional.pad(visible, (0, 1), value=True)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    if scores.shape[-1] == 0:
        return scores @ v, scores.sum(dim=-1) - math.inf, *largest  # zeros and -inf, differentiable like any other
    row_max = scores.amax(dim=-1, keepdim=True).detach()
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)  # an empty row must not compute inf - inf
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(dim=-1, keepdim=True)
    weights = weights / row_sum.masked_fill(row_sum == 0.0, 1.0)
    sees_some = row_sum > 0.0  # the others have no gradient, where that of log(0) would be NaN
    lse = torch.where(
        sees_some | row_sum.isnan(), row_max + torch.log(row_sum.masked_fill(row_sum == 0.0, 1.0)), -math.inf
    )
    lse = rearrange(lse, "b h i 1 -> b h i")
    return _weighted_sum(weights, v, visible), lse, *largest


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """The largest score of each row, without a gradient; -inf of none."""
    scores = scores.detach()
    return scores.amax(dim=-1) if scores.shape[-1] else scores.sum(dim=-1) - math.inf


def _modify(
    scores: torch.Tensor, problem: Problem, operands: Operands, part: Part | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores that count ``[B, Hq, Sq, Skv]``, and the keys that each query sees, which broadcasts to it."""
    visible = problem.band.visible(problem.seq_q, problem.seq_kv, scores.device)
    bound = None if problem.score is None else _bound(problem, operands)
    if problem.has_tail and bound is not None:
        masked = eager.visible(bound, scores.shape, scores.device, part)
        visible = visible if masked is None else visible & masked
    if problem.blocks is not None:
        where = part or Part(0, 0, problem.seq_q, problem.seq_kv)
        rows = torch.arange(where.first_query, where.first_query + problem.seq_q, device=scores.device)
        keys = torch.arange(where.first_key, where.first_key + problem.seq_kv, device=scores.device)
        lists = operands.indices.named
        partial, full = seen_blocks(lists, rows // problem.blocks.queries, keys // problem.blocks.keys)
        masked = None if bound is None else eager.visible(bound, scores.shape, scores.device, part)
        visible = visible & (full | (partial if masked is None else partial & masked))
    return scores if bound is None else eager.modified(bound, scores, part), visible


def _bound(problem: Problem, operands: Operands) -> BoundScore:
    assert problem.score is not None
    return BoundScore(problem.score.program, problem.score.numbers, operands.captured)


@takes(ReferenceOptions)
def reference_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    *extra: NoReturn,
    dlse: torch.Tensor | None = None,
    **options: Unpack[ReferenceOptions],
) -> tuple[torch.Tensor, ...]:
    """Gradients as the kernels compute them, in plain PyTorch: from a forward's results, not by differentiating it.

    With s the scores and ``p = exp(s - lse)`` the softmax, ``dv = p^T @ dout``, ``dp = dout @ v^T`` and
    ``ds = p * (dp - delta)``, where ``delta = rowsum(dout * out) - dlse``. ds goes back through the changes of the
    scores to ``scale * q @ k^T``; then ``dq = scale * ds @ k`` and ``dk = scale * ds^T @ q``. The source is Dao,
    "FlashAttention-2" (arXiv 2307.08691), Algorithm 2; dlse enters as ``d lse / d s = p``.

    Args:
        q, k, v, compute_dtype, and all from causal to block_mask: As for `reference`.
        out: The output of a forward of any backend, ``[B, Hq, Sq, Dv]``.
        lse: The log-sum-exp of the same forward, ``[B, Hq, Sq]``.
        dout: The gradient of out, like it.
        dlse: The gradient of lse, like it. None is zero.

    Returns:
        dq, dk and dv like q, k and v, in `compute_dtype`. dk and dv of a key/value head are summed over its group. A
        row that sees no key has ``dq = 0`` and adds nothing to dk and dv. With sinks, dsinks ``[Hq]`` follows:
        ``-sum(exp(sink - lse) * delta)`` over batch entries and queries. Then come the gradients of those of
        alibi_slopes, bias and the tensors that `score_mod` captures that require one, in this order.
    """
    if extra or dout is None or not _NAMES.issuperset(options):
        refuse_call(reference_backward, extra, options, q=q, k=k, v=v, out=out, lse=lse, dout=dout)
    return differentiate(*_asked(Operands(q, k, v, out, lse, dout, dlse), options))


def differentiate(
    operands: Operands, options: Options, compute_dtype: torch.dtype, part: Part | None = None
) -> tuple[torch.Tensor, ...]:
    """`reference_backward` of operands and options; `part` as for `attend`."""
    with _told(Problem.of_any(operands, options), operands.q.device):
        return _differentiate(operands, options, compute_dtype, part)


def _differentiate(
    operands: Operands, options: Options, compute_dtype: torch.dtype, part: Part | None
) -> tuple[torch.Tensor, ...]:
    if options.batching is not None:
        return _differentiate_packed(operands, options, compute_dtype)
    return _differentiate_dense(Problem.of_any(operands, options), operands, compute_dtype, part)


def _differentiate_dense(
    problem: Problem, operands: Operands, compute_dtype: torch.dtype, part: Part | None
) -> tuple[torch.Tensor, ...]:
    from einops import reduce, repeat

    sinks = operands.sinks
    assert operands.out is not None
    assert operands.lse is not None
    assert operands.dout is not None
    given = (*operands.qkv, operands.out, operands.lse, operands.dout)
    q, k, v, out, lse, dout = (tensor.to(compute_dtype) for tensor in given)
    k, v = (repeat(tensor, "b h s d -> b (h group) s d", group=problem.group) for tensor in (k, v))
    delta = torch.einsum("b h i d, b h i d -> b h i", dout, out)
    if operands.dlse is not None:
        delta = delta - operands.dlse.to(compute_dtype)

    products = torch.einsum("b h i d, b h j d -> b h i j", q, k) * problem.scale
    scores, visible = _modify(products, problem, operands, part)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # an empty row has no weight, where -inf would give exp(inf)
    weights = torch.exp(scores - lse[..., None]).masked_fill(~visible, 0.0)
    dweights = torch.einsum("b h i d, b h j d -> b h i j", dout, v)
    dscores = (weights * (dweights - delta[..., None])).masked_fill(~visible, 0.0)
    dcaptured: tuple[torch.Tensor, ...] = ()
    if problem.score is not None:
        bound = _bound(problem, operands)
        slots, apart = problem.score.gradients, problem.score.scores is not None
        dcaptured = eager.gradients(bound, slots, products, dscores, part, apart=apart)
        dscores = dscores * eager.slope(bound, products, part)
    dscores = dscores * problem.scale

    dq = torch.einsum("b h i j, b h j d -> b h i d", dscores, k)
    dq = dq.masked_fill(~visible.any(-1, keepdim=True), 0.0)  # also where k is NaN
    dk = torch.einsum("b h i j, b h i d -> b h j d", dscores, q)
    dv = torch.einsum("b h i j, b h i d -> b h j d", weights, dout)
    dk, dv = (reduce(grad, "b (h group) s d -> b h s d", "sum", group=problem.group) for grad in (dk, dv))
    if sinks is None:
        return dq, dk, dv, *dcaptured
    of_sinks = torch.exp(sinks.to(compute_dtype)[:, None] - lse)  # [B, Hq, Sq]
    return dq, dk, dv, -(of_sinks * delta).sum(dim=(0, 2)), *dcaptured


# ---------------------------------------------------------------- packed batches and caches


class OwnRows(NamedTuple):
    """The place of one sequence in q, and of its keys in a packed batch: batch entries, and rows of these."""

    entries: slice
    queries: slice
    keys: slice


def sequences(operands: Operands, options: Options) -> Iterator[tuple[Operands, Options, Part, OwnRows]]:
    """Each sequence as a batch of one, its keys gathered, with its options, its place and its rows.

    Whatever starts and lengths say: rows that there are not are left out.
    """
    problem, where = Problem.of_any(operands, options), operands.indices
    of_q = {name: it for name in ("q", "out", "lse", "dout", "dlse") if (it := getattr(operands, name)) is not None}
    queries = None if where.cu_seqlens_q is None else _slices(where.cu_seqlens_q, operands.q.shape[2])
    if where.seqlens_kv is None:
        assert where.cu_seqlens_kv is not None
        keys = _slices(where.cu_seqlens_kv, operands.k.shape[2])
    else:
        keys = [slice(0, length) for length in where.seqlens_kv.clamp(0, problem.seq_kv).tolist()]
    for entry, its_keys in enumerate(keys):
        entries = slice(entry, entry + 1) if queries is None else slice(None)
        rows = OwnRows(entries, slice(None) if queries is None else queries[entry], its_keys)
        own = {name: it[rows.entries, :, rows.queries] for name, it in of_q.items()}
        if where.seqlens_kv is None:
            own |= {"k": operands.k[:, :, its_keys], "v": operands.v[:, :, its_keys]}
        else:
            length, seq_q = its_keys.stop, own["q"].shape[2]
            seen_from = 0 if options.left is None else min(max(length - seq_q - options.left, 0), length)
            gathered = (gather(it, length, entry, where.page_table, seen_from) for it in (operands.k, operands.v))
            own |= dict(zip(("k", "v"), gathered, strict=True))
            if problem.stored is not None:
                scales = (_scales(where, name, length, entry, seen_from) for name in SCALES)
                own["k"], own["v"] = (own[name].double() * it for name, it in zip("kv", scales, strict=True))
                own["q"] = own["q"].double()
        part = Part(0, 0, own["q"].shape[2], own["k"].shape[2], entry)
        indices, blocks = NO_INDICES, None
        if problem.blocks is not None:
            lists = of_one_sequence(BlockLists.among(where.named, problem.blocks), entry, rows.queries, its_keys)
            indices, blocks = Indices(**lists.named), lists.spec
        yield operands._replace(**own, indices=indices), options._replace(batching=None, blocks=blocks), part, rows


def _scales(where: Indices, name: str, length: int, entry: int, first: int) -> torch.Tensor:
    """The scales of a sequence's keys or values in fp64, ``[1, Hkv, length or 1, 1]``."""
    scale: torch.Tensor = getattr(where, name)
    if scale.ndim == 2:
        return scale[entry, :, None, None].double()[None]
    return gather(scale[..., None], length, entry, where.page_table, first).double()


def _slices(cu_seqlens: torch.Tensor, rows: int) -> list[slice]:
    """The rows of each sequence, all of them inside so many; one that would end before it begins is empty."""
    inside = [min(max(it, 0), rows) for it in cu_seqlens.tolist()]
    return [slice(begin, max(begin, end)) for begin, end in itertools.pairwise(inside)]


def attend_each(
    operands: Operands,
    options: Options,
    compute_dtype: torch.dtype,
    attend_one: Callable[[Operands, Options, Part], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    """Results of each sequence; rows of none are empty ones, which kernels leave where queries have a cache."""
    q, sinks = operands.q, operands.sinks
    out = q.new_zeros(shape_of_out(q.shape, operands.v.shape), dtype=compute_dtype)
    lse, *largest = (q.new_full(q.shape[:3], -math.inf, dtype=compute_dtype) for _ in range(1 + options.row_max))
    if sinks is not None:
        lse.copy_(sinks[:, None].expand_as(lse))
    for own, its_options, part, (entries, rows, _) in sequences(operands, options):
        for whole, its in zip((out, lse, *largest), attend_one(own, its_options, part), strict=True):
            whole[entries, :, rows] = its
    return out, lse, *largest


def _differentiate_packed(operands: Operands, options: Options, compute_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """`differentiate` of each sequence; rows of none have no gradient."""
    score = Problem.of_any(operands, options).score
    sums = () if score is None else tuple(it.shape for it in score.gradient_layouts.values())
    shared = [() if operands.sinks is None else operands.sinks.shape, *sums][operands.sinks is None :]
    dq, dk, dv, *totals = (
        operands.q.new_zeros(it, dtype=compute_dtype) for it in (*(it.shape for it in operands.qkv), *shared)
    )
    for own, its_options, part, (_, rows, keys) in sequences(operands, options):
        found = _differentiate(own, its_options, compute_dtype, part)
        dq[:, :, rows], dk[:, :, keys], dv[:, :, keys] = found[:3]
        for total, gradient in zip(totals, found[3:], strict=True):
            if gradient.shape != total.shape:  # each score has an element of its own
                total = total[part.first_entry, :, : part.seq_q, : part.seq_kv]
            total += gradient.view(total.shape)
    return dq, dk, dv, *totals


def gather(
    cache: torch.Tensor, length: int, entry: int, page_table: torch.Tensor | None, first: int = 0
) -> torch.Tensor:
    """The first `length` rows of a sequence's keys or values, ``[1, Hkv, length, D]``; nothing else is read.

    Nor is a row before the `first` that a query sees: there are zeros.
    """
    if page_table is None:
        rows = cache[entry, :, first:length]
    else:
        page = cache.shape[2]
        used = page_table[entry, first // page : -(-length // page)].long()
        rows = cache[used].transpose(0, 1).flatten(1, 2)[:, first % page :][:, : length - first]  # [Hkv, rows, D]
    return torch.nn.functional.pad(rows, (0, 0, first, 0))[None] if first else rows[None]


def _weighted_sum(weights: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``weights @ v`` in which a masked key contributes nothing, where IEEE has ``0 * nan = 0 * inf = nan``."""
    finite = torch.isfinite(v)
    if not is_wrapped(v) and bool(finite.all()):
        return weights @ v
    out = weights @ v.masked_fill(~finite, 0.0)
    seen = visible.to(v.dtype).expand_as(weights)
    for value in (math.inf, -math.inf, math.nan):
        hit = v.isnan() if math.isnan(value) else v == value
        reached = seen @ hit.to(v.dtype) > 0
        out = out + torch.zeros_like(out).masked_fill(reached, value)
    return out


def _prepare(plan: Plan) -> Launcher:
    problem, is_forward = plan.problem, plan.direction == "forward"
    compute_dtype = torch.float64 if problem.dtype == "fp64" else torch.float32
    options = options_of(problem)

    def launch(operands: Operands) -> None:
        run, names = (attend, problem.forward_results) if is_forward else (differentiate, GRADIENTS)
        with torch.autocast(operands.q.device.type, enabled=False):  # it would round what the contract has in fp32
            results: Sequence[torch.Tensor] = run(operands, options, compute_dtype)
        rows = slice(None)
        if problem.cache is not None and problem.has_packed_queries:
            assert operands.indices.cu_seqlens_q is not None
            ends = operands.indices.cu_seqlens_q[[0, -1]].clamp(0, operands.q.shape[2])
            rows = slice(*ends.tolist())  # the others are left as they are
        for name, result in zip(names, results, strict=False):  # the gradient of sinks is made of delta
            getattr(operands, name)[:, :, rows].copy_(result[:, :, rows])
        for total, result in zip(operands.dcaptured, results[-len(operands.dcaptured) or len(results) :], strict=True):
            total.copy_(result)
        if operands.delta is not None:
            assert operands.out is not None
            assert operands.dout is not None
            delta = (operands.dout.to(compute_dtype) * operands.out.to(compute_dtype)).sum(dim=-1)
            operands.delta.copy_(delta if operands.dlse is None else delta - operands.dlse)

    return launch


_VARIANT = Variant(
    name="eager",
    summary="the semantics in fp32, O(Sq * Skv) memory",
    capability=Capability(
        arches=(),
        dtypes=("fp16", "bf16", "fp32", "fp64"),
        head_dim_multiple=1,
        alignment=1,
        head_dim_max=1 << 16,
        masks=KINDS,
        sinks=True,
        row_max=True,
        scores=True,
        block_masks=1,
        packed_blocks=1,
        packing=True,
        caches=True,
        stored=True,
        score_gradients=True,
    ),
    rules=(),
)

BACKEND = Backend(
    name=REFERENCE,
    summary="eager PyTorch, for truth",
    probe=lambda arch: (),
    probe_compiler=lambda: (
        Reason(code="compiler", got=REFERENCE, allowed="a backend with kernels", hint=f"name {', '.join(BACKENDS)}"),
    ),
    versions=lambda: {"torch": torch.__version__},
    forward=Op(variants=(_VARIANT,), prepare=_prepare),
    backward=Op(variants=(_VARIANT,), prepare=_prepare),
)
