"""The forward for Hopper: its configs and rules, its parameters, how it is launched; all without a GPU."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import pytest
import torch
from cuda_runs import on_cpu, run_gxx
from wgmma_plans import CONFIG, SM90, plan_of, problem_of

from bench.matrix import SUITES
from bench.record import example_score
from multiattn import explain
from multiattn.cuda import BACKEND
from multiattn.cuda.axes import SPLIT_Q
from multiattn.cuda.forward_mma import CudaConfig
from multiattn.cuda.forward_wgmma import SHAPES
from multiattn.cuda.instances import kernels_of, launches_of
from multiattn.cuda.params import params_of
from multiattn.cuda.rules.hopper import WGMMA_RULES
from multiattn.cuda.source import BackwardParams, ForwardParams, WgmmaParams
from multiattn.cuda.variants import SPANNING, WGMMA, candidates
from multiattn.cuda.wgmma import tensor_maps
from multiattn.plan.arch import CPU
from multiattn.plan.backend import find_variant, make_plan, plan_variant
from multiattn.problem import Problem

# ---------------------------------------------------------------- configs


def test_a_config_of_another_kernel_is_a_reason():
    other = CudaConfig(tile_m=64, tile_n=32, warps=4, stages=2)
    assert make_plan(BACKEND, problem_of(), SM90, config=other, probe=False).variant == SPLIT_Q.name
    (reason,) = plan_variant(BACKEND, find_variant(BACKEND, SPLIT_Q.name), problem_of(), SM90, CONFIG)
    assert (reason.got, reason.allowed) == ("WgmmaConfig", "CudaConfig")


def test_registers_are_output_scores_weights_and_kept_q():
    assert CONFIG.registers_at_least(problem_of(128)) == 64 + 32 + 16
    assert replace(CONFIG, tile_n=176).registers_at_least(problem_of(128)) == 64 + 88 + 44
    with_q = replace(CONFIG, q_in_registers=True)
    assert with_q.registers_at_least(problem_of(72)) == 36 + 32 + 16 + 20
    assert [with_q.kept_steps(problem_of(256, causal=it)) for it in (False, True)] == [5, 4]
    assert with_q.registers_at_least(problem_of(256)) == 128 + 32 + 16 + 20
    assert CONFIG.kept_steps(problem_of(72)) == 0
    three = replace(CONFIG, tile_m=192, tma_store=False)
    assert [three.registers_at_least(problem_of(144, causal=it)) for it in (False, True)] == [120, 140]


def test_the_suites_that_are_swept_have_a_head_dim_of_each_class():
    head_dims = {cell.head_dim for cell in (*SUITES["standard"], *SUITES["between"])}
    assert [min(widest for widest in SHAPES if it <= widest) for it in sorted(head_dims)] == list(SHAPES)


# ---------------------------------------------------------------- choice


def test_hopper_gets_it_with_a_rule_that_fits_and_no_other_arch():
    for head_dim, causal in itertools.product(range(8, 257, 8), (False, True)):
        plan = explain(problem_of(head_dim, causal=causal), backend="cuda", arch="sm90")
        assert plan.variant == WGMMA.name
        assert plan.workspace_bytes == (16 if plan.config.scheduler == "dynamic" else 0)
    for arch in ("sm80", "sm89", "sm100", "sm120"):
        assert explain(problem_of(), backend="cuda", arch=arch).variant == SPLIT_Q.name
    assert set(SPANNING) >= {WGMMA.name}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"alignment": 8}, "alignment: got 8 bytes; allowed base addresses and strides that are multiples of 16 bytes"),
        ({"strides_k": (2**40, 64, 64)}, f"strides: got k with a stride of {2**41} bytes; allowed multiples of 16"),
    ],
    ids=["unaligned", "a long stride"],
)
def test_what_tma_cannot_walk_is_refused_with_the_variant_that_can(changed, told):
    problem = replace(problem_of(), **changed)
    (reason,) = explain(problem, backend="cuda", variant=WGMMA.name, arch="sm90")
    assert told in str(reason)
    assert explain(problem, backend="cuda", arch="sm90").variant == SPLIT_Q.name


@pytest.mark.parametrize("reads_keys", [False, True], ids=["alibi", "bias"])
def test_modified_scores_have_rules_of_their_own_with_exact_maxima(reads_keys):
    """An expression may hide all that a block has, and takes registers that wide tiles have not left."""
    for head_dim, causal in itertools.product(range(8, 257, 8), (False, True)):
        problem = replace(problem_of(head_dim, causal=causal), score=example_score(reads_keys=reads_keys))
        plan = explain(problem, backend="cuda", arch="sm90")
        assert (plan.variant, plan.config.lazy_max) == (WGMMA.name, False)
        assert not reads_keys or plan.config.tile_n <= 64
        (reason,) = replace(plan.config, lazy_max=True).why_not(problem, SM90)
        assert (reason.got, reason.allowed) == ("lazy_max with an expression for scores", "exact maxima")
        assert not any(it.lazy_max for it in candidates(WGMMA, problem, SM90))


def test_on_a_cpu_it_must_be_named():
    plan = make_plan(BACKEND, problem_of(), CPU, probe=False)
    assert plan.variant == SPLIT_Q.name
    assert any("for callers that name the variant (emulated" in line for line in plan.rejected)
    assert make_plan(BACKEND, problem_of(), CPU, variant=WGMMA.name, probe=False).config == WGMMA_RULES[-1].config


# ---------------------------------------------------------------- kernels and parameters


def test_a_persistent_grid_is_as_large_as_the_device_and_of_whole_clusters():
    """Three tiles of queries are two clusters a head, of which the last has a block with nothing to do."""
    (launch,) = launches_of(plan_of(problem_of()))
    assert [launch.grid(it) for it in (4, 132)] == [4, 3 * 2 * 4]
    (launch,) = launches_of(plan_of(problem_of(), replace(CONFIG, scheduler="one_tile")))
    assert launch.grid(4) == 3 * 2 * 4
    plan = plan_of(problem_of(), replace(CONFIG, scheduler="static", cluster=2))
    (launch,) = launches_of(plan)
    assert [launch.grid(it) for it in (5, 132)] == [4, 4 * 2 * 4]
    assert (params_of(kernels_of(plan)[-1], plan).forward.tiles, launch.kernel.cluster) == (4, 2)
    maps = tensor_maps(plan.problem, plan.config.box_rows(plan.problem))
    assert [it.box.extents[2] for it in maps.values()] == [128, 32, 32, 64]


@on_cpu
@pytest.mark.parametrize("kind", [ForwardParams, BackwardParams, WgmmaParams], ids=lambda kind: kind.__name__)
def test_parameters_lie_where_the_compiler_puts_them(kind):
    """Python reads their names and types from the header; how they are laid out it must know itself."""
    own = f"multiattn::{kind.__name__}"
    checks = [f"sizeof({own}) == {ctypes.sizeof(kind)}"]
    fields = [name for name, *_ in kind._fields_ if name != "_padding"]
    checks += [f"offsetof({own}, {name}) == {getattr(kind, name).offset}" for name in fields]
    source = '#include <cstddef>\n#include "multiattn/params.h"\n'
    source += "".join(f'static_assert({check}, "");\n' for check in checks)
    done = run_gxx(source, "-fsyntax-only")
    assert done.returncode == 0, done.stderr


def test_tensor_maps_are_those_of_the_tensors():
    q = torch.zeros(2, 300, 4, 72, dtype=torch.float16).transpose(1, 2)
    k = torch.zeros(2, 1, 500, 72, dtype=torch.float16).expand(2, 2, 500, 72)
    v = torch.zeros(2, 500, 2, 72, dtype=torch.float16).transpose(1, 2)
    problem = Problem.of(q, k, v)
    maps = tensor_maps(problem, replace(CONFIG, tile_n=80).box_rows(problem))
    assert list(maps) == ["q", "k", "v", "out"]
    assert (maps["q"].shape, maps["q"].strides) == ((2, 4, 300, 72), (300 * 4 * 144, 144, 4 * 144))
    assert (maps["k"].shape, maps["k"].strides) == ((2, 2, 500, 72), (500 * 144, 0, 144))
    assert (maps["v"].shape, maps["v"].strides) == ((2, 2, 500, 72), (500 * 288, 144, 288))
    assert [it.box.extents for it in maps.values()] == [(1, 1, rows, 64) for rows in (128, 80, 80, 64)]
    assert {(it.box.swizzle, it.box.dtype, it.l2_promotion) for it in maps.values()} == {(3, 6, 3)}
    assert list(tensor_maps(problem_of(), replace(CONFIG, tma_store=False).box_rows(problem_of()))) == ["q", "k", "v"]
