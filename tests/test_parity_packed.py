"""The tester tested on packed batches: what goes wrong between sequences must fail, and what is right must pass."""

import math

import pytest
import torch

from multiattn.operands import Operands
from multiattn.problem import options_of
from multiattn.reference import attend, differentiate
from parity.cases import CASES
from parity.launch import prepare_case, prepare_gradients
from parity.tolerance import Mismatch, operands_and_problem, reference_in_chunks

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}
NAMES = "varlen_apart_d64_full varlen_apart_d64_causal varlen_uneven_d64_causal varlen_window"


def options(case, inputs, **changes):
    named = {"causal": case.causal, "window": case.window, "scale": case.scale, "sinks": inputs.sinks}
    return named | {"score": inputs.score, "packed": inputs.packed} | changes


def run(case, inputs, **changes):
    """A good kernel's result: fp32 inside, rounded once."""
    operands, problem = operands_and_problem(inputs.q, inputs.k, inputs.v, **options(case, inputs, **changes))
    out, lse = reference_in_chunks(operands, problem, torch.float32)
    return out.to(case.torch_dtype), lse


def moved(case, inputs, side, by):
    """The case with sequences that end, and those behind them start, `by` rows later."""
    cu_seqlens = [it.clone() for it in inputs.packed.cu_seqlens]
    part = cu_seqlens[side][1:-1]
    part += by * ((part > -by) & (part + by <= cu_seqlens[side][-1])).int()
    return run(case, inputs, packed=inputs.packed._replace(cu_seqlens=tuple(cu_seqlens)))


def neighbour_seen(case, inputs):
    """Each sequence also sees the first key of the next one, as a tile does that is not cut."""
    out, lse = run(case, inputs)
    starts_q, starts_kv = (it.tolist() for it in inputs.packed.cu_seqlens)
    operands, problem = operands_and_problem(inputs.q, inputs.k, inputs.v, **options(case, inputs, packed=None))
    for entry in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[entry : entry + 2]), slice(starts_kv[entry], starts_kv[entry + 1] + 1)
        own = Operands(operands.q[:, :, rows], operands.k[:, :, keys], operands.v[:, :, keys], sinks=inputs.sinks)
        part_out, lse[:, :, rows] = attend(own, options_of(problem), torch.float32)
        out[:, :, rows] = part_out.to(out.dtype)
    return out, lse


def of_row_before(out, lse):
    return out, lse.roll(1, dims=-1)


def filled(value):
    def change(case, inputs):
        out, lse = run(case, inputs)
        end = int(inputs.packed.cu_seqlens[0][-1])
        out[:, :, end:] = value
        return out, lse

    return change


def neighbours_nan(case, inputs):
    """A weight of zero times the NaN of the next sequence, in the last row of one that is not NaN."""
    out, lse = run(case, inputs)
    end = int(inputs.packed.cu_seqlens[0][2])
    out[:, :, end - 1, 0] = math.nan
    return out, lse


def biased_by_first(case, inputs):
    tensors = tuple(it[:1].expand_as(it) if it.ndim == 4 else it for it in inputs.score.tensors)
    return run(case, inputs, score=inputs.score._replace(tensors=tensors))


BROKEN = {
    "a key of the neighbour seen": (neighbour_seen, NAMES),
    "queries' cu_seqlens off by one": (lambda case, inputs: moved(case, inputs, 0, -1), NAMES),
    "keys' cu_seqlens off by one": (lambda case, inputs: moved(case, inputs, 1, 1), NAMES),
    "keys' cu_seqlens one less": (lambda case, inputs: moved(case, inputs, 1, -1), NAMES),
    "lse in the wrong row": (lambda case, inputs: of_row_before(*run(case, inputs)), NAMES),
    "the batch as one sequence": (lambda case, inputs: run(case, inputs, packed=None), "varlen_apart_d64_causal"),
    "mask ignored": (lambda case, inputs: run(case, inputs, causal=False), "varlen_uneven_d64_causal"),
    "bias of the first sequence": (biased_by_first, "varlen_bias"),
    "rows behind the last not written": (filled(math.nan), "varlen_behind varlen_sinks"),
    "rows behind the last not zero": (filled(1.0), "varlen_behind varlen_sinks"),
    "NaN of a neighbour": (neighbours_nan, "varlen_nan_neighbours_d64 varlen_nan_neighbours_d128"),
}


def check(case, result):
    _, truth = prepare_case(case, CPU)
    truth.out.check(result[0], "a plan")
    truth.lse.check(result[1], "a plan")


@pytest.mark.parametrize("name", f"{NAMES} varlen_bias varlen_behind varlen_sinks varlen_nan_neighbours_d64".split())
def test_a_good_result_passes(name):
    case = BY_NAME[name]
    check(case, run(case, prepare_case(case, CPU)[0]))


@pytest.mark.parametrize(
    ("broken", "name"), [(broken, name) for broken, it in BROKEN.items() for name in it[1].split()]
)
def test_a_broken_result_fails(broken, name):
    case = BY_NAME[name]
    result = BROKEN[broken][0](case, prepare_case(case, CPU)[0])
    with pytest.raises(Mismatch):
        check(case, result)


# ---------------------------------------------------------------- gradients


def gradients(case, packed=None):
    inputs, _ = prepare_case(case, CPU)
    upstream, truth = prepare_gradients(case, CPU)
    out, lse = run(case, inputs)
    changed = options(case, inputs, packed=packed or inputs.packed)
    operands, problem = operands_and_problem(inputs.q, inputs.k, inputs.v, **changed, slots=inputs.slots)
    given = operands._replace(out=out, lse=lse, dout=upstream.dout, dlse=upstream.dlse)
    found = differentiate(given, options_of(problem), torch.float32)
    return [it.to(case.torch_dtype) for it in found], truth.all


@pytest.mark.parametrize("name", NAMES.split())
def test_broken_gradients_fail(name):
    case = BY_NAME[name]
    good, truth = gradients(case)
    for got, expected in zip(good, truth, strict=True):
        expected.check(got, "a plan")
    for place in range(len(good)):  # each a row further, as the row of a neighbour
        with pytest.raises(Mismatch):
            truth[place].check(good[place].roll(1, dims=2), "a plan")
    inputs, _ = prepare_case(case, CPU)
    cu_seqlens_q, cu_seqlens_kv = inputs.packed.cu_seqlens
    less = cu_seqlens_kv.clone()
    less[1:-1] -= (less[1:-1] > 0).int()  # the last key of the first sequence left out
    broken, _ = gradients(case, inputs.packed._replace(cu_seqlens=(cu_seqlens_q, less)))
    with pytest.raises(Mismatch):
        truth[2].check(broken[2], "a plan")
