"""Packed batches in the forward for Hopper: ragged tensor maps, the tiles of a list, what is launched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from wgmma_plans import CONFIG, SM90, plan_of

from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import kernels_of, launches_of
from multiattn.cuda.params import argument_of
from multiattn.cuda.wgmma import tensor_maps
from multiattn.packed import RAGGED_ROWS
from multiattn.plan.abi import WORKSPACE
from multiattn.problem import Problem
from multiattn.sequences import Batching


def packed_problem(queries: int = 300, keys: int = 500, sequences: int = 3, **more) -> Problem:
    """Four heads, two of keys, D=64: so many rows of q and of k in so many sequences."""
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 2, "seq_q": queries, "seq_kv": keys, "head_dim": 64}
    return Problem.contiguous(**sizes, batching=Batching.packed(sequences), **more)


# ---------------------------------------------------------------- maps


@pytest.mark.parametrize("name", ["q", "k", "out"])
def test_a_ragged_map_begins_with_a_row_of_the_sequence_and_ends_with_its_last(name):
    """The address of row r of the sequence that has `count` rows and ends with row `end` of the tensor."""
    problem = packed_problem()
    it = tensor_maps(problem, CONFIG.box_rows(problem))[name]
    end, count, head, column_bytes = 170, 60, 1, 2
    for row in (0, 17, 59):
        coordinates = (RAGGED_ROWS, end, head, RAGGED_ROWS - count + row)
        assert all(0 <= at < extent for at, extent in zip(coordinates, it.shape, strict=False))
        address = sum(at * stride for at, stride in zip(coordinates, it.strides, strict=True)) % 2**64
        _, of_head, of_row = problem.layouts[name].strides[:3]
        assert address == ((end - count + row) * of_row + head * of_head) * column_bytes
    assert RAGGED_ROWS - count + count >= it.shape[3]  # the row behind it is out of bounds


def test_nothing_that_is_compiled_or_encoded_depends_on_lengths():
    plans = [plan_of(packed_problem(*sizes)) for sizes in ((300, 500, 3), (4000, 100, 80), (17, 17, 1))]
    assert len({kernels_of(plan) for plan in plans}) == 1
    assert len({tuple(argument_of(kernels_of(plan)[-1], plan).maps.items()) for plan in plans}) == 1


# ---------------------------------------------------------------- launches


def test_the_list_comes_first_and_both_overlap_what_is_before_them():
    plan = plan_of(packed_problem())
    listing, forward = launches_of(plan)
    assert listing.kernel.name == "list_tiles_overlapping"
    assert forward.kernel.name.endswith("_dynamic_packed")
    assert listing.kernel.overlaps
    assert forward.kernel.overlaps
    assert forward.blocks == (300 // 128 + 3 + 2) * 4
    assert list(areas_of(plan)) == [WORKSPACE, "query_list"]
    assert list(areas_of(plan_of(packed_problem(), replace(CONFIG, scheduler="static")))) == ["query_list"]


def test_clusters_are_refused_as_their_tiles_are_of_several_sequences():
    (reason,) = replace(CONFIG, cluster=2, scheduler="static").why_not(packed_problem(), SM90)
    assert "a packed batch" in reason.got
    assert reason.allowed == "cluster=1"
