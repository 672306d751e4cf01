"""The cuTile forward with `split_head_dim`: widths of two or three tiles of columns. Parity has the numbers."""

from dataclasses import replace

import pytest

from multiattn import Problem
from multiattn.cutile.families import launches_of
from multiattn.cutile.forward import FAMILY, PIPELINES, STEPS, widths_of
from multiattn.mask import CAUSAL, FULL
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import find_variant, get, make_plan
from multiattn.plan.schedule import three_widths, two_widths

pytest.importorskip("cuda.tile")


BACKEND = get("cutile")
ONLINE = FAMILY.config(tile_m=32, tile_n=32, split_head_dim=True)
LAZY = replace(ONLINE, lazy_max=True)
THREE = {"split_head_dim": True, "split_tail": True}


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
