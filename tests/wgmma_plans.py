"""Problems and Plans of the Hopper forward that its tests share."""

from __future__ import annotations

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
