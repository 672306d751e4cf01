"""Modified scores in Triton beyond what parity runs: any tiles, what lies beyond the ends, what is compiled."""

from dataclasses import replace

import pytest
import torch

from multiattn import fmha, reference
from multiattn.inspect.facts import read_plan
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import problem_of
from multiattn.triton import BACKEND, GLUON_VARIANTS
from multiattn.triton.decode import TritonSplitConfig
from multiattn.triton.plain import tiles
from multiattn.triton.plain_backward import passes
from parity.case import Case
from parity.launch import launch_gradients, launch_plan, plan_case, prepare_case, prepare_gradients, save_forward
from parity.results import Contender

CPU = torch.device("cpu")
VARIANTS = [
    (direction, variant.name)
    for direction in ("forward", "backward")
    for variant in BACKEND.op(direction).variants
    if variant.capability.scores and "cpu" in variant.capability.arches and variant.name not in GLUON_VARIANTS
]


@pytest.mark.parametrize(("direction", "variant"), VARIANTS)
def test_tiles_of_any_shape(direction, variant):
    """Every position counts, some scores are -inf, and there are rows and keys beyond the ends."""
    case = Case(
        name="tiles", why="", heads_q=4, heads_kv=2, seq_q=75, seq_kv=41, head_dim=24, causal=True,
        bias="hqk", bias_hides=True, alibi="heads", softcap=1.5,
    )  # fmt: skip
    inputs, truth = prepare_case(case, CPU)
    plan = plan_case(case, Contender(backend="triton", variant=variant, direction=direction), inputs)
    config = tiles(16, 32, 4, 1)
    if direction == "backward":
        config = passes(config, tiles(32, 16, 4, 1) if "two_pass" in variant else None)
    elif variant == "split_keys":
        config = TritonSplitConfig(tile_m=16, tile_n=32, warps=4, stages=1, splits=2)
    plan = replace(plan, config=config)
    if direction == "forward":
        results = launch_plan(plan, inputs)
    else:
        upstream, truth = prepare_gradients(case, CPU)
        results = launch_gradients(plan, inputs, save_forward(case, "triton", CPU), upstream)
    for got, expected in zip(results.all, truth.all, strict=True):
        expected.check(got, plan)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "modify",
    [
        lambda score, b, h, q, kv: score + torch.log(38.0 - q),
        lambda score, b, h, q, kv: torch.sqrt(torch.abs(score)),
    ],
    ids=["a score of no number", "a slope without bound"],
)
def test_what_lies_beyond_the_ends_reaches_nothing(modify, deterministic):
    """The first is -inf and nan for queries 37 and on; the second has an infinite slope where q is 0."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, length, 16, generator=generator).half() for length in (37, 45, 45))
    results = []
    for attend in (
        lambda *qkv: fmha(*qkv, score_mod=modify, backend="triton", deterministic=deterministic),
        lambda *qkv: reference(*qkv, score_mod=modify)[0],
    ):
        given = [it.clone().requires_grad_() for it in (q, k, v)]
        results.append(torch.autograd.grad(attend(*given).square().sum(), given))
    for got, true in zip(*results, strict=True):
        torch.testing.assert_close(got, true, rtol=0.02, atol=0.02)


# ---------------------------------------------------------------- compiled


@pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))
@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.nightly), 128])
@pytest.mark.parametrize(
    ("direction", "variant"),
    [("forward", "full"), pytest.param("backward", "two_pass", marks=pytest.mark.nightly)],
)
def test_a_walk_over_keys_spills_no_score_and_holds_no_bias_in_shared_memory(direction, variant, head_dim):
    q, k, v = (torch.empty(1, 8, 256, head_dim, dtype=torch.bfloat16) for _ in range(3))
    smem = []
    for bias in (None, torch.empty(1, 8, 256, 256, dtype=torch.bfloat16)):
        problem = problem_of(*with_score(Operands(q, k, v), Options(), 30.0, None, bias, None))
        plan = make_plan(BACKEND, problem, by_name("sm90"), direction=direction, variant=variant, probe=False)
        facts = read_plan(plan)[0]
        assert facts.hot_spills == 0
        assert 0 < facts.hot["WARPGROUP"] < facts.hot["HGMMA"]
        smem.append(facts.smem_bytes)
    assert smem[0] == smem[1]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_backward_with_a_bias_has_tiles_of_its_own(head_dim):
    """So has one that reads an element for each key; a softcap takes no registers that count."""
    q = torch.empty(1, 8, 256, head_dim, dtype=torch.bfloat16)
    plain, capped, of_keys, biased = (
        make_plan(
            BACKEND, problem_of(*with_score(Operands(q, q, q), Options(), cap, None, bias, None)), by_name("sm90"),
            direction="backward", variant="two_pass", probe=False,
        ).config
        for cap, bias in (
            (None, None),
            (30.0, None),
            (None, torch.empty(1, 8, 1, 256)),
            (None, torch.empty(1, 8, 256, 256)),
        )
    )  # fmt: skip
    assert plain == capped
    assert of_keys == biased
    assert biased.tile_m * biased.tile_n // biased.warps < plain.tile_m * plain.tile_n // plain.warps
