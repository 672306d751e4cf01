"""Dataclasses from JSON, each field checked: what a file holds may come from anywhere."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from multiattn.plan.backend import Variant
from multiattn.plan.config import Config

_RENAMED = {"occupancy": "blocks_per_sm", "num_worker_warps": "warps"}
"""Fields by the names that they had, which a user's measurements and emitted kernels may have."""
_NESTED = "dq"
"""A record whose fields stood beside the others, behind its name and an underscore where both kernels have one."""
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1

Record = TypeVar("Record")


def config_of(value: object, variant: Variant) -> Config | None:
    """The config of an entry, of the variant's own kind; None only for a variant that has no configs."""
    if variant.rules:
        kind: type[Config] = type(variant.rules[0].config)
        return record_of(kind, value, "config")
    if value is not None:
        raise ValueError(f"config: got {value!r}; allowed null: {variant.name} has none")
    return None


def record_of(kind: type[Record], value: object, what: str) -> Record:
    """A dataclass from its fields by name; ValueError for other names, types, or numbers that no field holds.

    `what` names the value in errors. Whole numbers are from 0 on, of 31 bits, and of 63 bits in a tuple.
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    if not isinstance(value, dict):
        raise ValueError(f"{what}: got {value!r}; allowed a record")
    given = {str(it if it in names else _RENAMED.get(it, it)): value[it] for it in value}
    if _NESTED not in given and is_dataclass(nested := hints.get(_NESTED)):
        theirs = {it.name: it.default for it in fields(nested)}
        own = [it for it in given if it not in names and it.removeprefix(f"{_NESTED}_") in {*theirs, *_RENAMED}]
        if own:
            tiles = {it: theirs[it] for it in ("tile_m", "tile_n") if theirs[it] is not MISSING}  # they never varied
            given[_NESTED] = {**tiles, **{it.removeprefix(f"{_NESTED}_"): given.pop(it) for it in own}}
    if absent := sorted(set(names) - set(given)):
        raise ValueError(f"{what}: got no {', '.join(absent)}; allowed {', '.join(names)}")
    if more := sorted(set(given) - set(names)):
        raise ValueError(f"{what}: got {', '.join(more)}; allowed {', '.join(names)}")
    return kind(**{name: value_of(hints[name], given[name], f"{what}: {name}") for name in names})


def value_of(hint: Any, value: Any, what: str, largest: int = _INT32_MAX) -> Any:
    """A value of a type; ValueError as `record_of`. `Any` is left to the caller."""
    if hint is Any:
        return value
    if is_dataclass(hint):
        return record_of(typing.cast("type[Any]", hint), value, what)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if value is not None and origin in (typing.Union, types.UnionType) and is_dataclass(arguments[0]):
        return value_of(arguments[0], value, what)  # a record or None
    if origin is tuple:
        if not isinstance(value, list) or (Ellipsis not in arguments and len(value) != len(arguments)):
            raise ValueError(f"{what}: got {value!r}; allowed {hint}")
        return tuple(value_of(arguments[0], it, what, _INT64_MAX) for it in value)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{what}: got {value!r}; allowed a record")
        return {name: value_of(arguments[1], it, f"{what}: {name}") for name, it in value.items()}
    fits = value in arguments if origin is typing.Literal else type(value) in (arguments or (hint,))  # a bool is no int
    if not fits:
        raise ValueError(f"{what}: got {value!r}; allowed {hint}")
    if type(value) is int and not 0 <= value <= largest:
        raise ValueError(f"{what}: got {value}; allowed 0 to {largest}")
    return value
