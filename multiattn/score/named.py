"""The named modifications of a score, each one expression: traced like any ``score_mod``, with no code of its own.

`s` is the score, `at` its place. Numbers and tensors that a call brings are the other parameters; they are runtime
arguments of a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class ScorePlace(NamedTuple):
    """The place of a score, each a 0-d int32 tensor.

    Batch entry, query head, positions of the query and the key in their sequences, and the lengths of these.
    """

    b: torch.Tensor
    h: torch.Tensor
    q: torch.Tensor
    kv: torch.Tensor
    seq_q: torch.Tensor
    seq_kv: torch.Tensor


def softcap(s: torch.Tensor, at: ScorePlace, cap: torch.Tensor) -> torch.Tensor:
    """Bounds scores to ``(-cap, cap)`` (Gemma 2, arXiv 2408.00118, section 2)."""
    return cap * torch.tanh(s / cap)


def alibi(s: torch.Tensor, at: ScorePlace, slopes: torch.Tensor) -> torch.Tensor:
    """A penalty that grows with the distance (ALiBi, arXiv 2108.12409), aligned at the bottom right like the mask.

    `slopes` is fp32 ``[Hq]`` or ``[B, Hq]``.
    """
    slope = slopes[at.h] if slopes.dim() == 1 else slopes[at.b, at.h]
    return s - slope * (at.q + (at.seq_kv - at.seq_q) - at.kv).abs()


def bias(s: torch.Tensor, at: ScorePlace, bias: torch.Tensor) -> torch.Tensor:
    """Adds ``[B|1, Hq|1, Sq|1, Skv|1]``; a dimension of one element is broadcast."""
    return s + bias[_element(bias, at)]


def hide(s: torch.Tensor, at: ScorePlace, visible: torch.Tensor) -> torch.Tensor:
    """-inf where a bool ``[B|1, Hq|1, Sq|1, Skv|1]`` is false, whatever the score; broadcast as a bias is."""
    return s.masked_fill(~visible[_element(visible, at)], -torch.inf)


def _element(tensor: torch.Tensor, at: ScorePlace) -> tuple[Any, ...]:
    """The index of a score's own element."""
    return tuple(0 if size == 1 else it for size, it in zip(tensor.shape, at, strict=False))
