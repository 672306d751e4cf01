"""Parts that keys are divided into: by what the host knows of a call, never by lengths, and fixed in its Plan."""

import math
from dataclasses import replace

import pytest

import multiattn
from multiattn import Plan, Problem
from multiattn.cuda.decode import MERGE_FEW, divisor_of
from multiattn.cuda.decode_mma import CudaSplitConfig
from multiattn.cuda.instances import launches_of
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, find_variant, make_plan, plan_variant
from multiattn.plan.schedule import choose_splits, most_multiprocessors, row_tiles
from multiattn.sequences import SPLITS_MAX, Batching

SM90, CPU = ARCHS["sm90"], ARCHS["cpu"]
TILE = {"tile_m": 16, "keys_min": 256, "blocks_per_sm": 2}
PLACES = 2 * most_multiprocessors(SM90)


def step(batch=1, heads_kv=8, group=4, keys=8192, queries=1, splits=None, **sizes):
    """A step of generation with so many keys at most."""
    spec = Batching.cached(batch, batch, splits=splits)
    heads = {"heads_q": heads_kv * group, "heads_kv": heads_kv}
    return Problem.contiguous(batch=batch, seq_q=queries, seq_kv=keys, head_dim=128, batching=spec, **heads, **sizes)


def splits_of(problem, arch=SM90, **changes):
    return choose_splits(problem, arch, **(TILE | changes))


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        *((step(splits=splits, keys=100), splits) for splits in (1, 3, SPLITS_MAX)),  # what a caller asks for
        *((step(keys=keys), 1) for keys in (0, 1, 256, 511)),  # short sequences are not divided
        (step(keys=512), 2),
        (step(batch=PLACES, heads_kv=1), 1),  # many sequences need no parts
    ],
)
def test_parts_of_a_call(asked, wanted):
    assert splits_of(asked) == wanted


@pytest.mark.parametrize("keys", [2048, 8192, 131072, 1 << 20])
@pytest.mark.parametrize("batch", [1, 2, 5, 16, 100])
def test_parts_fill_the_sms_evenly_or_are_as_many_as_there_may_be(batch, keys):
    problem = step(batch=batch, keys=keys)
    splits, tiles = splits_of(problem), row_tiles(problem, TILE["tile_m"])
    most = min(SPLITS_MAX, keys // TILE["keys_min"])
    assert 1 <= splits <= most

    def evenness(splits):
        waves = tiles * splits / PLACES
        return waves / math.ceil(waves)

    best = max(map(evenness, range(1, most + 1)))
    assert evenness(splits) >= 0.95 * best
    assert all(evenness(fewer) < 0.95 * best for fewer in range(1, splits))


def test_parts_have_limits():
    """Keys of a part, rows of more tiles, and how many there may be."""
    for keys_min in (64, 1000):
        assert 8192 // splits_of(step(heads_kv=1, group=1), keys_min=keys_min) >= keys_min
    assert splits_of(step(queries=64)) < splits_of(step())
    assert splits_of(step(heads_kv=1, keys=1 << 22), blocks_per_sm=8) <= SPLITS_MAX


# ---------------------------------------------------------------- in a Plan

CUDA = registry.get("cuda")


def plan(problem, arch=SM90, config=None):
    return plan_variant(CUDA, find_variant(CUDA, "split_keys"), problem, arch, config)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("arch", [CPU, SM90], ids=str)
def test_a_plan_has_a_number_of_parts_and_room_for_them(arch, backend):
    variant = find_variant(registry.get(backend), "split_keys")
    for problem in (step(), step(splits=7), step(keys=100), step(batch=512)):
        made = plan_variant(registry.get(backend), variant, problem, arch)
        assert isinstance(made, Plan)
        assert made.config.splits >= 1
        assert problem.cache.splits in (None, made.config.splits)
        rows = problem.batch * problem.heads_q * problem.seq_q
        parts = made.config.splits if made.config.splits > 1 else 0
        assert made.workspace_bytes == parts * rows * (problem.head_dim + 1) * 4


def test_a_config_of_a_sweep_keeps_its_parts_but_where_the_caller_asks_for_others():
    config = replace(plan(step()).config, splits=5)
    assert plan(step(), config=config).config == config
    assert plan(step(splits=2), config=config).config == replace(config, splits=2)
    assert plan(step(), config=replace(config, splits=0)).config == plan(step()).config


def test_a_rule_of_another_variant_has_nothing_to_settle():
    made = multiattn.explain(
        Problem.contiguous(batch=1, heads_q=2, seq_q=1000, head_dim=64), arch="sm90", backend="cuda"
    )
    assert not hasattr(made.config, "splits")
    assert find_variant(registry.get("cuda"), made.variant).settle(made.problem, SM90, made.config) is made.config


@pytest.mark.parametrize("queries", [1, 4, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_of_a_batch_invariant_call_do_not_know_the_batch(backend, head_dim, queries):
    """Few sequences, as many as SMs, and many: H200, 2026-11-26, wider blocks for some of them gave other bits."""

    def config(batch):
        problem = Problem.contiguous(
            batch=batch, heads_q=8, heads_kv=1, seq_q=queries, seq_kv=8192, head_dim=head_dim, causal=queries > 1,
            batching=Batching.cached(batch, batch, splits=1),
        )  # fmt: skip
        return make_plan(registry.get(backend), problem, SM90, probe=False).config

    assert len({config(batch) for batch in (1, 9, 130, 1000)}) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_of_a_batch_invariant_call_do_not_know_lengths(backend):
    """A server trims its page table to the longest request: D=64 once took other tiles from 32k keys on."""

    def config(keys, tokens):
        pages = keys // 64
        cache = Batching.cached(4, 4 * pages, 64, pages, max_q=1, splits=1)
        problem = Problem.contiguous(
            batch=1, heads_q=8, heads_kv=1, seq_q=tokens, seq_kv=keys, head_dim=64, batching=cache
        )  # fmt: skip
        return make_plan(registry.get(backend), problem, SM90, probe=False).config

    assert len({config(keys, tokens) for keys in (1024, 16384, 65536) for tokens in (4, 40000)}) == 1


@pytest.mark.parametrize("variant", ["split_keys", "split_keys_wgmma"])
def test_more_rows_than_32_bits_count_are_refused(variant):
    """The first tile of 2^29 queries of 8 heads began before row 0."""
    cache = Batching.cached(1, 1, max_q=1 << 29)
    problem = Problem.contiguous(
        batch=1, heads_q=8, heads_kv=1, seq_q=50, seq_kv=4096, head_dim=128, causal=True, batching=cache
    )
    found = plan_variant(CUDA, find_variant(CUDA, variant), problem, SM90)
    assert not isinstance(found, Plan)
    assert any("queries of the heads that share a key" in str(reason) for reason in found)


@pytest.mark.parametrize(("variant", "queries"), [("split_keys", 16), ("split_keys_wgmma", 64)])
def test_more_rows_of_all_heads_than_32_bits_count_are_refused_in_parts(variant, queries):
    rows = 1 << 31
    problem = step(batch=rows // 8 // queries, group=1, queries=queries, splits=2)
    found = plan_variant(CUDA, find_variant(CUDA, variant), problem, SM90)
    assert not isinstance(found, Plan)
    assert any(f"{rows} queries of all heads, in parts" in reason.got for reason in found)


@pytest.mark.parametrize("queries", [1, 16])
def test_few_parts_are_merged_by_a_kernel_for_many_rows(queries):
    """H200, 2026-11-26: 8,192 rows of two parts took the kernel for many parts 29 us, of 103 in all."""
    for splits, name in ((MERGE_FEW, "merge_few_splits"), (MERGE_FEW + 1, "merge_splits")):
        _, merging = launches_of(make_plan(CUDA, step(splits=splits, queries=queries), SM90, probe=False))
        assert merging.kernel.entry == name
        rows_of_block = 8 if splits == MERGE_FEW else 4  # 16 threads a row; 32 columns of four rows with 9 to 16 parts
        column_blocks = 1 if splits == MERGE_FEW else 4
        assert merging.blocks == 32 * queries // rows_of_block * column_blocks


def test_a_wide_block_has_the_rings_of_those_in_its_place():
    narrow = CudaSplitConfig(tile_m=16, tile_n=16, warps=4, stages=3, blocks_per_sm=4, widens=True)
    for blocks_per_sm, stages in ((2, 3), (3, 4), (4, 4)):
        wide = replace(narrow, blocks_per_sm=blocks_per_sm).settled(step(batch=1, heads_kv=1), SM90)
        assert (wide.warps, wide.stages, wide.blocks_per_sm) == (8, stages, 1)
    assert narrow.settled(step(batch=32), SM90).warps == 4


# ---------------------------------------------------------------- pages of any size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 48, 64, 100, 641, 65537, (1 << 30) + 1, (1 << 31) - 1])
def test_kernels_divide_by_a_product(size):
    multiplier, shift = divisor_of(size)
    assert 0 < multiplier < 1 << 32
    last = (1 << 31) - 1
    ends = [it * size + by for it in (0, 1, 2, 3, last // size // 2, last // size) for by in (-1, 0, size - 1)]
    for number in [*range(1000), *ends, last]:
        if 0 <= number <= last:
            assert (2 * number * multiplier >> 32) >> shift == number // size


@pytest.mark.parametrize("size", [0, -1, 1 << 31])
def test_sizes_that_no_page_has_are_refused(size):
    with pytest.raises(ValueError, match=rf"size: got {size}; allowed 1 to 2\^31 - 1"):
        divisor_of(size)
