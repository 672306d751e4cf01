"""Operations of numbers: Python's doubles and integers, and what fp32, int32 and int64 make of their results."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

DType = Literal["f32", "i32", "i64", "bool"]
Number = float | int | bool

BITS: Mapping[DType, int] = MappingProxyType({"i32": 32, "i64": 64})
"""The width of each type of integers. Both wrap around, as in PyTorch."""


def _quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


UNARY: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "neg": lambda x: -x,
        "abs": abs,
        "exp": math.exp,
        "exp2": lambda x: 2.0**x,
        "log": math.log,
        "log2": math.log2,
        "sqrt": math.sqrt,
        "sqrt_rn": math.sqrt,
        "sin": math.sin,
        "cos": math.cos,
        "erf": math.erf,
        "tanh": math.tanh,
        "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
        "floor": lambda x: float(math.floor(x)),
        "not": lambda x: not x,
    }
)
COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = MappingProxyType(
    {
        "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y,
        "eq": lambda x, y: x == y,
        "ne": lambda x, y: x != y,
    }
)
BINARY: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "div": lambda x, y: x / y,
        "mul_rn": lambda x, y: x * y,  # rounded to nearest by itself, as IEEE 754 has it; so are div_rn and sqrt_rn
        "div_rn": lambda x, y: x / y,
        "fmod": math.fmod,
        "min": min,
        "max": max,
        "floordiv": lambda x, y: x // y,  # integers, rounded down as in Python
        "mod": lambda x, y: x % y,
        "quotient": lambda x, y: _quotient(x, y),  # integers, rounded to zero as in C
        "remainder": lambda x, y: x - y * _quotient(x, y),
        "shr": lambda x, y: x >> y,
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
        **COMPARISONS,
    }
)
"""Each operation as Python computes it of numbers; with ``where`` and ``cast``, the whole set."""


def fold(op: str, numbers: Sequence[Number]) -> Number | None:
    """The operation of numbers; None where Python has no result, as of ``1 / 0``."""
    try:
        result: Number = (UNARY.get(op) or BINARY[op])(*numbers)
    except (ArithmeticError, ValueError):
        return None
    return result


def wrapped(value: int, dtype: DType) -> int:
    """An integer as `dtype` has it, ``i32`` or ``i64``."""
    half = 1 << (BITS[dtype] - 1)
    return (value + half) % (2 * half) - half


def in_fp32(value: float) -> float:
    """The nearest fp32 number; an infinity for what is beyond all. (+, -, *, / and roots of such numbers, computed in
    doubles and rounded once more, are what fp32 gives.)"""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
