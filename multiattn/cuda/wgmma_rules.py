"""Which config Hopper's forward kernel takes; every rule with its evidence."""

from __future__ import annotations

from dataclasses import replace

from multiattn.config import Rule
from multiattn.cuda.tuned import alive, tuned_rules
from multiattn.cuda.wgmma_configs import WgmmaConfig

_UNSWEPT = "a guess, never swept: "

_GUESSED: tuple[Rule[WgmmaConfig], ...] = (
    Rule(
        arches=("sm90",),
        head_dim_max=64,
        config=WgmmaConfig(tile_m=192, tile_n=128),
        why=_UNSWEPT + "three warpgroups, as at D=64 the softmax, not the tensor cores, is what blocks wait for",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        config=WgmmaConfig(tile_m=128, tile_n=128),
        why=_UNSWEPT + "as many keys as leave registers for scores, weights and output of two warpgroups",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=129,
        head_dim_max=192,
        config=WgmmaConfig(tile_m=128, tile_n=96),
        why=_UNSWEPT + "four stages of 96 keys leave room in shared memory and registers",
    ),
    Rule(
        arches=("sm90",),
        head_dim_min=193,
        config=WgmmaConfig(tile_m=128, tile_n=80),
        why=_UNSWEPT + "four stages of 80 keys are what shared memory has room for beside Q",
    ),
    Rule(
        arches=("cpu",),
        config=WgmmaConfig(tile_m=128, tile_n=32),
        why="emulated: two warpgroups, four stages and small tiles of keys; split_q builds and runs faster",
        only_named=True,
    ),
)

RULES: tuple[Rule[WgmmaConfig], ...] = tuple(
    replace(rule, only_named=True)  # until parity has passed on a GPU with the kernel as it is now
    for rule in alive((*tuned_rules("wgmma", lambda given: WgmmaConfig(**given)), *_GUESSED))
)
"""First match wins: what a sweep has found, then guesses for the rest."""
