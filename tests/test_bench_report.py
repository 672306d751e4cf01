"""Tables on a terminal and in docs: what they make of results. test_bench_page.py has the page."""

import re
from dataclasses import replace

import bench_fakes as fakes

from bench.matrix import SUITES
from bench.report import groups, notes, text_report
from multiattn.plan.support import Reason

CELLS = [cell for cell in SUITES["standard"] if cell.head_dim == 128]
ROWS = [
    fakes.row(name, time_ms * cell.seq / 4096, cell=cell, spread=0.02)
    for cell in CELLS
    for name, time_ms in (("cuda", 1.0), ("sdpa-cudnn", 1.5))
]
REFUSED = replace(
    fakes.row("fa2", 1.0, cell=CELLS[0]), measured=None, reasons=(Reason(code="module", got="none", allowed="one"),)
)
BROKEN = replace(fakes.row("flex", 1.0, cell=CELLS[0]), measured=None, error="Boom: <b>what</b>\nsecond line")


def test_one_table_per_head_dim_and_mask():
    found = groups(ROWS)
    assert [(group.cells[0].causal, len(group.cells)) for group in found] == [(False, 6), (True, 6)]
    assert all(group.contenders == ("cuda", "sdpa-cudnn") for group in found)


def test_the_text_says_every_figure_and_every_reason():
    text = text_report([*ROWS, REFUSED, BROKEN])
    assert "TFLOPS, D=128 causal, H=16, 16384 tokens, bf16 bshd, device regime, NVIDIA H200" in text
    assert re.search(r"4096 +100 +67", text)
    assert "- fa2: module: got none; allowed one [1 row]" in text
    assert "- flex: error: Boom: <b>what</b> [1 row]" in text
    assert "NVIDIA H200 (sm90, stated peak 989.4 TFLOPS), driver 580.0, commit c0ffee" in text
    assert "| 4096 |" in re.sub(" +", " ", text_report(ROWS, form="github"))
    assert notes([REFUSED, replace(REFUSED, cell=CELLS[1])]) == ["fa2: module: got none; allowed one [2 rows]"]


def test_a_line_never_mixes_runs():
    newer = [fakes.row(name, 0.5, cell=CELLS[3], run="2026-11-22") for name in ("cuda", "triton")]
    text = text_report([*ROWS, *newer])
    assert re.search(r"4096 +200 +not in this run +200", text)
