"""Packed batches in the CUDA kernels: their lists of tiles, what is compiled and launched for them."""

from __future__ import annotations

import random

import cuda_fakes
import pytest
import torch
from cuda_runs import on_cpu, with_nvrtc
from packed_lists import WRONG_LISTS, WRONG_ROWS, listed, starts

from multiattn import aot
from multiattn.cuda import BACKEND
from multiattn.cuda import axes as points
from multiattn.cuda.bind import bind
from multiattn.cuda.cpu import host
from multiattn.cuda.instances import kernels_of, launches_of, list_launch
from multiattn.cuda.params import params_of
from multiattn.cuda.source import ListParams, translation_unit
from multiattn.operands import Options
from multiattn.packed import LIST_FIELDS, TILE_LISTS
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import make_plan
from multiattn.problem import Problem
from multiattn.sequences import Batching
from multiattn.varlen import Lengths, pack, with_packing

NO_TILE = [-1, 0, 0, 0, 0, 0, 0, 0]


@on_cpu
@pytest.mark.parametrize(
    ("lengths_q", "lengths_kv", "rows"),
    [
        pytest.param((5, 5, 5), (5, 5, 5), (15, 15), id="equal"),
        pytest.param((7, 0, 100, 33, 1), (40, 9, 0, 33, 64), (150, 150), id="empty"),
        pytest.param((), (), (3, 40), id="no_sequence"),
        pytest.param(tuple(range(60)), tuple(range(60, 0, -1)), (1770, 1830), id="many"),
    ],
)
def test_each_list_has_every_tile_once_and_longest_first(lengths_q, lengths_kv, rows):
    check_lists([starts(lengths_q), starts(lengths_kv)], rows)


@on_cpu
@pytest.mark.parametrize(("cu_seqlens", "longest"), WRONG_LISTS)
def test_lists_name_rows_that_there_are_whatever_is_given(cu_seqlens, longest):
    check_lists(cu_seqlens, WRONG_ROWS, longest)


def check_lists(operands, rows, longest=(0, 0)):
    """Each list has what a list made by hand has, as far as there is room, and nothing behind it is written."""
    sequences, tile_q, tile_kv = len(operands[0]) - 1, 32, 16
    packing = Batching.packed(sequences, *longest)
    longest = packing.longest(*rows)
    counts = packing.tiles_max(rows[0], tile_q), packing.tiles_max(rows[1], tile_kv)
    lists = [torch.full((count + 1, len(LIST_FIELDS)), 7, dtype=torch.int32) for count in counts]
    counter = torch.full((1,), 9, dtype=torch.int32)
    fields = {
        **{f"cu_seqlens_{it}": tensor.data_ptr() for it, tensor in zip(("q", "kv"), operands, strict=True)},
        **{name: tensor.data_ptr() for name, tensor in zip(TILE_LISTS, lists, strict=True)},
        "next_tile": counter.data_ptr(),
        "sequences": sequences,
        **dict(zip(("rows_q", "rows_kv", "tiles_q", "tiles_kv"), (*rows, *counts), strict=True)),
        **dict(zip(("longest_q", "longest_kv"), longest, strict=True)),
        "tile_q": tile_q,
        "tile_kv": tile_kv,
    }
    launch = list_launch(packing)
    kernel, params = launch.kernel, host.aligned(bytes(ListParams(**fields)))
    library = host.load(host.build([kernel]))
    host.run(library, kernel.name, params, blocks=launch.blocks, threads=kernel.threads, smem_bytes=0)
    cu_q, cu_kv = (it.tolist() for it in operands)
    wanted = [
        listed(cu_q, cu_kv, rows, tile_q, longest, of_keys=False, last_first=True),
        listed(cu_kv, cu_q, rows[::-1], tile_kv, longest[::-1], of_keys=True, last_first=True),
    ]
    for made, all_of_hand, count in zip(lists, wanted, counts, strict=True):
        hand = all_of_hand[:count]
        entries = [[*entry, len(hand), 0] for entry in hand]
        assert made[:count].tolist() == entries + [NO_TILE] * (count - len(hand))
        assert made[count].tolist() == [7] * 8
    assert counter.item() == 0


# ---------------------------------------------------------------- results

LENGTHS = (20, 33), (0, 40), (41, 7), (9, 0), (3, 70)


def packed_inputs(*lengths, behind, heads_q=4, heads_kv=2, head_dim=64):
    """q, k, v and dout, all NaN behind the last sequence, and the keywords of a call that packs them."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = zip(*lengths, strict=True)

    def make(heads, own):
        tensor = torch.randn(sum(own) + behind, heads, head_dim, generator=generator).half()
        tensor[sum(own) :] = torch.nan
        return tensor

    tensors = [make(heads_q, queries), make(heads_kv, keys), make(heads_kv, keys), make(heads_q, queries)]
    cu_seqlens = [starts(it) for it in (queries, keys)]
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), cu_seqlens, strict=True))
    return tensors, {**named, "max_seqlen_q": max(queries), "max_seqlen_kv": max(keys)}


# ---------------------------------------------------------------- what is compiled


def problem_of_random_lengths(generator: random.Random, *, has_score: bool) -> Problem:
    sequences = generator.randrange(0, 300)
    rows_q, rows_kv = generator.randrange(1, 3000), generator.randrange(1, 3000)
    cu_seqlens = torch.zeros(sequences + 1, dtype=torch.int32)
    lengths = Lengths(cu_seqlens, cu_seqlens, rows_q, rows_kv)
    tensors = [
        torch.empty(rows, heads, 64, dtype=torch.float16) for rows, heads in ((rows_q, 4), (rows_kv, 2), (rows_kv, 2))
    ]
    options = Options.of(causal=True, window=(100, None), scale=None, backend="cuda", variant=None, deterministic=None)
    slopes = torch.zeros(sequences, 4) if has_score else None
    softcap = 20.0 if has_score else None
    return Problem.of_operands(*with_packing(pack(*tensors, lengths), options, lengths, softcap, slopes, None, None))


@pytest.mark.parametrize("has_score", [False, True], ids=["plain", "score"])
def test_one_code_runs_batches_of_all_lengths(has_score):
    generator = random.Random(0)
    plans = {("forward", points.SPLIT_Q.name), ("backward", "atomic"), ("backward", "two_pass")}
    plans |= {("backward", "wgmma_two_pass")} | (set() if has_score else {("backward", "wgmma")})
    units: dict[tuple[str, str], set[str]] = {it: set() for it in plans}
    for _ in range(200 if not has_score else 40):
        problem = problem_of_random_lengths(generator, has_score=has_score)
        for direction, variant in plans:
            plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction=direction, variant=variant, probe=False)
            units[direction, variant].add(translation_unit(kernels_of(plan)))
    assert {it: len(sources) for it, sources in units.items()} == dict.fromkeys(plans, 1)


def test_the_kernel_of_lists_is_the_same_for_all_problems():
    made = {
        launches_of(
            make_plan(
                BACKEND, packed_problem(**options), ARCHS[arch], direction=direction, probe=False, variant=variant
            )
        )[0].kernel
        for arch in ("sm80", "sm90")
        for options in ({}, {"head_dim": 128, "dtype": "fp16"}, {"causal": True, "sequences": 1000})
        for direction, variant in (("forward", points.SPLIT_Q.name), ("backward", "atomic"))
    }
    assert {it.name for it in made} == {"list_tiles"}
    assert len(made) == 1


def packed_problem(*, sequences: int = 3, rows_q: int = 100, rows_kv: int = 120, **options) -> Problem:
    given = {"heads_q": 4, "heads_kv": 2, "head_dim": 64, **options}
    return Problem.contiguous(batch=1, seq_q=rows_q, seq_kv=rows_kv, batching=Batching.packed(sequences), **given)


# ---------------------------------------------------------------- launches


@with_nvrtc
def test_a_launch_lists_its_tiles_first_in_memory_of_its_own(monkeypatch, tmp_path):
    (q, k, v, _), packing = packed_inputs(*LENGTHS, behind=5)
    lengths = Lengths(**packing)
    options = Options.of(causal=True, window=None, scale=None, backend="cuda", variant=None, deterministic=None)
    operands, options = with_packing(pack(q, k, v, lengths), options, lengths, None, None, None, None)
    operands = operands._replace(out=torch.empty(1, 4, q.shape[0], 64), lse=torch.empty(1, 4, q.shape[0]))
    problem = Problem.of_operands(operands, options)
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], variant=points.SPLIT_Q.name, probe=False)
    driver = cuda_fakes.install(monkeypatch, tmp_path, type(params_of(kernels_of(plan)[-1], plan)))
    BACKEND.forward.prepare(plan)(operands)
    assert driver.kernels == [it.kernel.name for it in launches_of(plan)]
    assert [it.grid[0] for it in driver.launched] == [it.blocks for it in launches_of(plan)]
    lists, forward = ListParams.from_buffer_copy(driver.launched[0].parameters[0]), driver.structs[1]
    assert (lists.cu_seqlens_q, lists.cu_seqlens_kv) == tuple(it.data_ptr() for it in operands.indices.given)
    assert (lists.query_list, lists.key_list, lists.next_tile) == (forward.lists.query_list, None, None)
    assert (lists.rows_q, lists.tile_q, lists.tiles_q) == (q.shape[0], plan.config.tile_m, forward.plain.tiles)
    assert forward.plain.q == q.data_ptr()
    assert plan.workspace_bytes == problem.layouts["query_list"].size_bytes


# ---------------------------------------------------------------- ahead of time


def test_no_launch_of_a_packed_forward_is_bound():
    plan = make_plan(BACKEND, packed_problem(), ARCHS["sm90"], variant=points.SPLIT_Q.name, probe=False)
    with pytest.raises(ValueError, match="packing: got a packed batch of 3 sequences; allowed"):
        bind(plan, launches_of(plan)[1].image())


@with_nvrtc
def test_kernels_of_a_packed_batch_can_be_written_and_are_refused_by_name(tmp_path):
    plan = make_plan(BACKEND, packed_problem(), ARCHS["sm90"], variant=points.SPLIT_Q.name, probe=False)
    exported = BACKEND.forward.export(plan, ())
    assert [(it.kernel.rpartition("_")[2], it.binding) for it in exported] == [("tiles", None), ("packed", None)]
    written = aot.write(tmp_path, plan, exported)
    assert [it.name.split("-")[6:8] for it in written[:-1]] == [["packed", "0"], ["packed", "1"]]
    for path in (tmp_path, written[1]):
        with pytest.raises(ValueError, match=r"packing: got cuda-forward-.*, of a packed batch; allowed"):
            aot.load(path)
