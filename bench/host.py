"""What a call costs on the host: warm `multiattn.fmha` of each backend beside SDPA, at a shape of next to no work.

Without grad, with grad (autograd's graph is made and dropped), and with the backward after it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import multiattn
from bench.contenders import Tensors, differentiate, require_grad
from bench.environment import NO_GPU
from bench.matrix import Cell
from bench.results import Environment, read
from bench.timing import Call, host_ms
from multiattn import backend as registry
from multiattn.arch import detect
from multiattn.backend import BACKENDS, make_plan
from multiattn.problem import Problem
from multiattn.support import Reason, Unsupported

CELL = Cell(batch=1, heads=2, seq=64, head_dim=64, dtype="bf16", causal=True, layout="bhsd")
SDPA = "sdpa"
SCHEMA = 2
OLDER = (1,)
"""Schemas that are read as well: 1 had forward calls without grad only."""

FORWARD, WITH_GRAD, TRAINING = "forward", "forward with grad", "forward and backward"
KINDS = (FORWARD, WITH_GRAD, TRAINING)
"""What one call is."""

Key = tuple[str, str]
"""A contender and a kind of call."""

Attention = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """Microseconds of one warm call on the host, launch included and device not waited for; or why there are none."""

    contender: str
    kind: str = FORWARD
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


def host_costs(device: torch.device | None, *, synchronize: Callable[[], None]) -> list[HostCost]:
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
    timed = time_in_turns(calls, synchronize)
    return [refused.get(key) or timed[key] for key in wanted]


def _why_not(name: str, kind: str, problem: Problem, device: torch.device) -> tuple[Reason, ...]:
    backend, arch = registry.get(name), detect(device)
    try:
        make_plan(backend, problem, arch)
        if kind != FORWARD:
            make_plan(backend, problem, arch, direction="backward")
    except Unsupported as refusal:
        return refusal.reasons
    return ()


def _attention(name: str) -> Attention:
    if name == SDPA:
        return functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=CELL.causal)
    return functools.partial(multiattn.fmha, causal=CELL.causal, backend=name)


def call_of(kind: str, attention: Attention, tensors: Tensors) -> Call:
    """A call of that kind."""
    if kind == FORWARD:
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
    data = {
        "schema": SCHEMA,
        "cell": CELL.as_dict(),
        "environment": asdict(environment),
        "command": "python -m bench host",
        "costs": [asdict(cost) for cost in costs],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def load(path: Path) -> tuple[Environment, list[HostCost]]:
    """What `save` wrote; ValueError for another file."""

    def entries(data: dict[str, Any]) -> tuple[Environment, list[HostCost]]:
        costs = [
            HostCost(**{**cost, "reasons": tuple(Reason(**reason) for reason in cost["reasons"])})
            for cost in data["costs"]
        ]
        return Environment(**data["environment"]), costs

    return read(path, f"a table of schema {SCHEMA} that python -m bench host wrote", SCHEMA, entries, older=OLDER)
