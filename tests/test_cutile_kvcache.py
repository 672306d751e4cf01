"""cuTile's kernels that divide keys among blocks: how parts are merged, planned and compiled."""

import math
from dataclasses import replace

import pytest
import torch

from multiattn import Problem
from multiattn.cutile.decode import (
    PARTS_ENOUGH,
    page_rows_of,
)
from multiattn.cutile.families import launches_of
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.sequences import Batching, area_layouts

pytest.importorskip("cuda.tile")

from multiattn.cutile import cpu
from multiattn.cutile.compile import get_kernel
from multiattn.plan.cubin import read_entry
from multiattn.plan.toolchain import disassemble, find_cuobjdump

BACKEND = get("cutile")


# ---------------------------------------------------------------- parts made one


def problem_of(*, page=None, batch=8, seq_q=1, seq_kv=8192, splits=None, **sizes):
    """A cache of whole pages that is not full."""
    room = 0 if page is None else seq_kv // page
    cache = Batching.cached(batch, batch if page is None else 3 * room, page, room, splits=splits)
    given = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, **sizes}
    return Problem.contiguous(batch=batch, seq_q=seq_q, seq_kv=seq_kv, batching=cache, **given)


def plan_of(problem, arch="sm90", **options):
    return make_plan(BACKEND, problem, ARCHS[arch], probe=False, **options)


def draw_parts(problem, splits):
    """Parts and their sums: one of a few without a key, whose part is NaN, and a row without any."""
    generator = torch.Generator().manual_seed(0)
    areas = area_layouts(splits, problem.batch, problem.heads_q, problem.seq_q, problem.head_dim)
    parts, sums = (torch.randn(areas[name].shape, generator=generator) for name in ("partial_out", "partial_lse"))
    sums = 3 * sums
    sums[torch.rand(sums.shape, generator=generator) < 0.3] = -math.inf
    sums[:, 0, -1, -1] = -math.inf
    parts[sums == -math.inf] = math.nan
    return parts, sums


def merge(problem, splits, parts, sums, sinks=None, last=0):
    """The rows that the kernel makes of parts; those that it leaves are 7."""
    plan = make_plan(BACKEND, problem, ARCHS["cpu"], variant="split_keys")
    launch = launches_of(plan)[1]
    tensors = {"partial_out": parts, "partial_lse": sums, "sinks": sinks}
    for name in ("out", "lse"):
        layout = problem.layouts[name]
        tensors[name] = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype).fill_(7.0)
    if "cu_seqlens_q" in problem.cache_tensors:
        tensors["cu_seqlens_q"] = torch.tensor([0, 0, last], dtype=torch.int32)
    arguments = launch.arguments(lambda it: tensors[it.tensor].as_strided(it.layout.shape, it.layout.strides))
    cpu.launch(launch.grid, get_kernel(launch), arguments)
    return tensors["out"], tensors["lse"]


@pytest.mark.parametrize("splits", [2, 5, 16, 17])
def test_a_row_has_the_same_bits_in_any_batch_and_any_tile(splits):
    many = problem_of(batch=3, heads_q=6, heads_kv=1, seq_q=5, splits=splits)
    parts, sums = draw_parts(many, splits)
    wanted, wanted_lse = merge(many, splits, parts, sums)
    one = problem_of(batch=1, heads_q=1, heads_kv=1, splits=splits)
    for batch, head, query in [(0, 0, 0), (2, 5, 4), (1, 3, 2)]:
        row = (slice(None), slice(batch, batch + 1), slice(head, head + 1), slice(query, query + 1))
        out, lse = merge(one, splits, parts[row].contiguous(), sums[row].contiguous())
        assert torch.equal(out, wanted[row[1:]])
        assert torch.equal(lse, wanted_lse[row[1:]])


# ---------------------------------------------------------------- planned


def test_few_queries_go_there_and_others_do_not():
    few = Problem.contiguous(batch=4, heads_q=32, heads_kv=8, seq_q=1, seq_kv=4096, head_dim=128)
    ours = (few, problem_of(), problem_of(seq_q=512))
    assert {plan_of(problem).variant for problem in ours} == {"split_keys"}
    assert plan_of(replace(few, seq_q=64)).variant == "full"
    assert plan_of(replace(few, seq_kv=64)).variant == "full"


def test_one_head_of_keys_is_in_no_more_parts_than_are_worth_their_merge():
    for keys in (32768, 131072):
        problem = problem_of(batch=1, heads_q=8, heads_kv=1, seq_kv=keys)
        assert 100 < plan_of(problem).config.splits <= PARTS_ENOUGH


def test_blocks_fill_the_chip_unless_the_caller_says_how_many():
    few, many = plan_of(problem_of(batch=1)), plan_of(problem_of(batch=512))
    assert few.config.splits * 8 >= 0.9 * 2 * 132
    assert many.config.splits == 1
    assert plan_of(problem_of(splits=5)).config.splits == 5
    (only,) = launches_of(many)
    assert (only.tensors[3], many.workspace_bytes) == ("out", 0)
    first, second = launches_of(few)
    assert first.tensors[3:5] == second.tensors[2:4] == ("partial_out", "partial_lse")
    assert few.workspace_bytes == few.config.splits * 32 * (128 + 1) * 4
    assert second.overlaps
    assert not launches_of(plan_of(problem_of(batch=1), "sm80"))[1].overlaps


@pytest.mark.parametrize(
    ("page", "arch", "rows"),
    [(None, "sm90", 64), (128, "sm90", 64), (64, "sm80", 64), (16, "sm90", 16), (16, "sm80", 0), (1, "sm90", 0),
     (2, "sm90", 0), (48, "sm90", 0), (5, "sm100", 0)],
)  # fmt: skip
def test_pages_are_loaded_whole_where_that_pays(page, arch, rows):
    assert page_rows_of(problem_of(page=page, seq_kv=960 * 4), ARCHS[arch], 64) == rows


# ---------------------------------------------------------------- compiled

needs_compiler = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())) or "compiler found"
)
needs_cuobjdump = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")


@needs_compiler
@needs_cuobjdump
@pytest.mark.parametrize(
    ("page", "load"),
    [
        pytest.param(None, "UTMALDG.4D", marks=pytest.mark.nightly),
        (16, "UTMALDG.4D"),  # of pages smaller than a block, as only these are several boxes
        pytest.param(64, "UTMALDG.4D", marks=pytest.mark.nightly),
        (5, "LDGSTS.E.BYPASS.128"),
    ],
)
def test_hopper_loads_keys_asynchronously(page, load):
    """By TMA, also of pages smaller than a block, else in vectors; and a warp's registers hold all."""
    plan = plan_of(problem_of(page=page, splits=4, seq_kv=960))
    first, second = BACKEND.forward.export(plan, ())
    sass = disassemble(first.cubin)
    assert load in sass
    assert "PREEXIT" in sass
    assert "ACQBULK" in disassemble(second.cubin)
    assert first.binding is second.binding is None, "the loader of exported kernels launches one of them"
    assert read_entry(first.cubin, first.kernel).smem_bytes * plan.config.blocks_per_sm <= 227 * 1024


@needs_compiler
@needs_cuobjdump
@pytest.mark.parametrize("splits", [pytest.param(2, marks=pytest.mark.nightly), 16])
def test_no_thread_needs_another_to_merge_few_parts(splits):
    """As tiles of all parts they had 255 registers, and what was left of them was in local memory."""
    _, merge = BACKEND.forward.export(plan_of(problem_of(splits=splits)), ())
    sass = disassemble(merge.cubin)
    assert "LDG.E.128" in sass or "LDG.E.64" in sass
    assert not any(it in sass for it in ("SHFL", "STL", "LDL"))
