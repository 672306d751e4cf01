"""Packed batches in every language: the lists of tiles that kernels make, launches, ragged maps, emitted kernels.

Parity has the numbers, and test_compiles.py what code depends on.
"""

import types

import pytest
import torch
from cuda_runs import CONFIG, on_cpu
from packed_lists import LISTS, WRONG, WRONG_ROWS, listed, starts

from multiattn import aot
from multiattn.cuda import BACKEND as CUDA
from multiattn.cuda.bind import bind
from multiattn.cuda.cpu import host
from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import launches_of, list_launch
from multiattn.cuda.params import params_of
from multiattn.cuda.source import ListParams
from multiattn.cuda.wgmma import tensor_maps
from multiattn.packed import LIST_FIELDS, RAGGED_ROWS, TILE_LISTS, ragged
from multiattn.plan.abi import WORKSPACE
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.problem import Problem
from multiattn.sequences import Batching

SM90 = ARCHS["sm90"]


def problem_of(queries: int = 300, keys: int = 500, sequences: int = 3, **more) -> Problem:
    """Four heads, two of keys, D=64: so many rows of q and of k in so many sequences."""
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 2, "seq_q": queries, "seq_kv": keys, "head_dim": 64}
    return Problem.contiguous(**sizes | more, batching=Batching.packed(sequences))


def plan_of(problem, backend=CUDA, **options):
    """A plan for sm90."""
    return make_plan(backend, problem, SM90, probe=False, **options)


# ---------------------------------------------------------------- lists of tiles


def by_cuda(cu_seqlens, lists, counter, rows, longest, room, tiles, parts, *, cut):
    packing, names = Batching.packed(len(cu_seqlens[0]) - 1), ("rows", "longest", "tiles", "tile")
    numbers = zip(names, (rows, longest, room, tiles), strict=True)
    fields = {f"{name}_{side}": it for name, both in numbers for side, it in zip(("q", "kv"), both, strict=True)}
    fields |= {f"cu_seqlens_{side}": it.data_ptr() for side, it in zip(("q", "kv"), cu_seqlens, strict=True)}
    fields |= {name: it.data_ptr() for name, it in zip(TILE_LISTS, lists, strict=True) if it is not None}
    launch = list_launch(packing, cut=cut)
    params = host.aligned(bytes(ListParams(**fields, next_tile=counter.data_ptr(), sequences=packing.sequences)))
    library = host.load(host.build([launch.kernel]))
    host.run(library, launch.kernel.name, params, blocks=launch.blocks, threads=launch.kernel.threads, smem_bytes=0)


def by_triton(cu_seqlens, lists, counter, rows, longest, room, tiles, parts, *, cut):
    from multiattn.triton.cpu import interpreter
    from multiattn.triton.kernels.constants import ListConstants
    from multiattn.triton.kernels.lists import list_tiles

    sequences = len(cu_seqlens[0]) - 1
    group = 16 if parts > 1 else 128
    constants = ListConstants(query_tile=tiles[0], key_tile=tiles[1], last_first=True, cut=cut, group=group)
    grid = ((sequences + 1) // group + 1) * parts * sum(map(bool, tiles))
    sizes = (sequences, *rows, *longest, *room, parts)
    interpreter.run(list_tiles, grid, *cu_seqlens, *lists, counter, *sizes, constants)


def by_cutile(cu_seqlens, lists, counter, rows, longest, room, tiles, parts, *, cut):
    import cuda.tile as ct

    from multiattn.cutile import cpu
    from multiattn.cutile.kernels.constants import ListTilesConstants
    from multiattn.cutile.kernels.packed import list_tiles_kernel

    group = 16 if parts > 1 else 32
    constants = ListTilesConstants(
        query_tile=tiles[0], key_tile=tiles[1], last_first=True, cut=cut, group=group, compared=group
    )
    grid = (parts, len(cu_seqlens[0]) // group + 1, sum(map(bool, tiles)))
    given = tuple(it for it in lists if it is not None)
    cpu.launch(grid, ct.kernel(list_tiles_kernel(constants)), (tuple(cu_seqlens), given, (*rows, *room, *longest)))
    counter.zero_()  # tiles are not handed out by one


MAKERS = {"cuda": by_cuda, "triton": by_triton, "cutile": by_cutile}
each_language = pytest.mark.parametrize("language", [pytest.param("cuda", marks=on_cpu), "triton", "cutile"])


@each_language
@pytest.mark.parametrize("cut", [False, True], ids=["of sequences", "cut by sequences"])
@pytest.mark.parametrize(("lengths_q", "lengths_kv", "behind", "tiles", "parts"), LISTS)
def test_lists_have_every_tile_the_costly_ones_first(language, lengths_q, lengths_kv, behind, tiles, parts, cut):
    rows = (sum(lengths_q) + behind, sum(lengths_kv) + behind)
    check_lists(language, [starts(lengths_q), starts(lengths_kv)], rows, tiles, parts, cut=cut)


@each_language
@pytest.mark.parametrize("longest", [(0, 0), (35, 17)], ids=["any", "bounded"])
@pytest.mark.parametrize("wrong", WRONG)
def test_lists_name_rows_that_there_are_whatever_is_given(language, wrong, longest):
    cu_seqlens = [torch.tensor(it, dtype=torch.int32) for it in WRONG[wrong]]
    for cut in (False, True):
        check_lists(language, cu_seqlens, WRONG_ROWS, (16, 32), 2, longest, cut=cut)


def check_lists(language, cu_seqlens, rows, tiles, parts, longest=(0, 0), *, cut):
    """Each list has what a list made by hand has, as far as there is room, and nothing behind it is written."""
    packing = Batching.packed(len(cu_seqlens[0]) - 1, *longest)
    longest = packing.longest(*rows)
    room = [packing.tiles_max(count, tile) if tile else 0 for count, tile in zip(rows, tiles, strict=True)]
    lists = [torch.full((it + 9, len(LIST_FIELDS)), 7777, dtype=torch.int32) if it else None for it in room]
    counter = torch.full((1,), 5, dtype=torch.int32)
    MAKERS[language](cu_seqlens, lists, counter, rows, longest, room, tiles, parts, cut=cut)
    assert counter.item() == 0
    given = [it.tolist() for it in cu_seqlens]
    for side, made in enumerate(lists):
        if made is not None:
            order = slice(None, None, -1 if side else 1)
            wanted = listed(given[order], rows[order], tiles[side], longest[order], of_keys=bool(side), cut=cut)
            wanted = wanted[: room[side]]
            if language == "cutile":  # an array's part may not begin at its end: of no rows it begins at 0
                for entry in wanted:
                    entry[(4, 2)[side]] *= entry[(4, 2)[side] + 1] > 0
            count = len(wanted) if language == "cuda" else 0
            assert made[: len(wanted)].tolist() == [[*it, count, 0] for it in wanted]
            assert made[len(wanted) : room[side], 0].tolist() == [-1] * (room[side] - len(wanted))
            assert (made[room[side] :] == 7777).all()


# ---------------------------------------------------------------- launches


def test_the_kernel_of_lists_is_the_same_for_all_problems():
    made = {
        launches_of(make_plan(CUDA, problem_of(**options), ARCHS[arch], probe=False, **how))[0].kernel
        for arch in ("sm80", "sm90")
        for options in ({}, {"head_dim": 128, "dtype": "fp16"}, {"causal": True, "sequences": 1000})
        for how in ({"variant": "split_q+swizzle_qkv"}, {"direction": "backward", "variant": "atomic"})
    }
    assert [it.name for it in made] == ["list_tiles"]


QUERY_TILES = {"two_pass": 128, "wgmma_two_pass": 128, "atomic": 64, "wgmma": 64}
"""Queries of a tile of a backward's kernel that owns them, where the rule of the problem below chooses."""


@pytest.mark.parametrize(
    ("direction", "variant", "walks"),
    [
        ("forward", "split_q+swizzle_qkv", {"forward": "q"}),
        ("forward", "wgmma", {"forward_wgmma": "q"}),
        ("backward", "two_pass", {"backward_queries": "q", "backward_keys": "kv"}),
        ("backward", "wgmma_two_pass", {"backward_wgmma_queries": "q", "backward_wgmma_keys": "kv"}),
        ("backward", "atomic", {"prepare_rows": "q", "backward_keys": "kv"}),
        ("backward", "wgmma", {"prepare_statistics": "q", "backward_wgmma": "kv"}),
    ],
)
def test_lists_have_the_tiles_that_blocks_own_and_no_more(direction, variant, walks):
    """Entries of half a tile would be walked over twice, to the same result."""
    plan = plan_of(problem_of(4000, 6000, 5), direction=direction, variant=variant)
    rows = {"q": plan.config.tile_m if direction == "forward" else QUERY_TILES[variant], "kv": plan.config.tile_n}
    lists, *launches = launches_of(plan)
    params = params_of(lists, plan)
    blocks = {it.kernel.entry: it.blocks for it in launches}
    for entry, side in walks.items():
        heads, count = (plan.problem.heads_q, 4000) if side == "q" else (plan.problem.heads_kv, 6000)
        assert blocks[entry] == plan.problem.packing.tiles_max(count, rows[side]) * heads
        assert getattr(params, f"tile_{side}") == rows[side]


def test_hopper_lists_first_and_overlaps_what_is_before_it():
    listing, forward = launches_of(plan_of(problem_of(), config=CONFIG, variant="wgmma"))
    assert (listing.kernel.name, forward.kernel.name[-15:]) == ("list_tiles_overlapping", "_dynamic_packed")
    assert listing.kernel.overlaps
    assert forward.kernel.overlaps
    assert list(areas_of(plan_of(problem_of(), config=CONFIG, variant="wgmma"))) == [WORKSPACE, "query_list"]


# ---------------------------------------------------------------- ragged maps


@pytest.mark.parametrize("name", ["q", "k", "out"])
def test_a_ragged_map_begins_with_a_row_of_the_sequence_and_ends_with_its_last(name):
    """The address of row r of the sequence that has `count` rows and ends with row `end` of the tensor."""
    problem = problem_of()
    it = tensor_maps(problem, CONFIG.box_rows(problem))[name]
    end, count, head, column_bytes = 170, 60, 1, 2
    for row in (0, 17, 59):
        coordinates = (RAGGED_ROWS, end, head, RAGGED_ROWS - count + row)
        assert all(0 <= at < extent for at, extent in zip(coordinates, it.shape, strict=False))
        address = sum(at * stride for at, stride in zip(coordinates, it.strides, strict=True)) % 2**64
        _, of_head, of_row = problem.layouts[name].strides[:3]
        assert address == ((end - count + row) * of_row + head * of_head) * column_bytes
    assert RAGGED_ROWS - count + count >= it.shape[3]  # the row behind it is out of bounds


def test_rows_of_gluons_ragged_map_end_with_a_sequence():
    from multiattn.triton.cpu.gluon.tensors import MappedTensor
    from multiattn.triton.kernels.gluon.tiles import ROWS

    problem = Problem.contiguous(batch=1, heads_q=3, seq_q=1 << 29, seq_kv=1, head_dim=256, batching=Batching.packed(2))
    layout = ragged(problem.layouts["q"])
    assert all(stride * 2 < 1 << 40 and stride * 2 % 16 == 0 for stride in layout.strides[:-1])
    assert all(extent < 1 << 32 for extent in layout.shape)
    offset, rows = (1 << 29) - 7, 6
    told = {"base": torch.empty(1, dtype=torch.float16), "shape": layout.shape, "strides": layout.strides}
    it = MappedTensor(types.SimpleNamespace(**told, block_shape=[1, 1, 1, 4, 8], layout=None))
    it.memory.reach = lambda first, shape, strides, access: (first, shape[3], strides[3])
    for row, inside in ((0, 4), (3, 3), (6, 0)):
        at = ROWS.value, offset + rows, 2, ROWS.value - rows + row, 16
        first, found, stride = it.box(at, "a load")[0]
        assert (found, stride) == (inside, 3 * 256)
        assert first == ((offset + row) * 3 + 2) * 256 + 16


# ---------------------------------------------------------------- ahead of time


def test_no_launch_of_a_packed_forward_is_bound():
    plan = plan_of(problem_of(), variant="split_q+swizzle_qkv")
    with pytest.raises(ValueError, match="packing: got a packed batch of 3 sequences; allowed"):
        bind(plan, launches_of(plan)[1].image())


@pytest.mark.parametrize(("language", "variant"), [("cuda", "split_q+swizzle_qkv"), ("triton", "math")])
def test_kernels_of_a_packed_batch_can_be_written_and_are_refused_by_name(language, variant, tmp_path):
    backend = get(language)
    if reasons := backend.probe_compiler():
        pytest.skip("; ".join(map(str, reasons)))
    plan = plan_of(problem_of(causal=True), backend, variant=variant)
    exported = backend.forward.export(plan, ())
    assert len(exported) == 2
    assert "tiles" in exported[0].kernel
    written = aot.write(tmp_path, plan, exported)
    for path in (tmp_path, written[1]):
        with pytest.raises(ValueError, match=rf"packing: got {language}-forward-.*, of a packed batch; allowed"):
            aot.load(path)
