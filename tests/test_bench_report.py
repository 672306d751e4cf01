"""bench.report and bench.readme: what they make of results, and nothing from anywhere else."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import bench_fakes as fakes
import pytest
from targets_fakes import entry, failed

from bench import cli, docs, readme
from bench.arguments import try_file
from bench.errors import InputError
from bench.matrix import SUITES
from bench.parity_page import of_json
from bench.readme import ranges, results_block, support_block
from bench.report import combined_report, groups, html_report, notes, text_report
from bench.results import dumps
from multiattn.inspect.cli import save
from multiattn.plan.backend import BACKENDS
from multiattn.plan.support import Reason
from parity.cases import CASES
from parity.report import Report, to_json
from parity.results import CaseReport, Contender, Pair, Result, Score

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
ENTRIES = [entry(), failed("triton")]


def parity_json(*, broken: bool = False, backward: bool = False) -> dict:
    """What parity writes of one case that cuda passes with an infinite ratio of lse, and triton refuses."""
    case = next(case for case in CASES if case.name == "gqa4_b1")
    out, lse, dq = (Score(tensor=name, of="max", error=1e-3, budget=2e-3, ratio=0.5) for name in ("out", "lse", "dq"))
    cuda, triton, cutile = (Contender(backend=name) for name in ("cuda", "triton", "cutile"))
    results = [
        Result(case=case.name, contender=cuda, status="passed", scores=(out, replace(lse, ratio=math.inf))),
        Result(case=case.name, contender=triton, status="refused", reasons=("arch: no",)),
    ]
    if broken:
        results.append(Result(case=case.name, contender=cutile, status="failed", message="out is off"))
    if backward:
        gradient = replace(cuda, direction="backward")
        results.append(Result(case=case.name, contender=gradient, status="passed", fed_by="cuda", scores=(dq,)))
    pair = Pair(case=case.name, left="cuda", right="cutile", scores=(out, lse))
    report = CaseReport(case=case, results=tuple(results), pairs=(pair,))
    asked = tuple(result.contender for result in results)
    return json.loads(
        to_json(Report(contenders=asked, cases=(report,), environment={"device": "CPU"}, command="python -m parity"))
    )


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


def test_notes_say_a_reason_once():
    assert notes([REFUSED, replace(REFUSED, cell=CELLS[1])]) == ["fa2: module: got none; allowed one [2 rows]"]


def test_the_page_is_self_contained_and_escaped():
    page = html_report([*ROWS, REFUSED, BROKEN], ENTRIES, of_json(parity_json()))
    assert not re.findall(r"https?:|src=|@import|url\((?!#)", page)
    assert page.count("<svg") == 3
    assert "<code>python -m bench run</code>" in page
    assert "&lt;b&gt;what" in page
    assert "ptxas: out of luck" in page
    assert "inf (gqa4_b1)" in page
    assert len(page) < 1_000_000


def test_the_page_begins_with_the_verdict_of_parity(tmp_path):
    path = tmp_path / "parity" / "parity.json"
    path.parent.mkdir()
    path.with_name("parity.html").write_text("")
    path.write_text(json.dumps(parity_json(broken=True)))
    combined_report(path, None, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    body = page[page.index("<h1>") :]
    assert re.search('class="verdict miss">Parity: FAILED: [^<]* <a href="parity/parity.html">', body)
    assert body.index("FAILED: ") < body.index("<h2>")
    assert "cutile failed on gqa4_b1: out is off" in body
    assert "triton forward was asked for and ran nothing" in body
    assert body.index("Parity: Not run, and why") < body.rindex("arch: no")


def test_what_is_recorded_stands_apart():
    page = html_report([REFUSED], recorded=ROWS)
    assert "Recorded: TFLOPS over N on NVIDIA H200, 2026-11-21, commit c0ffee" in page
    assert "Speed: TFLOPS" not in page
    assert page.count("<svg") == 2


def test_a_line_never_mixes_runs():
    newer = [fakes.row(name, 0.5, cell=CELLS[3], run="2026-11-22") for name in ("cuda", "triton")]
    text = text_report([*ROWS, *newer])
    assert re.search(r"4096 +200 +not in this run +200", text)


def test_the_page_is_the_same_every_time():
    assert html_report(ROWS) == html_report(ROWS)


def test_a_combined_report_takes_what_there_is(tmp_path):
    bench, parity, compiled = tmp_path / "bench.json", tmp_path / "parity.json", tmp_path / "compile.json"
    out = tmp_path / "deep" / "report.html"
    with pytest.raises(ValueError, match="no parity, bench or compile results"):
        combined_report(parity, bench, out, compiled)
    parity.write_text(json.dumps(parity_json()))
    combined_report(parity, None, out)
    assert "Backends against each other" in out.read_text()
    bench.write_text(dumps("standard", ROWS))
    save(ENTRIES, compiled)
    combined_report(parity, bench, out, compiled)
    page = out.read_text()
    assert "TFLOPS over N" in page
    assert "Compiled for every target" in page


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "floors.json"
    path.write_text(dumps("floors", ROWS))
    return path


def refused(capsys, *arguments):
    """What the command line says of arguments that it refuses before it prints anything."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(it) for it in arguments])
    assert exit_info.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_a_page_that_cannot_be_written_is_refused_before_the_tables(results, tmp_path, capsys):
    for page, why in (
        (tmp_path, "it is no regular file"),
        ("/dev/full", "it is no regular file"),
        (results / "page.html", "File exists"),
        (results / "deep" / "page.html", "Not a directory"),
        ("/proc/x/y.html", "No such file or directory"),
        (tmp_path / f"{'x' * 300}.html", "File name too long"),
    ):
        assert f"--html: cannot write to {page}: {why}" in refused(capsys, "report", results, "--html", page)
    assert [path.name for path in tmp_path.iterdir()] == [results.name]


def test_trying_to_write_changes_nothing(tmp_path):
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("old")
    link.symlink_to(tmp_path / "new.html")
    for path in (page, link, tmp_path / "other.html"):
        try_file("--html", path)
    assert page.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "page.html"]


def test_a_page_that_cannot_be_written_after_all_names_itself(results):
    with pytest.raises(InputError, match="cannot write to /dev/full: No space left on device"):
        combined_report(None, results, Path("/dev/full"))


@pytest.mark.parametrize("option", ["--parity", "--compile"])
def test_a_named_part_of_the_page_must_be_there_and_be_shown(option, results, tmp_path, capsys):
    page = tmp_path / "page.html"
    missing = tmp_path / "none.json"
    assert f"{missing}: there is no such file" in refused(capsys, "report", results, "--html", page, option, missing)
    assert f"{option}: got it without --html; allowed with it, whose page shows it" in refused(
        capsys, "report", results, option, missing
    )
    assert not page.exists()


@pytest.mark.parametrize(
    ("option", "writer"), [("--parity", "python -m parity"), ("--compile", "python -m multiattn compile --json")]
)
@pytest.mark.parametrize(
    "text",
    [
        None,
        b"\xff\xfe\x00",
        b"{",
        b"[]",
        b'{"schema": 1, "entries": [1], "results": [{"out": ["x"]}]}',
        b'{"schema": 1, "entries": [{"cell": {}}], "results": [{"out": [1, 1, "x"], "backend": "", "case": ""}]}',
    ],
)
def test_a_part_of_the_page_of_another_kind_is_named(option, writer, text, results, tmp_path, capsys):
    path = tmp_path / "part"
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text)
    said = refused(capsys, "report", results, "--html", tmp_path / "page.html", option, path)
    assert f"{path}: not what {writer} wrote: " in said


def test_ranges():
    assert ranges([8, 16, 24, 64, 128, 136]) == "8-24, 64, 128-136"
    assert ranges([]) == ""


def test_the_support_table_has_a_word_in_every_cell():
    lines = support_block().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert all(name in "".join(table) for name in BACKENDS)
    assert not any(re.search(r"\|\s*\|", line) for line in table)


def test_tables_are_made_again_and_checked(tmp_path):
    page, made = tmp_path / "README.md", readme.blocks(tmp_path)
    page.write_text("a\n<!-- generated:results -->\nstale\n<!-- /generated -->\nb\n")
    assert not docs.update(page, made, check=True)
    assert "stale" in page.read_text()
    assert not docs.update(page, made, check=False)
    assert docs.update(page, made, check=True)
    assert "Nothing is recorded yet" in page.read_text()
    folder = tmp_path / "h200"
    folder.mkdir()
    (folder / "standard.json").write_text(dumps("standard", ROWS))
    assert not docs.update(page, made, check=True)
    assert re.search(r"128 \| causal \| 4096 +\| 100", results_block(tmp_path))


def test_every_page_and_picture_is_current():
    assert docs.update_all(check=True) == [], "run python -m bench docs"


def test_every_page_can_be_made_before_anything_is_measured(tmp_path):
    for blocks in docs.pages(results=tmp_path).values():
        assert all(make() for make in blocks.values())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        (b"\xff\xfe\x00", "not text"),
        (b"no marker", "has no <!-- generated:NAME -->"),
        (b"<!-- generated:what -->\n<!-- /generated -->", "<!-- generated:what -->: nothing generates it"),
    ],
)
def test_a_page_without_tables_is_refused_by_name(text, why, tmp_path):
    path = tmp_path / "README.md"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(InputError, match=re.escape(why)):
        docs.update(path, {}, check=True)
