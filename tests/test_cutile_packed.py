"""Packed batches in the cuTile kernels: the lists of tiles, both directions interpreted, and what code depends on."""

import math
import random
from dataclasses import replace

import pytest
import torch
from packed_lists import LISTS, WRONG_LISTS, WRONG_ROWS, listed, starts

import multiattn
from multiattn import Problem
from multiattn.operands import Indices
from multiattn.packed import LIST_FIELDS, PackingSpec
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan

pytest.importorskip("cuda.tile")

import cuda.tile as ct

from multiattn.cutile import cpu
from multiattn.cutile.bind import bind_proven
from multiattn.cutile.claims import read_claims, tile_ir
from multiattn.cutile.compile import get_kernel, get_signature
from multiattn.cutile.configs import CutileConfig
from multiattn.cutile.kernels.constants import ListTilesConstants
from multiattn.cutile.kernels.packed import list_tiles_kernel
from multiattn.cutile.table import launches_of
from multiattn.plan.cubin import read_entry
from multiattn.plan.toolchain import disassemble, find_cuobjdump

BACKEND = get("cutile")
RANDOM = random.Random(0)
UNEVEN = [50, 0, 1, 100, 17]
APART = ([40, 0, 99, 7, 1], [90, 30, 33, 0, 65])
"""More keys, no query, more queries, no key, one query."""


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
    packing = PackingSpec(sequences, *longest)
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


# ---------------------------------------------------------------- interpreted


def draw(lengths_q, lengths_kv, *, behind=(0, 0), heads=(2, 1), head_dim=32):
    """q, k and v, NaN behind the last sequence."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for lengths, rows, count in ((lengths_q, behind[0], heads[0]), *[(lengths_kv, behind[1], heads[1])] * 2):
        tensor = torch.randn(sum(lengths) + rows, count, head_dim, generator=generator).to(torch.bfloat16)
        tensor[sum(lengths) :] = math.nan
        tensors.append(tensor)
    return tensors


def lengths_of(lengths_q, lengths_kv):
    longest = {"max_seqlen_q": max(lengths_q), "max_seqlen_kv": max(lengths_kv)}
    return {"cu_seqlens_q": starts(lengths_q), "cu_seqlens_kv": starts(lengths_kv), **longest}


def close(got, wanted):
    torch.testing.assert_close(got.float(), wanted.float(), atol=2e-2, rtol=2e-2, equal_nan=True)


FORWARD = [
    pytest.param(([64, 64], [64, 64]), {}, id="equal"),
    pytest.param((UNEVEN, UNEVEN), {"causal": True}, id="causal"),
    pytest.param(APART, {"behind": (11, 3)}, id="apart-behind"),
    pytest.param(APART, {"behind": (11, 3), "window": (20, 4), "sinks": torch.tensor([0.5, -1.0])}, id="window-sinks"),
    pytest.param(APART, {"causal": True, "softcap": 3.0, "alibi_slopes": torch.rand(5, 2)}, id="scores"),
]


@pytest.mark.parametrize(("lengths", "options"), FORWARD)
def test_forward_is_that_of_each_sequence(lengths, options):
    options = dict(options)
    tensors = draw(*lengths, behind=options.pop("behind", (0, 0)))
    named = {**lengths_of(*lengths), **options, "return_lse": True}
    out, lse = multiattn.fmha_varlen(*tensors, backend="cutile", **named)
    truth, truth_lse = multiattn.fmha_varlen(*tensors, backend="reference", **named)
    close(out, truth)
    close(lse, truth_lse)


def test_nothing_of_a_neighbour_is_seen():
    lengths = [33, 70, 5, 65]
    q, k, v = draw(lengths, lengths)
    named = {**lengths_of(lengths, lengths), "return_lse": True, "backend": "cutile"}
    alone, alone_lse = multiattn.fmha_varlen(q, k, v, **named)
    for tensor in (q, k, v):
        tensor[33:103] = math.nan
    beside, beside_lse = multiattn.fmha_varlen(q, k, v, **named)
    apart = torch.ones(len(q), dtype=torch.bool)
    apart[33:103] = False
    torch.testing.assert_close(beside[apart], alone[apart], rtol=0, atol=0)
    torch.testing.assert_close(beside_lse[:, apart], alone_lse[:, apart], rtol=0, atol=0)
    assert beside[~apart].isnan().all()


BACKWARD = [
    pytest.param("two_pass", APART, {"behind": (11, 3), "causal": True}, id="causal"),
    pytest.param("atomic", APART, {"behind": (11, 3)}, id="atomic-behind"),
    pytest.param("atomic", (UNEVEN, UNEVEN), {"causal": True, "window": (20, 0)}, id="atomic-window"),
    pytest.param(
        "two_pass", APART, {"behind": (11, 3), "window": (9, 4), "sinks": torch.tensor([0.5, -1.0])}, id="sinks"
    ),
    pytest.param("two_pass", APART, {"bias": torch.randn(5, 2, 99, 90), "softcap": 3.0}, id="bias"),
]


@pytest.mark.parametrize(("variant", "lengths", "options"), BACKWARD)
def test_gradients_are_those_of_each_sequence(variant, lengths, options):
    options = dict(options)
    q, k, v = draw(*lengths, behind=options.pop("behind", (0, 0)))
    named = {**lengths_of(*lengths), **options}
    out, lse = multiattn.fmha_varlen(q, k, v, backend="reference", return_lse=True, **named)
    dout, dlse = torch.randn(q.shape).to(q.dtype), torch.randn(lse.shape)
    for tensor in (dout, dlse.T):
        tensor[sum(lengths[0]) :] = math.nan
    if "bias" in named:
        named["bias"] = named["bias"].requires_grad_()
    given = (q, k, v, out, lse, dout)
    got = multiattn.fmha_varlen_backward(*given, dlse=dlse, backend="cutile", variant=variant, **named)
    truth = multiattn.fmha_varlen_backward(*given, dlse=dlse, backend="reference", **named)
    assert len(got) == len(truth) >= 3
    for one, wanted in zip(got, truth, strict=True):
        close(one, wanted)


@pytest.mark.parametrize("pipeline", ["plain", "pilot_pairs"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 0)}], ids=["full", "causal", "window"])
def test_lazy_maxima_are_right_for_sequences_without_keys_and_with_few(pipeline, options):
    config = CutileConfig(tile_m=32, tile_n=16, lazy_max=True, pipeline=pipeline)
    q, k, v = draw(*APART, behind=(9, 2))
    named = lengths_of(*APART)
    problem = Problem.contiguous(
        batch=1, heads_q=2, heads_kv=1, seq_q=len(q), seq_kv=len(k), head_dim=32, packing=PackingSpec(5), **options
    )
    plan = make_plan(BACKEND, problem, ARCHS["cpu"], config=config)
    cu_seqlens = (named["cu_seqlens_q"], named["cu_seqlens_kv"])
    out, lse = torch.full_like(q, math.nan), torch.full((1, 2, len(q)), math.nan)
    views = [it.transpose(0, 1)[None] for it in (q, k, v, out)]
    multiattn.launch(plan, *views, lse, indices=Indices(*cu_seqlens))
    truth, truth_lse = multiattn.fmha_varlen(q, k, v, backend="reference", return_lse=True, **named, **options)
    close(out, truth)
    close(lse[0], truth_lse)


# ---------------------------------------------------------------- compiled

needs_compiler = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())) or "compiler found"
)
needs_cuobjdump = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")


def code_of(direction, variant, sequences, rows, **sizes):
    """The code that the kernels of a launch ask for."""
    rows_q, rows_kv = rows
    problem = Problem.contiguous(
        batch=1, heads_q=4, heads_kv=2, seq_q=rows_q, seq_kv=rows_kv, packing=PackingSpec(sequences), **sizes
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
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=600, head_dim=64, packing=PackingSpec(5))
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
