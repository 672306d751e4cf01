"""Tables of a ladder, made of rows and records alone: every figure in them is worked out by hand here."""

from dataclasses import replace

import bench_fakes as fakes
import bench_ladder_fakes as ladders
import pytest
from bench_ladder_fakes import CELL, record

from bench import ladder_list, ladder_tables, readme, report
from bench.errors import InputError
from bench.ladder_facts import Conflicts, load, merge, save
from bench.ladder_list import conflicts_text, listings, points_table, refused_table
from bench.ladder_pages import terminal, write_pages
from bench.ladder_rungs import Rung, baseline
from bench.ladder_tables import boards, percent, ratio
from bench.results import Store
from bench.results import load as load_rows
from bench.verdicts import preferences
from multiattn.plan.support import Reason

RUN = "2026-11-21T05:00:00+00:00-0a"
LATER = "2026-11-21T06:00:00+00:00-0b"
LONG = replace(CELL, seq=96)


@pytest.fixture(autouse=True)
def _ladders(monkeypatch):
    ladders.install(monkeypatch)


def timed(contender, time_ms, cell=CELL, run=RUN):
    plan = {"variant": contender, "config": {"tile_m": 128, "stages": 2, "registers": None}, "why": "a guess"}
    row = fakes.row(contender, time_ms, cell=cell, run=run)
    return replace(row, plan=plan if "/" in contender else None)


def refused(contender, *reasons, cell=CELL, error=""):
    return replace(timed(contender, 1.0, cell), measured=None, reasons=reasons, error=error)


def chain_rows(cell=CELL, factor=1.0, run=RUN):
    times = {
        "sdpa-flash": 2.0, "sdpa-cudnn": 0.5,
        "cutile/basic@full": 4.0, "cutile/math@full": 2.0, "cutile/full": 1.0,
        "cutile/basic": 3.0, "cutile/math": 2.5,
    }  # fmt: skip
    return [timed(name, factor * time, cell, run) for name, time in times.items()]


def test_a_rung_has_a_name_and_back():
    for name in ("cutile/math", "cutile/math@full"):
        assert str(Rung.parse(name)) == name
    assert Rung.parse("cutile") is None
    assert Rung.parse("sdpa-flash") is None
    assert (baseline(256), baseline(264)) == ("sdpa-flash", "sdpa-efficient")


def test_the_summary_and_the_impact_are_by_length():
    (board,) = boards([*chain_rows(), *chain_rows(LONG, 2.0)], "cutile")
    pinned = ladder_tables.summary_table(board, "pinned")
    assert pinned.header[:6] == ("N", "sdpa-flash", "sdpa-cudnn", "basic", "math", "full")
    assert pinned.rows[0] == ("48", "50", "200", "25", "50", "100", "2.00x", "4.00x")
    assert [line[0] for line in pinned.rows] == ["48", "96"]
    assert ladder_tables.summary_table(board, "tuned").rows[0][3:6] == ("33", "40", "100")
    assert (percent(None), percent(0.9), ratio(None)) == ("-", "-10.0 %", "-")


def test_a_rung_without_a_time_says_so_and_nobody_gains_on_it():
    rows = [row for row in chain_rows() if row.contender != "cutile/math@full"]
    reason = Reason(code="config", got="tile_m=128", allowed="64")
    (board,) = boards([*rows, refused("cutile/math@full", reason)], "cutile")
    assert ladder_tables.summary_table(board, "pinned").rows[0][4] == "refused"
    (board,) = boards([*rows, refused("cutile/math@full", error="RuntimeError: broken")], "cutile")
    assert ladder_tables.summary_table(board, "pinned").rows[0][4] == "error"


def test_only_rows_of_one_run_stand_in_a_table():
    old = chain_rows()
    new = [replace(row, run=LATER) for row in chain_rows(factor=2.0) if row.contender != "sdpa-flash"]
    (board,) = boards([*old, *new], "cutile")
    assert board.measured(CELL.seq, "cutile/full").time_ms == 2.0
    assert board.measured(CELL.seq, "sdpa-flash") is None
    other = [replace(row, contender=row.contender.replace("cutile", "triton"), run=LATER) for row in chain_rows()]
    (board,) = boards([*old, *other], "cutile")  # another backend's ladder of the same cells takes nothing away
    assert board.measured(CELL.seq, "sdpa-flash").time_ms == 2.0


def test_a_chain_of_one_has_a_board_for_who_names_it():
    rows = [timed("cutile/pointer", 1.0), timed("sdpa-flash", 2.0)]
    assert boards(rows, "cutile") == []
    (board,) = boards(rows, "cutile", "pointer")
    assert ladder_tables.summary_table(board, "tuned").rows == (("48", "50", "100", "2.00x", "1.00x"),)


def test_rungs_and_axes_are_tables_without_any_result():
    assert [line[:3] for line in ladder_tables.rungs_table("cutile").rows] == [
        ("basic", "-", "by name"),
        ("math", "basic", "by name"),
        ("full", "math", "offered"),
        ("pointer", "-", "offered"),
    ]


# ---------------------------------------------------------------- the list

POINTS = [timed("sdpa-flash", 2.0), timed("cuda/split_q", 1.0), timed("cuda/split_q+swizzle_q", 0.8)]
ILLEGAL = Reason(code="variant", got="share_qkv with split_kv", allowed="share_qkv with split_q")


def test_a_point_has_its_time_its_gains_and_what_it_compiled_to():
    records = [record("split_q", emulated=96, profiled=1234), record("split_q+swizzle_q")]
    (listing,) = listings(POINTS, records, "cuda")
    table = points_table(listing)
    lines = {line[0]: line[1:] for line in table.rows}
    assert table.header == (
        "variant", "ms", "TFLOPS", "over parent", "over SDPA", "smem", "registers", "spills", "warps", "conflicts",
        "config",
    )  # fmt: skip
    kernel = ("65536", "168", "0", "19 % (3, smem)")
    assert lines["split_q"] == ("1.000", "100", "-", "2.00x", *kernel, "96 of 288", "tile_m=64 tile_n=32")
    assert lines["split_q+swizzle_q"][:4] == ("0.800", "125", "+25.0 %", "2.50x")
    assert lines["split_q+swizzle_q"][8] == "0 of 288"
    assert lines["sdpa-flash"][:4] == ("2.000", "50", "-", "1.00x")
    assert all(len(line) == len(table.header) for line in table.rows)
    assert refused_table(listing).rows == ()
    best = {line[:2]: line[3:] for line in ladder_list.best_of_axes_table(listing).rows}
    assert best["warps", "split_q"] == ("125", "split_q+swizzle_q")
    assert best["warps", "split_kv"] == ("-", "-")
    assert best["swizzle", "none"] == ("100", "split_q")


def test_points_that_do_not_run_are_grouped_by_reason_and_none_is_dropped():
    rows = [
        *POINTS,
        refused("cuda/split_kv", ILLEGAL),
        refused("cuda/split_kv+swizzle_q", ILLEGAL),
    ]
    (listing,) = listings(rows, [], "cuda")
    assert refused_table(listing).rows == ((str(ILLEGAL), "2", "split_kv, split_kv+swizzle_q"),)
    shown = {line[0] for line in points_table(listing).rows}
    assert shown == {"sdpa-flash", "split_q", "split_q+swizzle_q"}
    broken = [POINTS[0], refused("cuda/split_q", error="Mismatch: out is off"), POINTS[2]]
    (listing,) = listings(broken, [], "cuda")
    assert refused_table(listing).rows == (("error: Mismatch: out is off", "1", "split_q"),)
    assert next(line for line in points_table(listing).rows if line[0] == "split_q+swizzle_q")[3] == "-"


def test_a_list_that_was_not_timed_says_so():
    records = [record("split_q", emulated=None), record("split_kv", kernels=(), reasons=(ILLEGAL,))]
    (listing,) = listings([], records, "cuda")
    table = points_table(listing)
    assert table.note.startswith("Nothing here was timed. ")
    assert "No conflicts counted: left out: --no-emulation." in table.note
    assert [line[0] for line in table.rows] == ["split_q"]
    assert table.header[1] == "smem"
    assert refused_table(listing).rows[0][1:] == ("1", "split_kv")
    assert conflicts_text(Conflicts()) == "-"
    assert "ms" in terminal([points_table(listings(POINTS, [], "cuda")[0])])


def test_what_compiled_for_a_chain_is_a_table_with_refusals_in_it():
    basic = record("basic", rung=Rung(backend="cutile", variant="basic", pin="full"), seqs=(48, 96))
    bad = record("math", rung=Rung(backend="cutile", variant="math"), kernels=(), error="CompileError: no luck\nat all")
    table = ladder_tables.compiled_table([basic, bad])
    assert table.rows[0][:6] == ("basic", "pinned", "48, 96", "tile_m=64 tile_n=32", "128", "168")
    assert table.rows[1][:4] == ("math", "tuned", "48", "CompileError: no luck")
    assert all(len(line) == len(table.header) for line in table.rows)
    assert "Nothing here was timed" in table.note


# ---------------------------------------------------------------- kept


def test_records_are_kept_and_merged(tmp_path):
    path = tmp_path / "ladder_cuda.json"
    first = [record("split_q", profiled=7), record("split_kv", kernels=(), reasons=(ILLEGAL,)), record("gone")]
    save(first, path)
    assert load(path) == first
    again = merge(first, [record("split_q", emulated=5), record("split_q+swizzle_q")])
    names = [it.rung.variant for it in again]
    assert names == ["split_q+swizzle_q", "split_q", "split_kv"]  # the backend's order; what it has not goes
    assert again[1].emulated.count == 5
    assert again[1].profiled.count == 7  # the same kernel: what was read of it holds
    smaller = replace(first[0].kernels[0], registers=64)
    (other, _) = merge(first[:1], [record("split_q", kernels=(smaller,)), record("split_kv", error="x", kernels=())])
    assert other.profiled.count is None
    path.write_text('{"schema": 0}')
    with pytest.raises(InputError, match="not a ladder's record of schema"):
        load(path)
    with pytest.raises(ValueError, match="a record has kernels, or"):
        record("split_q", error="too")


# ---------------------------------------------------------------- the docs


def test_pages_have_tables_curves_and_no_markup_of_strangers(tmp_path):
    rows = [*chain_rows(), *chain_rows(LONG)]
    (board,) = boards(rows, "cutile")
    tables = ladder_tables.board_tables(board)
    page, html = write_pages("ladder_cutile", tables, ["a <line>"], rows, tmp_path)
    assert "**Summary, pinned" in page.read_text()
    text = html.read_text()
    assert "<svg" in text
    assert "a &lt;line&gt;" in text


# ---------------------------------------------------------------- who else reads results


def test_the_readme_offers_what_comes_unasked_and_counts_the_rest():
    lines = readme.support_block().splitlines()
    forward = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines if "| forward" in line]
    assert ["cutile", "forward", "full"] in forward
    assert ["cutile", "forward", "basic"] not in forward
    assert "- cutile forward has 2 more rungs, selected only by name: [docs/ladder.md](docs/ladder.md)" in lines
    assert not any("backward has" in line for line in lines)


def test_readers_of_results_neither_choke_on_a_ladder_nor_pick_it_up(tmp_path):
    cells = [replace(cell, layout="bhsd") for cell in (CELL, LONG)]
    rows = [row for cell in cells for row in (*chain_rows(cell), timed("cuda/split_q", 1.0, cell))]
    path = tmp_path / "h200" / "ladder_cutile.json"
    Store.open(path, "ladder_cutile").add(rows)
    assert load_rows(path) == list(rows)
    assert preferences(rows) == []
    assert "cutile/basic@full" in report.text_report(rows)
    assert "cutile/basic@full" in report.html_report(rows)
    save([record("split_q")], tmp_path / "compiled" / "ladder_cuda.json")
    assert readme.results_block(tmp_path) == readme.NOTHING_MEASURED
