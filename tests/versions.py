"""``python tests/versions.py``: try this environment, print its row of docs/versions.md.

Per backend: what doctor says, a forward and backward on CPU tensors against the reference, a compilation for sm90.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib import metadata

import torch

import multiattn
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import make_plan
from multiattn.problem import Problem

PACKAGES = ("torch", "triton", "cuda-tile", "cuda-core", "cuda-bindings")


def run(backend: str) -> None:
    """Compare a call and its gradients with the reference's."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 33, 32, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    results = []
    for name in (backend, "reference"):
        out = multiattn.fmha(*inputs, causal=True, backend=name)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, atol=2e-2, rtol=2e-2)


def build(backend: str) -> None:
    """Compile both directions for sm90."""
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=512, head_dim=64, causal=True)
    for direction in ("forward", "backward"):
        plan = make_plan(registry.get(backend), problem, ARCHS["sm90"], direction=direction, probe=False)
        assert registry.get(backend).op(direction).export(plan, ())


def verdict(lacks: bool, function: Callable[[str], None], backend: str) -> str:
    """``yes`` or ``no``, with the error; ``WRONG`` where doctor said otherwise."""
    try:
        function(backend)
    except Exception as error:  # whatever it is, it is the row's
        print(f"{backend} {function.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
        return "no" if lacks else "WRONG: doctor says yes, the call fails"
    return "WRONG: doctor says no, the call works" if lacks else "yes"


def version(package: str) -> str:
    """The installed version of a package, or a dash."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def main() -> int:
    """Print the row; 1 where doctor is wrong."""
    cells = [platform.python_version(), *map(version, PACKAGES)]
    for name in sys.argv[1:] or ("triton", "cutile", "cuda"):
        backend = registry.get(name)
        runs = verdict(bool(backend.probe(ARCHS["cpu"])), run, name)
        compiles = verdict(bool(backend.probe_compiler()), build, name)
        cells.append(f"{runs} / {compiles}")
    print(f"| {' | '.join(cells)} |")
    return int(any("WRONG" in cell for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
