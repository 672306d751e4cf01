"""multiattn.inspect.roofline: work counted one by one, bounds worked out by hand, and the command that prints them."""

import pytest
import torch

from bench import matrix
from multiattn.__main__ import main
from multiattn.inspect.options import layer
from multiattn.inspect.roofline import bounds
from multiattn.mask import CAUSAL, FULL, MASKS, Band
from multiattn.plan.arch import GPUS, gpu_by_name
from multiattn.plan.backend import DIRECTIONS
from multiattn.problem import Problem

H200 = gpu_by_name("H200")
ONE_QUERY = layer(128, 1, "causal", batch=1, heads=32, seq_kv=32768)


@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(2, 0), Band(0, 0), Band(3, 1), Band(None, 2)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
@pytest.mark.parametrize("seqs", [(1, 1), (7, 7), (5, 9), (9, 5), (1, 30), (4, 0), (0, 4)])
def test_work_is_what_one_would_count(band, heads, seqs):
    """Pair by pair, and row by row, from the mask that the reference uses."""
    problem = Problem.contiguous(
        batch=2, heads_q=heads[0], heads_kv=heads[1], seq_q=seqs[0], seq_kv=seqs[1], head_dim=8, band=band
    )
    seen = band.visible(*seqs, torch.device("cpu"))
    assert problem.visible_pairs == int(seen.sum())
    scores, rows, keys = 2 * heads[0] * int(seen.sum()), int(seen.any(1).sum()), int(seen.any(0).sum())
    forward, backward = (bounds(problem, H200, direction) for direction in DIRECTIONS)
    assert (forward.flops, backward.flops) == (2 * 2 * 8 * scores, 5 * 2 * 8 * scores)
    q, kv, row = 2 * heads[0], 2 * heads[1], 8 * 2  # rows of all heads, and bytes of one
    read, lse = 2 * kv * keys * row, 4
    assert forward.bytes == q * rows * row + read + q * seqs[0] * (row + lse)
    assert backward.bytes == q * rows * (3 * row + lse) + read + q * seqs[0] * row + 2 * kv * seqs[1] * row


def test_flops_are_those_of_the_benchmark():
    for cell in [*matrix.SUITES["standard"], *matrix.SUITES["backward"]]:
        direction = {"fwd": "forward", "bwd": "backward"}[cell.direction]
        assert bounds(cell.problem, H200, direction).flops == matrix.cell_flops(cell)


@pytest.mark.parametrize(
    ("device", "problem", "direction", "bound_by", "time_ms", "tflops"),
    [
        # 4 * 128 * 16 heads * 16384^2 / 989.43 TFLOPS
        ("H200", layer(128, 16384, "full"), "forward", "tensor", 2.2225, 989.43),
        ("H200", layer(128, 16384, "full"), "backward", "tensor", 5.5563, 989.43),
        # 32 heads * 16384^2 exponentials, 148 * 16 of them a clock of 1.856 GHz
        ("B200", layer(64, 16384, "full"), "forward", "exp", 1.9545, 1125.1),
        # q, k, v and out of 64 MiB, lse of 1 MiB, at 4.8 TB/s
        ("H200", layer(128, 512, "causal"), "forward", "memory", 0.056143, 613.2),
        # 8 tensors of 64 MiB, 1 MiB of lse
        ("H200", layer(128, 512, "causal"), "backward", "memory", 0.11207, 768.0),
        # One query: k and v of 32 heads, 32768 long, are all that counts; 4 FLOP for 4 bytes, so 1 FLOP a byte.
        ("A100 SXM 80GB", ONE_QUERY, "forward", "memory", 0.2633, 2.0389),
    ],
)
def test_known_bounds(device, problem, direction, bound_by, time_ms, tflops):
    found = bounds(problem, gpu_by_name(device), direction)
    assert found.busiest[0] == bound_by
    assert found.time_ms == pytest.approx(time_ms, rel=1e-4)
    assert found.tflops == pytest.approx(tflops, rel=1e-4)


def test_bounds_say_what_they_accept():
    single = Problem.contiguous(batch=1, heads_q=1, seq_q=4, head_dim=8, dtype="fp32")
    with pytest.raises(ValueError, match="dtype: got fp32; allowed bf16, fp16"):
        bounds(single, H200)
    with pytest.raises(ValueError, match="direction: got 'fwd'; allowed forward, backward"):
        bounds(layer(64, 512, "full"), H200, "fwd")
    found = bounds(Problem.contiguous(batch=0, heads_q=1, seq_q=4, head_dim=8), H200)
    assert (found.time_ms, found.tflops, found.intensity) == (0, 0, 0)


# ---------------------------------------------------------------- the command


def command(*arguments):
    return main(["roofline", *arguments])


def test_the_command_prints_a_row_of_each_problem(capsys):
    assert command("--device", "h200", "--device", "B200", "--direction", "both") == 0
    text = capsys.readouterr().out
    for device in ("H200", "B200"):
        for direction in DIRECTIONS:
            assert text.count(f"{device} {direction}: sm") == 1
    cells = [line.split() for line in text.splitlines()]
    rows = [row for row in cells if len(row) > 4 and row[4] in MASKS]
    assert len(rows) == 2 * 2 * 3 * 2 * 6
    (row,) = (row for row in rows[:36] if row[:5] == ["16", "16", "128", "1024", "full"])
    assert row[5:] == ["510", "0.139", "0.0695", "0.0561", "tensor", "989", "100%"]
    assert "a score at D=64: 0.0625 clocks of tensor cores, 0.0625 of exponentials" in text


def test_the_command_counts_both_head_dims(capsys):
    assert command("--device", "h200", "--head-dim", "192/128,128", "--seq", "16384", "--heads", "16", "--full") == 0
    of_widths = capsys.readouterr().out
    assert command("--device", "h200", "--shape", "1,16,16384,192/128", "--full") == 0
    text = capsys.readouterr().out
    (row,) = (it for it in text.splitlines() if "192/128 " in it)
    assert row.split()[:5] == ["1", "16", "192/128", "16384", "full"]
    assert row in of_widths
    assert "a score at D=192/128: 0.1562 clocks of tensor cores, 0.0625 of exponentials" in text
    found = bounds(layer(192, 4096, "causal", batch=1, heads=16, head_dim_v=128), H200)
    assert found.flops == 2 * (192 + 128) * 16 * (4096 * 4097 // 2)
    assert found.bytes == 16 * 4096 * (2 * (192 + 192 + 128 + 128) + 4)


def test_the_command_takes_any_problem_on_all_devices(capsys):
    shape = "--head-dim 40 --seq 100,300 --kv-len 700 --heads 6 --kv-heads 2 --batch 3 --dtype fp16"
    for mask in ("--causal", "--mask window:64:0"):
        assert command("--device", "all", "--device", "H200", *shape.split(), *mask.split()) == 0
        text = "\n" + capsys.readouterr().out
        assert [text.count(f"\n{gpu.name} forward: {gpu.arch}") for gpu in GPUS] == [1] * len(GPUS)
        assert [line.split()[:5] for line in text.splitlines() if line.startswith("3 ")] == [
            ["3", "6/2", "40", length, mask.split("-")[-1].split()[-1]]
            for _ in GPUS
            for length in ("100/700", "300/700")
        ]
