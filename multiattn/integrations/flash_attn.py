"""FlashAttention's functions by this package's kernels. Its users change one import.

    from multiattn.integrations.flash_attn import flash_attn_func

The signatures are those of FlashAttention 2 (package flash-attn, 2.8), except `flash_attn_with_kvcache`, which has
FlashAttention 3's. Options that only FlashAttention 3 or vLLM's build of it has are taken by keyword. Results are
FlashAttention's too, except in three points:

- The log-sum-exp is that of the scores as they are defined below. FlashAttention 2 shifts it where `alibi_slopes` meets
  a causal mask, because it adds ``slope * j`` there; its output is the same.
- The log-sum-exp is differentiable here.
- Missing features are refused by name, before anything runs: dropout, quantised inputs (descales) but for caches, a
  second query (`qv`), chunks (`attention_chunk`), used lengths (`seqused_q`, and `seqused_k` without a cache), and
  rotary embeddings.

As in FlashAttention, a head_dim that is no multiple of 8 is padded with zeros, at the cost of a copy of q, k and v. A
cache is never copied, so there such a head_dim is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from multiattn import fmha, fmha_varlen
from multiattn.integrations.flash_attn_kvcache import flash_attn_with_kvcache, varlen_over_cache
from multiattn.integrations.flash_attn_options import (
    DESCALES,
    HEAD_DIM_MULTIPLE,
    Result,
    WindowSize,
    as_ours,
    refuse,
    result_of,
    scales_of,
    sinks_of,
)
from multiattn.layout import unit_stride
from multiattn.plain import plain
from multiattn.plan.backend import BackendName

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    learnable_sink: torch.Tensor | None = None,
    backend: BackendName = "auto",
    **fa3: Any,
) -> Result:
    """`flash_attn.flash_attn_func`, with a `backend` as in `multiattn.fmha`.

    Args:
        q: ``[B, Sq, Hq, D]``, fp16 or bf16.
        k: ``[B, Skv, Hkv, D]`` with ``Hq % Hkv == 0``.
        v: ``[B, Skv, Hkv, Dv]``. Dv need not be D.
        dropout_p: 0.0. Dropout is refused.
        softmax_scale: A number. None is ``1/sqrt(D)``.
        causal: Aligned at the bottom right: query i sees key j when ``j <= i + Skv - Sq``.
        window_size: (left, right): query i sees the keys from ``i + Skv - Sq - left`` to ``i + Skv - Sq + right``, both
            included. A negative number, or None, leaves that side unbounded.
        softcap: Scores become ``softcap * tanh(score / softcap)``. 0.0 and negative numbers leave them.
        alibi_slopes: fp32 ``[Hq]`` or ``[B, Hq]``: scores lose ``slope * |i + Skv - Sq - j|``.
        deterministic: Ask for the same gradients each time. False leaves it to `torch.use_deterministic_algorithms`.
        return_attn_probs: Return (out, lse, None), as FlashAttention 2 does without dropout.
        return_softmax_lse: Return (out, lse).
        learnable_sink: ``[Hq]``, as in FlashAttention 4: for each head, the logit of one more column without a value.
        backend: One of `multiattn.backends()`, ``"reference"`` or ``"auto"``.
        fa3: Options of FlashAttention 3: any of those in `HINTS`, and those in `REFUSED` with the value listed there.

    Returns:
        The output, ``[B, Sq, Hq, Dv]``. On request also lse, fp32 ``[B, Hq, Sq]``, the natural log of the sum of exp of
        the scores.

    Raises:
        NotImplementedError: An option is refused. The message says what came and what is accepted.
        TypeError, ValueError, Unsupported: As `multiattn.fmha`.
    """
    refuse("flash_attn_func", fa3, dropout_p=dropout_p)
    _check(q, k, v, 4, "[B, S, H, D]")
    options = as_ours(
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        scale=_scale(q, softmax_scale),
        alibi_slopes=alibi_slopes,
        deterministic=True if deterministic else None,
        backend=backend,
    )
    q_padded, k_padded, v_padded = (_padded(it).transpose(1, 2) for it in (q, k, v))
    out, lse = fmha(q_padded, k_padded, v_padded, sinks=learnable_sink, return_lse=True, **options)
    return result_of(_like(v, out.transpose(1, 2)), lse, return_attn_probs, return_softmax_lse)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **others: Any,
) -> Result:
    """`flash_attn_func` with k and v in one tensor, ``[B, Skv, 2, Hkv, D]``. All other arguments are as there."""
    k, v = _unpacked("kv", kv, 5, 2, "[B, S, 2, H, D]")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, **others)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    num_heads_q: int | None = None,
    **others: Any,
) -> Result:
    """`flash_attn_func` with q, k and v in one tensor, ``[B, S, 3, H, D]``. All other arguments are as there.

    With `num_heads_q`, as in FlashAttention 3, it is ``[B, S, Hq + 2 * Hkv, D]``: heads of q, then of k, then of v.
    """
    if num_heads_q is None:
        q, k, v = _unpacked("qkv", qkv, 5, 3, "[B, S, 3, H, D]")
    else:
        of_kv = (qkv.shape[2] - num_heads_q) // 2 if qkv.ndim == 4 else 0
        if of_kv < 1 or num_heads_q + 2 * of_kv != qkv.shape[2]:
            got = f"shape {list(qkv.shape)} with num_heads_q={num_heads_q}"
            allowed = "[B, S, num_heads_q + 2 * Hkv, D], or [B, S, 3, H, D] without num_heads_q"
            raise ValueError(f"qkv: got {got}; allowed {allowed}")
        q, k, v = qkv.split((num_heads_q, of_kv, of_kv), dim=2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, **others)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    return_softmax_lse: bool = False,
    learnable_sink: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: BackendName = "auto",
    **fa3: Any,
) -> Result:
    """`flash_attn.flash_attn_varlen_func`: attention of sequences that lie behind each other in one tensor.

    k and v may be caches, as in vLLM: ``[pages, page, Hkv, D]`` with `block_table`, or ``[B, S, Hkv, D]`` with
    `seqused_k`. They may be 8-bit numbers, with `k_descale` and `v_descale`. Over caches nothing waits for the device,
    and there is no gradient.

    Args:
        q: ``[Tq, Hq, D]``: the queries of all sequences.
        k: ``[Tkv, Hkv, D]``.
        v: ``[Tkv, Hkv, Dv]``.
        cu_seqlens_q: int32 ``[B + 1]`` on the device of q: where each sequence of q begins, and the end of the last.
        cu_seqlens_k: The same for k and v.
        max_seqlen_q, max_seqlen_k: At least the length of the longest sequence of q, and of k. Caches do not need the
            latter.
        block_table: int32 ``[B, max_pages]`` on the device: the pages of each sequence.
        seqused_k: int32 ``[B]`` on the device, for caches: the keys of each sequence. If None, `cu_seqlens_k` gives
            them.
        s_aux: vLLM's name for `learnable_sink`.
        out: A tensor ``[Tq, Hq, Dv]`` to write the results to, and to return. Without a cache that costs a copy.
        fa3: As for `flash_attn_func`. For caches `num_splits` counts. Descales are as for `flash_attn_with_kvcache`
            over 8-bit caches; over others they are ignored, as FlashAttention 3 ignores them for fp16 and bf16.
        all others: As for `flash_attn_func`. Each sequence has its own mask, i and j.

    Returns:
        The output, ``[Tq, Hq, Dv]``. On request also lse, fp32 ``[Hq, Tq]``.

    Raises:
        NotImplementedError, TypeError, ValueError, Unsupported: As `flash_attn_func`.
    """
    sinks = sinks_of(learnable_sink, s_aux)
    max_seqlen_q = _length("max_seqlen_q", max_seqlen_q)
    if block_table is not None or (seqused_k is not None and k.ndim == 4):
        others = {name: it for name, it in fa3.items() if name not in DESCALES}
        refuse("flash_attn_varlen_func", others, dropout_p=dropout_p)
        found, lse = varlen_over_cache(
            q,
            k,
            v,
            cu_seqlens_k,
            seqused_k,
            page_table=block_table,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            num_splits=fa3.get("num_splits", 0),
            backend=backend,
            out=out,
            **scales_of("flash_attn_varlen_func", k, fa3, ignores=True),
        )
        return result_of(found, lse, return_attn_probs, return_softmax_lse)
    refuse("flash_attn_varlen_func", fa3, dropout_p=dropout_p, seqused_k=seqused_k)
    if cu_seqlens_k is None or max_seqlen_k is None:
        raise TypeError(
            "flash_attn_varlen_func: cu_seqlens_k and max_seqlen_k are needed without a cache; got None; give both, or "
            "a block_table with seqused_k"
        )
    _check(q, k, v, 3, "[T, H, D]")
    options = as_ours(
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        scale=_scale(q, softmax_scale),
        alibi_slopes=alibi_slopes,
        deterministic=True if deterministic else None,
        backend=backend,
    )
    found, lse = fmha_varlen(
        *(_padded(it) for it in (q, k, v)),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=_length("max_seqlen_k", max_seqlen_k),
        sinks=sinks,
        return_lse=True,
        **options,
    )
    found = _like(v, found) if out is None else out.copy_(_like(v, found))
    return result_of(found, lse, return_attn_probs, return_softmax_lse)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **others: Any,
) -> Result:
    """`flash_attn_varlen_func` with k and v in one tensor, ``[Tkv, 2, Hkv, D]``. All other arguments are as there."""
    k, v = _unpacked("kv", kv, 4, 2, "[T, 2, H, D]")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options, **others)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **others: Any,
) -> Result:
    """`flash_attn_varlen_func` with q, k and v in one tensor, ``[T, 3, H, D]``. All other arguments are as there."""
    q, k, v = _unpacked("qkv", qkv, 4, 3, "[T, 3, H, D]")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, **others)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rank: int, layout: str) -> None:
    """The shapes that would mean another thing once dimensions are swapped; `fmha` checks all others."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != rank:
            hint = "the function with varlen takes packed rows, the other one a batch"
            raise ValueError(f"{name} must have rank {rank}, {layout}; got shape {list(tensor.shape)}; {hint}")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_q < 1 or heads_kv < 1 or heads_q % heads_kv or v.shape[-2] != heads_kv:
        got = f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}"
        hint = f"{layout}: heads come before D, and x.transpose(-3, -2) swaps them with rows"
        raise ValueError(f"heads of q must be a multiple of those of k and v; got {got}; allowed {hint}")


def _length(name: str, length: Any) -> int:
    """A longest length as an int; a tensor of one number is one, as FlashAttention's own callers have it."""
    is_number = isinstance(length, torch.Tensor) and length.numel() == 1 and not length.is_floating_point()
    length = plain(length)
    if not is_number and (isinstance(length, bool) or not isinstance(length, int | torch.SymInt)):
        got = f"a tensor of shape {list(length.shape)}" if isinstance(length, torch.Tensor) else repr(length)
        hint = "the order is cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
        raise TypeError(f"flash_attn_varlen_func: {name}: got {got}; allowed an int, the longest length; {hint}")
    return int(length)


def _unpacked(name: str, packed: torch.Tensor, rank: int, count: int, layout: str) -> tuple[torch.Tensor, ...]:
    if packed.ndim != rank or packed.shape[-3] != count:
        hint = "torch.stack(..., dim=-3) makes it"
        raise ValueError(f"{name}: got shape {list(packed.shape)}; allowed {layout}; {hint}")
    return packed.unbind(dim=-3)


def _scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    """The scale of a call, by default that of the head_dim before it is padded."""
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with unit stride on D, which is made a multiple of 8 by zeros: they add nothing to a score."""
    missing = -tensor.shape[-1] % HEAD_DIM_MULTIPLE
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    return unit_stride(tensor)


def _like(v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The columns of out that v has."""
    return out if out.shape[-1] == v.shape[-1] else out[..., : v.shape[-1]]
