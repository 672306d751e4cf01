"""Block masks of the suite `lists`: of sparse training, of prefixes and videos, and over packed sequences."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks

import multiattn
from bench.features import BLOCK, BLOCK_SEQUENCES, Lists, Mod

PREFIX, CAUSAL_BLOCK = 2048, 2048
"""Keys that all queries see, and tokens of a block of block-causal attention."""
VIDEO, REACH = (16, 32, 48), (3, 8, 8)
"""Frames, rows and columns of a video, and how far a token sees along each."""
_SIZES = {"blocks64_tenth": 64, "blocks64_half": 64}


def count_pairs(feature: Lists, seq: int) -> int:
    """(query, key) pairs that count, of one head."""
    if feature == "prefix2k":
        return (seq * (seq + 1) + PREFIX * (PREFIX - 1)) // 2
    if feature == "video":  # the length is the video's
        lines = (
            (torch.arange(size)[:, None] - torch.arange(size)).abs() <= far
            for size, far in zip(VIDEO, REACH, strict=True)
        )
        return math.prod(int(it.sum()) for it in lines)
    if feature == "packed_blocks2k":
        blocks = seq // BLOCK_SEQUENCES // CAUSAL_BLOCK
        return BLOCK_SEQUENCES * blocks * (blocks + 1) // 2 * CAUSAL_BLOCK**2
    return seq * _listed(feature, seq) * _SIZES.get(feature, BLOCK)


def multiple(feature: Lists) -> int:
    """Lengths of the sequence are multiples of it."""
    wanted = {"prefix2k": PREFIX, "video": math.prod(VIDEO), "packed_blocks2k": BLOCK_SEQUENCES * CAUSAL_BLOCK}
    return wanted.get(feature, _SIZES.get(feature, BLOCK))


def make(feature: Lists, seq: int, heads: int, device: torch.device, ids: torch.Tensor | None = None) -> Any:
    """The `BlockMask` of a cell. `ids` are the sequences of a packed one, for who has no other way to say them."""
    if feature in ("prefix2k", "video", "packed_blocks2k"):
        mask_mod = _MODS[feature] if ids is None else and_masks(_MODS[feature], lambda b, h, q, kv: ids[q] == ids[kv])
        size = CAUSAL_BLOCK if feature == "packed_blocks2k" and ids is None else BLOCK
        return multiattn.block_mask(mask_mod, None, None, seq, seq, device=device, block_size=size)
    size = _SIZES.get(feature, BLOCK)
    rows, listed = seq // size, _listed(feature, seq)
    drawn = torch.rand(heads, rows, rows, generator=torch.Generator().manual_seed(seq))
    indices = drawn.topk(listed).indices.sort().values.int()
    room = torch.nn.functional.pad(indices, (0, rows - listed))[None].to(device)
    counts = torch.full((1, heads, rows), listed, dtype=torch.int32, device=device)
    none = torch.zeros_like(counts), torch.zeros_like(room)
    return BlockMask.from_kv_blocks(*none, counts, room, BLOCK_SIZE=size, seq_lengths=(seq, seq))


def _listed(feature: Lists, seq: int) -> int:
    """Blocks of keys of each block of queries, drawn at random."""
    blocks = seq // _SIZES.get(feature, BLOCK)
    return {"tenth": blocks // 10, "half": blocks // 2, "top16": min(16, blocks)}[feature.split("_")[1]]


def _video(b: Any, h: Any, q: Any, kv: Any) -> Any:
    _, rows, columns = VIDEO
    frames = (q // (rows * columns) - kv // (rows * columns)).abs() <= REACH[0]
    lines = (q // columns % rows - kv // columns % rows).abs() <= REACH[1]
    return frames & lines & ((q % columns - kv % columns).abs() <= REACH[2])


_MODS: dict[str, Mod] = {
    "prefix2k": lambda b, h, q, kv: (kv < PREFIX) | (q >= kv),
    "video": _video,
    "packed_blocks2k": lambda b, h, q, kv: q // CAUSAL_BLOCK >= kv // CAUSAL_BLOCK,
}
