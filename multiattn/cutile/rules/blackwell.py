"""Blackwell of data centers (sm100, sm103), with tcgen05: tiles and compiler hints of both directions."""

from __future__ import annotations

from multiattn.cutile.rules.shorthand import forward, one_pass, queries, rule, two_passes
from multiattn.plan.config import COMPILED

_ARCHES = ("sm100", "sm103")

FORWARD = (
    rule(_ARCHES, (1, 128), True, forward(128, 64, blocks_per_sm=2),
         why=COMPILED + "no spills in its loops; 128x128 spills once there at D=128"),
    rule(_ARCHES, (1, 128), False, forward(256, 128), seq_min=4096,
         why=COMPILED + "no spills; NVIDIA's own cuTile examples take it; it reads k and v half as often as 128x128"),
    rule(_ARCHES, (1, 128), False, forward(128, 128, blocks_per_sm=2),
         why=COMPILED + "no spills in its loops; the other tile of NVIDIA's examples, in twice as many blocks"),
    rule(_ARCHES, (161, 192), None, forward(128, 128, split_head_dim=True), head_dim_v_max=128,
         why=COMPILED + "192/128: a sixth fewer products than of one tile, and no spills in its loops either"),
    rule(_ARCHES, (129, 256), None, forward(128, 128),
         why=COMPILED + "the accumulator of one tile fills half of tensor memory"),
)  # fmt: skip

_WARPGROUPS = COMPILED + "two warpgroups share the accumulators, as on sm90"
_AS_HOPPER = COMPILED + "the tiles of sm90"
_NARROW, _WIDE = one_pass(64, 128, warps=8), one_pass(64, 64, warps=8)

TWO_PASS = (
    rule(_ARCHES, (1, 128), None, two_passes(_NARROW, queries(128, 64, warps=8)), why=_WARPGROUPS),
    rule(_ARCHES, (129, 256), None, two_passes(_WIDE, queries(64, 64, warps=8)), why=_AS_HOPPER),
)
ATOMIC = (
    rule(_ARCHES, (1, 128), None, _NARROW, why=_WARPGROUPS, only_named=True),
    rule(_ARCHES, (129, 256), None, _WIDE, why=_AS_HOPPER, only_named=True),
)
