"""Packed batches on a GPU: lengths that change under a captured graph, and no code for other lengths."""

from __future__ import annotations

import pytest
import torch

import multiattn
from multiattn.plan.backend import BACKENDS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

ROWS = 600


def starts(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)


def call(tensors, cu_seqlens, backend, **options):
    longest = {"max_seqlen_q": ROWS, "max_seqlen_kv": ROWS}
    named = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "causal": True}
    return multiattn.fmha_varlen(*tensors, **named, **longest, backend=backend, **options)


def draw(rows=ROWS, head_dim=64):
    return [torch.randn(rows, heads, head_dim, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_serves_all_lengths(backend):
    leaves = [it.requires_grad_() for it in draw()]
    cu_seqlens = starts(300, 0, 100, 150, 50)
    dout = torch.randn_like(leaves[0])

    def train():
        out = call(leaves, cu_seqlens, backend)
        return out, *torch.autograd.grad(out, leaves, dout)

    train()  # compiles
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        train()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = train()
    for lengths in ((1, 2, 3, 4, 5), (600, 0, 0, 0, 0), (0, 100, 200, 7, 200)):
        cu_seqlens.copy_(starts(*lengths))
        graph.replay()
        out = call(leaves, cu_seqlens.clone(), "reference")
        expected = (out, *torch.autograd.grad(out, leaves, dout))
        for got, want in zip(results, expected, strict=True):
            torch.testing.assert_close(got.float(), want.float(), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_200_batches_compile_nothing_after_the_first(backend, own_caches):
    """By the files that compilers leave: all of them keep what they make on disk."""
    generator = torch.Generator().manual_seed(0)

    def train():
        lengths = torch.randint(1, 400, (int(torch.randint(1, 40, (), generator=generator)),), generator=generator)
        leaves = [it.requires_grad_() for it in draw(int(lengths.sum()), head_dim=128)]
        call(leaves, starts(*lengths.tolist()), backend).sum().backward()
        torch.cuda.synchronize()

    def compiled():
        return {path for folder in own_caches for path in folder.rglob("*")}

    train()
    before = compiled()
    for _ in range(200):
        train()
    assert compiled() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_waits_for_the_device(backend):
    leaves = [it.requires_grad_() for it in draw()]
    cu_seqlens = starts(300, 0, 100, 150, 50)
    call(leaves, cu_seqlens, backend).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(leaves, cu_seqlens, backend).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
