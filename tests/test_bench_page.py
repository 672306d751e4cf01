"""The page of results, without a browser: its numbers, its data, its size, and nothing from anywhere else."""

import functools
import itertools
import json
import re
from dataclasses import replace

import bench_fakes as fakes
import numpy as np
import pytest
import report_pages

from bench import cli, docs
from bench.comparison import over_best_peer
from bench.matrix import SUITES, InputError
from bench.page import differences, explorers, extras, page, sources, styles, verdict
from bench.page.data import cell_data, script_json
from bench.results import RESULTS, dumps
from bench.verdicts import compare
from multiattn.plan.backend import BACKENDS
from multiattn.plan.support import Reason

pytestmark = pytest.mark.xdist_group("bench_page")  # one page for all
CELLS = SUITES["standard"][:3]


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    return report_pages.evidence(tmp_path_factory.mktemp("evidence"))


@pytest.fixture(scope="module")
def text(evidence):
    return page.report_page(evidence)


def page_of(evidence, *rows):
    """The page of these rows alone."""
    its = (sources.Source(gpu="NVIDIA H200", suite="standard", rows=rows),)
    return page.report_page(replace(evidence, sources=its))


def data_of(text, name="data"):
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def rows_of(data):
    """The rows as js/data.js unpacks them."""
    table = data["rows"]
    for values in table["rows"]:
        row = dict(itertools.zip_longest(table["columns"], values))
        yield {name: it if it is None else table["lists"].get(name, {it: it})[it] for name, it in row.items()}


# ---------------------------------------------------------------- one file


def test_the_page_is_small_and_asks_for_nothing_from_anywhere(text):
    assert len(text.encode()) < 3_000_000
    assert text.count(page.runtime()) == 1
    own = re.sub(r'<script type="application/json".*?</script>', "", text.replace(page.runtime(), ""), flags=re.DOTALL)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", own)
    assert not re.findall(r"""<\w[^>]*\s(?:src|href)=["'](?!#|data:,)|@import|url\(|\bfetch\(|XMLHttpRequest""", own)
    assert "default-src 'none'" in own


def test_what_a_result_says_is_never_read_as_html(text):
    assert "<b>what" not in text
    assert text.count("</script>") == text.count("<script")
    assert report_pages.HOSTILE in {row["error"] for row in rows_of(data_of(text))}
    assert "&lt;/script&gt;&lt;b&gt;what" in text
    assert json.loads(script_json({"a": "</script> <!-- & \u2028"})) == {"a": "</script> <!-- & \u2028"}
    assert not set("<>&") & set(script_json({"<": "</script> & >"}))


@pytest.mark.parametrize("missing", page.NEEDED)
def test_a_missing_package_is_named_with_its_extra(missing, monkeypatch):
    found = page.importlib.util.find_spec
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(InputError, match=f"{page.NEEDED[missing]}.*multiattn.report"):
        page.require_packages()


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", verdict.SUITE_OF)
def test_the_verdict_has_the_numbers_of_the_docs(kind):
    line = next(
        it for it in (docs.ROOT / "docs" / "results.md").read_text().splitlines() if it.startswith(f"| {kind}, H200")
    )
    (source,) = sources.read_sources([RESULTS / "h200" / f"{verdict.SUITE_OF[kind][0]}.json"])
    standings = verdict.board(source, kind).standings
    assert [it.name for it in standings] == ["auto", *BACKENDS]
    assert re.findall(r"\*\*(\S+)\*\* \((\S+)\)", line) == [(it.mean, it.least) for it in standings]


def test_a_peer_that_is_the_best_in_one_cell_counts_there_alone():
    times = {("cuda", 0): 1.0, ("fa4", 0): 2.0, ("flex", 0): 4.0, ("cuda", 1): 1.0, ("fa4", 1): 2.0, ("flex", 1): 0.5}
    rows = [fakes.row(name, time, cell=CELLS[at]) for (name, at), time in times.items()]
    ratios = over_best_peer(rows)["cuda"]
    assert {it.cell: it.value for it in ratios} == {CELLS[0]: 2.0, CELLS[1]: 0.5}
    standing = verdict.Standing(name="cuda", ratios=ratios)
    assert (standing.mean, standing.least, standing.ahead) == ("1.00", "0.500", 1)
    assert standing.ticks(200, 0.5, 2) == {"behind": [0.0], "ahead": [200.0]}


def test_no_share_of_a_bound_is_above_one(text):
    """In decode the bound is the stated bandwidth: a kernel that only reads passes the rate of a copy."""
    shares = [
        row["tb_per_s"] / row["bound"]["tb_per_s"]
        if "tb_per_s" in row["bound"]
        else row["tflops"] / row["bound"]["tflops"]
        for row in rows_of(data_of(text))
        if row.get("bound")
    ]
    assert len(shares) > 2000
    assert 0.5 < max(shares) <= 1


def test_nothing_measured_is_lost(text):
    data = data_of(text)
    found = {}
    for row in rows_of(data):
        if row["time_ms"] is not None:
            source = data["sources"][row["source"]]
            key = source["gpu"], source["suite"], row["cell"]["key"], row["contender"], row["regime"]
            found[key] = row
    measured = [
        ((it.label, it.suite, row.cell.key, row.contender, row.regime), row)
        for it in sources.read_sources(sources.recorded_files())
        for row in it.timed
    ]
    assert {key for key, _ in measured} == found.keys()
    for key, row in measured:
        told = found[key]
        assert told["time_ms"] == pytest.approx(row.measured.time_ms, rel=1e-4)
        assert told["tflops"] == pytest.approx(row.tflops, rel=1e-4)
        assert (told["plan"] or {}).get("variant") == (row.plan or {}).get("variant")
    others = {"models", "host", "parity", *(f"ladder_{name}" for name in BACKENDS)}
    assert {path for path in RESULTS.rglob("*.json") if path.stem not in others} == set(sources.recorded_files())


def test_what_did_not_run_keeps_its_reason(text):
    unrun = [row for row in rows_of(data_of(text)) if row["time_ms"] is None]
    assert unrun
    assert all(bool(row["reasons"]) != bool(row["error"]) for row in unrun)
    static = text[: text.index('<script type="application/json"')]
    assert static.index("Not run on this machine") > static.index('class="plot lines"')
    assert "gpu: got none on this machine" in static


def test_results_that_have_no_time_at_all_have_their_reasons_on_the_page(evidence):
    why = Reason(code="module", got="none", allowed="one")
    refused = replace(fakes.row("fa2", 1.0, cell=CELLS[0]), measured=None, reasons=(why,))
    text = page_of(evidence, refused)
    assert str(why) in text[: text.index('<script type="application/json"')]


@pytest.mark.parametrize(
    "source", sources.read_sources(sources.recorded_files()), ids=lambda it: f"{it.gpu} {it.suite}"
)
def test_controls_can_tell_any_two_rows_of_a_contender_apart(source):
    """Else a plot would draw two marks of one contender at one place."""
    places = [
        (
            row.contender,
            row.regime,
            cell_data(row.cell)["kind"],
            *(cell_data(row.cell)[dim] for dim in explorers.PARTS[sources.kind_of(row.cell)][2]["dims"]),
        )
        for row in source.rows
    ]
    assert len(places) == len(set(places))


def test_floors_of_this_machine_stand_before_what_is_recorded(tmp_path, evidence):
    rows = [
        fakes.row(name, time, cell=cell) for cell in SUITES["floors"] for name, time in (("cuda", 1.0), ("fa4", 2.0))
    ]
    (tmp_path / "floors.json").write_text(dumps("floors", rows))
    told = verdict.boards(sources.with_this_machine(evidence, tmp_path / "floors.json", tmp_path, []))
    assert [board.gpu for board in told["forward"]][:2] == ["H200, this machine", "H200"]
    assert (told["forward"][0].shown.mean, told["backward"][0].cells) == ("2.00", 2)


def test_what_auto_runs_is_said_of_that_alone(evidence):
    """Where nobody timed what it runs, the first of the others was taken for it."""
    times = {"triton": 4.0, "cutile": 2.0, "fa4": 1.0}
    text = page_of(evidence, *(fakes.row(name, time, cell=CELLS[0]) for name, time in times.items()))
    (hero,) = re.findall(r'<p class="hero">(.*?)</p>', text, re.DOTALL)
    assert "0.50" in hero
    assert "<code>cutile</code>" in hero
    assert "auto" not in hero
    assert '<tr class="best">\n          <th scope="row">cutile' in text


@pytest.mark.parametrize("ratio", [float("inf"), float("nan")])
def test_a_peer_that_is_all_wrong_does_not_keep_the_page_from_being_written(ratio, evidence):
    """JSON has no such number."""
    row = fakes.row("fa4", 1.0, cell=CELLS[0])
    row = replace(row, measured=replace(row.measured, error_ratio=ratio))
    (told,) = rows_of(data_of(page_of(evidence, row)))
    assert told["error_ratio"] == str(ratio)


# ---------------------------------------------------------------- parity and targets


def test_parity_shows_the_worst_of_each_case_and_never_hides_an_infinite_error():
    points = list(extras.parity_points(sources.Parity(name="here", data=report_pages.PARITY)))
    ratios = {(it["case"], it["tensor"]): (it["value"], it["fed_by"]) for it in points}
    assert ratios["even", "dq"] == (0.3, "triton")
    assert ratios["odd", "out"][0] == extras.OFF_THE_SCALE
    (odd,) = (it for it in points if it["case"] == "odd")
    assert (odd["error"], odd["figure"]) == (float("inf"), "inf"), "10 is where it is drawn, not what it is"
    assert len(points) == 4


def test_an_infinite_error_is_worse_than_any_other():
    results = [{"case": "a", "backend": "cuda", "out": [it, 1e-3, it, "max"]} for it in (50.0, "nan", 60.0)]
    (point,) = extras.parity_points(sources.Parity(name="here", data={"results": results}))
    assert point["figure"] == "nan"


@pytest.mark.parametrize("has_cases", [True, False])
def test_the_worst_errors_of_parity_are_those_of_its_summary(has_cases):
    tensors = [name for its in extras.TENSORS.values() for name in its]
    for report in sources.read_parity(RESULTS / "h200" / "parity.json", "H200"):
        if not has_cases:
            report = replace(report, data={name: it for name, it in report.data.items() if name != "results"})
        table = next(it for it in report.data["tables"] if it["title"] == "Summary")
        told = {
            (row[0], name): float(it)
            for row in table["rows"]
            for name, it in zip(tensors, row[6:11], strict=True)
            if it
        }
        worst: dict[tuple[str, str], float] = {}
        for it in extras.parity_points(report):
            key = it["backend"] + " backward" * (it["direction"] == "backward"), it["tensor"]
            worst[key] = max(it["value"], worst.get(key, 0.0))
        assert worst.keys() == told.keys()
        assert worst == pytest.approx(told, abs=0.0051)  # two digits of three


# ---------------------------------------------------------------- colours

SEEN_BY = {  # Machado, Oliveira and Fernandes, "A Physiologically-based Model", 2009, severity 1
    "all": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
_CONES = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
_OKLAB = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]


@functools.cache
def linear(colour):
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    low, high = sorted(float(linear(it) @ [0.2126, 0.7152, 0.0722]) for it in (one, other))
    return (high + 0.05) / (low + 0.05)


def apart(one, other):
    """The least distance in OKLab of two colours, over all who look."""

    def lab(colour, eyes):
        return np.array(_OKLAB) @ np.cbrt(np.array(_CONES) @ np.clip(np.array(eyes) @ linear(colour), 0, 1))

    return min(float(np.linalg.norm(lab(one, eyes) - lab(other, eyes))) for eyes in SEEN_BY.values())


@functools.cache
def every_contender():
    """Those that were recorded, and some that nobody has heard of."""
    recorded = {row.contender for source in sources.read_sources(sources.recorded_files()) for row in source.rows}
    return sorted(recorded | {f"cuda/rung{at}" for at in range(40)} | {f"peer{at}" for at in range(20)})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_contenders_share_a_colour(scheme):
    made = styles.styles(every_contender())
    assert list(made) == every_contender()
    colours = [getattr(style, scheme) for style in {**made, **styles._KNOWN}.values()]
    assert len(set(colours)) == len(colours)
    assert all(re.fullmatch("#[0-9a-f]{6}", it) for it in colours)
    background = styles.BACKGROUNDS[scheme]
    assert {name: round(contrast(getattr(it, scheme), background), 2) for name, it in styles._KNOWN.items()
            if contrast(getattr(it, scheme), background) < 3} == {}  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contenders_that_meet_often_look_different_to_every_eye(scheme):
    for one, other in itertools.combinations(styles.MAIN, 2):
        colours = (getattr(styles.MAIN[name], scheme) for name in (one, other))
        assert apart(*colours) > 0.065, (one, other)
        assert (styles.MAIN[one].shape, styles.MAIN[one].dash) != (styles.MAIN[other].shape, styles.MAIN[other].dash)


def test_the_page_draws_on_the_colours_that_contrast_was_held_against():
    css = (page.FOLDER / "page.css").read_text()
    cards = re.findall(r"--card: (#\w+);", css)
    assert cards[:2] == [styles.BACKGROUNDS["light"], styles.BACKGROUNDS["dark"]]


# ---------------------------------------------------------------- the page of differences


def changed(*speedups):
    before = [fakes.row("cuda", 1.0, cell=cell) for cell in CELLS[: len(speedups)]]
    after = [fakes.row("cuda", 1 / it, cell=cell) for it, cell in zip(speedups, CELLS, strict=False) if it]
    return compare(before, after)


def test_differences_are_counted_and_averaged():
    told = differences.headline(changed(2.0, 1.0, 0.0))
    assert told == (False, "Of 3 cells of ours: 1 faster, 1 same, 0 slower, 1 gone.")
    assert differences.headline(changed(2.0))[0]
    (summary,) = differences.summaries(changed(2.0, 0.5, 0.0))
    assert (summary["mean"], summary["least"], summary["counts"]["gone"]) == ("1.000", "0.500", 1)
    (gone,) = differences.summaries(changed(0.0))
    assert (gone["mean"], gone["least"]) == ("-", "-")


@pytest.mark.parametrize(("speedup", "status"), [(1.0, 0), (0.5, 1)])
def test_compare_prints_its_table_whether_or_not_it_writes_a_page(speedup, status, tmp_path, capsys):
    for name, time in (("a", 1.0), ("b", 1 / speedup)):
        (tmp_path / f"{name}.json").write_text(dumps("smoke", [fakes.row("cuda", time)]))
    command = ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert cli.main(command) == status
    table = capsys.readouterr().out
    assert cli.main([*command, "--html", str(tmp_path / "deep" / "page.html")]) == status
    assert capsys.readouterr().out.startswith(table)
    text = (tmp_path / "deep" / "page.html").read_text()
    assert "Before: a.json" in text
    assert "After: b.json" in text


# ---------------------------------------------------------------- the command


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [fakes.row(name, 1.0, cell=cell) for cell in CELLS for name in ("cuda", "fa4")]
    (tmp_path / "standard.json").write_text(dumps("standard", rows))
    return tmp_path / "standard.json"


def test_report_writes_a_page_and_prints_its_verdict(results, tmp_path, capsys):
    assert cli.main(["report", str(results)]) == 0
    out = capsys.readouterr().out
    assert "Written: out/report.html" in out
    assert "Forward, H200, 3 cells, times the best peer: auto 1.00" in out
    assert len(out.splitlines()) < 10
    assert len(data_of((tmp_path / "out" / "report.html").read_text())["rows"]["rows"]) == 6


@pytest.mark.parametrize("option", ["--text", "--markdown"])
def test_tables_need_no_page(option, results, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(page, "NEEDED", {"no_such_module": "nothing"})
    assert cli.main(["report", str(results), option]) == 0
    assert re.search(r"512 +\|? *100", capsys.readouterr().out)
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["report", str(results)])
    assert exit_info.value.code == 2
    assert "pip install 'multiattn[report]'" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_an_error_without_a_traceback(results, tmp_path, capsys):
    for path, why in ((tmp_path, "Is a directory"), (results / "page.html", "File exists")):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["report", str(results), "--html", str(path)])
        assert exit_info.value.code == 2
        assert why in capsys.readouterr().err


def test_nothing_measured_is_a_page_too(tmp_path):
    empty = sources.recorded(tmp_path)
    assert verdict.boards(empty) == {}
    text = page.report_page(replace(empty, compiled={}))
    assert "No verdict, as none of the suites" in text
    assert data_of(text)["rows"]["rows"] == []
