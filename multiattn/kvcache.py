"""Attention over caches of keys and values: `fmha_kvcache`, for one step of a generation or a chunk of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch.compiler import is_compiling

from multiattn.meant import refuse_call
from multiattn.operands import Operands, Options, with_score_of_cache
from multiattn.packed import as_batch_of_one, of_batch_of_one
from multiattn.plain import plain
from multiattn.run import compat, values
from multiattn.run.autograd import attend_cached, autocast
from multiattn.sequences import Batching, Indices, Kind, Scaling
from multiattn.signatures import PLAIN, CacheOptions, Scores, names_of, settled, takes
from multiattn.validate.results import check_out
from multiattn.validate.scales import is_stored, scales_of
from multiattn.validate.sequences import check_cache, check_numbers, check_values

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAMES = names_of(CacheOptions)


@overload
def fmha_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max: Literal[False] = ...,
    **options: Unpack[CacheOptions],
) -> torch.Tensor: ...


@overload
def fmha_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    return_lse: Literal[True],
    return_max: Literal[False] = ...,
    **options: Unpack[CacheOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def fmha_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    return_lse: bool,
    return_max: Literal[False] = ...,
    **options: Unpack[CacheOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


@overload
def fmha_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max: Literal[True],
    **options: Unpack[CacheOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def fmha_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    return_lse: Literal[True],
    return_max: Literal[True],
    **options: Unpack[CacheOptions],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def fmha_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    return_lse: bool = ...,
    return_max: bool,
    **options: Unpack[CacheOptions],
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...


@takes(CacheOptions)
def fmha_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *extra: NoReturn,
    return_lse: bool = False,
    return_max: bool = False,
    **options: Unpack[CacheOptions],
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Fused attention of new queries over B caches that already hold the new keys and values. It has no gradient.

    The host reads no length and waits for nothing. So one CUDA graph serves every step of a generation: a replay reads
    the values that `seqlens_kv` and `page_table` have at that time.

    Args:
        q: ``[B, Hq, Sq, D]``, fp16 or bf16, any strides with unit stride on D: the last Sq tokens of each sequence.
            With `cu_seqlens_q` it is ``[T, Hq, D]``.
        k_cache: ``[B, Hkv, S, D]`` with ``Hq % Hkv == 0`` (GQA, MQA), any strides with unit stride on D. Of the dtype
            of q, or of 8-bit numbers with `k_scale`; on the device of q. With `page_table` it is ``[pages, Hkv, page,
            D]``, with pages of any size. Pass a transposed view if pages are ``[page, Hkv, D]`` in memory (NHD).
        v_cache: Like k_cache, with its own strides and head_dim Dv. Both may be views of one tensor: where the first
            Dv columns of a key are its value (MLA), v_cache is ``k_cache[..., :Dv]``.
        seqlens_kv: int32 ``[B]`` on the device of q: the keys of each sequence, from 0 to S (or ``max_pages * page``).
            Values on a GPU are not checked, because a check would wait for the GPU. There larger ones are taken for S,
            and negative ones for 0.
        page_table: int32 ``[B, max_pages]`` on the device of q, any stride between rows. Key j of sequence b is row
            ``j % page`` of page ``page_table[b, j // page]``. Several sequences may share a page. Entries beyond the
            length of a sequence are never read, nor are those whose keys all lie before the window of its first query:
            their pages may be freed, and the entries have any number.
        cu_seqlens_q: int32 ``[B + 1]`` on the device of q, as for `multiattn.fmha_varlen`. Sequence b has the rows
            ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q, which may be none. Chunks of prompts and single tokens
            may be in one call. Rows of no sequence are left as they are; in a fresh tensor they are undefined.
        max_seqlen_q: With `cu_seqlens_q`, at least the most rows of a sequence. A sequence with more rows has undefined
            results.
        num_splits: The number of parts, 1 to 256, that the keys of a sequence are divided into, each for its own block.
            None chooses by sizes, never by lengths. With 1, a sequence's result has the same bits in any batch
            whose sequences have as many queries at most.
        out: A tensor to write the results to, and to return: like q but as wide as v_cache, at a multiple of 16 bytes,
            with unit stride on Dv and other strides that are multiples of 16 bytes. None is a fresh tensor.
        causal: Aligned at the bottom right: query i of Sq sees the keys up to ``i + seqlens_kv[b] - Sq``.
        window: As for `multiattn.fmha`, by each sequence's own length.
        k_scale, v_scale: Of a cache of 8-bit numbers (float8_e4m3fn or int8), each of which stands for itself times its
            scale: a number, or fp32 on the device of q, one number, ``[Hkv]``, ``[B, Hkv]`` for B sequences, or one for
            each token and head, ``[B, Hkv, S]`` or with pages ``[pages, Hkv, page]``. None is 1.
            `multiattn.quantize_cache` makes them.
        scale, softcap, sinks: As for `multiattn.fmha`.
        alibi_slopes: fp32 ``[Hq]`` or ``[B, Hq]``, B sequences: query i is at position ``i + seqlens_kv[b] - Sq``.
        bias: ``[B|1, Hq|1, Sq|1, S|1]``, dtype of q or fp32, or bool where True is visible, as for `multiattn.fmha`. S
            is the room for keys, ``max_pages * page`` with pages, or fewer: then they are the last keys of each
            sequence, and nothing is added to the scores of those before them. So ``[B, 1, Sq, Sq]`` of bools is a tree
            of drafted tokens, which are the last keys: it is read for their tiles alone. Rows are of the Sq (or
            `max_seqlen_q`) queries.
        score_mod: FlexAttention's ``(score, b, h, q_idx, kv_idx) -> score``. Positions are those in the sequence,
            ``q_idx = i + seqlens_kv[b] - Sq``: the callable of training is the one of serving.
        block_mask: FlexAttention's `BlockMask`, both of whose lengths are at least the room for keys; positions as for
            `score_mod`. It hides keys, and every one is read.
        backend: As for `multiattn.fmha`. On CPU tensors ``"auto"`` is the reference, which reads lengths on the host.
        variant: A variant of that backend's forward. None is its best one that can run the problem.
        return_lse: Also return the log-sum-exp.
        return_max: Also return the largest score of each row, last, as `multiattn.fmha` does.

    Returns:
        The output, like q but as wide as v_cache, laid out as by `multiattn.fmha` (or `multiattn.fmha_varlen`). With
        `return_lse` also lse, fp32 ``[B, Hq, Sq]`` or ``[Hq, T]``, natural log. A row that sees no key has ``out = 0``
        and ``lse = -inf`` (with a sink: ``lse = sink``). With `return_max` also the largest score of each row, last.

    Raises:
        TypeError, ValueError: An input is wrong for every backend. Values of lengths and pages are
            checked on a CPU; on a GPU where ``MULTIATTN_CHECK=1`` asks for it, as that waits for the device.
        Unsupported: The backend cannot run this problem here; `.reasons` says why.
        NotImplementedError: An input requires grad, and gradients are enabled.

    Source of the division of keys: "Flash-Decoding" (https://pytorch.org/blog/flash-decoding/).
    """
    where = Where.of(options)
    if extra or v_cache is None or where.seqlens_kv is None or not _NAMES.issuperset(options):
        needed = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seqlens_kv": where.seqlens_kv}
        refuse_call(fmha_kvcache, extra, options, **needed)
    if compat.autocast_active():
        if is_stored(k_cache):
            (q,) = autocast(q)
        else:
            q, k_cache, v_cache = autocast(q, k_cache, v_cache)
    operands, asked = cached_call(q, k_cache, v_cache, options, where)
    out, is_packed = options.get("out"), where.cu_seqlens_q is not None
    own = out if out is None or not is_packed else as_batch_of_one(out)
    if return_max:
        asked = asked._replace(row_max=True)
    found, lse, *row_max = attend_cached(operands, asked, own)
    if out is None:
        out = of_batch_of_one(found) if is_packed else found
    if not (return_lse or return_max):
        return out
    sums = (lse, *row_max) if return_lse else row_max
    return (out, *(it.squeeze(0) if is_packed else it for it in sums))


class Where(NamedTuple):
    """The keys and queries of a call's sequences, as its caller gives them."""

    seqlens_kv: torch.Tensor
    page_table: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int | None
    num_splits: int | None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Where:
        """Those among the options of a call."""
        given: Callable[[str], Any] = options.get
        numbers = plain(given("max_seqlen_q")), plain(given("num_splits"))
        scales = given("k_scale"), given("v_scale")
        return cls(given("seqlens_kv"), given("page_table"), given("cu_seqlens_q"), *numbers, *scales)


def cached_call(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, options: Mapping[str, Any], where: Where
) -> tuple[Operands, Options]:
    """The operands and options of a call of `fmha_kvcache`. TypeError or ValueError, naming what came."""
    asked, scores = settled(options)
    given = options.get
    return with_cache(q, k_cache, v_cache, asked, where, scores, given("sinks"), given("out"))


def with_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    options: Options,
    where: Where,
    scores: Scores = PLAIN,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[Operands, Options]:
    """The operands and options of a call with a cache. TypeError or ValueError, naming what came."""
    is_packed = where.cu_seqlens_q is not None
    indices = Indices(cu_seqlens_q=where.cu_seqlens_q, seqlens_kv=where.seqlens_kv, page_table=where.page_table)
    has_scales = is_stored(k_cache) or where.k_scale is not None or where.v_scale is not None
    check_numbers(where.max_seqlen_q, where.num_splits, is_packed=is_packed)
    if not is_compiling():  # else checked when the op is called
        check_cache(q, k_cache, v_cache, indices, sinks, strides=not compat.transforms_active())
        if values.can_be_read(*indices.given):
            check_values(q, k_cache, indices, where.max_seqlen_q, options.left)
    of_k = of_v = None
    if has_scales:
        indices, of_k, of_v = _with_scales(indices, where, k_cache, v_cache)
    if out is not None:
        check_out(out, q, v_cache, layout=not is_compiling())  # a compiled call copies its result
    strides_out = None
    if out is not None:
        entry, head, row, _ = out.stride() if not is_packed else as_batch_of_one(out).stride()
        strides_out = entry, head, row
    kind: Kind = "cache" if where.page_table is None else "pages"
    batching = Batching(kind, where.max_seqlen_q, splits=where.num_splits, strides_out=strides_out)
    if has_scales:
        batching = batching._replace(k_scaling=of_k, v_scaling=of_v)
    operands = Operands(as_batch_of_one(q) if is_packed else q, k_cache, v_cache, sinks=sinks, indices=indices)
    if any(it is not None for it in scores):
        pages = 1 if where.page_table is None else where.page_table.shape[1]
        queries = where.max_seqlen_q if where.max_seqlen_q is not None else q.shape[2]
        lengths = (where.seqlens_kv.shape[0], queries, k_cache.shape[2] * pages)
        operands, options = with_score_of_cache(operands, options, *scores, lengths)
    return operands, options._replace(batching=batching)


def _with_scales(
    indices: Indices, where: Where, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> tuple[Indices, Scaling, Scaling]:
    """The tensors of a call with those of its scales, and what each of these is of."""
    assert where.seqlens_kv is not None
    found: dict[str, torch.Tensor] = {}
    for name, given, cache in (("k_scale", where.k_scale, k_cache), ("v_scale", where.v_scale, v_cache)):
        if given is not None or is_stored(cache):  # else the other is refused
            found[name] = scales_of(name, given, cache, where.seqlens_kv)
    of_k, of_v = (Scaling(it.ndim == 3) for it in found.values())
    return indices._replace(**found), of_k, of_v
