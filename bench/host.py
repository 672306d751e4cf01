"""What a call costs on the host: warm `multiattn.fmha` of each backend beside SDPA, at a shape of next to no work.

Without grad, with grad (autograd's graph is made and dropped), and with the backward after it. Beside these, what is
left of a forward without the host: the device's time of one call in a CUDA graph that is replayed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import multiattn
from bench.contenders import Tensors, differentiate, require_grad
from bench.environment import NO_GPU
from bench.matrix import Cell
from bench.results import Environment, read
from bench.timing import Budget, Call, Clock, Contestant, CudaClock, Timing, host_ms, measure
from multiattn.plan import backend as registry
from multiattn.plan.arch import detect
from multiattn.plan.backend import BACKENDS, make_plan
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Problem

CELL = Cell(batch=1, heads=8, seq=128, head_dim=64, dtype="bf16", causal=True, layout="bhsd")
SDPA = "sdpa"
SCHEMA = 3
OLDER = (1, 2)
"""Schemas that are read as well: 1 had forward calls without grad only, 2 no graphs; both were of B1 H2 N64 D64."""

FORWARD, WITH_GRAD, TRAINING = "forward", "forward with grad", "forward and backward"
GRAPH = "graph replay"
"""A forward call in a CUDA graph of many."""
KINDS = (FORWARD, WITH_GRAD, TRAINING, GRAPH)
"""What one call is."""
GRAPH_BUDGET = Budget(sample_ms=0.5, warmup_ms=2.0)
"""50 calls to a graph and more, where each takes a device 10 us."""

Key = tuple[str, str]
"""A contender and a kind of call."""

Attention = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """Microseconds of one warm call on the host, launch included and device not waited for; or why there are none.

    Those of `GRAPH` are the device's.
    """

    contender: str
    kind: str = FORWARD
    variant: str = ""
    """Of the forward that was called; empty for SDPA, and where a file is too old to say."""
    call_us: float | None = None
    reasons: tuple[Reason, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        if (self.call_us is not None) + bool(self.reasons) + bool(self.error) != 1:
            raise ValueError(f"a host cost is microseconds, or carries reasons, or carries an error; got {self}")

    @property
    def text(self) -> str:
        """Microseconds, or why there are none."""
        if self.call_us is not None:
            return f"{self.call_us:.1f}"
        return "; ".join(map(str, self.reasons)) or self.error


def host_costs(
    device: torch.device | None, *, synchronize: Callable[[], None], clock: Clock | None = None
) -> list[HostCost]:
    """One entry per kind of call of each backend and of SDPA; `device` None is a machine without a GPU."""
    wanted = [(name, kind) for name in (*BACKENDS, SDPA) for kind in KINDS]
    if device is None:
        return [HostCost(contender=name, kind=kind, reasons=(NO_GPU,)) for name, kind in wanted]
    tensors = CELL.tensors(device)
    problem = Problem.of(*tensors, causal=CELL.causal)
    calls: dict[Key, Call] = {}
    refused: dict[Key, HostCost] = {}
    for name, kind in wanted:
        reasons = () if name == SDPA else _why_not(name, kind, problem, device)
        if reasons:
            refused[name, kind] = HostCost(contender=name, kind=kind, reasons=reasons)
        else:
            calls[name, kind] = call_of(kind, _attention(name), tensors)
    in_graphs = {key: call for key, call in calls.items() if key[1] == GRAPH}
    timed = time_in_turns({key: call for key, call in calls.items() if key not in in_graphs}, synchronize)
    timed |= time_in_graphs(in_graphs, clock or CudaClock())
    variants = {name: _variant(name, problem, device) for name, _ in calls}
    return [refused.get(key) or replace(timed[key], variant=variants[key[0]]) for key in wanted]


def _why_not(name: str, kind: str, problem: Problem, device: torch.device) -> tuple[Reason, ...]:
    backend, arch = registry.get(name), detect(device)
    try:
        make_plan(backend, problem, arch)
        if kind in (WITH_GRAD, TRAINING):
            make_plan(backend, problem, arch, direction="backward")
    except Unsupported as refusal:
        return refusal.reasons
    return ()


def _variant(name: str, problem: Problem, device: torch.device) -> str:
    return "" if name == SDPA else make_plan(registry.get(name), problem, detect(device)).variant


def _attention(name: str) -> Attention:
    if name == SDPA:
        return functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=CELL.causal)
    return functools.partial(multiattn.fmha, causal=CELL.causal, backend=name)


def call_of(kind: str, attention: Attention, tensors: Tensors) -> Call:
    """A call of that kind."""
    if kind in (FORWARD, GRAPH):
        return functools.partial(attention, *tensors)
    leaves = require_grad(tensors)
    if kind == WITH_GRAD:
        return functools.partial(attention, *leaves)
    dout = CELL.dout(tensors[0].device)
    return differentiate(functools.partial(attention, *leaves), leaves, dout, keeps_graph=False)


def time_in_turns(calls: Mapping[Key, Call], synchronize: Callable[[], None]) -> dict[Key, HostCost]:
    """The cost of each; one that raises is an entry with its error."""
    host_ms(calls, each=1, rounds=1, synchronize=synchronize)  # compiles; what fails here fails again
    found = host_ms(calls, synchronize=synchronize)
    return {key: _cost(*key, outcome) for key, outcome in found.items()}


def time_in_graphs(calls: Mapping[Key, Call], clock: Clock) -> dict[Key, HostCost]:
    """The device's time of each in a graph of many; one that raises is an entry with its error."""
    contestants = {name: Contestant(call=call) for (name, _), call in calls.items()}
    found = measure(contestants, clock, regime="graph", budget=GRAPH_BUDGET)
    outcomes = {name: it.time_ms if isinstance(it, Timing) else it for name, it in found.items()}
    return {key: _cost(*key, outcomes[key[0]]) for key in calls}


def _cost(name: str, kind: str, outcome: float | Exception) -> HostCost:
    if isinstance(outcome, Exception):
        return HostCost(contender=name, kind=kind, error=f"{type(outcome).__name__}: {outcome}"[:400])
    return HostCost(contender=name, kind=kind, call_us=outcome * 1e3)


def table(costs: list[HostCost], *, form: str = "simple") -> str:
    """A row per contender, a column per kind of call, in microseconds."""
    found = {(cost.contender, cost.kind): cost.text for cost in costs}
    kinds = [kind for kind in KINDS if any(cost.kind == kind for cost in costs)]
    names = dict.fromkeys(cost.contender for cost in costs)
    rows = [(name, *(found.get((name, kind), "not in this run") for kind in kinds)) for name in names]
    headers = ("contender", *(f"{kind} [us]" for kind in kinds))
    return tabulate(rows, headers=headers, tablefmt=form, disable_numparse=True)


def save(costs: list[HostCost], environment: Environment, path: Path) -> None:
    """Write them as JSON, with what they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {
        "schema": str(SCHEMA),
        "cell": json.dumps(CELL.as_dict()),
        "environment": json.dumps(asdict(environment)),
        "command": '"python -m bench host"',
        "costs": "[\n  " + ",\n  ".join(json.dumps(asdict(cost)) for cost in costs) + "\n ]",
    }
    path.write_text("{\n" + ",\n".join(f' "{name}": {text}' for name, text in parts.items()) + "\n}\n")


def measured_cell(path: Path) -> Cell:
    """The cell of what `save` wrote, which an older release may have chosen otherwise."""
    wanted = f"a table of schema {SCHEMA} that python -m bench host wrote"
    return read(path, wanted, SCHEMA, lambda data: Cell(**data["cell"]), older=OLDER)


def load(path: Path) -> tuple[Environment, list[HostCost]]:
    """What `save` wrote; ValueError for another file."""

    def entries(data: dict[str, Any]) -> tuple[Environment, list[HostCost]]:
        costs = [
            HostCost(**{**cost, "reasons": tuple(Reason(**reason) for reason in cost["reasons"])})
            for cost in data["costs"]
        ]
        return Environment(**data["environment"]), costs

    return read(path, f"a table of schema {SCHEMA} that python -m bench host wrote", SCHEMA, entries, older=OLDER)
