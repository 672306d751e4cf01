"""Ways to run Triton's Gluon kernels that no rule need have, and plans of those of a backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from multiattn import Problem
from multiattn.mask import FULL, Band
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import Plan, Variant, plan_variant
from multiattn.plan.schedule import SCHEDULERS
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import problem_of
from multiattn.triton import BACKEND
from multiattn.triton.gluon_forward import GluonConfig

CONFIGS = {
    64: GluonConfig(tile_m=192, tile_n=128, stages=6, q_slots=2, pingpong=True, lazy_max=True),
    128: GluonConfig(tile_m=192, tile_n=64, stages=5, q_slots=2, lazy_max=True),
    256: GluonConfig(tile_m=128, tile_n=64, stages=5, lazy_max=True),
}


def gluon_ways() -> Iterator[tuple[int, bool, GluonConfig]]:
    """Head_dim, mask in turn, and config: schedulers, slots, turns, maxima, every number of pieces."""
    found = [
        (head_dim, config)
        for head_dim, own in CONFIGS.items()
        for config in (
            *(replace(own, scheduler=scheduler) for scheduler in SCHEDULERS),
            replace(own, lazy_max=False),
            replace(own, pingpong=not own.pingpong),
        )
    ]
    found.append((64, GluonConfig(tile_m=192, tile_n=64, stages=12, q_slots=2, lazy_max=True)))
    found += ((64, replace(CONFIGS[64], q_slots=q_slots)) for q_slots in (1, 3))
    few = GluonConfig(tile_m=128, tile_n=64, stages=4, lazy_max=True)
    found += ((head_dim, few) for head_dim in (8, 40, 72, 96, 136, 160, 192))
    for turn, (head_dim, config) in enumerate(found):
        yield head_dim, turn % 2 == 0, config


# ---------------------------------------------------------------- plans

SM90 = by_name("sm90")
WINDOW = Band(300, 5)
needs_compiler = pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))
needs_machine_code = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump reads machine code")


def problem(head_dim: int = 128, **options: Any) -> Problem:
    """Heads that share keys, and a last tile that is not full, of queries and of keys."""
    sizes = {"batch": 2, "heads_q": 8, "heads_kv": 2, "seq_q": 1000, "head_dim": head_dim, **options}
    return Problem.contiguous(**sizes)


HEADS, LENGTH = 8, 256


def scored(head_dim: int = 128, band: Band = FULL, **modifications: Any) -> Problem:
    """A problem with an expression."""
    q = torch.empty(1, HEADS, LENGTH, head_dim, dtype=torch.bfloat16)
    given = {"softcap": None, "alibi_slopes": None, "bias": None, "score_mod": None, **modifications}
    return replace(problem_of(*with_score(Operands(q, q, q), Options(), *given.values())), band=band)


def backward_plan(variant: Variant, head_dim: int = 128, **options: Any) -> Plan:
    """The plan of a variant for `problem`, by its rule."""
    found = plan_variant(BACKEND, variant, problem(head_dim, **options), SM90, direction="backward")
    assert isinstance(found, Plan), found
    return found
