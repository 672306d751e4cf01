"""``python -m bench ladder``: its rungs, a climb on a fake device, and its tables, worked out by hand."""

from dataclasses import replace

import bench_fakes as fakes
import bench_ladder_fakes as ladders
import pytest
from bench_ladder_fakes import CELL, ILLEGAL

from bench import cli, ladder
from bench.contenders import our_providers
from bench.ladder import length_tables, point_tables, rungs_of
from bench.matrix import SUITES, InputError
from bench.results import load
from bench.run import Machine


@pytest.fixture(autouse=True)
def _ladders(monkeypatch):
    ladders.install(monkeypatch)


# ---------------------------------------------------------------- which rungs


def test_rungs_are_a_chain_or_the_points_that_match():
    assert [rung.name for rung in rungs_of("cutile", None)] == ["cutile/basic", "cutile/math", "cutile/full"]
    assert [rung.name for rung in rungs_of("cutile", "math")] == ["cutile/basic", "cutile/math"]
    assert len(rungs_of("cuda", None)) == 4
    assert [rung.variant for rung in rungs_of("cuda", "split_kv*")] == ["split_kv", "split_kv+swizzle_q"]
    with pytest.raises(InputError, match=r"--variant: 'warp_\*' matches none of the 4 points of cuda"):
        rungs_of("cuda", "warp_*")
    with pytest.raises(InputError, match="--variant: variant: got 'ful'; cutile has full, math, basic, pointer"):
        rungs_of("cutile", "ful")


def test_a_run_of_all_variants_leaves_rungs_to_the_ladder():
    names = {provider.name for provider in our_providers(("cutile", "cuda"), "all")}
    assert names == {"cutile/full", "cutile/pointer", "cuda/split_q+swizzle_q"}
    assert [provider.name for provider in our_providers(("cutile",), "basic")] == ["cutile/basic"]
    told = r"one of cutile/full, cutile/pointer, or one of 2 rungs \(python -m bench lad"
    with pytest.raises(InputError, match=told):
        our_providers(("cutile",), "wide")


# ---------------------------------------------------------------- on a device


@pytest.fixture
def climb(monkeypatch, tmp_path):
    """The command on a fake device among fake peers: its status and rows, of two small cells."""
    monkeypatch.setattr(Machine, "current", classmethod(lambda cls: fakes.machine()))
    monkeypatch.setattr(ladder, "find_peers", lambda names: tuple(map(fakes.peer, names)))
    small = dict.fromkeys(("seed", "points"), (CELL, replace(CELL, seq=96)))
    monkeypatch.setattr("bench.options.SUITES", {**SUITES, **small})
    quick = ["--rounds", "3", "--sample-ms", "1", "--out", str(tmp_path), "--jobs", "1"]

    def run(backend, *options):
        status = cli.main(["ladder", "--backend", backend, *options, *quick])
        return status, load(tmp_path / f"ladder_{backend}.json")

    return run


def test_a_chain_is_timed_in_turns(climb, capsys):
    status, rows = climb("cutile")
    assert status == 0
    ours = {"cutile/basic", "cutile/math", "cutile/full"}
    assert {row.contender for row in rows} == {*ours, "sdpa-flash", "sdpa-cudnn", "tilegym"}
    assert all(row.measured is not None and row.regime == "device" for row in rows)
    assert len({row.run for row in rows}) == 2  # one a cell: all took turns
    basic = next(row for row in rows if row.contender == "cutile/basic")
    assert basic.plan["config"] == {"tile_m": 64, "tile_n": 32, "stages": 1}
    assert basic.command.startswith("python -m bench ladder --backend cutile --rounds 3")
    assert basic.command.endswith("--fresh --out out/bench/again")
    assert "TFLOPS, cutile up to full" in capsys.readouterr().out
    assert climb("cutile")[1] == rows  # what this setup has measured is not measured again


def test_a_list_has_every_point_timed_or_refused(climb, capsys):
    status, found = climb("cuda")
    rows = {row.contender: row for row in found}
    assert status == 0
    assert set(rows) == {"sdpa-flash", *(f"cuda/{variant.name}" for variant in ladders.POINTS)}
    assert rows["cuda/split_kv"].reasons
    assert rows["cuda/split_q"].measured
    said = capsys.readouterr().out
    assert "split_kv, split_kv+swizzle_q" in said
    assert "Best of each axis" in said


def test_without_a_gpu_it_says_how_to_compile(monkeypatch, capsys):
    monkeypatch.setattr(Machine, "current", classmethod(lambda cls: None))
    assert cli.main(["ladder", "--backend", "cuda"]) == 1
    assert "python -m multiattn compile --backend cuda --variant all" in capsys.readouterr().out


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("outcome", "word"), [({"error": "RuntimeError: broken"}, "error"), ({"reasons": (ILLEGAL,)}, "refused")]
)
def test_a_rung_without_a_time_says_so_and_no_gain_is_over_it(outcome, word):
    times = {"sdpa-flash": 2.0, "sdpa-cudnn": 0.5, "cutile/math": 2.5, "cutile/full": 1.0, "cutile/basic": 3.0}
    *others, first = (fakes.row(name, time, cell=CELL) for name, time in times.items())
    (table,) = length_tables([*others, replace(first, measured=None, **outcome)], "cutile")
    assert (table.rows[0][3], table.rows[0][7]) == (word, "-")


POINTS = [fakes.row(name, time, cell=CELL) for name, time in (
    ("sdpa-flash", 2.0), ("cuda/split_q", 1.0), ("cuda/split_q+swizzle_q", 0.8)
)]  # fmt: skip


def test_a_point_has_its_time_and_gains_and_no_point_is_dropped():
    illegal = [fakes.row(f"cuda/{name}", 1.0, cell=CELL) for name in ("split_kv", "split_kv+swizzle_q")]
    rows = [*POINTS, *(replace(row, measured=None, reasons=(ILLEGAL,)) for row in illegal)]
    points, others = point_tables(rows)
    assert points.rows == (
        ("split_q+swizzle_q", "0.800", "125", "+25.0 %", "2.50x"),
        ("split_q", "1.000", "100", "-", "2.00x"),
    )
    assert others.rows == ((str(ILLEGAL), "2", "split_kv, split_kv+swizzle_q"),)
