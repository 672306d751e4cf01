"""Blackwell of data centers (sm100, sm103), with tcgen05: tiles and compiler hints of both directions."""

from __future__ import annotations

from multiattn.cutile.backward import OnePassConfig, TwoPassConfig
from multiattn.cutile.forward import CutileConfig
from multiattn.plan.config import COMPILED, Rule

_ARCHES = ("sm100", "sm103")

FORWARD: tuple[Rule[CutileConfig], ...] = (
    Rule(arches=_ARCHES, head_dim_max=128, banded=True, config=CutileConfig(tile_m=128, tile_n=64, occupancy=2),
         why=COMPILED + "no spills in its loops; 128x128 spills once there at D=128"),
    Rule(arches=_ARCHES, head_dim_max=128, banded=False, seq_min=4096, config=CutileConfig(tile_m=256, tile_n=128),
         why=COMPILED + "no spills; NVIDIA's own cuTile examples take it; it reads k and v half as often as 128x128"),
    Rule(arches=_ARCHES, head_dim_max=128, banded=False, config=CutileConfig(tile_m=128, tile_n=128, occupancy=2),
         why=COMPILED + "no spills in its loops; the other tile of NVIDIA's examples, in twice as many blocks"),
    Rule(arches=_ARCHES, head_dim_min=129, config=CutileConfig(tile_m=128, tile_n=128),
         why=COMPILED + "the accumulator of one tile fills half of tensor memory"),
)  # fmt: skip

_WARPGROUPS = COMPILED + "two warpgroups share the accumulators, as on sm90"
_AS_HOPPER = COMPILED + "the tiles of sm90"

TWO_PASS: tuple[Rule[TwoPassConfig], ...] = (
    Rule(arches=_ARCHES, head_dim_max=128, why=_WARPGROUPS,
         config=TwoPassConfig(tile_m=64, tile_n=128, num_worker_warps=8, dq_tile_m=128, dq_num_worker_warps=8)),
    Rule(arches=_ARCHES, head_dim_min=129, why=_AS_HOPPER,
         config=TwoPassConfig(tile_m=64, tile_n=64, num_worker_warps=8, dq_num_worker_warps=8)),
)  # fmt: skip

ATOMIC: tuple[Rule[OnePassConfig], ...] = (
    Rule(arches=_ARCHES, head_dim_max=128, why=_WARPGROUPS, only_named=True,
         config=OnePassConfig(tile_m=64, tile_n=128, num_worker_warps=8)),
    Rule(arches=_ARCHES, head_dim_min=129, why=_AS_HOPPER, only_named=True,
         config=OnePassConfig(tile_m=64, tile_n=64, num_worker_warps=8)),
)  # fmt: skip
