"""The configs of the forward for few queries, on every arch.

Measured rows are of an H200 with bf16: 2026-11-26, one query, 27 cells of heads, batch and pages at each head_dim, N of
1k and 8k, graph replay over caches that together pass L2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from multiattn.cuda.decode_mma import LONE_MAX, LONE_ROWS, CudaSplitConfig
from multiattn.plan.config import COMPILED, Rule

_SM90 = ("sm90",)
_BIG = ("sm80", "sm100", "sm103")  # 163 KiB a block and more
_SMALL = ("sm86", "sm89", "sm120", "sm121")  # 99 KiB
_GUESS_OTHERS = COMPILED + "Hopper's tiles, with rings that fit"
_EMULATED = "emulated: two teams of warps with two tiles of keys"


class _Row(NamedTuple):
    rows_max: int | None
    head_dim_max: int
    page_multiple: int
    config: CudaSplitConfig
    why: str
    seq_min: int = 0
    is_plain: bool = True


def _config(
    tile_m: int, tile_n: int, warps: int, stages: int, blocks_per_sm: int, *, row_warps: int = 1, column_warps: int = 1
) -> CudaSplitConfig:
    """A config that widens where a block leaves room for another beside it."""
    return CudaSplitConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        warps=warps,
        row_warps=row_warps,
        column_warps=column_warps,
        stages=stages,
        blocks_per_sm=blocks_per_sm,
        widens=blocks_per_sm > 1,
    )


_H200 = "H200 2026-11-26: "
_LONG = 32768
_ROWS = (
    _Row(16, 64, 64, _config(16, 64, 4, 2, 1), _H200 + "B=128 32/8 32k, pages of 64: 1963 us, 32 keys 2009", _LONG),
    _Row(16, 64, 32, _config(16, 32, 4, 3, 2), _H200 + "B=32 8/1 8k 21.2 us, tiles of 16 keys 22.0"),
    _Row(16, 64, 1, _config(16, 16, 4, 3, 4), _H200 + "B=8 32/8 8k, pages of 16: 36.4 us, 32 keys 38.3", 0, False),
    _Row(16, 128, 1, _config(16, 16, 4, 3, 2), _H200 + "B=8 32/8 8k 66.5 us, pages of 16 68.0; six stages 67.1, 72.1"),
    _Row(16, 256, 1, _config(16, 16, 4, 3, 1), _H200 + "B=8 16/2 8k 37.1 us, two stages 37.5"),
    _Row(16, 512, 1, _config(16, 16, 4, 3, 1, column_warps=2), "a guess: two warps share rows, and D=256's ring"),
    _Row(32, 128, 1, _config(32, 16, 8, 3, 1), _H200 + "B=8 32/8 8k, 8 queries: 71.5 us, four warps twice an SM 72.7"),
    _Row(32, 256, 1, _config(32, 16, 8, 3, 1, row_warps=2), "a guess: two warps share keys, and D=128's rows"),
    _Row(64, 128, 1, _config(64, 32, 8, 3, 1, row_warps=2), _H200 + "B=8 32/8 8k, 16 queries: 77 us, 4 row warps 90"),
    _Row(None, 64, 1, _config(64, 64, 4, 3, 2, row_warps=4), "a guess: D=128's tiles"),
    _Row(None, 128, 1, _config(64, 64, 4, 2, 2, row_warps=4), _H200 + "512 queries, 64k, 8/1: 430 us, 128 rows 520"),
    _Row(None, 256, 1, _config(64, 32, 4, 2, 1, row_warps=4), "a guess: registers and shared memory allow no more"),
    _Row(None, 512, 1, _config(32, 16, 4, 2, 1, row_warps=2, column_warps=2), "a guess: as D=256"),
)
"""Few rows: warps have all of them and keys of their own. Many: they share keys and have 16 rows each."""


def _small(config: CudaSplitConfig, head_dim_max: int) -> CudaSplitConfig:
    """The config for SMs with less shared memory: fewer tiles on their way."""
    fewer = replace(config, stages=2, blocks_per_sm=1, widens=False)
    if head_dim_max <= 128:
        return replace(fewer, tile_n=min(config.tile_n, 32), warps=min(config.warps, max(4, 2 * config.row_warps)))
    if head_dim_max <= 256:
        return replace(fewer, warps=max(2, config.row_warps), tile_n=16)
    return replace(fewer, tile_m=16, warps=2, row_warps=1)


def _rules(arches: tuple[str, ...], why: str = "", *, small: bool = False) -> tuple[Rule[CudaSplitConfig], ...]:
    """A rule for each row: for caches, and where rows are few for plain calls too. `why` of a row's own unless given.

    Plain calls have no pages, and take the first row that fits. Small SMs have the rows for any page size.
    """
    return tuple(
        Rule(
            arches=arches,
            config=_small(row.config, row.head_dim_max) if small else row.config,
            why=why or row.why,
            head_dim_max=row.head_dim_max,
            rows_max=row.rows_max,
            lone_max=LONE_MAX if row.rows_max is not None and row.rows_max > LONE_ROWS else None,
            page_multiple=row.page_multiple,
            cached=None if row.rows_max is not None and (row.is_plain or small) else True,
            seq_min=row.seq_min,
        )
        for row in _ROWS
        if not (small and row.page_multiple > 1)
    )


_CPU = tuple(
    Rule(
        arches=("cpu",),
        config=_config(tile_m, 16, warps, 2, 1, row_warps=row_warps, column_warps=column_warps),
        why=_EMULATED,
        head_dim_max=head_dim_max,
        rows_max=rows_max,
        cached=cached,
        only_named=not cached,
    )
    for cached in (True, False)
    for rows_max, head_dim_max, tile_m, warps, row_warps, column_warps in (
        (16, 256, 16, 2, 1, 1),
        (None, 256, 32, 4, 2, 1),
        (None, 512, 16, 4, 1, 2),
    )
)

SPLIT_RULES: tuple[Rule[CudaSplitConfig], ...] = (
    *_CPU,
    *_rules(_SM90),
    *_rules(_BIG, _GUESS_OTHERS, small=True),
    *_rules(_SMALL, _GUESS_OTHERS, small=True),
)
