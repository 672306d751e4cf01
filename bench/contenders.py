"""Contenders made of Plans, ready to be checked and timed: a forward, a backward, or one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

import multiattn
from bench.matrix import Cell
from bench.timing import Contestant
from multiattn.plan import backend as registry
from multiattn.plan.backend import Plan, make_plan
from multiattn.plan.config import Config
from multiattn.plan.support import Reason, Unsupported
from multiattn.problem import Operands, Strides

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v, each ``[B, H, S, D]``; or their gradients."""

Results = Mapping[str, torch.Tensor]
"""What a contender computed, by name: of out, lse, dq, dk and dv those that its direction has."""

GRADS = ("dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Ready to be checked and timed in one cell."""

    launch: Contestant
    """For the regimes device and graph: nothing but the launches."""
    call: Contestant
    """For the call regime: what a user writes. Returns out, or the gradients of q, k and v."""
    output: Callable[[], Results]
    """Runs `launch` once; what it wrote, where it can be had."""
    plan: Plan | None = None
    """Of the timed launch; with a backward in it, the backward's."""
    detail: str = ""


def named(returned: Any) -> Results:
    """What `Contender.call` returned, by name."""
    return {"out": returned} if isinstance(returned, torch.Tensor) else dict(zip(GRADS, returned, strict=True))


def require_grad(tensors: Tensors) -> Tensors:
    """Leaves of a graph with the memory of `tensors`."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in tensors)
    return q, k, v


def alike(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` in the memory layout of `tensor`, as a gradient comes to a layer that is followed by a view."""
    return torch.empty_like(tensor).copy_(values)


def contender_of(plan: Plan, tensors: Tensors, cell: Cell, forward: Plan | None = None) -> Contender:
    """A contender that launches exactly `plan`, in the direction of `cell`.

    Outputs are made once, and poisoned with NaN before a check. A backward needs the Plan of the `forward` whose out
    and lse it is fed.
    """
    if cell.direction == "fwd":
        return _forward(plan, tensors)
    assert forward is not None
    return _backward(plan, forward, tensors, cell)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Forward:
    """A forward's Plan with its tensors: `launch` writes out and lse."""

    launch: Callable[[], None]
    results: Results

    @classmethod
    def of(cls, plan: Plan, tensors: Tensors) -> _Forward:
        q, k, v = tensors
        launcher = registry.get(plan.backend).forward.prepare(plan)
        out = _empty(q, plan.problem.strides_out)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        return cls(launch=lambda: launcher(Operands(q, k, v, out, lse)), results={"out": out, "lse": lse})


def _empty(like: torch.Tensor, strides: Strides) -> torch.Tensor:
    return torch.empty_strided(like.shape, (*strides, 1), dtype=like.dtype, device=like.device)


def _poison(results: Results) -> None:
    for tensor in results.values():
        tensor.fill_(math.nan)


def _forward(plan: Plan, tensors: Tensors) -> Contender:
    ready = _Forward.of(plan, tensors)
    q, k, v = tensors

    def launch() -> None:
        ready.launch()

    def call() -> torch.Tensor:
        return multiattn.fmha(q, k, v, causal=plan.problem.causal, backend=plan.backend, variant=plan.variant)

    def output() -> Results:
        _poison(ready.results)
        launch()
        return ready.results

    return Contender(launch=Contestant(call=launch), call=Contestant(call=call), output=output, plan=plan)


def _backward(plan: Plan, forward: Plan, tensors: Tensors, cell: Cell) -> Contender:
    """The launcher of a backward, fed by a forward that runs once, or before each launch where both are timed."""
    q, k, v = tensors
    problem = plan.problem
    ready = _Forward.of(forward, tensors)
    launcher = registry.get(plan.backend).backward.prepare(plan)
    out, lse = ready.results["out"], ready.results["lse"]
    dout = alike(out, cell.dout(q.device))
    grads = {
        "dq": _empty(q, problem.strides_dq),
        "dk": _empty(k, problem.strides_dk),
        "dv": _empty(v, problem.strides_dv),
    }
    dq, dk, dv = grads.values()

    def backward() -> None:
        launcher(Operands(q, k, v, out, lse, dout, None, dq, dk, dv))

    def both() -> None:
        ready.launch()
        backward()

    launch = both if cell.direction == "fwdbwd" else backward
    written = {**ready.results, **grads} if cell.direction == "fwdbwd" else grads
    ready.launch()

    def output() -> Results:
        _poison(written)
        launch()
        return written

    return Contender(
        launch=Contestant(call=launch),
        call=Contestant(call=_call_with_grad(plan, tensors, dout, cell)),
        output=output,
        plan=plan,
        detail=f"forward: {forward.variant} {forward.config or ''}".strip(),
    )


def _call_with_grad(plan: Plan, tensors: Tensors, dout: torch.Tensor, cell: Cell) -> Callable[[], Tensors]:
    """What a user writes: `multiattn.fmha`, and autograd's gradient of it. Its forward runs at the first call."""
    leaves = require_grad(tensors)
    backend, deterministic = registry.get(plan.backend), registry.variant_of(plan).deterministic

    def forward() -> torch.Tensor:
        chosen = make_plan(backend, plan.problem, plan.arch, direction="backward", deterministic=deterministic)
        if chosen.variant != plan.variant:
            what = Reason(
                code="variant", got=plan.variant, allowed=f"{chosen.variant}: fmha cannot be asked for others"
            )
            raise Unsupported(
                backend=plan.backend, arch=plan.arch, problem=plan.problem, reasons=(what,), direction="backward"
            )
        return multiattn.fmha(*leaves, causal=plan.problem.causal, backend=plan.backend, deterministic=deterministic)

    return differentiate(forward, leaves, dout, keeps_graph=cell.direction == "bwd")


def differentiate(
    forward: Callable[[], torch.Tensor], leaves: Tensors, dout: torch.Tensor, *, keeps_graph: bool
) -> Callable[[], Tensors]:
    """A call that returns the gradients of `leaves`, given that of what `forward` returns.

    With `keeps_graph` the forward runs once, at the first call, and its graph is walked again and again: autograd's
    share of the host is in it, the forward is not. Else each call runs the forward too.
    """
    graph: list[torch.Tensor] = []

    def again() -> Tensors:
        if not graph:
            graph.append(forward())
        dq, dk, dv = torch.autograd.grad(graph[0], leaves, dout, retain_graph=True)
        return dq, dk, dv

    def anew() -> Tensors:
        dq, dk, dv = torch.autograd.grad(forward(), leaves, dout)
        return dq, dk, dv

    return again if keeps_graph else anew


def plan_data(plan: Plan) -> dict[str, Any]:
    """What a row stores of a Plan; problem, arch and backend are in the row already."""
    data = {"variant": plan.variant, "config": config_data(plan.config), "why": plan.why}
    if plan.direction == "forward":
        return data
    deterministic = registry.variant_of(plan).deterministic
    return {**data, "deterministic": deterministic, "workspace_bytes": plan.workspace_bytes}


def config_data(config: Config | None) -> dict[str, Any] | None:
    """A config's fields by name."""
    return None if config is None else asdict(config)
