"""Triton's backward beyond what parity runs: infinite weights, far rows, bits, and what is planned."""

from dataclasses import replace

import gradient_checks
import pytest
import torch
from gradient_checks import make_tensors

from multiattn import Problem
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import make_plan
from multiattn.problem import problem_of
from multiattn.triton import BACKEND, GLUON_VARIANTS, plain_backward
from multiattn.triton.calls import calls_of
from multiattn.triton.plain import tiles
from multiattn.triton.plain_backward import passes, within

VARIANTS = {
    variant.name: variant
    for variant in BACKEND.backward.variants
    if "cpu" in variant.capability.arches and variant.name not in GLUON_VARIANTS  # whose tiles are of one size
}


def config_of(variant, keys, dq=(32, 16, 4, 1)):
    """Tiles of the test's choice, whose heads take turns: of 4 heads 3, then 1."""
    one_pass = dict(VARIANTS[variant].flags)["one_pass"]
    config = tiles(*keys, heads_together=3)
    return passes(config, None if one_pass else tiles(*dq, heads_together=3))


def plan_of(q, k, v, *, variant, config=None, **options):
    problem = Problem.of(q, k, v, **options)
    return make_plan(BACKEND, problem, by_name("cpu"), direction="backward", variant=variant, config=config)


def run(q, k, v, dout, **how):
    """dq, dk and dv of one variant."""
    return gradient_checks.run(plan_of(q, k, v, **how), q, k, v, dout)


WINDOWS = ((7, 3), (20, 35), (None, 5), (30, None))


@pytest.mark.parametrize("variant", ["atomic", "two_pass"])
def test_infinite_weights_beyond_the_ends_of_a_window_are_zero(variant):
    """All scores are -1225, those of keys beyond the end, which a window reaches, 0."""
    q, k, v, dout = make_tensors(heads_q=1, seq_q=40, seq_kv=40, head_dim=16)
    q, k = torch.full_like(q, 8.75), torch.full_like(k, -8.75)
    config = config_of(variant, (16, 16, 4, 1))
    plan = plan_of(q, k, v, variant=variant, config=config, window=(38, 35), scale=1.0)
    gradient_checks.check(plan, q, k, v, dout)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_arches_that_mask_every_block_agree_to_the_last_bit(monkeypatch, window):
    """They have their operands in registers; the interpreter is like the others."""
    tensors, constants = make_tensors(seq_q=75, seq_kv=90, head_dim=16), plain_backward.constants_of
    ways = []
    for in_registers in (False, True):
        own = {"register_operands": in_registers}
        monkeypatch.setattr(
            plain_backward, "constants_of", lambda *given, own=own, **rest: constants(*given, **rest | own)
        )
        ways.append(run(*tensors, variant="two_pass", config=config_of("two_pass", (16, 16, 4, 1)), window=window))
    assert all(map(torch.equal, *ways))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("far", ["q", "k"])
def test_offsets_beyond_32_bits(variant, far):
    """Forty rows, 2^26 elements apart: 5 GB of address space, of which next to nothing is touched."""
    q, k, v, dout = make_tensors(heads_q=1, seq_q=40, seq_kv=40, head_dim=16)
    step = 1 << 26
    given = {"q": q, "k": k}
    memory = torch.empty(40 * step, dtype=torch.bfloat16).as_strided((1, 1, 40, 16), (0, 0, step, 1))
    given[far] = memory.copy_(given[far])
    near, moved = (run(*tensors, v, dout, variant=variant, causal=True) for tensors in ((q, k), given.values()))
    assert all(map(torch.equal, near, moved))


def test_two_passes_agree_to_the_last_bit():
    """Each time, in any order of heads, through descriptors or pointers."""
    tensors = make_tensors(heads_q=4, heads_kv=2, seq_q=40, seq_kv=50, head_dim=72)
    config = config_of("two_pass", (16, 32, 4, 1))
    ways = config, replace(config, heads_together=1), replace(config, descriptors=True)
    first, *others = (run(*tensors, variant="two_pass", config=how, causal=True) for how in ways)
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


# ---------------------------------------------------------------- gradients of a bias


def with_bias(*, deterministic=False, requires_grad=True):
    q = torch.empty(1, 8, 256, 64, dtype=torch.bfloat16)
    bias = torch.empty(1, 8, 256, 256, dtype=torch.bfloat16, requires_grad=requires_grad)
    options = Options(deterministic=deterministic)
    return problem_of(*with_score(Operands(q, q, q), options, None, None, bias[:, :1], None))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fixed_order_takes_no_atomics(deterministic):
    plan = make_plan(
        BACKEND, with_bias(deterministic=deterministic), by_name("cpu"), direction="backward", variant="two_pass"
    )
    text = calls_of(plan)[1].table.rows["C"].value.score.load_gradients.src
    assert ("atomic" in text, "store" in text) == (not deterministic, deterministic)


def test_tiles_leave_registers_for_addresses():
    """In the backward alone, in its pass over the queries, where somebody wants a gradient."""
    config = passes(tiles(128, 64, 4, 2), tiles(128, 64, 4, 3))
    assert within(config, with_bias()) == passes(tiles(64, 64, 4, 2), tiles(128, 64, 4, 3))
    assert within(config, with_bias(requires_grad=False)) == config
