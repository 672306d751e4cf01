"""cuTile's kernels with sinks: tiles that are done again, and what is launched. Parity has the numbers."""

import math
from dataclasses import replace

import pytest
import torch

import multiattn
from multiattn import Problem, reference
from multiattn.cutile.families import launches_of
from multiattn.cutile.forward import PIPELINES, STEPS, CutileConfig
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan

pytest.importorskip("cuda.tile")

from cutile_checks import grow, make_inputs

from multiattn.cutile.bind import bind

BACKEND = get("cutile")
ONLINE = CutileConfig(tile_m=32, tile_n=32)
LAZY = replace(ONLINE, lazy_max=True)
WAYS = {
    **{name: (name, ONLINE) for name in STEPS},
    **{pipeline: ("full", replace(LAZY, pipeline=pipeline)) for pipeline in PIPELINES},
    "static": ("full", replace(LAZY, scheduler="static", split_head_dim=True)),
}
SINKS = (1.0, -math.inf, 100.0, -3.0)
"""Beside the scores, none, above and below them."""


def check(way, q, k, v, sinks=SINKS, **options):
    variant, config = WAYS[way]
    sinks = torch.tensor(sinks)
    problem = Problem.of(q, k, v, sinks=sinks, **options)
    config = STEPS[variant].step.limit(config)
    plan = make_plan(BACKEND, problem, ARCHS["cpu"], variant=variant, config=config)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:3], math.nan)
    multiattn.launch(plan, q, k, v, out, lse, sinks=sinks)
    truth, truth_lse = reference(q, k, v, sinks=sinks, compute_dtype=torch.float64, **options)
    rounding = torch.finfo(q.dtype).eps * v.abs().max().item()
    torch.testing.assert_close(out.double(), truth, atol=2 * rounding, rtol=0)
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-5, rtol=1e-5)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_that_are_done_again_have_a_sink_once(dtype):
    q, k, v = make_inputs(dtype=dtype, heads_q=4, spread=4.0, head_dim=16)
    check("plain", q, grow(k, start=100, factor=20.0), v, sinks=(300.0, 0.0, -math.inf, 900.0))


def test_a_launch_without_sinks_has_none_and_other_code():
    plans = [make_plan(BACKEND, contiguous(sinks), ARCHS["sm90"], probe=False) for sinks in (False, True)]
    without, given = (launches_of(plan)[0] for plan in plans)
    assert "sinks" not in without.tensors
    assert given.tensors == (*without.tensors, "sinks")
    assert len(given.binding.arguments) == len(without.binding.arguments) + 3  # address, heads, stride
    assert (without.constants.has_sinks, given.constants.has_sinks) == (False, True)
    assert bind(plans[1], emitted=bind(plans[0]).constants).constants != bind(plans[0]).constants


def contiguous(has_sinks):
    return Problem.contiguous(batch=1, heads_q=2, seq_q=256, head_dim=64, causal=True, has_sinks=has_sinks)


@pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())))
def test_what_is_compiled_takes_what_is_bound():
    """`export` holds the Tile IR against the Binding; in 64 bits, too."""
    for batch in (1, 2**17):
        problem = replace(contiguous(True), batch=batch)
        plan = make_plan(BACKEND, problem, ARCHS["sm90"], config=ONLINE, probe=False)
        (launch,) = launches_of(plan)
        assert launch.is_64bit == (batch > 1)
        assert BACKEND.forward.export(plan, ())[0].binding is not None
