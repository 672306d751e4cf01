"""Packed batches in the Gluon kernel, as far as it goes with no GPU: producer and consumers as Python, with TMA played.

The list of tiles is the interpreted kernel's. Tensor maps read and write memory as the hardware does, by coordinates
that are outside or not and by addresses that wrap around; but a row of another sequence is an error here.
"""

import functools
import random
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from gluon_fakes import Array, Pointer, as_python, language, scores_in_python
from packed_lists import starts

from multiattn import fmha_varlen
from multiattn.inspect.facts import read_kernel
from multiattn.mask import CAUSAL, FULL
from multiattn.operands import Options
from multiattn.packed import PackingSpec, ragged
from multiattn.plan.arch import by_name
from multiattn.plan.backend import find_variant, plan_variant
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem, problem_of
from multiattn.score import bind_score
from multiattn.triton import BACKEND
from multiattn.triton.bind import known_of
from multiattn.triton.calls import calls_of
from multiattn.triton.compile import export_plan
from multiattn.triton.cpu import interpreter
from multiattn.triton.gluon_configs import GluonConfig
from multiattn.triton.kernels.gluon import forward, producer, sequences
from multiattn.triton.parameters import tables_of
from multiattn.triton.score import lowered_score
from multiattn.triton.table import Descriptor, Integer
from multiattn.varlen import Lengths, pack, with_packing

SM90 = by_name("sm90")
VARIANT = find_variant(BACKEND, "warp_specialized")
needs_compiler = pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))


class Map:
    """A tensor map of memory, which is a dense ``[T, H, D]`` of sequences that begin in the rows `starts`."""

    def __init__(self, row, memory, starts):
        self.row, self.memory, self.starts = row, memory, starts

    def elements(self, at):
        """Where the elements of a box are, -1 for those outside: ``[rows, columns]``."""
        layout = self.row.layout
        *outer, row, column = (int(it) for it in at)
        assert all(0 <= it < extent for it, extent in zip(outer, layout.shape, strict=False))
        rows, columns = row + np.arange(self.row.rows), column + np.arange(self.row.columns)
        inside = (rows >= 0) & (rows < layout.shape[-2])
        start = sum(it * stride for it, stride in zip(outer, layout.strides, strict=False)) * 2
        address = [(start + int(it) * layout.strides[-2] * 2) % (1 << 64) // 2 for it in rows[inside]]
        assert all(0 <= it < self.memory.size for it in address)
        begin = max(it for it in self.starts if it < outer[1])  # of the sequence that ends where the coordinates say
        assert all(begin <= it // layout.strides[-2] < outer[1] for it in address)
        found = np.full((len(rows), len(columns)), -1)
        found[inside] = np.array(address, dtype=np.int64).reshape(-1, 1) + columns
        found[:, columns >= layout.shape[-1]] = -1
        return found

    def load(self, at):
        """A box, with zeros outside."""
        where = self.elements(at)
        return np.where(where < 0, 0.0, self.memory.ravel()[where]).view(Array)

    def store(self, at, box):
        """Write a box. No element is written twice."""
        where = self.elements(at)
        written = where[where >= 0]
        assert np.isnan(self.memory.ravel()[written]).all()
        self.memory.ravel()[written] = box[where >= 0]


def fakes_of(program, programs, counter, words, buffers, staged):
    """In place of what runs at the same time: all that a producer sends stays, for consumers to find."""
    idle = types.SimpleNamespace(
        **dict.fromkeys(("index", "arrive", "store_wait", "wait", "expect"), lambda *arguments: None)
    )

    def atomic_add(pointer, number):
        counter[0] += number
        return int(counter[0] - number)

    def inline(text, *rest, **options):
        if not text.startswith("griddepcontrol"):
            return plain.inline_asm_elementwise(text, *rest, **options)

    plain = language(None)
    told = {
        "program_id": lambda axis: program,
        "num_programs": lambda axis: programs,
        "static_range": range,
        "int32": None,
    }
    of_language = {**vars(plain), **told, "atomic_add": atomic_add, "inline_asm_elementwise": inline, "store": None}
    nothing = ("await_full", "await_empty", "release", "skip", "fence_async_shared", "_await_turn", "_pass_turn")
    return {
        "gl": types.SimpleNamespace(**of_language),
        **dict.fromkeys(nothing, lambda *arguments: None),
        "await_launch_before": lambda: None,
        "mbarrier": idle,
        "tma": idle,
        "write_word": lambda of, at, value: words.__setitem__(int(at), int(value)),
        "read_word": lambda of, at: np.asarray(words[int(at)]).view(Array),
        "tma_load": lambda source, at, full, buffer: buffers.__setitem__(buffer, source.load(at)),
        "tma_store": lambda target, at, buffer: target.store(at, staged[buffer]),
    }


class Buffers:
    """Shared memory of one piece of head_dim: a buffer is its name and number."""

    def __init__(self, name):
        self.name = name

    def index(self, at):
        return self.name, int(at)


def run_block(program, programs, counter, rows, C, maps, entries, lse, sinks, aux):  # noqa: N803
    """One block: its producer to the end, then each of the consumers, with room for all that it sends."""
    C = replace(C, q_slots=1000, stages=1 << 20)  # noqa: N806
    names = ("seq_q", "seq_kv", "heads_q", "group", "tiles", "heads", "together", "left", "right")
    sizes = tuple(rows[name].value for name in names)
    words, buffers, staged = {}, {}, {}
    fakes = fakes_of(program, programs, counter, words, buffers, staged)
    pairs = {name: tuple(Buffers(f"{name}{piece}") for piece in "01") for name in ("q", "kv")}
    ring = (types.SimpleNamespace(index=lambda at: None),) * 2
    shared = (ring, ring, ring[0], ring[0], None, pairs["q"], pairs["kv"])
    as_python(producer.produce, fakes)(maps["q"], maps["k"], maps["v"], entries, None, sizes, shared, C)

    def piece_of(name, number):
        pieces = [buffers[f"{name}{piece}", int(number)] for piece in range(1 + (C.narrow > 0))]
        return np.concatenate(pieces, 1).view(Array)

    def make_scores(queries, place, *rest):
        return piece_of("q", queries[0].number) @ piece_of("kv", place).T

    def add_values(weights, out, narrow, place, *rest):
        values = weights @ piece_of("kv", place)
        return out + values[:, : C.wide], narrow + values[:, C.wide :] if C.narrow > 0 else narrow

    def queries_of(q_buffers, at, C):  # noqa: N803
        def keep(piece, values):
            staged[f"q{piece}", int(at)] = values

        return tuple(
            types.SimpleNamespace(dtype=None, number=at, store=functools.partial(keep, piece)) for piece in range(2)
        )

    def store(pointers, values, mask):
        assert np.isnan(lse[pointers[mask]]).all()
        lse[pointers[mask]] = values[mask]

    fakes["gl"].store = store
    fakes |= {
        "_make_scores": make_scores,
        "_add_values": add_values,
        "_queries": queries_of,
        "pack_weights": lambda weights, like: weights,
        "keep_packed": lambda weights: weights,
        "warpgroup_mma_wait": lambda number, values: values[0] if len(values) == 1 else tuple(values),
    }
    start = np.asarray(0).view(Array)
    scale = rows["scale"] if isinstance(rows["scale"], float) else 1.0
    for warpgroup in range(C.warpgroups):
        as_python(forward.consume, fakes)(warpgroup, maps["out"], start, sinks, aux, scale, sizes, shared, C)


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

    entries = torch.full(problem.layouts["query_list"].shape, 7777, dtype=torch.int32)
    counter = torch.full((1,), 5, dtype=torch.int32)
    of_cu = dict(zip(problem.cu_seqlens, (cu_q, cu_kv), strict=True))
    interpreter.run(
        listing.kernel, listing.table.grid, *listing.given({**of_cu, "query_list": entries, "workspace": counter})
    )
    arrays = {name: it.numpy().astype(np.float64) for name, it in (("q", q), ("k", k), ("v", v))}
    arrays["out"] = np.full(q.shape, np.nan)
    maps = {
        name: tuple(
            Map(row, memory, of_rows.tolist())
            if isinstance(row := call.table.rows[f"{name}_{piece}"], Descriptor)
            else None
            for piece in ("map", "narrow")
        )
        for (name, memory), of_rows in zip(arrays.items(), (cu_q, cu_kv, cu_kv, cu_q), strict=True)
    }
    lse = np.full(heads[0] * rows[0], np.nan)
    C, aux = call.table.rows["C"].value, None  # noqa: N806
    if C.score is not None:
        bound = bind_score(device=q.device, **{name: it for name, it in asked.items() if it is not None})
        aux = tuple(
            Pointer(it.numpy().ravel()) if isinstance(it, torch.Tensor) else it
            for it in lowered_score(problem, SM90).values(bound, problem.scale)
        )
        C = replace(C, score=scores_in_python(C.score))  # noqa: N806
    if together:
        call.table.rows["together"] = Integer(value=together)
    listed = Pointer(entries.numpy().ravel())
    with np.errstate(all="ignore"):
        for program in range(call.table.grid):
            run_block(
                program, call.table.grid, counter.numpy(), call.table.rows, C, maps, listed, lse,
                None if sinks is None else Pointer(sinks.numpy()), aux,
            )  # fmt: skip
    truth = fmha_varlen(
        q.double(), k.double(), v.double(), cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, max_seqlen_q=given.max_seqlen_q,
        max_seqlen_kv=given.max_seqlen_kv, backend="reference", return_lse=True, sinks=sinks, **asked, **options,
    )  # fmt: skip
    return torch.from_numpy(arrays["out"]), torch.from_numpy(lse).reshape(heads[0], rows[0]), truth


def check(pairs, *, spoilt=(), **options):
    """Against the truth, but for queries of sequences that are `spoilt`: those are NaN in one way or another."""
    out, lse, truth = attend(pairs, spoilt=spoilt, **options)
    cu = starts([it[0] for it in pairs])
    for sequence in spoilt:
        rows = slice(cu[sequence], cu[sequence + 1])
        out[rows], lse[:, rows], truth[0][rows], truth[1][:, rows] = 0, 0, 0, 0
    torch.testing.assert_close(out, truth[0].double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, truth[1].double(), atol=1e-5, rtol=1e-5)


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
    memory = types.SimpleNamespace(size=1 << 40)
    offset, rows = (1 << 29) - 7, 6
    it = Map(Descriptor(of="q", layout=layout, rows=4, columns=8), memory, [0, offset])
    for row, inside in ((0, 4), (3, 3), (6, 0)):
        at = sequences.ROWS.value, offset + rows, 2, sequences.ROWS.value - rows + row, 16
        where = it.elements(at)
        assert (where[:inside, 0] == ((offset + row + np.arange(inside)) * 3 + 2) * 256 + 16).all()
        assert (where[inside:] == -1).all()


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
