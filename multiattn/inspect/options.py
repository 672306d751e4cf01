"""Parts that the commands of ``python -m multiattn`` share: argparse's types, a problem's options, and tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tabulate import tabulate

from multiattn.layout import DTYPES
from multiattn.mask import Band, Window, band_of, parse_band
from multiattn.plan.arch import ARCHS, detect
from multiattn.problem import Problem

TOKENS, HIDDEN = 16384, 2048
"""Batch times length, and heads times head_dim, where the options say nothing else; those of every cell of
`python -m bench --suite standard`: the work of a layer stays, its shape changes."""


def shape(text: str) -> tuple[int, ...]:
    """``2,16,1024,128`` or ``2x16x1024x128``: batch, heads, length and head_dim of q."""
    parts = text.replace("x", ",").split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed four counts B,H,S,D, as in 2,16,1024,128")
    return tuple(int(part) for part in parts)


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; allowed whole numbers from 1 on")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Some counts with commas between them, each once."""
    return tuple(dict.fromkeys(map(count, text.split(","))))


def some_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of `allowed` with commas between them, each once."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        wrong = [name for name in names if name not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"got {', '.join(map(repr, wrong))}; allowed {', '.join(allowed)}")
        return names

    return parse


def window(text: str) -> Window:
    """``1024:0``: keys before and after its own that a query sees, with ``-`` for all of them."""
    try:
        band = parse_band(f"window:{text}")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return band.left, band.right


def masks(text: str) -> tuple[str, ...]:
    """Some of ``full``, ``causal`` and ``window:1024:0`` with commas between them, each once."""
    try:
        return tuple(dict.fromkeys(str(parse_band(name)) for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_problem(command: argparse.ArgumentParser, *, required: bool, several: bool = False) -> None:
    """Add the options that `problem_of` reads; with `several` shapes `options.shape` is a list."""
    again, told = ("append", "of q; may be given again") if several else ("store", "of q")
    command.add_argument("--shape", type=shape, action=again, required=required, metavar="B,H,S,D", help=told)
    command.add_argument("--kv-heads", type=int, metavar="H", help="heads of k and v (default: those of q)")
    command.add_argument("--kv-len", type=int, metavar="S", help="sequence length of k and v (default: that of q)")
    command.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="default: %(default)s")
    command.add_argument("--causal", action="store_true", help="bottom-right aligned")
    command.add_argument("--window", type=window, metavar="LEFT:RIGHT", help="keys before and after; - for all")
    command.add_argument("--scale", type=float, help="of the scores (default: 1/sqrt(D))")


def problem_of(options: argparse.Namespace) -> Problem:
    """The contiguous problem that the options ask for; ValueError for sizes that do not go together."""
    batch, heads, seq, head_dim = options.shape
    sizes = {"batch": batch, "heads": heads, "heads_kv": options.kv_heads, "seq_kv": options.kv_len}
    band = band_of(options.causal, options.window)
    return layer(head_dim, seq, band, dtype=options.dtype, scale=options.scale, **sizes)


def called_problem(options: argparse.Namespace) -> Problem:
    """The same as calls have it: without bounds of the mask that hide no key."""
    problem = problem_of(options)
    return replace(problem, band=problem.band.within(problem.seq_q, problem.seq_kv))


def arguments_of(problem: Problem) -> list[str]:
    """The options that make `problem_of` give this contiguous problem."""
    q = f"{problem.batch},{problem.heads_q},{problem.seq_q},{problem.head_dim}"
    sizes = ["--shape", q, "--kv-heads", str(problem.heads_kv), "--kv-len", str(problem.seq_kv)]
    flags = {"full": [], "causal": ["--causal"], "two_sided": [f"--{problem.mask.replace(':', '=', 1)}"]}
    mask = flags[problem.band.kind]
    return [*sizes, "--dtype", problem.dtype, f"--scale={problem.scale!r}", *mask]


def layer(
    head_dim: int, seq: int, mask: str | Band, *, batch: int | None = None, heads: int | None = None, **sizes: Any
) -> Problem:
    """Attention over `TOKENS` tokens with `HIDDEN` channels, where batch and heads are not given.

    `sizes` are more of `Problem.contiguous`. ValueError for sizes that do not go together.
    """
    return Problem.contiguous(
        batch=TOKENS // seq if batch is None else batch,
        heads_q=max(1, HIDDEN // head_dim) if heads is None else heads,
        seq_q=seq,
        head_dim=head_dim,
        band=mask if isinstance(mask, Band) else parse_band(mask),
        **sizes,
    )


def sizes_of(problem: Problem) -> tuple[str, str]:
    """Heads and lengths: ``16`` and ``4096``, or of q and of k and v where they differ: ``16/4``, ``1/4096``."""
    pairs = (problem.heads_q, problem.heads_kv), (problem.seq_q, problem.seq_kv)
    heads, length = ("/".join(map(str, dict.fromkeys(pair))) for pair in pairs)
    return heads, length


def check_work(problem: Problem) -> None:
    """ValueError for a problem that no kernel is launched for."""
    if problem.is_empty or problem.seq_kv == 0:
        raise ValueError(f"shape: got {problem}; allowed one that needs a kernel")


def default_arch() -> str:
    """The name of this machine's arch; of sm90 where there is no GPU that kernels are for."""
    here = detect(torch.device("cuda")).name if torch.cuda.is_available() else "cpu"
    return here if here in ARCHS and here != "cpu" else "sm90"


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> str:
    """Rows as a table for a terminal."""
    return tabulate(rows, headers=headers, disable_numparse=True)
