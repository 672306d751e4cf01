"""The host's cost of a call, step by step, as benchmarks that need no GPU: ``pytest --benchmark-only``.

With a GPU, ``python -m bench host`` times whole calls beside SDPA's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

import multiattn
from bench.host import CELL
from multiattn.cuda import launch as cuda_launch
from multiattn.operands import Operands
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, Plan, make_plan
from multiattn.plan.support import Unsupported
from multiattn.problem import Problem
from multiattn.run import compat, counters, driver

FOUND = "call: warm, on meta tensors, so all but the launch"
MADE = "plan: made, as in the first call of its kind"
PREPARED = "launch: a CUDA kernel's, prepared for a driver that does nothing"
ARCH = "sm90"


class SilentDriver:
    """NVIDIA's driver, where every function succeeds and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


@contextlib.contextmanager
def no_device() -> Iterator[None]:
    """Let a launch be prepared without a GPU."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (driver, "load_driver", SilentDriver),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (compat, "current_stream", lambda device: 0),
            (counters, "counters_of", functools.cache(lambda device: counters.Counters())),
            (cuda_launch, "_load", lambda *_: 1),
            (cuda_launch, "_multiprocessors", lambda device: 132),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def plan_of(backend: str, direction: Direction, arch: str) -> Plan:
    problem = Problem.of(*CELL.tensors(torch.device("cpu")), causal=True)
    return make_plan(registry.get(backend), problem, by_name(arch), direction=direction, probe=False)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["fmha", "fmha with grad"])
def test_call(needs_grad: bool, benchmark: Any) -> None:
    benchmark.group, benchmark.name = FOUND, "fmha with grad" if needs_grad else "fmha"
    q, k, v = (it.to("meta").requires_grad_(needs_grad) for it in CELL.tensors(torch.device("cpu")))
    benchmark(lambda: multiattn.fmha(q, k, v, causal=True))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_plan(backend: str, direction: Direction, benchmark: Any) -> None:
    benchmark.group, benchmark.name = MADE, f"{backend} {direction} {ARCH}"
    try:
        plan_of(backend, direction, ARCH)
    except Unsupported as refusal:
        pytest.skip(str(refusal))
    benchmark(lambda: plan_of(backend, direction, ARCH))


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
@pytest.mark.parametrize("moves", [False, True], ids=["same tensors", "other tensors"])
def test_launch(arch: str, moves: bool, benchmark: Any) -> None:
    benchmark.group, benchmark.name = PREPARED, f"forward {arch}, {'other' if moves else 'the same'} tensors"
    plan = plan_of("cuda", "forward", arch)
    tensors = [CELL.tensors(torch.device("cpu")) for _ in range(1 + moves)]
    each = itertools.cycle([Operands(q, k, v, torch.empty_like(q), torch.empty(q.shape[:3])) for q, k, v in tensors])
    with no_device():
        launch = registry.get("cuda").forward.prepare(plan)
        benchmark(lambda: launch(next(each)))
