"""Attention of several ranks, over gloo on this CPU, against that of one."""

import os

import pytest
import torch
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, experimental
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import multiattn
import multiattn.integrations.dtensor
from multiattn.integrations import overrides, sdpa

BATCH, HEADS, HEADS_KV, SEQ, HEAD_DIM, HEAD_DIM_V = 4, 8, 4, 32, 16, 24


def ranks(number):
    """A decorator: run the test in so many processes of one group, by the name of its function."""

    def decorate(test):
        def run(tmp_path):
            arguments = (test.__name__, number, f"file://{os.fspath(tmp_path)}/store")
            # The processes are forks of one that has imported what takes seconds.
            multiprocessing.set_forkserver_preload(["multiattn.integrations.dtensor", experimental.__name__])
            multiprocessing.start_processes(_rank, arguments, nprocs=number, start_method="forkserver")

        run.__name__ = run.__qualname__ = test.__name__
        globals()[f"_{test.__name__}"] = test
        return run

    return decorate


def _rank(rank, name, number, store):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=number)
    torch.manual_seed(0)
    globals()[f"_{name}"](number)
    torch.distributed.destroy_process_group()


def qkv(dtype=torch.float32, heads=HEADS, heads_kv=HEADS_KV):
    widths = HEAD_DIM, HEAD_DIM if dtype == torch.bfloat16 else HEAD_DIM_V  # PyTorch's rules of SDPA know one
    shapes = ((BATCH, heads, SEQ, HEAD_DIM), *((BATCH, heads_kv, SEQ, it) for it in widths))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def results(attention, tensors):
    """Out and the gradients, whole, and where out was placed."""
    tensors = [it.detach().requires_grad_(it.is_floating_point()) for it in tensors]
    out = attention(*tensors)
    found = (out, *torch.autograd.grad(out.square().sum(), [it for it in tensors if it.requires_grad]))
    return [it.full_tensor() if isinstance(it, DTensor) else it for it in found], getattr(out, "placements", None)


def check_sharded(mesh, placements, attention, extra=(), of_extra=None, of_out=None, **sizes):
    """DTensors give what their whole tensors do, and out is placed like q, or as `of_out` says; () is anyhow."""
    tensors = [*qkv(**sizes), *extra]
    expected, _ = results(attention, tensors)
    sharded = [distribute_tensor(it, mesh, placements) for it in tensors[:3]]
    sharded += [distribute_tensor(it, mesh, of_extra or [Replicate()] * mesh.ndim) for it in extra]
    found, placed = results(attention, sharded)
    assert placed == tuple(of_out or placements) or of_out == (), (attention, placed)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def plain(q, k, v):
    return multiattn.fmha(q, k, v, window=(5, 3), softcap=3.0)


def with_one(name, **options):
    """A call with one tensor more."""
    return lambda q, k, v, it: multiattn.fmha(q, k, v, **{name: it}, **options)


WITH_SINKS, WITH_SLOPES, WITH_BIAS = with_one("sinks", causal=True), with_one("alibi_slopes"), with_one("bias")


def packed(q, k, v, cu_seqlens):
    whole = (it.transpose(1, 2).flatten(0, 1) for it in (q, k, v))
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": 70, "max_seqlen_kv": 70}
    return multiattn.fmha_varlen(*whole, causal=True, **lengths)


def scaled_dot_product_attention(query, key, value, is_causal=True):
    """As PyTorch's of a GPU. DTensor and the ring know the ops of one alone."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]


def check_sdpa_sharded(mesh, placements):
    handle = overrides.Overrides({"CPU": sdpa.KERNELS["CUDA"]})
    whole = qkv(torch.bfloat16)
    sharded = [distribute_tensor(it, mesh, placements) for it in whole]
    (expected, _), (found, placed) = (results(scaled_dot_product_attention, it) for it in (whole, sharded))
    handle.remove()
    assert placed == tuple(placements)
    torch.testing.assert_close(found, expected)


def check_context_parallel(number):
    """The ring of PyTorch, causal and balanced, through our kernels: rows of each rank are two of the blocks of all.

    On a GPU it takes the ops that `torch.nn.functional` calls.
    """
    calls = []
    forward = sdpa.flash_attention

    def spy(*arguments, **options):
        calls.append((arguments[0].shape[2], arguments[1].shape[2]))
        return forward(*arguments, **options)

    kernels = {**sdpa.KERNELS["CUDA"], "_scaled_dot_product_flash_attention": spy}
    handle = overrides.Overrides({"CPU": kernels})
    whole = [*qkv(torch.bfloat16), torch.randn(BATCH, HEADS, SEQ, HEAD_DIM).bfloat16()]
    leaves = [it.double().requires_grad_() for it in whole[:3]]
    expected = multiattn.fmha(*leaves, causal=True)
    expected = [expected, *torch.autograd.grad(expected, leaves, whole[3].double())]

    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    mesh = init_device_mesh("cpu", (number,))
    q, k, v, dout = parts = [it.clone() for it in whole]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4, no_restore_buffers=set(parts)):
        leaves = [it.requires_grad_() for it in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        gradients = torch.autograd.grad(out, leaves, dout)
        found = context_parallel_unshard(mesh, [out.detach(), *gradients], [2] * 4)
    handle.remove()
    rows = SEQ // number
    assert len(calls) == number, calls
    assert calls[0] == (rows, rows)
    assert set(calls[1:]) <= {(rows, rows // 2), (rows // 2, rows)}  # what is not masked, of every other rank
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 0.01 * other.norm()


def check_layer(mesh):
    """`multiattn.nn.Attention`, its heads over the ranks: by local tensors, and by DTensors."""
    x = torch.randn(2, SEQ, 64)
    for use_local_output in (True, False):
        layer = multiattn.nn.Attention(64, HEADS, HEADS_KV, causal=True)
        expected = layer(x)
        of_heads, of_width = ColwiseParallel(use_local_output=use_local_output), RowwiseParallel()
        parallelize_module(layer, mesh, {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), of_heads), "o_proj": of_width})
        torch.testing.assert_close(layer(x), expected)


WHOLE, OF_BATCH, OF_HEADS = Replicate(), Shard(0), Shard(1)


@ranks(2)
def test_two_ranks(number):
    check_context_parallel(number)
    mesh = init_device_mesh("cpu", (number,))
    check_layer(mesh)
    sinks, slopes, bias = torch.randn(HEADS), torch.rand(HEADS), torch.randn(1, 1, SEQ, SEQ)
    cu_seqlens = torch.tensor([0, 30, 30, 100, 126], dtype=torch.int32)
    for placement in (OF_BATCH, OF_HEADS):
        check_sharded(mesh, [placement], plain)
        check_sharded(mesh, [placement], WITH_SINKS, [sinks])
        check_sharded(mesh, [placement], WITH_BIAS, [bias])
        check_sdpa_sharded(mesh, [placement])
    check_sharded(mesh, [OF_HEADS], WITH_SINKS, [sinks], [Shard(0)])
    check_sharded(mesh, [OF_HEADS], packed, [cu_seqlens])
    check_sharded(mesh, [OF_BATCH], WITH_SLOPES, [slopes])
    # A shard counts its heads from 0, and three key/value heads are two and one.
    check_sharded(mesh, [OF_HEADS], WITH_SLOPES, [slopes], of_out=[WHOLE])
    check_sharded(mesh, [OF_HEADS], plain, of_out=[WHOLE], heads=6, heads_kv=3)


@pytest.mark.nightly
@ranks(4)
def test_four_ranks(number):
    check_context_parallel(number)
    check_sharded(init_device_mesh("cpu", (number,)), [OF_HEADS], plain)
    mesh = init_device_mesh("cpu", (2, 2))
    sinks, bias = torch.randn(HEADS), torch.randn(1, 1, SEQ, SEQ)
    check_sharded(mesh, [OF_BATCH, OF_HEADS], WITH_SINKS, [sinks], [WHOLE, Shard(0)])
    check_sharded(mesh, [OF_BATCH, OF_HEADS], WITH_BIAS, [bias])
    check_sharded(mesh, [OF_HEADS, OF_HEADS], plain, of_out=(), heads=12, heads_kv=6)
