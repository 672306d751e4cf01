"""Which config the forward takes, per point of the axes and arch; every rule with its evidence."""

from __future__ import annotations

from dataclasses import replace

from multiattn.cuda.axes import Axes
from multiattn.cuda.configs import CudaConfig
from multiattn.plan.config import COMPILED, Rule

_BIG_SMEM = ("sm80", "sm100", "sm103")  # 163 KiB a block and more
_SMALL_SMEM = ("sm86", "sm89", "sm120", "sm121")  # 99 KiB


_H200 = "H200, 2026-11-21, NVRTC 13.0, B4 N=4096 H*D=2048 bf16, best of the candidates: "

RULES: tuple[Rule[CudaConfig], ...] = (
    Rule(
        arches=("cpu",),
        config=CudaConfig(tile_m=64, tile_n=32, warps=4, stages=2),
        why="emulated: small tiles build and run fast, yet have two loops, two stages and four warps",
    ),
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        config=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=3, q_in_registers=True),
        why=_H200 + "320 TFLOPS full, 303 causal; 2 stages 314 and 298; Q in shared memory 311 and 294",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        config=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=1),
        why=_H200 + "387 TFLOPS full, 360 causal; 2 stages 384 and 359; 64x128 with Q in registers 329 and 316",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        config=CudaConfig(tile_m=64, tile_n=32, warps=4, stages=2, q_in_registers=True),
        why=_H200 + "327 TFLOPS full, 309 causal; 64x64 with 1 stage 322 and 305; 128x128 with 8 warps 316 and 303",
    ),
    Rule(
        arches=(*_BIG_SMEM, *_SMALL_SMEM),
        head_dim_max=64,
        config=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=2, q_in_registers=True),
        why=COMPILED + "32 rows a warp read K and V half as often; Q, scores and output take 160 registers",
    ),
    Rule(
        arches=("sm80", *_SMALL_SMEM),
        head_dim_min=65,
        head_dim_max=128,
        banded=False,
        config=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=1),
        why=COMPILED + "FlashAttention-2's tile for D=128; two blocks an SM where it has 128 KiB",
    ),
    Rule(
        arches=(*_BIG_SMEM, *_SMALL_SMEM),
        head_dim_min=65,
        head_dim_max=128,
        config=CudaConfig(tile_m=128, tile_n=32, warps=4, stages=2),
        why=COMPILED + "as many bytes as 128x64 with 1 stage, which spills when causal, and on sm100 always",
    ),
    Rule(
        arches=_BIG_SMEM,
        head_dim_min=129,
        config=CudaConfig(tile_m=128, tile_n=64, warps=8, stages=1),
        why=COMPILED + "16 rows a warp is what the output leaves registers for; eight warps share one K and V",
    ),
    Rule(
        arches=_SMALL_SMEM,
        head_dim_min=129,
        config=CudaConfig(tile_m=64, tile_n=64, warps=4, stages=1),
        why=COMPILED + "96 KiB at D=256 is what a block can have",
    ),
)
"""First match wins."""


_CPU = ("cpu",)
_GPUS = (*_BIG_SMEM, "sm90", *_SMALL_SMEM)
_UNSWEPT = "a guess, never swept: "
_EMULATED = "emulated: the smallest tile with two blocks of keys, every kind of slice and all the warps' parts"


def _rule(arches: tuple[str, ...], head_dim_max: int, why: str, config: CudaConfig) -> Rule[CudaConfig]:
    return Rule(arches=arches, head_dim_max=head_dim_max, config=config, why=why)


def _whole(why: str, *, narrow: CudaConfig, medium: CudaConfig, wide: CudaConfig) -> tuple[Rule[CudaConfig], ...]:
    """Rules up to D = 64, 128 and 256."""
    why = _UNSWEPT + why
    return _rule(_GPUS, 64, why, narrow), _rule(_GPUS, 128, why, medium), _rule(_GPUS, 256, why, wide)


_SHARE_KV = (
    _rule(_CPU, 256, _EMULATED, CudaConfig(tile_m=64, tile_n=32, warps=4, stages=1)),
    *_whole(
        "the tiles of share none, with one buffer in place of two",
        narrow=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=1, q_in_registers=True),
        medium=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=1),
        wide=CudaConfig(tile_m=64, tile_n=32, warps=4, stages=1),
    ),
)

_SHARE_QKV = (
    _rule(_CPU, 256, _EMULATED, CudaConfig(tile_m=64, tile_n=32, warps=4, stages=1, q_in_registers=True)),
    *_whole(
        "Q takes registers, too: 16 rows a warp from D=65 on",
        narrow=CudaConfig(tile_m=128, tile_n=64, warps=4, stages=1, q_in_registers=True),
        medium=CudaConfig(tile_m=64, tile_n=64, warps=4, stages=1, q_in_registers=True),
        wide=CudaConfig(tile_m=64, tile_n=32, warps=4, stages=1, q_in_registers=True),
    ),
)

_SLICED = CudaConfig(tile_m=64, tile_n=64, warps=4, stages=2, q_streamed=True, key_slice=32)

_SPLIT_Q_SLICED = (
    _rule(_CPU, 256, _EMULATED, CudaConfig(tile_m=64, tile_n=32, warps=4, stages=2, q_streamed=True)),
    _rule(_GPUS, 256, _UNSWEPT + "16 rows a warp leave registers for the output up to D=256", _SLICED),
)

_SPLIT_KV = (
    _rule(_CPU, 256, _EMULATED, CudaConfig(tile_m=32, tile_n=32, warps=4, column_warps=2, stages=1)),
    *_whole(
        "two warps share 32 rows",
        narrow=CudaConfig(tile_m=64, tile_n=64, warps=4, column_warps=2, stages=1),
        medium=CudaConfig(tile_m=64, tile_n=64, warps=4, column_warps=2, stages=1),
        wide=CudaConfig(tile_m=64, tile_n=32, warps=4, column_warps=2, stages=1),
    ),
)

_SPLIT_KV_SHARE_QKV = (
    _rule(
        _CPU, 256, _EMULATED, CudaConfig(tile_m=32, tile_n=32, warps=4, column_warps=2, stages=1, q_in_registers=True)
    ),
    *_whole(
        "two warps share 32 rows, and hold the same Q",
        narrow=CudaConfig(tile_m=64, tile_n=64, warps=4, column_warps=2, stages=1, q_in_registers=True),
        medium=CudaConfig(tile_m=64, tile_n=64, warps=4, column_warps=2, stages=1, q_in_registers=True),
        wide=CudaConfig(tile_m=32, tile_n=64, warps=4, column_warps=2, stages=1, q_in_registers=True),
    ),
)

_NARROW_COLUMNS = CudaConfig(tile_m=64, tile_n=64, warps=4, column_warps=2, stages=2, q_streamed=True, key_slice=32)
_FOUR_COLUMNS = CudaConfig(tile_m=64, tile_n=64, warps=8, column_warps=4, stages=2, q_streamed=True)
_FEW_ROWS = CudaConfig(tile_m=32, tile_n=64, warps=8, column_warps=4, stages=2, q_streamed=True)
_ONE_STAGE = _UNSWEPT + "one stage, as a whole tile of V takes most of what a block can have"
_OUTPUT = "the output of 64 rows, or 32 from D=513 on, takes 128 registers of eight warps"

_SPLIT_KV_CPU = (
    _rule(_CPU, 256, _EMULATED, CudaConfig(tile_m=32, tile_n=32, warps=4, column_warps=2, stages=2)),
    _rule(_CPU, 1024, _EMULATED, CudaConfig(tile_m=32, tile_n=64, warps=8, column_warps=4, stages=2, q_streamed=True)),
)

_SPLIT_KV_TILING_QK = (
    *_SPLIT_KV_CPU,
    _rule(_GPUS, 256, _UNSWEPT + "two warps share 32 rows", _NARROW_COLUMNS),
    _rule(_GPUS, 512, _ONE_STAGE, replace(_FOUR_COLUMNS, stages=1)),
    _rule(_GPUS, 1024, _ONE_STAGE + "; a block of 99 KiB cannot have it", replace(_FEW_ROWS, stages=1)),
)

_SPLIT_KV_TILING_QKV = (
    *_SPLIT_KV_CPU,
    _rule(_GPUS, 256, _UNSWEPT + "two warps share 32 rows", _NARROW_COLUMNS),
    _rule(_GPUS, 512, _UNSWEPT + _OUTPUT, _FOUR_COLUMNS),
    _rule(_GPUS, 1024, _UNSWEPT + _OUTPUT, _FEW_ROWS),
)

_WIDE = CudaConfig(tile_m=64, tile_n=256, warps=8, column_warps=4, stages=2, dim_slice=128, key_slice=64)
_WIDER = CudaConfig(tile_m=32, tile_n=256, warps=8, column_warps=8, stages=2, dim_slice=128, key_slice=32)
_MEASURED = "H200, 2026-11-21, NVRTC 13.0, N=8192 full, best of the candidates: "
_Q_WHOLE = COMPILED + "Q whole, and slices of K and of V of one size in one ring"

_SPLIT_KV_SHARE_KV_TILING_QKV = (
    *_SPLIT_KV_CPU,
    _rule(_GPUS, 256, _UNSWEPT + "two warps share 32 rows", _NARROW_COLUMNS),
    _rule(
        ("sm90",),
        512,
        _MEASURED
        + "D=512 B1 H48: 335 TFLOPS fp16, 345 bf16; slices of half that size 287 and 303, 128 keys 312 and 312",
        _WIDE,
    ),
    _rule(
        ("sm90",),
        1024,
        _MEASURED + "D=1024 B1 H16: 247 TFLOPS bf16; four slices of half that size 239, 128 keys 211",
        _WIDER,
    ),
    _rule(("sm100", "sm103"), 512, _Q_WHOLE, _WIDE),
    _rule(("sm100", "sm103"), 1024, _Q_WHOLE, _WIDER),
    _rule(("sm80",), 512, _Q_WHOLE, replace(_WIDE, tile_n=128, key_slice=32)),
    _rule(("sm80",), 1024, _Q_WHOLE, replace(_WIDER, tile_n=128, key_slice=16)),
    _rule(_SMALL_SMEM, 512, COMPILED + _OUTPUT, replace(_FOUR_COLUMNS, stages=3)),
    _rule(_SMALL_SMEM, 1024, COMPILED + _OUTPUT, _FEW_ROWS),
)

_TABLES: dict[tuple[str, str, str], tuple[Rule[CudaConfig], ...]] = {
    ("split_q", "none", "none"): RULES,
    ("split_q", "kv", "none"): _SHARE_KV,
    ("split_q", "qkv", "none"): _SHARE_QKV,
    ("split_q", "none", "qk"): _SPLIT_Q_SLICED,
    ("split_q", "none", "qkv"): _SPLIT_Q_SLICED,
    ("split_q", "kv", "qk"): _SPLIT_Q_SLICED,
    ("split_q", "kv", "qkv"): _SPLIT_Q_SLICED,
    ("split_kv", "none", "none"): _SPLIT_KV,
    ("split_kv", "kv", "none"): _SPLIT_KV,
    ("split_kv", "qkv", "none"): _SPLIT_KV_SHARE_QKV,
    ("split_kv", "none", "qk"): _SPLIT_KV_TILING_QK,
    ("split_kv", "none", "qkv"): _SPLIT_KV_TILING_QKV,
    ("split_kv", "kv", "qk"): _SPLIT_KV_TILING_QK,
    ("split_kv", "kv", "qkv"): _SPLIT_KV_SHARE_KV_TILING_QKV,
}


_ILLEGAL = (
    Rule(
        arches=(*_CPU, *_GPUS),
        head_dim_max=1024,
        config=CudaConfig(tile_m=64, tile_n=64, warps=4, stages=1),
        why="none: no config makes this point legal, as its `fits` says",
    ),
)


def rules_of(axes: Axes) -> tuple[Rule[CudaConfig], ...]:
    """The rules of a point; swizzle and accumulator change none."""
    return _TABLES.get((axes.warps, axes.share, axes.tiling), _ILLEGAL)
