"""Runs of the CUDA kernels on the CPU that their tests share, and what they need of the machine."""

import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from multiattn.cuda import BACKEND
from multiattn.cuda.cpu.host import CpuLauncher
from multiattn.cuda.forward_wgmma import WgmmaConfig
from multiattn.cuda.source import HOST_INCLUDES
from multiattn.cuda.tools import GXX, probe_host, probe_nvrtc
from multiattn.mask import Window
from multiattn.operands import Operands
from multiattn.plan.arch import CPU
from multiattn.plan.backend import Plan, make_plan
from multiattn.plan.config import Config
from multiattn.problem import Problem
from parity.tolerance import Truth

on_cpu = pytest.mark.skipif(bool(probe_host()), reason="; ".join(map(str, probe_host())))
with_nvrtc = pytest.mark.skipif(bool(probe_nvrtc()), reason="; ".join(map(str, probe_nvrtc())))

CONFIG = WgmmaConfig(tile_m=128, tile_n=64)
"""A config of Hopper's forward."""

Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def run_forward(
    *,
    variant: str | None = None,
    config: Config | None = None,
    change: Change | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    **sizes: Any,
) -> tuple[Plan, CpuLauncher, Any]:
    """A forward kernel, emulated, held to the reference as parity does; its Plan, launcher and counts.

    Unless `sizes` say otherwise: one sequence of 37 queries and 101 keys, two heads that share one of keys, D=64, v as
    wide, fp16.
    `change` may write into q, k and v before.
    """
    given = {"batch": 1, "heads_q": 2, "heads_kv": 1, "seq_q": 37, "seq_kv": 101, "head_dim": 64, "dtype": "fp16"}
    given |= sizes
    generator = torch.Generator().manual_seed(given["head_dim"])
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[given["dtype"]]

    def make(of: str, width: int) -> torch.Tensor:
        packed = torch.randn(given["batch"], given[f"seq_{of}"], given[f"heads_{of}"], width, generator=generator)
        return packed.to(dtype).transpose(1, 2)

    q, k = (make(it, given["head_dim"]) for it in ("q", "kv"))
    v = make("kv", given.get("head_dim_v", given["head_dim"]))
    if change is not None:
        change(q, k, v)
    problem = Problem.of(q, k, v, causal=causal, window=window, scale=scale, sinks=sinks)
    plan = make_plan(BACKEND, problem, CPU, variant=variant, config=config, probe=False)
    lse = torch.full(q.shape[:3], torch.nan)
    out = torch.empty_strided((*q.shape[:3], v.shape[3]), (*problem.strides_out, 1), dtype=dtype).fill_(torch.nan)
    launcher = CpuLauncher(plan)
    launcher(Operands(q, k, v, out, lse, sinks=sinks))
    truth = Truth.of(q, k, v, causal=causal, window=window, scale=scale, sinks=sinks)
    for got, expected in zip((out, lse), truth.of_plan(plan), strict=True):
        expected.check(got, plan)
    (counts,) = launcher.counts.values()
    return plan, launcher, counts


def run_gxx(source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The compiler's run over a source that may include the headers of the emulation; it warns of nothing."""
    includes = [f"-I{directory}" for directory in HOST_INCLUDES]
    command = [GXX, "-std=c++20", "-w", *includes, *options, "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


def check_refused(header: str, refused: Mapping[str, str]) -> None:
    """The compiler refuses each of the types, by a static_assert with the message that is its key.

    All of them in one translation unit: g++ goes on after a static_assert.
    """
    source = f'#include "{header}"\n' + "".join(f"template struct {name};\n" for name in refused.values())
    done = run_gxx(source, "-fsyntax-only")
    assert done.returncode != 0
    assert [message for message in refused if message not in done.stderr] == []
