"""The configs that Hopper's forward kernel takes; every rule with its evidence."""

from __future__ import annotations

from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.plan.config import Rule
from multiattn.plan.tuned import tuned_rules

_EMULATED = Rule(
    arches=("cpu",),
    config=WgmmaConfig(tile_m=128, tile_n=32),
    why="emulated: two warpgroups, four stages and small tiles of keys; split_q builds and runs faster",
    only_named=True,
)

WGMMA_RULES: tuple[Rule[WgmmaConfig], ...] = (*tuned_rules("cuda", "wgmma", WgmmaConfig), _EMULATED)
"""First match wins."""
