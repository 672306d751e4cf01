"""Bounds of a mask over blocks of queries and keys: of which blocks it shows all, nothing, or a part.

A subexpression of queries alone, or of keys alone, is computed at each of their positions; a block has its least and
its largest value. One of both has bounds by interval arithmetic, and a comparison of bounds tells what a block shows,
in three-valued logic. What bounds leave open is for the caller to compute. Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from multiattn.score.arithmetic import BITS
from multiattn.score.eager import evaluate, places_of
from multiattn.score.expression import Node, read, walk
from multiattn.score.integers import LONGEST, limits, may_wrap, range_of
from multiattn.score.program import BoundScore

AXES = ("q", "kv")


class Grid(NamedTuple):
    """The scores of a mask in blocks; those at the end of a sequence may be cut."""

    shape: tuple[int, int, int, int]
    """``[B, H, Sq, Skv]``."""
    sizes: tuple[int, int]
    """Queries and keys of a block."""
    device: torch.device

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        rows, columns = (-(-length // size) for length, size in zip(self.shape[2:], self.sizes, strict=True))
        return rows, columns


class Seen(NamedTuple):
    """The parts of each block that a mask shows, as bools ``[B|1, H|1, rows|1, columns|1]`` in two pairs.

    Where both of a pair are false, bounds do not tell.
    """

    some: torch.Tensor
    none: torch.Tensor
    every: torch.Tensor
    flaw: torch.Tensor
    """Not every score is seen."""
    is_exact: bool
    """One of each pair is true in every block: a matter of the expression, not of values."""
    axes: frozenset[str]
    """The `AXES` that it depends on."""

    def __invert__(self) -> Seen:
        return Seen(self.flaw, self.every, self.none, self.some, self.is_exact, self.axes)

    def __and__(self, other: Seen) -> Seen:
        is_apart = self.axes.isdisjoint(other.axes)
        some = (self.every & other.some) | (self.some & other.every)
        return Seen(
            self.some & other.some if is_apart else some,
            self.none | other.none,
            self.every & other.every,
            self.flaw | other.flaw,
            self.is_exact and other.is_exact and is_apart,
            self.axes | other.axes,
        )

    def __or__(self, other: Seen) -> Seen:
        return ~(~self & ~other)


class Interval(NamedTuple):
    """The least and the largest value in each block, shaped as those of `Seen`: integers as int64, floats as fp32.

    A NaN bounds nothing: every comparison with it is false.
    """

    low: torch.Tensor
    high: torch.Tensor
    is_tight: bool
    """Both are values of the block, in every block."""
    is_dense: bool
    """So is every integer in between."""


class Term(NamedTuple):
    """``q * q_idx + kv * kv_idx + rest``, of factors -1, 0 and 1; the rest is one number for each b and h."""

    q: int
    kv: int
    rest: torch.Tensor | int


class Limit(NamedTuple):
    """A term without its rest, from `low` to `high`; None is no limit."""

    factors: tuple[int, int]
    low: torch.Tensor | int | None
    high: torch.Tensor | int | None


def seen_by_bounds(root: Node, bound: BoundScore, grid: Grid) -> Seen:
    """The parts of each block that a mask shows, as far as bounds tell; a cut block is what is left of it."""
    return _Bounds(root, bound, grid).seen(root)


class _Bounds:
    def __init__(self, root: Node, bound: BoundScore, grid: Grid) -> None:
        self.bound, self.grid, self.places = bound, grid, places_of(grid.shape, grid.device)
        self.axes: dict[Node, frozenset[str]] = {}
        for node in walk(root):
            own = {node.value} & {*AXES} if node.op == "input" else set[str]()
            self.axes[node] = frozenset(own).union(*(self.axes[it] for it in node.args))
        self.is_short = max(grid.shape[2:]) <= LONGEST  # what `may_wrap` holds for
        self.interval, self.seen = functools.cache(self._interval), functools.cache(self._seen)

    # ------------------------------------------------------------ one axis, or none

    def _values(self, node: Node) -> torch.Tensor:
        """An expression of one axis at most, at each of its places."""
        value = evaluate(node, self.bound, self.places, torch.float32)
        return value if value.dim() else value.view(1, 1, 1, 1)

    def _ends(self, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the largest value of each block."""
        value = self._values(node)
        value = value if value.dtype == torch.float32 else value.to(torch.int64)
        for dim, size in zip((2, 3), self.grid.sizes, strict=True):
            if AXES[dim - 2] in self.axes[node]:
                cut = -value.shape[dim] % size
                last = value.narrow(dim, value.shape[dim] - 1, 1)
                value = torch.cat((value, last.expand([cut if it == dim else -1 for it in range(4)])), dim)
                blocks = value.unflatten(dim, (-1, size))
                return blocks.amin(dim + 1), blocks.amax(dim + 1)
        return value, value

    # ------------------------------------------------------------ numbers

    def _interval(self, node: Node) -> Interval | None:
        """Bounds of a number; None where nothing is known."""
        axes = self.axes[node]
        if len(axes) < len(AXES):
            is_integer = node.dtype in BITS
            return Interval(*self._ends(node), True, is_integer and self._is_steady(node))
        if node.op == "cast" and node.args[0].dtype == "bool":
            seen = self.seen(node.args[0])
            is_float = node.dtype == "f32"
            low, high = (it.to(torch.float32 if is_float else torch.int64) for it in (seen.every, ~seen.none))
            return Interval(low, high, seen.is_exact, seen.is_exact and not is_float)
        rule = _RULES.get(node.op)
        numbers = [self.interval(it) for it in node.args if it.dtype != "bool"]
        known = [it for it in numbers if it is not None]
        if node.op == "where" and len(known) == 2:
            return self._selected(node, *known)
        if rule is None or len(known) < len(numbers):
            return None
        found = rule(node, *known)
        if found is None:
            return None
        low, high, is_tight, is_dense = found
        is_apart = sum(len(self.axes[it]) for it in node.args) == len(axes)
        is_tight, is_dense = is_apart and is_tight, is_apart and is_dense
        if node.dtype == "f32":  # nothing is known of what infinities, and NaN, leave
            is_finite = functools.reduce(torch.logical_and, (it.isfinite() for pair in known for it in pair[:2]))
            nan = low.new_full((), torch.nan)
            return Interval(torch.where(is_finite, low, nan), torch.where(is_finite, high, nan), is_tight, False)
        if self._stays(node):
            return Interval(low, high, is_tight, is_dense)
        least, most = limits(node)
        if node.op == "cast":
            ends: tuple[torch.Tensor, torch.Tensor] = low, high
        else:  # int64 may have wrapped around itself
            wide = (Interval(it.low.double(), it.high.double(), False, False) for it in known)
            ends = rule(node, *wide)[:2]  # type: ignore[index]  # it gave bounds of these before
        most_here = min(most, 2**62)
        is_inside = (ends[0] >= -most_here) & (ends[1] <= most_here)
        low, high = (torch.where(is_inside, it, torch.full_like(it, end)) for it, end in ((low, least), (high, most)))
        return Interval(low, high, False, False)

    def _stays(self, node: Node) -> bool:
        """True for an operation of integers that provably stays in its type."""
        if node.op in ("cast", "abs"):
            (low, high), (least, most) = range_of(node.args[0]), limits(node)
            is_inside = low >= least + (node.op == "abs") and high <= most
            return is_inside and (self.is_short or node.dtype == "i64")
        return node.op not in ("add", "sub", "mul", "neg") or (self.is_short and not may_wrap(node))

    def _is_steady(self, node: Node) -> bool:
        """True for an integer that changes by one at most from a position to the next."""
        moving = [it for it in node.args if self.axes[it]]
        if node.op == "input" or not self.axes[node]:
            return True
        if node.op not in _STEADY or len(moving) != 1 or node.args[0].dtype not in BITS or not self._stays(node):
            return False
        is_division = node.op in ("floordiv", "quotient", "shr")
        return self._is_steady(moving[0]) and (not is_division or _is_divisor(node.args[-1]))

    def _selected(self, node: Node, x: Interval, y: Interval) -> Interval:
        condition, _, _ = node.args
        if self.axes[condition]:
            return Interval(torch.minimum(x.low, y.low), torch.maximum(x.high, y.high), False, False)
        low, high = (torch.where(self._values(condition), *it) for it in ((x.low, y.low), (x.high, y.high)))
        return Interval(low, high, x.is_tight and y.is_tight, x.is_dense and y.is_dense)

    # ------------------------------------------------------------ bools

    def _seen(self, node: Node) -> Seen:
        """The parts of each block that a bool shows."""
        axes = self.axes[node]
        if len(axes) < len(AXES):
            low, high = (it.bool() for it in self._ends(node))
            return Seen(high, ~high, low, ~low, True, axes)
        if node.op == "not":
            return ~self.seen(node.args[0])
        if node.op == "and":
            return self._all_of(node)
        if node.op == "or":
            return functools.reduce(Seen.__or__, map(self.seen, _joined(node)))
        if node.op in ("xor", "eq", "ne") and node.args[0].dtype == "bool":
            x, y = map(self.seen, node.args)
            differ = (x & ~y) | (~x & y)
            return ~differ if node.op == "eq" else differ
        if node.op == "where":
            condition, x, y = map(self.seen, node.args)
            if condition.axes:
                return (condition & x) | (~condition & y)
            some, none, every, flaw = (torch.where(condition.some, *it) for it in zip(x[:4], y[:4], strict=True))
            return Seen(some, none, every, flaw, x.is_exact and y.is_exact, axes)
        if node.op in ("lt", "le", "eq", "ne"):
            return self._compared(node, axes)
        return self._unknown

    @functools.cached_property
    def _unknown(self) -> Seen:
        nothing = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=self.grid.device)
        return Seen(*(nothing,) * 4, False, frozenset(AXES))

    def _compared(self, node: Node, axes: frozenset[str]) -> Seen:
        x, y = map(self.interval, node.args)
        if x is None or y is None:
            return self._unknown
        is_tight = x.is_tight and y.is_tight and self.axes[node.args[0]].isdisjoint(self.axes[node.args[1]])
        is_integer = node.args[0].dtype in BITS
        if node.op in ("lt", "le"):
            less, no_less = (torch.lt, torch.ge) if node.op == "lt" else (torch.le, torch.gt)
            every, none = less(x.high, y.low), no_less(x.low, y.high)
            some, flaw = (less(x.low, y.high), no_less(x.high, y.low)) if is_tight else (every, none)
            return Seen(some, none, every, flaw, is_tight and is_integer, axes)
        every = (x.low == x.high) & (y.low == y.high) & (x.low == y.low)
        none = (x.high < y.low) | (y.high < x.low)
        some, flaw, is_exact = every, none, False
        if is_tight and is_integer:
            flaw, is_exact = ~every, x.is_dense and y.is_dense
            some = ~none if is_exact else functools.reduce(torch.logical_or, self._meetings(x, y))
        equal = Seen(some, none, every, flaw, is_exact, axes)
        return equal if node.op == "eq" else ~equal

    @staticmethod
    def _meetings(x: Interval, y: Interval) -> list[torch.Tensor]:
        """Where an end of one is a value of the other."""
        found = [one == other for one, other in itertools.product(x[:2], y[:2])]
        for dense, other in ((x, y), (y, x)):
            if dense.is_dense:
                found += [(dense.low <= end) & (end <= dense.high) for end in other[:2]]
        return found

    # ------------------------------------------------------------ bands: several limits of one term

    def _all_of(self, node: Node) -> Seen:
        """All of the conditions that are joined by `and`; limits of one term are one condition, which is exact."""
        limits_of: dict[tuple[int, int], list[Limit]] = {}
        found = list[Seen]()
        for it in _joined(node):
            if (limit := self._limit(it)) is not None:
                limits_of.setdefault(limit.factors, []).append(limit)
            else:
                found.append(self.seen(it))
        found += [self._within(factors, its) for factors, its in limits_of.items()]
        found.sort(key=lambda it: len(it.axes))  # of queries alone and of keys alone come first: these are exact
        return functools.reduce(Seen.__and__, found)

    def _within(self, factors: tuple[int, int], its: list[Limit]) -> Seen:
        low = high = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=self.grid.device)
        for name, factor in zip(AXES, factors, strict=True):
            if factor:
                ends = self._ends(read(name))
                low, high = low + factor * ends[factor < 0], high + factor * ends[factor > 0]
        every, none = torch.ones_like(low, dtype=torch.bool), torch.zeros_like(low, dtype=torch.bool)
        for it, other in itertools.product(its, its):
            if it.low is not None and other.high is not None:
                none = none | (it.low > other.high)
        for it in its:
            if it.low is not None:
                every, none = every & (low >= it.low), none | (high < it.low)
            if it.high is not None:
                every, none = every & (high <= it.high), none | (low > it.high)
        axes = frozenset(name for name, factor in zip(AXES, factors, strict=True) if factor)
        return Seen(~none, none, every, ~every, True, axes)

    def _limit(self, node: Node) -> Limit | None:
        """A comparison of integers as a limit of a term; None for one that is none."""
        op, args = node.op, node.args
        if op == "not" and args[0].op in ("lt", "le"):
            op, args = {"lt": "le", "le": "lt"}[args[0].op], args[0].args[::-1]
        if op not in ("lt", "le", "eq") or args[0].dtype not in BITS:
            return None
        is_size = args[0].op == "abs" and not self.axes[args[1]] and op != "eq"
        left, right = self._term(args[0].args[0] if is_size else args[0]), self._term(args[1])
        if left is None or right is None:
            return None
        most = right.rest - int(op == "lt")
        q, kv = left.q - right.q, left.kv - right.kv
        low = -most - left.rest if is_size else most - left.rest if op == "eq" else None
        high: torch.Tensor | int | None = most - left.rest
        if q < 0 or (q == 0 and kv < 0):
            q, kv, low, high = -q, -kv, None if high is None else -high, None if low is None else -low
        return Limit((q, kv), low, high) if (q or kv) and max(q, abs(kv)) == 1 else None

    def _term(self, node: Node) -> Term | None:
        """An integer as a term; None for another, and for one that may wrap around."""
        if not self.axes[node]:
            if node.op == "const":
                return Term(0, 0, int(node.value)) if abs(node.value) <= LONGEST**2 else None
            return Term(0, 0, self._values(node).to(torch.int64)) if node.dtype == "i32" else None
        if node.op == "input":
            return Term(int(node.value == "q"), int(node.value == "kv"), 0)
        if node.op not in ("add", "sub", "neg", "cast") or node.args[0].dtype not in BITS or not self._stays(node):
            return None
        terms = [self._term(it) for it in node.args]
        known = [it for it in terms if it is not None]
        if len(known) < len(terms):
            return None
        if node.op == "cast":
            return known[0]
        x, y = known if node.op != "neg" else (Term(0, 0, 0), *known)
        sign = 1 if node.op == "add" else -1
        return Term(x.q + sign * y.q, x.kv + sign * y.kv, x.rest + sign * y.rest)


def _joined(node: Node) -> list[Node]:
    """The bools that an `and`, or an `or`, and those inside it join."""
    rest, found = [node], list[Node]()
    while rest:
        it = rest.pop()
        (rest if it.op == node.op else found).extend(it.args if it.op == node.op else (it,))
    return found


# ---------------------------------------------------------------- interval arithmetic

Ends = tuple[torch.Tensor, torch.Tensor, bool, bool]


def _of_corners(operation: Callable[..., torch.Tensor]) -> Callable[..., Ends]:
    def rule(node: Node, x: Interval, y: Interval) -> Ends:
        corners = [operation(*it) for it in itertools.product(x[:2], y[:2])]
        low, high = functools.reduce(torch.minimum, corners), functools.reduce(torch.maximum, corners)
        return low, high, x.is_tight and y.is_tight, False

    return rule


def _rising(operation: Callable[..., torch.Tensor]) -> Callable[..., Ends]:
    """An operation of one or two that rises with each of them, by one at most where integers do."""

    def rule(node: Node, *given: Interval) -> Ends:
        low, high = (operation(*(it[end] for it in given)) for end in (0, 1))
        return low, high, all(it.is_tight for it in given), all(it.is_dense for it in given)

    return rule


def _negated(node: Node, x: Interval) -> Ends:
    return -x.high, -x.low, x.is_tight, x.is_dense


def _difference(node: Node, x: Interval, y: Interval) -> Ends:
    return x.low - y.high, x.high - y.low, x.is_tight and y.is_tight, x.is_dense and y.is_dense


def _size(node: Node, x: Interval) -> Ends:
    least, most = torch.minimum(x.low.abs(), x.high.abs()), torch.maximum(x.low.abs(), x.high.abs())
    return torch.where((x.low < 0) & (x.high > 0), 0, least), most, x.is_dense, x.is_dense


def _converted(node: Node, x: Interval) -> Ends | None:
    if node.args[0].dtype not in BITS:
        return None  # a float may be beyond every integer
    dtype = torch.float32 if node.dtype == "f32" else torch.int64
    return x.low.to(dtype), x.high.to(dtype), x.is_tight, x.is_dense


_STEADY = frozenset(("add", "sub", "neg", "cast", "min", "max", "floordiv", "quotient", "shr"))


def _is_divisor(node: Node) -> bool:
    return node.op == "const" and 0 < node.value <= LONGEST


def _divided(rounding_mode: str) -> Callable[..., Ends | None]:
    def rule(node: Node, x: Interval, y: Interval) -> Ends | None:
        if not _is_divisor(node.args[1]):
            return None
        low, high = (torch.div(it, node.args[1].value, rounding_mode=rounding_mode) for it in x[:2])
        return low, high, x.is_tight, x.is_dense

    return rule


def _shifted(node: Node, x: Interval, y: Interval) -> Ends | None:
    by = node.args[1]
    if by.op != "const" or not 0 <= by.value < BITS[node.dtype]:
        return None
    return x.low >> by.value, x.high >> by.value, x.is_tight, x.is_dense


def _rest(node: Node, x: Interval, y: Interval) -> Ends | None:
    """A remainder, of which the last bits are one. A dense interval that passes a multiple has both 0 and the most."""
    divisor = node.args[1]
    if not _is_divisor(divisor) or (node.op == "and" and divisor.value & (divisor.value + 1)):
        return None
    size = divisor.value + (node.op == "and")
    first, last = (torch.div(it, size, rounding_mode="floor") for it in x[:2])
    passes = first != last
    low, high = (torch.where(passes, end, it - size * first) for end, it in ((0, x.low), (size - 1, x.high)))
    return low, high, x.is_dense, False


def _quotient(node: Node, x: Interval, y: Interval) -> Ends | None:
    by = node.args[1]
    if by.op != "const" or by.value == 0:
        return None
    low, high = (it / y.low for it in (x[:2] if by.value > 0 else x[1::-1]))
    return low, high, x.is_tight, False


_RULES: Mapping[str, Callable[..., Ends | None]] = MappingProxyType(
    {
        "add": _rising(torch.add),
        "sub": _difference,
        "neg": _negated,
        "abs": _size,
        **dict.fromkeys(("mul", "mul_rn"), _of_corners(torch.mul)),
        **dict.fromkeys(("div", "div_rn"), _quotient),
        "min": _rising(torch.minimum),
        "max": _rising(torch.maximum),
        "floor": _rising(torch.floor),
        "cast": _converted,
        "floordiv": _divided("floor"),
        "quotient": _divided("trunc"),
        "shr": _shifted,
        **dict.fromkeys(("mod", "and"), _rest),
    }
)
"""Bounds of an operation by those of what it is of, taken to be of different axes; None where nothing is known."""
