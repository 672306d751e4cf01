"""Masks and scores beyond the causal mask: what cells may ask for, in the terms of FlexAttention.

The truth, FlexAttention, FlashAttention-4 and `multiattn.fmha` are asked for the same by these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

Scores = Literal["none", "sinks", "softcap30", "alibi", "documents16"]
Packed = Literal["packed_equal", "packed_mixed", "packed_one_long"]
Lists = Literal[
    "blocks128_tenth", "blocks128_half", "blocks128_top16", "blocks64_tenth", "blocks64_half", "prefix2k", "video",
    "packed_blocks2k",
]  # fmt: skip
OverCache = Literal["none", "alibi", "relative", "tree"]
Feature = Literal[Scores, Packed, Lists, OverCache]
"""More than a band in a cell: a sink for each head, scores capped at 30, ALiBi, 16 documents in each sequence; a
packed batch of sequences, as `packed_lengths` has them; a block mask, as `bench.block_lists` makes it; over a cache a
bias of each token's distance, or a tree of drafted tokens."""

PACKED: tuple[Packed, ...] = get_args(Packed)
LISTS: tuple[Lists, ...] = get_args(Lists)
WITHOUT_LISTS: tuple[Feature, ...] = (*get_args(Scores), *PACKED)
FEATURES: tuple[Feature, ...] = (*WITHOUT_LISTS, *LISTS)
OVER_CACHE: tuple[Feature, ...] = get_args(OverCache)

SOFTCAP = 30.0
"""Grok-1's."""
DOCUMENTS = 16
BLOCK_SEQUENCES = 8
"""Packed sequences under a block mask, as MagiAttention's benchmark has them."""
SHORT = 60
"""Short sequences beside a long one."""
EXTENT = 1024
"""Distances that have a bias, as in Inkling."""
BLOCK = 128
"""Queries and keys of a block of a BlockMask: Flex's own choice, and a tile of FlashAttention-4."""

Mod = Callable[..., Any]


def draw_lengths(seq: int) -> tuple[int, ...]:
    """Lengths of `DOCUMENTS` documents in a sequence, cut at places of a fixed seed."""
    draw = torch.Generator().manual_seed(seq)
    cuts = 1 + torch.randperm(seq - 1, generator=draw)[: DOCUMENTS - 1].sort().values
    ends = torch.tensor([0, *cuts.tolist(), seq])
    return tuple(ends.diff().tolist())


def packed_lengths(feature: Feature, tokens: int) -> tuple[int, ...]:
    """Lengths of the sequences of a packed batch of so many tokens.

    `DOCUMENTS` equal ones, or 8 with a block mask; lengths drawn log-uniform from 64 to 8192; one of three quarters and
    60 short ones.
    """
    if feature == "packed_blocks2k":
        return (tokens // BLOCK_SEQUENCES,) * BLOCK_SEQUENCES
    if feature == "packed_equal":
        return *(tokens // DOCUMENTS,) * (DOCUMENTS - 1), tokens - tokens // DOCUMENTS * (DOCUMENTS - 1)
    if feature == "packed_one_long":
        short = torch.linspace(0, tokens - tokens // 4 * 3, SHORT + 1).long().diff()
        return tokens // 4 * 3, *short.tolist()
    draw, found = torch.Generator().manual_seed(tokens), list[int]()
    while (left := tokens - sum(found)) > 0:
        exponent = 6 + 7 * float(torch.rand(1, generator=draw))
        found.append(min(left, round(2**exponent)))
    return tuple(found)


def ids_of(lengths: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """The number of the document that each position belongs to, int32 ``[S]``."""
    counts = torch.tensor(lengths)
    return torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts).to(device)


def slopes_of(heads: int, device: torch.device | str) -> torch.Tensor:
    """ALiBi's slope of each head, fp32 ``[H]``: a geometric sequence that ends at 2^-8 (arXiv 2108.12409)."""
    numbers = torch.arange(1, heads + 1, dtype=torch.float64)
    return torch.exp2(-8 * numbers / heads).float().to(device)


def make_mask_mod(causal: bool, window: int | None, ids: torch.Tensor | None) -> Mod | None:
    """The keys that a query sees, ``(b, h, q_idx, kv_idx) -> bool``; None for all."""
    mods: list[Mod] = []
    if causal:
        mods.append(lambda batch, head, query, key: query >= key)
    if window is not None:
        mods.append(lambda batch, head, query, key: key > query - window)
    if ids is not None:
        mods.append(lambda batch, head, query, key: ids[query] == ids[key])

    def every(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = mods[0](batch, head, query, key)
        for mod in mods[1:]:
            seen = seen & mod(batch, head, query, key)
        return seen

    return every if len(mods) > 1 else next(iter(mods), None)


def capped(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A `score_mod`: the softcap."""
    return SOFTCAP * torch.tanh(score / SOFTCAP)


def make_alibi(slopes: torch.Tensor, causal: bool) -> Mod:
    """A `score_mod`: ALiBi. Where the mask is causal, any score will do for a key behind the query."""

    def biased(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        distance = query - key
        return score - slopes[head] * (distance if causal else abs(distance))

    return biased


def make_relative(table: torch.Tensor) -> Mod:
    """A `score_mod`: a bias ``[H, EXTENT]`` of how far a key is before the query, and none of those farther away."""

    def biased(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        distance = query - key
        return torch.where(distance < EXTENT, score + table[head, distance.clamp(0, EXTENT - 1)], score)

    return biased


def draw_trees(batch: int, tokens: int) -> torch.Tensor:
    """A random tree of each sequence's tokens, bool ``[B, 1, tokens, tokens]``: True for itself and its ancestors."""
    draw, seen = torch.Generator().manual_seed(tokens), torch.eye(tokens, dtype=torch.bool).repeat(batch, 1, 1)
    for token in range(1, tokens):
        parents = torch.randint(token, (batch,), generator=draw)
        seen[:, token] |= seen[torch.arange(batch), parents]
    return seen[:, None]


def hide_others(ids: torch.Tensor) -> Mod:
    """A `score_mod` that hides the keys of other documents."""

    def hidden(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return torch.where(ids[query] == ids[key], score, float("-inf"))

    return hidden
