"""Attention over caches of keys and values: `fmha_kvcache`, for one step of a generation or a chunk of a prompt."""

from __future__ import annotations

from typing import Literal, NamedTuple, NoReturn, overload

import torch
from torch.compiler import is_compiling

from multiattn.mask import Window
from multiattn.operands import Operands, Options, with_score
from multiattn.packed import as_batch_of_one
from multiattn.paged import Cache, check_cache, check_numbers, check_out, check_values
from multiattn.run import compat
from multiattn.run.autograd import attend_cached, autocast
from multiattn.validate import check_modification, hides_unknown, refuse_unknown


@overload
def fmha_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    seqlens_kv: torch.Tensor,
    page_table: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    num_splits: int | None = ...,
    out: torch.Tensor | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    backend: str = ...,
    variant: str | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def fmha_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    seqlens_kv: torch.Tensor,
    page_table: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    num_splits: int | None = ...,
    out: torch.Tensor | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: torch.Tensor | None = ...,
    backend: str = ...,
    variant: str | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@hides_unknown
def fmha_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    seqlens_kv: torch.Tensor,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    variant: str | None = None,
    return_lse: bool = False,
    **unknown: NoReturn,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Fused attention of new queries over B caches of keys and values, which already have the new keys. No gradient.

    The host reads no length and waits for nothing. So one CUDA graph serves every step of a generation: it reads what
    `seqlens_kv` and `page_table` have when it is replayed.

    Args:
        q: ``[B, Hq, Sq, D]``, fp16 or bf16, any strides with unit stride on D: the last Sq tokens of each sequence.
            With `cu_seqlens_q` ``[T, Hq, D]``.
        k_cache: ``[B, Hkv, S, D]`` with ``Hq % Hkv == 0`` (GQA, MQA), dtype and device of q, any strides with unit
            stride on D. With `page_table` ``[pages, Hkv, page, D]``, of any page size: a transposed view where pages
            are ``[page, Hkv, D]`` in memory (NHD).
        v_cache: like k_cache, with strides of its own: both may be views of one tensor.
        seqlens_kv: int32 ``[B]`` on the device of q: the keys of each sequence, from 0 to S (or ``max_pages * page``).
            Values on a GPU are not checked, as that would wait for it: with more, kernels read beyond the cache.
        page_table: int32 ``[B, max_pages]`` on the device of q, any stride between rows: key j of sequence b is row
            ``j % page`` of page ``page_table[b, j // page]``. Entries beyond the length of a sequence are never read. A
            page may be in several sequences.
        cu_seqlens_q: int32 ``[B + 1]`` on the device of q: sequence b has the rows ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]`` of q, which may be none. Rows behind the last sequence are left as they are, in a
            fresh tensor undefined. Chunks of prompts and single tokens may be in one call.
        max_seqlen_q: with `cu_seqlens_q`, at least the most rows of a sequence; the results of one that has more are
            undefined.
        num_splits: the parts, 1 to 256, that the keys of a sequence are divided into, each for a block of its own; None
            chooses by sizes, never by lengths. With 1 a sequence's result has the same bits whatever else is in the
            batch, of as many queries at most.
        out: results are written here, and returned: shape, dtype and device of q, any strides that are multiples of 16
            bytes, with unit stride on D, at a multiple of 16 bytes. None: a fresh tensor.
        causal: bottom-right aligned: query i of Sq sees the keys up to ``i + seqlens_kv[b] - Sq``.
        window: as for `multiattn.fmha`, by each sequence's own length.
        scale, softcap, sinks: as for `multiattn.fmha`.
        backend: as for `multiattn.fmha`; the reference, which ``"auto"`` is on CPU tensors, reads lengths on the host.
        variant: a variant of that backend's forward; None is its best that can run the problem.
        return_lse: also return the log-sum-exp.

    Returns:
        out, shape and dtype of q, laid out as `multiattn.fmha` (packed: `multiattn.fmha_varlen`) gives it; with
        `return_lse` also lse, fp32 ``[B, Hq, Sq]`` or ``[Hq, T]``, natural log. A row that sees no key has ``out = 0``
        and ``lse = -inf`` (with a sink: ``lse = sink``).

    Raises:
        TypeError, ValueError: an input that is wrong for every backend. Values of tensors on the device are not
        checked. Unsupported: the backend cannot run this problem here; `.reasons` says why.
        NotImplementedError: an input requires grad, and gradients are enabled.

    Source of the division of keys: "Flash-Decoding" (https://pytorch.org/blog/flash-decoding/).
    """
    if unknown:
        refuse_unknown("fmha_kvcache", unknown)
    options = Options.of(
        causal=causal,
        window=window,
        scale=scale,
        has_sinks=sinks is not None,
        backend=backend,
        variant=variant,
        deterministic=None,
    )
    if compat.autocast_active():
        q, k_cache, v_cache = autocast(q, k_cache, v_cache)
    where = Where(seqlens_kv, page_table, cu_seqlens_q, max_seqlen_q, num_splits)
    operands, options = with_cache(q, k_cache, v_cache, options, where, softcap, sinks, out)
    is_packed = cu_seqlens_q is not None
    own = out if out is None or not is_packed else as_batch_of_one(out)
    found, lse = attend_cached(operands, options, own)
    if out is None:
        out = found[0].transpose(0, 1) if is_packed else found
    if not return_lse:
        return out
    return out, lse[0] if is_packed else lse


class Where(NamedTuple):
    """The keys and queries of a call's sequences, as its caller gives them."""

    seqlens_kv: torch.Tensor
    page_table: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int | None
    num_splits: int | None


def with_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    options: Options,
    where: Where,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[Operands, Options]:
    """The operands and options of a call with a cache. TypeError or ValueError, naming what came."""
    is_packed = where.cu_seqlens_q is not None
    check_numbers(where.max_seqlen_q, where.num_splits, is_packed=is_packed)
    if not is_compiling():  # else checked when the op is called
        check_cache(q, k_cache, v_cache, *where[:3], sinks)
        check_values(q, k_cache, *where[:4])
    if out is not None:
        check_out(out, q, layout=not is_compiling())  # a compiled call copies its result
    strides_out = None
    if out is not None:
        entry, head, row, _ = out.stride() if not is_packed else as_batch_of_one(out).stride()
        strides_out = entry, head, row
    cache = Cache(where.page_table is not None, where.max_seqlen_q, where.num_splits, strides_out)
    operands = Operands(as_batch_of_one(q) if is_packed else q, k_cache, v_cache, sinks=sinks)
    if softcap is not None:
        pages = 1 if where.page_table is None else where.page_table.shape[1]
        queries = where.max_seqlen_q if where.max_seqlen_q is not None else q.shape[2]
        lengths = (where.seqlens_kv.shape[0], queries, k_cache.shape[2] * pages)
        check_modification(q, lengths, softcap, None, None, None)
        operands, options = with_score(operands, options, softcap, None, None, None, lengths=lengths, checked=True)
    given = tuple(it for it in where[:3] if it is not None)
    return operands._replace(captured=(*operands.captured, *given)), options._replace(cache=cache)
