"""Problems and Plans of the Hopper forward that its tests share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from multiattn.cuda import BACKEND
from multiattn.cuda.forward_wgmma import WgmmaConfig
from multiattn.cuda.variants import WGMMA
from multiattn.plan.arch import ARCHS, Arch
from multiattn.plan.backend import Plan, make_plan
from multiattn.plan.schedule import SCHEDULERS
from multiattn.problem import Problem

SM90 = ARCHS["sm90"]
CONFIG = WgmmaConfig(tile_m=128, tile_n=64)
FLIPPED = {
    **{"tile_m": 192, "cluster": 2, "tile_n": 80, "stages": 3, "scheduler": "static", "q_slots": 2},
    **{"q_in_registers": True, "pingpong": True, "lazy_max": True, "tma_store": False},
}


def problem_of(head_dim: int = 64, **sizes: Any) -> Problem:
    """Two sequences of four heads, two of keys; full, bf16, unless told otherwise."""
    given = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, **sizes}
    return Problem.contiguous(head_dim=head_dim, **given)


def plan_of(problem: Problem, config: WgmmaConfig = CONFIG, arch: Arch = SM90) -> Plan:
    """A Plan of the variant, with `config`."""
    return make_plan(BACKEND, problem, arch, variant=WGMMA.name, config=config, probe=False)


def ways() -> Iterator[tuple[int, bool, WgmmaConfig]]:
    """Head_dim, mask and config for a GPU: schedulers, slots, stores, clusters, what D=256 adds, three warpgroups."""
    shapes = {
        (64, True): WgmmaConfig(tile_m=192, tile_n=128, stages=8, pingpong=True, lazy_max=True),
        (128, False): WgmmaConfig(tile_m=128, tile_n=128, stages=5, pingpong=True, lazy_max=True),
        (256, True): WgmmaConfig(tile_m=128, tile_n=64, stages=5, lazy_max=True),
    }
    for (head_dim, causal), config in shapes.items():
        slots = (1, 2, 3) if head_dim == 64 else (1, 2)
        for scheduler, q_slots, tma_store, cluster in itertools.product(SCHEDULERS, slots, (True, False), (1, 2)):
            if cluster == 1 or scheduler != "dynamic":
                stages = 3 if head_dim == 256 and q_slots == 2 else config.stages
                tile_n = 96 if head_dim == 64 and not tma_store else config.tile_n
                changes = {"scheduler": scheduler, "q_slots": q_slots, "tma_store": tma_store, "cluster": cluster}
                yield head_dim, causal, replace(config, tile_n=tile_n, stages=stages, **changes)
    for causal, cluster, tma_store in itertools.product((False, True), (1, 2), (True, False)):
        config = WgmmaConfig(tile_m=128, tile_n=64, stages=3, scheduler="static", q_in_registers=True, lazy_max=True)
        yield 256, causal, replace(config, cluster=cluster, tma_store=tma_store)
    for head_dim, causal in itertools.product((40, 96, 192), (False, True)):
        config = WgmmaConfig(tile_m=128, tile_n=48, stages=3, q_slots=1)
        yield head_dim, causal, config
        yield head_dim, causal, replace(config, scheduler="one_tile", cluster=2, lazy_max=True, pingpong=True)
    for head_dim, causal in itertools.product((96, 128, 160), (False, True)):
        config = WgmmaConfig(tile_m=192, tile_n=64, stages=5, pingpong=True, lazy_max=True)
        yield head_dim, causal, config
        yield head_dim, causal, replace(config, scheduler="static", cluster=2, tma_store=head_dim == 160)
