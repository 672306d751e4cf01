"""The ladder of the CUDA forward: every point of its axes is a kernel that computes attention, or says why not."""

from __future__ import annotations

import itertools
import subprocess
from dataclasses import replace

import pytest
import torch

from multiattn import explain, fmha
from multiattn.cuda import BACKEND
from multiattn.cuda.axes import SPLIT_Q, WIDE, Axes, cross_product
from multiattn.cuda.configs import CudaConfig, smem_bytes, why_not
from multiattn.cuda.emulation.host import CpuLauncher
from multiattn.cuda.launches import forward_traits
from multiattn.cuda.source import HOST_INCLUDES
from multiattn.cuda.tools import GXX, probe_host
from multiattn.cuda.variants import SPANNING, VARIANTS, WGMMA, is_wgmma
from multiattn.plan.arch import ARCHS, CPU, GPU_ARCHS
from multiattn.plan.backend import Plan, find_variant, ladder, make_plan, plan_variant
from multiattn.plan.support import Unsupported
from multiattn.problem import Operands, Problem
from parity.tolerance import Truth

on_cpu = pytest.mark.skipif(bool(probe_host()), reason="; ".join(map(str, probe_host())))

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
POINTS = tuple(cross_product())
LEGAL = tuple(axes for axes in POINTS if axes.is_legal)


# ---------------------------------------------------------------- the axes as data


def test_every_point_is_a_variant_and_only_the_best_are_offered():
    assert len(POINTS) == len(set(POINTS)) == 288
    rungs = [variant for variant in VARIANTS if not is_wgmma(variant)]
    assert {variant.name for variant in rungs} == {axes.name for axes in POINTS}
    assert [variant.name for variant in rungs if not variant.only_named] == [SPLIT_Q.name, WIDE.name]
    assert find_variant(BACKEND, "split_q+share_kv+swizzle_qk").flags == (
        ("warps", "split_q"), ("share", "kv"), ("tiling", "none"), ("swizzle", "qk"), ("accumulator", "fp32")
    )  # fmt: skip


@pytest.mark.parametrize("axes", POINTS, ids=str)
def test_a_rung_differs_from_its_parent_in_one_axis(axes):
    *_, variant = rungs = ladder(BACKEND, axes.name)
    assert (variant.name, rungs[0].name) == (axes.name, "split_kv")
    for below, above in itertools.pairwise(rungs):
        assert sum(one != other for one, other in zip(below.flags, above.flags, strict=True)) == 1


def test_the_spanning_points_hold_every_value_of_every_axis_and_every_legal_loop():
    chosen = [axes for axes in POINTS if axes.name in SPANNING]
    assert len(chosen) == len(set(SPANNING) - {WGMMA.name}) == len(SPANNING) - 1
    for axis in ("warps", "share", "tiling", "swizzle"):
        assert {getattr(axes, axis) for axes in chosen} == {getattr(axes, axis) for axes in LEGAL}
    for one, other in itertools.combinations(("warps", "share", "tiling"), 2):
        pairs = {(getattr(axes, one), getattr(axes, other)) for axes in LEGAL}
        assert pairs == {(getattr(axes, one), getattr(axes, other)) for axes in chosen}


@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_every_legal_point_has_a_config_for_every_head_dim_or_says_what_is_missing(arch):
    for axes, head_dim in itertools.product(POINTS, (8, 64, 72, 128, 256, 264, 512, 1024)):
        problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim, dtype="fp16")
        plan = plan_variant(BACKEND, find_variant(BACKEND, axes.name), problem, ARCHS[arch])
        if axes not in LEGAL:
            assert {reason.code for reason in plan} == {"variant"}
        elif head_dim > axes.head_dim_max:
            assert {reason.code for reason in plan} == {"head_dim"}
        elif axes.tiling == "qk" and head_dim > 512 and ARCHS[arch].smem_per_block < 128 << 10:
            assert {reason.code for reason in plan} == {"config"}  # V whole is 128 KiB at D=1024
        else:
            assert isinstance(plan, Plan), (axes.name, head_dim, plan)


def test_wide_heads_run_without_naming_a_variant_forward_only():
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=100, head_dim=512)
    assert explain(problem, backend="cuda", arch="sm90").variant == WIDE.name
    with pytest.raises(Unsupported, match="head_dim: got 512; allowed multiples of 8 up to 256"):
        make_plan(BACKEND, problem, CPU, direction="backward")
    q = torch.randn(1, 1, 16, 512).to(torch.bfloat16)
    with pytest.raises(Unsupported, match=r"triton cannot run[^$]*Can run it: cuda \(variant split_kv"):
        fmha(q, q, q, backend="triton")


@pytest.mark.parametrize("head_dim", [64, 512])
def test_an_illegal_point_says_what_does_not_go_together(head_dim):
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=100, head_dim=head_dim, dtype="fp16")
    with pytest.raises(Unsupported) as caught:
        make_plan(BACKEND, problem, CPU, variant="split_q+share_qkv+tiling_qk+acc_fp16")
    assert [(reason.code, reason.got) for reason in caught.value.reasons] == [("variant", "share_qkv with tiling_qk")]


def test_sums_in_fp16_are_for_fp16_and_heads_that_hold_their_budget():
    for dtype, head_dim, code in (("bf16", 64, "dtype"), ("fp16", 520, "head_dim"), ("fp16", 512, None)):
        problem = Problem.contiguous(batch=1, heads_q=2, seq_q=100, head_dim=head_dim, dtype=dtype)
        plan = plan_variant(BACKEND, find_variant(BACKEND, f"{WIDE}+acc_fp16"), problem, CPU)
        assert isinstance(plan, Plan) if code is None else [reason.code for reason in plan] == [code]


def test_a_name_that_no_point_has_is_told_what_is_near():
    with pytest.raises(
        ValueError, match=r"got 'split_q\+share_vk'; cuda has wgmma, split_q\+swizzle_qkv, .* and \d+ more"
    ):
        find_variant(BACKEND, "split_q+share_vk")


# ---------------------------------------------------------------- legality, twice


CONFIGS = (
    *(
        CudaConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            warps=4,
            column_warps=columns,
            stages=stages,
            q_in_registers=place == "registers",
            q_streamed=place == "streamed",
            dim_slice=dim_slice,
            key_slice=key_slice,
        )
        for tile_m, tile_n, columns in ((64, 32, 1), (32, 32, 2), (48, 64, 1), (64, 48, 2), (16, 64, 4))
        for stages in (1, 4)
        for place in ("registers", "shared", "streamed")
        for dim_slice, key_slice in ((64, 16), (96, 16), (128, 24))
    ),
    CudaConfig(tile_m=96, tile_n=32, warps=6, stages=2),
    CudaConfig(tile_m=64, tile_n=32, warps=4, stages=5),
)


@on_cpu
def test_python_and_static_asserts_agree_on_every_point_and_config(tmp_path):
    """The whole cross product, swizzles aside: they go with everything, in both."""
    points = [axes for axes in POINTS if axes.swizzle == ""]
    asked = list(itertools.product(points, CONFIGS, (("fp16", 64), ("bf16", 136), ("fp16", 520))))
    lines = []
    for axes, config, (dtype, head_dim) in asked:
        problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim, dtype=dtype)
        traits = forward_traits(axes, config, problem)
        lines.append(f"multiattn::Legality<{traits.element}, {head_dim}, {traits.axes}, {traits.shape}>::ALL")
    source = '#include "forward_traits.cuh"\n#include <cstdio>\nconst bool legal[] = {' + ",\n".join(lines) + "};\n"
    source += "int main() { for (bool it : legal) std::putchar(it ? '1' : '0'); }\n"
    program = tmp_path / "legality"
    includes = [f"-I{directory}" for directory in HOST_INCLUDES]
    command = [GXX, "-std=c++20", "-O0", *includes, "-x", "c++", "-", "-o", str(program)]
    subprocess.run([*command, "-Wno-unknown-pragmas", "-w"], input=source, text=True, check=True)
    told = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert len(told) == len(asked)
    assert 0 < told.count("1") < len(asked)
    wrong = [
        (axes.name, str(config), dtype, head_dim)
        for (axes, config, (dtype, head_dim)), legal in zip(asked, told, strict=True)
        if (legal == "1") != _is_legal(axes, config, dtype, head_dim)
    ]
    assert not wrong, f"{len(wrong)} of {len(asked)}: {wrong[:5]}"


def _is_legal(axes: Axes, config: CudaConfig, dtype: str, head_dim: int) -> bool:
    """By the Python rules; registers and shared memory, which `ForwardTraits` counts itself, aside."""
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim, dtype=dtype)
    reasons = why_not(axes, problem, CPU, config)
    counted = [reason for reason in reasons if "registers for scores" in reason.got]
    return head_dim <= axes.head_dim_max and dtype in axes.dtypes and len(reasons) == len(counted)


@on_cpu
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"share": "qkv", "tiling": "qk"}, "share_qkv"),
        ({"accumulator": "fp16"}, "fp16 accumulators"),
        ({"stages": 5}, "stages"),
        ({"column_warps": 2}, "column_warps"),
        ({"q_streamed": True}, "q: registers with share_qkv"),
        ({"tile_n": 24}, "tile_n"),
        ({"tile_m": 256, "tile_n": 128, "head_dim": 256}, "a thread's registers"),
    ],
    ids=lambda it: "+".join(it) if isinstance(it, dict) else "",
)
def test_a_kernel_of_an_illegal_point_does_not_compile(changed, message):
    axes = replace(SPLIT_Q, **{name: value for name, value in changed.items() if name in Axes.__slots__})
    config = CudaConfig(tile_m=64, tile_n=32, warps=4, stages=2)
    config = replace(config, **{name: value for name, value in changed.items() if name in CudaConfig.__slots__})
    config = replace(config, **{name: changed[name] for name in ("tile_m", "tile_n") if name in changed})
    head_dim = changed.get("head_dim", 64)
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim, dtype="bf16")
    assert why_not(axes, problem, CPU, config) or problem.dtype not in axes.dtypes
    traits = forward_traits(axes, config, problem)
    source = f'#include "forward_traits.cuh"\ntemplate struct {traits.name};\n'
    includes = [f"-I{directory}" for directory in HOST_INCLUDES]
    command = [GXX, "-std=c++20", "-fsyntax-only", "-w", *includes, "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr


def test_shared_memory_is_what_the_ladder_promises():
    """What each step does to it, in bytes, at D=128 with 64x64 tiles: the formulas of docs/ladder.md."""
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=128)
    tile = 64 * 128 * 2
    config = CudaConfig(tile_m=64, tile_n=64, warps=4, stages=1)
    in_registers = replace(config, q_in_registers=True)
    streamed = replace(config, q_streamed=True, dim_slice=64, key_slice=16)
    assert smem_bytes(Axes(warps="split_q"), config, problem) == 3 * tile
    assert smem_bytes(Axes(warps="split_q", share="kv"), config, problem) == 2 * tile
    assert smem_bytes(Axes(warps="split_q", share="qkv"), in_registers, problem) == tile
    assert smem_bytes(Axes(warps="split_q", tiling="qk"), streamed, problem) == (64 + 64) * 64 * 2 + tile
    assert smem_bytes(Axes(warps="split_q", tiling="qkv"), streamed, problem) == (64 + 64) * 64 * 2 + 16 * 128 * 2
    exchanged = 64 * 64 * 2 + 2 * 64 * 4
    columns = replace(config, column_warps=2)
    assert smem_bytes(Axes(warps="split_kv"), columns, problem) == 3 * tile + exchanged


# ---------------------------------------------------------------- points, run


def run_point(
    name, *, head_dim=64, dtype="fp16", causal=False, seq_q=37, seq_kv=101, scale=None, values=None, config=None
):
    """A point's kernel, emulated, on one problem of two heads that share a key head; judged as parity judges."""
    generator = torch.Generator().manual_seed(head_dim)

    def tensor(heads, seq):
        return torch.randn(1, heads, seq, head_dim, generator=generator).to(DTYPES[dtype])

    q, k, v = tensor(2, seq_q), tensor(1, seq_kv), tensor(1, seq_kv)
    if values == "nan_v":
        v[:, :, seq_kv // 2] = torch.nan
        v[:, :, seq_kv // 3, 5] = torch.inf
    problem = Problem.of(q, k, v, causal=causal, scale=scale)
    plan = make_plan(BACKEND, problem, CPU, variant=name, config=config)
    out = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:3], torch.nan)
    launcher = CpuLauncher(plan)
    launcher(Operands(q, k, v, out, lse))
    for got, expected in zip((out, lse), Truth.of(q, k, v, causal=causal, scale=scale).of_plan(plan), strict=True):
        expected.check(got, plan)
    assert launcher.counters.mma > 0
    return launcher.counters


PROBLEMS = (
    {"causal": True},
    {"head_dim": 40, "seq_q": 113, "seq_kv": 70, "causal": True, "scale": -0.2},  # rows that see nothing
    {"head_dim": 136, "scale": 0.0},
    {"head_dim": 72, "causal": True, "values": "nan_v"},
)

HALVES = (f"{SPLIT_Q}+acc_fp16", f"{WIDE}+acc_fp16", "split_q+share_qkv+acc_fp16")
IN_EVERY_RUN = (*(name for name in SPANNING if name != WGMMA.name), *HALVES)


@on_cpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_a_point_computes_attention(name, problem):
    conflicts = run_point(name, **problem).bank_conflicts
    if "swizzle_qkv" in name:
        assert conflicts == 0


@on_cpu
@pytest.mark.nightly
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("axes", [axes for axes in LEGAL if axes.name not in IN_EVERY_RUN], ids=str)
def test_every_point_computes_attention(axes, problem):
    run_point(axes.name, **problem)


@on_cpu
@pytest.mark.parametrize("name", [axes.name for axes in LEGAL if axes.head_dim_max == 1024 and axes.swizzle == "qkv"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(264, "bf16"), (1024, "fp16")])
def test_a_wide_head(name, head_dim, dtype):
    counters = run_point(name, head_dim=head_dim, dtype=dtype, causal=True, scale=-0.04, values="nan_v")
    assert counters.bank_conflicts == 0


def shape(tile_m, tile_n, warps, columns, stages, place="shared", dim_slice=64, key_slice=16):
    return CudaConfig(
        tile_m=tile_m, tile_n=tile_n, warps=warps, column_warps=columns, stages=stages, dim_slice=dim_slice,
        key_slice=key_slice, q_in_registers=place == "registers", q_streamed=place == "streamed",
    )  # fmt: skip


@on_cpu
@pytest.mark.parametrize(
    ("name", "config", "head_dim"),
    [
        # K and V joint, and weights exchanged: a barrier of its own
        ("split_kv+swizzle_qkv", shape(32, 32, 4, 2, 2), 72),
        ("split_kv+swizzle_qkv", shape(32, 64, 4, 4, 4, "registers"), 64),
        # a shared ring that is ahead
        ("split_q+share_kv+swizzle_qkv", shape(64, 32, 4, 1, 3), 72),
        ("split_q+share_qkv+swizzle_qkv", shape(64, 32, 4, 1, 2, "registers"), 64),
        # slices with nothing ahead, and far ahead
        ("split_kv+tiling_qk+swizzle_qkv", shape(32, 64, 8, 4, 1, "streamed"), 264),
        ("split_kv+tiling_qk+swizzle_qkv", shape(32, 64, 8, 4, 4, "streamed"), 264),
        ("split_q+share_kv+tiling_qkv+swizzle_qkv", shape(64, 32, 4, 1, 4), 136),
        # what D up to 512 and up to 1024 run on the H200
        (WIDE.name, shape(64, 256, 8, 4, 2, "shared", 128, 64), 328),
        (WIDE.name, shape(32, 256, 8, 8, 2, "shared", 128, 32), 1000),
    ],
    ids=str,
)
def test_configs_that_no_rule_of_the_cpu_has(name, config, head_dim):
    problem = {"causal": True, "seq_q": 113, "seq_kv": 150, "scale": -0.1, "values": "nan_v"}
    assert run_point(name, config=config, head_dim=head_dim, **problem).bank_conflicts == 0


@on_cpu
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("axes", "head_dim"),
    [
        (axes, head_dim)
        for axes in LEGAL
        for head_dim in (328, 512, 520, 768, 1000)
        if head_dim <= axes.head_dim_max and axes.swizzle == "qkv"
    ],
    ids=str,
)
def test_every_wide_head(axes, head_dim):
    assert run_point(axes.name, head_dim=head_dim, causal=head_dim % 16 == 0).bank_conflicts == 0


@on_cpu
def test_a_tile_that_is_not_swizzled_conflicts():
    swizzled = {name: run_point(f"split_q{name}").bank_conflicts for name in ("", "+swizzle_q", "+swizzle_qk")}
    assert swizzled[""] > swizzled["+swizzle_q"] > swizzled["+swizzle_qk"] > 0
