"""Modified scores in Triton: what is compiled for them. Parity has the numbers."""

import pytest
import torch

from multiattn.inspect.facts import read_plan
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import problem_of
from multiattn.triton import BACKEND

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
