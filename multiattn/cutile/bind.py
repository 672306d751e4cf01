"""Bindings: of a forward for the tensors at hand, and held against the Tile IR of a cubin. Pure Python."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from multiattn.cutile.arrays import STRIDES, VECTORS, extents_of
from multiattn.cutile.configs import CutileConfig
from multiattn.cutile.table import IMAGE, KernelLaunch, launches_of
from multiattn.operands import CAPTURED, DCAPTURED
from multiattn.packed import TILE_LISTS
from multiattn.plan import abi
from multiattn.plan.backend import Plan

_TEXT_SECTION = ".nv.tileir.debug_txt"
_TYPES = {
    **{"bf16": "bf16", "fp16": "f16"},
    **{"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"},
    **{"int8": "i8", "uint8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "bool": "i1"},
}
"""The types of problems' dtypes, and of those of captured tensors."""
_FP32 = (*VECTORS, "dq_sum", "sinks")

_PARAMETER = re.compile(r"%arg\d+: tile<([^>]*>?)>")
_DIVISIBLE = re.compile(r"= assume div_by<(\d+)>, %arg(\d+) :")
_OPERATION = re.compile(r"%(\w+) = (\w+) (.*?) :")
_NAME = re.compile(r"%(\w+)")
_SAME = ("assume", "reshape", "broadcast", "exti")
"""Operations that leave a number what it is."""
_VIEW = re.compile(r"%(\w+), shape = \[([^\]]*)\], strides = \[([^\]]*)\]")


def bind(plan: Plan, image: abi.Image = IMAGE, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel.
        emitted: what the kernel's code is specialised on; None while it is being emitted.
    """
    *_, launch = launches_of(plan, emitted=emitted)  # of a packed batch behind that of its list
    return replace(launch.binding, image=image)


def for_most_heads(plan: Plan) -> Plan:
    """A forward Plan whose code is to be emitted, with no more heads together than divide both.

    Else code for 6 heads would serve multiples of 6 only, or only certain batches, and not all even numbers of heads.
    """
    config = plan.config
    assert isinstance(config, CutileConfig)
    heads_together = math.gcd(config.heads_together, plan.problem.heads_q)
    return replace(plan, config=replace(config, heads_together=heads_together))


# ---------------------------------------------------------------- held against what tileiras was given


def tile_ir(cubin: bytes) -> str:
    """The Tile IR that tileiras keeps in a cubin as text; ValueError where there is none."""
    found = [content for name, content in abi.sections(cubin).items() if name.startswith(_TEXT_SECTION)]
    if len(found) != 1:
        raise ValueError(f"cubin: got {len(found)} sections {_TEXT_SECTION}; allowed one")
    return found[0].rstrip(b"\0").decode()


def bind_proven(launch: KernelLaunch, text: str, entry: abi.KernelEntry) -> abi.Binding:
    """The Binding of a launch, held against its Tile IR and its cubin: ValueError for another."""
    binding = launch.binding
    prove(binding, text)
    abi.check(binding, entry)
    return binding


def prove(binding: abi.Binding, text: str) -> None:
    """ValueError where a Binding is not what the Tile IR of a kernel takes.

    Types of all parameters, what the compiler assumes of them, and which are the extents and strides of which array.
    """
    types = _PARAMETER.findall(text[: text.index("{")])
    ours = [_type_of(argument, binding.constants) for argument in binding.arguments]
    if ours != types:
        raise ValueError(f"parameters: got {ours}; the Tile IR has {types}")
    assumed = {(int(place), int(divisor)) for divisor, place in _DIVISIBLE.findall(text)}
    if unknown := assumed - _divisors(binding):
        raise ValueError(f"multiples: the Tile IR assumes {sorted(unknown)}, argument and divisor, which nothing tells")
    _prove_addresses(binding, text)


def _type_of(argument: abi.Argument, constants: Mapping[str, str]) -> str:
    """The type of an argument as Tile IR has it."""
    if isinstance(argument, abi.Pointer):
        dtype = constants.get(f"{argument.tensor}_dtype", constants["dtype"])
        return f"ptr<{'f32' if argument.tensor in _FP32 else _TYPES[dtype]}>"
    assert isinstance(argument, abi.Number)
    return argument.kind


def _divisors(binding: abi.Binding) -> set[tuple[int, int]]:
    """(place of an argument, what it is a multiple of) for all that the constants tell."""
    constants = binding.constants
    found = set()
    for place, argument in enumerate(binding.arguments):
        if isinstance(argument, abi.Pointer):
            extents = extents_of(argument.tensor or "")
            rank = len(extents) + (argument.tensor not in (*VECTORS, "sinks"))
            places = [place, *range(place + 1, place + 1 + len(extents)), *range(place + 1 + rank, place + 2 * rank)]
            for where, what in zip(places, ("alignment", *extents, *STRIDES[: rank - 1]), strict=True):
                found.add((where, abi.divisor(constants[f"{argument.tensor}_{what}"])))
    return found


_Operations = dict[str, tuple[str, str]]
"""The operation that makes each value, and its operands."""


def _prove_addresses(binding: abi.Binding, text: str) -> None:
    """ValueError where what is taken for an array's extents and strides is something else in the Binding.

    An array is a view. One that is only gathered from is an address, to which an offset is added.
    """
    made: _Operations = {}  # a loop's values may have the names of another's: what counts is the latest
    found = False
    for name, operation, operands in _OPERATION.findall(text):
        made[name] = (operation, operands)
        if operation == "make_tensor_view":
            found = True
            _prove_view(binding, made, operands)
        elif operation == "offset" and _is_gathered(binding, made, operands):
            found = True
            _prove_gather(binding, made, operands)
    if not found:
        raise ValueError("arrays: the Tile IR has none")


def _prove_view(binding: abi.Binding, made: _Operations, operands: str) -> None:
    """A view is of an array, or of a part of it: further on by a multiple of a stride, and of another extent."""
    match = _VIEW.match(operands)
    if match is None:
        raise ValueError(f"arrays: the Tile IR has a view of {operands}; allowed an address, extents and strides")
    pointer, shape, strides = match.groups()
    extents, steps = shape.split(", "), strides.split(", ")
    cut: set[int] = set()
    if _kind_of(made, f"%{pointer}") == "offset":
        cut = {axis for axis, it in enumerate(extents) if _kind_of(made, it) not in ("", "constant")}
        pointer, offset = _NAME.findall(made[_origin(made, pointer)][1])
        by = [_number(made, f"%{_NAME.findall(made[it][1])[-1]}") for it in _terms(made, offset)]
        if by != [_number(made, steps[axis]) for axis in cut]:
            raise ValueError(f"arrays: a part is further on by multiples of {by}; allowed strides of axes {cut}")
    place = int(_source(made, pointer).removeprefix("arg"))
    for axis, text in enumerate([*extents, *steps]):
        index = place + 1 + axis
        argument = binding.arguments[index] if index < len(binding.arguments) else None
        ours = f"arg{index}" if text.startswith("%") else str(getattr(argument, "value", None))
        if not isinstance(argument, abi.Number) or (axis not in cut and _number(made, text) != ours):
            raise ValueError(f"arrays: argument {index} is {argument}; the Tile IR has {text} there")


def _kind_of(made: _Operations, text: str) -> str:
    """The operation that makes a value; nothing for a parameter or a number."""
    return made.get(_origin(made, text[1:]), ("", ""))[0] if text.startswith("%") else ""


def _number(made: _Operations, text: str) -> str:
    """The parameter that a value is, or a number, written as one or a value."""
    return _source(made, text[1:]) if text.startswith("%") else text


# ---------------------------------------------------------------- gathers


def _is_gathered(binding: abi.Binding, made: _Operations, operands: str) -> bool:
    """True for an offset into an array that is gathered from or scattered to, and no part of one."""
    argument = binding.arguments[int(_source(made, _NAME.findall(operands)[0]).removeprefix("arg"))]
    names = (CAPTURED, DCAPTURED, *TILE_LISTS)
    return isinstance(argument, abi.Pointer) and (argument.tensor or "").startswith(names)


def _prove_gather(binding: abi.Binding, made: _Operations, operands: str) -> None:
    """An offset is the sum of a product for each dimension, of an index and a stride."""
    address, offset = _NAME.findall(operands)
    terms = list(_terms(made, offset))
    place = int(_source(made, address).removeprefix("arg"))
    theirs = [_source(made, _NAME.findall(made[it][1])[-1]) for it in terms]
    for axis, stride in enumerate(theirs, place + 1 + len(terms)):
        argument = binding.arguments[axis]
        if stride not in (f"arg{axis}", str(getattr(argument, "value", None))):
            raise ValueError(f"gathers: argument {axis} is {argument}; the Tile IR has {stride} there")


def _origin(made: _Operations, name: str) -> str:
    """The value that another one is, but for what is assumed of it and its shape."""
    while name in made and made[name][0] in _SAME:
        name = _NAME.findall(made[name][1])[-1]
    return name


def _source(made: _Operations, name: str) -> str:
    """The parameter that a value is, or the number."""
    name = _origin(made, name)
    if name not in made:
        return name
    operation, operands = made[name]
    if operation != "constant":
        raise ValueError(f"gathers: the Tile IR has %{name}, {operation} {operands}; allowed a parameter")
    return operands.rstrip(">").rpartition(" ")[2]


def _terms(made: _Operations, name: str) -> Iterator[str]:
    """The products that a value is the sum of."""
    while made[name][0] in _SAME:
        name = _NAME.findall(made[name][1])[-1]
    operation, operands = made[name]
    if operation == "addi":
        for it in _NAME.findall(operands):
            yield from _terms(made, it)
    elif operation == "muli":
        yield name
    else:
        raise ValueError(f"gathers: the Tile IR has %{name}, {operation} {operands}; allowed sums of products")
