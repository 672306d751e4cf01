"""The CUDA backend on the CPU: the kernel's own source against the reference, and what selects and builds it."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch

import multiattn
from multiattn import api
from multiattn.cuda import BACKEND, axes, tools
from multiattn.cuda.configs import CudaConfig, candidates, smem_bytes
from multiattn.cuda.emulation.host import CpuLauncher
from multiattn.cuda.launches import kernels_of
from multiattn.cuda.source import DEVICE_INCLUDES, files_reached, translation_unit
from multiattn.cuda.tools import probe_host, probe_nvrtc
from multiattn.plan.arch import ARCHS, CPU, GPU_ARCHS, Arch
from multiattn.plan.backend import Plan, find_variant, make_plan, plan_variant
from multiattn.problem import Operands, Problem
from multiattn.reference import reference
from multiattn.run import cache, calls

on_cpu = pytest.mark.skipif(bool(probe_host()), reason="; ".join(map(str, probe_host())))
with_nvrtc = pytest.mark.skipif(bool(probe_nvrtc()), reason="; ".join(map(str, probe_nvrtc())))

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HEAD_DIMS = (8, 40, 64, 72, 80, 96, 128, 160, 192, 256)
SPLIT_Q = find_variant(BACKEND, axes.SPLIT_Q.name)


def make(heads_q=2, heads_kv=1, seq_q=37, seq_kv=75, head_dim=64, dtype="fp16", batch=1, magnitude=1.0):
    generator = torch.Generator().manual_seed(seq_q * 1000 + seq_kv + head_dim)

    def tensor(heads, seq):
        return (magnitude * torch.randn(batch, heads, seq, head_dim, generator=generator)).to(DTYPES[dtype])

    return tensor(heads_q, seq_q), tensor(heads_kv, seq_kv), tensor(heads_kv, seq_kv)


def launch(q, k, v, *, config=None, **how):
    """(out, lse, plan, counters), through the launcher; out and lse start as NaN."""
    problem = Problem.of(q, k, v, **how)
    plan = make_plan(BACKEND, problem, CPU, config=config)
    out = torch.empty_strided(q.shape, (*problem.strides_out, 1), dtype=q.dtype).fill_(math.nan)
    lse = torch.full(q.shape[:3], math.nan)
    launcher = CpuLauncher(plan)
    launcher(Operands(q, k, v, out, lse))
    return out, lse, plan, launcher.counters


def check(q, k, v, *, config=None, **how):
    """Parity: no more than twice the error of naive eager attention in the same dtype, and a rounding of the output."""
    out, lse, plan, counters = launch(q, k, v, config=config, **how)
    truth, truth_lse = reference(q, k, v, compute_dtype=torch.float64, **how)
    naive, _ = reference(q, k, v, compute_dtype=q.dtype, **how)
    assert torch.equal(out.isnan(), truth.isnan()), plan
    assert torch.equal(out.isinf(), truth.to(q.dtype).isinf()), plan
    finite = truth.isfinite() & naive.isfinite()
    rounding = torch.finfo(q.dtype).eps * max(1.0, float(truth[finite].abs().max())) if finite.any() else 0.0
    error = (out.double() - truth)[finite].abs().max() if finite.any() else torch.zeros(())
    allowed = 2 * float((naive.double() - truth)[finite].abs().max()) + rounding if finite.any() else 0.0
    assert error <= allowed, plan
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-5, rtol=1e-5, equal_nan=True, msg=str(plan))
    return counters


@on_cpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_and_dtype(head_dim, dtype, causal):
    counters = check(*make(head_dim=head_dim, dtype=dtype), causal=causal)
    assert counters.bank_conflicts == 0


@on_cpu
@pytest.mark.parametrize(
    ("seq_q", "seq_kv"), [(1, 1), (113, 203), (203, 113), (1, 300), (300, 1), (64, 64), (128, 96), (65, 33)]
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_length(seq_q, seq_kv, causal):
    check(*make(seq_q=seq_q, seq_kv=seq_kv), causal=causal)


@on_cpu
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (4, 4), (8, 2), (6, 1)])
def test_gqa(heads_q, heads_kv):
    check(*make(heads_q=heads_q, heads_kv=heads_kv, batch=2, seq_q=33, seq_kv=40), causal=True)


@on_cpu
@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("layout", ["bshd", "packed", "unaligned base", "unaligned stride", "broadcast"])
def test_strides(layout, head_dim):
    q, k, v = make(heads_q=2, heads_kv=2, seq_q=50, seq_kv=50, head_dim=head_dim)
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "packed":
        q, k, v = torch.stack((q, k, v), dim=3).unbind(3)
    elif layout == "unaligned base":
        q, k, v = (torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) for t in (q, k, v))
    elif layout == "unaligned stride":
        q, k, v = (torch.nn.functional.pad(t, (0, 3))[..., :head_dim] for t in (q, k, v))
    else:
        k, v = (t[:, :1].expand(-1, 2, -1, -1) for t in (k, v))
    check(q, k, v, causal=True)


@on_cpu
def test_memory_beyond_a_tensor_never_matters():
    q, k, v = make(seq_q=50, seq_kv=70)
    views = []
    for tensor in (q, k, v):
        big = torch.full((1, tensor.shape[1], tensor.shape[2] + 128, 64 + 64), math.nan, dtype=tensor.dtype)
        view = big[:, :, 64:-64, 32:-32]
        view.copy_(tensor)
        views.append(view)
    for causal in (False, True):
        expected, expected_lse, *_ = launch(q, k, v, causal=causal)
        out, lse, *_ = launch(*views, causal=causal)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


@on_cpu
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_masked_key_reaches_nothing_and_a_visible_one_all(value):
    q, k, v = make(seq_q=100, seq_kv=120)
    k[:, :, 70] = value
    k[:, :, 90, 5] = value
    check(q, k, v, causal=True)
    if math.isnan(value):
        check(q, k, v, causal=False)


@on_cpu
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-3, 2.0, -1e-50])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_sign_of_the_scale(scale, causal):
    check(*make(), causal=causal, scale=scale)


@on_cpu
def test_a_zero_scale_keeps_what_is_not_finite():
    q, k, v = make()
    q[:, :, 3, 7] = math.inf
    q[:, :, 5, 0] = math.nan
    check(q, k, v, scale=0.0)


@on_cpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_magnitudes_and_a_huge_spread(dtype):
    q, k, v = make(dtype=dtype, seq_q=70, seq_kv=130)
    out, lse, plan, _ = launch(100 * q, 100 * k, v, causal=True)
    truth, truth_lse = reference(100 * q, 100 * k, v, causal=True, compute_dtype=torch.float64)
    assert (out - truth).abs().max() < 0.05, plan
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-3, rtol=1e-6)


@on_cpu
def test_growing_scores_rescale_the_output():
    q, k, v = make(heads_q=1, seq_q=32, seq_kv=200)
    k = k * torch.linspace(0.1, 8, 200)[:, None].to(k.dtype)  # the running maximum moves, a little and a lot
    check(q, k, v)


@on_cpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm120"])
def test_a_gpus_own_config_runs_emulated(arch, head_dim):
    q, k, v = make(heads_q=1, seq_q=150, seq_kv=200, head_dim=head_dim)
    plan = plan_variant(BACKEND, SPLIT_Q, Problem.of(q, k, v), ARCHS[arch])
    assert isinstance(plan, Plan)
    counters = check(q, k, v, causal=True, config=plan.config)
    assert counters.bank_conflicts == 0


@on_cpu
@pytest.mark.parametrize(
    "config",
    [
        CudaConfig(tile_m=64, tile_n=32, warps=2, stages=1, q_in_registers=True),
        CudaConfig(tile_m=32, tile_n=16, warps=2, stages=3),
        CudaConfig(tile_m=128, tile_n=48, warps=4, stages=4, q_in_registers=True),
    ],
    ids=str,
)
def test_other_configs(config):
    check(*make(head_dim=72, seq_q=100, seq_kv=150), config=config, causal=True)


@on_cpu
def test_inputs_are_not_written_and_out_is_where_the_problem_says():
    q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in make())
    before = [tensor.clone() for tensor in (q, k, v)]
    out = api.fmha(q, k, v, causal=True, scale=-0.1, backend="cuda")
    assert out.stride() == q.stride()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((q, k, v), before, strict=True))


@on_cpu
@pytest.mark.xdist_group("sanitizers")  # one build for both
@pytest.mark.parametrize(("broken", "returncode"), [(False, 0), (True, 1)], ids=["clean", "out of bounds"])
def test_sanitizers(broken, returncode):
    command = [sys.executable, "-m", "multiattn.cuda.sanitize", *(["--break-bounds"] if broken else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == returncode, done.stderr
    assert ("heap-buffer-overflow" in done.stderr) == broken


def test_every_arch_has_a_config_that_fits_for_every_head_dim():
    for name, head_dim, causal in itertools.product(GPU_ARCHS, range(8, 257, 8), (False, True)):
        problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim, causal=causal)
        plan = plan_variant(BACKEND, SPLIT_Q, problem, ARCHS[name])
        assert isinstance(plan, Plan), plan


def test_a_config_that_does_not_fit_is_refused_with_the_numbers():
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=256)
    config = CudaConfig(tile_m=128, tile_n=128, warps=8, stages=2)
    assert smem_bytes(axes.SPLIT_Q, config, problem) == (128 + 4 * 128) * 512
    (reason,) = SPLIT_Q.fits(problem, ARCHS["sm90"], config)
    assert (reason.code, reason.allowed) == ("config", "232448 bytes a block on sm90")
    assert "327680 bytes" in reason.got


def test_a_grid_that_is_too_large_is_refused():
    problem = Problem.contiguous(batch=1 << 20, heads_q=1 << 10, seq_q=1 << 10, head_dim=8)
    assert any("grid" in reason.allowed for reason in SPLIT_Q.fits(problem, ARCHS["sm90"], SPLIT_Q.rules[1].config))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sweep_is_short_and_fits(head_dim):
    problem = Problem.contiguous(batch=4, heads_q=16, seq_q=4096, head_dim=head_dim)
    configs = candidates(SPLIT_Q, problem, ARCHS["sm90"])
    assert 6 <= len(configs) <= 20
    assert len(set(configs)) == len(configs)
    assert not any(SPLIT_Q.fits(problem, ARCHS["sm90"], config) for config in configs)


def test_the_cache_key_covers_every_header_a_kernel_reaches():
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=64)
    source = translation_unit(kernels_of(make_plan(BACKEND, problem, ARCHS["sm80"], probe=False)))
    reached = files_reached(source, DEVICE_INCLUDES)
    names = ("mask", "place", "ptx", "softmax", "special", "swizzle", "tile")
    headers = (*(f"{name}.cuh" for name in names), "params.h", "types.h")
    parts = ("", "_products", "_stream", "_traits")
    assert set(reached) == {*(f"forward{part}.cuh" for part in parts), *(f"multiattn/{name}" for name in headers)}
    with pytest.raises(FileNotFoundError, match=r"nowhere\.h"):
        files_reached('#include "nowhere.h"\n', DEVICE_INCLUDES)


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_cache_that_cannot_be_written_is_named(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / folder))
    with pytest.raises(
        OSError, match=r"^MULTIATTN_CACHE_DIR: cannot write to .*; allowed a folder that can be$"
    ) as error:
        cache.fetch("key", ".x", None)
    assert f" {tmp_path / folder}: " in str(error.value)
    if not probe_host():
        calls._forward.clear()
        q = torch.zeros(1, 1, 3, 8, dtype=torch.float16)
        with pytest.raises(OSError, match=r"^MULTIATTN_CACHE_DIR: cannot write to"):
            multiattn.fmha(q, q, q, backend="cuda")


def test_a_full_disk_while_an_entry_is_made_is_the_makers_error(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))

    def fail(path):
        raise OSError("No space left on device")

    with pytest.raises(OSError, match=r"^No space"):
        cache.fetch("key", ".x", fail)


def test_a_clang_called_gxx_is_a_reason(monkeypatch, tmp_path):
    clang = tmp_path / "g++"
    clang.write_text("#!/bin/sh\necho \"clang: error: unknown argument: '$1'\" >&2\nexit 1\n")
    clang.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(tools, "gxx_version", tools.gxx_version.__wrapped__)
    assert tools.versions()["g++"] is None
    (reason,) = (reason for reason in tools.probe_host.__wrapped__() if reason.code == "compiler")
    assert reason.got == "no usable g++"


def test_probing_beside_an_amd_gpu_raises_nothing(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(BACKEND.probe(Arch(name="gfx942", title="AMD GPU")), tuple)


@with_nvrtc
@pytest.mark.parametrize("arch", ["sm80", "sm120"])  # of the others `bench expected --check` compiles some each time
def test_compiles_without_a_gpu(arch):
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=512, head_dim=32, dtype="fp16")
    plan = make_plan(BACKEND, problem, ARCHS[arch], probe=False)
    (compiled,) = BACKEND.forward.compile(plan)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.smem_bytes is not None
    assert compiled.smem_bytes <= ARCHS[arch].smem_per_block
    assert compiled.spill_bytes in (0, None)


def test_packages_that_do_not_compile_together_are_a_reason(monkeypatch):
    if tools.probe_nvrtc():
        pytest.skip("no NVRTC")
    from cuda import core

    def fail(*_):
        raise RuntimeError("no driver")

    monkeypatch.setattr(core, "Program", fail)
    (reason,) = tools.probe_nvrtc.__wrapped__()
    assert reason.code == "compiler"
    assert reason.got.endswith(": RuntimeError: no driver")
