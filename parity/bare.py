"""``python -m parity.bare``: the kernels of a few cases launched with no reference beside them, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \\
        python -m parity.bare --backend cuda

Without PyTorch's cache every tensor ends where its allocation does. A first run without the sanitizer fills the
compilers' caches. The reference stays out because racecheck makes torch's own matmul crash.
"""

from __future__ import annotations

import argparse

import torch

import multiattn
from multiattn import backend as registry
from multiattn.arch import detect
from multiattn.backend import BACKENDS, Plan, find_variant, plan_variant
from multiattn.problem import Problem
from parity.cases import Case, Layout

WATCHED = (
    Case(name="ragged", why="ragged tiles of queries and keys; padded head_dim", head_dim=72, causal=True),
    Case(name="gqa", why="heads that share keys; rows that see no key", heads_q=4, seq_q=203, seq_kv=113, causal=True),
    Case(name="wide", why="the tiles of D=128, whole and ragged", seq_q=256, seq_kv=300, head_dim=128, dtype="fp16"),
    Case(name="sliced", why="head_dim in slices, the last one not whole", head_dim=328, causal=True),
    Case(name="unaligned", why="element loads", head_dim=40, layout=Layout(row_pad=1)),
)


def launch_all(backend: str, device: torch.device) -> list[str]:
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


def _launch_backwards(case: Case, backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[str]:
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
    options = parser.parse_args()
    device = torch.device(options.device)
    lines = launch_all(options.backend, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print("\n".join(lines))
    print(f"launched {len(lines)} plans")


if __name__ == "__main__":
    main()
