"""Packed batches in the cuTile kernels: the lists of tiles, and what code depends on. Parity has the numbers."""

import random
from dataclasses import replace

import pytest
import torch
from packed_lists import LISTS, WRONG_LISTS, WRONG_ROWS, listed, starts

from multiattn import Problem
from multiattn.packed import LIST_FIELDS
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.sequences import Batching

pytest.importorskip("cuda.tile")

import cuda.tile as ct

from multiattn.cutile import cpu
from multiattn.cutile.bind import bind_proven
from multiattn.cutile.claims import read_claims, tile_ir
from multiattn.cutile.compile import get_kernel, get_signature
from multiattn.cutile.families import launches_of
from multiattn.cutile.kernels.constants import ListTilesConstants
from multiattn.cutile.kernels.packed import list_tiles_kernel
from multiattn.plan.cubin import read_entry
from multiattn.plan.toolchain import disassemble, find_cuobjdump

BACKEND = get("cutile")
RANDOM = random.Random(0)


# ---------------------------------------------------------------- lists of tiles


@pytest.mark.parametrize(("lengths_q", "lengths_kv", "behind", "tiles", "parts"), LISTS)
def test_lists_have_every_tile_the_costly_ones_first(lengths_q, lengths_kv, behind, tiles, parts):
    rows = (sum(lengths_q) + behind, sum(lengths_kv) + behind)
    group = 16 if len(lengths_q) > 16 else 32
    check_lists([starts(lengths_q), starts(lengths_kv)], rows, tiles, parts, group)


@pytest.mark.parametrize(("cu_seqlens", "longest"), WRONG_LISTS)
def test_lists_name_rows_that_there_are_whatever_is_given(cu_seqlens, longest):
    check_lists(cu_seqlens, WRONG_ROWS, (16, 32), 2, 16, longest)


def check_lists(cu_seqlens, rows, tiles, parts, group, longest=(0, 0)):
    """Each list has what a list made by hand has, as far as there is room, and nothing behind it is written."""
    sequences = len(cu_seqlens[0]) - 1
    packing = Batching.packed(sequences, *longest)
    longest = packing.longest(*rows)
    room = [packing.tiles_max(count, tile) if tile else 0 for count, tile in zip(rows, tiles, strict=True)]
    made = [torch.full((size + 9 * bool(size), len(LIST_FIELDS)), 7777, dtype=torch.int32) for size in room]
    constants = ListTilesConstants(query_tile=tiles[0], key_tile=tiles[1], last_first=True, group=group, compared=group)
    grid = (parts, (sequences + 1) // group + 1, sum(map(bool, tiles)))
    given = tuple(it for it in made if len(it))
    kernel = ct.kernel(list_tiles_kernel(constants))
    cpu.launch(grid, kernel, (tuple(cu_seqlens), given, (*rows, *room, *longest)))
    for it in range(2):
        if tiles[it]:
            own, other = (cu_seqlens[side].tolist() for side in (it, 1 - it))
            sides = (rows[it], rows[1 - it]), tiles[it], (longest[it], longest[1 - it])
            wanted = listed(own, other, *sides, of_keys=bool(it), last_first=True)[: room[it]]
            for entry in wanted:  # an array's part may not begin at its end: of no rows it begins at 0
                others = (4, 2)[it]
                entry[others] *= entry[others + 1] > 0
            assert made[it][: len(wanted)].tolist() == [[*entry, 0, 0] for entry in wanted]
            assert made[it][len(wanted) : room[it], 0].tolist() == [-1] * (room[it] - len(wanted))
            assert (made[it][room[it] :] == 7777).all()


# ---------------------------------------------------------------- compiled

needs_compiler = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())) or "compiler found"
)
needs_cuobjdump = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")


def code_of(direction, variant, sequences, rows, **sizes):
    """The code that the kernels of a launch ask for."""
    rows_q, rows_kv = rows
    problem = Problem.contiguous(
        batch=1, heads_q=4, heads_kv=2, seq_q=rows_q, seq_kv=rows_kv, batching=Batching.packed(sequences), **sizes
    )
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction=direction, variant=variant, probe=False)
    launches = launches_of(plan)
    signatures = map(get_signature, launches)  # the same object each time: to make one takes longer than to launch
    return tuple((get_kernel(it), id(made), it.occupancy) for it, made in zip(launches, signatures, strict=True))


@pytest.mark.parametrize(
    ("direction", "variant", "options"),
    [
        ("forward", "full", {"head_dim": 64}),
        ("forward", "full", {"head_dim": 256, "causal": True}),
        ("forward", "full", {"head_dim": 128, "window": (100, 0)}),
        ("backward", "two_pass", {"head_dim": 128, "causal": True}),
        ("backward", "atomic", {"head_dim": 40, "window": (100, 0)}),
    ],
)
def test_200_batches_have_one_code(direction, variant, options):
    batches = [(RANDOM.randrange(200), (RANDOM.randrange(1, 20000), RANDOM.randrange(1, 20000))) for _ in range(200)]
    batches += [(0, (1, 1)), (3, (16, 32)), (1, (4096, 4096))]
    assert len({code_of(direction, variant, *batch, **options) for batch in batches}) == 1


@needs_compiler
@needs_cuobjdump
def test_sequences_come_and_go_by_tma_on_hopper():
    """A block makes the tensor maps of its sequence, and the compiler is given what the launch gives it."""
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=600, head_dim=64, batching=Batching.packed(5))
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction="backward", variant="atomic", probe=False)
    exported = BACKEND.backward.export(plan, ())
    launches = launches_of(plan)
    assert [it.kernel for it in launches] == ["list_tiles", "row_deltas", "all_grads", "round_query_grads"]
    for launch, made in zip(launches, exported, strict=True):
        bind_proven(launch, tile_ir(made.cubin), read_entry(made.cubin, made.kernel))
    read = read_claims.cache_info().misses
    others = launches_of(replace(plan, problem=replace(problem, seq_q=904, seq_kv=1208)))
    for launch, made in zip(others, exported, strict=True):
        bind_proven(launch, tile_ir(made.cubin), read_entry(made.cubin, made.kernel))
    assert read_claims.cache_info().misses == read, "the code of other lengths is the same: it is read once"
    sass = disassemble(exported[2].cubin)
    for name in ("UTMALDG.4D", "UTMASTG.4D", "UTMAREDG.4D"):
        assert name in sass
    assert "LDGSTS" not in sass
