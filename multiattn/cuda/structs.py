"""C structs as the headers write them: `ctypes` mirrors are read from there, so that each is described once."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from multiattn.plan.abi import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES

TENSOR_MAP = ctypes.c_ubyte * TENSOR_MAP_BYTES
"""The field of a ``TensorMap``: its alignment counts when a struct with one is padded."""

_TYPES: Mapping[str, Any] = {
    "int": ctypes.c_int32,
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "std::int32_t": ctypes.c_int32,
    "std::int64_t": ctypes.c_int64,
    "std::uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "TensorMap": TENSOR_MAP,
}
_STRUCT = re.compile(r"^struct (\w+) \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)
_DECLARATION = re.compile(r"(?:const )?([\w:]+)\b(\*?) ([^;=()]+);")


def read_structs(header: Path) -> dict[str, type[ctypes.Structure]]:
    """The structs of plain data that a header defines, by name; a later one may hold earlier ones.

    KeyError for a field of a type that is neither theirs nor known here.
    """
    made: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCT.findall(re.sub(r"//[^\n]*", "", header.read_text())):
        made[name] = struct_of(name, list(_fields(body, {**_TYPES, **made})))
    return made


def struct_of(name: str, fields: Sequence[tuple[str, Any]]) -> type[ctypes.Structure]:
    """A struct of these fields, padded as C++ pads it: where one has a tensor map, to the alignment of that."""
    size = ctypes.sizeof(type(name, (ctypes.Structure,), {"_fields_": fields}))
    padding = [("_padding", ctypes.c_ubyte * (-size % TENSOR_MAP_ALIGNMENT))] if any(map(_has_map, fields)) else []
    return type(name, (ctypes.Structure,), {"_fields_": [*fields, *padding]})


def _has_map(field: tuple[str, Any]) -> bool:
    kind = field[1]
    return kind is TENSOR_MAP or any(map(_has_map, getattr(kind, "_fields_", ())))


def _fields(body: str, types: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for kind, pointer, declared in _DECLARATION.findall(body):
        for name, count in re.findall(r"(\w+)(?:\[(\d+)\])?", declared):
            it = ctypes.c_void_p if pointer else types[kind]
            yield name, it * int(count) if count else it
