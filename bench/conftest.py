"""``pytest --benchmark-only``: pytest-benchmark fed with CUDA event times."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.contenders import Contender, our_providers
from bench.matrix import SUITES, Cell, Direction
from bench.peers import PEERS, Provider
from bench.results import NO_GPU, environment
from bench.run import Machine, admit, tensors_and_truth
from multiattn.tune.timing import Budget, Contestant, CudaClock, Sample, Timing, warm_up


class EventClock:
    """A timer for pytest-benchmark, in seconds: it moves by measured event times and by nothing else."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = EventClock()
FOLDER = Path(__file__).parent
CELLS, HOST = "test_bench.py", "test_host.py"
UNTIMED = pytest.StashKey[int]()
"""The number of benchmarks of cells that no GPU is here for."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per cell and contender, those of one cell together: they share its tensors and its truth."""
    if "cell" in metafunc.fixturenames:
        cells = SUITES[metafunc.config.getoption("--bench-suite")]
        pairs = [(cell, name) for cell in cells for name in providers(cell.direction)]
        ids = [f"{it.direction}-D{it.head_dim}-N{it.seq}-{it.attention}-{name}".replace(" ", "-") for it, name in pairs]
        metafunc.parametrize(("cell", "backend"), pairs, ids=ids)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the host on a machine with a GPU, where `python -m bench host` times it, and cells on one without."""
    machine = Machine.current()
    needless = HOST if machine is not None else CELLS
    left_out = [it for it in items if it.path.parent == FOLDER and it.path.name == needless]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [it for it in items if it not in left_out]
        if machine is None:
            config.stash[UNTIMED] = len(left_out)


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """One line for all cells that want a GPU."""
    count = config.stash.get(UNTIMED, 0)
    return f"{NO_GPU}: {count} benchmarks of cells are left out; timed is what a call costs the host" if count else ""


@functools.cache
def providers(direction: Direction) -> dict[str, Provider]:
    """Backends and peers by name."""
    everybody: tuple[Provider, ...] = (*our_providers(direction=direction), *PEERS)
    return {provider.name: provider for provider in everybody}


@pytest.fixture(scope="session")
def machine() -> Machine:
    found = Machine.current()
    assert found is not None  # else no test is left that asks for it
    return found


@pytest.fixture
def contender(cell: Cell, backend: str, machine: Machine) -> Contender:
    """Made and checked as for the matrix; a skip says why there is no timing."""
    provider = providers(cell.direction)[backend]
    tensors, truth = tensors_and_truth(cell, machine.device)
    outcome = admit(provider, cell, tensors, machine, truth)
    if isinstance(outcome, tuple):
        pytest.skip("; ".join(map(str, outcome)))
    if isinstance(outcome, Exception):
        raise outcome
    return outcome.contender


def feed(benchmark: Any, contestant: Contestant, clock: CudaClock, budget: Budget) -> Timing:
    """Take the readings inside pytest-benchmark's rounds, whose timer is CLOCK."""
    readings: list[Sample] = []
    with contestant.context():
        launches = warm_up(contestant.call, clock, budget)

        def read() -> None:
            readings.append(clock.device(contestant.call, launches))
            CLOCK.seconds += readings[-1].time_ms / 1e3

        benchmark.pedantic(read, rounds=budget.rounds)
    return Timing.of(readings, launches)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["gpu"] = asdict(environment())
