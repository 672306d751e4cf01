"""What a call costs on the host: warm `multiattn.fmha` of each backend beside SDPA, at a shape of next to no work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import multiattn
from bench.environment import NO_GPU
from bench.errors import InputError
from bench.matrix import Cell
from bench.results import Environment
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
    costs = []
    for name in BACKENDS:
        try:
            make_plan(registry.get(name), problem, detect(device))
        except Unsupported as refusal:
            costs.append(HostCost(contender=name, reasons=refusal.reasons))
            continue
        costs.append(_cost(name, _fmha(name, q, k, v), synchronize))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return [*costs, _cost(SDPA, lambda: sdpa(q, k, v, is_causal=CELL.causal), synchronize)]


def _fmha(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    return lambda: multiattn.fmha(q, k, v, causal=CELL.causal, backend=name)


def _cost(name: str, call: Callable[[], Any], synchronize: Callable[[], None]) -> HostCost:
    try:
        call()  # compiles
        return HostCost(contender=name, call_us=host_ms(call, synchronize=synchronize) * 1e3)
    except Exception as error:  # broad: one backend's failure is its entry, not the end of the table
        return HostCost(contender=name, error=f"{type(error).__name__}: {error}"[:400])


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
    if not path.exists():
        raise InputError(f"{path}: there is no such file")
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or "costs" not in data:
        raise InputError(f"{path}: not a table of schema {SCHEMA} that python -m bench host wrote")
    costs = [HostCost(**cost) for cost in data["costs"]]
    costs = [replace(cost, reasons=tuple(Reason(**reason) for reason in cost.reasons)) for cost in costs]  # type: ignore[arg-type]
    return Environment(**data["environment"]), costs
