"""Integers as kernels compute them: how large they get, and divisions that every language rounds alike.

Languages agree on quotients of numbers that are not negative. C rounds others to zero, Python and cuTile round them
down, and -2^31 has no absolute value. So divisions are written with what they agree on. Integers wrap around, as in
PyTorch: a sign counts as known only where the expression provably stays in its type.
"""

from __future__ import annotations

from collections.abc import Callable

from multiattn.score.arithmetic import BITS
from multiattn.score.expression import Node, apply, cast, const, walk, where

LONGEST = 2**24
"""The largest position that counts here. Longer sequences are refused where a program multiplies integers."""

Range = tuple[int, int]


def limits(node: Node) -> Range:
    """The least and the largest value of an integer's type, or of a bool's."""
    half = 1 << (BITS[node.dtype] - 1) if node.dtype in BITS else 0
    return (-half, half - 1) if half else (0, 1)


def range_of(root: Node) -> Range:
    """The least and the largest value that an integer expression can have, both included."""
    found: dict[Node, Range] = {}
    for node in walk(root):
        if node.dtype == "f32":
            continue
        low, high = limits(node)
        exact = _exact_range(node, [found.get(it, limits(it)) for it in node.args])
        found[node] = exact if exact is not None and low <= exact[0] and exact[1] <= high else (low, high)
    return found[root]


def may_wrap(node: Node) -> bool:
    """True for a sum, difference or product of integers that may leave its type."""
    if node.op not in ("add", "sub", "mul", "neg") or node.dtype not in BITS:
        return False
    exact = _exact_range(node, [range_of(it) for it in node.args])
    low, high = limits(node)
    return exact is None or exact[0] < low or exact[1] > high


def _exact_range(node: Node, ranges: list[Range]) -> Range | None:
    """The range of an operation that does not wrap around, of its arguments'; None where it is the type's own."""
    if node.op == "const":
        return int(node.value), int(node.value)
    if node.op == "input":
        return 0, LONGEST
    if node.op in ("cast", "abs", "neg", "shr") and node.args[0].dtype == "f32":
        return None
    if node.op == "where":
        return min(ranges[1][0], ranges[2][0]), max(ranges[1][1], ranges[2][1])
    if not ranges or node.op == "load":
        return None
    low, high = ranges[0]
    if node.op == "cast":
        return low, high
    if node.op == "neg":
        return -high, -low
    if node.op == "abs":
        return 0 if low <= 0 <= high else min(abs(low), abs(high)), max(abs(low), abs(high))
    if len(ranges) < 2:
        return None
    return _of_two(node.op, low, high, *ranges[1])


def _of_two(op: str, low: int, high: int, least: int, most: int) -> Range | None:
    corners = [low * least, low * most, high * least, high * most]
    natural = low >= 0 and least >= 0
    ranges: dict[str, Range] = {
        "add": (low + least, high + most),
        "sub": (low - most, high - least),
        "mul": (min(corners), max(corners)),
        "min": (min(low, least), min(high, most)),
        "max": (max(low, least), max(high, most)),
    }
    if natural:
        ranges |= {"quotient": (0, high), "floordiv": (0, high), "shr": (0, high), "and": (0, min(high, most))}
        ranges |= dict.fromkeys(("remainder", "mod"), (0, min(high, max(most - 1, 0))))
    return ranges.get(op)


def is_natural(node: Node) -> bool:
    """True for an integer that cannot be negative: a count or a position, and what keeps their sign."""
    if node.op == "const":
        return bool(node.value >= 0)
    keeps = node.op in ("add", "mul", "min", "max", "quotient", "remainder", "shr", "cast")
    from_integers = keeps and node.dtype != "f32" and all(it.dtype != "f32" and is_natural(it) for it in node.args)
    is_one = (node.op == "input" and node.dtype == "i32") or from_integers or node.dtype == "bool"
    return is_one and range_of(node)[0] >= 0


# ---------------------------------------------------------------- divisions


def mod(x: Node, y: Node) -> Node:
    """Python's remainder, of any language's: it has the sign of the divisor."""
    if y.op == "const" and y.value in (1, -1):
        return const(0, x.dtype)  # of -2^31 by -1 a processor has no quotient
    rest = apply("remainder", x, y)
    if is_natural(x) and is_natural(y):
        return rest
    zero = const(0, x.dtype)
    differ = apply("ne", apply("lt", rest, zero), apply("lt", y, zero))
    return where(apply("and", apply("ne", rest, zero), differ), apply("add", rest, y), rest)


def floordiv(x: Node, y: Node) -> Node:
    """Python's quotient, rounded down."""
    if is_natural(x) and is_natural(y):
        return apply("quotient", x, y)
    if y.op == "const" and y.value == -1:
        return apply("neg", x)
    (low, high), size = range_of(x), max(map(abs, range_of(y)))
    if low - size >= limits(x)[0] and high + size <= limits(x)[1]:
        return apply("quotient", apply("sub", x, mod(x, y)), y)
    if y.op == "const" and y.value > 0:
        return _down(x, y)
    return _in_64_bits(floordiv, x, y) if x.dtype == "i32" else apply("quotient", apply("sub", x, mod(x, y)), y)


def quotient(x: Node, y: Node) -> Node:
    """C's quotient, rounded to zero."""
    if is_natural(x) and is_natural(y):
        return apply("quotient", x, y)
    if y.op == "const" and y.value == -1:
        return apply("neg", x)
    if x.dtype == "i32" and min(range_of(x)[0], range_of(y)[0]) == limits(x)[0]:
        if y.op == "const" and y.value > 0:
            return _down(apply("add", x, apply("and", _signs(x), const(y.value - 1, x.dtype))), y)
        return _in_64_bits(quotient, x, y)
    zero = const(0, x.dtype)
    size = apply("quotient", apply("abs", x), apply("abs", y))
    return where(apply("ne", apply("lt", x, zero), apply("lt", y, zero)), apply("neg", size), size)


def remainder(x: Node, y: Node) -> Node:
    """C's remainder: it has the sign of the number that is divided."""
    if is_natural(x) and is_natural(y):
        return apply("remainder", x, y)
    if y.op == "const" and y.value in (1, -1):
        return const(0, x.dtype)
    return apply("sub", x, apply("mul", quotient(x, y), y))


def _signs(x: Node) -> Node:
    """-1 for negative numbers, else 0."""
    return apply("shr", x, const(BITS[x.dtype] - 1, x.dtype))


def _down(x: Node, y: Node) -> Node:
    """The quotient by a positive number, rounded down: of ``-1 - x`` for negative numbers, and -1 minus that."""
    signs = _signs(x)
    return apply("xor", apply("quotient", apply("xor", x, signs), y), signs)


def _in_64_bits(form: Callable[[Node, Node], Node], x: Node, y: Node) -> Node:
    return cast(form(cast(x, "i64"), cast(y, "i64")), "i32")
