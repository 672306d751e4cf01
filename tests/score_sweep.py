"""Operators of score_mod beside PyTorch's own: an expression compares each result with what eager PyTorch has.

One call of a backend has many operators of a `Sweep`, a few a head, and all pairs of operands, one a query. There is
one key, and a score has a bit for each operator whose result differs, which lse tells.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import multiattn

BITS = 16
"""Operators of one head: a score is an integer that lse in fp32 still tells, though kernels have it times log2(e)."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Operators of two operands, which are captured tensors; of positions alone where there are none."""

    name: str
    operators: dict[str, Callable[..., Any]]
    pairs: Callable[[bool], list[tuple[float, float]]] | None = None
    """The operands, few or all."""
    dtype: torch.dtype = torch.float32
    tolerance: float = 0.0
    """How far results may be from PyTorch's, absolutely."""
    skip: dict[str, Callable[[float, float], bool]] = field(default_factory=dict)
    """Pairs for which PyTorch has no result."""


def differing(
    sweep: Sweep, backend: str, *, device: str = "cpu", quick: bool = False, at_once: int = 64, **options: Any
) -> list[str]:
    """The operators and operands whose result is not PyTorch's, as text. One kernel has `at_once` operators."""
    names = list(sweep.operators)
    parts = (names[first : first + at_once] for first in range(0, len(names), at_once))
    return [it for part in parts for it in _differing(sweep, part, backend, device, quick, options)]


def _differing(
    sweep: Sweep, names: list[str], backend: str, device: str, quick: bool, options: dict[str, Any]
) -> list[str]:
    if sweep.pairs is None:
        count = 128 if quick else 1024
        columns = [torch.arange(count, dtype=torch.int32)]
        captured: list[torch.Tensor] = []
    else:
        pairs = sweep.pairs(quick)
        columns = [torch.tensor(it, dtype=sweep.dtype) for it in zip(*pairs, strict=True)]
        captured = [it.to(device) for it in columns]
    expected, counts = [], []
    for name in names:
        skip = sweep.skip.get(name)
        keep = torch.tensor([not (skip and skip(*map(float, it))) for it in zip(*columns, strict=True)])
        inside = [torch.where(keep, it, torch.ones_like(it)) for it in columns]
        expected.append(sweep.operators[name](*inside).to(device))
        counts.append(keep)
    heads = -(-len(names) // BITS)
    operators = [sweep.operators[name] for name in names]
    tolerance = sweep.tolerance

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        operands = [it[i] for it in captured] or [i]
        wrong = [s * 0.0] * heads
        for place, (operator, wanted) in enumerate(zip(operators, expected, strict=True)):
            result, right = operator(*operands), wanted[i]
            if tolerance:
                is_right = (result - right).abs() <= tolerance
            elif wanted.is_floating_point():
                is_right = (result == right) | ((result != result) & (right != right))
            else:
                is_right = result == right
            wrong[place // BITS] = wrong[place // BITS] + torch.where(is_right, 0.0, 2.0 ** (place % BITS))
        for head, it in enumerate(wrong):
            s = torch.where(h == head, it, s)
        return s

    q = torch.zeros(1, heads, len(columns[0]), 16, dtype=torch.bfloat16, device=device)
    k = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16, device=device)
    _, lse = multiattn.fmha(q, k, k, score_mod=score_mod, backend=backend, return_lse=True, **options)
    bits = lse[0].cpu().round().int()
    differs = [(bits[it // BITS] >> it % BITS & 1).bool() & keep for it, keep in enumerate(counts)]
    return [
        f"{name}({', '.join(str(it[place].item()) for it in columns)}), PyTorch {wanted[place].item()}"
        for name, wanted, row in zip(names, expected, differs, strict=True)
        for place in row.nonzero().flatten().tolist()
    ]


# ---------------------------------------------------------------- operands


def _integers(quick: bool) -> list[tuple[float, float]]:
    edges = [0, 1, 2, 3, 5, 40, 41, 42, 200, 2**16, 2**24 + 1, 2**30, 2**31 - 2, 2**31 - 1]
    edges += [-it for it in edges] + [-(2**31)]
    divisors = [1, 2, 3, 7, 8, 41, 2**16, 2**31 - 1, -1, -2, -3, -8, -41, -(2**31)]
    pairs = list(itertools.product(edges, divisors))
    return pairs[::4] if quick else pairs + [(step * 23 - 999, 1 + step % 200) for step in range(600)]


def _floats(quick: bool) -> list[tuple[float, float]]:
    divisors = [0.3, 1.75, 3.0, 41.0, 47.0, 55.0, 61.0, 82.0, 83.0, -41.0, -0.7]
    whole = [(divisor * times, divisor) for divisor in divisors for times in (1, 2, 3, -1, -5, 100, 0.5, -2.5)]
    if quick:
        return whole
    whole += [(float(times * divisor), float(divisor)) for divisor in range(1, 201) for times in (1, 2, 3, 7, -1, -4)]
    halves = [0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, -0.49999997, 8388607.5, 4194303.5, -8388609.0, 16777217.0, 0.0]
    large = [1e6, -1e6 + 0.25, 1e10, -1e10, 3e30, 2.0**31, -(2.0**31), 123456.789]
    return whole + list(itertools.product(halves + large, (1.0, 3.0, -3.0, 0.1, 7.0, 1e-3, 41.0)))


def _angles(quick: bool) -> list[tuple[float, float]]:
    few = [0.0, 0.5, -0.5, 1.0, 3.14159274, -3.0, 10.0, 1e3, -1e4, 1e5, 1e8, 0.92, 0.93, 2.0, 3.9, 3.95, -5.0, 1e-3]
    return [(it, 1.0) for it in (few if quick else few + [step * 0.01 - 6.0 for step in range(1200)])]


# ---------------------------------------------------------------- operators


def _operators(codes: str, given: str = "x, y") -> dict[str, Callable[..., Any]]:
    """A function of each expression; several stand in a line."""
    names = [code.strip() for line in codes.strip().splitlines() for code in line.split(";")]
    return {name: eval(f"lambda {given}: {name}", {"torch": torch}) for name in names}


_DIVISIONS = """
x // y; x % y; torch.div(x, y, rounding_mode="trunc"); torch.div(x, y, rounding_mode="floor")
torch.remainder(x, y); torch.fmod(x, y)
"""
_BY_PAIR = f"""
{_DIVISIONS.strip()}
torch.minimum(x, y); torch.maximum(x, y); torch.sign(x); x.abs(); x < y; x == y
"""
"""Operators of floats and integers."""

INTEGERS = Sweep(
    name="integers",
    pairs=_integers,
    dtype=torch.int32,
    operators=_operators(f"""
        {_BY_PAIR.strip()}
        x + y; x - y; x * y; -x; x**2 + y**3; x >> y; x & y; x | ~y; x ^ y; x.clamp(-40, 40); x / y; x.float() - y
        x // 41; x // -7; x // 8; x // -1; x % 41; x % -7; x % 8; torch.fmod(x, 41)
        torch.div(x, 7, rounding_mode="trunc"); torch.div(x, -8, rounding_mode="trunc")
        (x * 100_000_000) % 7; (x * y + y) // 7; x.long() * y; (x.long() * 3) // y; (x.long() * 5 - 1) % y
        x.to(torch.uint8) + y.to(torch.uint8); -x.to(torch.int8) * 3; x.to(torch.int16) * y.to(torch.int16)
        x.to(torch.int16); x.to(torch.uint8) // 3; (x == x) ^ (y < y); (x > 0) + (y > 0)
        (x / y).floor(); (x / 41).floor()
    """),
    # A processor's division stops there.
    skip=dict.fromkeys((*_operators(_DIVISIONS), "x // -1"), lambda x, y: x == -(2**31) and y == -1),
)
FLOATS = Sweep(
    name="floats",
    pairs=_floats,
    operators=_operators(f"""
        {_BY_PAIR.strip()}
        (x / y).floor(); (x / y).ceil(); (x / y).trunc(); (x / y).round(); (x / y).int(); x / y == 3; x > 3 * y
        x.floor(); x.ceil(); x.trunc(); x.round(); (torch.round(x, decimals=1) * 10).round()
        (x / 41).floor(); (x / 0.3).floor(); (x / 1.75).round(); x // 41; x % 0.3; torch.fmod(x, 47)
        (x * 0.7 + y).floor(); (x * 0.1 * 3).ceil(); (x * y.reciprocal()).floor(); (x * x).sqrt().floor()
        ((x * x + 1).rsqrt() * 1000).floor()
    """),
    skip={"(x / y).int()": lambda x, y: not abs(x / y) < 2**31 - 128},
)
SMOOTH = Sweep(
    name="smooth",
    pairs=_angles,
    tolerance=1e-6,
    operators=_operators("""
        x.sin(); x.cos(); x.erf(); torch.nn.functional.gelu(x.clamp(-6, 6)); x.clamp(-6, 0).exp()
        (x.abs() + 1).log() / 16
    """),
)
POSITIONS = Sweep(
    name="positions",
    operators=_operators(
        """
        (i / 41).floor(); (i / 0.3).floor(); (i / 41).int(); i / 41 == 3; i % 41; i // 41; (i - 300) // 7
        (i - 300) % -7; (i * 100_000_000) % 7; (i * i * i) // 5; torch.fmod(-i, 3); (0.1 * (i - 300)).floor()
        (i * 100_000_000 - i).float(); (i % 8.2).round(); i // 0.7; (49 / (i + 1)).ceil()
        (((8 * i + 1).sqrt() - 1) / 2).floor()
        """,
        "i",
    ),
)
SWEEPS = (INTEGERS, FLOATS, SMOOTH, POSITIONS)
