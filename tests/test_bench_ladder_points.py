"""Tables of a few points of a list, and the formulas of shared memory that docs/ladder.md tells."""

from __future__ import annotations

from dataclasses import replace

import bench_fakes as fakes
import bench_ladder_fakes as ladders
import pytest
from bench_ladder_fakes import CELL, record

from bench.ladder_list import listings, points_header
from bench.ladder_points import climb_tables, evaluate, formula, neighbour_tables
from multiattn.cuda.axes import cross_product
from multiattn.cuda.configs import Pieces, smem_bytes
from multiattn.cuda.rules import rules_of
from multiattn.problem import Problem

RUN = "2026-11-21T05:00:00+00:00-0a"


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512, 1024])
def test_the_formulas_of_shared_memory_are_what_kernels_take(head_dim):
    """Of every legal point with every config of its rules: the C++ asserts the same bytes when it compiles."""
    asked = 0
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim)
    for axes in cross_product():
        for rule in rules_of(axes):
            if (axes.share == "qkv" and axes.tiling != "none") or head_dim > min(rule.head_dim_max, axes.head_dim_max):
                continue
            pieces = Pieces.of(axes, rule.config, problem)
            if pieces.q_width == pieces.v_width:  # else K is padded more than V
                asked += 1
                bytes_told = evaluate(formula(axes, rule.config), axes, rule.config, problem)
                assert bytes_told == smem_bytes(axes, rule.config, problem), (axes.name, rule.config)
    assert asked > 50


def test_a_climb_goes_to_what_a_caller_gets_and_its_neighbours_differ_on_one_axis(monkeypatch):
    ladders.install(monkeypatch)
    times = {"sdpa-flash": 2.0, "cuda/split_q": 1.0, "cuda/split_q+swizzle_q": 0.8}
    rows = [fakes.row(name, time_ms, cell=CELL, run=RUN) for name, time_ms in times.items()]
    (listing,) = listings(rows, [record("split_q+swizzle_q")], "cuda")
    (climb,), (around,) = climb_tables(listing), neighbour_tables(listing)
    assert [line[0] for line in climb.rows] == ["split_q", "split_q+swizzle_q"]
    assert {line[0] for line in around.rows} == {"split_q", "split_q+swizzle_q"}
    assert climb.header == around.header == points_header(listing)
    assert climb_tables(replace(listing, rows={})) == []
