"""The cuTile forward with `split_head_dim`, interpreted: two or three tiles of columns, in all loops and rare paths."""

from dataclasses import replace

import pytest
import torch

from multiattn import Problem
from multiattn.cutile.configs import PIPELINES, CutileConfig, widths_of
from multiattn.cutile.ladder import STEPS
from multiattn.cutile.table import launches_of
from multiattn.mask import CAUSAL, FULL
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import find_variant, get, make_plan
from multiattn.plan.schedule import three_widths, two_widths

pytest.importorskip("cuda.tile")

from cutile_checks import check, grow, make_inputs

BACKEND = get("cutile")
ONLINE = CutileConfig(tile_m=32, tile_n=32, split_head_dim=True)
LAZY = replace(ONLINE, lazy_max=True)
THREE = {"split_head_dim": True, "split_tail": True}
each_mask = pytest.mark.parametrize("causal", [False, True])
WAYS = (ONLINE, *(replace(LAZY, pipeline=pipeline) for pipeline in PIPELINES), replace(LAZY, scheduler="static"))
each_way = pytest.mark.parametrize("config", WAYS, ids=("online", *PIPELINES, "static"))


def problem(head_dim):
    return Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim)


def test_widths_are_the_fewest_columns_of_two_tiles_the_first_half_of_one():
    for head_dim in range(1, 257):
        whole = max(16, 1 << (head_dim - 1).bit_length())
        assert widths_of(problem(head_dim), replace(LAZY, split_head_dim=False)) == (whole, 0, 0)
        firsts = [first for first in (16, 32, 64, 128) if 2 * first == whole]
        pairs = [(first, tail) for first in firsts for tail in (16, 32, 64, 128) if first + tail >= head_dim]
        assert two_widths(head_dim) == min(pairs, key=sum, default=None)


def test_three_widths_are_the_fewest_columns_where_the_second_of_two_can_be_halved():
    for head_dim in range(1, 257):
        two, sizes = two_widths(head_dim), (16, 32, 64, 128)
        first, tail = two if two is not None else (0, 0)
        threes = [(first, it, last) for it in sizes for last in sizes if last <= it == tail // 2]
        fitting = [it for it in threes if head_dim <= sum(it) < first + tail]
        assert three_widths(head_dim) == min(fitting, key=sum, default=None)
        if fitting:
            assert widths_of(problem(head_dim), replace(LAZY, **THREE)) == three_widths(head_dim)


@each_mask
@pytest.mark.parametrize("head_dim", [104, 200])
@each_way
def test_three_parts_are_attention(config, head_dim, causal):
    check(replace(config, **THREE), *make_inputs(seq_q=45, seq_kv=77, head_dim=head_dim), causal=causal)


@each_mask
@pytest.mark.parametrize("head_dim", [40, 96, 192])
@each_way
def test_two_parts_are_attention(config, head_dim, causal):
    check(config, *make_inputs(seq_q=45, seq_kv=77, head_dim=head_dim), causal=causal)


@pytest.mark.parametrize(("causal", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
def test_tiles_that_are_done_again(dtype, causal):
    q, k, v = make_inputs(dtype=dtype, head_dim=96, spread=4.0)
    check(LAZY, q, grow(k, start=100, factor=20.0), v, causal=causal)


@pytest.mark.parametrize(("causal", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
def test_tiles_of_three_parts_that_are_done_again(dtype, causal):
    q, k, v = make_inputs(dtype=dtype, head_dim=112, spread=4.0)
    check(replace(LAZY, **THREE), q, grow(k, start=100, factor=20.0), v, causal=causal)


@each_mask
@pytest.mark.parametrize("variant", STEPS)
def test_parts_are_attention_on_every_rung(variant, causal):
    config = STEPS[variant].step.limit(replace(ONLINE, **THREE))
    check(config, *make_inputs(seq_q=45, seq_kv=77, head_dim=104), variant=variant, causal=causal)


@pytest.mark.parametrize("variant", STEPS)
def test_every_rung_can(variant):
    config = STEPS[variant].step.limit(ONLINE)
    plan = make_plan(BACKEND, problem(96), ARCHS["sm90"], variant=variant, config=config, probe=False)
    (launch,) = launches_of(plan)
    assert (launch.constants.tile_d, launch.constants.tail_d) == (64, 32)


@pytest.mark.parametrize(
    ("head_dim", "ways"), [(96, PIPELINES), (192, PIPELINES), (64, ()), (128, ()), (256, ("ahead",))]
)
def test_a_sweep_tries_two_parts_where_they_save_or_tiles_are_large(head_dim, ways):
    variant = find_variant(BACKEND, "full")
    for causal in (False, True):
        cell = replace(problem(head_dim), band=CAUSAL if causal else FULL)
        tried = BACKEND.forward.candidates(variant, cell, ARCHS["sm90"])
        assert any(not config.split_head_dim for config in tried)
        assert {config.pipeline for config in tried if config.split_head_dim} <= set(ways)
        assert any(config.split_head_dim for config in tried) == bool(ways)
