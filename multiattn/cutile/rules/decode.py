"""Tiles of the forward that divides keys among blocks, for every arch: by the rows of a sequence.

Where keys are in no cache it is for few queries alone, unless a caller names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from multiattn.cutile.decode import SplitKeysConfig
from multiattn.cutile.launches import HEAD_DIM_MAX
from multiattn.plan.config import COMPILED, Rule

_PLAIN_ROWS, _PLAIN_KEYS = 32, 512
"""The most rows and the least keys for which it is taken where keys are in no cache. A guess."""

_16X128 = SplitKeysConfig(tile_m=16, tile_n=128, blocks_per_sm=2, latency=8)
_16X64 = SplitKeysConfig(tile_m=16, tile_n=64, blocks_per_sm=2, latency=4)
_16X32 = SplitKeysConfig(tile_m=16, tile_n=32, blocks_per_sm=2, latency=4)
_32X64 = replace(_16X64, tile_m=32)
_32X32 = replace(_16X32, tile_m=32)
_64X64 = replace(_16X64, tile_m=64)
_64X32_WIDE = SplitKeysConfig(tile_m=64, tile_n=32, blocks_per_sm=1, warps=8, latency=4)
_128X64 = SplitKeysConfig(tile_m=128, tile_n=64, blocks_per_sm=1, warps=8, latency=4)


def _rules(
    arches: tuple[str, ...],
    head_dims: tuple[int, int],
    why: str,
    *configs: tuple[int | None, SplitKeysConfig],
    **more: Any,
) -> Iterator[Rule[SplitKeysConfig]]:
    """Rules of head_dims from one to another, each for as many rows of a sequence as it says, at most."""
    low, high = head_dims
    for rows_max, config in configs:
        own: dict[str, Any] = {
            "arches": arches,
            "head_dim_min": low,
            "head_dim_max": high,
            "config": config,
            "why": why,
        }
        rule: Rule[SplitKeysConfig] = Rule(**own, rows_max=rows_max, cached=True, **more)
        yield rule
        if rows_max is not None and rows_max <= _PLAIN_ROWS:
            yield replace(rule, cached=False, seq_min=_PLAIN_KEYS)
        if rows_max is None:
            yield replace(rule, cached=False, only_named=True)


_SM90 = "a guess: compiled with loads by a warp of their own and no spills"
_H200_64 = "H200 2026-11-26: B=8 32/8 8k 38.4 us, tiles of 64 keys 42.2; pages of 16 40.5, 44.6"
_H200_128 = "H200 2026-11-26: B=8 32/8 8k 69.8 us, latency 4 73.4, tiles of 128 keys 71.3; pages of 16 69.7, 77.2, 70.9"
_H200_256 = "H200 2026-11-26: B=8 16/2 8k 40.6 us, 64 rows and keys 42.8; pages of 16 40.4, 116"
_LATENT = COMPILED + "wgmma with no spills, a warpgroup for each half of values; 64x64 has mma.sync, and 16x32 spills"
_AS_SM90 = COMPILED + "the tiles of sm90"
_LATENT_TCGEN05 = COMPILED + "tcgen05 with no spills; 16x32 has 147 in its loops"
_LATENT_SM80 = COMPILED + "119 spills in its loops, 64x32 246, 16x32 389; the other mma.sync arches have 99 KiB"
_SMALL = ("sm80", "sm86", "sm89", "sm120", "sm121")
_OF_SMALL = COMPILED + "fits 99 KiB at two blocks an SM"

SPLIT_KEYS: tuple[Rule[SplitKeysConfig], ...] = (
    *_rules(("cpu",), (1, HEAD_DIM_MAX), "interpreted: tiles so small that a short sequence has several", (16, _16X32),
            (None, _32X32)),
    *_rules(("sm90",), (1, 64), _H200_64, (16, replace(_16X128, alone=_16X128.tile_n))),
    *_rules(("sm90",), (1, 64), _SM90, (32, _32X64), (64, _64X64), (None, _128X64)),
    *_rules(("sm90",), (65, 128), _H200_128, (16, replace(_16X64, latency=8, alone=128))),
    *_rules(("sm90",), (65, 128), _SM90, (32, _32X32), (64, _64X64), (None, _128X64)),
    *_rules(("sm90",), (129, 256), _H200_256, (16, _16X32)),
    *_rules(("sm90",), (129, 256), _SM90, (None, replace(_64X64, blocks_per_sm=1, warps=8))),
    *_rules(("sm90",), (257, HEAD_DIM_MAX), _LATENT, (None, _64X32_WIDE), head_dim_v_max=512),
    *_rules(("sm100", "sm103"), (1, 128), _AS_SM90, (16, _16X64), (None, _64X64)),
    *_rules(("sm100", "sm103"), (129, 256), _AS_SM90, (16, _16X32), (None, replace(_64X64, blocks_per_sm=1))),
    *_rules(("sm100", "sm103"), (257, HEAD_DIM_MAX), _LATENT_TCGEN05, (None, replace(_64X64, blocks_per_sm=1)),
            head_dim_v_max=512),
    *_rules(_SMALL, (1, 128), _OF_SMALL, (16, _16X64), (None, _32X32)),
    *_rules(("sm80",), (257, HEAD_DIM_MAX), _LATENT_SM80, (None, replace(_32X32, blocks_per_sm=1, warps=8)),
            head_dim_v_max=512),
    *_rules(_SMALL, (129, 256), _OF_SMALL, (16, _16X32), (None, replace(_32X32, blocks_per_sm=1))),
)  # fmt: skip
