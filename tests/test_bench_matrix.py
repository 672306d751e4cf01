"""bench.matrix and bench.flops: the cells are what they say, and the work in them is counted right."""

import json
from dataclasses import replace

import pytest
import torch

from bench.decode_cells import DecodeCell
from bench.matrix import (
    HIDDEN,
    SUITES,
    TOKENS,
    Cell,
    cell_flops,
    forward_flops,
    in_directions,
    narrowed,
    rate_text,
    tflops,
)
from multiattn.problem import Problem


def test_cells_of_a_suite_are_distinct_and_nothing_was_tuned_for_what_is_held_out():
    for cells in SUITES.values():
        assert len(cells) == len(set(cells)) == len({cell.key for cell in cells}) > 0
    assert all(it.batch * it.seq == TOKENS and it.heads * it.head_dim == HIDDEN for it in SUITES["standard"])
    assert not set(SUITES["heldout"]) & set(SUITES["standard"])
    assert not {it.head_dim for it in SUITES["between"]} & {it.head_dim for it in SUITES["heldout"]}


def test_a_direction_is_part_of_a_cell():
    (cell,) = SUITES["smoke"][:1]
    turned = in_directions((cell,), ("fwd", "bwd", "fwdbwd"))
    assert [it.key.removeprefix(cell.key) for it in turned] == ["", " bwd", " fwdbwd"]
    assert [cell_flops(it) / forward_flops(cell) for it in turned] == [1.0, 2.5, 3.5]
    assert in_directions(SUITES["backward"], ()) == SUITES["backward"]
    assert len(in_directions(SUITES["floors"], ("fwdbwd",))) == 2
    assert cell.dout("cpu").stride() == cell.tensors("cpu")[0].stride()


HEADS = "heads_kv: got {}; allowed None, or a divisor of heads=2 below it"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"direction": "forward"}, "direction: got 'forward'; allowed fwd, bwd, fwdbwd"),
        *(({"head_dim_v": it}, f"head_dim_v: got {it}; allowed None, or other than head_dim=64") for it in (0, 64)),
        *(({"heads_kv": wrong}, HEADS.format(wrong)) for wrong in (0, 2, 3, 4)),
        ({"window": 0, "causal": True}, "window: got 0; allowed None, or 1 and more of a causal cell"),
        ({"window": 8}, "window: got 8"),
        ({"feature": "softcap"}, "feature: got 'softcap'; allowed none, sinks"),
        ({"feature": "documents16", "seq": 15}, "seq: got 15; allowed 16 and more"),
        ({"causal": True, "queries": 1}, "causal: got True; allowed False of 1 queries"),
        ({"queries": 2}, "causal: got False; allowed True of 2 queries"),
        ({"page": 5}, "page: got 5; allowed None, or a divisor of seq=256"),
    ],
)
def test_a_cell_says_what_it_accepts(changes, told):
    kind = DecodeCell if {"queries", "page"} & set(changes) else Cell
    with pytest.raises(ValueError, match=told):
        kind(**SUITES["smoke"][0].as_dict() | changes)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("batch", "heads", "seq"), [(1, 1, 5), (1, 3, 5), (2, 1, 5), (2, 3, 1), (2, 3, 5)])
def test_the_problem_of_a_cell_is_that_of_its_tensors(layout, batch, heads, seq):
    cell = Cell(batch=batch, heads=heads, seq=seq, head_dim=16, dtype="fp16", causal=True, layout=layout)
    assert cell.problem == Problem.of(*cell.tensors("cpu"), causal=True)
    if heads > 1:
        grouped = replace(cell, heads_kv=1)
        assert grouped.problem == Problem.of(*grouped.tensors("cpu"), causal=True)
        assert grouped.problem.group == heads


def test_fewer_key_value_heads_are_part_of_a_cell():
    cell = replace(SUITES["smoke"][0], heads=4)
    grouped = replace(cell, heads_kv=2)
    assert grouped.key == cell.key.replace("H4", "H4/2")
    assert [tensor.shape[1] for tensor in grouped.tensors("cpu")] == [4, 2, 2]
    assert torch.equal(grouped.tensors("cpu")[0], cell.tensors("cpu")[0])
    assert grouped.dout("cpu").shape == cell.dout("cpu").shape
    assert cell_flops(grouped) == cell_flops(cell)
    assert Cell(**json.loads(json.dumps(grouped.as_dict()))) == grouped


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwdbwd"])
def test_a_head_dim_of_v_is_part_of_a_cell(direction):
    cell = replace(SUITES["smoke"][1], direction=direction)
    mla = replace(cell, head_dim=192, head_dim_v=128)
    assert mla.key == cell.key.replace("D64", "D192/128")
    assert [it.shape[3] for it in (*mla.tensors("cpu"), mla.dout("cpu"))] == [192, 192, 128, 128]
    assert (mla.problem.head_dim, mla.problem.head_dim_v) == mla.widths
    assert (
        cell_flops(mla) * 128
        == cell_flops(cell)
        * {"fwd": 320, "bwd": 416 * 2, "fwdbwd": 320 + 416 * 2}[direction]
        / {"fwd": 1, "bwd": 2.5, "fwdbwd": 3.5}[direction]
    )
    assert Cell(**json.loads(json.dumps(mla.as_dict()))) == mla
    assert narrowed(SUITES["mla"], widths=(mla.widths,), seq=(2048,))


def test_tflops_and_how_they_are_told():
    assert tflops(4 * 10**12, 8.0) == pytest.approx(500.0)
    assert [rate_text(rate) for rate in (641.4, 10.2, 9.87, 0.0003)] == ["641", "10", "9.9", "0.0003"]
    with pytest.raises(ValueError, match="time_ms"):
        tflops(1, 0.0)


def test_a_suite_is_narrowed():
    cells = narrowed(SUITES["standard"], head_dim=(64, 128), seq=(4096,), causal=(True,), dtype=())
    assert [(cell.head_dim, cell.seq, cell.causal) for cell in cells] == [(64, 4096, True), (128, 4096, True)]
