"""Ampere and Ada (sm80 to sm89), and Blackwell of desktops (sm120, sm121), whose products are mma.sync's, too.

Tiles and compiler hints of both directions. All but sm80 have 99 KiB of shared memory a block.
"""

from __future__ import annotations

from dataclasses import replace

from multiattn.cutile.backward import OnePassConfig, TwoPassConfig
from multiattn.cutile.forward import CutileConfig
from multiattn.plan.config import COMPILED, Rule

_ARCHES = ("sm80", "sm86", "sm89", "sm120", "sm121")

FORWARD: tuple[Rule[CutileConfig], ...] = (
    Rule(arches=("sm86", "sm89"), head_dim_min=65, head_dim_max=128,
         config=CutileConfig(tile_m=64, tile_n=32, occupancy=2, k_latency=4, v_latency=6),
         why=COMPILED + "no spills in its loops, at latencies of 2 and 4 up to 12"),
    Rule(arches=_ARCHES, head_dim_max=128, config=CutileConfig(tile_m=64, tile_n=64, occupancy=2),
         why=COMPILED + "NVIDIA's own cuTile examples take 64x64 at occupancy 2 on sm120"),
    Rule(arches=("sm86", "sm89"), head_dim_min=129, banded=True,
         config=CutileConfig(tile_m=64, tile_n=32, num_worker_warps=8),
         why=COMPILED + "no spills; with 4 warps 205 in its loops, 64x16 39"),
    Rule(arches=("sm120", "sm121"), head_dim_min=129, banded=True,
         config=CutileConfig(tile_m=128, tile_n=16, num_worker_warps=8),
         why=COMPILED + "no spills in its loops; 64x32 108, with 8 warps 26"),
    Rule(arches=_ARCHES, head_dim_min=129, config=CutileConfig(tile_m=64, tile_n=32),
         why=COMPILED + "fits 99 KiB; 8 warps spill more in its loops, and so do 64x16 and 128x16"),
)  # fmt: skip

_TWO_PASSES = TwoPassConfig(
    tile_m=64, tile_n=32, num_worker_warps=8, latency=1, dq_tile_n=32, dq_num_worker_warps=8, dq_latency=1
)
"""For 99 KiB a block at D=128, with 8 warps to share the accumulators."""
_ONE_PASS = OnePassConfig(tile_m=32, tile_n=32, num_worker_warps=8, latency=1)

TWO_PASS: tuple[Rule[TwoPassConfig], ...] = (
    Rule(arches=_ARCHES, head_dim_max=128, config=_TWO_PASSES,
         why=COMPILED + "of the tiles that do not spill at D=128 the largest; 32x64 and 64x64 do"),
    Rule(arches=("sm80",), head_dim_min=129, config=replace(_TWO_PASSES, tile_m=32, dq_tile_m=32),
         why=COMPILED + "38 spills in its loops with the mask, 64x16 81; 16 queries leave the tensor cores out"),
    Rule(arches=_ARCHES[1:], head_dim_min=129, config=replace(_TWO_PASSES, tile_n=16, dq_tile_m=32),
         why=COMPILED + "fits 99 KiB and spills least; 16 queries a block leave the tensor cores out"),
)  # fmt: skip

ATOMIC: tuple[Rule[OnePassConfig], ...] = (
    Rule(arches=_ARCHES, head_dim_max=128, config=_ONE_PASS, only_named=True,
         why=COMPILED + "of the tiles that do not spill at D=128 the largest; 64x32 and 16x32 do"),
    Rule(arches=_ARCHES, head_dim_min=129, config=_ONE_PASS, only_named=True,
         why=COMPILED + "fits 99 KiB; 32x16 and 16x32 leave the tensor cores out"),
)  # fmt: skip
