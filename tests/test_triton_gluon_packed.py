"""Packed batches in the interpreted Gluon kernel, and what its compiler makes of them.

Tensor maps read and write memory as the hardware does, by coordinates that are outside or not and by addresses that
wrap around.
"""

import random
import types

import pytest
import torch
from packed_lists import starts

from multiattn import fmha_varlen
from multiattn.inspect.facts import read_kernel
from multiattn.mask import CAUSAL, FULL
from multiattn.operands import Options
from multiattn.packed import PackingSpec, ragged
from multiattn.plan import abi
from multiattn.plan.arch import by_name
from multiattn.plan.backend import find_variant, plan_variant
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem, problem_of
from multiattn.triton import BACKEND
from multiattn.triton.bind import known_of
from multiattn.triton.calls import calls_of
from multiattn.triton.compile import export_plan
from multiattn.triton.cpu import interpreter
from multiattn.triton.cpu.gluon import run
from multiattn.triton.cpu.gluon.tensors import MappedTensor
from multiattn.triton.families import tables_of
from multiattn.triton.gluon_forward import GluonConfig
from multiattn.triton.kernels.gluon import sequences
from multiattn.triton.table import Descriptor, Integer
from multiattn.varlen import Lengths, pack, with_packing

SM90 = by_name("sm90")
VARIANT = find_variant(BACKEND, "warp_specialized")
needs_compiler = pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))


def attend(
    pairs, *, behind=(0, 0), heads=(2, 1), head_dim=32, config=None, spoilt=(), sinks=None, together=None, **options
):
    """out and lse of all blocks, and what they should be; rows of `spoilt` sequences, and behind all, are NaN."""
    generator = torch.Generator().manual_seed(0)
    lengths = [[it[side] for it in pairs] for side in range(2)]
    cu_q, cu_kv = map(starts, lengths)
    rows = [sum(it) + more for it, more in zip(lengths, behind, strict=True)]
    shapes = ((rows[0], heads[0]), (rows[1], heads[1]), (rows[1], heads[1]))
    q, k, v = (torch.randn(*shape, head_dim, generator=generator).half() for shape in shapes)
    for tensor, cu in ((q, cu_q), (k, cu_kv), (v, cu_kv)):
        tensor[cu[-1] :] = torch.nan
        for sequence in spoilt:
            tensor[cu[sequence] : cu[sequence + 1]] = torch.nan
    given = Lengths(cu_q, cu_kv, max(lengths[0], default=0), max(lengths[1], default=0))
    asked = {name: options.pop(name, None) for name in ("softcap", "alibi_slopes", "bias", "score_mod")}
    unasked = dict.fromkeys(("window", "scale", "variant", "deterministic"))
    of_call = Options.of(has_sinks=sinks is not None, backend="auto", **{"causal": False, **unasked, **options})
    operands, of_call = with_packing(pack(q, k, v, given)._replace(sinks=sinks), of_call, given, *asked.values())
    problem = problem_of(operands, of_call)
    config = config or GluonConfig(tile_m=128, tile_n=16, scheduler="dynamic", lazy_max=True)
    listing, call = calls_of(plan_variant(BACKEND, VARIANT, problem, SM90, config), multiprocessors=3)

    out, lse = torch.full_like(q, torch.nan), torch.full((1, heads[0], rows[0]), torch.nan)
    counter = torch.full((4,), 5, dtype=torch.int32)  # the kernel that lists tiles sets it to 0
    tensors = operands._replace(out=pack(out, k, v, given).q, lse=lse).named
    entries = torch.full(problem.layouts["query_list"].shape, 7777, dtype=torch.int32)
    tensors |= {"query_list": entries, abi.WORKSPACE: counter}
    if together:
        call.table.rows["together"] = Integer(value=together)
    interpreter.run(listing.kernel, listing.table.grid, *listing.given(tensors))
    run(call.kernel, call.table.grid, *call.given(tensors), seed=0)
    assert counter[0] == (0 if config.counts else 5)
    truth = fmha_varlen(
        q.double(), k.double(), v.double(), cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=given.max_seqlen_q,
        max_seqlen_kv=given.max_seqlen_kv, backend="reference", return_lse=True, sinks=sinks, **asked, **options,
    )  # fmt: skip
    return out, lse[0], truth


def check(pairs, *, spoilt=(), **options):
    """Against the truth, but for queries of sequences that are `spoilt`: those are NaN in one way or another."""
    out, lse, truth = attend(pairs, spoilt=spoilt, **options)
    cu = starts([it[0] for it in pairs])
    for sequence in spoilt:
        rows = slice(cu[sequence], cu[sequence + 1])
        out[rows], lse[:, rows], truth[0][rows], truth[1][:, rows] = 0, 0, 0, 0
    torch.testing.assert_close(out.double(), truth[0].double(), atol=4e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), truth[1].double(), atol=2e-5, rtol=1e-5)


UNEVEN = ((50, 50), (0, 0), (1, 1), (200, 200), (17, 17), (130, 130))
APART = ((40, 90), (0, 30), (190, 33), (7, 0), (1, 150))
SLOPES = torch.tensor([[0.4, 0.1]]) * torch.arange(1, 6)[:, None]
BIAS = torch.randn(5, 2, 190, 150, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("scheduler", ["one_tile", "static", "dynamic"])
def test_every_tile_of_a_list_is_done_once_and_rows_behind_get_zeros(scheduler):
    """Cases of few and of many heads, in sections of which the last two are one."""
    config = GluonConfig(tile_m=192, tile_n=16, scheduler=scheduler, lazy_max=True)
    check(UNEVEN, behind=(70, 9), heads=(4, 2), causal=True, config=config)
    check(UNEVEN[2:5], heads=(6, 6), config=config, together=2)
    check((), behind=(200, 30), sinks=torch.tensor([0.5, -torch.inf]), config=config)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "head_dim": 48},  # in two pieces
        {"window": (30, 4), "scale": -0.2},
        {"window": (None, 7), "sinks": torch.tensor([0.7, -3.0])},
        {"alibi_slopes": SLOPES, "causal": True},
        {"softcap": 2.0, "bias": BIAS, "window": (60, 10)},
        {"bias": BIAS[:1, :, :, :1].contiguous()},  # read once in a tile of queries
    ],
    ids=lambda it: " ".join(it),
)
def test_a_sequence_sees_itself_alone(options):
    """Each has a diagonal, positions and tensors of its own; neither rows behind nor a sequence of NaN reach others."""
    check(APART, behind=(300, 9), spoilt=(2,), **options)


def test_rows_of_a_ragged_map_end_with_a_sequence():
    problem = Problem.contiguous(batch=1, heads_q=3, seq_q=1 << 29, seq_kv=1, head_dim=256, packing=PackingSpec(2))
    layout = ragged(problem.layouts["q"])
    assert all(stride * 2 < 1 << 40 and stride * 2 % 16 == 0 for stride in layout.strides[:-1])
    assert all(extent < 1 << 32 for extent in layout.shape)
    offset, rows = (1 << 29) - 7, 6
    tensor = torch.empty(1, dtype=torch.float16)
    it = MappedTensor(
        types.SimpleNamespace(
            base=tensor, shape=layout.shape, strides=layout.strides, block_shape=[1, 1, 1, 4, 8], layout=None
        )
    )
    it.memory.reach = lambda first, shape, strides, access: (first, shape[3], strides[3])
    for row, inside in ((0, 4), (3, 3), (6, 0)):
        at = sequences.ROWS.value, offset + rows, 2, sequences.ROWS.value - rows + row, 16
        first, found, stride = it.box(at, "a load")[0]
        assert (found, stride) == (inside, 3 * 256)
        assert first == ((offset + row) * 3 + 2) * 256 + 16


# ---------------------------------------------------------------- what the compiler makes of it


def packed_plan(head_dim=128, sequences=16, rows=16384, config=None, **options):
    problem = Problem.contiguous(
        batch=1, heads_q=16, seq_q=rows, seq_kv=rows, head_dim=head_dim, packing=PackingSpec(sequences), **options
    )
    return plan_variant(BACKEND, VARIANT, problem, SM90, config)


def test_no_code_depends_on_lengths_or_on_how_many_sequences_there_are():
    choose = random.Random(0)
    found = set()
    for _ in range(200):
        plan = packed_plan(sequences=choose.randrange(1, 300), rows=choose.randrange(1, 1 << 20), causal=True)
        for table in tables_of(plan):
            for name, _place, row in table.leaves():
                if isinstance(row, Descriptor):
                    found.add((table.kernel, name, row.rows, row.columns, len(row.layout.shape)))
                elif isinstance(row, Integer):
                    found.add((table.kernel, name, known_of(row)))
                else:
                    found.add((table.kernel, name, repr(row)))
    assert len(found) == len({it[:2] for it in found})


@needs_compiler
@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump reads machine code")
@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [(128, CAUSAL), *(pytest.param(*it, marks=pytest.mark.nightly) for it in ((64, CAUSAL), (128, FULL)))],
    ids=str,
)
def test_a_packed_batch_spills_nothing_in_loops(head_dim, mask):
    plan = packed_plan(head_dim, band=mask)
    kernel = export_plan(plan, ("ptx",))[-1]
    assert read_kernel(kernel, plan).hot_spills == 0
    ptx = kernel.texts["ptx"].decode()
    assert "cp.async.bulk.tensor.5d" in ptx
    assert "cp.async.bulk.tensor.4d" not in ptx
