"""The configs that the kernels with mma.sync take, on every arch: the forward's points and both backwards.

A row holds arches, the widest head_dim, config and evidence; the first row that fits a problem wins. Measured rows are
of an H200 with NVRTC 13.0, N=4096, B=4 and H*D=2048 in bf16, where they name no other shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from multiattn.cuda.axes import Axes
from multiattn.cuda.backward_mma import BackwardConfig, QueryConfig
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


def _keys(tile_m: int, tile_n: int, warps: int, stages: int, *, wide: bool = False) -> BackwardConfig:
    return BackwardConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, wide=wide)


def _both(keys: BackwardConfig, tile_m: int, tile_n: int, warps: int, stages: int) -> BackwardConfig:
    return replace(keys, dq=QueryConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages))


def _atomic_of(arches: tuple[str, ...], wide: bool) -> tuple[Rule[BackwardConfig], ...]:
    """Those of `arches` that are not measured, and add dq up in one way."""
    chosen = {big: tuple(it for it in arches if it in big and (it in _WIDE) == wide) for big in (_BIG, _SMALL)}
    return (
        _rule(chosen[_BIG], 64, _keys(64, 64, 4, 2, wide=wide), COMPILED + "the best of H200"),
        _rule(chosen[_BIG], 128, _keys(64, 128, 8, 1, wide=wide), COMPILED + "the best of H200 without spills"),
        _rule(chosen[_BIG], 256, _keys(64, 64, 8, 1, wide=wide), COMPILED + "the best of H200 that fits 163 KiB"),
        _rule(chosen[_SMALL], 64, _keys(64, 64, 4, 1, wide=wide), COMPILED + "the best of H200 that fits 99 KiB"),
        _rule(chosen[_SMALL], 128, _keys(32, 64, 4, 2, wide=wide), COMPILED + "two stages that fit 99 KiB"),
        _rule(chosen[_SMALL], 256, _keys(32, 32, 4, 1, wide=wide), COMPILED + "what fits 99 KiB"),
    )


ATOMIC_RULES: tuple[Rule[BackwardConfig], ...] = (
    _rule(_CPU, 256, _keys(32, 32, 4, 2), "emulated: small, yet with two pairs of warps and two stages"),
    _rule(_SM90, 64, _keys(64, 64, 4, 2, wide=True), _H200 + "279 TFLOPS; 1 stage 257"),
    _rule(_SM90, 128, _keys(64, 128, 8, 2, wide=True), _H200 + "312 TFLOPS; 1 stage 305", banded=False),
    _rule(_SM90, 128, _keys(64, 128, 8, 1, wide=True), _H200 + "288 TFLOPS; 2 stages 297, but they spill"),
    _rule(_SM90, 256, _keys(64, 64, 8, 2, wide=True), _H200 + "244 TFLOPS; 1 stage 239"),
    *_atomic_of(_OTHERS, wide=True),
    *_atomic_of(_OTHERS, wide=False),
)

TWO_PASS_RULES: tuple[Rule[BackwardConfig], ...] = (
    _rule(_CPU, 256, _both(_keys(32, 32, 4, 2), 32, 32, 2, 2), "emulated: small, yet with two stages"),
    _rule(_SM90, 64, _both(_keys(64, 128, 8, 2), 128, 64, 4, 2), _H200 + "218 TFLOPS; dq with 128x32 215"),
    _rule(_SM90, 128, _both(_keys(64, 128, 8, 2), 128, 32, 4, 2), _H200 + "255 TFLOPS; dq with 1 stage 249"),
    _rule(_SM90, 256, _both(_keys(64, 64, 8, 2), 128, 64, 8, 1), _H200 + "205 TFLOPS; dq with 64x32 202"),
    _rule(_OTHERS, 64, _both(_keys(64, 64, 4, 2), 64, 64, 4, 2), COMPILED + "close to the best of H200"),
    _rule(_BIG, 128, _both(_keys(64, 128, 8, 1), 64, 64, 4, 1), COMPILED + "fits and spills nothing"),
    _rule(_SMALL, 128, _both(_keys(32, 64, 4, 2), 64, 64, 4, 1), COMPILED + "fits and spills nothing"),
    _rule(_BIG, 256, _both(_keys(64, 64, 8, 1), 64, 32, 4, 1), COMPILED + "what fits"),
    _rule(_SMALL, 256, _both(_keys(32, 32, 4, 1), 64, 16, 4, 1), COMPILED + "what fits"),
)
