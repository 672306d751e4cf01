"""multiattn.inspect.roofline: work counted one by one, bounds worked out by hand, and the command that prints them."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from bench import matrix, results
from bench.flops import cell_flops, forward_flops
from multiattn.inspect import roofline
from multiattn.inspect.roofline import (
    DIRECTIONS,
    Tile,
    balance,
    best_measured,
    bounds,
    compare,
    read_results,
    score_cycles,
    work,
)
from multiattn.mask import visible_pairs
from multiattn.plan.arch import GPUS, gpu_by_name
from multiattn.problem import Problem

H200 = Path(matrix.__file__).parent / "results" / "h200"


def layer(head_dim, seq, *, causal=False, tokens=16384):
    """Self-attention of as many tokens as make sense, 2048 wide."""
    heads = 2048 // head_dim
    return Problem.contiguous(batch=tokens // seq, heads_q=heads, seq_q=seq, head_dim=head_dim, causal=causal)


def command(*arguments):
    parser = argparse.ArgumentParser()
    roofline.add_arguments(parser)
    return roofline.run(parser.parse_args(arguments))


# ---------------------------------------------------------------- work


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
@pytest.mark.parametrize("seqs", [(1, 1), (7, 7), (5, 9), (9, 5), (1, 30), (4, 0), (0, 4)])
def test_work_is_what_one_would_count(causal, heads, seqs):
    """Pair by pair, and row by row, from the mask that the reference uses."""
    problem = Problem.contiguous(
        batch=2, heads_q=heads[0], heads_kv=heads[1], seq_q=seqs[0], seq_kv=seqs[1], head_dim=8, causal=causal
    )
    seen = visible_pairs(problem.seq_q, problem.seq_kv, torch.device("cpu"), causal=problem.causal).expand(*seqs)
    scores, rows, some = 2 * heads[0] * int(seen.sum()), int(seen.any(1).sum()), bool(seen.any())
    forward, backward = (work(problem, direction) for direction in DIRECTIONS)
    assert (forward.flops, backward.flops) == (2 * 2 * 8 * scores, 5 * 2 * 8 * scores)
    assert forward.flops == forward_flops(problem)
    assert forward.exponentials == backward.exponentials == scores
    q, kv, row = 2 * heads[0], 2 * heads[1], 8 * 2  # rows of all heads, and bytes of one
    k_and_v, lse = 2 * kv * seqs[1] * row, 4
    assert forward.bytes == q * rows * row + some * k_and_v + q * seqs[0] * (row + lse)
    assert backward.bytes == q * rows * (3 * row + lse) + some * k_and_v + q * seqs[0] * row + k_and_v


@pytest.mark.parametrize("cell", [*matrix.SUITES["standard"], *matrix.SUITES["backward"]], ids=str)
def test_flops_are_those_of_the_benchmark(cell):
    assert work(cell.problem, {"fwd": "forward", "bwd": "backward"}[cell.direction]).flops == cell_flops(cell)


@pytest.mark.parametrize(
    ("tile", "forward", "backward", "smem"),
    [
        ("64x64", 64, 160, 8192 / 192),
        ("128x64", 128, 160, 64),
        ("128x128", 128, 320, 16384 / 192),
        ("192x128", 192, 320, 768 / 7),
    ],
)
def test_the_intensity_of_a_tile(tile, forward, backward, smem):
    """From the bytes of the blocks that pass by, at some D: it must not matter which."""
    parsed = Tile.parse(tile)
    assert str(parsed) == tile
    for head_dim in (64, 256):
        scores = parsed.tile_m * parsed.tile_n
        passing = {"forward": 2 * parsed.tile_n * head_dim * 2, "backward": 2 * parsed.tile_m * head_dim * 2}
        assert parsed.memory_intensity("forward") == forward == 4 * head_dim * scores / passing["forward"]
        assert parsed.memory_intensity("backward") == backward == 10 * head_dim * scores / passing["backward"]
    assert parsed.smem_intensity == pytest.approx(smem)


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("device", "head_dim", "direction", "ratio"),
    [
        ("H100 SXM", 64, "forward", 1.0),  # 4*64 FLOP of 4096 a clock, an exponential of 16 a clock
        ("H200", 64, "forward", 1.0),
        ("H200", 128, "forward", 2.0),
        ("H200", 256, "forward", 4.0),
        ("H200", 64, "backward", 2.5),
        ("A100 SXM 80GB", 64, "forward", 2.0),
        ("RTX 4090", 64, "forward", 8.0),
        ("L40S", 64, "forward", 4.0),
        ("B200", 64, "forward", 0.5),
        ("B200", 128, "forward", 1.0),
        ("B300", 64, "forward", 1.0),
        ("GB300", 128, "forward", 2.0),
        ("GB10", 64, "forward", 4.0),
    ],
)
def test_clocks_of_tensor_cores_over_those_of_exponentials(device, head_dim, direction, ratio):
    gpu = gpu_by_name(device)
    tensor, exp = score_cycles(gpu, head_dim, direction)
    assert tensor / exp == ratio
    found = bounds(layer(head_dim, 16384), gpu, direction)
    assert found.tensor_ms / found.exp_ms == pytest.approx(ratio)
    assert found.busiest == (("tensor",) if ratio > 1 else ("exp",) if ratio < 1 else ("tensor", "exp"))
    assert found.peak_share == pytest.approx(min(ratio, 1.0))


@pytest.mark.parametrize(
    ("device", "problem", "direction", "bound_by", "time_ms", "tflops"),
    [
        # 4 * 128 * 16 heads * 16384^2 / 989.43 TFLOPS
        ("H200", layer(128, 16384), "forward", "tensor", 2.2225, 989.43),
        ("H200", layer(128, 16384), "backward", "tensor", 5.5563, 989.43),
        # 32 heads * 16384^2 exponentials, 148 * 16 of them a clock of 1.856 GHz
        ("B200", layer(64, 16384), "forward", "exp", 1.9545, 1125.1),
        # q, k, v and out of 64 MiB, lse of 1 MiB, at 4.8 TB/s
        ("H200", layer(128, 512, causal=True), "forward", "memory", 0.056143, 613.2),
        # 8 tensors of 64 MiB, 1 MiB of lse
        ("H200", layer(128, 512, causal=True), "backward", "memory", 0.11207, 768.0),
        # One query: k and v of 32 heads, 32768 long, are all that counts; 4 FLOP for 4 bytes, so 1 FLOP a byte.
        (
            "A100 SXM 80GB",
            Problem.contiguous(batch=1, heads_q=32, seq_q=1, seq_kv=32768, head_dim=128, causal=True),
            "forward",
            "memory",
            0.26330,
            2.0389,
        ),
    ],
)
def test_known_bounds(device, problem, direction, bound_by, time_ms, tflops):
    found = bounds(problem, gpu_by_name(device), direction)
    assert found.bound_by == bound_by
    assert found.time_ms == pytest.approx(time_ms, rel=1e-4)
    assert found.tflops == pytest.approx(tflops, rel=1e-4)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_bounds_on_every_device(gpu, direction):
    """What each unit needs holds by itself; twice the keys need no less time; a long problem is not memory's."""
    for head_dim in (64, 96, 128, 256):
        for causal in (False, True):
            earlier = None
            for seq in (64, 512, 4096, 16384):
                found = bounds(layer(head_dim, seq, causal=causal), gpu, direction)
                times = (found.tensor_ms, found.exp_ms, found.memory_ms)
                assert found.time_ms == max(times) > 0
                assert found.peak_share <= 1 + 1e-12
                assert found.tflops <= 1.01 * gpu.tflops
                assert found.intensity == pytest.approx(found.flops / found.bytes)
                memory_free = found.intensity >= balance(gpu)[0]
                assert (found.memory_ms <= found.tensor_ms) == memory_free
                assert earlier is None or found.tflops >= earlier * (1 - 1e-9)
                earlier = found.tflops
            assert found.bound_by in ("tensor", "exp")
            assert found.fp32_ms < found.time_ms


def test_bounds_say_what_they_accept():
    gpu = gpu_by_name("H200")
    single = Problem.contiguous(batch=1, heads_q=1, seq_q=4, head_dim=8, dtype="fp32")
    with pytest.raises(ValueError, match="dtype: got fp32; allowed bf16, fp16"):
        bounds(single, gpu)
    with pytest.raises(ValueError, match="direction: got 'fwd'; allowed forward, backward"):
        bounds(layer(64, 512), gpu, "fwd")
    nothing = Problem.contiguous(batch=0, heads_q=1, seq_q=4, head_dim=8)
    found = bounds(nothing, gpu)
    assert (found.time_ms, found.tflops, found.intensity) == (0, 0, 0)


# ---------------------------------------------------------------- measurements and the command


def test_what_is_stated_twice_is_the_same():
    assert {*roofline.SCHEMAS} == {results.SCHEMA, *results.OLDER}
    assert (roofline.TOKENS, roofline.HIDDEN) == (matrix.TOKENS, matrix.HIDDEN)


@pytest.mark.parametrize(("file", "direction"), [("standard", "forward"), ("backward", "backward")])
def test_the_best_of_ours_is_that_of_the_results_file(file, direction):
    path, gpu = H200 / f"{file}.json", gpu_by_name("H200")
    measurements = read_results([path])
    rates = {}
    for row in results.load(path):
        if row.measured is not None and row.regime == "device" and results.is_ours(row.contender):
            rates.setdefault(row.cell, []).append(row.measured.tflops)
    assert len(measurements) == sum(map(len, rates.values())) > 0
    for cell, of_cell in rates.items():
        best = best_measured(measurements, cell.problem, gpu, direction)
        assert best is not None
        assert best.tflops == max(of_cell)
        assert best_measured(measurements, cell.problem, gpu_by_name("H100 SXM"), direction) is None
        (row,) = compare([cell.problem], gpu, direction, measurements)
        assert row.ceiling_share == pytest.approx(max(of_cell) / row.bounds.tflops)
        assert row.ceiling_share < 1, cell
    other = Problem.contiguous(batch=4, heads_q=16, heads_kv=4, seq_q=4096, head_dim=128)
    assert best_measured(measurements, other, gpu, direction) is None


def test_the_command_prints_a_row_of_each_problem(capsys):
    paths = [str(H200 / "standard.json"), str(H200 / "backward.json")]
    assert command("--device", "h200", "--device", "B200", "--direction", "both", "--results", *paths) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    for device in ("H200", "B200"):
        for direction in DIRECTIONS:
            assert sum(line.startswith(f"{device} {direction}: sm") for line in lines) == 1
    cells = [line.split() for line in lines]
    rows = [row for row in cells if len(row) > 4 and row[4] in ("full", "causal")]
    assert len(rows) == 2 * 2 * 3 * 2 * 6
    (row,) = (row for row in rows[:36] if row[:5] == ["16", "16", "128", "1024", "full"])
    assert row[5:13] == ["510", "0.139", "0.0695", "0.0561", "0.0304", "tensor", "989", "100%"]
    best = best_measured(read_results([H200 / "standard.json"]), layer(128, 1024), gpu_by_name("H200"), "forward")
    assert row[13:] == [f"{best.tflops:.0f}", best.contender, f"{best.tflops / 989.43:.0%}"]
    assert "a score at D=64: 0.0625 clocks of tensor cores, 0.0625 of exponentials" in text
    assert "tile 128x128: 128 FLOP per byte loaded; tensor cores wait for device memory below 206" in text


def test_the_command_takes_any_problem_on_all_devices_as_json(capsys):
    shape = "--head-dim 40 --seq 100,300 --kv-len 700 --heads 6 --kv-heads 2 --batch 3 --dtype fp16 --causal"
    assert command("--device", "all", "--device", "H200", *shape.split(), "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["gpu"] for row in rows] == [gpu.name for gpu in GPUS for _ in range(2)]
    sizes = {name: rows[1][name] for name in ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "dtype")}
    problem = Problem.contiguous(**sizes, causal=True)
    assert rows[1]["flops"] == forward_flops(problem)
    assert rows[1]["bound_by"] == bounds(problem, GPUS[0]).bound_by
    assert rows[1]["measured"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device H300", "device: got 'H300'; allowed A100 SXM 80GB, RTX 3090"),
        ("--device H200 --tile 128", "tile: got '128'; allowed queries x keys, as in 128x64"),
        ("--device H200 --tile 0x64", "tile: got 0x64; allowed"),
        ("--device H200 --seq 512,x", "--seq: got '512,x'; allowed positive counts"),
        ("--device H200 --head-dim 0", "--head-dim: got '0'; allowed positive counts"),
        ("--device H200 --seq 32768", "--tokens: got 16384 for --seq 32768; allowed at least one sequence"),
        ("--device H200 --batch 0", "--batch: got 0; allowed at least one sequence"),
        ("--device H200 --heads 3 --kv-heads 2", "query heads must be a multiple"),
        ("--device H200 --results nowhere.json", "nowhere.json: not a results file of python -m bench"),
    ],
)
def test_the_command_says_what_it_accepts(arguments, message, capsys):
    assert command(*arguments.split()) == 2
    told = capsys.readouterr()
    assert told.err.startswith("python -m multiattn roofline: ")
    assert message in told.err
    assert told.out == ""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 3, "environments": [], "rows": [{}]}'])
def test_other_files_are_refused_by_name(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    if text.endswith("[{}]}"):
        assert read_results([path]) == ()  # a row that tells nothing of ours
        path.write_text(text.replace("{}", '{"plan": {}, "measured": {}, "cell": {}, "environment": 0}'))
    with pytest.raises(ValueError, match=r"other.json: not a results file of python -m bench: \w+: "):
        read_results([path])


def test_without_tabulate_there_is_json(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tabulate", None)
    assert command("--device", "H200") == 2
    assert "tabulate is missing; pip install 'multiattn[report]', or ask for --json" in capsys.readouterr().err
    assert command("--device", "H200", "--json") == 0
