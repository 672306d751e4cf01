"""The configs that the kernels with mma.sync take, on every arch: the forward's points, both backwards, few queries.

A row holds arches, the widest head_dim, config and evidence; the first row that fits a problem wins. Measured rows are
of an H200 with NVRTC 13.0, N=4096, B=4 and H*D=2048 in bf16, where they name no other shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeAlias

from multiattn.cuda.axes import Axes
from multiattn.cuda.backward_mma import BackwardConfig, QueryConfig
from multiattn.cuda.decode_mma import LONE_MAX, LONE_ROWS, CudaSplitConfig
from multiattn.cuda.forward_mma import CudaConfig
from multiattn.plan.config import COMPILED, C, Rule

_CPU = ("cpu",)
_SM90 = ("sm90",)
_BIG = ("sm80", "sm100", "sm103")  # 163 KiB a block and more
_SMALL = ("sm86", "sm89", "sm120", "sm121")  # 99 KiB
_OTHERS = (*_BIG, *_SMALL)
_GPUS = (*_SM90, *_OTHERS)

_H200 = "H200 2026-11-21: "
_UNSWEPT = "a guess, never swept: "
_EMULATED = "emulated: the smallest tile with two blocks of keys, every kind of slice and all the warps' parts"
_ONE_STAGE = _UNSWEPT + "a whole tile of V takes most of what a block can have"
_OUTPUT = "the output of 64 rows, or 32 from D=513 on, takes 128 registers of eight warps"
_Q_WHOLE = COMPILED + "Q whole, and slices of K and of V of one size in one ring"
_ONE_BUFFER = _UNSWEPT + "the tiles of share none, with one buffer in place of two"
_TWO_WARPS = _UNSWEPT + "two warps share 32 rows"

ForwardRules: TypeAlias = tuple[Rule[CudaConfig], ...]


def _rule(arches: tuple[str, ...], head_dim_max: int, config: C, why: str, *, banded: bool | None = None) -> Rule[C]:
    return Rule(arches=arches, head_dim_max=head_dim_max, config=config, why=why, banded=banded)


def _tile(
    tile_m: int, tile_n: int, warps: int, stages: int, *, q: str = "shared", columns: int = 1, slices: str = "64 16"
) -> CudaConfig:
    """A config whose `slices` are of head_dim and of keys."""
    dim_slice, key_slice = map(int, slices.split())
    return CudaConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        warps=warps,
        stages=stages,
        q_in_registers=q == "registers",
        q_streamed=q == "streamed",
        column_warps=columns,
        dim_slice=dim_slice,
        key_slice=key_slice,
    )


# ---------------------------------------------------------------- split_q

_SPLIT_Q: ForwardRules = (
    _rule(_CPU, 256, _tile(64, 32, 4, 2), "emulated: small, yet with two loops, two stages and four warps"),
    _rule(_SM90, 64, _tile(128, 64, 4, 3, q="registers"), _H200 + "320 TFLOPS; 2 stages 314"),
    _rule(_SM90, 128, _tile(128, 64, 4, 1), _H200 + "387 TFLOPS; 2 stages 384"),
    _rule(_SM90, 256, _tile(64, 32, 4, 2, q="registers"), _H200 + "327 TFLOPS; 64x64 with 1 stage 322"),
    _rule(_OTHERS, 64, _tile(128, 64, 4, 2, q="registers"), COMPILED + "32 rows a warp read K and V half as often"),
    _rule(("sm80", *_SMALL), 128, _tile(128, 64, 4, 1), COMPILED + "FlashAttention-2's tile for D=128", banded=False),
    _rule(_OTHERS, 128, _tile(128, 32, 4, 2), COMPILED + "128x64 spills under a mask, and on sm100 always"),
    _rule(_BIG, 256, _tile(128, 64, 8, 1), COMPILED + "the output leaves registers for 16 rows a warp"),
    _rule(_SMALL, 256, _tile(64, 64, 4, 1), COMPILED + "96 KiB at D=256 is what a block can have"),
)

_SHARE_KV = (
    _rule(_CPU, 256, _tile(64, 32, 4, 1), _EMULATED),
    _rule(_GPUS, 64, _tile(128, 64, 4, 1, q="registers"), _ONE_BUFFER),
    _rule(_GPUS, 128, _tile(128, 64, 4, 1), _ONE_BUFFER),
    _rule(_GPUS, 256, _tile(64, 32, 4, 1), _ONE_BUFFER),
)

_SHARE_QKV = (
    _rule(_CPU, 256, _tile(64, 32, 4, 1, q="registers"), _EMULATED),
    _rule(_GPUS, 64, _tile(128, 64, 4, 1, q="registers"), _UNSWEPT + "32 rows a warp"),
    _rule(_GPUS, 128, _tile(64, 64, 4, 1, q="registers"), _UNSWEPT + "Q takes registers, too: 16 rows a warp"),
    _rule(_GPUS, 256, _tile(64, 32, 4, 1, q="registers"), _UNSWEPT + "Q takes registers, too: 16 rows a warp"),
)

_SPLIT_Q_SLICED = (
    _rule(_CPU, 256, _tile(64, 32, 4, 2, q="streamed"), _EMULATED),
    _rule(_GPUS, 256, _tile(64, 64, 4, 2, q="streamed", slices="64 32"), _UNSWEPT + "16 rows a warp"),
)

# ---------------------------------------------------------------- split_kv

_SPLIT_KV = (
    _rule(_CPU, 256, _tile(32, 32, 4, 1, columns=2), _EMULATED),
    _rule(_GPUS, 128, _tile(64, 64, 4, 1, columns=2), _TWO_WARPS),
    _rule(_GPUS, 256, _tile(64, 32, 4, 1, columns=2), _TWO_WARPS),
)

_SPLIT_KV_SHARE_QKV = (
    _rule(_CPU, 256, _tile(32, 32, 4, 1, q="registers", columns=2), _EMULATED),
    _rule(_GPUS, 128, _tile(64, 64, 4, 1, q="registers", columns=2), _TWO_WARPS + ", and hold the same Q"),
    _rule(_GPUS, 256, _tile(32, 64, 4, 1, q="registers", columns=2), _TWO_WARPS + ", and hold the same Q"),
)

_FOUR_COLUMNS = _tile(64, 64, 8, 2, q="streamed", columns=4)
_FEW_ROWS = _tile(32, 64, 8, 2, q="streamed", columns=4)
_WHOLE_Q = _tile(64, 256, 8, 2, columns=4, slices="128 64")
_WHOLE_Q_FROM_513 = _tile(32, 256, 8, 2, columns=8, slices="128 32")

_SPLIT_KV_SLICED = (
    _rule(_CPU, 256, _tile(32, 32, 4, 2, columns=2), _EMULATED),
    _rule(_CPU, 1024, _FEW_ROWS, _EMULATED),
    _rule(_GPUS, 256, _tile(64, 64, 4, 2, q="streamed", columns=2, slices="64 32"), _TWO_WARPS),
)

_SPLIT_KV_TILING_QK = (
    *_SPLIT_KV_SLICED,
    _rule(_GPUS, 512, replace(_FOUR_COLUMNS, stages=1), _ONE_STAGE),
    _rule(_GPUS, 1024, replace(_FEW_ROWS, stages=1), _ONE_STAGE + "; a block of 99 KiB cannot have it"),
)

_SPLIT_KV_TILING_QKV = (
    *_SPLIT_KV_SLICED,
    _rule(_GPUS, 512, _FOUR_COLUMNS, _UNSWEPT + _OUTPUT),
    _rule(_GPUS, 1024, _FEW_ROWS, _UNSWEPT + _OUTPUT),
)

_SPLIT_KV_SHARE_KV_TILING_QKV = (
    *_SPLIT_KV_SLICED,
    _rule(_SM90, 512, _WHOLE_Q, _H200 + "D=512 N=8192: 345 TFLOPS; 128 keys 312"),
    _rule(_SM90, 1024, _WHOLE_Q_FROM_513, _H200 + "D=1024 N=8192: 247 TFLOPS; slices of half that size 239"),
    _rule(("sm100", "sm103"), 512, _WHOLE_Q, _Q_WHOLE),
    _rule(("sm100", "sm103"), 1024, _WHOLE_Q_FROM_513, _Q_WHOLE),
    _rule(("sm80",), 512, replace(_WHOLE_Q, tile_n=128, key_slice=32), _Q_WHOLE),
    _rule(("sm80",), 1024, replace(_WHOLE_Q_FROM_513, tile_n=128, key_slice=16), _Q_WHOLE),
    _rule(_SMALL, 512, replace(_FOUR_COLUMNS, stages=3), COMPILED + _OUTPUT),
    _rule(_SMALL, 1024, _FEW_ROWS, COMPILED + _OUTPUT),
)

_POINTS: dict[tuple[str, str, str], ForwardRules] = {
    ("split_q", "none", "none"): _SPLIT_Q,
    ("split_q", "kv", "none"): _SHARE_KV,
    ("split_q", "qkv", "none"): _SHARE_QKV,
    **{("split_q", share, tiling): _SPLIT_Q_SLICED for share in ("none", "kv") for tiling in ("qk", "qkv")},
    ("split_kv", "none", "none"): _SPLIT_KV,
    ("split_kv", "kv", "none"): _SPLIT_KV,
    ("split_kv", "qkv", "none"): _SPLIT_KV_SHARE_QKV,
    ("split_kv", "none", "qk"): _SPLIT_KV_TILING_QK,
    ("split_kv", "kv", "qk"): _SPLIT_KV_TILING_QK,
    ("split_kv", "none", "qkv"): _SPLIT_KV_TILING_QKV,
    ("split_kv", "kv", "qkv"): _SPLIT_KV_SHARE_KV_TILING_QKV,
}


def rules_of(axes: Axes) -> ForwardRules:
    """The rules of a point; swizzle and accumulator change none."""
    return _POINTS[axes.warps, axes.share, axes.tiling]


# ---------------------------------------------------------------- the backward

_WIDE = ("sm90", "sm100", "sm103", "sm120", "sm121")  # add 16 bytes of dq at a time


def _keys(tile_m: int, tile_n: int, warps: int, stages: int, *, columns: int = 1, wide: bool = False) -> BackwardConfig:
    return BackwardConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, column_warps=columns, wide=wide)


def _both(
    keys: BackwardConfig, tile_m: int, tile_n: int, warps: int, stages: int, *, columns: int = 1
) -> BackwardConfig:
    dq = QueryConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, column_warps=columns)
    return replace(keys, dq=dq)


_FOUR_SHARE = "four warps share 32 keys, and have 128 of D=512 each"


def _atomic_of(arches: tuple[str, ...], wide: bool) -> tuple[Rule[BackwardConfig], ...]:
    """Rules of those `arches` that add dq up in one way; none is measured."""
    chosen = {big: tuple(it for it in arches if it in big and (it in _WIDE) == wide) for big in (_BIG, _SMALL)}
    return (
        _rule(chosen[_BIG], 64, _keys(64, 64, 4, 2, wide=wide), COMPILED + "the best of H200"),
        _rule(chosen[_BIG], 128, _keys(64, 128, 8, 1, wide=wide), COMPILED + "the best of H200 without spills"),
        _rule(chosen[_BIG], 256, _keys(64, 64, 8, 1, wide=wide), COMPILED + "the best of H200 that fits 163 KiB"),
        _rule(chosen[_SMALL], 64, _keys(64, 64, 4, 1, wide=wide), COMPILED + "the best of H200 that fits 99 KiB"),
        _rule(chosen[_SMALL], 128, _keys(32, 64, 4, 2, wide=wide), COMPILED + "two stages that fit 99 KiB"),
        _rule(chosen[_SMALL], 256, _keys(32, 32, 4, 1, wide=wide), COMPILED + "what fits 99 KiB"),
        _rule(chosen[_BIG], 512, _keys(32, 32, 8, 2 if wide else 1, columns=4, wide=wide), COMPILED + _FOUR_SHARE),
        _rule(chosen[_SMALL], 512, _keys(16, 32, 8, 1, columns=4, wide=wide), COMPILED + _FOUR_SHARE),
    )


ATOMIC_RULES: tuple[Rule[BackwardConfig], ...] = (
    _rule(_CPU, 256, _keys(32, 32, 4, 2), "emulated: small, yet with two pairs of warps and two stages"),
    _rule(_CPU, 512, _keys(32, 32, 8, 2, columns=4), "emulated: as on a GPU"),
    _rule(_SM90, 64, _keys(64, 64, 4, 2, wide=True), _H200 + "279 TFLOPS; 1 stage 257"),
    _rule(_SM90, 128, _keys(64, 128, 8, 2, wide=True), _H200 + "312 TFLOPS; 1 stage 305", banded=False),
    _rule(_SM90, 128, _keys(64, 128, 8, 1, wide=True), _H200 + "288 TFLOPS; 2 stages 297, but they spill"),
    _rule(_SM90, 256, _keys(64, 64, 8, 2, wide=True), _H200 + "244 TFLOPS; 1 stage 239"),
    _rule(_SM90, 512, _keys(32, 32, 8, 2, columns=4, wide=True), COMPILED + _FOUR_SHARE),
    *_atomic_of(_OTHERS, wide=True),
    *_atomic_of(_OTHERS, wide=False),
)

TWO_PASS_RULES: tuple[Rule[BackwardConfig], ...] = (
    _rule(_CPU, 256, _both(_keys(32, 32, 4, 2), 32, 32, 2, 2), "emulated: small, yet with two stages"),
    _rule(_CPU, 512, _both(_keys(16, 32, 8, 1, columns=4), 32, 16, 4, 2, columns=4), "emulated: warps without scores"),
    _rule(_SM90, 64, _both(_keys(64, 128, 8, 2), 128, 64, 4, 2), _H200 + "218 TFLOPS; dq with 128x32 215"),
    _rule(_SM90, 128, _both(_keys(64, 128, 8, 2), 128, 32, 4, 2), _H200 + "255 TFLOPS; dq with 1 stage 249"),
    _rule(_SM90, 256, _both(_keys(64, 64, 8, 2), 128, 64, 8, 1), _H200 + "205 TFLOPS; dq with 64x32 202"),
    _rule(_OTHERS, 64, _both(_keys(64, 64, 4, 2), 64, 64, 4, 2), COMPILED + "close to the best of H200"),
    _rule(_BIG, 128, _both(_keys(64, 128, 8, 1), 64, 64, 4, 1), COMPILED + "fits and spills nothing"),
    _rule(_SMALL, 128, _both(_keys(32, 64, 4, 2), 64, 64, 4, 1), COMPILED + "fits and spills nothing"),
    _rule(_BIG, 256, _both(_keys(64, 64, 8, 1), 64, 32, 4, 1), COMPILED + "what fits"),
    _rule(_SMALL, 256, _both(_keys(32, 32, 4, 1), 64, 16, 4, 1), COMPILED + "what fits"),
    _rule(("sm80",), 512, _both(_keys(32, 32, 8, 1, columns=4), 32, 32, 4, 1, columns=4), COMPILED + _FOUR_SHARE),
    _rule(
        ("sm90", "sm100", "sm103"),
        512,
        _both(_keys(32, 32, 8, 2, columns=4), 64, 32, 8, 1, columns=4),
        COMPILED + _FOUR_SHARE,
    ),
    _rule(_SMALL, 512, _both(_keys(16, 32, 8, 1, columns=4), 32, 16, 4, 1, columns=4), COMPILED + _FOUR_SHARE),
)

# ---------------------------------------------------------------- few queries
# Measured rows are of one query in bf16: 27 cells of heads, batch and pages at each head_dim, N of 1k and 8k, graph
# replay over caches that together pass L2.

_GUESS_OTHERS = COMPILED + "Hopper's tiles, with rings that fit"
_EMULATED_TEAMS = "emulated: two teams of warps with two tiles of keys"


class _DecodeRow(NamedTuple):
    rows_max: int | None
    head_dim_max: int
    page_multiple: int
    config: CudaSplitConfig
    why: str
    seq_min: int = 0
    is_plain: bool = True
    head_dim_v_max: int | None = None
    stored: bool | None = None


def _teams(
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


_H200_DECODE = "H200 2026-11-26: "
_LONG = 32768
_H200_STORED = "H200 2026-12-01, e4m3, B=32 8/1 32k, alone: "
_STORED_ROWS = (
    _DecodeRow(16, 64, 64, _teams(16, 64, 8, 2, 1), _H200_STORED + "40.5 us, tiles of 32 keys 40.7"),
    _DecodeRow(16, 64, 1, _teams(16, 32, 8, 3, 1), "a guess: dense 40.7 us, for 40.5 with 64 keys"),
    _DecodeRow(16, 128, 32, _teams(16, 32, 8, 3, 1), _H200_STORED + "71.0 us, four warps 71.8"),
    _DecodeRow(16, 128, 1, _teams(16, 16, 8, 3, 1), _H200_STORED + "pages of 16 76.1 us, four warps twice an SM 76.8"),
    _DecodeRow(16, 256, 1, _teams(16, 32, 4, 3, 1), "H200 2026-12-01, e4m3, B=16 8/1 32k: 73.2 us, 16 keys 74.2"),
)
"""Caches of 8-bit numbers. A block fills its SM: where the next launch's fit beside it they come early, two on some,
and launches behind one another take 81 us for 70, with scales of tokens 89 for 71."""
_DECODE_ROWS = (
    *(row._replace(is_plain=False, stored=True) for row in _STORED_ROWS),
    _DecodeRow(
        16, 64, 64, _teams(16, 64, 4, 2, 1), _H200_DECODE + "B=128 32/8 32k, pages of 64: 1963 us, 32 keys 2009", _LONG
    ),
    _DecodeRow(16, 64, 32, _teams(16, 32, 4, 3, 2), _H200_DECODE + "B=32 8/1 8k 21.2 us, tiles of 16 keys 22.0"),
    _DecodeRow(
        16, 64, 1, _teams(16, 16, 4, 3, 4), _H200_DECODE + "B=8 32/8 8k, pages of 16: 36.4 us, 32 keys 38.3", 0, False
    ),
    _DecodeRow(
        16,
        128,
        1,
        _teams(16, 16, 4, 3, 2),
        _H200_DECODE + "B=8 32/8 8k 66.5 us, pages of 16 68.0; six stages 67.1, 72.1",
    ),
    _DecodeRow(16, 256, 1, _teams(16, 16, 4, 3, 1), _H200_DECODE + "B=8 16/2 8k 37.1 us, two stages 37.5"),
    _DecodeRow(16, 512, 1, _teams(16, 16, 4, 3, 1, column_warps=2), "a guess: two warps share rows, and D=256's ring"),
    _DecodeRow(16, 576, 1, _teams(16, 16, 4, 3, 1, column_warps=2), "a guess: as D=512", head_dim_v_max=512),
    _DecodeRow(
        32,
        128,
        1,
        _teams(32, 16, 8, 3, 1),
        _H200_DECODE + "B=8 32/8 8k, 8 queries: 71.5 us, four warps twice an SM 72.7",
    ),
    _DecodeRow(32, 256, 1, _teams(32, 16, 8, 3, 1, row_warps=2), "a guess: two warps share keys, and D=128's rows"),
    _DecodeRow(
        64,
        128,
        1,
        _teams(64, 32, 8, 3, 1, row_warps=2),
        _H200_DECODE + "B=8 32/8 8k, 16 queries: 77 us, 4 row warps 90",
    ),
    _DecodeRow(None, 64, 1, _teams(64, 64, 4, 3, 2, row_warps=4), "a guess: D=128's tiles"),
    _DecodeRow(
        None, 128, 1, _teams(64, 64, 4, 2, 2, row_warps=4), _H200_DECODE + "512 queries, 64k, 8/1: 430 us, 128 rows 520"
    ),
    _DecodeRow(
        None, 256, 1, _teams(64, 32, 4, 2, 1, row_warps=4), "a guess: registers and shared memory allow no more"
    ),
    _DecodeRow(None, 512, 1, _teams(32, 16, 4, 2, 1, row_warps=2, column_warps=2), "a guess: as D=256"),
    _DecodeRow(
        None,
        576,
        1,
        _teams(64, 16, 8, 3, 1, row_warps=4, column_warps=2),
        "a guess: half of the 128 heads that share latent keys",
        head_dim_v_max=512,
    ),
    _DecodeRow(None, 576, 1, _teams(16, 16, 2, 2, 1, column_warps=2), "a guess: what fits"),
)
"""Few rows: warps have all of them and keys of their own. Many: they share keys and have 16 rows each."""


def _fewer(config: CudaSplitConfig, head_dim_max: int) -> CudaSplitConfig:
    """The config for SMs with less shared memory: fewer tiles on their way."""
    fewer = replace(config, stages=2, blocks_per_sm=1, widens=False)
    if head_dim_max <= 128:
        return replace(fewer, tile_n=min(config.tile_n, 32), warps=min(config.warps, max(4, 2 * config.row_warps)))
    if head_dim_max <= 256:
        return replace(fewer, warps=max(2, config.row_warps), tile_n=16)
    return replace(fewer, tile_m=16, warps=2, row_warps=1)


def _decode_rules(arches: tuple[str, ...], why: str = "", *, small: bool = False) -> tuple[Rule[CudaSplitConfig], ...]:
    """A rule for each row: for caches, and where rows are few for plain calls too. `why` of a row's own unless given.

    Plain calls have no pages, and take the first row that fits. Small SMs have the rows for any page size.
    """
    return tuple(
        Rule(
            arches=arches,
            config=_fewer(row.config, row.head_dim_max) if small else row.config,
            why=why or row.why,
            head_dim_max=row.head_dim_max,
            head_dim_v_max=row.head_dim_v_max,
            rows_max=row.rows_max,
            lone_max=LONE_MAX if row.rows_max is not None and row.rows_max > LONE_ROWS else None,
            page_multiple=row.page_multiple,
            stored=row.stored,
            cached=None if row.rows_max is not None and (row.is_plain or small) else True,
            seq_min=row.seq_min,
        )
        for row in _DECODE_ROWS
        if not (small and (row.page_multiple > 1 or row.stored))
    )


_CPU_DECODE = tuple(
    Rule(
        arches=("cpu",),
        config=_teams(tile_m, 16, warps, 2, 1, row_warps=row_warps, column_warps=column_warps),
        why=_EMULATED_TEAMS,
        head_dim_max=head_dim_max,
        rows_max=rows_max,
        cached=cached,
        only_named=not cached,
    )
    for cached in (True, False)
    for rows_max, head_dim_max, tile_m, warps, row_warps, column_warps in (
        (16, 256, 16, 2, 1, 1),
        (None, 256, 32, 4, 2, 1),
        (None, 576, 16, 4, 1, 2),
    )
)

SPLIT_RULES: tuple[Rule[CudaSplitConfig], ...] = (
    *_CPU_DECODE,
    *_decode_rules(_SM90),
    *_decode_rules(_OTHERS, _GUESS_OTHERS, small=True),
)
