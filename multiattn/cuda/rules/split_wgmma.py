"""The configs of Hopper's forward over caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from multiattn.cuda.decode_mma import LONE_MAX
from multiattn.cuda.decode_wgmma import SplitWgmmaConfig
from multiattn.plan.config import Rule

_H200 = "H200 2026-11-26: "
_GUESS = "a guess: as D=128 has it"


class _WgmmaRow(NamedTuple):
    rows_min: int
    rows_max: int | None
    head_dim_max: int
    page_multiple: int
    config: SplitWgmmaConfig
    why: str


def _one(tile_n: int, stages: int, *, gathers: bool = False) -> SplitWgmmaConfig:
    """One warpgroup multiplies."""
    return SplitWgmmaConfig(tile_m=64, tile_n=tile_n, stages=stages, lazy_max=True, gathers=gathers)


def _two(tile_n: int, stages: int, *, lazy_max: bool = True, gathers: bool = False) -> SplitWgmmaConfig:
    """Two warpgroups multiply, in turns."""
    return SplitWgmmaConfig(tile_m=128, tile_n=tile_n, stages=stages, pingpong=True, lazy_max=lazy_max, gathers=gathers)


_FEW = (
    _WgmmaRow(33, 64, 64, 16, _one(128, 12), _H200 + "B=8 64/8 8k, 8 queries, pages of 16: 41.6 us, gathered 42.2"),
    _WgmmaRow(33, 64, 64, 1, _one(128, 12, gathers=True), _GUESS),
    _WgmmaRow(33, 64, 128, 1, _one(128, 6, gathers=True), _H200 + "B=8 64/8 8k, 8 queries: 71.4 us, boxes 73.3"),
    _WgmmaRow(33, 64, 256, 1, _one(64, 6, gathers=True), _H200 + "B=8 64/8 4k, 8 queries: 73.3 us, boxes 75.1"),
    _WgmmaRow(65, 128, 64, 16, _two(128, 12), _H200 + "B=8 64/8 8k, 16 queries, pages of 16: 46.8 us, gathered 48.1"),
    _WgmmaRow(65, 128, 64, 1, _two(128, 12, gathers=True), _GUESS),
    _WgmmaRow(65, 128, 128, 1, _two(128, 6, gathers=True), _H200 + "B=8 64/8 8k, 16 queries: 74.8 us, boxes 76.1"),
)
"""For caches and for plain calls. Still fewer rows read keys as fast with mma.sync."""
_WIDE, _WIDE_GATHERED = (_two(64, 5, lazy_max=False, gathers=gathers) for gathers in (False, True))
_CACHES = (
    _WgmmaRow(65, 128, 256, 1, _WIDE_GATHERED, _H200 + "B=8 64/8 4k, 16 queries: 78 us, boxes 83"),
    _WgmmaRow(65, None, 64, 32, _two(128, 12), _H200 + "512 queries, 64k, 8/1, pages of 32: 147 us, gathered 156"),
    _WgmmaRow(65, None, 64, 1, _two(128, 12, gathers=True), _H200 + "the same with pages of 16: 154 us, boxes 162"),
    _WgmmaRow(65, None, 128, 32, _two(128, 6), _H200 + "512 queries, 64k, 8/1: 195 us, gathered 211"),
    _WgmmaRow(65, None, 128, 1, _two(128, 6, gathers=True), _H200 + "the same with pages of 16: 204 us, boxes 258"),
    _WgmmaRow(65, None, 256, 32, _WIDE, _H200 + "512 queries, 64k, 8/1, pages of 32: 403 us, gathered 408"),
    _WgmmaRow(65, None, 256, 1, _WIDE_GATHERED, _H200 + "the same with pages of 16: 372 us, boxes 513"),
)
"""For caches alone."""


def _rule(row: _WgmmaRow, cached: bool | None) -> Rule[SplitWgmmaConfig]:
    """A rule of a row; not for an element of a bias a key, which wants more registers."""
    return Rule(
        arches=("sm90",),
        config=row.config,
        why=row.why,
        head_dim_max=row.head_dim_max,
        rows_min=row.rows_min,
        rows_max=row.rows_max,
        lone_max=None if cached else LONE_MAX,
        page_multiple=row.page_multiple,
        cached=cached,
        reads_keys=False,
    )


def _emulated() -> Iterator[Rule[SplitWgmmaConfig]]:
    why = "emulated: small tiles of keys; split_keys builds and runs faster"
    small = SplitWgmmaConfig(tile_m=64, tile_n=32, stages=4, keys_min=64)
    for gathers, page_multiple in ((False, 8), (True, 1)):
        for rows_max, config in ((64, small), (None, replace(small, tile_m=128, pingpong=True))):
            its = replace(config, gathers=gathers)
            yield Rule(
                arches=("cpu",), config=its, why=why, rows_max=rows_max, page_multiple=page_multiple, only_named=True
            )


SPLIT_WGMMA_RULES: tuple[Rule[SplitWgmmaConfig], ...] = (
    *(_rule(row, None) for row in _FEW),
    *(_rule(row, True) for row in _CACHES),
    *_emulated(),
)
"""First match wins."""
