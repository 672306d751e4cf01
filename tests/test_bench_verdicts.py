"""bench.verdicts: what two files, the floors and `auto` make of rows."""

from dataclasses import replace
from pathlib import Path

import bench_fakes as fakes
import pytest

from bench import cli
from bench.matrix import SUITES
from bench.verdicts import change_table, compare, preferences, write_preferences
from multiattn.plan import choice
from multiattn.plan.measured import MeasuredCell, read_cells
from multiattn.plan.support import Reason

FLOOR_CELLS = [cell for cell in SUITES["floors"] if cell.direction == "fwd"]
STANDARD = next(cell for cell in SUITES["standard"] if cell.head_dim == 128 and cell.seq == 4096 and cell.causal)
BACKWARD_CELLS = [cell for cell in SUITES["floors"] if cell.direction == "bwd"]


def floor_rows(cells=FLOOR_CELLS, **times_ms):
    return [
        fakes.row(name.replace("_", "-"), time_ms, cell=cell) for cell in cells for name, time_ms in times_ms.items()
    ]


def with_rival(*rows):
    """Each row, and that of another backend that takes twice as long: of one alone nothing is preferred."""
    rivals = [fakes.row("cutile", 2 * it.measured.time_ms, cell=it.cell, run=it.run) for it in rows]
    return [*rows, *rivals]


def refused(row):
    return replace(row, measured=None, reasons=(Reason(code="module", got="none", allowed="one"),))


@pytest.mark.parametrize(
    ("new_ms", "spread", "verdict"),
    [(1.0, 0.0, "same"), (1.02, 0.0, "same"), (1.1, 0.0, "slower"), (1.1, 0.2, "same"), (0.8, 0.0, "faster")],
)
def test_a_change_counts_when_the_spread_does_not_explain_it(new_ms, spread, verdict):
    (change,) = compare([fakes.row("cuda", 1.0)], [fakes.row("cuda", new_ms, spread=spread)])
    assert change.verdict == verdict
    assert change.speedup == pytest.approx(1 / new_ms)


def test_what_is_not_measured_any_more_is_told():
    before = fakes.row("cuda", 1.0)
    for after, why in (([], "no row"), ([refused(before)], "module: got none")):
        (change,) = compare([before], after)
        assert change.verdict == "gone"
        assert why in change_table([change])


def test_preferences_take_one_run_of_a_cell():
    old, new = (
        [fakes.row(name, time_ms, cell=FLOOR_CELLS[0], run=run) for name in names]
        for names, time_ms, run in (
            (("cuda", "triton", "cutile"), 1.0, "2026-11-20"),
            (("cuda", "triton"), 2.0, "2026-11-21"),
        )
    )
    (cell,) = preferences([*old, *new])
    assert cell["tflops"] == {"cuda": 50.0, "triton": 50.0}


def test_preferences_are_what_multiattn_reads(tmp_path):
    rows = [*floor_rows(cutile=1.0, triton=2.0, sdpa_cudnn=0.5), refused(floor_rows(cuda=1.0)[0])]
    path = tmp_path / "measured.json"
    with pytest.raises(ValueError, match="nothing to prefer by"):
        write_preferences(rows[-1:], path)
    assert write_preferences(rows, path) == 2
    assert Path(choice.__file__).with_name("measured.json") == cli.MEASURED
    cells = read_cells(path.read_text())
    assert {(cell.arch, cell.head_dim, cell.seq_kv) for cell in cells} == {("sm90", 128, 4096)}
    assert cells[0].tflops == (("cutile", 100.0), ("triton", 50.0))


def test_of_cells_alike_the_newest_run_is_preferred_by_and_a_held_out_one_only_alone():
    half = replace(STANDARD, dtype="fp16")
    assert half in SUITES["heldout"]
    alike = replace(STANDARD, layout="bhsd")
    old = [fakes.row(name, time_ms, cell=alike, run="2026-11-20") for name, time_ms in (("cuda", 2.0), ("cutile", 1.0))]
    new = with_rival(fakes.row("cuda", 1.0, cell=STANDARD, run="2026-11-21"))
    held = with_rival(fakes.row("triton", 1.0, cell=half, run="2026-11-22"))
    for rows, tflops in (
        ([*old, *new], {"cuda": 100.0, "cutile": 50.0}),
        ([*new, *old], {"cuda": 100.0, "cutile": 50.0}),
        ([*held, *new], {"cuda": 100.0, "cutile": 50.0}),
        (held, {"triton": 100.0, "cutile": 50.0}),
    ):
        (cell,) = preferences(rows)
        assert cell["tflops"] == tflops


def test_cells_of_other_counts_of_heads_and_of_shared_keys_are_preferred_by_apart():
    cells = (replace(STANDARD, batch=1), STANDARD, replace(STANDARD, heads_kv=2))
    few, many, shared = preferences(with_rival(*(fakes.row("cuda", 1.0, cell=cell) for cell in cells)))
    assert (few["heads"], many["heads"]) == (16, 64)
    assert "group" not in many
    assert shared == {**many, "group": 8}
    kinds = (replace(STANDARD, causal=True, feature=it) for it in ("none", "softcap30", "alibi", "sinks"))
    windowed = replace(STANDARD, causal=True, window=1024)
    found = preferences(with_rival(*(fakes.row("cuda", 1.0, cell=it) for it in (*kinds, windowed))))
    assert [it.get("score", it.get("window")) for it in found] == [None, 1024, "alibi", "softcap"]


def test_block_masks_of_one_kind_are_one_cell():
    plain = [it for it in SUITES["lists"] if it.head_dim == 128 and it.direction == "fwd" and not it.heads_kv]
    found = preferences(with_rival(*(fakes.row("cuda", 1.0, cell=cell) for cell in plain)))
    assert [it["lists"] for it in found] == ["divided", "masked", "whole"]
    assert not any(it["seq_kv"] or it["causal"] for it in found)


def test_a_run_of_one_backend_alone_is_not_preferred_by_nor_hides_another():
    both = with_rival(fakes.row("cuda", 1.0, cell=STANDARD, run="2026-11-20"))
    alone = [fakes.row("cutile", 1.0, cell=STANDARD, run="2026-11-21")]
    assert preferences(alone) == []
    assert preferences([*both, *alone]) == preferences(both)


def test_a_run_of_a_variant_that_is_no_longer_chosen_is_not_preferred_by():
    def rows(variant):
        plan = {"variant": variant, "config": {}, "why": ""}
        return [replace(fakes.row("cuda", 1.0, cell=STANDARD), plan=plan), fakes.row("cutile", 2.0, cell=STANDARD)]

    assert [cell["tflops"] for cell in preferences(rows("wgmma"))] == [{"cuda": 100.0, "cutile": 50.0}]
    assert preferences(rows("split_q+swizzle_qkv")) == []
    by_name = replace(rows("wgmma")[0], contender="cuda/wgmma")
    assert preferences([*rows("split_q+swizzle_qkv"), by_name]) == preferences(rows("wgmma"))


def test_packed_batches_of_one_size_are_one_cell():
    mixes = [cell for cell in SUITES["packed"] if cell.direction == "fwd" and cell.head_dim == 64 and cell.causal]
    rows = [fakes.row("cuda", time_ms, cell=cell) for cell, time_ms in zip(mixes, (0.5, 1.0, 2.0), strict=True)]
    alone = with_rival(fakes.row("cuda", 1.0, cell=STANDARD))
    (dense,) = preferences(alone)
    (packed, beside) = preferences([*with_rival(*rows), *alone])[::-1]
    assert beside == dense
    assert packed["packed"] is True
    assert packed["tflops"] == {"cuda": 100.0, "cutile": 50.0}


def test_backward_is_preferred_by_its_own_cells():
    both = with_rival(*(fakes.row("cuda", 1.0, cell=cell) for cell in (BACKWARD_CELLS[0], FLOOR_CELLS[0])))
    step = fakes.row("cuda", 1.0, cell=replace(FLOOR_CELLS[0], direction="fwdbwd"))
    steady = fakes.row("cuda/two_pass", 0.5, cell=BACKWARD_CELLS[0])
    forward, backward = preferences([*both, step, steady])
    assert "direction" not in forward
    assert backward["direction"] == "backward"
    assert backward["tflops"] == {"cuda": 100.0, "cutile": 50.0}
    read = [MeasuredCell(**{**cell, "tflops": tuple(cell["tflops"].items())}) for cell in (forward, backward)]
    assert [cell.direction for cell in read] == ["forward", "backward"]
