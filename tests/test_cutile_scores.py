"""cuTile's kernels with modified scores: what is launched and compiled for them. Parity has the numbers."""

import math
import re
from dataclasses import replace

import pytest
import torch

from multiattn.cutile.families import launches_of
from multiattn.cutile.forward import CutileConfig
from multiattn.mask import band_of
from multiattn.operands import Operands, Options, with_score
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.problem import problem_of

pytest.importorskip("cuda.tile")

from cutile_checks import make_inputs

from multiattn.cutile import bind
from multiattn.cutile.compile import get_kernel, get_signature

BACKEND = get("cutile")
SMALL = CutileConfig(tile_m=32, tile_n=32)
LAZY = replace(SMALL, lazy_max=True)
SEQ_Q, SEQ_KV = 49, 83
SLOPES = torch.tensor([[0.5, 0.1], [-0.2, 1.0]])
ROWS = torch.linspace(-3, 300, SEQ_Q)


def hidden_bias():
    """-inf for all of the first keys, and for all keys of some queries."""
    bias = torch.randn(1, 2, SEQ_Q, SEQ_KV, generator=torch.Generator().manual_seed(1))
    bias[..., :40], bias[:, 1, 5:9] = -math.inf, -math.inf
    return bias


def after(s, b, h, q, kv):
    """Beyond the end of the queries it is NaN, and so is its slope."""
    return s * torch.sqrt(SEQ_Q - 1 - q)


SCORES = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "large": {"score_mod": lambda s, b, h, q, kv: s + ROWS[q]},
    "hidden": {"bias": hidden_bias()},
    "after": {"score_mod": after},
    "all": {"softcap": 3.0, "alibi_slopes": SLOPES[0], "bias": hidden_bias()},
}


def inputs(head_dim=16):
    return make_inputs(batch=2, heads_q=2, seq_q=SEQ_Q, seq_kv=SEQ_KV, head_dim=head_dim)


def given(q, k, v, *, causal=False, window=None, scale=None, **score):
    """The operands of a call, and its problem."""
    named = dict.fromkeys(("softcap", "alibi_slopes", "bias", "score_mod")) | score
    plain = Options(*band_of(causal, window).window, scale)
    operands, options = with_score(Operands(q, k, v), plain, **named)
    return operands, problem_of(operands, options)


# ---------------------------------------------------------------- launches


def plans(target="sm90", **options):
    """A forward, and both backwards."""
    _, problem = given(*inputs(head_dim=64), **options)
    yield make_plan(BACKEND, problem, ARCHS[target], config=LAZY, probe=False)
    for variant in ("two_pass", "atomic"):
        yield make_plan(BACKEND, problem, ARCHS[target], direction="backward", variant=variant, probe=False)


def modified_launches(**options):
    """Those with products."""
    return [it for plan in plans(**options) for it in launches_of(plan) if "captured" in it.optional]


def test_programs_have_code_of_their_own_and_numbers_do_not():
    kinds = ({}, {"softcap": 30.0}, {"softcap": 50.0}, {"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES[0]})
    none, softcap, other, *alibi = (modified_launches(**kind) for kind in kinds)
    assert len(softcap) == 4
    for launches in zip(none, softcap, *alibi, strict=True):
        assert len({get_kernel(it) for it in launches}) == len({get_signature(it).symbol for it in launches}) == 4
    for one, two in zip(softcap, other, strict=True):
        assert get_kernel(one) is get_kernel(two)
        assert get_signature(one) == get_signature(two)
        assert one.binding != two.binding
        assert one.binding.arguments[:-2] == two.binding.arguments[:-2]


def test_arrays_and_numbers_come_as_tuples_at_their_places():
    for launch in modified_launches(**SCORES["all"]):
        assert launch.tensors[-2:] == ("captured0", "captured1")
        assert all(isinstance(it, float) for it in launch.scalars["derived"])
    forward = launch_of_forward(softcap=3.0, causal=True)
    assert not forward.constants.lazy_max
    assert not forward.constants.diagonal_first
    assert launch_of_forward(causal=True).constants.lazy_max


def launch_of_forward(**options):
    return launches_of(next(plans(**options)))[0]


@pytest.mark.parametrize("kind", ["all", "batches"])
@pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())))
def test_what_is_compiled_takes_what_is_bound(kind):
    """Captured tensors of every type, in 32 bits and in 64: types, and the strides that gathers take."""
    table = torch.zeros(3, SEQ_KV, dtype=torch.uint8).T
    seen, documents = torch.ones(SEQ_KV, 4, dtype=torch.bool), torch.zeros(SEQ_KV, dtype=torch.int64)

    def score_mod(s, b, h, q, kv):
        return torch.where(seen[kv, h], s + table[kv, b], documents[q - kv] * ROWS[q])

    (plan, *_) = plans(**SCORES["all"] | {"score_mod": score_mod})
    plan = replace(plan, problem=replace(plan.problem, batch=2**24)) if kind == "batches" else plan
    (exported,) = BACKEND.forward.export(plan, ("tileir",))
    binding, text = exported.binding, exported.texts["tileir"].decode()
    assert {it.kind for it in binding.arguments[1:3]} == {"i64" if kind == "batches" else "i32"}
    bind.prove(binding, text)
    places = {it.tensor: place for place, it in enumerate(binding.arguments) if isinstance(it, abi.Pointer)}
    for tensor, rank in (("captured1", 4), ("captured2", 2)):
        one = places[tensor] + rank + 1  # its first stride: taken for its second
        swapped = re.sub(rf"%arg({one}|{one + 1})\b", lambda it, both=2 * one + 1: f"%arg{both - int(it[1])}", text)
        with pytest.raises(ValueError, match=f"arrays: argument {one} is .*arg{one + 1} there"):
            bind.prove(binding, swapped)
    with pytest.raises(ValueError, match="parameters: got"):
        bind.prove(replace(binding, constants=binding.constants | {"captured2_dtype": "float64"}), text)
