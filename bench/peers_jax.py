"""FlashAttention-3's kernels as the wheel flash-attn3-jax has them: built ahead, for Hopper and D=128 alone.

The functions have the names and the arguments of upstream's package, which must be compiled for the machine. The wheel
is made for JAX, but no JAX is needed: `bench.xla_ffi` launches its kernels on PyTorch's current stream. So a timing in
the regimes `device` and `graph` means what it means for every other peer: kernels, and the clearing of their scratch
memory, between two events of the one stream that they run on. In the regime `call` the host's share is that of the
Python here, and not that of upstream's C++.

Launches have upstream's defaults: it does not split keys and values, it chooses whether to pack the query heads of a
group, and it adds dq up in no fixed order. A launch that CUDA refuses ends the process: the wheel calls `exit`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from bench.xla_ffi import Launch, Spec

MODULE = "flash_attn3_jax_lib.flash_api"
HEAD_DIM = 128
LARGEST_TILE = 80
"""Queries of the backward's largest tile. The wheel's own wrapper rounds rows up to a multiple of 128, and the kernels
write beyond them: 1024 queries take 13 tiles, which have 1040."""

Window = tuple[int, int]


MOST_SPLITS = 128
"""Splits that the wheel's own choice never passes."""
ABSENT = "qqqqqqiiiiiiiiqqifffi"
"""The dtypes of the forward's 21 arguments, where they are absent: that of q, int32 or fp32."""


class _Asked(NamedTuple):
    """All that a launch is laid out for."""

    q: Spec
    k: Spec
    """Keys, or a cache of them."""
    causal: bool
    window: Window
    sequences: int
    """How many a packed batch has; 0 for a plain one."""
    longest: tuple[int, int]
    """Queries and keys of the longest sequence; no keys where a page table has them."""
    cached: int = 0
    """How many sequences a cache has; 0 where there is none."""
    page_table: Spec = Spec((0,), torch.int32)
    splits: int = 1
    """Parts of the keys; 0 is the wheel's own choice."""

    @property
    def starts(self) -> Spec:
        """A packed batch's `cu_seqlens`."""
        return Spec((self.sequences + 1 if self.sequences else 0,), torch.int32)

    @property
    def lse(self) -> Spec:
        """``[B, H, S]``, or ``[H, tokens]`` of a packed batch."""
        leading = () if self.sequences else self.q.shape[:1]
        return Spec((*leading, self.q.shape[-2], self.q.shape[-3]), torch.float32)

    @property
    def rows(self) -> Spec:
        """fp32 for each query, and as many more as tiles reach beyond the end of a sequence."""
        *leading, tokens = self.lse.shape
        return Spec((*leading, tokens + LARGEST_TILE * (self.sequences + 1)), torch.float32)

    @property
    def results(self) -> tuple[Spec, ...]:
        """Out and lse, and both of each split."""
        rows = (self.splits or MOST_SPLITS, *self.lse.shape)
        shapes = ((0,), (0,)) if self.splits == 1 else ((*rows, HEAD_DIM), rows)
        return self.q, self.lse, *(Spec(shape, torch.float32) for shape in shapes)

    @property
    def shared(self) -> dict[str, Any]:
        """Attributes of both directions."""
        return {
            "softmax_scale_val": HEAD_DIM**-0.5,
            "softmax_scale_has_value": True,
            "is_causal": self.causal,
            "window_size_left": self.window[0],
            "window_size_right": self.window[1],
            "softcap": 0.0,
            "sm_margin": 0,
        }


def _handler(name: str) -> object:
    return importlib.import_module(MODULE).get_ffi_registrations()[name]


@functools.lru_cache(maxsize=16)
def _forward(asked: _Asked) -> Launch:
    """It takes q, k, v and starts, and over a cache lengths and a page table; it writes `_Asked.results`."""
    dtypes = {"q": asked.q.dtype, "i": torch.int32, "f": torch.float32}
    arguments = [Spec((0,), dtypes[kind]) for kind in ABSENT]
    arguments[:3], arguments[6] = (asked.q, asked.k, asked.k), asked.starts
    if asked.cached:
        arguments[10:12] = Spec((asked.cached,), torch.int32), asked.page_table
    else:
        arguments[7] = asked.starts
    attributes = {
        **{f"max_seqlen_{side}": longest for side, longest in zip("qk", asked.longest, strict=True)},
        **{f"max_seqlen_{side}_has_value": longest > 0 for side, longest in zip("qk", asked.longest, strict=True)},
        **{"pack_gqa_val": False, "pack_gqa_has_value": False, "num_splits": asked.splits},
        **{"attention_chunk": 0, "is_rotary_interleaved": False},
    }
    return Launch(_handler("flash_mha_fwd"), arguments, asked.results, asked.shared | attributes)


@functools.lru_cache(maxsize=4)
def _backward(asked: _Asked) -> Launch:
    """It takes dout, q, k, v, out, lse and starts; it writes dq, dk, dv and two rows of scratch memory."""
    absent = Spec((0,), torch.int32)
    arguments = [asked.q, asked.q, asked.k, asked.k, asked.q, asked.lse, asked.starts, asked.starts, absent, absent]
    attributes = {
        **{f"max_seqlen_{side}_val": longest for side, longest in zip("qk", asked.longest, strict=True)},
        **{f"max_seqlen_{side}_has_value": True for side in "qk"},
        "deterministic": False,
    }
    results = [asked.q, asked.k, asked.k, asked.rows, asked.rows]
    return Launch(_handler("flash_mha_bwd"), arguments, results, asked.shared | attributes)


class _Attention(torch.autograd.Function):
    """The kernels, and their backward for autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: Any, asked: _Asked
    ) -> torch.Tensor:
        out, lse = torch.empty_like(q), q.new_empty(asked.lse.shape, dtype=torch.float32)
        arguments = [q, k, v, *[None] * 3, *starts, *[None] * 13]
        _forward(asked)(arguments, [out, lse, None, None])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.starts, ctx.asked = starts, asked
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
        rows = [q.new_empty(ctx.asked.rows.shape, dtype=torch.float32) for _ in range(2)]
        arguments = [dout.contiguous(), q, k, v, out, lse, *ctx.starts, None, None]
        _backward(ctx.asked)(arguments, [*grads, *rows])
        return (*grads, None, None)


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, window_size: Window = (-1, -1)
) -> torch.Tensor:
    """out ``[B, S, H, D]``, of dense tensors like that; k and v may have fewer heads."""
    asked = _Asked(Spec.of(q), Spec.of(k), causal, window_size, 0, (q.shape[1], k.shape[1]))
    return _Attention.apply(q, k, v, (None, None), asked)  # type: ignore[no-any-return, no-untyped-call]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
) -> torch.Tensor:
    """out ``[tokens, H, D]`` of a packed batch."""
    asked = _Asked(Spec.of(q), Spec.of(k), causal, (-1, -1), len(cu_seqlens_q) - 1, (max_seqlen_q, max_seqlen_k))
    starts = cu_seqlens_q, cu_seqlens_k
    return _Attention.apply(q, k, v, starts, asked)  # type: ignore[no-any-return, no-untyped-call]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    num_splits: int = 0,
) -> torch.Tensor:
    """out, shaped like q: ``[B, S, H, D]``, or packed ``[tokens, H, D]``.

    Caches are ``[B, S, H, D]``, or with a page table ``[pages, page, H, D]``; all is dense.
    """
    table = Spec((0,), torch.int32) if page_table is None else Spec.of(page_table)
    longest = max_seqlen_q or q.shape[1], 0 if page_table is not None else k_cache.shape[1]
    count, sequences = len(cache_seqlens), 0 if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    asked = _Asked(Spec.of(q), Spec.of(k_cache), causal, (-1, -1), sequences, longest, count, table, num_splits)
    results = [torch.empty(it.shape, dtype=it.dtype, device=q.device) for it in asked.results]
    arguments = [q, k_cache, v_cache, *[None] * 3, cu_seqlens_q, *[None] * 3, cache_seqlens, page_table, *[None] * 9]
    _forward(asked)(arguments, [it if it.numel() else None for it in results])
    return results[0]
