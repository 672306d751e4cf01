"""What the commands of ``python -m multiattn`` are given: argparse's types, and a problem's options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from multiattn.problem import DTYPES, Problem


def shape(text: str) -> tuple[int, ...]:
    """``2,16,1024,128`` or ``2x16x1024x128``: batch, heads, length and head_dim of q."""
    parts = text.replace("x", ",").split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed four counts B,H,S,D, as in 2,16,1024,128")
    return tuple(int(part) for part in parts)


def count(text: str) -> int:
    """What is counted."""
    if not text.isdecimal() or int(text) < 1:
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


def add_problem(command: argparse.ArgumentParser, *, required: bool) -> None:
    """The options that `problem_of` reads."""
    command.add_argument("--shape", type=shape, required=required, metavar="B,H,S,D", help="of q")
    command.add_argument("--kv-heads", type=int, metavar="H", help="heads of k and v (default: those of q)")
    command.add_argument("--kv-len", type=int, metavar="S", help="sequence length of k and v (default: that of q)")
    command.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="default: %(default)s")
    command.add_argument("--causal", action="store_true", help="bottom-right aligned")
    command.add_argument("--scale", type=float, help="of the scores (default: 1/sqrt(D))")


def problem_of(options: argparse.Namespace) -> Problem:
    """The problem that was asked for, contiguous; ValueError for sizes that do not go together."""
    batch, heads_q, seq_q, head_dim = options.shape
    return Problem.contiguous(
        batch=batch,
        heads_q=heads_q,
        heads_kv=options.kv_heads,
        seq_q=seq_q,
        seq_kv=options.kv_len,
        head_dim=head_dim,
        dtype=options.dtype,
        causal=options.causal,
        scale=options.scale,
    )
