"""The forecast of many GPUs, against the same worked out by hand."""

import pytest

from bench import cli, scaling
from bench.scaling import Layer, forecast

FULL, CAUSAL = {1024: 400.0, 8192: 500.0}, {4096: 600.0}
RATES = {("fwd", False): FULL, ("fwd", True): CAUSAL, ("bwd", False): FULL, ("bwd", True): CAUSAL}
LAYER = Layer(seq=1 << 18, heads=32, heads_kv=8, head_dim=128)
ALONE_S = 4 * 128 * 32 * (1 << 36) / 2 / 600e12


def close(value):
    return pytest.approx(value, rel=1e-9)


def test_a_ring_in_one_node():
    it = forecast(LAYER, "fwd", 8, "ring", RATES)
    work_s = 4 * 128 * 32 * (1 << 36) / 2 / 64 / 500e12  # at half of 32768 tokens, the rate of 8192
    sums_s = 32768 * 32 * 128 * (4 + 2 + 4) / (4.8e12 * 0.8)
    assert it.steps == 8
    assert it.compute_s == close(work_s + sums_s)
    assert it.transfer_s == close(20e-6 + 2 * 32768 * 8 * 128 * 2 / (450e9 * 0.8))
    assert it.hides_transfers
    assert it.exchange_s == 0
    assert it.efficiency == close(ALONE_S / 8 / (8 * (work_s + sums_s)))


def test_a_ring_across_nodes_waits_for_its_slowest_hop():
    it = forecast(LAYER, "fwd", 128, "ring", RATES)
    assert it.transfer_s == close(20e-6 + 2 * 2048 * 8 * 128 * 2 / (50e9 * 0.8))
    assert not it.hides_transfers
    assert it.total_s == close(128 * it.compute_s + 127 * (it.transfer_s - it.compute_s))


def test_heads_are_exchanged_before_and_after():
    it = forecast(LAYER, "fwd", 16, "heads", RATES)
    q, kv = (LAYER.seq * heads * 128 * 2 for heads in (2, 2 * 1))  # 16 GPUs share 8 heads of k and v: one each

    def seconds(size):  # 7 of 16 parts come from the node, 8 from the other
        return 20e-6 + max(size * 7 / 16 / (450e9 * 0.8), size * 8 / 16 / (50e9 * 0.8))

    assert it.exchange_s == close(seconds(q + kv) + seconds(q))
    assert it.total_s == close(it.exchange_s + ALONE_S / 16)
    assert it.steps == 1
    assert it.hides_transfers


def test_nothing_is_told_of_what_cannot_be_divided_or_was_never_measured():
    assert forecast(LAYER, "fwd", 64, "heads", RATES) is None  # 32 heads
    assert forecast(LAYER, "fwd", 256, "ring", RATES) is None  # half of 1024 tokens: shorter than what was measured
    assert forecast(LAYER, "fwd", 8, "ring", {}) is None
    assert forecast(Layer(seq=1000), "fwd", 8, "ring", RATES) is None


def test_the_command_says_that_it_predicts(capsys):
    assert cli.main(["scaling", "--heads", "32"]) == 0
    told = capsys.readouterr().out
    assert "Predicted: forward, causal, bf16, 1048576 tokens, 32 query heads on 8 key/value heads, D = 128" in told
    assert "Nothing here was measured on more than one GPU" in told
    assert all(line.split()[0] in told for line in map(str, scaling.RANKS))
