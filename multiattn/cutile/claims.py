"""The claims of a cubin's Tile IR on its parameters, which a Binding is held against. Pure Python."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from multiattn.operands import has_any_shape
from multiattn.packed import TILE_LISTS
from multiattn.plan import abi

_TEXT_SECTION = ".nv.tileir.debug_txt"
_PARAMETER = re.compile(r"%arg\d+: tile<([^>]*>?)>")
_DIVISIBLE = re.compile(r"= assume div_by<(\d+)>, %arg(\d+) :")
_OPERATION = re.compile(r"%(\w+) = (\w+) (.*?) :")
_NAME = re.compile(r"%(\w+)")
_SAME = ("assume", "reshape", "broadcast", "exti")
"""Operations that leave a number what it is."""
_VIEW = re.compile(r"%(\w+), shape = \[([^\]]*)\], strides = \[([^\]]*)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """All that a kernel takes its parameters for. Places count from 0."""

    types: tuple[str, ...]
    multiples: frozenset[tuple[int, int]]
    """(place, what the number there is taken for a multiple of)."""
    numbers: tuple[tuple[int, str], ...]
    """(place, what is used where this extent or stride belongs): ``arg`` and a place, or a number."""


def tile_ir(cubin: bytes) -> str:
    """The Tile IR that tileiras keeps in a cubin as text; ValueError where there is none."""
    found = [content for name, content in abi.sections(cubin).items() if name.startswith(_TEXT_SECTION)]
    if len(found) != 1:
        raise ValueError(f"cubin: got {len(found)} sections {_TEXT_SECTION}; allowed one")
    return found[0].rstrip(b"\0").decode()


@functools.lru_cache(maxsize=256)
def read_claims(text: str, tensors: tuple[str | None, ...]) -> Claims:
    """The claims of a kernel's Tile IR, `tensors` the operand at each place; ValueError for what is not understood.

    They are the same for calls of all sizes that share the code, so the text is read once. An array is a view. One that
    is only gathered from is an address, to which an offset is added.
    """
    made: _Operations = {}  # a loop's values may have the names of another's: what counts is the latest
    numbers: list[tuple[int, str]] = []
    for name, operation, operands in _OPERATION.findall(text):
        made[name] = (operation, operands)
        if operation == "make_tensor_view":
            numbers += _of_view(made, operands)
        elif operation == "offset" and _is_gathered(tensors, made, operands):
            numbers += _of_gather(made, operands)
    if not numbers:
        raise ValueError("arrays: the Tile IR has none")
    return Claims(
        types=tuple(_PARAMETER.findall(text[: text.index("{")])),
        multiples=frozenset((int(place), int(divisor)) for divisor, place in _DIVISIBLE.findall(text)),
        numbers=tuple(dict.fromkeys(numbers)),
    )


_Operations = dict[str, tuple[str, str]]
"""The operation that makes each value, and its operands."""


def _of_view(made: _Operations, operands: str) -> Iterator[tuple[int, str]]:
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
    place = _place(made, pointer)
    for axis, text in enumerate([*extents, *steps]):
        index = place + 1 + axis
        yield index, f"arg{index}" if axis in cut else _number(made, text)


def _kind_of(made: _Operations, text: str) -> str:
    """The operation that makes a value; nothing for a parameter or a number."""
    return made.get(_origin(made, text[1:]), ("", ""))[0] if text.startswith("%") else ""


def _number(made: _Operations, text: str) -> str:
    """The parameter that a value is, or a number, written as one or a value."""
    return _source(made, text[1:]) if text.startswith("%") else text


# ---------------------------------------------------------------- gathers


def _is_gathered(tensors: Sequence[str | None], made: _Operations, operands: str) -> bool:
    """True for an offset into an array that is gathered from or scattered to, and no part of one."""
    place = _place(made, _NAME.findall(operands)[0])
    tensor = tensors[place] if place < len(tensors) else None
    return tensor is not None and (has_any_shape(tensor) or tensor in TILE_LISTS)


def _of_gather(made: _Operations, operands: str) -> Iterator[tuple[int, str]]:
    """An offset is the sum of a product for each dimension, of an index and a stride."""
    address, offset = _NAME.findall(operands)
    terms = list(_terms(made, offset))
    first = _place(made, address) + 1 + len(terms)
    yield from ((first + axis, _source(made, _NAME.findall(made[it][1])[-1])) for axis, it in enumerate(terms))


def _place(made: _Operations, name: str) -> int:
    """The place of the parameter that a value is."""
    return int(_source(made, name).removeprefix("arg"))


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
