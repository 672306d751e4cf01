"""Problems and plans of Triton's Gluon kernels that their tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from multiattn import Problem
from multiattn.mask import FULL, Band
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import Plan, Variant, plan_variant
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import problem_of
from multiattn.triton import BACKEND

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
