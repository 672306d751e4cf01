"""Reports and pages: what they make of results, and nothing from anywhere else."""

import functools
import re
from dataclasses import replace

import bench_fakes as fakes
import pytest

from bench import cli, docs
from bench.docs import NOT_MEASURED, ranges, results_block, support_block
from bench.matrix import SUITES, InputError
from bench.report import groups, notes, section, speed_section, text_report, write_page
from bench.results import dumps
from multiattn.plan.backend import BACKENDS
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


# ---------------------------------------------------------------- docs


def test_the_support_table_has_a_word_in_every_cell():
    table = [line for line in support_block().splitlines() if line.startswith("|")]
    assert all(name in "".join(table) for name in BACKENDS)
    assert not any(re.search(r"\|\s*\|", line) for line in table)
    assert (ranges([8, 16, 24, 64, 128, 136]), ranges([])) == ("8-24, 64, 128-136", "")


def test_tables_are_made_again(tmp_path):
    made = {"results": lambda: results_block(tmp_path)}
    page = docs.render("a\n<!-- generated:results -->\nstale\n<!-- /generated -->\nb\n", made)
    assert page == f"a\n<!-- generated:results -->\n\n{NOT_MEASURED}\n\n<!-- /generated -->\nb\n"
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "standard.json").write_text(dumps("standard", ROWS))
    assert re.search(r"128 \| causal \| 4096 +\| 100", page := docs.render(page, made))
    assert "backward" not in page
    for text, why in (
        ("no marker", "there is no <!-- gen"),
        ("<!-- generated:x -->\n<!-- /generated -->", "nothing gen"),
    ):
        with pytest.raises(InputError, match=why):
            docs.render(text, made)


@pytest.fixture
def pages_made_once(monkeypatch):
    """Each table of the repository's pages is made when it is first asked for, as it takes seconds."""
    made = {
        name: {table: functools.cache(make) for table, make in blocks.items()} for name, blocks in docs.pages().items()
    }
    pages = docs.pages
    monkeypatch.setattr(docs, "pages", lambda results=docs.RESULTS: made if results == docs.RESULTS else pages(results))


def test_every_page_and_picture_is_current_and_can_be_made_before_anything_is_measured(tmp_path):
    assert docs.update_all(check=True) == [], "run python -m bench docs"
    for blocks in docs.pages(tmp_path).values():
        assert all(make() for make in blocks.values())


def test_a_stale_page_is_found_and_written(pages_made_once, tmp_path):
    for name in docs.pages():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((docs.ROOT / name).read_text())
    for picture in (docs.ROOT / "docs").glob("*.svg"):
        (tmp_path / "docs" / picture.name).write_text(picture.read_text())
    page = tmp_path / "docs" / "hopper.md"
    page.write_text(page.read_text().replace("| 128 ", "| 129 ", 1))
    assert docs.update_all(check=True, root=tmp_path) == [page]
    assert "| 129 " in page.read_text()
    assert docs.update_all(check=False, root=tmp_path) == [page]
    assert page.read_text() == (docs.ROOT / "docs" / "hopper.md").read_text()
