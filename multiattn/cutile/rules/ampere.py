"""Ampere and Ada (sm80 to sm89), and Blackwell of desktops (sm120, sm121), whose products are mma.sync's, too.

Tiles and compiler hints of both directions. All but sm80 have 99 KiB of shared memory a block.
"""

from __future__ import annotations

from dataclasses import replace

from multiattn.cutile.rules.shorthand import forward, one_pass, queries, rule, two_passes
from multiattn.plan.config import COMPILED

_ADA, _DESKTOP = ("sm86", "sm89"), ("sm120", "sm121")
_ARCHES = ("sm80", *_ADA, *_DESKTOP)

FORWARD = (
    rule(_ADA, (65, 128), None, forward(64, 32, blocks_per_sm=2, k_latency=4, v_latency=6),
         why=COMPILED + "no spills in its loops, at latencies of 2 and 4 up to 12"),
    rule(_ARCHES, (1, 128), None, forward(64, 64, blocks_per_sm=2),
         why=COMPILED + "NVIDIA's own cuTile examples take 64x64 at occupancy 2 on sm120"),
    rule(("sm80", *_ADA), (161, 192), None, forward(128, 32, warps=8, split_head_dim=True), head_dim_v_max=128,
         why=COMPILED + "192/128: no spills; 64x32 has none either, and reads keys twice as often"),
    rule(_DESKTOP, (161, 192), None, forward(64, 32, split_head_dim=True), head_dim_v_max=128,
         why=COMPILED + "192/128: no spills and a sixth fewer products than one tile of 128x16; 128x32 has 19"),
    rule(_ADA, (129, 256), True, forward(64, 32, warps=8),
         why=COMPILED + "no spills; with 4 warps 205 in its loops, 64x16 39"),
    rule(_DESKTOP, (129, 256), True, forward(128, 16, warps=8),
         why=COMPILED + "no spills in its loops; 64x32 108, with 8 warps 26"),
    rule(_ARCHES, (129, 256), None, forward(64, 32),
         why=COMPILED + "fits 99 KiB; 8 warps spill more in its loops, and so do 64x16 and 128x16"),
)  # fmt: skip

_KEYS, _QUERIES = one_pass(64, 32, warps=8, latency=1), queries(64, 32, warps=8, latency=1)
"""For 99 KiB a block at D=128, with 8 warps to share the accumulators."""
_ONE_PASS = replace(_KEYS, tile_m=32)

TWO_PASS = (
    rule(_ARCHES, (1, 128), None, two_passes(_KEYS, _QUERIES),
         why=COMPILED + "of the tiles that do not spill at D=128 the largest; 32x64 and 64x64 do"),
    rule(("sm80",), (129, 256), None, two_passes(_ONE_PASS, replace(_QUERIES, tile_m=32)),
         why=COMPILED + "38 spills in its loops with the mask, 64x16 81; 16 queries leave the tensor cores out"),
    rule(_ARCHES[1:], (129, 256), None, two_passes(replace(_KEYS, tile_n=16), replace(_QUERIES, tile_m=32)),
         why=COMPILED + "fits 99 KiB and spills least; 16 queries a block leave the tensor cores out"),
)  # fmt: skip

ATOMIC = (
    rule(_ARCHES, (1, 128), None, _ONE_PASS, only_named=True,
         why=COMPILED + "of the tiles that do not spill at D=128 the largest; 64x32 and 16x32 do"),
    rule(_ARCHES, (129, 256), None, _ONE_PASS, only_named=True,
         why=COMPILED + "fits 99 KiB; 32x16 and 16x32 leave the tensor cores out"),
)  # fmt: skip
