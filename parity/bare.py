"""``python -m parity.bare``: kernels launched with no reference beside them, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \\
        python -m parity.bare --backend cuda
    compute-sanitizer --tool racecheck python -m parity.bare --backend cuda --rules

Without PyTorch's cache every tensor ends where its allocation does. The reference stays out because racecheck makes
torch's own matmul crash. With ``--rules`` it launches every rule of the device's arch once, on small tensors, and names
each before it runs; ``--part 2/4`` takes the second quarter of them. A first run
without the sanitizer fills the compilers' caches.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import multiattn
from multiattn.layout import shape_of_out
from multiattn.plan import backend as registry
from multiattn.plan.arch import detect
from multiattn.plan.backend import (
    BACKENDS,
    DIRECTIONS,
    Backend,
    BackendName,
    Direction,
    Plan,
    Variant,
    find_variant,
    plan_variant,
)
from multiattn.plan.config import Rule, has_whole_sectors
from multiattn.problem import Problem
from multiattn.run.execute import launch, launch_backward
from parity.case import Case, Memory
from parity.memory import synchronize

WATCHED = (
    Case(name="ragged", why="ragged tiles of queries and keys; padded head_dim", head_dim=72, causal=True),
    Case(name="gqa", why="heads that share keys; rows that see no key", heads_q=4, seq_q=203, seq_kv=113, causal=True),
    Case(name="wide", why="the tiles of D=128, whole and ragged", seq_q=256, seq_kv=300, head_dim=128, dtype="fp16"),
    Case(name="sliced", why="head_dim in slices, the last one not whole", head_dim=328, causal=True),
    Case(name="unaligned", why="element loads", head_dim=40, layout=Memory(row_pad=1)),
)


def launch_all(backend: BackendName, device: torch.device) -> list[str]:
    """Launch the variants of both directions that span a backend on every watched case; a line for each that ran."""
    lines = []
    registered = registry.get(backend)
    for case in WATCHED:
        q, k, v = (_draw(case, queries=queries, device=device) for queries in (True, False, False))
        problem = Problem.of(q, k, v, causal=case.causal)
        op = registered.forward
        for name in op.spanning or [variant.name for variant in op.variants]:
            plan = plan_variant(registered, find_variant(registered, name), problem, detect(device))
            if isinstance(plan, Plan):
                multiattn.fmha(q, k, v, causal=case.causal, backend=backend, variant=name)
                lines.append(f"{case} {plan}")
        if not case.no_backward:
            lines += _launch_backwards(case, backend, q, k, v)
    return lines


def _launch_backwards(case: Case, backend: BackendName, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[str]:
    lines = []
    registered, problem = registry.get(backend), Problem.of(q, k, v, causal=case.causal)
    out, lse = multiattn.fmha(q, k, v, causal=case.causal, backend=backend, return_lse=True)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    for variant in registered.backward.variants:
        plan = plan_variant(registered, variant, problem, detect(q.device), direction="backward")
        if isinstance(plan, Plan):
            options = {"causal": case.causal, "backend": backend, "variant": variant.name}
            multiattn.fmha_backward(q, k, v, out, lse, dout, dlse=dlse, **options)  # type: ignore[arg-type]
            lines.append(f"{case} {plan}")
    return lines


# ---------------------------------------------------------------- every rule

LENGTH, HEADS_Q, HEADS_KV = 200, 4, 2
"""Sizes of the tensors that rules are launched on: ragged tiles, heads that share keys."""


def rule_plans(backend: str, device: torch.device) -> list[Plan]:
    """A Plan for each rule of the device's arch, of the variants that a caller may get and those that span the rest."""
    registered = registry.get(backend)
    found: dict[tuple[object, ...], Plan] = {}
    for direction in DIRECTIONS:
        op = registered.op(direction)
        for variant in op.variants:
            if variant.only_named and op.spanning and variant.name not in op.spanning:
                continue
            for rule in variant.rules:
                for causal in (False, True) if rule.banded is None else (rule.banded,):
                    plan = _plan_rule(registered, variant, rule, direction, device, causal=causal)
                    if plan is not None:
                        found[direction, variant.name, plan.problem.widths, causal, str(plan.config)] = plan
    return list(found.values())


def _plan_rule(
    backend: Backend, variant: Variant, rule: Rule[Any], direction: Direction, device: torch.device, *, causal: bool
) -> Plan | None:
    """The Plan of the widest head_dim that a rule takes, for its own config; None where it is for another arch."""
    arch = detect(device)
    if arch.name not in rule.arches:
        return None
    for head_dim in range(rule.head_dim_max, rule.head_dim_min - 1, -1):
        head_dim_v = min(head_dim, rule.head_dim_v_max or head_dim)
        problem = Problem.of(*_views(head_dim, head_dim_v, device), causal=causal)
        if rule.whole_sectors not in (None, has_whole_sectors(head_dim, problem.torch_dtype.itemsize)):
            continue
        plan = plan_variant(backend, variant, problem, arch, rule.config, direction=direction)
        if isinstance(plan, Plan):
            return plan
    return None


def _views(head_dim: int, head_dim_v: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k and v as transposed views of ``[1, S, H, D]``, bf16."""
    sizes = ((HEADS_Q, head_dim), (HEADS_KV, head_dim), (HEADS_KV, head_dim_v))
    shapes = ((1, LENGTH, heads, width) for heads, width in sizes)
    return tuple(torch.rand(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for shape in shapes)


def launch_rule(plan: Plan, device: torch.device) -> None:
    """Launch exactly this Plan on tensors of its own."""
    q, k, v = _views(plan.problem.head_dim, plan.problem.head_dim_v, device)
    shape = shape_of_out(q.shape, v.shape)
    out = torch.empty_strided(shape, (*plan.problem.strides_out, 1), dtype=q.dtype, device=device)
    lse = torch.zeros(q.shape[:3], dtype=torch.float32, device=device)
    if plan.direction == "forward":
        launch(plan, q, k, v, out, lse)
        return
    dq, dk, dv = (
        torch.empty_strided(it.shape, (*strides, 1), dtype=it.dtype, device=device)
        for it, strides in ((q, plan.problem.strides_dq), (k, plan.problem.strides_dk), (v, plan.problem.strides_dv))
    )
    out.fill_(1.0)
    launch_backward(plan, q, k, v, out, lse, out, lse, dq, dk, dv)


def launch_rules(backend: str, device: torch.device, part: tuple[int, int]) -> int:
    """Launch one of so many equal parts of the rules, each named before it runs; how many there were."""
    index, parts = part
    plans = rule_plans(backend, device)[index - 1 :: parts]
    for plan in plans:
        print(plan, flush=True)
        launch_rule(plan, device)
        synchronize(device)
    return len(plans)


def _part(text: str) -> tuple[int, int]:
    """``2/4`` as numbers."""
    index, _, parts = text.partition("/")
    if not (index.isdigit() and parts.isdigit() and 1 <= int(index) <= int(parts)):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed I/N with 1 <= I <= N")
    return int(index), int(parts)


def _draw(case: Case, *, queries: bool, device: torch.device) -> torch.Tensor:
    heads, seq = (case.heads_q, case.seq_q) if queries else (case.heads_kv, case.seq_kv)
    width = case.head_dim + case.layout.row_pad
    memory = torch.rand(case.batch, heads, seq, width, device=device, dtype=torch.float32).to(case.torch_dtype)
    return memory[..., : case.head_dim]


def main() -> None:
    """Launch, wait, and say what ran."""
    parser = argparse.ArgumentParser(prog="python -m parity.bare", description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rules", action="store_true", help="every rule of the device's arch")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="of the rules (all)")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.rules:
        number = launch_rules(options.backend, device, options.part)
    else:
        lines = launch_all(options.backend, device)
        synchronize(device)
        print("\n".join(lines))
        number = len(lines)
    print(f"launched {number} plans")


if __name__ == "__main__":
    main()
