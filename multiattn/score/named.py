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


def bias(s: torch.Tensor, at: ScorePlace, bias: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    """Adds ``[B|1, Hq|1, Sq|1, Skv|1]``; a dimension of one element is broadcast.

    With `last` it is of the last keys, so many: nothing is added to the scores of those before them.
    """
    added = bias[_element(bias, at, last)]
    return s + (added if last is None else torch.where(_is_before(at, last), 0.0, added))


def hide(s: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """-inf where `visible` is false, whatever the score."""
    return s.masked_fill(~visible, -torch.inf)


def sees(at: ScorePlace, visible: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    """The element of a bool ``[B|1, Hq|1, Sq|1, Skv|1]``, broadcast as a bias is; True before the `last` keys."""
    element = visible[_element(visible, at, last)]
    return element if last is None else _is_before(at, last) | element


PARTIAL, WHOLE = 1, 2
"""Numbers of blocks that are seen in part, and whole; any other shows nothing."""


def sees_block(at: ScorePlace, kinds: torch.Tensor, sizes: tuple[int, int], mask: torch.Tensor | None) -> torch.Tensor:
    """True where a block mask shows the key; `kinds` int32 ``[B|1, H|1, rows, columns]`` numbers its blocks of `sizes`.

    In a partial block `mask` holds; None is true everywhere.
    """
    b, h = (0 if size == 1 else it for size, it in zip(kinds.shape[:2], at[:2], strict=True))
    kind = kinds[b, h, at.q.clamp(min=0) // sizes[0], at.kv // sizes[1]]
    partial = kind == PARTIAL
    return (kind == WHOLE) | (partial if mask is None else partial & mask)


def _element(tensor: torch.Tensor, at: ScorePlace, last: torch.Tensor | None) -> tuple[Any, ...]:
    """The index of a score's own element, where the tensor is of the `last` keys counted from the first of them."""
    if last is not None:
        at = at._replace(kv=at.kv - (at.seq_kv - last.int()))
    return tuple(0 if size == 1 else it for size, it in zip(tensor.shape, at, strict=False))


def _is_before(at: ScorePlace, last: torch.Tensor) -> torch.Tensor:
    """True for a key that is not among the last ones."""
    return (at.seq_kv - at.kv).float() > last
