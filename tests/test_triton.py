"""Triton's forward beyond what parity runs: tiles of any shape, far rows, and what is planned for which problem.

Parity runs every variant with its rules on the CPU. Here kernels get configs that no rule has, through the interpreter.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from multiattn import Problem, explain, fmha
from multiattn.plan.arch import GRID_MAX, by_name
from multiattn.triton.ladder import STEPS
from multiattn.triton.plain import TritonConfig, smem_bytes
from multiattn.triton.plain_forward import why_not_fit
from parity.case import Case
from parity.launch import launch_plan, plan_case, prepare_case
from parity.results import Contender

VARIANTS = ("full", "pointer_full")
SM90 = by_name("sm90")


def run(case, variant, config):
    """out and lse of one variant with a config of the test's choice, as right as parity asks for."""
    inputs, truth = prepare_case(case, torch.device("cpu"))
    plan = plan_case(case, Contender(backend="triton", variant=variant), inputs)
    outputs = launch_plan(replace(plan, config=config), inputs)
    for got, expected in zip(outputs.all, truth.all, strict=True):
        expected.check(got, plan)
    return outputs


def problem_of(**options):
    return Problem.contiguous(**{"batch": 1, "heads_q": 1, "seq_q": 64, "head_dim": 64, **options})


WINDOWS = ((7, 3), (90, 30), (None, 5), (40, None))
"""Narrower than a tile, with full blocks between two masked ones, with no bound on a side."""
MASKS = {"full": {}, "causal": {"causal": True}, **{str(it): {"window": it} for it in WINDOWS}}


CONFIGS = (
    TritonConfig(tile_m=32, tile_n=16, warps=4, stages=1, heads_together=3),  # of 4 heads: 3, then 1
    TritonConfig(tile_m=16, tile_n=64, warps=4, stages=2),
    TritonConfig(tile_m=128, tile_n=32, warps=8, stages=3, heads_together=8),
)


def _tiles():
    """Each config with half of the masks, each mask with one config or two. The rest is for the night."""
    for (i, config), (j, (name, mask)) in itertools.product(enumerate(CONFIGS), enumerate(MASKS.items())):
        marks = () if (i + j) % 2 == 0 else pytest.mark.nightly
        yield pytest.param(config, mask, id=f"{config}-{name}", marks=marks)


@pytest.mark.parametrize(("config", "mask"), list(_tiles()))
def test_tiles_of_any_shape_give_the_same(config, mask):
    """To the last bit, through descriptors and through pointers. Among them rows that see no key."""
    case = Case(name="tiles", why="", heads_q=4, heads_kv=2, seq_q=203, seq_kv=113, head_dim=24, **mask)
    first, second = (run(case, variant, config) for variant in VARIANTS)
    assert all(map(torch.equal, first.all, second.all))


def test_a_window_begins_and_ends_at_every_place_of_a_block():
    """With weights so even that one key too many or too few shows."""
    config = TritonConfig(tile_m=16, tile_n=32, warps=4, stages=1)
    for offset in range(32):
        case = Case(
            name="places", why="", heads_q=1, heads_kv=1, seq_q=70, seq_kv=60 + offset, head_dim=16,
            window=(50, 9), scale=0.1,
        )  # fmt: skip
        run(case, "full", config)


@pytest.mark.parametrize("variant", [*STEPS])
@pytest.mark.parametrize("sinks", ["normal", "large", "some"])
def test_sinks(variant, sinks):
    """In each rung's domain; among the rows are some that see no key."""
    config = TritonConfig(tile_m=32, tile_n=16, warps=4, stages=1)
    run(Case(name="sinks", why="", seq_q=90, seq_kv=70, head_dim=16, window=(40, 0), sinks=sinks), variant, config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_offsets_beyond_32_bits(variant):
    """Forty keys, 2^26 elements apart: 5 GB of address space, of which next to nothing is touched."""
    q, k, v = (torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    step = 1 << 26
    far = torch.empty(40 * step, dtype=torch.bfloat16).as_strided((1, 1, 40, 16), (0, 0, step, 1)).copy_(k)
    outs = [fmha(q, keys, v, causal=True, backend="triton", variant=variant) for keys in (far, k)]
    assert torch.equal(*outs)


def test_the_best_variant_is_the_descriptor_where_it_can_be():
    q, k, v = (torch.zeros(1, 2, 40, 16, dtype=torch.bfloat16) for _ in range(3))
    assert explain(q, k, v, backend="triton").variant == "full"
    assert explain(q, k[:, :1].expand(-1, 2, -1, -1), v, backend="triton").variant == "pointer_full"
    unaligned = torch.zeros(1 + 2 * 40 * 25).bfloat16()[1:].as_strided((1, 2, 40, 24), (0, 40 * 25, 25, 1))
    reasons = explain(unaligned, unaligned[:, :1].expand(-1, 2, -1, -1), unaligned, variant="full", backend="triton")
    assert {reason.code for reason in reasons} == {"alignment", "strides"}


def test_a_config_that_does_not_fit_is_a_reason():
    problem = problem_of(head_dim=256)
    large = TritonConfig(tile_m=128, tile_n=128, warps=8, stages=4)
    assert smem_bytes(problem, SM90, large) > SM90.smem_per_block
    assert [reason.code for reason in why_not_fit(problem, SM90, large)] == ["config"]
    odd = TritonConfig(tile_m=48, tile_n=8, warps=3, stages=0)
    got = [reason.got for reason in why_not_fit(problem, SM90, odd)]
    assert got == ["tile_m=48", "tile_n=8", "warps=3", "stages=0"]


def test_a_grid_that_is_too_large_is_a_reason():
    config = TritonConfig(tile_m=64, tile_n=64, warps=4, stages=2)
    assert why_not_fit(problem_of(head_dim=8), SM90, config) == ()
    large = problem_of(batch=1 << 20, heads_q=1 << 11, heads_kv=1, head_dim=8)
    (reason,) = why_not_fit(large, SM90, config)
    assert (reason.code, reason.got) == ("config", f"{GRID_MAX + 1} blocks")
