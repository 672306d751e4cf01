"""cuTile's kernels that divide keys among blocks: caches of every kind, interpreted, and what is compiled for them."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import multiattn
from multiattn import Problem
from multiattn.cutile.decode_configs import (
    MERGE_ELEMENTS,
    MERGE_FEW,
    PARTS_ENOUGH,
    SplitKeysConfig,
    merge_grid,
    merged_rows,
    merged_together,
    page_rows_of,
)
from multiattn.cutile.table import launches_of, own_areas_of
from multiattn.paged import CacheSpec, area_layouts
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import find_variant, get, make_plan, plan_variant

pytest.importorskip("cuda.tile")

from multiattn.cutile import cpu
from multiattn.cutile.compile import get_kernel, get_signature
from multiattn.plan.cubin import read_entry
from multiattn.plan.toolchain import disassemble, find_cuobjdump

BACKEND = get("cutile")
LENGTHS = [0, 1, 37, 100]
"""No key, one, a few, and as many as fill several blocks."""
ROOM = 112
"""Keys for which each sequence has room."""
NOT_READ = 2**30
"""Stands in entries of the table that say nothing: no cache has such a page."""
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def draw(
    page, *, lengths=LENGTHS, seq_q=1, heads_q=4, heads_kv=2, head_dim=64, is_nhd=False, queries=None, dtype="bfloat16"
):
    """Tensors of a call: K and V are views of one tensor, NaN where no key is, pages in any order."""
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    pages = -(-ROOM // (page or ROOM))
    entries = len(lengths) * pages + (3 if page else 0)
    rows = page or ROOM
    shape = (entries, 2, rows, heads_kv, head_dim) if is_nhd else (entries, 2, heads_kv, rows, head_dim)
    both = torch.full(shape, math.nan, dtype=kind)
    k, v = (both[:, which].transpose(1, 2) if is_nhd else both[:, which] for which in (0, 1))
    order = torch.randperm(entries, generator=generator).tolist() if page else list(range(entries))
    table = torch.full((len(lengths), pages + 2), NOT_READ, dtype=torch.int32)
    taken = iter(order)
    for sequence, length in enumerate(lengths):
        for place in range(-(-length // rows) if page else 1):
            entry, count = next(taken), min(rows, length - place * rows)
            table[sequence, place] = entry
            for cache in (k, v):
                cache[entry, :, :count] = torch.randn(heads_kv, count, head_dim, generator=generator).to(kind)
    q_shape = (len(lengths), heads_q, seq_q) if queries is None else (sum(queries) + 3, heads_q)
    q = torch.randn(*q_shape, head_dim, generator=generator).to(kind)
    named = {"seqlens_kv": torch.tensor(lengths, dtype=torch.int32)}
    named |= {"page_table": table[:, :pages]} if page else {}  # rows are not one after another
    if queries is not None:
        starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
        named |= {"cu_seqlens_q": starts, "max_seqlen_q": max(queries)}
    return q, k, v, named


def check(page, *, num_splits=None, queries=None, options=None, **sizes):
    """Out and lse are the reference's, within the rounding of weights and results."""
    q, k, v, named = draw(page, queries=queries, **sizes)
    named |= {**(options or {}), "return_lse": True}
    out, lse = multiattn.fmha_kvcache(q, k, v, backend="cutile", num_splits=num_splits, **named)
    truth, truth_lse = multiattn.fmha_kvcache(q.float(), k.float(), v.float(), backend="reference", **named)
    if queries is not None:  # rows behind the last sequence are left as they are
        out, lse, truth, truth_lse = out[:-3], lse[:, :-3], truth[:-3], truth_lse[:, :-3]
    rounding = torch.finfo(q.dtype).eps * v[v.isfinite()].abs().max().item()
    torch.testing.assert_close(out.float(), truth, atol=2 * rounding, rtol=0)
    torch.testing.assert_close(lse, truth_lse, atol=2e-5, rtol=1e-5)


PAGES = [
    pytest.param(None, id="dense"),
    pytest.param(1, id="rows-of-their-own"),
    pytest.param(5, id="pages-that-end-in-the-middle-of-a-block"),
    pytest.param(16, id="several-pages-a-block"),
    pytest.param(32, id="a-page-is-a-block"),
    pytest.param(64, id="several-blocks-a-page"),
]
each_page = pytest.mark.parametrize("page", PAGES)


# ---------------------------------------------------------------- interpreted


@each_page
@pytest.mark.parametrize("num_splits", [None, 1, 3, 8], ids=lambda it: f"splits-{it}")
def test_one_query_a_sequence(page, num_splits):
    """8 splits are more than there are blocks of keys: some have nothing, and leave a part that nobody reads."""
    check(page, num_splits=num_splits)


@each_page
@pytest.mark.parametrize("num_splits", [1, 3])
def test_several_causal_queries_and_heads_inside_of_pages(page, num_splits):
    """Five queries of three heads are 15 rows; of the shorter sequences some queries see no key."""
    check(page, num_splits=num_splits, seq_q=5, heads_q=6, is_nhd=True, options={"causal": True})


@pytest.mark.parametrize("page", [None, 16, 5])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"causal": True, "window": (20, 0)}, id="window"),
        pytest.param({"window": (30, 3)}, id="two-sided"),
        pytest.param({"causal": True, "softcap": 2.0}, id="softcap"),
        pytest.param({"sinks": SINKS}, id="sinks"),
        pytest.param({"causal": True, "window": (9, 0), "softcap": 3.0, "sinks": SINKS, "scale": -0.3}, id="all"),
        pytest.param({"scale": 0.0}, id="scale-0"),
    ],
)
def test_masks_scores_and_sinks(page, num_splits, options):
    check(page, num_splits=num_splits, seq_q=2, options=options)


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("options", [{}, {"causal": True, "sinks": SINKS}], ids=["full", "causal-sinks"])
def test_packed_queries_with_a_sequence_that_has_none(page, num_splits, options):
    """A chunk of a prompt beside single tokens, in more rows than a tile has."""
    check(page, num_splits=num_splits, queries=[3, 0, 37, 1], options=options)


@pytest.mark.parametrize(
    ("num_splits", "heads_q"),
    [
        *((splits, 6) for splits in (1, 2, 3, 16, 17)),  # by no power of two, which masks rows of a tile
        *((splits, 4) for splits in (1, 2)),
        *(pytest.param(splits, 4, marks=pytest.mark.nightly) for splits in (3, 16, 17)),
    ],
)
def test_rows_behind_the_last_sequence_are_left_as_they_are(num_splits, heads_q):
    q, k, v, named = draw(16, queries=[3, 0, 5, 1], heads_q=heads_q)
    out = torch.full_like(q, 7.0)
    multiattn.fmha_kvcache(q, k, v, backend="cutile", num_splits=num_splits, out=out, **named)
    assert (out[-3:] == 7.0).all()
    assert (out[:-3] != 7.0).any()


@pytest.mark.parametrize("num_splits", [None, 3])
def test_without_any_sequence_there_is_nothing_to_launch(num_splits):
    q, k = torch.randn(3, 4, 64).bfloat16(), torch.randn(5, 2, 16, 64).bfloat16()
    named = {"seqlens_kv": torch.zeros(0, dtype=torch.int32), "page_table": torch.zeros(0, 4, dtype=torch.int32)}
    named |= {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32), "max_seqlen_q": 3, "num_splits": num_splits}
    out = multiattn.fmha_kvcache(q, k, k, backend="cutile", out=torch.full_like(q, 7.0), **named)
    assert (out == 7.0).all()


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    ("head_dim", "heads", "dtype"), [(40, (2, 1), "float16"), (128, (3, 3), "bfloat16"), (256, (16, 1), "bfloat16")]
)
@pytest.mark.parametrize("page", [None, 16, 5])
def test_head_dims_and_groups(page, num_splits, head_dim, heads, dtype):
    sizes = {"lengths": [33, 70], "head_dim": head_dim, "heads_q": heads[0], "heads_kv": heads[1], "dtype": dtype}
    check(page, num_splits=num_splits, **sizes)


def test_more_parts_than_are_merged_at_a_time():
    check(None, num_splits=MERGE_FEW + 60, lengths=[100, 3], options={"sinks": SINKS})


@pytest.mark.parametrize("queries", [None, [3, 0, 5, 1]], ids=["batch", "packed"])
@pytest.mark.parametrize("num_splits", [2, 3, 5, 16, 17])
def test_no_power_of_two_of_heads_or_queries_in_parts(num_splits, queries):
    options = {"causal": True, "sinks": torch.linspace(-1, 2, 6)}
    check(16, num_splits=num_splits, seq_q=3, heads_q=6, queries=queries, options=options)


def test_chunks_of_a_prompt_are_several_tiles_of_rows():
    check(16, num_splits=2, lengths=[100, 40], seq_q=40, options={"causal": True})


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"window": (50, 0)}], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_few_queries_without_a_cache(splits, options):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 3, 64), *[(2, 2, 90, 64)] * 2)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    named = {**options, "alibi_slopes": torch.rand(2, 4, generator=generator), "sinks": SINKS, "return_lse": True}
    ours = multiattn.fmha(q, k, v, backend="cutile", variant="split_keys", **named)
    truth = multiattn.fmha(q, k, v, backend="reference", **named)
    for got, wanted in zip(ours, truth, strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), atol=1e-2, rtol=1e-2)
    problem = Problem.of(q, k, v, **({} if "softcap" in options else options))
    config = SplitKeysConfig(tile_m=16, tile_n=16, splits=splits)
    plan = make_plan(BACKEND, problem, ARCHS["cpu"], variant="split_keys", config=config)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:3], math.nan)
    multiattn.launch(plan, q, k, v, out, lse)
    wanted, wanted_lse = multiattn.reference(q, k, v, **({} if "softcap" in options else options))
    torch.testing.assert_close(out.float(), wanted.float(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, wanted_lse.float(), atol=2e-5, rtol=1e-5)


# ---------------------------------------------------------------- parts made one


def problem_of(*, page=None, batch=8, seq_q=1, seq_kv=8192, splits=None, **sizes):
    """A cache of whole pages that is not full."""
    room = 0 if page is None else seq_kv // page
    cache = CacheSpec(batch, batch if page is None else 3 * room, page, room, room, splits=splits)
    given = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, **sizes}
    return Problem.contiguous(batch=batch, seq_q=seq_q, seq_kv=seq_kv, cache=cache, **given)


def plan_of(problem, arch="sm90", **options):
    return make_plan(BACKEND, problem, ARCHS[arch], probe=False, **options)


def packed_problem(*, rows, splits, seq_q=3, **sizes):
    """Packed queries of two sequences, at most `rows`."""
    given = {"heads_q": 32, "heads_kv": 1, "head_dim": 128, **sizes}
    cache = CacheSpec(2, 2, max_q=seq_q, splits=splits)
    return Problem.contiguous(batch=1, seq_q=rows, seq_kv=8192, cache=cache, **given)


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


def merged_truth(parts, sums, sinks=None):
    """The same in float64, of whole tensors."""
    parts, sums = parts.double().nan_to_num(), sums.double() * math.log(2)
    if sinks is not None:  # a part of its own, whose values are 0
        sink = sinks.double()[None, None, :, None].expand(1, *sums.shape[1:])
        parts, sums = torch.cat([parts, torch.zeros_like(parts[:1])]), torch.cat([sums, sink])
    lse = sums.logsumexp(0)
    weights = (sums - lse).exp().nan_to_num()
    return (parts * weights[..., None]).sum(0), lse


def check_merged(out, lse, truth, truth_lse):
    torch.testing.assert_close(out.double(), truth, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-5, rtol=1e-5)


def _merges():
    """Every number of parts with every head_dim, heads and sinks in turn: all pairs. The rest is for the night."""
    for (i, splits), (j, head_dim) in itertools.product(
        enumerate([2, 3, 5, 16, 17, 140]), enumerate([40, 64, 128, 256])
    ):
        for (k, rows), has_sinks in itertools.product(enumerate([(3, 5), (6, 1), (1, 7), (20, 3)]), (False, True)):
            in_turn = k == (i + j) % 4 and has_sinks == bool((i + j // 2) % 2)
            marks = () if in_turn else pytest.mark.nightly
            yield pytest.param(splits, head_dim, *rows, has_sinks, marks=marks)


@pytest.mark.parametrize(("splits", "head_dim", "heads", "seq_q", "has_sinks"), list(_merges()))
def test_parts_are_made_one(splits, head_dim, heads, seq_q, has_sinks):
    sizes = {"heads_q": heads, "heads_kv": 1, "head_dim": head_dim, "has_sinks": has_sinks}
    problem = problem_of(batch=2, seq_q=seq_q, splits=splits, **sizes)
    parts, sums = draw_parts(problem, splits)
    sinks = torch.linspace(-1, 2, heads) if has_sinks else None
    check_merged(*merge(problem, splits, parts, sums, sinks), *merged_truth(parts, sums, sinks))


@pytest.mark.parametrize("splits", [2, 3, 5, 16, 17])
@pytest.mark.parametrize(("heads", "last"), [(6, 5), (20, 1), (3, 0)])
def test_parts_of_packed_rows_are_made_one_up_to_the_last(splits, heads, last):
    problem = packed_problem(rows=7, heads_q=heads, splits=splits)
    parts, sums = draw_parts(problem, splits)
    out, lse = merge(problem, splits, parts, sums, last=last)
    truth, truth_lse = merged_truth(parts, sums)
    check_merged(out[:, :, :last], lse[..., :last], truth[:, :, :last], truth_lse[..., :last])
    assert (out[:, :, last:] == 7.0).all()
    assert (lse[..., last:] == 7.0).all()


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


@pytest.mark.parametrize(
    ("sizes", "splits", "rows"),
    [
        ({}, 2, (8, 1)),
        ({}, 3, (4, 1)),
        ({}, 5, (2, 1)),
        ({}, 16, (2, 1)),
        ({}, 17, (1, 1)),
        ({"heads_q": 6, "heads_kv": 1, "seq_q": 5}, 2, (8, 1)),
        ({"heads_q": 1, "heads_kv": 1, "seq_q": 5}, 2, (1, 8)),
        ({"head_dim": 40}, 2, (16, 1)),
        ({"head_dim": 64, "seq_q": 2}, 4, (8, 1)),
        ({"head_dim": 256, "seq_q": 9}, 4, (4, 1)),
    ],
)
def test_few_parts_are_merged_by_blocks_of_several_rows(sizes, splits, rows):
    """Heads come first, then queries; elements are no more than a block may have."""
    problem = problem_of(splits=splits, **sizes)
    assert merged_rows(problem, splits) == rows
    together, columns = merged_together(splits, problem.head_dim)
    assert splits > MERGE_FEW or math.prod(rows) == 2 or together * columns * math.prod(rows) <= MERGE_ELEMENTS
    x, y, z = merge_grid(problem, splits)
    assert x == math.ceil(problem.seq_q / rows[1]) * math.ceil(problem.head_dim / columns)
    assert y * rows[0] >= problem.heads_q > (y - 1) * rows[0]
    assert z == problem.batch


def test_blocks_of_packed_rows_have_one_query():
    assert merged_rows(packed_problem(rows=64, heads_q=4, splits=2), 2) == (4, 1)


@pytest.mark.parametrize(
    ("splits", "together", "columns"), [(2, 2, 128), (3, 4, 128), (5, 8, 128), (16, 16, 128), (17, 128, 32)]
)
def test_parts_alone_choose_how_a_row_is_merged(splits, together, columns):
    assert merged_together(splits, 128) == (together, columns)
    assert merged_together(splits, 32) == (together, 32)
    assert merged_together(splits, 256) == (together, columns)


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
    assert (only.tensors[3], own_areas_of(many), many.workspace_bytes) == ("out", {}, 0)
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


@pytest.mark.parametrize(
    ("change", "got", "allowed"),
    [
        ({"tile_m": 256}, "tile_m=256", "powers of two from 16 to 128"),
        ({"tile_n": 8}, "tile_n=8", "powers of two from 16 to 256"),
        ({"latency": 0}, "latency=0", "1 to 10"),
        ({"splits": 300}, "splits=300", "0 to 256"),
    ],
)
def test_configs_that_cannot_be(change, got, allowed):
    config = SplitKeysConfig(**{"tile_m": 16, "tile_n": 64, **change})
    reasons = plan_variant(BACKEND, find_variant(BACKEND, "split_keys"), problem_of(), ARCHS["sm90"], config)
    assert [(reason.code, reason.got, reason.allowed) for reason in reasons] == [("config", got, allowed)]


def code_of(problem):
    launches = launches_of(plan_of(problem))
    return tuple((get_kernel(it), id(get_signature(it)), it.occupancy) for it in launches)


def test_no_length_number_of_pages_heads_or_splits_compiles_anything():
    """But for the merge of few parts, which has a power of two of them, and one of heads."""
    found = set()
    for batch, seq_kv, heads, splits in [(1, 64, 8, 9), (3, 960, 4, 10), (16, 8192, 1, 16), (7, 131072, 2, 13)]:
        sizes = {"batch": batch, "seq_kv": seq_kv, "heads_kv": heads, "heads_q": 4 * heads, "splits": splits}
        found.add(code_of(problem_of(page=16, **sizes)))
    assert len(found) == 1
    first, second = found.pop()
    for splits in (2, 5, 100):
        others = code_of(problem_of(page=16, splits=splits))
        assert others[0] == first
        assert others[1] != second


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
    assert read_entry(first.cubin, first.kernel).smem_bytes * plan.config.occupancy <= 227 * 1024


@needs_compiler
@needs_cuobjdump
@pytest.mark.parametrize("splits", [pytest.param(2, marks=pytest.mark.nightly), 16])
def test_no_thread_needs_another_to_merge_few_parts(splits):
    """As tiles of all parts they had 255 registers, and what was left of them was in local memory."""
    _, merge = BACKEND.forward.export(plan_of(problem_of(splits=splits)), ())
    sass = disassemble(merge.cubin)
    assert "LDG.E.128" in sass or "LDG.E.64" in sass
    assert not any(it in sass for it in ("SHFL", "STL", "LDL"))
