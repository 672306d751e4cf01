"""FlashAttention's attention over caches of keys and values, by `multiattn.fmha_kvcache`.

Callers import the functions from `multiattn.integrations.flash_attn`. Caches are never copied: each head_dim must be a
multiple of 8, with unit stride. Nothing here waits for the device, not even to find the places of new keys, so one CUDA
graph serves every step.
"""

from __future__ import annotations

from typing import Any

import torch

from multiattn.integrations.caches import put
from multiattn.integrations.flash_attn_options import (
    HEAD_DIM_MULTIPLE,
    Result,
    WindowSize,
    as_ours,
    refuse,
    result_of,
    scales_of,
)
from multiattn.kvcache import fmha_kvcache
from multiattn.layout import unit_stride
from multiattn.plan.backend import BackendName
from multiattn.run.values import can_be_read
from multiattn.validate.scales import is_stored
from multiattn.validate.sequences import check_starts

_NAME = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    backend: BackendName = "auto",
    **others: Any,
) -> Result:
    """FlashAttention 3's `flash_attn_with_kvcache`, with a `backend` as in `multiattn.fmha_kvcache`. It has no
    gradient.

    The order of arguments is FlashAttention 3's. FlashAttention 2 has another order from `rotary_cos` on: name those.

    Args:
        q: ``[B, Sq, Hq, D]``, fp16 or bf16: the last Sq tokens of each sequence. With `cu_seqlens_q` it is
            ``[T, Hq, D]``.
        k_cache: ``[B, S, Hkv, D]``, or with `page_table` ``[pages, page, Hkv, D]`` of any page size; any strides with
            unit stride on D. Of the dtype of q, or float8_e4m3fn or int8. If k is given, the call writes to it.
        v_cache: Like k_cache, but for its own head_dim Dv.
        k: New keys ``[B, Snew, Hkv, D]``, or ``[Tnew, Hkv, D]`` with `cu_seqlens_k_new`. They are put into the cache
            from place ``cache_seqlens[b]`` of each sequence on, and attended to. The cache must have room for them: a
            ValueError on a CPU, and with ``MULTIATTN_CHECK=1``. Else the host does not read the lengths, and the GPU's
            kernel that writes new keys fails.
            Over 8-bit caches they are 8-bit numbers of the same scales.
        v: New values, as k is, of Dv columns.
        cache_seqlens: int32 ``[B]`` on the device, or an int for all: the keys of each sequence, without new ones. None
            is as many as the cache has room for.
        cache_batch_idx: int32 ``[B]``: each sequence's entry of the cache, or its row of the page table.
        page_table: int32 ``[B, max_pages]`` on the device. It must name pages for the places of new keys. An entry
            below 0 is a ValueError on a CPU and fails on the GPU, as an index that is too large does.
        cu_seqlens_q: int32 ``[B + 1]``: where each sequence of q begins, and the end of the last.
        cu_seqlens_k_new: int32 ``[B + 1]``, the same for k and v.
        max_seqlen_q: With `cu_seqlens_q`, at least the most rows of a sequence.
        k_descale, v_descale: Of 8-bit caches, fp32 ``[B, Hkv]``, or any `k_scale` of `multiattn.fmha_kvcache`: a stored
            number stands for itself times its scale. None is 1.
        softmax_scale: A number. None is ``1/sqrt(D)``.
        causal: Aligned at the bottom right, by the length of each sequence with its new keys.
        window_size, softcap, alibi_slopes: As for `flash_attn_func`, by the length of each sequence.
        num_splits: The number of parts that keys are divided into. 0 leaves it to the plan.
        return_softmax_lse: Return (out, lse).
        block_table: FlashAttention 2's name for `page_table`.
        learnable_sink: ``[Hq]``: for each head, the logit of one more column without a value.
        backend: One of `multiattn.backends()`, ``"reference"`` or ``"auto"``.
        qv, rotary_cos, rotary_sin, cache_leftpad, attention_chunk: Refused, except None, and 0.
        q_descale: Refused, except None and 1, because q keeps its 16 bits. So are the other two without an 8-bit cache.
        rotary_seqlens, rotary_interleaved, scheduler_metadata, pack_gqa, sm_margin: Ignored, because they change no
            result here.

    Returns:
        The output, like q but as wide as v_cache. On request also lse, fp32 ``[B, Hq, Sq]`` or ``[Hq, T]``, natural
        log.

    Raises:
        NotImplementedError: An option is refused, a head_dim is no multiple of 8, or an input wants a gradient.
        TypeError, ValueError, Unsupported: As `multiattn.fmha_kvcache`.
    """
    refuse(
        _NAME,
        others,
        qv=qv,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_leftpad=cache_leftpad,
        attention_chunk=attention_chunk,
    )
    scales = scales_of(_NAME, k_cache, {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale})
    if page_table is not None and block_table is not None:
        raise TypeError("page_table and block_table are two names of one tensor: got both; give one of them")
    _check(q, k_cache, v_cache, is_packed=cu_seqlens_q is not None)
    if torch.is_grad_enabled() and any(it is not None and it.requires_grad for it in (q, k_cache, v_cache, k, v)):
        raise NotImplementedError(f"{_NAME} has no gradient: call it under torch.no_grad()")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    table = block_table if page_table is None else page_table
    if table is not None and table.ndim != 2:
        raise ValueError(f"page_table: got shape {list(table.shape)}; allowed [B, pages], the pages of each sequence")
    if cache_batch_idx is not None:  # an entry of a cache without pages is a page of that size
        table = cache_batch_idx.to(torch.int32)[:, None] if table is None else table[cache_batch_idx]
    if cache_seqlens is None and k is not None:
        raise TypeError("cache_seqlens must say where new keys go; got None; give the lengths before them, int32 [B]")
    if not isinstance(cache_seqlens, torch.Tensor):
        capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
        length = capacity if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    if k is not None or v is not None:
        if k is None or v is None:
            got = f"{'no k' if k is None else 'no v'}; leave both out if the cache has the new keys"
            raise TypeError(f"k and v must both be given, or neither; got {got}")
        cache_seqlens = _append(k_cache, v_cache, k, v, cache_seqlens, table, cu_seqlens_k_new)
    out, lse = attend_cache(
        q,
        k_cache,
        v_cache,
        seqlens_kv=cache_seqlens,
        page_table=table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=learnable_sink,
        num_splits=num_splits,
        backend=backend,
        **scales,
    )
    return result_of(out, lse, with_probs=False, with_lse=return_softmax_lse)


def varlen_over_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of `flash_attn_varlen_func` whose k and v are caches; `seqused_k` or `cu_seqlens_k` has lengths."""
    _check(q, k, v, is_packed=True, names=("k", "v"))
    if seqused_k is None and cu_seqlens_k is None:
        raise TypeError("flash_attn_varlen_func: lengths of k must be seqused_k or cu_seqlens_k; got neither; give one")
    lengths = cu_seqlens_k.diff() if seqused_k is None and cu_seqlens_k is not None else seqused_k
    return attend_cache(q, k, v, seqlens_kv=lengths, **options)


def attend_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
    num_splits: int,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of `fmha_kvcache` in FlashAttention's layout; k_cache and v_cache are views."""
    q = unit_stride(q)
    is_packed = cu_seqlens_q is not None
    found, lse = fmha_kvcache(
        q if is_packed else q.transpose(1, 2),
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q if is_packed else None,
        num_splits=num_splits if num_splits > 0 else None,
        return_lse=True,
        **as_ours(**options),
    )
    return found if is_packed else found.transpose(1, 2), lse


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_packed: bool,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> None:
    """The shapes that would mean another thing once dimensions are swapped, and those that need a copy elsewhere."""
    layout, in_cache = "[T, H, D]" if is_packed else "[B, S, H, D]", "[B, S, H, D] or [pages, page, H, D]"
    of_q = ("q", q, 3 if is_packed else 4, layout)
    for name, tensor, rank, its in (of_q, (names[0], k, 4, in_cache), (names[1], v, 4, in_cache)):
        if tensor.ndim != rank:
            hint = "one query of each sequence is q.unsqueeze(1)" if name == "q" else "heads come before D"
            raise ValueError(f"{name} must have rank {rank}, {its}; got shape {list(tensor.shape)}; {hint}")
    for name, head_dim in zip(names, (k.shape[-1], v.shape[-1]), strict=True):
        if head_dim % HEAD_DIM_MULTIPLE:
            allowed = f"multiples of {HEAD_DIM_MULTIPLE}, as a cache is never copied; make it that wide, with zeros"
            raise NotImplementedError(f"{name}: got head_dim {head_dim}; allowed {allowed}")


def _append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqlens: torch.Tensor,
    table: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """Put new keys and values behind those of each sequence; the lengths with them, int32 ``[B]``."""
    batch, page, device = seqlens.shape[0], k_cache.shape[1], k_cache.device
    rows = [str(batch), "Snew"] if cu_seqlens is None else ["Tnew"]
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        is_like = new.dtype == cache.dtype and new.device == device and new.shape[len(rows) :] == cache.shape[2:]
        if not is_like or new.shape[:-1] != k.shape[:-1] or (cu_seqlens is None and new.shape[0] != batch):
            allowed = f"[{', '.join([*rows, *map(str, cache.shape[2:])])}], {cache.dtype} on {device}"
            hint = f"{name}.to(k_cache) has its dtype and device"
            hint = "divide by its scale and round" if is_stored(cache) and not is_stored(new) else hint
            raise ValueError(f"{name}: got {list(new.shape)}, {new.dtype} on {new.device}; allowed {allowed}; {hint}")
    is_kept = None
    if cu_seqlens is not None and not torch.compiler.is_compiling() and can_be_read(cu_seqlens):
        check_starts("k_new", cu_seqlens.tolist(), k.shape[0], "k", None)
    if cu_seqlens is None:
        sequence = torch.arange(batch, device=device)[:, None]
        places = seqlens[:, None] + torch.arange(k.shape[1], device=device)
        added: torch.Tensor | int = k.shape[1]
    else:  # rows behind the last sequence go nowhere
        starts, rows_of_k = cu_seqlens.to(torch.int64), torch.arange(k.shape[0], device=device)
        is_kept = rows_of_k < starts[-1]
        sequence = torch.searchsorted(starts[1:], rows_of_k, right=True).clamp(max=batch - 1)
        places = torch.where(is_kept, seqlens[sequence] + rows_of_k - starts[sequence], 0)
        added = starts.diff()
    _check_room(seqlens, added, page * (1 if table is None else table.shape[1]))
    if table is None:
        entry, row = sequence.expand_as(places), places
    else:
        entry, row = _pages_of(table[sequence, places // page], k_cache.shape[0], is_kept), places % page
    put((k_cache, v_cache), (k, v), entry, row, is_kept)
    return (seqlens + added).to(torch.int32)


def _check_room(seqlens: torch.Tensor, added: torch.Tensor | int, room: int) -> None:
    """ValueError for new keys that a cache has no place for, where lengths can be read."""
    if torch.compiler.is_compiling() or not can_be_read(seqlens):
        return
    lengths = seqlens + added
    wrong = (seqlens < 0) | ((lengths > room) & (lengths > seqlens))
    if wrong.any():
        sequence = int(wrong.nonzero()[0])
        before, after = int(seqlens[sequence]), int(lengths[sequence])
        raise ValueError(
            f"cache_seqlens: got {before} keys of sequence {sequence} and {after - before} new ones; allowed {room} in "
            "all, as many as the cache has room for; begin another cache, or give the sequence more pages"
        )


def _pages_of(entries: torch.Tensor, pages: int, is_kept: torch.Tensor | None) -> torch.Tensor:
    """Entries of the page table that new keys go to, int64. One below 0 would count from the last page."""
    if is_kept is not None:
        entries = torch.where(is_kept, entries, 0)
    is_page = entries >= 0
    if entries.device.type == "cpu" and not torch.compiler.is_compiling() and not is_page.all():
        got = entries[~is_page][0].item()
        allowed = f"pages from 0 to {pages - 1}; give each sequence a page before its keys are appended"
        raise ValueError(f"page_table: got {got} where new keys go; allowed {allowed}")
    return torch.where(is_page, entries, pages).to(torch.int64)
