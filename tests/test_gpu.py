"""What only a GPU can show: streams, graph capture, device indices, no synchronisation. Skipped without one."""

import pytest
import torch

import multiattn
from multiattn import backend as registry
from multiattn.arch import detect

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def qkv(device="cuda", seq=300, head_dim=64, dtype=torch.bfloat16):
    return [torch.randn(2, 4, seq, head_dim, device=device, dtype=dtype) for _ in range(3)]


def variants(backend):
    return [variant.name for variant in registry.get(backend).forward.variants]


BACKEND_VARIANTS = [(backend, variant) for backend in multiattn.BACKENDS for variant in variants(backend)]


def close(out, q, k, v, **options):
    expected, _ = multiattn.reference(q, k, v, **options)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("backend", "variant"), BACKEND_VARIANTS)
def test_can_be_captured_and_replayed_on_new_values(backend, variant):
    q, k, v = qkv()
    multiattn.fmha(q, k, v, causal=True, backend=backend, variant=variant)  # compiles, as before every capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multiattn.fmha(q, k, v, causal=True, backend=backend, variant=variant)
    for tensor in (q, k, v):
        tensor.normal_()
    out.fill_(float("nan"))
    graph.replay()
    close(out, q, k, v, causal=True)


@pytest.mark.parametrize(("backend", "variant"), BACKEND_VARIANTS)
def test_runs_on_the_current_stream(backend, variant):
    q, k, v = qkv()
    multiattn.fmha(q, k, v, backend=backend, variant=variant)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds: a launch elsewhere would read the old q
        q.copy_(torch.randn_like(q))
        out = multiattn.fmha(q, k, v, backend=backend, variant=variant)
    stream.synchronize()
    close(out, q, k, v)


@pytest.mark.parametrize(("backend", "variant"), BACKEND_VARIANTS)
def test_a_warm_call_never_synchronises(backend, variant):
    q, k, v = qkv()
    multiattn.fmha(q, k, v, backend=backend, variant=variant)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        out = multiattn.fmha(q, k, v, backend=backend, variant=variant)
        busy = not torch.cuda.current_stream().query()  # the sleep still runs: the call came back without waiting
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert busy
    close(out, q, k, v)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("backend", "variant"), BACKEND_VARIANTS)
def test_runs_on_the_tensors_device_whatever_the_current_one(backend, variant):
    assert torch.cuda.current_device() == 0
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        q, k, v = qkv(device)
        out = multiattn.fmha(q, k, v, backend=backend, variant=variant)
        assert out.device == q.device
        close(out, q, k, v)
    assert torch.cuda.current_device() == 0


def test_auto_picks_a_backend_by_recorded_measurements():
    q, k, v = qkv(seq=4096, head_dim=128)
    plan = multiattn.explain(q, k, v)
    assert plan.backend in multiattn.BACKENDS
    assert plan.arch == detect(q.device)
    close(multiattn.fmha(q, k, v), q, k, v)


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_cpu_tensors_run_beside_a_gpu(backend):
    """The kernel source on the CPU and on the GPU in one process: neither spoils the other."""
    q, k, v = qkv(seq=70)
    on_gpu = multiattn.fmha(q, k, v, causal=True, backend=backend)
    on_cpu = multiattn.fmha(q.cpu(), k.cpu(), v.cpu(), causal=True, backend=backend)
    again = multiattn.fmha(q, k, v, causal=True, backend=backend)
    torch.testing.assert_close(on_gpu.cpu().float(), on_cpu.float(), atol=2e-2, rtol=2e-2)
    assert torch.equal(on_gpu, again)
