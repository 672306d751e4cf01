"""Calls by what a type checker says of them: mypy reads this file, and nobody runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import multiattn

if TYPE_CHECKING:
    from typing_extensions import assert_type

    Pair = tuple[torch.Tensor, torch.Tensor]


def overloads(q: torch.Tensor, lengths: torch.Tensor, is_asked: bool, name: str) -> None:
    """A bool is not known before the call: then the result is either."""
    assert_type(multiattn.fmha(q, q, q, causal=True), torch.Tensor)
    assert_type(multiattn.fmha(q, q, q, return_lse=True, window=(1, None)), Pair)
    assert_type(multiattn.fmha(q, q, q, return_lse=is_asked), torch.Tensor | Pair)
    assert_type(multiattn.flex_attention(q, q, q), torch.Tensor)
    assert_type(multiattn.flex_attention(q, q, q, return_lse=True), Pair)
    assert_type(multiattn.flex_attention(q, q, q, return_lse=is_asked), torch.Tensor | Pair)
    assert_type(multiattn.fmha_kvcache(q, q, q, seqlens_kv=lengths, page_table=lengths), torch.Tensor)
    assert_type(multiattn.fmha_kvcache(q, q, q, seqlens_kv=lengths, return_lse=is_asked), torch.Tensor | Pair)
    packed = multiattn.fmha_varlen(
        q, q, q, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=1, max_seqlen_kv=1, return_lse=True
    )
    assert_type(packed, Pair)
    assert_type(multiattn.fmha(q, q, q, backend="triton", variant=name), torch.Tensor)


def refusals(q: torch.Tensor, lengths: torch.Tensor) -> None:
    """Each line is an error: an `ignore` that ignores nothing is one, too."""
    multiattn.fmha(q, q, q, True)  # type: ignore[call-overload]
    multiattn.fmha(q, q, q, backend="tritn")  # type: ignore[call-overload]
    multiattn.fmha(q, q, q, casual=True)  # type: ignore[call-overload]
    multiattn.fmha_kvcache(q, q, q, cache_seqlens=lengths)  # type: ignore[call-overload]
    multiattn.fmha_backward(q, q, q, q, q, q, None, True)  # type: ignore[arg-type]
    multiattn.flex_attention(q, q, q, backend="tritn")  # type: ignore[call-overload]
    multiattn.nn.Attention(64, 4, backend="tritn")  # type: ignore[arg-type]
