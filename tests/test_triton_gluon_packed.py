"""Packed batches in the Gluon kernel: where a ragged tensor map ends, and what its compiler makes of them."""

import random
import types

import pytest
import torch

from multiattn.inspect.facts import read_kernel
from multiattn.mask import CAUSAL, FULL
from multiattn.packed import ragged
from multiattn.plan.arch import by_name
from multiattn.plan.backend import find_variant, plan_variant
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem
from multiattn.sequences import Batching
from multiattn.triton import BACKEND
from multiattn.triton.bind import known_of
from multiattn.triton.compile import export_plan
from multiattn.triton.cpu.gluon.tensors import MappedTensor
from multiattn.triton.families import tables_of
from multiattn.triton.kernels.gluon.tiles import ROWS
from multiattn.triton.table import Descriptor, Integer

SM90 = by_name("sm90")
VARIANT = find_variant(BACKEND, "warp_specialized")
needs_compiler = pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))


def test_rows_of_a_ragged_map_end_with_a_sequence():
    problem = Problem.contiguous(batch=1, heads_q=3, seq_q=1 << 29, seq_kv=1, head_dim=256, batching=Batching.packed(2))
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
        at = ROWS.value, offset + rows, 2, ROWS.value - rows + row, 16
        first, found, stride = it.box(at, "a load")[0]
        assert (found, stride) == (inside, 3 * 256)
        assert first == ((offset + row) * 3 + 2) * 256 + 16


# ---------------------------------------------------------------- what the compiler makes of it


def packed_plan(head_dim=128, sequences=16, rows=16384, config=None, **options):
    problem = Problem.contiguous(
        batch=1, heads_q=16, seq_q=rows, seq_kv=rows, head_dim=head_dim, batching=Batching.packed(sequences), **options
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
