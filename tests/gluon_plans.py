"""Ways to run Triton's Gluon kernel that no rule need have: what a sweep may choose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from multiattn.plan.schedule import SCHEDULERS
from multiattn.triton.gluon_configs import GluonConfig

CONFIGS = {
    64: GluonConfig(tile_m=192, tile_n=128, stages=6, q_slots=2, pingpong=True, lazy_max=True),
    128: GluonConfig(tile_m=192, tile_n=64, stages=5, q_slots=2, lazy_max=True),
    256: GluonConfig(tile_m=128, tile_n=64, stages=5, lazy_max=True),
}


def gluon_ways() -> Iterator[tuple[int, bool, GluonConfig]]:
    """Head_dim, mask and config: schedulers, slots, turns, maxima, every number of pieces."""
    for causal, (head_dim, config) in itertools.product((False, True), CONFIGS.items()):
        for scheduler in SCHEDULERS:
            yield head_dim, causal, replace(config, scheduler=scheduler)
        yield head_dim, causal, replace(config, lazy_max=False)
        yield head_dim, causal, replace(config, pingpong=not config.pingpong)
    yield 64, True, GluonConfig(tile_m=192, tile_n=64, stages=12, q_slots=2, lazy_max=True)
    for q_slots in (1, 3):
        yield 64, True, replace(CONFIGS[64], q_slots=q_slots)
    for head_dim, causal in itertools.product((8, 40, 72, 96, 136, 160, 192), (False, True)):
        yield head_dim, causal, GluonConfig(tile_m=128, tile_n=64, stages=4, lazy_max=True)
