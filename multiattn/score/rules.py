"""PyTorch's operations as expressions: for each name of an ATen operator, a rule.

A rule is called as the operator is, behind ``get`` and the dtype of the result. ``get(value, dtype)`` is the node of a
tensor or number, as that dtype if one is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from multiattn.score.arithmetic import BITS, DType
from multiattn.score.expression import ONE, ZERO, Node, cast, const, is_const, where
from multiattn.score.expression import apply_in_fp32 as apply

Get = Callable[..., Node]
Rule = Callable[..., Node]


class NoRuleError(Exception):
    """An operator has a rule, but not for these arguments. The message says what it takes."""


_WIDEST: tuple[DType, ...] = ("f32", "i64", "i32", "bool")
_POWER_MAX = 8
"""The largest integer exponent that is written out as products."""


_OF_BOOLS = {"add": "or", "mul": "and", "max": "or", "min": "and"}


def _unary(op: str) -> Rule:
    return lambda get, dtype, x, **_: apply(op, get(x, dtype))


def _rounding(form: Callable[[Node], Node]) -> Rule:
    """An operation that gives floats without a fraction, and integers as they are."""
    return lambda get, dtype, x, **more: form(get(x, dtype), **more) if dtype == "f32" else get(x, dtype)


def _floor(x: Node) -> Node:
    return apply("floor", x)


def _ceil(x: Node) -> Node:
    return apply("neg", apply("floor", apply("neg", x)))


def _trunc(x: Node) -> Node:
    return where(apply("lt", x, ZERO), _ceil(x), _floor(x))


def _round(x: Node, decimals: int = 0) -> Node:
    """The nearest number without a fraction, of two the even one."""
    if decimals:
        factor = const(10.0 ** abs(decimals))
        there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
        return apply(back, _round(apply(there, x, factor)), factor)
    down, half = apply("floor", x), const(0.5)
    rest = apply("sub", x, down)
    is_odd = apply("ne", apply("mul", apply("floor", apply("mul", down, half)), const(2.0)), down)
    up = apply("or", apply("lt", half, rest), apply("and", apply("eq", rest, half), is_odd))
    return where(up, apply("add", down, ONE), down)


def _binary(op: str) -> Rule:
    def rule(get: Get, dtype: DType, x: Any, y: Any, *, alpha: float = 1) -> Node:
        right = get(y, dtype)
        if dtype == "bool":
            return apply(_OF_BOOLS[op], get(x, dtype), right)
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
        a, b = _in_type_of(get, y, get(x), x), _in_type_of(get, x, get(y), y)
        wide = next(it for it in _WIDEST if it in (a.dtype, b.dtype))
        if wide == "bool" and op in ("lt", "le"):
            wide = "i32"
        a, b = cast(a, wide), cast(b, wide)
        return apply(op, b, a) if swapped else apply(op, a, b)

    return rule


def _in_type_of(get: Get, other: Any, node: Node, value: Any) -> Node:
    """The node of one operand: a Python integer beside a tensor of integers is one of its dtype."""
    if isinstance(value, int) and not isinstance(value, bool):
        dtype = get(other).dtype
        return get(value, dtype) if dtype in BITS else node
    return node


def _logical(op: str) -> Rule:
    return lambda get, dtype, x, y: apply(op, _truth(get(x)), _truth(get(y)))


def _truth(x: Node) -> Node:
    return x if x.dtype == "bool" else apply("ne", x, const(0, x.dtype))


def _divide(get: Get, dtype: DType, x: Any, y: Any, *, rounding_mode: str | None = None) -> Node:
    a, b = get(x, dtype), get(y, dtype)
    if rounding_mode is None:
        return apply("div", a, b)
    if dtype != "f32":
        return _of_integers("floordiv" if rounding_mode == "floor" else "quotient", a, b)
    return _floor_of_quotient(a, b) if rounding_mode == "floor" else _trunc(apply("div", a, b))


def _of_integers(op: str, a: Node, b: Node) -> Node:
    if is_const(b, 0):
        raise NoRuleError("an integer and 0; allowed any other divisor")
    return apply(op, a, b)


def _floor_of_quotient(a: Node, b: Node) -> Node:
    """``a // b`` of floats: as in Python, what the remainder leaves, not the floor of the rounded quotient."""
    rest = apply("fmod", a, b)
    quotient = apply("div", apply("sub", a, rest), b)
    quotient = where(_is_of_other_sign(rest, b), apply("sub", quotient, ONE), quotient)
    down = apply("floor", quotient)
    down = where(apply("lt", const(0.5), apply("sub", quotient, down)), apply("add", down, ONE), down)
    return where(apply("eq", b, ZERO), apply("div", a, b), down)


def _is_of_other_sign(rest: Node, b: Node) -> Node:
    """True for a remainder that is not zero, and whose sign is not that of the divisor."""
    differ = apply("ne", apply("lt", rest, ZERO), apply("lt", b, ZERO))
    return apply("and", apply("ne", rest, ZERO), differ)


def _remainder(get: Get, dtype: DType, x: Any, y: Any) -> Node:
    a, b = get(x, dtype), get(y, dtype)
    if dtype != "f32":
        return _of_integers("mod", a, b)
    rest = apply("fmod", a, b)
    return where(_is_of_other_sign(rest, b), apply("add", rest, b), rest)


def _fmod(get: Get, dtype: DType, x: Any, y: Any) -> Node:
    a, b = get(x, dtype), get(y, dtype)
    return apply("fmod", a, b) if dtype == "f32" else _of_integers("remainder", a, b)


def _sign(get: Get, dtype: DType, x: Any) -> Node:
    it, zero = get(x, dtype), const(0, dtype)
    if dtype == "bool":
        return it
    return where(apply("lt", zero, it), const(1, dtype), where(apply("lt", it, zero), const(-1, dtype), zero))


def _shift(get: Get, dtype: DType, x: Any, y: Any) -> Node:
    """``x >> y``; by as many bits as there are, or by fewer than none, nothing but the sign is left."""
    if dtype not in BITS:
        raise NoRuleError(f"{dtype}; allowed integers")
    it, by, last = get(x, dtype), get(y, dtype), const(BITS[dtype] - 1, dtype)
    outside = apply("or", apply("lt", by, const(0, dtype)), apply("lt", last, by))
    return apply("shr", it, where(outside, last, by))


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
        "fmod": _fmod,
        "minimum": _binary("min"),
        "maximum": _binary("max"),
        "clamp": _clamp,
        "clamp_min": _clamp,
        "clamp_max": lambda get, dtype, x, high: _clamp(get, dtype, x, None, high),
        "relu": _relu,
        **{
            op: _unary(op)
            for op in ("neg", "exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "erf", "tanh", "sigmoid")
        },
        "abs": lambda get, dtype, x: get(x, dtype) if dtype == "bool" else apply("abs", get(x, dtype)),
        "floor": _rounding(_floor),
        "ceil": _rounding(_ceil),
        "trunc": _rounding(_trunc),
        "round": _rounding(_round),
        **dict.fromkeys(("sign", "sgn"), _sign),
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
        **dict.fromkeys(("bitwise_right_shift", "__rshift__"), _shift),
        "where": lambda get, dtype, condition, x, y: where(get(condition, "bool"), get(x, dtype), get(y, dtype)),
        "masked_fill": lambda get, dtype, x, condition, value: where(
            get(condition, "bool"), get(value, dtype), get(x, dtype)
        ),
        **dict.fromkeys(("_to_copy", "to", "clone", "alias", "detach", "lift_fresh", "lift_fresh_copy"), _same),
        "scalar_tensor": _same,
        "full": lambda get, dtype, size, value, **_: get(value, dtype),
        "full_like": lambda get, dtype, x, value, **_: get(value, dtype),
        "new_full": lambda get, dtype, x, size, value, **_: get(value, dtype),
        **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _filled(0)),
        **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(1)),
    }
)
"""Operators outside this table are tried as PyTorch decomposes them into others."""
