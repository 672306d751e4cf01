"""What a call costs on the host: warm `multiattn.fmha` of each backend beside SDPA, at a shape of next to no work."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import multiattn
from bench.environment import NO_GPU
from bench.matrix import Cell
from bench.results import Environment, read
from bench.timing import host_ms
from multiattn import backend as registry
from multiattn.arch import detect
from multiattn.backend import BACKENDS, make_plan
from multiattn.problem import Problem
from multiattn.support import Reason, Unsupported

CELL = Cell(batch=1, heads=2, seq=64, head_dim=64, dtype="bf16", causal=True, layout="bhsd")
SDPA = "sdpa"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """Microseconds of one warm call on the host, launch included and device not waited for; or why there are none."""

    contender: str
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
    """One entry per backend and one of SDPA; `device` None is a machine without a GPU."""
    if device is None:
        return [HostCost(contender=name, reasons=(NO_GPU,)) for name in (*BACKENDS, SDPA)]
    q, k, v = CELL.tensors(device)
    problem = Problem.of(q, k, v, causal=CELL.causal)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Callable[[], Any]] = {}
    refused: dict[str, HostCost] = {}
    for name in BACKENDS:
        reasons = _why_not(name, problem, device)
        if reasons:
            refused[name] = HostCost(contender=name, reasons=reasons)
        else:
            calls[name] = _fmha(name, q, k, v)
    calls[SDPA] = lambda: sdpa(q, k, v, is_causal=CELL.causal)
    timed = time_in_turns(calls, synchronize)
    return [refused.get(name) or timed[name] for name in (*BACKENDS, SDPA)]


def _why_not(name: str, problem: Problem, device: torch.device) -> tuple[Reason, ...]:
    try:
        make_plan(registry.get(name), problem, detect(device))
    except Unsupported as refusal:
        return refusal.reasons
    return ()


def _fmha(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    return lambda: multiattn.fmha(q, k, v, causal=CELL.causal, backend=name)


def time_in_turns(calls: Mapping[str, Callable[[], Any]], synchronize: Callable[[], None]) -> dict[str, HostCost]:
    """The cost of each; one that raises is an entry with its error."""
    host_ms(calls, each=1, rounds=1, synchronize=synchronize)  # compiles; what fails here fails again
    found = host_ms(calls, synchronize=synchronize)
    return {name: _cost(name, outcome) for name, outcome in found.items()}


def _cost(name: str, outcome: float | Exception) -> HostCost:
    if isinstance(outcome, Exception):
        return HostCost(contender=name, error=f"{type(outcome).__name__}: {outcome}"[:400])
    return HostCost(contender=name, call_us=outcome * 1e3)


def table(costs: list[HostCost], *, form: str = "simple") -> str:
    """A row per contender."""
    rows = [(cost.contender, cost.text) for cost in costs]
    return tabulate(rows, headers=("contender", "one call on the host [us]"), tablefmt=form, disable_numparse=True)


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

    return read(path, f"a table of schema {SCHEMA} that python -m bench host wrote", SCHEMA, entries)
