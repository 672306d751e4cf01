"""The matrix as benchmarks: ``pytest --benchmark-only [--bench-suite standard]``."""

from typing import Any

import pytest

from bench.conftest import CLOCK, feed
from bench.contenders import Contender, plan_data
from bench.matrix import Cell, cell_flops, tflops
from bench.run import Machine
from multiattn.tune.timing import Budget


@pytest.mark.benchmark(timer=CLOCK, disable_gc=True)
def test_attention(
    cell: Cell, backend: str, contender: Contender, machine: Machine, benchmark: Any, pytestconfig: pytest.Config
) -> None:
    benchmark.group = cell.key
    budget = Budget(rounds=pytestconfig.getoption("--bench-rounds"))
    timing = feed(benchmark, contender.launch, machine.clock, budget)
    benchmark.extra_info["tflops"] = tflops(cell_flops(cell), timing.time_ms)
    benchmark.extra_info["host_bound"] = timing.host_bound
    benchmark.extra_info["plan"] = plan_data(contender.plan) if contender.plan is not None else contender.detail
