"""bench.peers_jax: handlers that are Python stand for the kernels of the wheel flash-attn3-jax."""

import itertools
import math
from dataclasses import replace

import bench_fakes as fakes
import pytest
import torch
import xla_fakes

import bench.peers
from bench import peers_jax
from bench.contenders import RefusedError
from bench.matrix import Cell
from bench.peers import find_peers
from bench.xla_ffi import Spec
from multiattn.plan.arch import ARCHS
from multiattn.reference import reference

(FA3,) = find_peers(("fa3",))
WHEEL = FA3.instead
CELL = Cell(batch=2, heads=4, seq=40, head_dim=128, dtype="bf16", causal=False, layout="bshd")
CAUSAL = replace(CELL, causal=True, heads_kv=2)
PACKED_CELL = replace(CELL, batch=1, seq=200, causal=True, heads_kv=1, feature="packed_mixed")
CELLS = (CELL, CAUSAL, replace(CAUSAL, dtype="fp16", window=7), PACKED_CELL)


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwdbwd"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_wheel_computes_every_cell_that_it_takes(cell, direction, wheel, tmp_path):
    (row,) = fakes.run_once(tmp_path, wheel, cells=(replace(cell, direction=direction),))
    assert row.measured, row.error
    assert row.detail.startswith("wheel flash-attn3-jax")


@pytest.mark.parametrize(
    ("cell", "arch", "codes"),
    [
        (replace(CELL, head_dim=64), "sm90", ["head_dim"]),
        (replace(CELL, layout="bhsd", dtype="fp32"), "sm90", ["dtype", "strides"]),
        (replace(CAUSAL, feature="softcap30"), "sm90", ["feature"]),
        (replace(CAUSAL, feature="sinks"), "sm100", ["arch", "feature"]),
    ],
    ids=str,
)
def test_what_the_wheel_has_not_is_a_reason(cell, arch, codes):
    with pytest.raises(RefusedError) as refusal:
        replace(WHEEL, module="torch").prepare(cell, cell.tensors("cpu"), ARCHS[arch])
    assert sorted(reason.code for reason in refusal.value.reasons) == codes


def test_the_wheel_stands_in_only_where_upstream_is_missing(monkeypatch):
    def installed(*modules):
        monkeypatch.setattr(bench.peers, "_import_problem", lambda name: "" if name in modules else f"no {name}")
        return FA3.installed

    assert installed(WHEEL.module) is WHEEL
    assert "softcap30" not in WHEEL.features
    assert [reason.code for reason in FA3.why_not(CELL, ARCHS["sm80"])] == ["arch"]
    assert installed(FA3.module, WHEEL.module) is FA3
    assert FA3.why_not(CELL, ARCHS["sm80"]) == ()
    assert installed() is FA3
    (reason,) = FA3.why_not(CELL, ARCHS["sm90"])
    assert (reason.code, reason.allowed) == ("module", "flash_attn_interface")
    assert "flash-attn3-jax" in reason.hint


@pytest.mark.parametrize("lengths", [(1,), (79,), (1024,), (16384,), (1, 1, 1), (80, 1, 159, 64)])
def test_the_backward_has_rows_for_whole_tiles(lengths):
    tokens, sequences = sum(lengths), len(lengths) if len(lengths) > 1 else 0
    leading = () if sequences else (1,)
    q = Spec((*leading, tokens, 4, 128), torch.bfloat16)
    asked = peers_jax._Asked(q, q, False, (-1, -1), sequences, (max(lengths),) * 2)
    for tile in (64, 80):
        wanted = math.ceil((tokens + sequences * tile) / tile) * tile  # of each head, as the kernel's strides have it
        assert asked.rows.shape[-1] >= wanted


# ---------------------------------------------------------------- handlers


def attend(q, k, v, starts, attributes):
    """out and lse in fp64, of ``[B, S, H, D]`` or packed ``[tokens, H, D]``."""
    left = attributes["window_size_left"]
    asked = {"causal": attributes["is_causal"], "window": (left, None) if left >= 0 else None}
    asked |= {"scale": attributes["softmax_scale_val"], "compute_dtype": torch.float64}

    def one(*tensors):
        out, lse = reference(*(it.transpose(1, 2) for it in tensors), **asked)
        return out.transpose(1, 2), lse

    if not starts.numel():
        return one(q, k, v)
    parts = [one(*(it[None, first:last] for it in (q, k, v))) for first, last in itertools.pairwise(starts.tolist())]
    out, lse = (torch.cat([its[at][0] for its in parts], dim=at) for at in (0, 1))
    return out, lse


def forward(call):
    """As `flash_mha_fwd`."""
    assert len(call.arguments) == 21
    q, k, v, *others = call.arguments
    assert not any(it.numel() for place, it in enumerate(others, start=3) if place not in (6, 7))
    assert (call.attributes["num_splits"], call.attributes["pack_gqa_has_value"]) == (1, False)
    assert call.attributes["max_seqlen_q"] <= q.shape[-3]
    out, lse = attend(q.double(), k.double(), v.double(), others[3], call.attributes)
    call.results[0].copy_(out)
    call.results[1].copy_(lse)


def backward(call):
    """As `flash_mha_bwd`."""
    dout, q, k, v, out, lse, starts, *others = call.arguments
    assert len(others) == 3
    with torch.enable_grad():
        leaves = [it.double().requires_grad_() for it in (q, k, v)]
        again, lse_again = attend(*leaves, starts, call.attributes)
        grads = torch.autograd.grad(again, leaves, dout.double())
    assert torch.allclose(again.to(out.dtype), out)
    assert torch.allclose(lse_again.float(), lse)
    for result, grad in zip(call.results[:3], grads, strict=True):
        result.copy_(grad)


@pytest.fixture
def wheel(monkeypatch):
    with xla_fakes.wheel(monkeypatch, flash_mha_fwd=forward, flash_mha_bwd=backward):
        yield replace(WHEEL, module="torch", arches=())
