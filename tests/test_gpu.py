"""Streams, graph capture, device indices, no synchronisation: only a GPU can show them. Skipped without one."""

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

import multiattn
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, GPU_ARCHS, detect
from multiattn.plan.backend import Plan, find_variant, plan_variant
from multiattn.problem import Problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def qkv(device="cuda", seq=300, head_dim=64, dtype=torch.bfloat16):
    return [torch.randn(2, 4, seq, head_dim, device=device, dtype=dtype) for _ in range(3)]


def with_grad(tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


def saved(device="cuda", **sizes):
    """(q, k, v, out, lse, dout) of a causal problem, from the reference: any forward feeds any backward."""
    q, k, v = qkv(device, **sizes)
    out, lse = multiattn.reference(q, k, v, causal=True)
    return q, k, v, out.to(q.dtype), lse, torch.randn_like(q)


def close(out, q, k, v):
    expected, _ = multiattn.reference(q, k, v, causal=True)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def close_gradients(grads, q, k, v, out, lse, dout):
    expected = multiattn.reference_backward(q, k, v, out, lse, dout, causal=True)
    for grad, known in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.float(), known, atol=5e-2, rtol=5e-2)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A variant of one direction, or a training step: how tensors are drawn, it is called, and results are judged."""

    backend: str
    direction: str
    variant: str | None
    same_bits: bool = True

    def __str__(self):
        return f"{self.backend}-{self.direction}-{self.variant}"

    def draw(self, device="cuda", **sizes):
        if self.direction == "training":
            q, k, v = with_grad(qkv(device, **sizes))
            return q, k, v, torch.randn_like(q)
        return qkv(device, **sizes) if self.direction == "forward" else saved(device, **sizes)

    def call(self, *given, causal=True):
        options = {"causal": causal, "backend": self.backend, "variant": self.variant}
        if self.direction == "forward":
            return multiattn.fmha(*given, **options, return_lse=True)
        if self.direction == "training":
            *inputs, dout = given
            out = multiattn.fmha(*inputs, **options)
            return out, *torch.autograd.grad(out, inputs, dout)
        return multiattn.fmha_backward(*given, **options)

    def check(self, results, *given):
        if self.direction == "forward":
            close(results[0], *given)
        elif self.direction == "backward":
            close_gradients(results, *given)
        else:
            q, k, v, dout = (it.detach() for it in given)
            close(results[0], q, k, v)
            out, lse = multiattn.reference(q, k, v, causal=True)
            close_gradients(results[1:], q, k, v, out.to(q.dtype), lse, dout)


def takes_these_sizes(backend, name):
    """False for a variant of few queries, which has no rule for those drawn here: test_gpu_kvcache.py runs it."""
    op, problem = registry.get(backend).forward, Problem.contiguous(batch=2, heads_q=4, seq_q=300, head_dim=64)
    (variant,) = (it for it in op.variants if it.name == name)
    plans = (plan_variant(registry.get(backend), variant, problem, ARCHS[arch]) for arch in GPU_ARCHS)
    return any(isinstance(plan, Plan) for plan in plans)


def ways():
    for backend in multiattn.BACKENDS:
        forward, backward = registry.get(backend).forward, registry.get(backend).backward
        for name in forward.spanning or [variant.name for variant in forward.variants]:
            if takes_these_sizes(backend, name):
                yield Way(backend=backend, direction="forward", variant=name)
        for it in backward.variants:
            yield Way(backend=backend, direction="backward", variant=it.name, same_bits=it.deterministic)
        yield Way(backend=backend, direction="training", variant=None, same_bits=False)


def each(found):
    """One process has all tests of a way: what one compiles the others find."""
    params = [pytest.param(way, id=str(way), marks=pytest.mark.xdist_group(str(way))) for way in found]
    return pytest.mark.parametrize("way", params)


WAYS = list(ways())
FORWARD, BACKWARD = ([way for way in WAYS if way.direction == it] for it in ("forward", "backward"))
each_way = each(WAYS)
each_backend = pytest.mark.parametrize("backend", multiattn.BACKENDS)
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@each_way
def test_can_be_captured_and_replayed_on_new_values(way):
    given = way.draw()
    way.call(*given)  # compiles, as before every capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = way.call(*given)
    fresh = way.draw()
    with torch.no_grad():
        for old, new in zip(given, fresh, strict=True):
            old.copy_(new)
        for result in results:
            result.fill_(float("nan"))
    for _ in range(2):  # a workspace that only the capture zeroed would show the second time
        graph.replay()
    way.check(results, *fresh)


@each_way
def test_runs_on_the_current_stream(way):
    given, fresh = way.draw(), way.draw()
    way.call(*given)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds: a launch elsewhere would read the old values
        with torch.no_grad():
            for old, new in zip(given, fresh, strict=True):
                old.copy_(new)
        results = way.call(*given)
    stream.synchronize()
    way.check(results, *fresh)


@each_way
def test_a_warm_call_never_synchronises(way):
    given = way.draw()
    way.call(*given)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        results = way.call(*given)
        busy = not torch.cuda.current_stream().query()  # the sleep still runs: the call came back without waiting
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert busy
    way.check(results, *given)


@each(way for way in WAYS if way.same_bits)
def test_the_same_bits_every_time(way):
    """Whichever block takes which tile, and whatever else runs. Masks take turns."""
    causal = WAYS.index(way) % 2 == 0
    given = way.draw(seq=1500, head_dim=64 if causal else 128)
    first = way.call(*given, causal=causal)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    busy, side = torch.randn(1024, 1024, device="cuda"), torch.cuda.Stream()
    for run in range(1000):
        if run % 4 == 1:
            with torch.cuda.stream(side):
                busy @ busy
        for again, known in zip(way.call(*given, causal=causal), first, strict=True):
            differ += (again != known).any()
    assert differ.item() == 0


@each(way for way in WAYS if way.same_bits)
def test_launches_on_two_streams_and_of_a_graph_do_not_disturb_one_another(way):
    """Nothing that they share on the device is in use by two at a time."""
    problems = [way.draw(seq=1500, head_dim=128), way.draw(seq=700, head_dim=64)]
    streams = [torch.cuda.Stream() for _ in problems]
    expected = [way.call(*problem) for problem in problems]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = way.call(*problems[0])
    results = []
    for _ in range(50):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append((which, way.call(*problems[which])))
        graph.replay()
    torch.cuda.synchronize()
    for which, found in [*results, (0, captured)]:
        assert all(map(torch.equal, found, expected[which]))


@needs_two_gpus
@each_way
def test_runs_on_the_tensors_device_whatever_the_current_one(way):
    assert torch.cuda.current_device() == 0
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        given = way.draw(device)
        results = way.call(*given)
        assert all(result.device == given[0].device for result in results)
        way.check(results, *given)
    assert torch.cuda.current_device() == 0


@each_way
def test_a_warm_call_in_a_thread_without_a_context(way):
    """As autograd's own is, until PyTorch itself needs one: a warm allocator and kernels that are loaded need none."""
    given = way.draw()
    way.call(*given)
    with ThreadPoolExecutor(1) as fresh:
        results = fresh.submit(way.call, *given).result()
    torch.cuda.synchronize()
    way.check(results, *given)


def test_auto_picks_a_backend_by_recorded_measurements():
    q, k, v = qkv(seq=4096, head_dim=128)
    plan = multiattn.explain(q, k, v)
    assert plan.backend in multiattn.BACKENDS
    assert plan.arch == detect(q.device)
    close(multiattn.fmha(q, k, v, causal=True), q, k, v)


@each_backend
def test_cpu_tensors_run_beside_a_gpu(backend):
    """The kernel source on the CPU and on the GPU in one process: neither spoils the other."""
    q, k, v = qkv(seq=70)
    on_gpu = multiattn.fmha(q, k, v, causal=True, backend=backend)
    on_cpu = multiattn.fmha(q.cpu(), k.cpu(), v.cpu(), causal=True, backend=backend)
    again = multiattn.fmha(q, k, v, causal=True, backend=backend)
    torch.testing.assert_close(on_gpu.cpu().float(), on_cpu.float(), atol=2e-2, rtol=2e-2)
    assert torch.equal(on_gpu, again)


# ---------------------------------------------------------------- backward


@each_backend
def test_eight_threads_launch_1000_times_each(backend):
    """Both directions, each thread on a stream and on tensors of its own, all with the same bits every time."""

    def work(seed):
        torch.manual_seed(seed)
        given = saved(seq=100 + seed)
        options = {"causal": True, "backend": backend, "deterministic": True}
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            known = (multiattn.fmha(*given[:3], **options), *multiattn.fmha_backward(*given, **options))
            differ = torch.zeros((), dtype=torch.int64, device="cuda")
            for _ in range(500):
                again = (multiattn.fmha(*given[:3], **options), *multiattn.fmha_backward(*given, **options))
                differ += torch.stack([(one != two).any() for one, two in zip(again, known, strict=True)]).any()
            return differ.item()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [0] * 8


def test_a_child_that_is_forked_after_the_import_runs_on_the_gpu():
    code = (
        "import os, sys, torch, multiattn\n"
        "if (child := os.fork()) == 0:\n"
        "    q = torch.randn(1, 2, 64, 64, device='cuda', dtype=torch.bfloat16)\n"
        "    for backend in sys.argv[1:]:\n"
        "        out = multiattn.fmha(q, q, q, causal=True, backend=backend).float()\n"
        "        expected, _ = multiattn.reference(q, q, q, causal=True)\n"
        "        torch.testing.assert_close(out, expected.float(), atol=2e-2, rtol=2e-2)\n"
        "    os._exit(0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    able = [name for name, reasons in multiattn.backends("cuda").items() if not reasons]
    subprocess.run([sys.executable, "-c", code, *able], check=True)


@each(BACKWARD)
def test_workspace_is_what_the_plan_says(way):
    """Head_dims take turns."""
    given = saved(seq=1000, head_dim=(64, 72, 128)[BACKWARD.index(way) % 3])
    q, k, v = given[:3]
    plan = multiattn.explain(q, k, v, causal=True, backend=way.backend, variant=way.variant, direction="backward")
    if not isinstance(plan, multiattn.Plan):
        pytest.skip("; ".join(map(str, plan)))
    grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
    arguments = (*given, None, *grads)
    multiattn.launch_backward(plan, *arguments)  # compiles, and loads what the driver keeps
    torch.cuda.synchronize()
    gc.collect()  # tensors of an earlier test that is skipped or failed live on in its traceback
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    multiattn.launch_backward(plan, *arguments)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == plan.workspace_bytes


@each_backend
def test_compiles_whole_with_inductor(backend):
    torch._dynamo.reset()
    q, k, v = with_grad(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in qkv())
    dout = torch.randn_like(q)

    def attend(q, k, v):
        return multiattn.fmha(q * 2, k, v, causal=True, backend=backend) + 1

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for seq in (300, 171):
        inputs = with_grad(tensor[:, :, :seq].detach() for tensor in (q, k, v))
        grads = torch.autograd.grad(compiled(*inputs), inputs, dout[:, :, :seq])
        expected = torch.autograd.grad(attend(*inputs), inputs, dout[:, :, :seq])
        torch.testing.assert_close(grads, expected, atol=5e-2, rtol=5e-2)


@each(way for way in FORWARD if not find_variant(registry.get(way.backend), way.variant).only_named)
def test_compiles_into_cuda_graphs(way):
    """Graph trees warm up and capture in a memory pool of their own, in which nothing of ours may stay.

    What is kept is of a launch: rungs that are selected only by name have the launches of others.
    """
    torch._dynamo.reset()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def attend(q, k, v):
        return multiattn.fmha(q * 2, k, v, causal=True, backend=way.backend, variant=way.variant) + 1

    for _ in range(5):
        q, k, v = qkv(seq=700)
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            out = attend(q, k, v).clone()
        close(out - 1, q * 2, k, v)
