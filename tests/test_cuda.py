"""The CUDA backend with no GPU: configs of GPUs run emulated, what selects, compiles and caches them, scores."""

import ctypes
import math
import re
import sys
from dataclasses import fields, replace

import pytest
import torch
from cuda_runs import on_cpu, run_forward, with_nvrtc

import multiattn
from multiattn import fmha, reference
from multiattn.cuda import BACKEND, axes, tools
from multiattn.cuda.compile import _compile, make_ptx
from multiattn.cuda.cpu import host
from multiattn.cuda.instances import kernels_of
from multiattn.cuda.score import text_of
from multiattn.cuda.source import DEVICE_INCLUDES, _wgmma, files_reached, translation_unit
from multiattn.cuda.variants import WGMMA
from multiattn.inspect import sanitize
from multiattn.inspect.facts import read_plan
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import find_variant, make_plan, plan_variant
from multiattn.plan.cubin import read_entry
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem
from multiattn.run import cache
from multiattn.score import bind_score, lower

SPLIT_Q = find_variant(BACKEND, axes.SPLIT_Q.name)


def problem_of(head_dim=64, **sizes):
    return Problem.contiguous(**{"batch": 1, "heads_q": 1, "seq_q": 64, "head_dim": head_dim, **sizes})


@on_cpu
@pytest.mark.parametrize(
    ("arch", "point", "head_dim"),
    [
        *(("sm80", axes.SPLIT_Q, 64), ("sm90", axes.SPLIT_Q, 128), ("sm120", axes.SPLIT_Q, 256)),
        *(("sm90", axes.TILED, head_dim) for head_dim in (328, 1000)),
    ],
    ids=str,
)
def test_a_gpus_own_config_has_no_bank_conflicts(arch, point, head_dim):
    variant = find_variant(BACKEND, point.name)
    config = plan_variant(BACKEND, variant, problem_of(head_dim, causal=True), ARCHS[arch]).config
    sizes = {"heads_q": 1, "seq_q": 113, "seq_kv": 150, "head_dim": head_dim, "causal": True}
    *_, counts = run_forward(variant=point.name, config=config, **sizes)
    assert counts.bank_conflicts == 0


@on_cpu
@pytest.mark.parametrize("which", [["--sample"], pytest.param([], marks=pytest.mark.nightly)], ids=["sample", "all"])
def test_sanitizers(which, monkeypatch, capfd):
    """Clean as it is, and a finding where K is too small: one after the other, as one build does for both."""
    for broken in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["sanitize", *which, *(["--break-bounds"] if broken else [])])
            for name in ("_KERNEL_FLAGS", "_RUNTIME_FLAGS"):
                patch.setattr(host, name, getattr(host, name))  # which the command changes for its process
            status, said = sanitize.main(), capfd.readouterr().err
        assert status == broken, said
        assert ("heap-buffer-overflow" in said) == broken


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_grid_that_is_too_large_is_refused(direction):
    problem = problem_of(8, batch=1 << 20, heads_q=1 << 10, seq_q=1 << 10)
    variant = SPLIT_Q if direction == "forward" else BACKEND.backward.variants[0]
    (reason,) = variant.fits(problem, ARCHS["sm90"], variant.rules[1].config)
    assert "a grid of up to" in reason.allowed


@pytest.mark.parametrize(
    ("direction", "name", "fewest", "most", "head_dims"),
    [
        ("forward", SPLIT_Q.name, 6, 20, (64, 128, 256)),
        ("forward", WGMMA.name, 10, 40, (40, 64, 96, 128, 160, 192, 256)),
        ("backward", "atomic", 4, 30, (64, 128, 256)),
        ("backward", "two_pass", 4, 30, (64, 128, 256)),
    ],
)
def test_a_sweep_is_short(direction, name, fewest, most, head_dims):
    variant = find_variant(BACKEND, name, direction)
    for head_dim in head_dims:
        problem = problem_of(head_dim, batch=4, heads_q=16, seq_q=4096)
        configs = BACKEND.op(direction).candidates(variant, problem, ARCHS["sm90"])
        assert fewest <= len(configs) <= most


def neighbours(config):
    """A config, and those that differ from it in a flag or a number."""
    yield config
    for field in fields(config):
        value = getattr(config, field.name)
        changed = ()
        if isinstance(value, bool | int) and field.name != "wide":  # which is for one pass alone
            changed = (not value,) if isinstance(value, bool) else (2 * value, value + 1, value + 16)
        yield from (replace(config, **{field.name: it}) for it in changed)


@pytest.mark.parametrize(
    ("direction", "name"),
    [
        *(("forward", name) for name in (WGMMA.name, "split_keys", "split_keys_wgmma")),
        *(("backward", variant.name) for variant in BACKEND.backward.variants),
    ],
)
def test_kernels_of_other_configs_and_problems_have_other_names(direction, name):
    """Two kernels of one name would be one in a profile, and in a library."""
    variant, kernels = find_variant(BACKEND, name, direction), {}
    for head_dim, causal, dtype in ((64, True, "bf16"), (64, False, "bf16"), (64, True, "fp16"), (128, True, "bf16")):
        problem = problem_of(head_dim, seq_kv=512, causal=causal, dtype=dtype)
        plan = plan_variant(BACKEND, variant, problem, ARCHS["sm90"], direction=direction)
        legal = [it for it in neighbours(plan.config) if not variant.fits(problem, ARCHS["sm90"], it)]
        for it in (it for config in legal for it in kernels_of(replace(plan, config=config))):
            kernels.setdefault(it.name, set()).add((it.entry, it.traits))
    assert len(kernels) > 8
    assert max(map(len, kernels.values())) == 1


# ---------------------------------------------------------------- built and cached


def test_the_cache_key_covers_every_header_a_kernel_reaches():
    plan = make_plan(BACKEND, problem_of(), ARCHS["sm80"], variant="split_q+swizzle_qkv", probe=False)
    source = translation_unit(kernels_of(plan))
    reached = files_reached(source, DEVICE_INCLUDES)
    assert set(reached) >= {"forward.cuh", "forward_traits.cuh", "multiattn/params.h", "multiattn/swizzle.cuh"}
    assert not any("backward" in name or "wgmma" in name for name in reached)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.h"):
        files_reached('#include "nowhere.h"\n', DEVICE_INCLUDES)


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_cache_that_cannot_be_written_is_named(folder, fresh_calls, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / folder))
    with pytest.raises(OSError, match=rf"^MULTIATTN_CACHE_DIR: cannot write to {tmp_path / folder}: .*; allowed a fol"):
        cache.fetch("key", ".x", None)
    if not tools.probe_host():
        q = torch.zeros(1, 1, 3, 8, dtype=torch.float16)
        with pytest.raises(OSError, match=r"^MULTIATTN_CACHE_DIR: cannot write to"):
            multiattn.fmha(q, q, q, backend="cuda")


def test_a_clang_called_gxx_is_a_reason(monkeypatch, tmp_path):
    clang = tmp_path / "g++"
    clang.write_text("#!/bin/sh\necho \"clang: error: unknown argument: '$1'\" >&2\nexit 1\n")
    clang.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(tools, "gxx_version", tools.gxx_version.__wrapped__)
    assert tools.versions()["g++"] is None
    (reason,) = (reason for reason in tools.probe_host.__wrapped__() if reason.code == "compiler")
    assert reason.got == "no usable g++"


@with_nvrtc
@pytest.mark.parametrize("variant", [None, "atomic", "two_pass"])
@pytest.mark.parametrize("arch", ["sm80", "sm120"])  # of the others `bench record` compiles every rule
def test_compiles_without_a_gpu(arch, variant):
    direction = "backward" if variant else "forward"
    problem = problem_of(32, heads_q=2, seq_q=512, dtype="fp16")
    plan = make_plan(BACKEND, problem, ARCHS[arch], direction=direction, variant=variant, probe=False)
    kernels = BACKEND.op(direction).export(plan, ())
    assert len(kernels) == (3 if variant else 1)
    for kernel in kernels:
        assert kernel.cubin[:4] == b"\x7fELF"
        assert kernel.dynamic_smem_bytes <= ARCHS[arch].smem_per_block
        assert read_entry(kernel.cubin, kernel.kernel).stack_bytes == 0


@with_nvrtc
def test_packages_that_do_not_compile_together_are_a_reason(monkeypatch):
    from cuda import core

    def fail(*_):
        raise RuntimeError("no driver")

    monkeypatch.setattr(core, "Program", fail)
    (reason,) = tools.probe_nvrtc.__wrapped__()
    assert reason.code == "compiler"
    assert reason.got.endswith(": RuntimeError: no driver")


def test_no_lambda_has_types_of_its_own():
    """NVRTC 13.0, which torch 2.11 brings, takes such a lambda for a function of the host; later releases do not."""
    own = re.compile(r"\[[&=\w, ]*\]\s*(<|\([^)]*\bauto\b)")
    for lambda_of_types in ("[&]<class Tile>(Tile) {}", "[&](auto its) {}"):
        assert own.search(f"const auto load = {lambda_of_types}")
    sources = [it for folder in DEVICE_INCLUDES for it in folder.rglob("*.*h")]
    assert sources
    assert not [it.name for it in sources if own.search(it.read_text())]


# ---------------------------------------------------------------- the verbs of sm90 as NVRTC makes them


COLUMNS = 40
KERNEL = """
#include "multiattn/wgmma.cuh"
{wgmma}
using namespace multiattn;
struct Arguments {{
  float* floats;
  int32* counter;
  uint64 a, b;
}};
KERNEL(128, 1) verb(PARAMETERS(Arguments) arguments) {{
  {body}
}}
"""
MULTIPLY = """
  float d[{columns} / 2] = {{}};
  wgmma_fence();
  {verb}<{kind}, {columns}>(d, arguments.a, arguments.b, true);
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < {columns} / 2; ++i) store_global_4_if(true, arguments.floats + i, d[i]);
"""
LINES = {
    "bulk_load": (
        "bulk_load(1024, arguments.floats, 512, 64);",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [",
    ),
    "bulk_add_if": (
        "bulk_add_if(true, arguments.floats, 1024, 512); tma_store_commit(); tma_store_wait_read<0>();",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [",
    ),
    "bulk_store_if": (
        "bulk_store_if(true, arguments.floats, 1024, 512); tma_store_commit(); tma_store_wait<0>();",
        "cp.async.bulk.global.shared::cta.bulk_group [",
    ),
    "ordered_add_global": (
        "arguments.counter[1] = ordered_add_global(arguments.counter, 3);",
        "atom.acq_rel.gpu.global.add.s32 %r",
    ),
}


def compiled(body, wgmma=""):
    """The PTX of a kernel with this body, which ptxas took for sm_90a."""
    source = KERNEL.format(wgmma=wgmma, body=body)
    assert len(_compile(source, "sm_90a")) > 1000
    return make_ptx(source, "sm_90a").decode()


@with_nvrtc
@pytest.mark.parametrize(("kind", "dtype"), [("fp16", "f16"), ("bf16", "bf16")])
@pytest.mark.parametrize(("verb", "mn_major"), [("wgmma_ss", "0, 0"), ("wgmma_ss_mn", "1, 1")])
def test_operands_in_shared_memory_are_both_k_major_or_both_mn_major(verb, mn_major, kind, dtype):
    ptx = compiled(MULTIPLY.format(verb=verb, kind=kind, columns=COLUMNS), _wgmma(COLUMNS))
    (line,) = (line for line in ptx.splitlines() if "wgmma.mma_async" in line)
    assert f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.{dtype}.{dtype} {{" in line
    assert line.endswith(f", add, 1, 1, {mn_major};}}")


@with_nvrtc
@pytest.mark.parametrize("verb", LINES)
def test_a_verb_is_one_instruction(verb):
    body, instruction = LINES[verb]
    assert compiled(body).count(instruction) == 1


# ---------------------------------------------------------------- modified scores beyond what parity runs


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_expression_hides_the_blocks_that_a_warpgroup_begins_with(dtype):
    """A bias hides most rows of the last blocks, which are walked over first, and all keys of the first rows."""
    q, k, v = (torch.randn(1, 2, length, 40, dtype=dtype) for length in (150, 170, 170))
    hide = {"score_mod": lambda score, b, h, q, kv: torch.where(kv > q - 7, -torch.inf, score)}
    results = fmha(q, k, v, **hide, backend="cuda", variant=WGMMA.name, return_lse=True)
    for got, true in zip(results, reference(q, k, v, **hide), strict=True):
        torch.testing.assert_close(got, true.to(got.dtype), rtol=0.02, atol=0.02)
    assert torch.isneginf(results[1][..., :7]).all()


DISTANCES = {
    "q - kv": lambda q, kv: q - kv,
    "a band": lambda q, kv: torch.abs(3 * q - kv).clamp(max=1 << 30),
    "a sum": lambda q, kv: -(q // 2 + kv - 5),
}
DISTANT = """
extern "C" float score(int q, int base, int step) {{
  return multiattn::{name}::score(0.0f, 0, 0, q, {{base, step}}, 0, 0, {{}});
}}
extern "C" float exponent(int q, int base, int step, float slope) {{
  return multiattn::{name}::exponent_and_slope(0.0f, 0.0f, 0, 0, {{q - 3, 3}}, {{base, step}}, 0, 0, {{}}, slope);
}}
"""


@on_cpu
@pytest.mark.parametrize("distance", DISTANCES.values(), ids=DISTANCES)
def test_a_distance_of_keys_is_as_near_as_the_nearest_float(distance):
    """It is exact below 2^24, where the factor of the log2 domain is rounded; elsewhere a bit may go."""
    program = bind_score(score_mod=lambda s, b, h, q, kv: s + distance(q, kv), device=torch.device("cpu")).program
    name, text = text_of(lower(program, exponents=True))
    assert "kv.index()" not in text
    made = host.load(host.build_source(text + DISTANT.format(name=name)))
    made.score.restype = made.exponent.restype = ctypes.c_float
    near, far = ((0, 0, 0), (3, 4, 255), (9, 0, 2)), ((2**24 + 3, 2**24, 1), (2**29 + 7, 2**29, 7), (5, 2**30 + 1, 97))
    for run, q, base, step in ((run, *at) for run in (made.score, made.exponent) for at in (*near, *far)):
        true = int(distance(torch.tensor(q), torch.tensor(base + step)))
        assert run(q, base, step) == pytest.approx(true * math.log2(math.e), rel=3 * 2**-24), (q, base, step)


@pytest.mark.parametrize("made", [lambda q, kv: kv * kv, lambda q, kv: kv // 3, lambda q, kv: kv + kv - q])
def test_other_functions_of_a_key_stay_integers(made):
    program = bind_score(score_mod=lambda score, b, h, q, kv: score + made(q, kv), device=torch.device("cpu")).program
    assert "kv.base" not in text_of(lower(program))[1]


@with_nvrtc
@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")
def test_alibi_costs_hopper_three_instructions_a_score():
    """A subtraction, a product and an FMA, all of fp32: positions become floats once a block for each of two rows."""
    q = torch.zeros(1, 2, 48, 128, dtype=torch.bfloat16)
    given = (with_score(Operands(q, q, q), Options(), None, it, None, None) for it in (None, torch.ones(2)))
    problems = (Problem.of_operands(*it) for it in given)
    plain, sloped = (make_plan(BACKEND, it, ARCHS["sm90"], variant=WGMMA.name, probe=False) for it in problems)
    plain = replace(plain, config=sloped.config)
    (before,), (after,) = map(read_plan, (plain, sloped))
    scores = sloped.config.tile_n // 2 * 2  # of a thread in the hot loops, masked and full
    kinds = ("FP32", "INT", "conversion")
    more = {kind: after.hot.classes[kind] - before.hot.classes[kind] for kind in kinds}
    assert after.hot_spills == 0
    assert more["FP32"] <= 3 * scores
    assert more["INT"] <= 24
    assert more["conversion"] == 2 * 2
