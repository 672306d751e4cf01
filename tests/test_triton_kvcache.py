"""Triton's kernels that divide keys into parts: bits, plans, and what their code depends on. Parity has the numbers."""

import itertools

import pytest
import torch

from multiattn import Problem, explain, fmha_kvcache
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
LENGTHS = (0, 1, 37, 130)
"""No key, one, less than a tile, and more than two."""
POISON = 1 << 30
"""An entry of a page table that nobody may read."""


def random_of(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=random_of(seed)).bfloat16()


def views(entries, rows, heads, head_dim, layout):
    """k and v ``[entries, heads, rows, head_dim]``, all NaN: views of one tensor where a layout is named."""
    shape = {"HND": (entries, 2, heads, rows, head_dim), "NHD": (entries, 2, rows, heads, head_dim)}
    if layout is None:
        return tuple(torch.full((entries, heads, rows, head_dim), torch.nan).bfloat16() for _ in range(2))
    both = torch.full(shape[layout], torch.nan).bfloat16()
    return tuple(it if layout == "HND" else it.transpose(1, 2) for it in both.unbind(1))


def cache_of(lengths=LENGTHS, page=None, *, heads=2, head_dim=16, layout=None, capacity=140):
    """A cache with NaN in every row that no sequence has, as arguments of `fmha_kvcache`."""
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    if page is None:
        k, v = views(len(lengths), capacity, heads, head_dim, layout)
        for entry, length in enumerate(lengths):
            k[entry, :, :length], v[entry, :, :length] = normal(2, heads, length, head_dim, seed=entry)
        return {"k_cache": k, "v_cache": v, "seqlens_kv": seqlens}
    used = [-(-length // page) for length in lengths]
    pages = sum(used) + 3
    k, v = views(pages, page, heads, head_dim, layout)
    order = torch.randperm(pages, generator=random_of(7)).tolist()
    table = torch.full((len(lengths), -(-capacity // page) + 1), POISON, dtype=torch.int32)[:, :-1]  # rows are apart
    for entry, (length, count) in enumerate(zip(lengths, used, strict=True)):
        rows = normal(2, heads, length, head_dim, seed=entry)
        for place in range(count):
            table[entry, place] = number = order.pop()
            part = rows[:, :, place * page : (place + 1) * page]
            k[number, :, : part.shape[2]], v[number, :, : part.shape[2]] = part
    return {"k_cache": k, "v_cache": v, "seqlens_kv": seqlens, "page_table": table}


# ---------------------------------------------------------------- caches, interpreted


def test_results_go_where_the_caller_wants_them():
    q, cache = normal(4, 4, 1, 16), cache_of(page=16)
    room = torch.zeros(4, 1, 6, 16).bfloat16()
    out = room[:, :, 1:5].transpose(1, 2)
    for splits in (1, 2):
        wanted = fmha_kvcache(q, **cache, backend="triton", num_splits=splits)
        assert fmha_kvcache(q, **cache, backend="triton", num_splits=splits, out=out) is out
        assert torch.equal(out, wanted)
        assert room[:, :, ::5].eq(0).all()


def test_with_one_part_a_sequence_has_the_same_bits_in_any_batch():
    q, cache = normal(4, 4, 1, 16), cache_of(page=16)
    all_of_them = fmha_kvcache(q, **cache, backend="triton", num_splits=1)
    for entry in range(4):
        own = {name: cache[name][entry : entry + 1] for name in ("seqlens_kv", "page_table")}
        assert torch.equal(
            fmha_kvcache(q[entry : entry + 1], **(cache | own), backend="triton", num_splits=1),
            all_of_them[entry : entry + 1],
        )


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
