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


ORDERS = (
    ("one_tile", 1, True, 1),
    ("one_tile", 2, False, 2),
    ("static", 1, True, 2),
    ("static", 2, False, 1),
    ("dynamic", 1, False, 1),
    ("dynamic", 2, True, 1),
)
"""scheduler, q_slots, tma_store and cluster: each two values that go together."""


def ways() -> Iterator[tuple[int, bool, WgmmaConfig]]:
    """Head_dim, mask and config for a GPU: orders of tiles, what D=256 adds, other head_dims, three warpgroups."""
    shapes = {
        (64, True): WgmmaConfig(tile_m=192, tile_n=128, stages=8, pingpong=True, lazy_max=True),
        (128, False): WgmmaConfig(tile_m=128, tile_n=128, stages=5, pingpong=True, lazy_max=True),
        (256, True): WgmmaConfig(tile_m=128, tile_n=64, stages=5, lazy_max=True),
    }
    for (head_dim, causal), config in shapes.items():
        for scheduler, q_slots, tma_store, cluster in ORDERS:
            stages = 3 if head_dim == 256 and q_slots == 2 else config.stages
            tile_n = 96 if head_dim == 64 and not tma_store else config.tile_n
            changes = {"scheduler": scheduler, "q_slots": q_slots, "tma_store": tma_store, "cluster": cluster}
            yield head_dim, causal, replace(config, tile_n=tile_n, stages=stages, **changes)
    yield 64, True, replace(shapes[64, True], q_slots=3)
    kept = WgmmaConfig(tile_m=128, tile_n=64, stages=3, scheduler="static", q_in_registers=True, lazy_max=True)
    for causal, cluster in itertools.product((False, True), (1, 2)):
        yield 256, causal, replace(kept, cluster=cluster, tma_store=causal == (cluster == 2))
    plain = WgmmaConfig(tile_m=128, tile_n=48, stages=3)
    paired = replace(plain, scheduler="one_tile", cluster=2, lazy_max=True, pingpong=True)
    for turn, head_dim in enumerate((40, 96, 192)):
        for causal in (False, True):
            yield head_dim, causal, paired if causal == (turn % 2 == 0) else plain
    three = WgmmaConfig(tile_m=192, tile_n=64, stages=5, pingpong=True, lazy_max=True)
    for turn, head_dim in enumerate((96, 128, 160)):
        yield head_dim, turn % 2 == 0, three
        yield head_dim, turn % 2 == 1, replace(three, scheduler="static", cluster=2, tma_store=head_dim == 160)
