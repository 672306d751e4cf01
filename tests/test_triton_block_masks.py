"""Block masks in Triton: how tiles are cut, and what is compiled. Parity has the numbers."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from multiattn.inspect.facts import read_plan
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import problem_of
from multiattn.triton import BACKEND
from multiattn.triton.plain import tiles, within_blocks
from multiattn.triton.plain_backward import passes, within

DOCUMENTS = (torch.arange(512) // 70).int()
SEQ_Q, SEQ_KV = 150, 180


def documents(b, h, q, kv):
    return DOCUMENTS[q] == DOCUMENTS[kv]


def causal(b, h, q, kv):
    return q >= kv


def block_mask(mask_mod, size=64, *, batch=None, heads=None, seq_q=SEQ_Q, seq_kv=SEQ_KV):
    return create_block_mask(mask_mod, batch, heads, seq_q, seq_kv, device="cpu", BLOCK_SIZE=size)


def test_tiles_divide_blocks_and_stay_as_they_are_without():
    q = torch.empty(1, 1, 256, 64, dtype=torch.float16)
    config = passes(tiles(128, 64, 4, 2), tiles(64, 256, 8, 3))
    problem = make_problem(q, None)
    assert within(config, problem) == config
    problem = make_problem(q, block_mask(causal, (48, 128), seq_q=256, seq_kv=256))
    got = within(config, problem)
    assert got == passes(tiles(16, 64, 4, 2), tiles(16, 128, 8, 3))
    assert within_blocks(tiles(128, 256, 4, 2), problem) == tiles(16, 128, 4, 2)


def make_problem(q, mask):
    return problem_of(*with_score(Operands(q, q, q), Options(), None, None, None, None, mask))


# ---------------------------------------------------------------- compiled


@pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))
@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")
@pytest.mark.parametrize(
    ("direction", "variant", "head_dim"),
    [
        ("forward", "full", 128),
        pytest.param("backward", "two_pass", 64, marks=pytest.mark.nightly),
        pytest.param("forward", "full", 64, marks=pytest.mark.nightly),
        pytest.param("backward", "two_pass", 128, marks=pytest.mark.nightly),
    ],
)
def test_as_many_tiles_are_in_flight_as_without_a_mask(direction, variant, head_dim):
    """Loads from lists and documents go through no shared memory, and no wgmma waits for another."""
    q = torch.empty(1, 8, 256, head_dim, dtype=torch.bfloat16)
    smem = []
    for mask in (None, block_mask(documents, 128, seq_q=256, seq_kv=256)):
        problem = make_problem(q, mask)
        plan = make_plan(BACKEND, problem, by_name("sm90"), direction=direction, variant=variant, probe=False)
        facts = read_plan(plan)
        smem.append([it.smem_bytes for it in facts])
    assert smem[0] == smem[1]
    for it in facts:
        assert it.hot_spills <= 2
        assert 0 < it.hot["WARPGROUP"] < it.hot["HGMMA"]
