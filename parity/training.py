"""A small GPT, trained with each backend's attention, must follow the loss curve of the reference's.

How closely is measured, not typed. Rounding alone moves a curve, and training amplifies it. So the same model is
trained with *twins* of the reference: eager attention whose every intermediate is rounded to the kernels' dtype, and
whose q, k and v are rounded stochastically, by a seed each. What the reference and its twins differ by up to a step,
the most of any two of them, is what rounding explains there; a backend may be off by `NAIVE_FACTOR` times that, as for
tensors. fp16 rounds eight times finer than bf16, so that smaller mistakes show: 5 % of dq and dk, or of dv.

``python -m parity train --backend triton`` prints the curves. On a CPU the model is tiny, as interpreters run it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import nn
from torch.nn import functional

from multiattn import fmha, reference
from multiattn.bars import Bar
from multiattn.layout import DTYPES
from multiattn.plan.backend import BACKENDS, REFERENCE, BackendName
from multiattn.progress import DELAY_S
from parity.tolerance import NAIVE_FACTOR

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention: fp32 q ``[B, Hq, S, D]``, k and v ``[B, Hkv, S, D]`` to out like q, differentiable."""

TWINS = (1, 2)
"""Seeds of rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A model and its training: text of `batch` random sequences, the same in each step, so that it can be learnt."""

    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    seq: int
    batch: int
    vocabulary: int = 64
    steps: int = 50
    learning_rate: float = 3e-3
    seed: int = 0


TINY = Setup(layers=1, heads_q=2, heads_kv=1, head_dim=16, seq=24, batch=2)
"""For interpreters: 50 steps in seconds."""

SMALL = Setup(layers=4, heads_q=8, heads_kv=4, head_dim=64, seq=384, batch=8, vocabulary=256, learning_rate=1e-3)
"""For a GPU."""


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual."""

    def __init__(self, setup: Setup, attend: Attend) -> None:
        super().__init__()
        width = setup.heads_q * setup.head_dim
        self.heads = (setup.heads_q, setup.heads_kv, setup.heads_kv)
        self.attend = attend
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * setup.head_dim, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x ``[B, S, Hq * D]``."""
        batch, seq, width = x.shape
        packed = self.qkv(self.norm_attention(x)).view(batch, seq, sum(self.heads), -1).transpose(1, 2)
        out = self.attend(*packed.split(self.heads, dim=1))  # [B, Hq, S, D]
        x = x + self.project(out.transpose(1, 2).reshape(batch, seq, width))
        mlp: torch.Tensor = self.mlp(self.norm_mlp(x))
        return x + mlp


class TinyGPT(nn.Module):
    """Token and position embeddings, blocks, a linear head; all in fp32 but the attention."""

    def __init__(self, setup: Setup, attend: Attend) -> None:
        super().__init__()
        width = setup.heads_q * setup.head_dim
        self.tokens, self.positions = nn.Embedding(setup.vocabulary, width), nn.Embedding(setup.seq, width)
        self.blocks = nn.Sequential(*(Block(setup, attend) for _ in range(setup.layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, setup.vocabulary))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, S, vocabulary]`` of int64 tokens ``[B, S]``."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.blocks(x))
        return logits


# ---------------------------------------------------------------- attention functions


def attend_with(backend: BackendName, dtype: torch.dtype) -> Attend:
    """`multiattn.fmha` in `dtype`, forward and backward of one backend."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fmha(q.to(dtype), k.to(dtype), v.to(dtype), causal=True, backend=backend).float()

    return attend


def attend_by_reference(dtype: torch.dtype) -> Attend:
    """The reference in fp32 on what `dtype` makes of q, k and v, differentiated by PyTorch."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, _ = reference(q.to(dtype), k.to(dtype), v.to(dtype), causal=True, compute_dtype=torch.float32)
        return out.to(dtype).float()

    return attend


def attend_by_twin(dtype: torch.dtype, seed: int) -> Attend:
    """The reference in `dtype` throughout, on q, k and v that are rounded up or down at random."""
    generators: dict[torch.device, torch.Generator] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        generator = generators.setdefault(q.device, torch.Generator(q.device).manual_seed(seed))
        q, k, v = (round_at_random(tensor, dtype, generator) for tensor in (q, k, v))
        out, _ = reference(q, k, v, causal=True, compute_dtype=dtype)
        return out.float()

    return attend


def round_at_random(x: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """fp32 `x` in `dtype`, up or down with the odds that make it right on average; differentiated as a rounding is."""
    low_bits = 23 - (7 if dtype == torch.bfloat16 else 10)  # of the 23 bits of fp32's mantissa
    bits = x.detach().contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << low_bits, bits.shape, generator=generator, device=x.device, dtype=torch.int32)
    rounded = ((bits + noise) & -(1 << low_bits)).view(torch.float32)
    return (x + (rounded - x).detach()).to(dtype)


# ---------------------------------------------------------------- training


def train(setup: Setup, attend: Attend, device: torch.device) -> list[float]:
    """The loss before each step, and after the last: `steps` + 1 of them. Nothing but `attend` tells two runs apart."""
    generator = torch.Generator().manual_seed(setup.seed)
    text = torch.randint(setup.vocabulary, (setup.batch, setup.seq + 1), generator=generator).to(device)
    model = TinyGPT(setup, attend)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
            elif "bias" in name:
                parameter.zero_()
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=setup.learning_rate)
    losses = []
    for _ in Bar(range(setup.steps + 1), desc="training", unit="step", delay=DELAY_S, leave=False, disable=None):
        logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [float(loss) for loss in losses]


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The reference's curve and what rounding explains, step by step."""

    setup: Setup
    dtype: torch.dtype
    losses: tuple[float, ...]
    allowed: tuple[float, ...]

    @classmethod
    def of(cls, setup: Setup, dtype: torch.dtype, device: torch.device) -> Baseline:
        """Train with the reference and with its twins."""
        curves = [
            train(setup, attend_by_reference(dtype), device),
            *(train(setup, attend_by_twin(dtype, seed), device) for seed in TWINS),
        ]
        spreads = [
            max(abs(a - b) for a, b in itertools.combinations(losses, 2)) for losses in zip(*curves, strict=True)
        ]
        allowed = [NAIVE_FACTOR * spread for spread in itertools.accumulate(spreads, max)]
        return cls(setup=setup, dtype=dtype, losses=tuple(curves[0]), allowed=tuple(allowed))

    def ratios(self, losses: Sequence[float]) -> list[float]:
        """The share of what is allowed that a curve uses at each step: inf where its loss is not finite."""
        return [
            abs(loss - own) / allowed if abs(loss) < float("inf") else float("inf")
            for loss, own, allowed in zip(losses, self.losses, self.allowed, strict=True)
        ]

    def complaint(self, losses: Sequence[float]) -> str:
        """Where a curve leaves the reference's by more than rounding explains; empty where it does not."""
        ratios = self.ratios(losses)
        worst = max(range(len(ratios)), key=ratios.__getitem__)
        if ratios[worst] <= 1:
            return ""
        return (
            f"loss {losses[worst]:.5f} at step {worst}, the reference's {self.losses[worst]:.5f}: off by "
            f"{abs(losses[worst] - self.losses[worst]):.2e}, allowed {self.allowed[worst]:.2e}"
        )


# ---------------------------------------------------------------- the command


def main(arguments: Sequence[str]) -> int:
    """Train with each backend asked for, print the curves; 0 when all follow the reference, else 1."""
    options = _parser().parse_args(arguments)
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    setup = SMALL if device.type == "cuda" else TINY
    torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())
    baseline = Baseline.of(setup, dtype, device)
    curves, verdicts = {}, []
    for name in dict.fromkeys(options.backend or BACKENDS):
        started = time.perf_counter()
        losses = train(setup, attend_with(name, dtype), device)
        complaint = baseline.complaint(losses)
        ratio, seconds = max(baseline.ratios(losses)), time.perf_counter() - started
        verdicts.append((name, f"{ratio:.2f}", f"{losses[-1]:.4f}", f"{seconds:.1f}", complaint or "follows"))
        curves[name] = losses
    shown = [*range(0, setup.steps, 5), setup.steps]
    rows = [
        (
            step,
            f"{baseline.losses[step]:.4f}",
            f"{baseline.allowed[step]:.1e}",
            *(f"{curves[n][step]:.4f}" for n in curves),
        )
        for step in shown
    ]
    print(f"{setup}, {options.dtype}, {device}")
    print(tabulate(rows, headers=("step", "reference", "allowed", *curves), disable_numparse=True))
    print("\n" + tabulate(verdicts, headers=("backend", "worst ratio", "last loss", "s", ""), disable_numparse=True))
    return 0 if all(verdict[-1] == "follows" for verdict in verdicts) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parity train", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend", action="append", choices=(*BACKENDS, REFERENCE), help="may be given again; default all"
    )
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16", help="of attention (default: fp16)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
