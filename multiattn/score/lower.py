"""A program as kernels compute it: from ``q.k`` to scores in the log2 domain, with all that a host can do done there.

- The input is `raw`, ``q.k`` without the scale, which is a runtime scalar; the result is the score times ``log2(e)``.
- Exponentials and logarithms are those to base 2, and ``tanh(x)`` is ``1 - 2 / (exp2(2 log2(e) x) + 1)``: absolute
  error about 2^-23 and three instructions fewer than a library's. With `approximate` it is the GPU's own instruction
  (``tanh.approx.f32``), whose relative error is up to 2^-11: about that of fp16, and more than that of tf32.
- What depends on runtime scalars and constants alone is a *derived scalar*: Python computes it at each call, in fp64.
  So a softcap costs a product, a tanh and another product, whatever the scale.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from multiattn.score import integers
from multiattn.score.arithmetic import BINARY, UNARY
from multiattn.score.discrete import with_rounding
from multiattn.score.expression import (
    ONE,
    ZERO,
    Node,
    apply,
    cast,
    const,
    derivative,
    inputs_of,
    load,
    make,
    read,
    rebuild,
    replace,
    scalar,
    walk,
    where,
)
from multiattn.score.program import ScoreProgram

LOG2_E = math.log2(math.e)
SCALE = "scale"
"""The name of the softmax scale among runtime scalars."""

Kind = Literal["f32", "pointer", "stride", "size"]


class AuxField(NamedTuple):
    """One value that a kernel takes for a program.

    A derived scalar (``f32``), the address of the tensor in `slot` (``pointer``), or its stride in elements or its size
    at `axis`, both integers.
    """

    name: str
    kind: Kind
    slot: int = -1
    axis: int = -1


class LoadSlope(NamedTuple):
    """How a modified score moves with an element of a captured tensor."""

    load: Node
    slope: Node
    """``d modified score / d load``, without a unit of its own."""
    is_exclusive: bool
    """No two scores read one element, so that a gradient is stored and needs no atomic addition."""

    @property
    def summed(self) -> tuple[str, ...]:
        """The positions, of ``q`` and ``kv``, on which the element does not depend: a tile adds up over them first."""
        used = inputs_of(self.load)
        return tuple(it for it in ("q", "kv") if it not in used)


@dataclass(frozen=True, kw_only=True)
class LoweredScore:
    """The expressions of a program's functions, of inputs and `fields`. Scores are in the log2 domain."""

    program: ScoreProgram
    approximate: bool
    apart: bool
    """Each score has an element of its own in a gradient, ``[B, Hq, Sq, Skv]``, for somebody to add up."""
    exponents: bool
    """There is also a function of what a weight is a power of: the score less its row's lse."""
    score: Node | None
    """A function of `raw`; None where the program leaves scores as they are."""
    mask: Node | None
    tail: Node | None
    """How many keys at the end the mask may hide, a derived scalar; None: any."""
    slope: Node
    """``d modified score / d score``: 1 where the program only adds."""
    load_slopes: tuple[LoadSlope, ...]
    """One for each load of a floating-point tensor that the score depends on."""
    derived: tuple[Node, ...]
    """The derived scalars ``x0``, ``x1``, ... in order, as expressions of runtime scalars and constants."""

    @functools.cached_property
    def fields(self) -> tuple[AuxField, ...]:
        """Everything that the functions read beside their place, in the order of kernels' arguments.

        Derived scalars ``x0``...; then of each tensor its address ``tensor0``, the strides ``tensor0_stride1`` of
        dimensions that are indexed by more than a constant 0, and the sizes ``tensor0_size1`` of those with a computed
        index.
        """
        scalars = [AuxField(name=f"x{place}", kind="f32") for place in range(len(self.derived))]
        return (*scalars, *self._fields_of(self.program.loads, "tensor"))

    @functools.cached_property
    def _host_steps(self) -> tuple[tuple[Node, ...], ...]:
        return tuple(tuple(walk(it)) for it in self.derived)

    @property
    def functions(self) -> tuple[tuple[str, tuple[Node, ...]], ...]:
        """The functions of the program, each with what it returns."""
        found: list[tuple[str, tuple[Node, ...]]] = []
        if self.score is not None:
            found += [("score", (self.score,)), ("score_and_slope", (self.score, self.slope))]
        if self.score is not None and self.exponents:
            found += [("exponent_and_slope", (_less_lse(self.score), self.slope))]
        found += [(name, (root,)) for name, root in (("mask", self.mask), ("tail", self.tail)) if root is not None]
        return tuple(found)

    def gradients_of(self, slots: Sequence[int]) -> tuple[LoadSlope, ...]:
        """The loads that give the gradients of the tensors in `slots`, indexed as these gradients are."""
        found = tuple(it for it in self.load_slopes if it.load.value in slots)
        if not self.apart:
            return found
        place = load(0, "f32", [read(name) for name in ("b", "h", "q", "kv")])
        indices = _load(place, place.args).args
        return tuple(LoadSlope(load=rebuild(it.load, indices), slope=it.slope, is_exclusive=True) for it in found)

    def gradient_fields(self, slots: Sequence[int]) -> tuple[AuxField, ...]:
        """The fields of the gradients of the tensors in `slots`: ``grad0``, ``grad0_stride1``, as in `fields`."""
        loads = [it.load for it in self.gradients_of(slots)]
        return tuple(it for it in self._fields_of(loads, "grad") if it.kind != "size")

    def _fields_of(self, loads: Sequence[Node], name: str) -> Iterator[AuxField]:
        for slot in sorted({it.value for it in loads}):
            yield AuxField(name=f"{name}{slot}", kind="pointer", slot=slot)
            for axis in range(next(len(it.args) for it in loads if it.value == slot)):
                indices = [it.args[axis] for it in loads if it.value == slot]
                if not all(map(is_zero, indices)):
                    yield AuxField(name=f"{name}{slot}_stride{axis}", kind="stride", slot=slot, axis=axis)
                if any(map(is_computed, indices)):
                    yield AuxField(name=f"{name}{slot}_size{axis}", kind="size", slot=slot, axis=axis)

    def derived_values(self, scalars: Mapping[str, float], scale: float) -> tuple[float, ...]:
        """The derived scalars of a call, in order."""
        known = {**scalars, SCALE: scale}
        return tuple(_on_host(steps, known) for steps in self._host_steps)


def is_zero(index: Node) -> bool:
    """True for the index of a broadcast dimension."""
    return index.op == "const" and index.value == 0


def is_computed(index: Node) -> bool:
    """True for an index that may lie outside: no constant, and not just the batch entry, head or position."""
    return index.op not in ("const", "input")


def _on_host(steps: Sequence[Node], scalars: Mapping[str, float]) -> float:
    """The last of these nodes, each of which has its arguments before it."""
    values: dict[Node, Any] = {}
    for node in steps:
        if node.op == "const":
            values[node] = node.value
        elif node.op == "scalar":
            values[node] = scalars[node.value]
        else:
            values[node] = (UNARY.get(node.op) or BINARY[node.op])(*(values[it] for it in node.args))
    return float(values[steps[-1]])


# ---------------------------------------------------------------- lowering


@functools.lru_cache(maxsize=256)
def lower(
    program: ScoreProgram, *, approximate: bool = False, apart: bool = False, exponents: bool = False
) -> LoweredScore:
    """The expressions of a kernel; `approximate` takes the GPU's own tanh, see above; others: see `LoweredScore`."""
    made: dict[Node, Node] = {}

    def kernel_form(root: Node) -> Node:
        for node in walk(root):
            if node not in made:
                made[node] = _kernel_form(node, [made[it] for it in node.args], approximate)
        return made[root]

    score, mask, slope = None, None, ONE
    loads: list[Node] = []
    slopes: list[Node] = []
    if program.mask is not None:
        mask = kernel_form(with_rounding(program.mask))
    if program.score is not None:
        modified = with_rounding(program.score)
        score = _in_log2(kernel_form(modified))
        if "raw" not in inputs_of(score):  # a kernel wants as many scores as it gave
            raw = read("raw")
            score = make("where", "f32", (apply("eq", raw, raw), score, score))
        slope = kernel_form(derivative(modified, read("score")))
        loads = [it for it in walk(modified) if it.op == "load" and it.dtype == "f32"]
        slopes = [kernel_form(derivative(modified, it)) for it in loads]
    tail = program.tail
    hoisted = _hoist([it for it in (score, mask, tail, slope, *slopes) if it is not None])
    return LoweredScore(
        program=program,
        approximate=approximate,
        apart=apart,
        exponents=exponents,
        score=None if score is None else replace(score, hoisted),
        mask=None if mask is None else replace(mask, hoisted),
        tail=None if tail is None else replace(tail, hoisted),
        slope=replace(slope, hoisted),
        load_slopes=tuple(
            LoadSlope(load=kernel_form(it), slope=replace(its, hoisted), is_exclusive=_is_exclusive(it, program.loads))
            for it, its in zip(loads, slopes, strict=True)
        ),
        derived=tuple(hoisted),
    )


def _kernel_form(node: Node, args: list[Node], approximate: bool) -> Node:
    """One node, of arguments that have their form already."""
    if node is read("score"):
        return _times(read("raw"), scalar(SCALE))
    if node.op == "load":
        return _load(node, args)
    if node.op in ("tanh", "sigmoid"):
        rules = _APPROXIMATE if approximate else _EXACT
        return rules[node.op](*args)
    rule = _FORMS.get(node.op)
    return rule(*args) if rule is not None and args[0].dtype == node.dtype else rebuild(node, args)


def _is_exclusive(load: Node, loads: Sequence[Node]) -> bool:
    indices = {it.value for it in load.args if it.op == "input"}
    return indices == {"b", "h", "q", "kv"} and [it.value for it in loads].count(load.value) == 1


def _load(node: Node, indices: Sequence[Node]) -> Node:
    """A load that stays inside its tensor, whatever a tile has beyond the ends of its sequences."""
    inside = []
    for axis, index in enumerate(indices):
        if index.op == "input" and index.value in ("q", "kv"):
            length = read(f"seq_{index.value}")
            inside.append(apply("min", index, apply("sub", length, const(1, "i32"))))
        elif is_computed(index):
            size = cast(make("derived", "i32", (), f"tensor{node.value}_size{axis}"), index.dtype)
            zero = const(0, index.dtype)
            if not integers.is_natural(index):
                wrapped = where(apply("lt", index, zero), apply("add", index, size), index)
                index = apply("max", wrapped, zero)
            inside.append(apply("min", index, apply("sub", size, const(1, index.dtype))))
        else:
            inside.append(index)
    return load(node.value, node.dtype, inside)


def _is_on_host(node: Node) -> bool:
    return all(it.op in ("const", "scalar") or (it.args and it.op not in ("load", "cast")) for it in walk(node))


def _times(x: Node, factor: Node) -> Node:
    """A product with what a host knows, merged with such factors of `x`."""
    if _is_on_host(x):
        return _host_product(x, factor)
    if x.op == "neg":
        return _times(x.args[0], apply("neg", factor))
    if x.op == "mul" and _is_on_host(x.args[1]):
        return apply("mul", x.args[0], _host_product(x.args[1], factor))
    return apply("mul", x, factor)


def _host_product(x: Node, y: Node) -> Node:
    for ratio, divisor in ((x, y), (y, x)):
        if ratio.op == "div" and ratio.args[1] is divisor:
            return ratio.args[0]
    return apply("mul", x, y)


def _mul(x: Node, y: Node) -> Node:
    if x.dtype == "f32":
        for factor, other in ((y, x), (x, y)):
            if _is_on_host(factor):
                return _times(other, factor)
    return apply("mul", x, y)


def _div(x: Node, y: Node) -> Node:
    divides = _is_on_host(y) and not is_zero(y)
    return _times(x, apply("div", ONE, y)) if divides else apply("div", x, y)


def _exp(x: Node) -> Node:
    return apply("exp2", _times(x, const(LOG2_E)))


def _exact_tanh(x: Node) -> Node:
    power = apply("exp2", _times(x, const(2 * LOG2_E)))
    return apply("sub", ONE, apply("div", const(2.0), apply("add", power, ONE)))


def _exact_sigmoid(x: Node) -> Node:
    return apply("div", ONE, apply("add", _exp(apply("neg", x)), ONE))


def _tanh_of_half(x: Node) -> Node:
    half = const(0.5)
    return apply("add", _times(apply("tanh", _times(x, half)), half), half)


def _fmod(x: Node, y: Node) -> Node:
    """C's remainder of floats, of what has no sign: of others the languages have other ones."""
    size = make("fmod", "f32", (apply("abs", x), apply("abs", y)))
    return where(apply("lt", x, ZERO), apply("neg", size), size)


def _polynomial(x: Node, coefficients: Sequence[float]) -> Node:
    """The last coefficient is that of the highest power."""
    total = const(coefficients[-1])
    for it in reversed(coefficients[:-1]):
        total = apply("add", apply("mul", total, x), const(it))
    return total


_ERF_NEAR = (1.12837911, -0.376126260, 0.112835854, -0.0268538110, 0.00518832774, -0.000801019254, 7.85385782e-05)
"""erf(x) / x as a polynomial in x * x for x up to 1: within 2e-9."""
_ERF_FAR = (
    0.000271284905, -1.62963719, -0.913543198, -0.156414945, 0.0363678276, -0.00606590075, 0.000636713832,
    -3.12875128e-05,
)  # fmt: skip
"""log2(1 - erf(x)) as a polynomial in x for x from 1 to `_ERF_IS_ONE`: within 1e-10 of erf. Both are fits to erf."""
_ERF_IS_ONE = 3.92
"""From here on the nearest fp32 number of erf is 1."""


def _erf(x: Node) -> Node:
    """erf, which not every language has: a polynomial near 0, and from 1 on 1 minus a power of two."""
    size = apply("abs", x)
    near = apply("mul", size, _polynomial(apply("mul", x, x), _ERF_NEAR))
    far = apply("sub", ONE, apply("exp2", _polynomial(apply("min", size, const(_ERF_IS_ONE)), _ERF_FAR)))
    result = where(apply("lt", size, ONE), near, far)
    return where(apply("lt", x, ZERO), apply("neg", result), result)


_FORMS: Mapping[str, Callable[..., Node]] = MappingProxyType(
    {
        "mul": _mul,
        "div": _div,
        "exp": _exp,
        "log": lambda x: _times(apply("log2", x), const(math.log(2))),
        "floordiv": integers.floordiv,
        "mod": integers.mod,
        "quotient": integers.quotient,
        "remainder": integers.remainder,
        "fmod": _fmod,
        "erf": _erf,
    }
)
_EXACT: Mapping[str, Callable[[Node], Node]] = MappingProxyType({"tanh": _exact_tanh, "sigmoid": _exact_sigmoid})
_APPROXIMATE: Mapping[str, Callable[[Node], Node]] = MappingProxyType(
    {"tanh": lambda x: apply("tanh", x), "sigmoid": _tanh_of_half}
)


def _in_log2(root: Node) -> Node:
    """The expression times ``log2(e)``. The factor goes to where it costs least, but computes nothing twice."""
    uses = Counter(argument for node in walk(root) for argument in node.args)
    factor = const(LOG2_E)

    def scaled(node: Node) -> Node:
        if uses[node] <= 1 and node.op in ("add", "sub", "min", "max", "neg"):
            return apply(node.op, *map(scaled, node.args))
        if uses[node] <= 1 and node.op == "where":
            return where(node.args[0], scaled(node.args[1]), scaled(node.args[2]))
        if node.op == "mul" and not _is_on_host(node.args[1]):
            steady, other = sorted(node.args, key=_variation)
            if _variation(steady) < _variation(other):
                return apply("mul", other, _times(steady, factor))
        return _times(node, factor)

    return scaled(root)


def _less_lse(score: Node) -> Node:
    """The score less `lse`, which goes to the term that is not of ``q.k``: the rest is one FMA."""
    lse = read("lse")
    if score.op in ("add", "sub"):
        a, b = score.args
        if "raw" not in inputs_of(b):
            return apply("sub", a, apply("sub", lse, b) if score.op == "add" else apply("add", b, lse))
        if "raw" not in inputs_of(a):
            return apply(score.op, apply("sub", a, lse), b)
    return apply("sub", score, lse)


def _variation(node: Node) -> int:
    """How many values a tile has of an expression: none but one, one a row or a column, one for each score."""
    return len(inputs_of(node) & {"q", "kv", "raw"}) + ("raw" in inputs_of(node))


def _hoist(roots: Sequence[Node]) -> dict[Node, Node]:
    """For each largest part of `roots` that a host can compute, the derived scalar that takes its place."""
    known = {it for it in walk(*roots) if it.op != "const" and _is_on_host(it)}
    used = [argument for node in walk(*roots) if node not in known for argument in node.args]
    largest = dict.fromkeys(it for it in (*used, *roots) if it in known)
    return {it: make("derived", "f32", (), f"x{place}") for place, it in enumerate(largest)}
