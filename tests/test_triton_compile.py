"""The Triton kernel compiles for every arch with no GPU, and leaves the process as it was."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from triton.runtime.driver import driver

from multiattn import Problem, fmha
from multiattn.plan.arch import GPU_ARCHS, by_name
from multiattn.plan.backend import make_plan
from multiattn.plan.cubin import read_entry
from multiattn.triton import BACKEND
from multiattn.triton.calls import calls_of
from multiattn.triton.compile import export_plan, specialise
from multiattn.triton.kernels.forward import attention_forward
from multiattn.triton.plain import TMA_ARCHS, smem_bytes

pytestmark = pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))


def plan_for(arch, *, direction="forward", variant=None, **options):
    sizes = {"batch": 2, "heads_q": 8, "heads_kv": 2, "seq_q": 1000, "head_dim": 64}
    problem = Problem.contiguous(**{**sizes, **options})
    return make_plan(BACKEND, problem, by_name(arch), direction=direction, variant=variant, probe=False)


@pytest.mark.parametrize("arch", GPU_ARCHS)
def test_descriptors_are_for_arches_with_tma(arch):
    assert plan_for(arch, causal=True).variant == ("warp_specialized" if arch == "sm90" else "full")
    assert plan_for(arch, variant="full", causal=True).config.descriptors == (arch in TMA_ARCHS)


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "sm120"])
def test_compiles_for_an_arch_that_is_not_here(arch):
    """The estimate that decides whether a config fits leaves out barriers and scratch: the weights, at most.

    Tensor memory holds more on sm100. What rules spill is on record.
    """
    plan = plan_for(arch, variant="full", head_dim=128, causal=True)
    (compiled,) = export_plan(plan, ())
    assert compiled.cubin.startswith(b"\x7fELF")
    assert 0 < compiled.dynamic_smem_bytes <= plan.arch.smem_per_block
    spare = compiled.dynamic_smem_bytes - smem_bytes(plan.problem, plan.arch, plan.config)
    assert arch == "sm100" or 0 <= spare <= 8192 + 1024
    assert 0 < read_entry(compiled.cubin, compiled.kernel).registers <= 255


def test_memory_is_read_16_bytes_at_a_time():
    """Whatever multiple of 8 head_dim is: Triton knows no divisor of a stride but 16, so the kernel tells it."""
    pointers, descriptors = (
        plan_for(arch, variant=name, head_dim=72) for arch, name in (("sm80", None), ("sm90", "full"))
    )
    ptx = specialise(*calls_of(pointers), pointers.arch).asm["ptx"]
    assert "cp.async.cg.shared.global [ " in ptx
    sizes = set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x\w+|\d+)", ptx))
    assert {int(size, 0) for size in sizes} == {16}
    assert "cp.async.bulk.tensor.4d" in specialise(*calls_of(descriptors), descriptors.arch).asm["ptx"]


def test_compiling_leaves_the_process_as_it_was(monkeypatch):
    """Driver and the JIT's cache are the process's: another thread may be launching. Seconds are the compiler's own."""
    q = torch.randn(1, 1, 20, 16).bfloat16()
    interpreted = fmha(q, q, q, backend="triton")
    active, devices = driver._active, set(attention_forward.device_caches)
    seen, compile_in_triton = [], triton.compile

    def spy(*args, **how):
        seen.append(driver._active)
        return compile_in_triton(*args, **how)

    monkeypatch.setattr(triton, "compile", spy)
    (first,), (second,) = (export_plan(plan_for("sm80"), ()) for _ in range(2))
    assert [*seen, driver._active] == [active] * 3
    assert set(attention_forward.device_caches) == devices
    assert first.cubin == second.cubin
    assert min(first.seconds, second.seconds) > 0.05
    assert torch.equal(fmha(q, q, q, backend="triton"), interpreted)


@pytest.mark.nightly
def test_interpreting_and_compiling_in_two_threads():
    """The interpreter patches `triton.language` for the whole process: neither may begin in the midst of the other."""
    q = torch.randn(1, 1, 150, 16).bfloat16()
    first = fmha(q, q, q, backend="triton")
    expected = export_plan(plan_for("sm80"), ())[0].cubin
    enough, outs = threading.Event(), []

    def interpret():
        while not enough.is_set():
            outs.append(fmha(q, q, q, backend="triton"))

    with ThreadPoolExecutor(1) as thread:
        interpreting = thread.submit(interpret)
        try:
            cubins = [export_plan(plan_for("sm80"), ())[0].cubin for _ in range(5)]
        finally:
            enough.set()
    interpreting.result()
    assert cubins == [expected] * 5
    assert outs
    assert all(torch.equal(out, first) for out in outs)
