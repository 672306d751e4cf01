"""Hopper's forward over caches: its configs and rules, and what is compiled. Parity has the numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from cuda_runs import check_refused, on_cpu, with_nvrtc

from multiattn import explain
from multiattn.cuda import BACKEND
from multiattn.cuda.decode_wgmma import SplitWgmmaConfig
from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import launches_of
from multiattn.cuda.variants import SPLIT_KEYS, SPLIT_KEYS_WGMMA, WGMMA
from multiattn.inspect.sass import hot_loops, parse, parted_arrivals
from multiattn.plan.arch import ARCHS, CPU
from multiattn.plan.backend import Plan, make_plan
from multiattn.plan.toolchain import disassemble
from multiattn.problem import Problem
from multiattn.sequences import Batching

SM90 = ARCHS["sm90"]
CONFIG = SplitWgmmaConfig(tile_m=128, tile_n=64, stages=4, splits=1)


def cached(page: int | None = 64, *, head_dim: int = 128, group: int = 8, queries: int = 16, **sizes: Any) -> Problem:
    """Eight sequences of up to 8192 keys, and as many heads of keys; causal, bf16."""
    max_pages = -(-8192 // page) if page else 0
    spec = Batching.cached(8, 8 * max_pages or 8, page, max_pages)
    given = {"batch": 8, "heads_q": 8 * group, "heads_kv": 8, "seq_q": queries, "seq_kv": 8192, "causal": True, **sizes}
    return Problem.contiguous(head_dim=head_dim, batching=spec, **given)


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("page", "tile_n", "rows"), [(None, 128, 128), (256, 128, 128), (64, 128, 64), (16, 128, 16), (48, 128, 16)]
)
def test_a_box_is_what_no_page_and_no_tile_ends_within(page, tile_n, rows):
    assert replace(CONFIG, tile_n=tile_n).keys_of_box(cached(page)) == rows


def test_registers_are_kept_for_as_much_of_q_as_has_room():
    kept = replace(CONFIG, q_in_registers=True)
    assert [it.kept_steps(cached()) for it in (CONFIG, kept, replace(kept, tile_m=192))] == [0, 8, 4]


# ---------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        (cached(queries=1), SPLIT_KEYS),
        (cached(queries=4), SPLIT_KEYS),
        (cached(queries=5), SPLIT_KEYS_WGMMA),
        (cached(queries=512), SPLIT_KEYS_WGMMA),
        (cached(None, queries=16), SPLIT_KEYS_WGMMA),
        (cached(1), SPLIT_KEYS_WGMMA),
        (cached(100), SPLIT_KEYS_WGMMA),
        (replace(cached(), alignment=8), SPLIT_KEYS),
        (Problem.contiguous(batch=1, heads_q=8, heads_kv=1, seq_q=16, seq_kv=8192, head_dim=128), SPLIT_KEYS_WGMMA),
        (Problem.contiguous(batch=8, heads_q=16, seq_q=128, seq_kv=512, head_dim=128), SPLIT_KEYS_WGMMA),
        (Problem.contiguous(batch=9, heads_q=16, seq_q=128, seq_kv=512, head_dim=128), WGMMA),
        (Problem.contiguous(batch=9, heads_q=16, seq_q=33, seq_kv=512, head_dim=64), WGMMA),
        (Problem.contiguous(batch=9, heads_q=16, seq_q=32, seq_kv=512, head_dim=64), SPLIT_KEYS),
        (Problem.contiguous(batch=9, heads_q=16, heads_kv=8, seq_q=64, seq_kv=512, head_dim=128), SPLIT_KEYS_WGMMA),
        (Problem.contiguous(batch=1, heads_q=8, heads_kv=1, seq_q=512, seq_kv=8192, head_dim=128), WGMMA),
    ],
)
def test_it_takes_what_has_more_rows_than_mma_sync_reads_keys_for(problem, variant):
    assert explain(problem, backend="cuda", arch="sm90").variant == variant.name
    assert explain(problem, backend="cuda", arch="sm80").variant != SPLIT_KEYS_WGMMA.name


@pytest.mark.parametrize("page", [1, 100])
def test_pages_that_tma_cannot_walk_are_gathered(page):
    plan = explain(cached(page), backend="cuda", variant=SPLIT_KEYS_WGMMA.name, arch="sm90")
    assert plan.config.gathers
    (reason,) = replace(plan.config, gathers=False).why_not(cached(page), SM90)
    assert (reason.code, reason.got, reason.allowed) == ("page", f"pages of {page} keys", "multiples of 8")


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_has_a_rule_that_fits(head_dim):
    for queries, page in itertools.product((8, 16, 512), (None, 5, 8, 16, 64)):
        plan = explain(cached(page, head_dim=head_dim, queries=queries), backend="cuda", arch="sm90")
        assert (plan.variant, plan.config.tile_m) == (SPLIT_KEYS_WGMMA.name, 64 if queries == 8 else 128)
        assert plan.config.stages * plan.config.tile_n * max(head_dim, 64) * 2 >= 85 << 10  # bytes on their way


def test_on_a_cpu_it_must_be_named():
    assert make_plan(BACKEND, cached(), CPU, probe=False).variant == SPLIT_KEYS.name
    assert make_plan(BACKEND, cached(), CPU, variant=SPLIT_KEYS_WGMMA.name, probe=False).config.tile_m == 128


def test_parts_are_merged_from_workspace():
    one, two = (plan_of(cached(), replace(CONFIG, splits=splits)) for splits in (1, 2))
    assert [len(launches_of(it)) for it in (one, two)] == [1, 2]
    assert [set(areas_of(it)) for it in (one, two)] == [set(), {"partial_out", "partial_lse"}]
    tiles = 8 * 8  # of 128 rows, which are 16 queries of 8 heads
    assert [launches_of(it)[0].blocks for it in (one, two)] == [tiles, 2 * tiles]


def plan_of(problem: Problem, config: SplitWgmmaConfig | None = None, arch: Any = SM90) -> Plan:
    """A Plan of the variant."""
    return make_plan(BACKEND, problem, arch, variant=SPLIT_KEYS_WGMMA.name, config=config, probe=False)


# ---------------------------------------------------------------- compiled


@on_cpu
def test_a_kernel_of_an_illegal_config_does_not_compile():
    cases = {
        "tile_m: 128, 192, of groups also 64": {"tile_m": 256},
        "tile_n: multiples of 16": {"tile_n": 72},
        "stages: 3 to 16": {"stages": 2},
        "pingpong: of two warpgroups or three": {"tile_m": 64, "pingpong": True},
        "a lane for each box of a tile": {"tile_n": 160},
        "gathers: for two warpgroups": {"gathers": True, "tile_m": 192},
        "gathers: for two warpgroups, a lane for each key": {"gathers": True, "tile_n": 144, "stages": 3},
    }
    problem, refused = cached(8), {}
    for message, changed in cases.items():
        config = replace(CONFIG, **changed)
        assert config.why_not(problem, CPU)
        refused[message] = launches_of(replace(plan_of(problem, CONFIG), config=config))[0].kernel.traits
    check_refused("forward_wgmma_traits.cuh", refused)


@with_nvrtc
@pytest.mark.parametrize(
    ("problem", "changed"),
    [
        pytest.param(cached(), {}, id="128 rows"),
        pytest.param(cached(), {"gathers": False}, id="128 rows in boxes", marks=pytest.mark.nightly),
        pytest.param(cached(16, queries=8), {}, id="64 rows", marks=pytest.mark.nightly),
        pytest.param(cached(16, queries=8), {"gathers": False}, id="64 rows in boxes"),
        pytest.param(
            cached(queries=512),
            {"tile_m": 192, "tile_n": 64, "stages": 10, "q_in_registers": True},
            id="192 rows",
        ),
        pytest.param(cached(None, head_dim=256, dtype="fp16"), {}, id="D=256", marks=pytest.mark.nightly),
    ],
)
def test_compiles_without_a_gpu(problem, changed):
    """With no spills in its loops, and with no warp that may part."""
    plan = plan_of(problem)
    plan = plan_of(problem, replace(plan.config, splits=1, **changed))
    (compiled,) = BACKEND.forward.export(plan, ())
    assert compiled.dynamic_smem_bytes == plan.config.smem_bytes(problem)
    if (text := disassemble(compiled.cubin)) is not None:
        code = parse(text)
        assert not parted_arrivals(code)
        hot = {place for loop in hot_loops(code) for place in loop.body}
        assert hot
        assert not [code[place].name for place in hot if code[place].name.startswith(("LDL", "STL"))]
