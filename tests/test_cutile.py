"""cuTile's forward: grids, orders of tiles, widths, parts, 64 bits, rules, candidates, and what it refuses."""

import inspect
import itertools
import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

import multiattn
from multiattn import Problem
from multiattn.cutile import families, forward, launches
from multiattn.cutile.bind import bind
from multiattn.cutile.decode import PARTS_ENOUGH, page_rows_of
from multiattn.cutile.families import launches_of
from multiattn.cutile.forward import FAMILY, PIPELINES, STEPS, widths_of
from multiattn.cutile.launches import Together
from multiattn.mask import CAUSAL, FULL
from multiattn.operands import Operands
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS, Arch
from multiattn.plan.backend import find_variant, get, make_plan, plan_variant
from multiattn.plan.schedule import query_tiles, three_widths, two_widths
from multiattn.sequences import Batching, area_layouts

pytest.importorskip("cuda.tile")

import cuda.tile as ct
from cuda.tile._cext import default_tile_context
from cutile_checks import check, make_inputs

from multiattn.cutile import compile, cpu
from multiattn.cutile.compile import get_kernel
from multiattn.cutile.launch import through_cutile

BACKEND = get("cutile")
SM90 = ARCHS["sm90"]
WAYS = [("forward", "full"), ("backward", "two_pass"), ("backward", "atomic")]
SMALL = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=64)


@pytest.mark.parametrize(
    ("wanted", "heads", "got"),
    [
        (1, 16, 1), (4, 16, 4), (8, 16, 8), (32, 8, 8), (8, 12, 6), (8, 11, 11), (8, 13, 13), (2, 21, 3), (2, 11, 1),
        (8, 21, 7), (8, 71, 1), (4, 1, 1), (6, 12, 6), (4, 32 * 1009, 4), (2, 9, 3),
    ],
)  # fmt: skip
def test_as_many_heads_together_as_divide_them(wanted, heads, got):
    assert launches.divisor_near(wanted, heads) == got


@pytest.mark.parametrize(
    ("wanted", "batch", "heads", "got"),
    [
        (8, 4, 16, Together(heads=8)), (32, 1, 8, Together(heads=8)), (32, 32, 8, Together(heads=32, entries=4)),
        (16, 16, 8, Together(heads=16, entries=2)), (15, 16, 8, Together(heads=8)), (8, 2, 11, Together(heads=11)),
        (8, 64, 1, Together(heads=8, entries=8)), (32, 3, 8, Together(heads=8)),
        (32, 6, 8, Together(heads=16, entries=2)),
        (32, 1009, 8, Together(heads=8)), (1, 5, 7, Together(heads=1)),
    ],
)  # fmt: skip
def test_heads_together_are_of_several_batch_entries_where_one_has_too_few(wanted, batch, heads, got):
    problem = Problem.contiguous(batch=batch, heads_q=heads, seq_q=64, head_dim=64, causal=True)
    config = FAMILY.config(tile_m=64, tile_n=64, heads_together=wanted)
    assert forward.together_of(problem, config) == got
    assert forward.together_of(replace(problem, band=FULL), config).entries == 1


@pytest.mark.parametrize("heads_together", [1, 3, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_every_order_of_tiles_covers_every_tile_of_a_linear_grid(heads_together, causal, monkeypatch):
    monkeypatch.setattr(forward, "is_linear", lambda *_: True)
    q, k, v = make_inputs(batch=2, heads_q=4, heads_kv=2, seq_kv=150, head_dim=16)
    config = FAMILY.config(tile_m=32, tile_n=16, heads_together=heads_together)
    check(config, q, k, v, causal=causal)  # the interpreter raises if two blocks own one tile


def test_a_product_and_a_shift_divide():
    made = random.Random(0)
    most = launches.MAX_QUOTIENT - 1
    for divisor in (*range(1, 2000), *(made.randrange(1, most) for _ in range(2000)), most):
        factor, shift = launches.reciprocal(divisor)
        assert 0 < factor < 2**31
        near = most // divisor * divisor
        for number in (0, 1, divisor - 1, divisor, most, near, near - 1, made.randrange(most)):
            assert number * factor >> shift == number // divisor


def test_grids_of_many_blocks():
    one, config = Together(heads=1), FAMILY.config(tile_m=64, tile_n=64)
    few = Problem.contiguous(batch=70_000, heads_q=4, seq_q=64, head_dim=8)
    assert launches.factor_grid(query_tiles(few, 64)) == (280_000, 1, 1)
    many = Problem.contiguous(batch=2**20, heads_q=64, seq_q=1, head_dim=8)
    x, y, _ = launches.factor_grid(query_tiles(many, 64))
    assert x * y == 2**26
    assert x <= launches.MAX_GRID_X
    assert forward.is_linear(few, config, one)
    assert not forward.is_linear(replace(few, batch=60_000), config, one)
    assert forward.is_linear(replace(few, batch=2**15, heads_q=2**14), config, Together(heads=1))
    assert launches.factor_grid(2**31 - 1) is None  # a prime
    assert launches.factor_grid(2**31 - 2**16) is not None
    assert launches.factor_grid(2**31) is None  # which a kernel would number in 32 bits


# ---------------------------------------------------------------- 64 bits


@pytest.mark.parametrize(
    ("sizes", "exceeds"),
    [
        ({"batch": 2, "seq_q": 2**22}, False),  # the last of 2^31 elements
        ({"batch": 2, "seq_q": 2**22 + 1}, True),
        ({"seq_q": 2**23 - 1}, False),
        ({"seq_q": 2**23}, True),  # whose only batch entry and head have strides all the same, of 2^31
    ],
)
def test_64_bit_exactly_when_an_offset_or_a_stride_needs_it(sizes, exceeds):
    problem = Problem.contiguous(**{"batch": 1, "heads_q": 1, "head_dim": 256, **sizes})
    assert launches.needs_64bit(problem) == launches.needs_64bit(problem, backward=True) == exceeds
    plan = make_plan(BACKEND, problem, SM90, probe=False)
    binding = bind(plan)
    assert binding.constants["int64"] == str(exceeds)
    of_arrays = binding.arguments[: 4 * 9 + 7]
    narrow = [it.value for it in of_arrays if isinstance(it, abi.Number) and it.kind == "i32"]
    assert bool(narrow) != exceeds
    assert all(value <= abi.INT32_MAX for value in narrow)


# ---------------------------------------------------------------- launches


@pytest.mark.parametrize("is_64bit", [False, True])
def test_a_launch_has_the_parameters_of_its_kernel_in_order(is_64bit, monkeypatch):
    if is_64bit:
        monkeypatch.setattr("multiattn.plan.abi.INT32_MAX", 0)
    for (direction, variant), has_dlse in itertools.product(WAYS, (False, True)):
        plan = make_plan(BACKEND, SMALL, SM90, direction=direction, variant=variant, probe=False)
        for launch in families.launches_of(plan, has_dlse=has_dlse):
            kernel = get_kernel(launch)
            assert list(inspect.signature(kernel._pyfunc).parameters) == [
                *launch.arrays,
                *launch.optional,
                *launch.scalars,
            ]
            nodes = kernel._annotated_function.parameter_annotations
            for array, node in zip(launch.arrays.values(), nodes, strict=False):
                known = node.array or ct.ArrayAnnotation()
                assert (known.index_dtype, launch.is_64bit) == (ct.int64 if is_64bit else ct.int32, is_64bit)
                assert known.static_shape_dims == ((3,) if len(array.layout.shape) == 4 else ())


@pytest.mark.parametrize(("direction", "variant"), WAYS)
def test_cutile_itself_gets_the_strides_that_were_planned(direction, variant, monkeypatch):
    """PyTorch leaves the stride of a one-element dimension arbitrary, and cuTile would specialise on it."""
    launched = []
    monkeypatch.setattr("cuda.tile.launch", lambda stream, grid, kernel, args: launched.append((stream, args)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    q, k, v = make_inputs(seq_q=1)
    problem = Problem.of(q, k, v)
    odd = [q.as_strided(q.shape, (5, 64, 3, 1)), k.as_strided(k.shape, (7, 9, 64, 1)), v]
    row = torch.empty(q.shape[:3]).as_strided(q.shape[:3], (1, 1, 3))
    rest = (q, row, *map(torch.empty_like, (q, k, v))) if direction == "backward" else ()
    plan = make_plan(BACKEND, problem, SM90, direction=direction, variant=variant, probe=False)
    through_cutile(plan)(Operands(*odd, q, row, *rest))
    known = {**problem.layouts, **families.family_of(plan).own_areas(problem, plan.config)}
    for launch, (stream, args) in zip(families.launches_of(plan, has_dlse=bool(rest)), launched, strict=True):
        assert stream == "stream"
        for name, tensor in zip(launch.tensors, args, strict=False):
            assert tensor.stride() == known[name].strides, name
            assert name not in "qkv" or tensor.data_ptr() == odd["qkv".index(name)].data_ptr()


def test_heads_that_are_one_in_memory_overlap():
    q, k, v = make_inputs(heads_q=2, heads_kv=2)
    plan = make_plan(BACKEND, Problem.of(q, k[:, :1].expand(k.shape), v), SM90, probe=False)
    (launch,) = launches_of(plan)
    assert [launch.arrays[it].kind.overlaps for it in "qkv"] == [False, True, False]


def test_the_default_device_does_not_matter():
    q, k, v = make_inputs(head_dim=16)
    expected = multiattn.fmha(q, k, v, causal=True, backend="cutile")
    with torch.device("meta"):
        out = multiattn.fmha(q, k, v, causal=True, backend="cutile")
    assert torch.equal(out, expected)


# ---------------------------------------------------------------- rules and candidates


def swept(head_dim, seq, **options):
    """The Plan of a problem of 16k tokens with 2048 columns of queries, and the configs that a sweep tries for it."""
    sizes = {"batch": max(16384 // seq, 1), "heads_q": 2048 // head_dim, "seq_q": seq, "head_dim": head_dim}
    problem = Problem.contiguous(**sizes | options)
    tried = BACKEND.forward.candidates(find_variant(BACKEND, "full"), problem, SM90)
    return make_plan(BACKEND, problem, SM90, probe=False), tried


@pytest.mark.parametrize(("head_dim", "seq", "few"), [(256, 4096, False), (256, 8192, True), (128, 16384, True)])
def test_a_sweep_tries_few_heads_together_where_the_keys_of_four_crowd_l2(head_dim, seq, few):
    """The keys and values of one head are 4, 8 and 8 MiB, of an L2 of 50."""
    _, tried = swept(head_dim, seq, batch=1, heads_q=16, causal=True)
    heads = {config.heads_together for config in tried if config.lazy_max and config.scheduler == "one_tile"}
    assert heads == ({1, 2, 4, 8, 16, 32} if few else {4, 8, 16, 32})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [40, 64, 88, 112, 120, 128, 184, 208, 256])
def test_a_sweep_tries_what_the_rules_have(head_dim, dtype, causal):
    for seq in (512, 1024, 2048, 3000, 4096, 8192, 16384):
        plan, tried = swept(head_dim, seq, causal=causal, dtype=dtype)
        assert plan.config in tried


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", range(40, 128, 16))
def test_keys_whose_rows_are_no_whole_sectors_are_read_by_tiles_of_128_queries(head_dim, dtype, causal):
    """Tiles of 64 read them twice as often, at half the rate: D=40 had 171 TFLOPS for 317."""
    for seq in (512, 1024, 3000, 4096, 16384):
        assert swept(head_dim, seq, causal=causal, dtype=dtype)[0].config.tile_m == 128


@pytest.mark.parametrize(
    ("head_dim", "causal", "parts"), [(88, True, 2), (104, True, 3), (200, True, 3), (72, False, 2)]
)
def test_head_dims_between_powers_of_two_have_parts(head_dim, causal, parts):
    plan, tried = swept(head_dim, 4096, heads_q=16, causal=causal)
    assert sum(width > 0 for width in widths_of(plan.problem, plan.config)["qk"].columns) == parts
    assert plan.config in tried


# ---------------------------------------------------------------- refused


def test_sm103_keeps_no_queries_in_registers():
    config = FAMILY.config(tile_m=64, tile_n=64, q_in_registers=True)
    (reason,) = plan_variant(BACKEND, find_variant(BACKEND, "full"), SMALL, ARCHS["sm103"], config)
    assert (reason.code, reason.got, reason.allowed) == ("config", "q_in_registers=True on sm103", "False")


@pytest.mark.parametrize(("installed", "got"), [(None, "no cuda-tile"), ("1.2.0", "cuda-tile 1.2.0")])
def test_a_missing_module_is_a_reason(monkeypatch, installed, got):
    monkeypatch.setattr("multiattn.plan.toolchain.version_of", lambda _: installed)
    for arch in (ARCHS["cpu"], SM90):
        reason = BACKEND.probe(arch)[0]
        assert (reason.code, reason.got) == ("module", got)
    assert BACKEND.versions()["tileiras"] is None


@pytest.mark.parametrize(("found", "got"), [(None, "no tileiras"), ("13.2.51", "tileiras 13.2.51")])
def test_a_missing_compiler_is_a_reason_only_where_it_is_needed(monkeypatch, found, got):
    monkeypatch.setattr("multiattn.cutile._tileiras_version", lambda: found)
    assert BACKEND.probe(ARCHS["cpu"]) == ()
    (reason,) = BACKEND.probe_compiler()
    assert (reason.code, reason.got) == ("compiler", got)
    assert reason in BACKEND.probe(SM90)


def test_an_old_driver_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("multiattn.cutile._driver_version", lambda: (12, 8))
    monkeypatch.setattr("multiattn.cutile._tileiras_version", lambda: "13.4.92")
    (reason,) = BACKEND.probe(SM90)
    assert (reason.code, reason.got) == ("driver", "a driver for CUDA 12.8")


def test_no_nvidia_driver_is_a_reason(monkeypatch):
    """As beside an AMD GPU, where torch too says that CUDA is available."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("multiattn.cutile._tileiras_version", lambda: "13.4.92")
    monkeypatch.setattr("multiattn.run.driver.load_driver", lambda: None)
    reasons = BACKEND.probe(Arch(name="gfx942", title="AMD GPU"))
    assert ("driver", "no NVIDIA driver") in [(reason.code, reason.got) for reason in reasons]


# ---------------------------------------------------------------- head_dim in tiles of columns


ONLINE = FAMILY.config(tile_m=32, tile_n=32, split_head_dim=True)
LAZY = replace(ONLINE, lazy_max=True)
THREE = {"split_head_dim": True, "split_tail": True}


def problem(head_dim, head_dim_v=None):
    return Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim, head_dim_v=head_dim_v)


def test_widths_are_the_fewest_columns_of_two_tiles_the_first_half_of_one():
    for head_dim in range(1, 257):
        whole = max(16, 1 << (head_dim - 1).bit_length())
        config = replace(LAZY, split_head_dim=False)
        assert widths_of(problem(head_dim), config)["qk"].columns == (whole, 0, 0)
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
            assert widths_of(problem(head_dim), replace(LAZY, **THREE))["qk"].columns == three_widths(head_dim)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "qk", "vo"),
    [(192, 128, (128, 64, 0), (128, 0, 0)), (64, 128, (64, 0, 0), (64, 64, 0)), (256, 104, (128, 128, 0), (64, 32, 16)),
     (8, 40, (16, 0, 0), (32, 16, 0))],
)  # fmt: skip
def test_the_narrower_of_two_widths_is_in_parts_where_that_saves_columns(head_dim, head_dim_v, qk, vo):
    found = widths_of(problem(head_dim, head_dim_v), replace(LAZY, **THREE))
    assert (found["qk"].columns, found["vo"].columns) == (qk, vo)


@pytest.mark.parametrize("variant", STEPS)
def test_every_rung_can(variant):
    config = STEPS[variant].step.limit(ONLINE)
    plan = make_plan(BACKEND, problem(96), SM90, variant=variant, config=config, probe=False)
    (launch,) = launches_of(plan)
    assert launch.constants.qk.columns == (64, 32, 0)


@pytest.mark.parametrize(
    ("head_dim", "ways"), [(96, PIPELINES), (192, PIPELINES), (64, ()), (128, ()), (256, ("ahead",))]
)
def test_a_sweep_tries_two_parts_where_they_save_or_tiles_are_large(head_dim, ways):
    variant = find_variant(BACKEND, "full")
    for causal in (False, True):
        cell = replace(problem(head_dim), band=CAUSAL if causal else FULL)
        tried = BACKEND.forward.candidates(variant, cell, SM90)
        assert any(not config.split_head_dim for config in tried)
        assert {config.pipeline for config in tried if config.split_head_dim} <= set(ways)
        assert any(config.split_head_dim for config in tried) == bool(ways)


# ---------------------------------------------------------------- keys in parts


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


@pytest.mark.parametrize("page", [16, 64])
def test_values_that_are_in_keys_are_not_read_apart_from_them(page):
    cache = Batching.cached(1, 2 * 64 // page, page, 2 * 64 // page)
    sizes = {"heads_q": 4, "heads_kv": 1, "seq_q": 1, "seq_kv": 128, "head_dim": 320, "head_dim_v": 256}
    problem = Problem.contiguous(batch=1, **sizes, v_in_k=True, batching=cache)
    plan = make_plan(BACKEND, problem, ARCHS["cpu"], variant="split_keys")
    layouts = {**problem.layouts, **area_layouts(plan.config.splits, 1, 4, 1, 256)}
    tensors = {name: torch.zeros(it.shape, dtype=it.dtype) for name, it in layouts.items()}
    tensors["v"] += math.nan
    tensors["seqlens_kv"] += 100
    for launch in launches_of(plan):
        cpu.launch(launch.grid, get_kernel(launch), launch.arguments(lambda it: tensors[it.tensor]))
    assert not tensors["out"].any()


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


# ---------------------------------------------------------------- limits of time, and forks


def test_compilations_that_overlap_share_the_limit_and_leave_none(monkeypatch):
    """CuTile has one limit for the process, and one lock: whoever ends last puts both back."""
    monkeypatch.delenv("CUDA_TILE_COMPILER_TIMEOUT_SEC", raising=False)
    config, known = default_tile_context.config, compile.private.compile_cubin
    before, first, second = config.compiler_timeout_sec, compile._Compiling(), threading.Event()
    inside = threading.Event()

    def overlap():
        with first:
            inside.set()
            assert second.wait(60)
            assert config.compiler_timeout_sec == compile.COMPILE_SECONDS

    with ThreadPoolExecutor(1) as thread:
        with first:
            other = thread.submit(overlap)
            assert inside.wait(60)
        assert config.compiler_timeout_sec == compile.COMPILE_SECONDS
        assert compile.private.compile_cubin is not known
        second.set()
        other.result()
    assert (config.compiler_timeout_sec, compile.private.compile_cubin) == (before, known)


def test_an_export_shares_the_limit_of_what_is_compiled_beside_it(monkeypatch):
    """Else it put back a limit that was not there when it began, after the others had ended: for ever."""
    monkeypatch.delenv("CUDA_TILE_COMPILER_TIMEOUT_SEC", raising=False)
    config = default_tile_context.config
    before, beside = config.compiler_timeout_sec, ExitStack()

    def export(*_, **__):
        beside.close()  # the others end while it is under way
        assert config.compiler_timeout_sec == compile.COMPILE_SECONDS
        raise RuntimeError("far enough")

    monkeypatch.setattr(compile, "export_kernel", export)
    beside.enter_context(compile.compiling)
    with pytest.raises(RuntimeError, match="far enough"):
        compile.compile_with_remarks(None, None, SM90)
    assert config.compiler_timeout_sec == before


def test_a_fork_waits_for_compilations(monkeypatch):
    compiling, order = compile._Compiling(), []

    def fork():
        compiling.acquire()  # as `hold_across_fork` does it
        order.append("fork")
        compiling.release()

    with ThreadPoolExecutor(1) as thread:
        with compiling, compiling:
            forking = thread.submit(fork)
            time.sleep(0.05)
            order.append("compiled")
        forking.result()
    assert order == ["compiled", "fork"]


@pytest.mark.parametrize(("heads_q", "heads_kv", "seq", "head_dim"), [(12, 4, 3333, 256), (16, 16, 6000, 40)])
def test_few_heads_under_a_mask_run_together_for_callers_who_name_the_variant(heads_q, heads_kv, seq, head_dim):
    sizes = {"batch": 1, "heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq, "seq_kv": seq, "head_dim": head_dim}
    problem = Problem.contiguous(**sizes, causal=True)
    best = make_plan(BACKEND, problem, SM90, probe=False)
    assert best.config.heads_together == 16
    assert make_plan(BACKEND, problem, SM90, variant=best.variant, probe=False).config == best.config
