"""A Binding held against the Tile IR that went into a cubin: a launch that would differ is an error."""

from __future__ import annotations

import re

from multiattn.cutile.table import EXTENTS, STRIDES, KernelLaunch
from multiattn.plan import abi

_TEXT_SECTION = ".nv.tileir.debug_txt"
_TYPES = {"bf16": "bf16", "fp16": "f16"}
_VECTORS = ("lse", "dlse", "delta")
_FP32 = (*_VECTORS, "dq_sum")

_PARAMETER = re.compile(r"%arg\d+: tile<([^>]*>?)>")
_DIVISIBLE = re.compile(r"= assume div_by<(\d+)>, %arg(\d+) :")
_ASSUME = re.compile(r"%(\w+) = assume [^%]*%(\w+) :")
_VIEW = re.compile(r"make_tensor_view %(\w+), shape = \[([^\]]*)\], strides = \[([^\]]*)\]")


def tile_ir(cubin: bytes) -> str:
    """The Tile IR that tileiras keeps in a cubin as text; ValueError where there is none."""
    found = [content for name, content in abi.sections(cubin).items() if name.startswith(_TEXT_SECTION)]
    if len(found) != 1:
        raise ValueError(f"cubin: got {len(found)} sections {_TEXT_SECTION}; allowed one")
    return found[0].rstrip(b"\0").decode()


def bind_proven(launch: KernelLaunch, text: str, entry: abi.Entry) -> abi.Binding:
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
    ours = [_type_of(argument, binding.constants["dtype"]) for argument in binding.arguments]
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


def _type_of(argument: abi.Argument, dtype: str) -> str:
    """The type of an argument as Tile IR has it."""
    if isinstance(argument, abi.Pointer):
        return f"ptr<{'f32' if argument.tensor in _FP32 else _TYPES[dtype]}>"
    assert isinstance(argument, abi.Number)
    return argument.kind


def _divisors(binding: abi.Binding) -> set[tuple[int, int]]:
    """(place of an argument, what it is a multiple of) for all that the constants tell."""
    constants = binding.constants
    found = set()
    for place, argument in enumerate(binding.arguments):
        if isinstance(argument, abi.Pointer):
            rank = 3 if argument.tensor in _VECTORS else 4
            places = [place, *range(place + 1, place + 1 + len(EXTENTS)), *range(place + 1 + rank, place + 2 * rank)]
            for where, what in zip(places, ("alignment", *EXTENTS, *STRIDES[: rank - 1]), strict=True):
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
