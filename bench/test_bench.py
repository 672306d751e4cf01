"""The matrix as benchmarks: ``pytest bench --benchmark-only [--bench-suite standard]``."""

from collections.abc import Callable
from typing import Any

import pytest

from bench.conftest import CLOCK
from bench.contenders import Contender, plan_data
from bench.flops import cell_flops, tflops
from bench.matrix import Cell
from bench.timing import Timing


@pytest.mark.benchmark(timer=CLOCK, disable_gc=True)
def test_attention(
    cell: Cell, backend: str, contender: Contender, event_benchmark: Callable[[Contender], Timing], benchmark: Any
) -> None:
    benchmark.group = cell.key
    timing = event_benchmark(contender)
    benchmark.extra_info["tflops"] = tflops(cell_flops(cell), timing.time_ms)
    benchmark.extra_info["host_bound"] = timing.host_bound
    benchmark.extra_info["plan"] = plan_data(contender.plan) if contender.plan is not None else contender.detail
