"""Gradients of captured tensors in cuTile's backward: what is launched and compiled. Parity has the numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import multiattn
from multiattn.cutile.families import launches_of
from multiattn.mask import band_of
from multiattn.operands import Operands, Options, with_score
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.problem import problem_of

pytest.importorskip("cuda.tile")

from cutile_checks import make_inputs

from multiattn.cutile import bind, claims
from multiattn.cutile.compile import get_kernel, get_signature, make_cubins

BACKEND = get("cutile")
BATCH, HEADS, SEQ_Q, SEQ_KV = 2, 2, 49, 83


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def relative(table):
    """An index that is computed, and clamped by the table's ends."""
    return lambda s, b, h, q, kv: s + table[q - kv + 20, h]


def gated(rows, keys):
    """Slopes of scores that are no numbers, and two tensors."""
    return lambda s, b, h, q, kv: s * rows[b, q] + keys[kv] * 0.5


def hiding(bias):
    with torch.no_grad():
        bias[..., 10:30], bias[:, :, 3] = -math.inf, -math.inf
    return bias


def blocks():
    def mask_mod(b, h, q, kv):
        return (kv >= q - 20) & (q % 7 != 2)

    return create_block_mask(mask_mod, None, HEADS, SEQ_Q, SEQ_KV, device="cpu", BLOCK_SIZE=(16, 32))


SCORES = {
    "full_bias": lambda: {"bias": values(BATCH, HEADS, SEQ_Q, SEQ_KV)},
    "bias_of_keys": lambda: {"bias": values(1, HEADS, 1, SEQ_KV), "causal": True},
    "bias_of_rows": lambda: {"bias": values(BATCH, 1, SEQ_Q, 1), "softcap": 2.0},
    "hidden": lambda: {"bias": hiding(values(1, 1, SEQ_Q, SEQ_KV)), "window": (30, 9)},
    "slopes": lambda: {"alibi_slopes": values(BATCH, HEADS), "window": (20, 40)},
    "table": lambda: {"score_mod": relative(values(40, HEADS))},
    "two": lambda: {"score_mod": gated(values(BATCH, SEQ_Q), values(SEQ_KV)), "causal": True},
    "blocks": lambda: {"bias": values(1, HEADS, SEQ_Q, SEQ_KV), "block_mask": blocks()},
}


def given(q, k, v, *, causal=False, window=None, deterministic=False, **score):
    """The operands of a call, and its problem."""
    named = dict.fromkeys(("softcap", "alibi_slopes", "bias", "score_mod", "block_mask")) | score
    options = Options(*band_of(causal, window).window, 0.3, deterministic=deterministic)
    operands, options = with_score(Operands(q, k, v), options, **named)
    return operands, problem_of(operands, options)


def inputs(heads_kv=1):
    return make_inputs(batch=BATCH, heads_q=HEADS, heads_kv=heads_kv, seq_q=SEQ_Q, seq_kv=SEQ_KV, head_dim=16)


def test_gradients_of_a_call():
    """A call of the public function gives one in the dtype of the bias."""
    bias = values(1, HEADS, SEQ_Q, 1).detach().bfloat16().requires_grad_()
    grads = []
    for backend in ("cutile", "reference"):
        out, lse = multiattn.fmha(*inputs(), bias=bias, causal=True, backend=backend, return_lse=True)
        grads.append(torch.autograd.grad(out.float().sum() + lse.sin().sum(), bias)[0])
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------- launches


def launches(variant="two_pass", **options):
    """The launches of a backward on sm90, in which a block owns keys."""
    _, problem = given(*inputs(), **options)
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction="backward", variant=variant, probe=False)
    return [it for it in launches_of(plan) if "dcaptured" in it.optional]


def test_only_what_wants_a_gradient_has_a_sum_and_code_for_it():
    bias = values(1, HEADS, 1, SEQ_KV)
    (plain,), (wanted,) = launches(bias=bias.detach()), launches(bias=bias)
    (first,), (second,) = launches(score_mod=gated(bias[0, :, 0], bias[0, 0, 0])), launches(**SCORES["two"]())
    assert plain.optional["dcaptured"] == ()
    assert wanted.tensors[-1] == "dcaptured0"
    assert second.tensors[-2:] == ("dcaptured0", "dcaptured1")
    assert len({get_kernel(it) for it in (plain, wanted, first, second)}) == 4
    assert len({get_signature(it).symbol for it in (plain, wanted, first, second)}) == 4


@pytest.mark.parametrize(("score", "variant"), [("table", "atomic"), ("full_bias", "two_pass")])
@pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())))
def test_what_is_compiled_takes_what_is_bound(score, variant):
    (launch,) = launches(variant, **SCORES[score]())
    signature = get_signature(launch)
    (cubin,) = make_cubins([launch], ARCHS["sm90"])
    text = claims.tile_ir(cubin)
    binding = bind.bind_proven(launch, text, abi.read_entry(cubin, signature.symbol))
    (place,) = (at for at, it in enumerate(binding.arguments) if it == abi.Pointer(tensor="dcaptured0"))
    arguments = list(binding.arguments)
    arguments[place] = abi.Pointer(tensor="q")
    with pytest.raises(ValueError, match="parameters: got"):
        bind.prove(replace(binding, arguments=tuple(arguments)), text)
