"""bench.peers: what can be held of them without a GPU or the packages."""

import sys
from dataclasses import replace

import bench_fakes as fakes
import pytest
import torch

from bench.contenders import RefusedError
from bench.matrix import SUITES
from bench.peers import PEERS, find_peers
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS
from multiattn.reference import reference

CELL = SUITES["smoke"][1]
GROUPED = replace(CELL, heads_kv=1)


@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-cudnn", "sdpa-efficient"])
def test_sdpa_kernels_are_forced_and_the_rest_is_put_back(name):
    names = [peer.name for peer in PEERS]
    assert len(names) == len(set(names) - set(BACKENDS))
    (peer,) = find_peers((name,))
    flags = {
        "sdpa-flash": torch.backends.cuda.flash_sdp_enabled,
        "sdpa-cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "sdpa-efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    }
    before = {flag: is_on() for flag, is_on in flags.items()}
    with peer.context():
        assert {flag for flag, is_on in flags.items() if is_on()} == {name}
        assert not torch.backends.cuda.math_sdp_enabled()
    assert {flag: is_on() for flag, is_on in flags.items()} == before
    tensors = GROUPED.tensors("cpu")  # and it is told of fewer key/value heads
    call, _ = peer.build(GROUPED, tensors)
    truth, _ = reference(*tensors, causal=True)
    assert torch.allclose(call().float(), truth, atol=2e-2)  # PyTorch's own choice of a kernel, on the CPU


def test_a_kernel_of_sdpa_that_will_not_do_is_a_reason(monkeypatch):
    # In a CUDA build without a GPU the real one may find no driver, and raises. bench refuses such a machine earlier.
    if torch.version.cuda and not torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _: False)
    (peer,) = find_peers(("sdpa-cudnn",))
    with pytest.raises(RefusedError) as refusal:
        peer.prepare(CELL, CELL.tensors("cpu"), ARCHS["sm90"])
    (reason,) = refusal.value.reasons
    assert reason.code == "peer"
    assert reason.got


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("returns_lse", [False, True])
@pytest.mark.parametrize("heads_kv", [None, 1])
@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
def test_flash_attn_is_called_in_its_own_layout(name, heads_kv, returns_lse, direction, monkeypatch, tmp_path):
    (peer,) = find_peers((name,))
    cell = replace(CELL, seq=40, direction=direction, heads_kv=heads_kv)

    def flash_attn_func(q, k, v, causal):
        assert q.shape == (cell.batch, cell.seq, cell.heads, cell.head_dim)
        assert q.is_contiguous()
        assert k.shape == v.shape == (cell.batch, cell.seq, heads_kv or cell.heads, cell.head_dim)
        out, lse = reference(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=causal)
        out = out.to(q.dtype).transpose(1, 2)
        return (out, lse) if returns_lse else out

    fakes.stand_in(monkeypatch, peer.module, flash_attn_func=flash_attn_func)
    (row,) = fakes.run_once(tmp_path, replace(peer, module="torch"), cells=(cell,))
    assert row.measured


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("feature", ["blocks128_half", "blocks64_tenth"])
def test_cudnn_frontend_is_given_the_blocks_alone(feature, direction, monkeypatch, tmp_path):
    (peer,) = find_peers(("cudnn-frontend",))
    cell = replace(CELL, feature=feature, causal=False, seq=640, direction=direction, head_dim=16)

    def attend(q, k, v, blocks, size):
        rows = 640 // size
        seen = torch.zeros(1, cell.heads, rows, rows, dtype=torch.bool).scatter(3, blocks.long(), True)
        bias = seen.repeat_interleave(size, 2).repeat_interleave(size, 3)
        return reference(*(it.transpose(1, 2) for it in (q, k, v)), bias=bias)

    def forward(q, k, v, blocks, *, sparse_block_size, layout):
        assert (blocks.dtype, layout) == (torch.int32, "bshd")
        out, lse = attend(q, k, v, blocks, sparse_block_size)
        return {"o_tensor": out.to(q.dtype).transpose(1, 2), "lse_tensor": lse}

    def backward(dout, q, k, v, out, lse, blocks, *, sparse_block_size, layout):
        leaves = [it.detach().requires_grad_() for it in (q, k, v)]
        with torch.enable_grad():
            again = attend(*leaves, blocks, sparse_block_size)[0].to(q.dtype).transpose(1, 2)
        found = torch.autograd.grad(again, leaves, dout)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), found, strict=True))

    monkeypatch.delitem(sys.modules, "bench.peers_cudnn", raising=False)
    given = {"block_sparse_attention_forward": forward, "block_sparse_attention_backward": backward}
    fakes.stand_in(monkeypatch, peer.module, **given)
    (row,) = fakes.run_once(tmp_path, replace(peer, module="torch"), cells=(cell,))
    assert row.measured, row.error
    told = [it.code for it in peer.refuse(replace(cell, heads_kv=1), ())]
    assert told == ([] if direction == "fwd" else ["heads"])


def test_peers_that_have_one_head_dim_say_so():
    mla = replace(CELL, head_dim_v=128)
    refusing = {it.name for it in PEERS if "head_dim_v" in {reason.code for reason in it.why_not(mla, ARCHS["sm90"])}}
    assert refusing >= {"fa2", "tilegym"}
    assert refusing.isdisjoint({"sdpa-cudnn", "sdpa-efficient", "flex", "fa4"})
