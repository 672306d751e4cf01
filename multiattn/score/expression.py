"""Expressions over one score: immutable nodes, built with constants folded, and their derivatives.

A node is interned: two that are equal are one object, in every expression of the process, and it goes when nothing
holds it any more. Every floating-point node is "f32", whatever a tensor's own dtype: kernels compute in fp32.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from multiattn.score.arithmetic import BITS, COMPARISONS, DType, Number, fold, in_fp32, wrapped

INPUTS: Mapping[str, DType] = MappingProxyType(
    {"score": "f32", "raw": "f32", "lse": "f32", **dict.fromkeys(("b", "h", "q", "kv", "seq_q", "seq_kv"), "i32")}
)
"""Everything that an expression can read: `score` is ``scale * q.k``, `raw` is ``q.k``; `b` and `h` count batch entries
and query heads, `q` and `kv` positions in sequences of `seq_q` queries and `seq_kv` keys. `lse` is a row's, in the log2
domain, and only kernels read it."""


class Node:
    """An operation on nodes. Equal nodes are the same object; make them with the functions of this module.

    `value` is the number of a ``const``, the name of an ``input`` or of a runtime ``scalar``, the slot of the tensor
    that a ``load`` reads (its arguments are the indices), and the name of a ``derived`` number, which a kernel takes.
    """

    __slots__ = ("__weakref__", "args", "dtype", "op", "value")
    op: str
    dtype: DType
    args: tuple[Node, ...]
    value: Any

    def __init__(self, op: str, dtype: DType, args: tuple[Node, ...], value: Any) -> None:
        for name, it in zip(("op", "dtype", "args", "value"), (op, dtype, args, value), strict=True):
            object.__setattr__(self, name, it)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a node is immutable: {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.op, self.dtype, self.args, self.value)

    def __repr__(self) -> str:
        inside = [*map(repr, self.args), *([] if self.value is None else [repr(self.value)])]
        return f"{self.op}({', '.join(inside)})"


_interned: WeakValueDictionary[tuple[Any, ...], Node] = WeakValueDictionary()
_interning = threading.Lock()


def make(op: str, dtype: DType, args: tuple[Node, ...] = (), value: Any = None) -> Node:
    """The node as it is asked for, nothing folded."""
    key = (op, dtype, args, repr(value))  # repr: NaN equals itself, and -0.0 is not 0.0
    with _interning:
        node = _interned.get(key)
        if node is None:
            node = _interned[key] = Node(op, dtype, args, value)
        return node


def const(value: Number, dtype: DType = "f32") -> Node:
    """A number that is part of the code."""
    convert: Callable[[Number], Number] = bool if dtype == "bool" else float if dtype == "f32" else int
    return make("const", dtype, (), convert(value))


def read(name: str) -> Node:
    """One of `INPUTS`."""
    return make("input", INPUTS[name], (), name)


def scalar(name: str) -> Node:
    """An fp32 number that each call has anew."""
    return make("scalar", "f32", (), name)


def load(slot: int, dtype: DType, indices: Sequence[Node]) -> Node:
    """The element of a captured tensor. An index below 0 counts from the end; one outside is clamped."""
    return make("load", dtype, tuple(indices), slot)


ZERO, ONE = const(0.0), const(1.0)

# ---------------------------------------------------------------- folding


def is_const(node: Node, value: Number) -> bool:
    """True for the constant `value`."""
    return node.op == "const" and bool(node.value == value)


def cast(x: Node, dtype: DType) -> Node:
    """`x` as a number of another type; a float becomes an integer by cutting off its fraction."""
    if x.dtype == dtype:
        return x
    if x.op != "const":
        return make("cast", dtype, (x,))
    if x.dtype == "f32" and dtype in BITS:  # what is outside the type is a kernel's to convert
        cut = math.trunc(in_fp32(x.value)) if math.isfinite(in_fp32(x.value)) else 1 << 64
        return const(cut, dtype) if wrapped(cut, dtype) == cut else make("cast", dtype, (x,))
    return const(wrapped(x.value, dtype) if dtype in BITS else x.value, dtype)


def where(condition: Node, x: Node, y: Node) -> Node:
    """`x` where the condition is true, else `y`."""
    if condition.op == "const":
        return x if condition.value else y
    return x if x is y else make("where", x.dtype, (condition, x, y))


def apply(op: str, *args: Node) -> Node:
    """An operation of `UNARY` or `BINARY`. What is folded changes no result, the sign of a zero aside.

    Constants are folded in doubles, which a kernel's language rounds once. Integers wrap around.
    """
    dtype: DType = "bool" if op in COMPARISONS else args[0].dtype
    if all(it.op == "const" for it in args):
        folded = fold(op, [it.value for it in args])
        if folded is not None:
            return const(wrapped(int(folded), dtype) if dtype in BITS else folded, dtype)
    if op in COMPARISONS and args[0] is args[1] and args[0].dtype != "f32":  # NaN is not what it is
        return const(op in ("le", "eq"), "bool")
    simpler = _SIMPLER.get(op)
    found = simpler(*args) if simpler else None
    return found if found is not None else make(op, dtype, args)


def apply_in_fp32(op: str, *args: Node) -> Node:
    """`apply`, with constants folded to what PyTorch gives: each number and each result is one of fp32."""
    if not all(it.op == "const" and it.dtype == "f32" for it in args):
        return apply(op, *args)
    found = apply(op, *(const(in_fp32(it.value)) for it in args))
    return const(in_fp32(found.value)) if found.op == "const" and found.dtype == "f32" else found


def _add(a: Node, b: Node) -> Node | None:
    if is_const(a, 0):
        return b
    if is_const(b, 0):
        return a
    return apply("sub", a, b.args[0]) if b.op == "neg" else None


def _sub(a: Node, b: Node) -> Node | None:
    if is_const(b, 0):
        return a
    if is_const(a, 0):
        return apply("neg", b)
    return apply("add", a, b.args[0]) if b.op == "neg" else None


def _mul(a: Node, b: Node) -> Node | None:
    if a.op == "const" and b.op != "const":
        return apply("mul", b, a)
    if is_const(b, 1):
        return a
    if is_const(b, -1):
        return apply("neg", a)
    return b if is_const(b, 0) and b.dtype != "f32" else None  # of inf it would be NaN


def _shift_or_mask(op: str) -> Callable[[Node, Node], Node | None]:
    def simpler(a: Node, b: Node) -> Node | None:
        if b.op != "const" or b.value <= 0 or b.value & (b.value - 1):
            return None
        if op == "floordiv":  # both round down, whatever the sign
            return a if b.value == 1 else make("shr", a.dtype, (a, const(b.value.bit_length() - 1, a.dtype)))
        return apply("and", a, const(b.value - 1, a.dtype))

    return simpler


def _logic(op: str) -> Callable[[Node, Node], Node | None]:
    def simpler(a: Node, b: Node) -> Node | None:
        if a.dtype != "bool":
            return None
        for x, y in ((a, b), (b, a)):
            if x.op == "const":
                return y if x.value == (op == "and") else x
        return a if a is b else None

    return simpler


_SIMPLER: Mapping[str, Callable[..., Node | None]] = MappingProxyType(
    {
        "add": _add,
        "sub": _sub,
        "mul": _mul,
        "div": lambda a, b: a if is_const(b, 1) else None,
        "ne": lambda a, b: a if b.dtype == "bool" and is_const(b, False) else None,
        "neg": lambda a: a.args[0] if a.op == "neg" else None,
        "not": lambda a: a.args[0] if a.op == "not" else None,
        "floordiv": _shift_or_mask("floordiv"),
        "mod": _shift_or_mask("mod"),
        "and": _logic("and"),
        "or": _logic("or"),
    }
)


# ---------------------------------------------------------------- walks


def walk(*roots: Node) -> Iterator[Node]:
    """Every node of these expressions once, arguments first."""
    seen: set[Node] = set()
    for root in roots:
        stack = [(root, iter(root.args))]
        while stack:
            node, rest = stack[-1]
            if node in seen:
                stack.pop()
                continue
            argument = next((it for it in rest if it not in seen), None)
            if argument is not None:
                stack.append((argument, iter(argument.args)))
            else:
                seen.add(node)
                stack.pop()
                yield node


def rebuild(node: Node, args: Sequence[Node]) -> Node:
    """The operation of a node on other arguments, folded."""
    if tuple(args) == node.args:
        return node
    if node.op == "where":  # one of two like values is there to have as many of them as of its condition
        return make("where", node.dtype, tuple(args)) if node.args[1] is node.args[2] else where(*args)
    if node.op == "cast":
        return cast(args[0], node.dtype)
    return load(node.value, node.dtype, args) if node.op == "load" else apply(node.op, *args)


def replace(root: Node, changes: Mapping[Node, Node]) -> Node:
    """The expression with nodes exchanged for others."""
    made = dict(changes)
    for node in walk(root):
        if node not in made:
            made[node] = rebuild(node, [made[it] for it in node.args])
    return made[root]


def inputs_of(root: Node) -> frozenset[str]:
    """The names of the inputs that an expression depends on."""
    return frozenset(it.value for it in walk(root) if it.op == "input")


# ---------------------------------------------------------------- derivatives


def derivative(root: Node, seed: Node) -> Node:
    """``d root / d seed`` of an f32 expression; `seed` is the input `score` or a load.

    It goes forwards from the seed, so that a ``where`` selects after the slopes of its branches: an infinite slope of
    the branch not taken is dropped, where reverse mode has ``0 * inf``. At a tie ``min`` and ``max`` have the slope of
    their first argument, and ``abs`` has none at zero.
    """
    slopes = {seed: ONE}
    for node in walk(root):
        if node not in slopes:
            own = [slopes[it] for it in node.args]
            rule = _SLOPES.get(node.op)
            moves = node.dtype == "f32" and rule is not None and any(it is not ZERO for it in own)
            slopes[node] = rule(node, *own) if moves and rule is not None else ZERO
    return slopes[root]


def _times(slope: Node, factor: Node) -> Node:
    """A product that is zero where the slope is constant zero, whatever the factor."""
    if slope is ZERO:
        return ZERO
    return factor if slope is ONE else apply("mul", slope, factor)


def _over(slope: Node, divisor: Node) -> Node:
    return ZERO if slope is ZERO else apply("div", slope, divisor)


def _slope_of_smaller(op: str) -> Callable[[Node, Node, Node], Node]:
    def rule(node: Node, da: Node, db: Node) -> Node:
        a, b = node.args
        return where(apply("le", a, b) if op == "min" else apply("le", b, a), da, db)

    return rule


def _slope_of_abs(node: Node, da: Node) -> Node:
    (a,) = node.args
    negative = where(apply("lt", a, ZERO), apply("neg", da), ZERO)
    return where(apply("lt", ZERO, a), da, negative)


def _slope_of_fmod(node: Node, da: Node, db: Node) -> Node:
    a, b = node.args  # a - b * trunc(a / b)
    return apply("sub", da, _times(db, apply("div", apply("sub", a, node), b)))


def _bell(x: Node) -> Node:
    """The derivative of erf."""
    return apply("mul", apply("exp", apply("neg", apply("mul", x, x))), const(2.0 / math.sqrt(math.pi)))


_SLOPES: Mapping[str, Callable[..., Node]] = MappingProxyType(
    {
        "add": lambda n, da, db: apply("add", da, db),
        "sub": lambda n, da, db: apply("sub", da, db),
        **dict.fromkeys(
            ("mul", "mul_rn"), lambda n, da, db: apply("add", _times(da, n.args[1]), _times(db, n.args[0]))
        ),
        **dict.fromkeys(
            ("div", "div_rn"),
            lambda n, da, db: apply("sub", _over(da, n.args[1]), _times(db, apply("div", n, n.args[1]))),
        ),
        "fmod": _slope_of_fmod,
        "min": _slope_of_smaller("min"),
        "max": _slope_of_smaller("max"),
        "where": lambda n, dc, da, db: where(n.args[0], da, db),
        "neg": lambda n, da: apply("neg", da),
        "abs": _slope_of_abs,
        "exp": lambda n, da: _times(da, n),
        "exp2": lambda n, da: _times(da, apply("mul", n, const(math.log(2)))),
        "log": lambda n, da: _over(da, n.args[0]),
        "log2": lambda n, da: _over(da, apply("mul", n.args[0], const(math.log(2)))),
        **dict.fromkeys(("sqrt", "sqrt_rn"), lambda n, da: _over(da, apply("mul", n, const(2.0)))),
        "sin": lambda n, da: _times(da, apply("cos", n.args[0])),
        "cos": lambda n, da: _times(da, apply("neg", apply("sin", n.args[0]))),
        "erf": lambda n, da: _times(da, _bell(n.args[0])),
        "tanh": lambda n, da: _times(da, apply("sub", ONE, apply("mul", n, n))),
        "sigmoid": lambda n, da: _times(da, apply("mul", n, apply("sub", ONE, n))),
    }
)
"""Slopes by operation, of a node and of the slopes of its arguments; all other operations are constant in between."""
