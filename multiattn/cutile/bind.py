"""Bindings: of a forward for the tensors at hand, and held against the Tile IR of a cubin. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multiattn.cutile.arrays import STRIDES, VECTORS, extents_of
from multiattn.cutile.claims import read_claims
from multiattn.cutile.families import launches_of
from multiattn.cutile.launches import IMAGE, KernelLaunch
from multiattn.plan import abi
from multiattn.plan.backend import Plan

_TYPES = {
    **{"bf16": "bf16", "fp16": "f16"},
    **{"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "float8_e4m3fn": "f8E4M3FN"},
    **{"int8": "i8", "uint8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "bool": "i1"},
}
"""The types of problems' dtypes, and of those of captured tensors."""
_FP32 = (*VECTORS, "dq_sum", "dk_shares", "dv_shares", "partial_out", "sinks")


def bind(plan: Plan, image: abi.Image = IMAGE, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel.
        emitted: what the kernel's code is specialised on; None while it is being emitted.
    """
    *_, launch = launches_of(plan, emitted=emitted)  # of a packed batch behind that of its list
    return replace(launch.binding, image=image)


# ---------------------------------------------------------------- held against what tileiras was given


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
    arguments = binding.arguments
    claims = read_claims(text, tuple(getattr(argument, "tensor", None) for argument in arguments))
    ours = tuple(_type_of(argument, binding.constants) for argument in arguments)
    if ours != claims.types:
        raise ValueError(f"parameters: got {ours}; the Tile IR has {claims.types}")
    if unknown := claims.multiples - _divisors(binding):
        raise ValueError(f"multiples: the Tile IR assumes {sorted(unknown)}, argument and divisor, which nothing tells")
    for place, theirs in claims.numbers:
        argument = arguments[place] if place < len(arguments) else None
        if not isinstance(argument, abi.Number) or theirs not in (f"arg{place}", str(argument.value)):
            raise ValueError(f"arrays: argument {place} is {argument}; the Tile IR has {theirs} there")


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
