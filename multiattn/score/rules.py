"""PyTorch's operations as expressions: for each name of an ATen operator, a rule.

A rule is called as the operator is, behind ``get`` and the dtype of the result. ``get(value, dtype)`` is the node of a
tensor or number, as that dtype if one is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from multiattn.score.expression import ONE, ZERO, DType, Node, apply, cast, const, is_const, where

Get = Callable[..., Node]
Rule = Callable[..., Node]


class NoRuleError(Exception):
    """An operator has a rule, but not for these arguments. The message says what it takes."""


_WIDEST: tuple[DType, ...] = ("f32", "i64", "i32", "bool")
_POWER_MAX = 8
"""The largest integer exponent that is written out as products."""


def _unary(op: str) -> Rule:
    return lambda get, dtype, x, **_: apply(op, get(x, dtype))


def _binary(op: str) -> Rule:
    def rule(get: Get, dtype: DType, x: Any, y: Any, *, alpha: float = 1) -> Node:
        right = get(y, dtype)
        return apply(op, get(x, dtype), right if alpha == 1 else apply("mul", right, const(alpha, dtype)))

    return rule


def _integer(op: str) -> Rule:
    """An operation of integers, which floats do not have."""

    def rule(get: Get, dtype: DType, x: Any, y: Any) -> Node:
        if dtype == "f32":
            raise NoRuleError("floats; allowed integers")
        return apply(op, get(x, dtype), get(y, dtype))

    return rule


def _compare(op: str, *, swapped: bool = False) -> Rule:
    def rule(get: Get, dtype: DType, x: Any, y: Any) -> Node:
        a, b = get(x), get(y)
        wide = next(it for it in _WIDEST if it in (a.dtype, b.dtype))
        if wide == "bool" and op in ("lt", "le"):
            wide = "i32"
        a, b = cast(a, wide), cast(b, wide)
        return apply(op, b, a) if swapped else apply(op, a, b)

    return rule


def _logical(op: str) -> Rule:
    return lambda get, dtype, x, y: apply(op, _truth(get(x)), _truth(get(y)))


def _truth(x: Node) -> Node:
    return x if x.dtype == "bool" else apply("ne", x, const(0, x.dtype))


def _divide(get: Get, dtype: DType, x: Any, y: Any, *, rounding_mode: str | None = None) -> Node:
    a, b = get(x, dtype), get(y, dtype)
    if rounding_mode is None:
        return apply("div", a, b)
    if dtype != "f32":
        return apply("floordiv" if rounding_mode == "floor" else "quotient", a, b)
    ratio = apply("div", a, b)
    down = apply("floor", ratio)
    if rounding_mode == "floor":
        return down
    return where(apply("lt", ratio, ZERO), apply("neg", apply("floor", apply("neg", ratio))), down)


def _remainder(get: Get, dtype: DType, x: Any, y: Any) -> Node:
    a, b = get(x, dtype), get(y, dtype)
    if dtype != "f32":
        return apply("mod", a, b)
    return apply("sub", a, apply("mul", apply("floor", apply("div", a, b)), b))


def _clamp(get: Get, dtype: DType, x: Any, low: Any = None, high: Any = None) -> Node:
    bounded = get(x, dtype)
    if low is not None:
        bounded = apply("max", bounded, get(low, dtype))
    return bounded if high is None else apply("min", bounded, get(high, dtype))


def _relu(get: Get, dtype: DType, x: Any) -> Node:
    it = get(x, dtype)
    return where(apply("le", it, const(0, dtype)), const(0, dtype), it)  # NaN stays NaN


def _power(get: Get, dtype: DType, x: Any, y: Any) -> Node:
    base, exponent = get(x, dtype), get(y, dtype)
    if exponent.op == "const" and exponent.value == int(exponent.value) and abs(exponent.value) <= _POWER_MAX:
        product = const(1, dtype)
        for _ in range(abs(int(exponent.value))):
            product = apply("mul", product, base)
        return product if exponent.value >= 0 else apply("div", ONE, cast(product, "f32"))
    if is_const(exponent, 0.5):
        return apply("sqrt", base)
    if dtype != "f32" or not (base.op == "const" and base.value > 0):
        raise NoRuleError(f"this power; allowed integer exponents up to {_POWER_MAX}, 0.5 and constant bases above 0")
    return apply("exp2", apply("mul", exponent, const(math.log2(base.value))))


def _same(get: Get, dtype: DType, x: Any, *_: Any, **__: Any) -> Node:
    return get(x, dtype)


def _filled(value: float) -> Rule:
    return lambda get, dtype, *_, **__: const(value, dtype)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "add": _binary("add"),
        "sub": _binary("sub"),
        "rsub": lambda get, dtype, x, y, alpha=1: _binary("sub")(get, dtype, y, x, alpha=alpha),
        "mul": _binary("mul"),
        "div": _divide,
        "reciprocal": lambda get, dtype, x: apply("div", ONE, get(x, dtype)),
        "floor_divide": lambda get, dtype, x, y: _divide(get, dtype, x, y, rounding_mode="floor"),
        "remainder": _remainder,
        "minimum": _binary("min"),
        "maximum": _binary("max"),
        "clamp": _clamp,
        "clamp_min": _clamp,
        "clamp_max": lambda get, dtype, x, high: _clamp(get, dtype, x, None, high),
        "relu": _relu,
        **{op: _unary(op) for op in ("neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "tanh", "sigmoid", "floor")},
        "rsqrt": lambda get, dtype, x: apply("div", ONE, apply("sqrt", get(x, dtype))),
        "log1p": lambda get, dtype, x: apply("log", apply("add", ONE, get(x, dtype))),
        "expm1": lambda get, dtype, x: apply("sub", apply("exp", get(x, dtype)), ONE),
        "square": lambda get, dtype, x: apply("mul", get(x, dtype), get(x, dtype)),
        "pow": _power,
        "lt": _compare("lt"),
        "le": _compare("le"),
        "gt": _compare("lt", swapped=True),
        "ge": _compare("le", swapped=True),
        "eq": _compare("eq"),
        "ne": _compare("ne"),
        "logical_and": _logical("and"),
        "logical_or": _logical("or"),
        "logical_xor": _logical("xor"),
        "logical_not": lambda get, dtype, x: apply("not", _truth(get(x))),
        **{f"bitwise_{op}": _integer(op) for op in ("and", "or", "xor")},
        **{f"__{op}__": _integer(op) for op in ("and", "or", "xor")},
        "bitwise_not": lambda get, dtype, x: (
            apply("not", get(x)) if dtype == "bool" else apply("xor", get(x, dtype), const(-1, dtype))
        ),
        "bitwise_right_shift": _integer("shr"),
        "__rshift__": _integer("shr"),
        "where": lambda get, dtype, condition, x, y: where(get(condition, "bool"), get(x, dtype), get(y, dtype)),
        "masked_fill": lambda get, dtype, x, condition, value: where(
            get(condition, "bool"), get(value, dtype), get(x, dtype)
        ),
        **dict.fromkeys(("_to_copy", "to", "clone", "alias", "detach", "lift_fresh", "lift_fresh_copy"), _same),
        "scalar_tensor": _same,
        "full": lambda get, dtype, size, value, **_: const(value, dtype),
        "full_like": lambda get, dtype, x, value, **_: const(value, dtype),
        "new_full": lambda get, dtype, x, size, value, **_: const(value, dtype),
        **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _filled(0)),
        **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(1)),
    }
)
"""Operators outside this table are tried as PyTorch decomposes them into others."""
