"""Reports: what they make of results, and nothing from anywhere else."""

import re
from dataclasses import replace

import bench_fakes as fakes
import pytest

from bench import cli
from bench.matrix import SUITES
from bench.report import groups, notes, section, speed_section, text_report, write_page
from bench.results import dumps
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


def test_the_page_is_self_contained_and_escaped(tmp_path):
    page = tmp_path / "deep" / "report.html"
    write_page(page, [section("Parity", "out is <off>", "parity/parity.html"), speed_section("Speed", [*ROWS, BROKEN])])
    text = page.read_text()
    assert not re.findall(r"https?:|src=|@import|url\((?!#)", text)
    assert text.count("<svg") == 2
    for part in ('<a href="parity/parity.html">', "out is &lt;off&gt;", "- python -m bench run", "&lt;b&gt;what"):
        assert part in text, part


def test_a_reading_without_a_spread_is_drawn():
    """A bar was below 0 by a rounding, which Matplotlib refuses."""
    row = fakes.row("cuda", 0.635762, cell=CELLS[0])
    section_text = str(speed_section("Speed", [replace(row, measured=replace(row.measured, tflops=100.7))]))
    assert "<svg" in section_text


def test_a_page_that_cannot_be_written_is_an_error_without_a_traceback(tmp_path, capsys):
    results = tmp_path / "floors.json"
    results.write_text(dumps("floors", ROWS))
    assert cli.main(["report", str(results), "--html", str(tmp_path / "page.html")]) == 0
    for page, why in ((tmp_path, "Is a directory"), (results / "page.html", "File exists")):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["report", str(results), "--html", str(page)])
        assert exit_info.value.code == 2
        assert why in capsys.readouterr().err
