"""The tester tested on packed batches: what goes wrong between sequences must fail, and what is right must pass."""

import math

import pytest
import torch
from parity_breaks import BY_NAME, CPU, attend, check, each, options_of

from multiattn.operands import Operands
from multiattn.problem import options_of as its_options
from multiattn.reference import attend as attend_to
from parity.launch import prepare_case
from parity.tolerance import Mismatch, operands_and_problem

NAMES = "varlen_apart_d64_full varlen_apart_d64_causal varlen_uneven_d64_causal varlen_window"


def moved(case, inputs, side, by):
    """The case with sequences that end, and those behind them start, `by` rows later."""
    cu_seqlens = [it.clone() for it in inputs.packed.cu_seqlens]
    part = cu_seqlens[side][1:-1]
    part += by * ((part > -by) & (part + by <= cu_seqlens[side][-1])).int()
    return attend(case, inputs, packed=inputs.packed._replace(cu_seqlens=tuple(cu_seqlens)))


def neighbour_seen(case, inputs):
    """Each sequence also sees the first key of the next one, as a tile does that is not cut."""
    out, lse = attend(case, inputs)
    starts_q, starts_kv = (it.tolist() for it in inputs.packed.cu_seqlens)
    operands, problem = operands_and_problem(inputs.q, inputs.k, inputs.v, **options_of(case, inputs, packed=None))
    for entry in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[entry : entry + 2]), slice(starts_kv[entry], starts_kv[entry + 1] + 1)
        own = Operands(operands.q[:, :, rows], operands.k[:, :, keys], operands.v[:, :, keys], sinks=inputs.sinks)
        part_out, lse[:, :, rows] = attend_to(own, its_options(problem), torch.float32)
        out[:, :, rows] = part_out.to(out.dtype)
    return out, lse


def of_row_before(out, lse):
    return out, lse.roll(1, dims=-1)


def filled(value):
    def change(case, inputs):
        out, lse = attend(case, inputs)
        end = int(inputs.packed.cu_seqlens[0][-1])
        out[:, :, end:] = value
        return out, lse

    return change


def neighbours_nan(case, inputs):
    """A weight of zero times the NaN of the next sequence, in the last row of one that is not NaN."""
    out, lse = attend(case, inputs)
    end = int(inputs.packed.cu_seqlens[0][2])
    out[:, :, end - 1, 0] = math.nan
    return out, lse


def biased_by_first(case, inputs):
    tensors = tuple(it[:1].expand_as(it) if it.ndim == 4 else it for it in inputs.score.tensors)
    return attend(case, inputs, score=inputs.score._replace(tensors=tensors))


BROKEN = {
    "a key of the neighbour seen": (neighbour_seen, NAMES),
    "queries' cu_seqlens off by one": (lambda case, inputs: moved(case, inputs, 0, -1), NAMES),
    "keys' cu_seqlens off by one": (lambda case, inputs: moved(case, inputs, 1, 1), NAMES),
    "keys' cu_seqlens one less": (lambda case, inputs: moved(case, inputs, 1, -1), NAMES),
    "lse in the wrong row": (lambda case, inputs: of_row_before(*attend(case, inputs)), NAMES),
    "the batch as one sequence": (lambda case, inputs: attend(case, inputs, packed=None), "varlen_apart_d64_causal"),
    "mask ignored": (lambda case, inputs: attend(case, inputs, causal=False), "varlen_uneven_d64_causal"),
    "bias of the first sequence": (biased_by_first, "varlen_bias"),
    "rows behind the last not written": (filled(math.nan), "varlen_behind varlen_sinks"),
    "rows behind the last not zero": (filled(1.0), "varlen_behind varlen_sinks"),
    "NaN of a neighbour": (neighbours_nan, "varlen_nan_neighbours_d64 varlen_nan_neighbours_d128"),
}


@pytest.mark.parametrize(("broken", "name"), each(BROKEN))
def test_a_broken_result_fails(broken, name):
    case = BY_NAME[name]
    result = BROKEN[broken][0](case, prepare_case(case, CPU)[0])
    with pytest.raises(Mismatch):
        check(case, result)
