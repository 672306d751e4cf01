"""``python -m multiattn.inspect.ncu_child JSON``: launch one Plan for ncu to watch (multiattn.inspect.ncu)."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch, detect
from multiattn.plan.backend import DIRECTIONS, Plan, make_plan
from multiattn.plan.config import Config
from multiattn.plan.support import Unsupported
from multiattn.problem import Operands, Problem

WARM_UPS = 3
"""Launches before the one that counts: the first may compile."""


def main(arguments: Sequence[str]) -> int:
    """Launch what the one argument says, once between start and stop of the profiler; 1 where it cannot be."""
    if len(arguments) != 1:
        print(f"got {len(arguments)} arguments; allowed one, of JSON", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("no GPU to launch on", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        plan = plan_of(json.loads(arguments[0]), detect(device))
    except (Unsupported, ValueError, KeyError, TypeError) as error:
        print(f"nothing to launch: {error}", file=sys.stderr)
        return 1
    launch = launcher(plan, device)
    for _ in range(WARM_UPS):
        launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


def plan_of(request: Mapping[str, Any], arch: Arch, *, probe: bool = True) -> Plan:
    """The Plan that `ncu.request_of` wrote; only ``backend`` and ``shape`` must be there.

    Unsupported where the backend cannot run it; ValueError, KeyError or TypeError for what is no request, or one for
    another arch than `arch`: its kernels may have the same names, and would be taken for those of the Plan.
    """
    batch, heads_q, seq_q, head_dim = request["shape"]
    problem = Problem.contiguous(
        batch=batch,
        heads_q=heads_q,
        heads_kv=request.get("kv_heads"),
        seq_q=seq_q,
        seq_kv=request.get("kv_len"),
        head_dim=head_dim,
        dtype=request.get("dtype", "bf16"),
        causal=request.get("causal", False),
        scale=request.get("scale"),
    )
    check_work(problem)
    if request.get("arch", arch.name) != arch.name:
        raise ValueError(f"arch: got {arch.name}, the GPU's; allowed {request['arch']}, which this was planned for")
    backend, direction = registry.get(request["backend"]), request.get("direction", "forward")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: got {direction!r}; allowed {', '.join(DIRECTIONS)}")
    variant = request.get("variant")
    plan = make_plan(backend, problem, arch, direction=direction, variant=variant, probe=probe)
    if "config" not in request:
        return plan
    if plan.config is None:
        raise ValueError(f"config: got {request['config']}; allowed none for {plan.backend} {plan.variant}")
    config = override(plan.config, request["config"])
    return make_plan(backend, problem, arch, direction=direction, variant=plan.variant, config=config, probe=probe)


def check_work(problem: Problem) -> None:
    """ValueError for a problem that nothing is launched for."""
    if problem.is_empty or problem.seq_kv == 0:
        raise ValueError(f"shape: got {problem}; allowed one that needs a kernel")


def override(config: Config, fields: Mapping[str, Any]) -> Config:
    """A config with some fields replaced, those of a config within it too; TypeError for a field it does not have."""
    values = dict(fields)
    for name, value in fields.items():
        if isinstance(value, Mapping):
            inner = getattr(config, name, None)
            if not isinstance(inner, Config):
                raise TypeError(f"config: got fields for {name}; allowed a value, as it is {inner!r}")
            values[name] = override(inner, value)
    return dataclasses.replace(config, **values)


def launcher(plan: Plan, device: torch.device) -> Callable[[], None]:
    """A launch of `plan` on random tensors of its problem."""
    problem, backend = plan.problem, registry.get(plan.backend)
    kv_shape = (problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim)
    q = torch.randn(
        (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim), dtype=problem.torch_dtype, device=device
    )
    k, v = (torch.randn(kv_shape, dtype=q.dtype, device=device) for _ in range(2))
    out = q.new_empty_strided(q.shape, (*problem.strides_out, 1))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if plan.direction == "forward":
        forward = backend.forward.prepare(plan)
        return lambda: forward(Operands(q, k, v, out, lse))
    before = make_plan(backend, problem, plan.arch, probe=False)  # backward needs its results
    backend.forward.prepare(before)(Operands(q, k, v, out, lse))
    dout = out.new_empty_strided(out.shape, out.stride()).normal_()
    dq = q.new_empty_strided(q.shape, (*problem.strides_dq, 1))
    dk = k.new_empty_strided(k.shape, (*problem.strides_dk, 1))
    dv = v.new_empty_strided(v.shape, (*problem.strides_dv, 1))
    backward = backend.backward.prepare(plan)
    return lambda: backward(Operands(q, k, v, out, lse, dout, None, dq, dk, dv))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
