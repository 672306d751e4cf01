"""Packed batches in the Triton kernels: the lists of tiles, and what code depends on. Parity has the numbers."""

import random

import pytest
import torch
from packed_lists import LISTS, WRONG_LISTS, WRONG_ROWS, listed, starts
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from multiattn import aot
from multiattn.operands import Options
from multiattn.packed import LIST_FIELDS
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import make_plan
from multiattn.problem import Problem, problem_of
from multiattn.sequences import Batching
from multiattn.triton import BACKEND
from multiattn.triton.calls import calls_of
from multiattn.triton.cpu import interpreter
from multiattn.triton.kernels.constants import ListConstants
from multiattn.triton.kernels.lists import list_tiles
from multiattn.varlen import Lengths, pack, with_packing

RANDOM = random.Random(0)

# ---------------------------------------------------------------- lists of tiles


@pytest.mark.parametrize(("lengths_q", "lengths_kv", "behind", "tiles", "parts"), LISTS)
def test_lists_have_every_tile_the_costly_ones_first(lengths_q, lengths_kv, behind, tiles, parts):
    rows = (sum(lengths_q) + behind, sum(lengths_kv) + behind)
    group = 16 if len(lengths_q) > 16 else 128
    check_lists([starts(lengths_q), starts(lengths_kv)], rows, tiles, group, parts)


@pytest.mark.parametrize(("cu_seqlens", "longest"), WRONG_LISTS)
def test_lists_name_rows_that_there_are_whatever_is_given(cu_seqlens, longest):
    check_lists(cu_seqlens, WRONG_ROWS, (16, 32), 16, 2, longest)


def check_lists(cu_seqlens, rows, tiles, group, parts, longest=(0, 0)):
    """Each list has what a list made by hand has, as far as there is room, and nothing behind it is written."""
    sequences = len(cu_seqlens[0]) - 1
    packing = Batching.packed(sequences, *longest)
    longest = packing.longest(*rows)
    lists = [
        torch.full((packing.tiles_max(count, tile) + 9, len(LIST_FIELDS)), 7777, dtype=torch.int32) if tile else None
        for count, tile in zip(rows, tiles, strict=True)
    ]
    room = [0 if it is None else len(it) - 9 for it in lists]
    counter = torch.full((1,), 5, dtype=torch.int32)
    constants = ListConstants(query_tile=tiles[0], key_tile=tiles[1], last_first=True, group=group)
    grid = ((sequences + 1) // group + 1) * parts * sum(map(bool, tiles))
    sizes = (sequences, *rows, *longest, *room, parts)
    interpreter.run(list_tiles, grid, *cu_seqlens, *lists, counter, *sizes, constants)
    assert counter.item() == 0
    for it, made in enumerate(lists):
        if made is not None:
            own, other = (cu_seqlens[side].tolist() for side in (it, 1 - it))
            sides = (rows[it], rows[1 - it]), tiles[it], (longest[it], longest[1 - it])
            wanted = listed(own, other, *sides, of_keys=bool(it), last_first=True)[: room[it]]
            assert made[: len(wanted)].tolist() == [[*it, 0, 0] for it in wanted]
            assert made[len(wanted) : room[it], 0].tolist() == [-1] * (room[it] - len(wanted))
            assert (made[room[it] :] == 7777).all()


# ---------------------------------------------------------------- compiled code

TARGET = make_backend(GPUTarget("cuda", 90, 32))


def specialised(call):
    """All that Triton tells compiled kernels of one source apart by."""
    kernel = call.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, TARGET)
    _bound, specialisation, options = bind(*call.stubs(), **call.table.options)
    return kernel.__name__, f"{specialisation} {options}"


def codes_of(lengths, *, has_bias):
    """The code that a batch with rows behind its last sequence runs, in both directions."""
    rows = [sum(it) + RANDOM.randrange(3) for it in lengths]
    q, k = (torch.empty(count, heads, 64, dtype=torch.bfloat16) for count, heads in zip(rows, (4, 2), strict=True))
    given = Lengths(*map(starts, lengths), *map(max, lengths))
    bias = torch.empty(1, 1, given.max_seqlen_q, given.max_seqlen_kv, requires_grad=True) if has_bias else None
    operands, options = with_packing(pack(q, k, k, given), Options(99, 0, None), given, None, None, bias, None)
    problem, calls = problem_of(operands, options), []
    for direction in ("forward", "backward"):
        plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction=direction, probe=False)
        calls += calls_of(plan)
    return tuple(map(specialised, calls))


@pytest.mark.parametrize(("batches", "has_bias"), [(200, False), (20, True)], ids=["plain", "bias"])
def test_batches_of_any_lengths_run_the_same_code(batches, has_bias):
    found = set()
    for _ in range(batches):
        sizes = RANDOM.randrange(2, 200), RANDOM.choice((3, 64, 900))
        own, other = ([RANDOM.randrange(2, sizes[1]) for _ in range(sizes[0])] for _ in range(2))
        found.add(codes_of((own, other), has_bias=has_bias))
    assert len(found) == 1


def test_emitted_kernels_of_a_packed_batch_are_to_be_read_not_launched(tmp_path):
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=90, head_dim=64, batching=Batching.packed(3), causal=True)
    plan = make_plan(BACKEND, problem, ARCHS["sm80"], variant="math", probe=False)
    exported = BACKEND.forward.export(plan, ())
    assert [it.kernel for it in exported] == ["list_tiles", "attention_forward"]
    cubin, *_ = aot.write(tmp_path, plan, exported)
    with pytest.raises(ValueError, match="of a packed batch; allowed kernels of batches"):
        aot.load(cubin)
