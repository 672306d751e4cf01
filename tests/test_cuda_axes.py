"""The ladder of the CUDA forward: every point of its axes is a kernel that computes attention, or says why not."""

import itertools
import subprocess
from dataclasses import asdict, replace

import pytest
import torch
from cuda_runs import check_refused, on_cpu, run_forward, run_gxx

from multiattn import explain, fmha
from multiattn.cuda import BACKEND
from multiattn.cuda.axes import ACCUMULATOR, POINTS, SHARE, SPLIT_Q, TILED, TILING, WARPS, Axes
from multiattn.cuda.forward_mma import CudaConfig
from multiattn.cuda.naming import features_of, traits_type
from multiattn.cuda.variants import SPANNING, VARIANTS
from multiattn.plan.arch import ARCHS, CPU, GPU_ARCHS
from multiattn.plan.backend import Plan, find_variant, ladder, make_plan, plan_variant
from multiattn.plan.support import Unsupported
from multiattn.problem import Problem

COMBINATIONS = tuple(
    Axes(warps=warps, share=share, tiling=tiling, accumulator=accumulator)
    for warps, share, tiling, accumulator in itertools.product(WARPS, SHARE, TILING, ACCUMULATOR)
)
"""The combinations of warps, share, tiling and sums, legal or not: swizzles go with all."""


# ---------------------------------------------------------------- the axes as data


NO_POINTS = [variant for variant in VARIANTS if not variant.flags]
"""Hopper's kernel, and those that divide keys: on no ladder, and each the best of something."""


def test_every_point_is_a_variant_and_only_the_best_are_offered():
    assert len(POINTS) == len(set(POINTS)) == 43
    assert {replace(axes, swizzle="") for axes in POINTS} < {axes for axes in COMBINATIONS if axes.is_legal}
    rungs = [variant for variant in VARIANTS if variant.flags]
    assert {variant.name for variant in rungs} == {axes.name for axes in POINTS}
    assert [variant.name for variant in rungs if not variant.only_named] == [SPLIT_Q.name, TILED.name]
    assert not any(variant.only_named or variant.parent for variant in NO_POINTS)
    assert find_variant(BACKEND, "split_q+share_kv+swizzle_qkv").flags == (
        ("warps", "split_q"), ("share", "kv"), ("tiling", "none"), ("swizzle", "qkv"), ("accumulator", "fp32")
    )  # fmt: skip


def test_a_rung_differs_from_its_parent_in_one_axis():
    for axes in POINTS:
        *_, variant = rungs = ladder(BACKEND, axes.name)
        assert (variant.name, rungs[0].name) == (axes.name, "split_kv")
        for below, above in itertools.pairwise(rungs):
            assert sum(one != other for one, other in zip(below.flags, above.flags, strict=True)) == 1


def test_the_spanning_points_hold_every_legal_loop():
    chosen = [axes for axes in POINTS if axes.name in SPANNING]
    assert {variant.name for variant in NO_POINTS} <= set(SPANNING)
    assert len(chosen) == len(set(SPANNING)) - len(NO_POINTS) == len(SPANNING) - len(NO_POINTS)
    for one, other in itertools.combinations(("warps", "share", "tiling"), 2):
        pairs = {(getattr(axes, one), getattr(axes, other)) for axes in POINTS}
        assert pairs == {(getattr(axes, one), getattr(axes, other)) for axes in chosen}


@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_every_point_has_a_config_for_every_head_dim_or_says_what_is_missing(arch):
    for axes, head_dim in itertools.product(POINTS, (8, 64, 72, 128, 256, 264, 512, 1024)):
        sizes = {"batch": 1, "heads_q": 1, "seq_q": 64, "head_dim": head_dim, "causal": axes.swizzle == "qkv"}
        problem = Problem.contiguous(**sizes, dtype="fp16")
        plan = plan_variant(BACKEND, find_variant(BACKEND, axes.name), problem, ARCHS[arch])
        if head_dim > axes.head_dim_max:
            assert {reason.code for reason in plan} == {"head_dim"}
        elif axes.tiling == "qk" and head_dim > 512 and ARCHS[arch].smem_per_block < 128 << 10:
            assert {reason.code for reason in plan} == {"config"}  # V whole is 128 KiB at D=1024
        else:
            assert isinstance(plan, Plan), (axes.name, head_dim, plan)


def test_wide_heads_run_without_naming_a_variant():
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=100, head_dim=512)
    assert explain(problem, backend="cuda", arch="sm80").variant == TILED.name
    wider = replace(problem, head_dim=584, head_dim_v=584)
    assert explain(wider, backend="cuda", arch="sm90").variant == TILED.name  # than Hopper's own take
    assert make_plan(BACKEND, problem, CPU, direction="backward").variant == "atomic"
    with pytest.raises(Unsupported, match=r"head_dim: got 520; allowed multiples of 8 up to 512"):
        make_plan(BACKEND, replace(problem, head_dim=520, head_dim_v=520), CPU, direction="backward")
    q = torch.randn(1, 1, 16, 1024).to(torch.bfloat16)
    with pytest.raises(Unsupported, match=r"triton cannot run[^$]*Can run it: cuda \(variant split_kv"):
        fmha(q, q, q, backend="triton")


def test_sums_in_fp16_are_for_fp16_and_heads_that_hold_their_budget():
    for dtype, head_dim, code in (("bf16", 64, "dtype"), ("fp16", 520, "head_dim"), ("fp16", 512, None)):
        problem = Problem.contiguous(batch=1, heads_q=2, seq_q=100, head_dim=head_dim, dtype=dtype)
        plan = plan_variant(BACKEND, find_variant(BACKEND, f"{TILED}+acc_fp16"), problem, CPU)
        assert isinstance(plan, Plan) if code is None else [reason.code for reason in plan] == [code]


def test_a_name_that_no_point_has_is_told_what_is_near():
    with pytest.raises(
        ValueError, match=r"got 'split_q\+share_vk'; cuda has .*wgmma_twin, split_q\+swizzle_qkv, .* and \d+ more"
    ):
        find_variant(BACKEND, "split_q+share_vk")


# ---------------------------------------------------------------- legality, twice


def shape(tile_m, tile_n, warps, columns, stages, place="shared", dim_slice=64, key_slice=16):
    return CudaConfig(
        tile_m=tile_m, tile_n=tile_n, warps=warps, column_warps=columns, stages=stages, dim_slice=dim_slice,
        key_slice=key_slice, q_in_registers=place == "registers", q_streamed=place == "streamed",
    )  # fmt: skip


CONFIGS = (
    *(
        shape(tile_m, tile_n, 4, columns, stages, place, dim_slice, key_slice)
        for tile_m, tile_n, columns in ((64, 32, 1), (32, 32, 2), (48, 64, 1), (64, 48, 2), (16, 64, 4))
        for place in ("registers", "shared", "streamed")
        for stages, dim_slice, key_slice in ((1, 64, 16), (4, 64, 16), (1, 96, 16), (4, 128, 24))
    ),
    CudaConfig(tile_m=96, tile_n=32, warps=6, stages=2),
    CudaConfig(tile_m=64, tile_n=32, warps=4, stages=5),
)


@on_cpu
def test_python_and_static_asserts_agree_on_every_point_and_config(tmp_path):
    """Swizzles aside, which go with everything, in both. Sums in fp16 matter to D alone."""
    asked = [
        (axes, config, problem)
        for axes in COMBINATIONS
        for config in (CONFIGS if axes.accumulator == "fp32" else CONFIGS[:12])
        for problem in (("fp16", 64), ("bf16", 136), ("fp16", 520))
    ]
    lines = []
    for axes, config, (dtype, head_dim) in asked:
        problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim, dtype=dtype)
        lines.append(traits_of(axes, config, problem, template="Legality") + "::ALL")
    source = '#include "forward_traits.cuh"\n#include <cstdio>\nconst bool legal[] = {' + ",\n".join(lines) + "};\n"
    source += "int main() { for (bool it : legal) std::putchar(it ? '1' : '0'); }\n"
    program = tmp_path / "legality"
    run_gxx(source, "-o", str(program)).check_returncode()
    told = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert len(told) == len(asked)
    assert 0 < told.count("1") < len(asked)
    wrong = [
        (axes.name, str(config), dtype, head_dim)
        for (axes, config, (dtype, head_dim)), legal in zip(asked, told, strict=True)
        if (legal == "1") != _is_legal(axes, config, dtype, head_dim)
    ]
    assert not wrong, f"{len(wrong)} of {len(asked)}: {wrong[:5]}"


def traits_of(axes: Axes, config: CudaConfig, problem: Problem, template: str = "ForwardTraits") -> str:
    return traits_type(template, problem, features_of(problem, "forward"), *config.constants(axes))


def _is_refused(axes: Axes, config: CudaConfig, problem: Problem) -> bool:
    return bool(config.why_not(problem, CPU, asdict(axes))) or problem.dtype not in axes.dtypes


def _is_legal(axes: Axes, config: CudaConfig, dtype: str, head_dim: int) -> bool:
    """By the Python rules; registers and shared memory, which `ForwardTraits` counts itself, aside."""
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim, dtype=dtype)
    reasons = config.why_not(problem, CPU, asdict(axes))
    counted = [reason for reason in reasons if "registers for scores" in reason.got]
    return head_dim <= axes.head_dim_max and dtype in axes.dtypes and len(reasons) == len(counted)


@on_cpu
def test_a_kernel_of_an_illegal_point_does_not_compile():
    """Each rule of `Legality` is asserted, and what a thread's registers hold."""
    config = CudaConfig(tile_m=64, tile_n=32, warps=4, stages=2)
    cases = {
        "share_qkv: Q is whole": (replace(SPLIT_Q, share="qkv", tiling="qk"), config),
        "fp16 accumulators take fp16 elements": (replace(SPLIT_Q, accumulator="fp16"), config),
        "stages: 1 to 4": (SPLIT_Q, replace(config, stages=5)),
        "column_warps: 1 with split_q": (SPLIT_Q, replace(config, column_warps=2)),
        "q: registers with share_qkv": (SPLIT_Q, replace(config, q_streamed=True)),
        "tile_n: 16 keys a warp": (SPLIT_Q, replace(config, tile_n=24)),
        "a thread's registers for": (SPLIT_Q, replace(config, tile_m=256, tile_n=128)),
    }
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=256, dtype="bf16")
    assert all(_is_refused(axes, it, problem) for axes, it in cases.values())
    check_refused("forward_traits.cuh", {told: traits_of(*it, problem) for told, it in cases.items()})


# ---------------------------------------------------------------- points, run

IN_HALVES = tuple(f"{name}+acc_fp16" for name in (SPLIT_Q, TILED, "split_q+share_qkv+swizzle_qkv"))
PARITYS = {*SPANNING, *(variant.name for variant in VARIANTS if not variant.only_named)}
"""Its suite runs these on every case."""


def plant(q, k, v):
    """Spoil one key, which few rows see."""
    v[:, :, v.shape[2] // 2] = torch.nan
    v[:, :, v.shape[2] // 3, 5] = torch.inf


PROBLEMS = (
    {"head_dim": 40, "seq_q": 113, "seq_kv": 70, "causal": True, "scale": -0.2},  # rows that see nothing
    {"head_dim": 136, "scale": 0.0},
    {"head_dim": 72, "causal": True, "change": plant},
)


@on_cpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda it: f"D={it['head_dim']}")
@pytest.mark.parametrize("name", IN_HALVES)
def test_a_point_that_sums_in_fp16_computes_attention(name, problem):
    """The others are parity's."""
    run_forward(variant=name, **problem)


@on_cpu
@pytest.mark.nightly
@pytest.mark.parametrize("axes", [axes for axes in POINTS if axes.name not in {*PARITYS, *IN_HALVES}], ids=str)
def test_every_point_computes_attention(axes):
    for problem in PROBLEMS:
        run_forward(variant=axes.name, **problem)


@on_cpu
@pytest.mark.nightly
@pytest.mark.parametrize("head_dim", [264, 328, 512, 520, 768, 1000, 1024])
@pytest.mark.parametrize(
    "axes", [axes for axes in POINTS if axes.head_dim_max > 256 and axes.swizzle == "qkv"], ids=str
)
def test_every_wide_head(axes, head_dim):
    if head_dim > axes.head_dim_max:
        return
    *_, counts = run_forward(variant=axes.name, head_dim=head_dim, causal=head_dim % 16 == 0, change=plant)
    assert counts.bank_conflicts == 0


@on_cpu
def test_a_tile_that_is_not_swizzled_conflicts():
    names = ("split_q", "split_q+swizzle_q", "split_q+swizzle_qk")
    none, of_q, of_qk = (run_forward(variant=name)[2].bank_conflicts for name in names)
    assert none > of_q > of_qk > 0
