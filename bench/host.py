"""The cost of a call on the host: warm `multiattn.fmha` of each backend beside SDPA, at a shape of next to no work.

Without grad, with grad (autograd's graph is made and dropped), and with the backward after it. Beside these, what is
left of a forward without the host: the device's time of one call in a CUDA graph that is replayed.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tabulate import tabulate

import multiattn
from bench.contenders import differentiate, require_grad
from bench.matrix import Cell, Tensors
from bench.results import Environment, dump, read
from multiattn.plan import backend as registry
from multiattn.plan.arch import detect
from multiattn.plan.backend import BACKENDS, make_plan
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Problem
from multiattn.tune.timing import Budget, Call, Contestant, CudaClock, Timing, measure

CELL = Cell(batch=1, heads=8, seq=128, head_dim=64, dtype="bf16", causal=True, layout="bhsd")
SDPA = "sdpa"
SCHEMA = 3

FORWARD, WITH_GRAD, TRAINING = "forward", "forward with grad", "forward and backward"
GRAPH = "graph replay"
"""A forward call in a CUDA graph of many; its time is the device's."""
KINDS = (FORWARD, WITH_GRAD, TRAINING, GRAPH)
GRAPH_BUDGET = Budget(sample_ms=0.5, warmup_ms=2.0)
"""50 calls to a graph and more, where each takes a device 10 us."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """Microseconds of one warm call on the host, launch included, without waiting for the device; or why none."""

    contender: str
    kind: str
    variant: str = ""
    """The forward's; empty for SDPA."""
    call_us: float | None = None
    reasons: tuple[Reason, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTable:
    """The costs of one run, and where they were measured."""

    cell: Cell
    environment: Environment
    costs: tuple[HostCost, ...]

    @property
    def rows(self) -> dict[str, list[str]]:
        """Microseconds of each contender's calls, a text for each kind, or why there are none."""
        rows: dict[str, list[str]] = {}
        for it in self.costs:
            text = f"{it.call_us:.1f}" if it.call_us is not None else "; ".join(map(str, it.reasons)) or it.error
            rows.setdefault(it.contender, []).append(text)
        return rows

    def table(self, form: str = "simple") -> str:
        """A row per contender, a column per kind of call, in microseconds."""
        headers = ("contender", *(f"{kind} [us]" for kind in KINDS))
        rows = [(name, *texts) for name, texts in self.rows.items()]
        return tabulate(rows, headers=headers, tablefmt=form, disable_numparse=True)

    def save(self, path: Path) -> None:
        """Write them as JSON, a cost a line."""
        told = {"cell": self.cell.as_dict(), "environment": asdict(self.environment), "command": "python -m bench host"}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump({"schema": SCHEMA, **told, "costs": list(map(asdict, self.costs))}))


def load(path: Path) -> HostTable:
    """The costs that `HostTable.save` wrote; InputError for another file."""

    def parse(data: dict[str, Any]) -> HostTable:
        costs = (HostCost(**{**it, "reasons": tuple(Reason(**why) for why in it["reasons"])}) for it in data["costs"])
        setup = Environment(**data["environment"])
        return HostTable(cell=Cell(**data["cell"]), environment=setup, costs=tuple(costs))

    return read(path, SCHEMA, parse)


def host_costs(device: torch.device, clock: CudaClock, synchronize: Callable[[], None]) -> tuple[HostCost, ...]:
    """One entry per kind of call of each backend and of SDPA."""
    tensors = CELL.tensors(device)
    problem = Problem.of(*tensors, causal=True)
    planned = {(name, kind): _variant(name, kind, problem, device) for name in (*BACKENDS, SDPA) for kind in KINDS}
    calls = {key: call_of(*key, tensors) for key, it in planned.items() if isinstance(it, str)}
    outcomes = timed(calls, clock, synchronize)
    return tuple(_cost(*key, its, outcomes.get(key)) for key, its in planned.items())


def _variant(name: str, kind: str, problem: Problem, device: torch.device) -> str | tuple[Reason, ...]:
    """The forward's variant, or why a direction of the call cannot run."""
    if name == SDPA:
        return ""
    backend, arch = registry.get(name), detect(device)
    try:
        if kind in (WITH_GRAD, TRAINING):
            make_plan(backend, problem, arch, direction="backward")
        return make_plan(backend, problem, arch).variant
    except Unsupported as refusal:
        return refusal.reasons


def _cost(name: str, kind: str, planned: str | tuple[Reason, ...], outcome: float | Exception | None) -> HostCost:
    if isinstance(planned, tuple):
        return HostCost(contender=name, kind=kind, reasons=planned)
    error = f"{type(outcome).__name__}: {outcome}"[:400] if isinstance(outcome, Exception) else ""
    us = outcome * 1e3 if isinstance(outcome, float) else None
    return HostCost(contender=name, kind=kind, variant=planned, call_us=us, error=error)


def call_of(name: str, kind: str, tensors: Tensors) -> Call:
    """A call of that kind."""
    attention: Callable[..., torch.Tensor] = functools.partial(multiattn.fmha, causal=CELL.causal, backend=name)
    if name == SDPA:
        attention = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=CELL.causal)
    if kind in (FORWARD, GRAPH):
        return functools.partial(attention, *tensors)
    leaves = require_grad(tensors)
    forward = functools.partial(attention, *leaves)
    dout = CELL.dout(tensors[0].device)
    return forward if kind == WITH_GRAD else differentiate(forward, leaves, dout, keeps_graph=False)


def timed(
    calls: Mapping[tuple[str, str], Call], clock: CudaClock, synchronize: Callable[[], None]
) -> dict[tuple[str, str], float | Exception]:
    """Milliseconds of each call, or what it raised: of `GRAPH` the device's in a graph, of others the host's."""
    in_graph = {name: Contestant(call=call) for (name, kind), call in calls.items() if kind == GRAPH}
    others = {key: call for key, call in calls.items() if key[1] != GRAPH}
    host_ms(others, each=1, rounds=1, synchronize=synchronize)  # compiles; what fails here fails again
    found = host_ms(others, synchronize=synchronize)
    graphs = measure(in_graph, clock, regime="graph", budget=GRAPH_BUDGET)
    return found | {(name, GRAPH): it.time_ms if isinstance(it, Timing) else it for name, it in graphs.items()}


Key = TypeVar("Key", bound=Hashable)


def host_ms(
    calls: Mapping[Key, Call], *, each: int = 200, rounds: int = 7, synchronize: Callable[[], None]
) -> dict[Key, float | Exception]:
    """Host milliseconds of one call of each, its launch included, without waiting for the device.

    They take turns: a round times `each` calls of everybody; the median of the rounds' medians counts. For shapes so
    small that the queue never fills. The device is idle at the start of each turn. What a call raises is its result.
    """
    medians: dict[Key, list[float]] = {name: [] for name in calls}
    failed: dict[Key, float | Exception] = {}
    for _ in range(rounds):
        for name in [name for name in calls if name not in failed]:
            synchronize()
            try:
                medians[name].append(_host_turn(calls[name], each))
            except Exception as error:  # broad: a call is anybody's code; its error is its result
                failed[name] = error
    synchronize()
    return {name: statistics.median(taken) * 1e3 for name, taken in medians.items() if name not in failed} | failed


def _host_turn(call: Call, each: int) -> float:
    stamps = [time.perf_counter()]
    for _ in range(each):
        call()
        stamps.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(stamps))
