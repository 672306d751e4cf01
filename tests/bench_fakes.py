"""Stand-ins for a device, for tests of bench: nothing here is slow, random, or on a GPU."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.contenders import Ours
from bench.matrix import Cell, Tensors
from bench.peers import Peer
from bench.results import Environment, Measured, Row, Store
from bench.run import Job, Machine, run
from multiattn.plan.arch import ARCHS
from multiattn.tune.timing import Budget, Call, Sample

CELL = Cell(batch=1, heads=2, seq=48, head_dim=16, dtype="bf16", causal=True, layout="bshd")
BUDGET = Budget(rounds=3, sample_ms=1.0, warmup_ms=1.0)
SETUP = Environment(
    gpu="NVIDIA H200", arch="sm90", peak_tflops=989.4, driver="580.0", commit="c0ffee", source="abc",
    versions={"torch": "2.11"}, date="2026-11-21",
)  # fmt: skip


class FakeClock:
    """Runs each call once and says what the test scripted for it, by name."""

    def __init__(self, times: dict[str, float] | None = None) -> None:
        self.times = times or {}
        self.log: list[tuple[str, str, int]] = []

    def device(self, call: Call, launches: int) -> Sample:
        """As `multiattn.tune.timing.CudaClock`."""
        return self._sample("device", call, launches)

    def single(self, call: Call) -> Sample:
        """As `multiattn.tune.timing.CudaClock`."""
        return self._sample("single", call, 1)

    def captured(self, call: Call, launches: int) -> Call:
        """As `multiattn.tune.timing.CudaClock`; named like what it replays."""

        def replay() -> None:
            for _ in range(launches):
                call()

        replay.__name__ = f"{launches} x {getattr(call, '__name__', 'partial')}"
        return replay

    def _sample(self, regime: str, call: Call, launches: int) -> Sample:
        call()
        name = getattr(call, "__name__", "partial")
        self.log.append((regime, name, launches))
        return Sample(time_ms=self.times.get(name, 0.5))


def machine(clock: FakeClock | None = None, synchronize: Callable[[], None] = lambda: None) -> Machine:
    """The CPU, under a fake clock."""
    return Machine(arch=ARCHS["cpu"], device=torch.device("cpu"), clock=clock or FakeClock(), synchronize=synchronize)


def peer(name: str, function: Callable[..., torch.Tensor] | None = None) -> Peer:
    """A peer whose function takes (q, k, v, causal); None is SDPA's own."""

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def build(cell: Cell, tensors: Tensors) -> tuple[Call, str]:
        return functools.partial(function or sdpa, *tensors, cell.causal), "a fake"

    return Peer(name=name, module="torch", install="", build=build)


def job(*providers: Ours | Peer, cells: tuple[Cell, ...] = (CELL,), fresh: bool = False) -> Job:
    """A job of one cell, in the device regime."""
    command = "python -m bench run --suite smoke"
    return Job(suite="smoke", cells=cells, providers=providers, budget=BUDGET, fresh=fresh, command=command)


def store(folder: Path) -> Store:
    """The store that `run` writes in `folder`."""
    return Store(folder / "smoke.json", "smoke")


def run_once(
    folder: Path, *providers: Ours | Peer, regime: str = "device", on: Machine | None = None, **more: Any
) -> list[Row]:
    """The rows of `job`, run in `folder`."""
    return run(replace(job(*providers, **more), regime=regime), on or machine(), store(folder), quiet=True)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """A module of nothing but `members` takes the place of another."""
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def row(
    contender: str,
    time_ms: float,
    *,
    cell: Cell = CELL,
    spread: float = 0.0,
    setup: Environment = SETUP,
    run: str = "2026-11-21T05:00:00+00:00-0a",
) -> Row:
    """A measured row; `spread` is its interquartile range over the median."""
    measured = Measured(
        time_ms=time_ms, low_ms=time_ms * (1 - spread / 2), high_ms=time_ms * (1 + spread / 2), rounds=9, sample_ms=8.0,
        launches=4, host_bound=False, tflops=100 / time_ms, peak_share=None, error_ratio=0.5,
    )  # fmt: skip
    told = {"regime": "device", "environment": setup, "command": "python -m bench run", "run": run}
    return Row(cell=cell, contender=contender, measured=measured, **told)
