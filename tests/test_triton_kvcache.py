"""Triton's kernels that divide keys into parts: bits, plans, and what their code depends on. Parity has the numbers."""

import itertools

import pytest
import torch

from multiattn import Problem, explain
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Plan, find_variant, plan_variant
from multiattn.sequences import Batching
from multiattn.triton import BACKEND
from multiattn.triton.bind import checked_binding
from multiattn.triton.calls import calls_of
from multiattn.triton.compile import specialise
from multiattn.triton.decode import (
    MERGED_COLUMNS,
    VARIANT,
    TritonSplitConfig,
    merged,
    split_tiles,
    why_not_fit,
)

SM90 = ARCHS["sm90"]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# ---------------------------------------------------------------- caches, interpreted


# ---------------------------------------------------------------- without a cache


def test_many_queries_are_for_the_other_variants():
    q = normal(1, 1, 40, 16)
    assert explain(q, q, q, backend="triton").variant == "full"
    assert explain(q, q, q, backend="triton", variant=VARIANT).variant == VARIANT


# ---------------------------------------------------------------- plans


def plan_of(
    config=None, *, page=16, arch=SM90, batch=4, queries=1, capacity=8192, max_q=None, table_stride=None, **more
):
    """A plan for a cache of a whole number of pages."""
    sizes = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, **more}
    spec = Batching.cached(batch, batch, max_q=max_q)
    if page is not None:
        pages = -(-capacity // page)
        spec = spec._replace(
            kind="pages", entries=batch * pages + 1, page=page, max_pages=pages, table_stride=table_stride or pages
        )
        capacity = pages * page
    rows = {"batch": batch, "seq_q": queries} if max_q is None else {"batch": 1, "seq_q": batch * queries}
    problem = Problem.contiguous(seq_kv=capacity, batching=spec, **rows, **sizes)
    found = plan_variant(BACKEND, find_variant(BACKEND, VARIANT), problem, arch, config)
    assert isinstance(found, Plan), found
    return found


@pytest.mark.parametrize(
    ("head_dim", "keys", "is_wide"), [(64, 1024, True), (64, 4096, True), (64, 8192, False), (128, 8192, True)]
)
def test_programs_widen_where_each_tile_of_rows_has_an_sm(head_dim, keys, is_wide):
    """But for D=64 with many keys: H200, 2026-11-26, 8k 79.0 us, in four parts 71.9."""
    config = plan_of(batch=128, heads_q=8, heads_kv=1, head_dim=head_dim, capacity=keys).config
    assert (config.warps == 8, config.splits == 1) == (is_wide, is_wide)


def test_parts_are_no_smaller_than_a_rule_says():
    """H200, 2026-11-26, D=256, B=1 64/8 1k: 31 parts of 32 keys 10.8 us, eight of 128 9.7."""
    assert plan_of(batch=1, heads_q=64, head_dim=256, capacity=1024).config.splits == 8


def test_a_workspace_has_the_parts_of_every_row():
    plan = plan_of(split_tiles(16, 64, 4, 3))
    splits = plan.config.splits
    assert splits > 1
    assert plan.workspace_bytes == splits * 4 * 32 * (128 + 1) * 4
    assert [call.table.kernel for call in calls_of(plan)] == ["attention_of_parts", "merge_splits"]
    whole = plan_of(TritonSplitConfig(tile_m=16, tile_n=64, warps=4, stages=3, splits=1))
    assert whole.workspace_bytes == 0
    assert [call.table.kernel for call in calls_of(whole)] == ["attention_of_parts"]


@pytest.mark.parametrize("splits", range(1, 257, 15))
def test_a_merge_takes_all_parts_at_once(splits):
    parts, lines = merged(splits)
    assert splits <= parts
    assert parts * lines * MERGED_COLUMNS <= 8192, "more elements than registers"


# ---------------------------------------------------------------- compiled code

needs_compiler = pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))


@needs_compiler
@pytest.mark.parametrize("arch", ["sm80", "sm100", "sm120"])
def test_other_arches_compile_both_kernels(arch):
    """On arches before Hopper no kernel begins before the one in front of it ends."""
    plan = plan_of(arch=ARCHS[arch], head_dim=64)
    kernels = [specialise(call, plan.arch) for call in calls_of(plan)]
    for kernel, call in zip(kernels, calls_of(plan), strict=True):
        checked_binding(kernel, call.table)
    waits = ["griddepcontrol" in kernel.asm["ptx"] for kernel in kernels]
    assert waits == [arch != "sm80"] * 2


def test_every_arch_has_a_rule_for_every_cache():
    for arch, head_dim, queries in itertools.product(ARCHS.values(), (8, 64, 72, 128, 136, 256), (1, 7, 16, 512)):
        plan = plan_of(arch=arch, head_dim=head_dim, queries=queries)
        assert not why_not_fit(plan.problem, arch, plan.config)
