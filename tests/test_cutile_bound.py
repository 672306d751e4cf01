"""cuTile's kernels of rarer problems through tileiras, and that each takes what a launch binds for it."""

import re
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from multiattn import Problem
from multiattn.operands import Operands, Options, with_score
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.problem import problem_of
from multiattn.sequences import Batching

pytest.importorskip("cuda.tile")

from multiattn.cutile import bind
from multiattn.cutile.bind import bind_proven
from multiattn.cutile.claims import read_claims, tile_ir
from multiattn.cutile.families import launches_of
from multiattn.plan.cubin import read_entry

BACKEND = get("cutile")
pytestmark = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())) or "compiler found"
)
SM90 = ARCHS["sm90"]
SEQ_Q, SEQ_KV = 49, 83
MANY = {"batch": 64, "heads_q": 64, "seq_q": 65536}
"""More than 2^31 elements."""
TABLE = torch.randn(40, 2).requires_grad_()
BIAS = torch.randn(2, 2, SEQ_Q, SEQ_KV).requires_grad_()
DOCUMENTS = torch.arange(SEQ_KV) // 9
BLOCKS = create_block_mask(
    lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv], None, None, SEQ_Q, SEQ_KV, device="cpu", BLOCK_SIZE=128
)


def scored(head_dim=16, **score):
    q, k = (torch.empty(2, 2, length, head_dim, dtype=torch.bfloat16) for length in (SEQ_Q, SEQ_KV))
    named = dict.fromkeys(("softcap", "alibi_slopes", "bias", "score_mod", "block_mask")) | score
    return problem_of(*with_score(Operands(q, k, k), Options(None, None, 0.3), **named))


def plain(**sizes):
    return Problem.contiguous(**{"batch": 1, "heads_q": 2, "seq_q": 256, "head_dim": 64, **sizes})


def relative(s, b, h, q, kv):
    """An index that is computed, and clamped by the table's ends."""
    return s + TABLE[q - kv + 20, h]


ROWS = {
    "sinks": ("forward", "full", lambda: plain(has_sinks=True, causal=True)),
    "many, sinks": ("forward", "full", lambda: plain(has_sinks=True, causal=True, batch=2**17)),
    "many, a window": ("forward", "full", lambda: plain(window=(300, 20), **MANY)),
    "many, a window, gradients": ("backward", "two_pass", lambda: plain(window=(300, 20), **MANY)),
    "a negative scale": ("forward", "full", lambda: plain(causal=True, scale=-1.0, head_dim=40)),
    "a scale of zero": ("forward", "full", lambda: plain(seq_q=100, scale=0.0)),
    "many, ragged": (
        "backward", "two_pass",
        lambda: plain(head_dim=40, causal=True, scale=0.0, seq_kv=129, **MANY | {"seq_q": 65537}),
    ),
    "blocks": ("forward", "full", lambda: scored(128, block_mask=BLOCKS)),
    "blocks, gradients": ("backward", "two_pass", lambda: scored(128, block_mask=BLOCKS)),
    "gradients of a table": ("backward", "atomic", lambda: scored(score_mod=relative)),
    "gradients of a bias": ("backward", "two_pass", lambda: scored(bias=BIAS)),
    "gradients of a wide bias": ("backward", "atomic", lambda: scored(64, bias=BIAS)),
}  # fmt: skip
AT_NIGHT = {"many, a window", "many, a window, gradients", "blocks, gradients", "gradients of a wide bias"}
"""Others have their arguments, one at a time."""


@pytest.mark.parametrize("name", [pytest.param(it, marks=pytest.mark.nightly if it in AT_NIGHT else ()) for it in ROWS])
def test_what_is_compiled_takes_what_is_bound(name):
    direction, variant, make = ROWS[name]
    plan = make_plan(BACKEND, make(), SM90, direction=direction, variant=variant, probe=False)
    launches = launches_of(plan)
    for launch, made in zip(launches, BACKEND.op(direction).export(plan, ()), strict=True):
        bind_proven(launch, tile_ir(made.cubin), read_entry(made.cubin, made.kernel))
        assert launch.is_64bit == ("many" in name)


def test_packed_batches_of_other_lengths_take_the_same_code():
    """Its claims are read once."""
    problem = plain(seq_q=600, batching=Batching.packed(5))
    plan = make_plan(BACKEND, problem, SM90, direction="backward", variant="atomic", probe=False)
    exported, read = BACKEND.backward.export(plan, ()), None
    for sizes in ({}, {"seq_q": 904, "seq_kv": 1208}):
        for launch, made in zip(launches_of(replace(plan, problem=replace(problem, **sizes))), exported, strict=True):
            bind_proven(launch, tile_ir(made.cubin), read_entry(made.cubin, made.kernel))
        read = read or read_claims.cache_info().misses
    assert read_claims.cache_info().misses == read


@pytest.mark.parametrize("batch", [2, pytest.param(2**24, marks=pytest.mark.nightly)])
def test_what_is_not_what_was_compiled_is_found(batch):
    """Captured tensors of every type, in 32 bits and in 64: types, and the strides that gathers take."""
    table, rows = torch.zeros(3, SEQ_KV, dtype=torch.uint8).T, torch.linspace(-3, 300, SEQ_Q)
    seen, documents = torch.ones(SEQ_KV, 4, dtype=torch.bool), torch.zeros(SEQ_KV, dtype=torch.int64)

    def score_mod(s, b, h, q, kv):
        return torch.where(seen[kv, h], s + table[kv, b], documents[q - kv] * rows[q])

    problem = scored(64, softcap=3.0, alibi_slopes=torch.ones(2), bias=BIAS.detach(), score_mod=score_mod)
    plan = make_plan(BACKEND, replace(problem, batch=batch), SM90, probe=False)
    (exported,) = BACKEND.forward.export(plan, ("tileir",))
    binding, text = exported.binding, exported.texts["tileir"].decode()
    assert {it.kind for it in binding.arguments[1:3]} == {"i32" if batch == 2 else "i64"}
    bind.prove(binding, text)
    places = {it.tensor: place for place, it in enumerate(binding.arguments) if isinstance(it, abi.Pointer)}
    for tensor, rank in (("captured1", 4), ("captured2", 2)):
        one = places[tensor] + rank + 1  # its first stride: taken for its second
        swapped = re.sub(rf"%arg({one}|{one + 1})\b", lambda it, both=2 * one + 1: f"%arg{both - int(it[1])}", text)
        with pytest.raises(ValueError, match=f"arrays: argument {one} is .*arg{one + 1} there"):
            bind.prove(binding, swapped)
    with pytest.raises(ValueError, match="parameters: got"):
        bind.prove(replace(binding, constants=binding.constants | {"captured2_dtype": "float64"}), text)
    arguments = [abi.Pointer(tensor="q") if it == abi.Pointer(tensor="captured1") else it for it in binding.arguments]
    with pytest.raises(ValueError, match="got"):
        bind.prove(replace(binding, arguments=tuple(arguments)), text)
