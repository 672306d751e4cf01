"""The Gluon kernel interpreted: orders of partitions, a window's cost, and bugs, planted here, each found."""

from dataclasses import replace

import pytest
import torch
from gluon_bugs import BUGS
from gluon_on_cpu import PLAIN, case_of, changed, check, launched

from multiattn import explain, fmha
from multiattn.problem import Problem
from multiattn.triton.cpu.gluon.errors import DeadlockError
from multiattn.triton.cpu.gluon.source import as_python
from multiattn.triton.gluon_forward import GluonConfig, constants_of
from multiattn.triton.kernels.gluon import scores
from multiattn.triton.kernels.gluon.schedule import LaunchSizes

CONFIGS = {
    "dynamic": replace(PLAIN, scheduler="dynamic"),
    "tight": GluonConfig(tile_m=192, tile_n=32, stages=2, pingpong=True, lazy_max=True),
    "slots": GluonConfig(tile_m=128, tile_n=16, stages=5, q_slots=3, lazy_max=True),
}
CASES = {"causal": case_of("len_203x113_causal"), "packed": case_of("varlen_gpt_oss")}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", CASES)
def test_every_order_of_partitions_gives_the_same_bits(case, config):
    expected = launched(CASES[case], CONFIGS[config])[0]
    for seed in range(2):
        found = launched(CASES[case], CONFIGS[config], seed)[0]
        assert torch.equal(found.out.nan_to_num(7.0), expected.out.nan_to_num(7.0))
        assert torch.equal(found.lse, expected.lse)


def test_a_caller_gets_it_by_name_alone():
    q = torch.randn(1, 2, 70, 64, dtype=torch.bfloat16)
    assert explain(q, q, q, backend="triton").variant == "full"
    plan = explain(q, q, q, backend="triton", variant="warp_specialized")
    assert plan.config.pingpong
    assert plan.config.lazy_max
    out = fmha(q, q, q, backend="triton", variant="warp_specialized", causal=True)
    torch.testing.assert_close(out, fmha(q, q, q, backend="reference", causal=True), atol=2e-2, rtol=0)


def test_a_window_costs_what_it_shows():
    """Blocks of a tile, and of those the ones of a warpgroup and the ones that it masks: none more than it must."""
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=4096, head_dim=32, window=(1023, 0))
    C = constants_of(problem, GluonConfig(tile_m=128, tile_n=64, lazy_max=True), ragged=False)  # noqa: N806
    sizes = LaunchSizes(4096, 4096, *[None] * 5, *problem.reach, None)

    def numbers(function, *arguments):
        return tuple(int(it) for it in as_python(function)(*arguments, sizes, C))

    assert numbers(scores.range_of_blocks, 2048, 128) == (16, 34)
    assert numbers(scores.blocks_to_see, 2048, 16, 34, 0) == (16, 17, 32, 33)
    assert numbers(scores.blocks_to_see, 2112, 16, 34, 0) == (17, 18, 33, 34)
    assert numbers(scores.blocks_to_see, 2112, 16, 34, 1) == (17, 18, 17, 34)  # done again


# ---------------------------------------------------------------- the tester, tested


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, seed, tmp_path):
    """Whatever the order of partitions, although on a GPU most of them would give the right bits in most launches."""
    bug = BUGS[name]
    kernel = changed(tmp_path, bug.file, (bug.old, bug.new))
    with pytest.raises(bug.error, match=bug.says):
        check(bug.case, bug.config, seed, kernel)


def test_a_copy_without_a_change_is_the_kernel(tmp_path):
    check(CASES["causal"], PLAIN, None, changed(tmp_path, "ring.py"))


def test_a_deadlock_says_who_waits_for_what(tmp_path):
    bug = BUGS["more bytes expected than come"]
    with pytest.raises(DeadlockError) as caught:
        check(bug.case, bug.config, None, changed(tmp_path, bug.file, (bug.old, bug.new)))
    lines = str(caught.value).splitlines()
    assert lines[0] == "every partition waits, and nothing is under way:"
    assert [line.split(" waits for ")[0].strip() for line in lines[1:4]] == [
        "partition 0 consume(0)", "partition 1 consume(1)", "partition 2 produce",
    ]  # fmt: skip
    assert "parity 0 of mbarrier 0 of buffer 5, made at forward.py" in lines[1]
