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
_ASSUME = re.compile(r"%(\w+) = assume [^%]*%(\w+) :")
_OPERATION = re.compile(r"%(\w+) = (\w+) (.*?) :")
_NAME = re.compile(r"%(\w+)")
_SAME = ("assume", "reshape", "broadcast", "exti")
"""Operations that leave a number what it is."""
_VIEW = re.compile(r"make_tensor_view %(\w+), shape = \[([^\]]*)\], strides = \[([^\]]*)\]")


def bind(plan: Plan, image: abi.Image = IMAGE, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel.
        emitted: what the kernel's code is specialised on; None while it is being emitted.
    """
    (launch,) = launches_of(plan, emitted=emitted)
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
    views = _VIEW.findall(text)
    if not views:
        raise ValueError("arrays: the Tile IR has none")
    names = dict(_ASSUME.findall(text))
    for view in views:
        _prove_view(binding, names, *view)
    if any(
        isinstance(it, abi.Pointer) and (it.tensor or "").startswith((CAPTURED, DCAPTURED)) for it in binding.arguments
    ):
        _prove_gathers(binding, text)


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


def _prove_view(binding: abi.Binding, names: dict[str, str], pointer: str, shape: str, strides: str) -> None:
    """ValueError where what Tile IR takes for an array's extents and strides is something else in the Binding."""
    place = _argument(names, pointer)
    numbers = [*shape.split(", "), *strides.split(", ")]
    for index, text in enumerate(numbers, place + 1):
        argument = binding.arguments[index] if index < len(binding.arguments) else None
        if not isinstance(argument, abi.Number):
            raise ValueError(f"arrays: argument {index} is {argument}; the Tile IR has {text} there")
        theirs, ours = (_argument(names, text[1:]), index) if text.startswith("%") else (int(text), argument.value)
        if theirs != ours:
            raise ValueError(f"arrays: argument {index} is {argument}; the Tile IR has {text} there")


def _argument(names: dict[str, str], name: str) -> int:
    """The place of the parameter that a value is, but for what is assumed of it."""
    while name in names:
        name = names[name]
    return int(name.removeprefix("arg"))


# ---------------------------------------------------------------- gathers


_Operations = dict[str, tuple[str, str]]
"""The operation that makes each value, and its operands."""


def _prove_gathers(binding: abi.Binding, text: str) -> None:
    """ValueError where what a gather takes for its array's strides is something else in the Binding.

    It adds up a product for each dimension, of an index and a stride, and the sum to the address.
    """
    made: _Operations = {}  # a loop's values may have the names of another's: what counts is the latest
    for name, operation, operands in _OPERATION.findall(text):
        made[name] = (operation, operands)
        if operation == "offset":
            address, offset = _NAME.findall(operands)
            terms = list(_terms(made, offset))
            place = int(_source(made, address).removeprefix("arg"))
            theirs = [_source(made, _NAME.findall(made[it][1])[-1]) for it in terms]
            for axis, stride in enumerate(theirs, place + 1 + len(terms)):
                argument = binding.arguments[axis]
                if stride not in (f"arg{axis}", str(getattr(argument, "value", None))):
                    raise ValueError(f"gathers: argument {axis} is {argument}; the Tile IR has {stride} there")


def _source(made: _Operations, name: str) -> str:
    """The parameter that a value is, or the number."""
    while name in made:
        operation, operands = made[name]
        if operation == "constant":
            return operands.rstrip(">").rpartition(" ")[2]
        if operation not in _SAME:
            raise ValueError(f"gathers: the Tile IR has %{name}, {operation} {operands}; allowed a parameter")
        name = _NAME.findall(operands)[-1]
    return name


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
