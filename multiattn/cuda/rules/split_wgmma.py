"""The configs of Hopper's forward over caches."""

from __future__ import annotations

from typing import NamedTuple

from multiattn.cuda.split_wgmma_configs import SplitWgmmaConfig
from multiattn.plan.config import Rule

_H200 = "H200 2026-11-26: "
_GUESS = "a guess: D=128's, with the tiles that shared memory has room for"


class _WgmmaRow(NamedTuple):
    rows_min: int
    rows_max: int | None
    head_dim_max: int
    page_multiple: int
    config: SplitWgmmaConfig
    why: str


def _one(tile_n: int, stages: int) -> SplitWgmmaConfig:
    """One warpgroup multiplies."""
    return SplitWgmmaConfig(tile_m=64, tile_n=tile_n, stages=stages, lazy_max=True)


def _two(tile_n: int, stages: int, *, lazy_max: bool = True) -> SplitWgmmaConfig:
    """Two warpgroups multiply, in turns."""
    return SplitWgmmaConfig(tile_m=128, tile_n=tile_n, stages=stages, pingpong=True, lazy_max=lazy_max)


_ROWS = (
    _WgmmaRow(33, 64, 64, 1, _one(128, 12), _GUESS),
    _WgmmaRow(33, 64, 128, 1, _one(128, 6), _H200 + "B=8 32/8 8k, 16 queries: 83.1 us, split_keys 87.4"),
    _WgmmaRow(33, 64, 256, 1, _one(64, 6), _GUESS),
    _WgmmaRow(65, None, 64, 1, _two(128, 12), _H200 + "512 queries, 64k, 8/1, pages of 64: 146 us, exact maxima 164"),
    _WgmmaRow(65, 128, 128, 32, _one(128, 6), _H200 + "B=8 64/8 8k, 16 queries: 86.4 us, 128 rows 107"),
    _WgmmaRow(65, None, 128, 1, _two(128, 6), _H200 + "512 queries, 64k, 8/1: 198 us, exact maxima 217"),
    _WgmmaRow(65, None, 256, 1, _two(64, 5, lazy_max=False), _H200 + "512 queries, 64k, 8/1: 372 us, lazy maxima 380"),
)
"""Fewer rows read keys as fast with mma.sync."""


def _rule(row: _WgmmaRow) -> Rule[SplitWgmmaConfig]:
    """A rule for caches, and where rows are few for plain calls too; not for an element of a bias a key.

    That wants more registers.
    """
    return Rule(
        arches=("sm90",),
        config=row.config,
        why=row.why,
        head_dim_max=row.head_dim_max,
        rows_min=row.rows_min,
        rows_max=row.rows_max,
        page_multiple=row.page_multiple,
        cached=True if row.rows_max is None else None,
        reads_keys=False,
    )


def _emulated(rows_max: int | None, config: SplitWgmmaConfig) -> Rule[SplitWgmmaConfig]:
    why = "emulated: small tiles of keys; split_keys builds and runs faster"
    return Rule(arches=("cpu",), config=config, why=why, rows_max=rows_max, only_named=True)


SPLIT_WGMMA_RULES: tuple[Rule[SplitWgmmaConfig], ...] = (
    *map(_rule, _ROWS),
    _emulated(64, SplitWgmmaConfig(tile_m=64, tile_n=32, stages=4, keys_min=64)),
    _emulated(None, SplitWgmmaConfig(tile_m=128, tile_n=32, stages=4, pingpong=True, keys_min=64)),
)
"""First match wins."""
