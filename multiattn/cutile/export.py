"""A Plan's kernels compiled to run elsewhere: cubins with the compiler's remarks, Tile IR on demand.

How a forward kernel is launched is told in `multiattn.cutile.bind` without cuTile; here it is held against the Tile IR
that went into the cubin, so that an emitted kernel whose launch would differ is an error while it is emitted.
"""

from __future__ import annotations

import io
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuda.tile._cext import default_tile_context
from cuda.tile._compile import compile_cubin
from cuda.tile.compilation import export_kernel

from multiattn.cutile.bind import (
    DIAGONAL,
    EXTENTS,
    IMAGE,
    STRIDES,
    bind,
    bind_backward,
    for_most_heads,
    told_together,
)
from multiattn.cutile.compile import get_signature
from multiattn.cutile.launch import compile_limit, get_kernel
from multiattn.cutile.table import Step, steps_of
from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Exported, Plan

KINDS = ("tileir", "tileirbc")
"""Tile IR as text, and as the bytecode that tileiras takes."""

_TEXT_SECTION = ".nv.tileir.debug_txt"
_TYPES = {"bf16": "bf16", "fp16": "f16"}


def export_plan(plan: Plan, kinds: Sequence[str]) -> tuple[Exported, ...]:
    """Every kernel of a Plan, compiled afresh; of `kinds` it has `KINDS`. The compiler's own error passes through.

    A backward is one without dlse. ValueError where the Binding of a forward kernel is not what its Tile IR and its
    cubin take.
    """
    plan = for_most_heads(plan) if plan.direction == "forward" else plan
    return tuple(_export(plan, step, kinds) for step in steps_of(plan))


def _export(plan: Plan, step: Step, kinds: Sequence[str]) -> Exported:
    signature = get_signature(plan, step)
    begin = time.perf_counter()
    bytecode, cubin, remarks = compile_with_remarks(get_kernel(step), signature, plan.arch)
    seconds = time.perf_counter() - begin
    text = tile_ir(cubin)
    entry = abi.read_entry(cubin, signature.symbol)
    binding = None
    if plan.direction == "forward":
        binding = bind_proven(plan, step, signature, text, entry)
    texts = {"tileir": text.encode(), "tileirbc": bytecode}
    return Exported(
        kernel=signature.symbol,
        seconds=seconds,
        cubin=cubin,
        threads=entry.threads,
        texts={kind: texts[kind] for kind in KINDS if kind in kinds},
        remarks=remarks,
        binding=binding,
    )


def compile_with_remarks(kernel: Any, signature: Any, arch: Arch) -> tuple[bytes, bytes, str]:
    """Bytecode, cubin and remarks (YAML) of a kernel, within the limit of compilation.

    The public `export_kernel` gives a cubin without the remarks. So it makes the bytecode, and what it would call next
    is called here: of cuda-tile that is private, but it takes all flags from there. The other way, a cache folder of
    our own in whose entries cuda-tile keeps remarks, changes a setting of the whole process, and edits them.
    """
    gpu_code = arch.name.replace("sm", "sm_")
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, compile_limit():
        export_kernel(kernel, [signature], buffer, gpu_code=gpu_code, output_format="tileir_bytecode")
        source, remarks = Path(folder, "kernel.tileirbc"), Path(folder, "remarks.yaml")
        source.write_bytes(buffer.getvalue())
        cubin = compile_cubin(
            str(source),
            kernel._compiler_options,
            gpu_code,
            timeout_sec=default_tile_context.config.compiler_timeout_sec,
            remarks_output_file=remarks,
        )
        return buffer.getvalue(), Path(cubin).read_bytes(), remarks.read_text(encoding="utf-8", errors="replace")


def tile_ir(cubin: bytes) -> str:
    """The Tile IR that tileiras keeps in a cubin as text; ValueError where there is none."""
    found = [content for name, content in abi.sections(cubin).items() if name.startswith(_TEXT_SECTION)]
    if len(found) != 1:
        raise ValueError(f"cubin: got {len(found)} sections {_TEXT_SECTION}; allowed one")
    return found[0].rstrip(b"\0").decode()


# ---------------------------------------------------------------- the proof

_PARAMETER = re.compile(r"%arg\d+: tile<([^>]*>?)>")
_DIVISIBLE = re.compile(r"= assume div_by<(\d+)>, %arg(\d+) :")
_ASSUME = re.compile(r"%(\w+) = assume [^%]*%(\w+) :")
_VIEW = re.compile(r"make_tensor_view %(\w+), shape = \[([^\]]*)\], strides = \[([^\]]*)\]")


def bind_proven(plan: Plan, step: Step, signature: Any, text: str, entry: abi.Entry) -> abi.Binding:
    """The Binding of a step, held against its signature, its Tile IR and its cubin: ValueError for another."""
    if plan.direction == "backward":
        binding = bind_backward(plan, step)
    else:
        binding = bind(plan, IMAGE)
        _prove_constants(binding, steps_of(plan)[0])
        binding = replace(binding, grid=step.grid)
    _prove_overlaps(binding, step, signature)
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


def _prove_constants(binding: abi.Binding, step: Step) -> None:
    """ValueError where a launch of a forward by cuTile would have another grid or scale, or other constants."""
    constants, scalar, kernel = binding.constants, binding.arguments[-1], step.constants
    assert isinstance(scalar, abi.Number)
    together = told_together(constants)
    ours: list[object] = [binding.grid, scalar.value, together.heads, together.spanning]
    ours.append(abi.divisor(constants[DIAGONAL]))
    theirs: list[object] = [step.grid, step.scalars["scale"], kernel["heads_together"], kernel["spanning"]]
    theirs.append(kernel["tile_m"] if kernel["diagonal_first"] else 1)
    ours += [constants["grouped"], constants["linear_grid"]]
    theirs += [str(kernel["grouped"]), str(kernel["linear_grid"])]
    ours += [constants["causal"], constants["masked"], constants["scale_sign"], constants["no_tma"]]
    theirs += [str(kernel["causal"]), str(kernel["masked"]), str(kernel["sign"]), str(not kernel["tma"])]
    if ours != theirs:
        raise ValueError(f"constants: got {ours}; cuTile has {theirs}")


def _prove_overlaps(binding: abi.Binding, step: Step, signature: Any) -> None:
    """ValueError where the compiler was told of an array that its elements are apart, and they are not."""
    for name, parameter in zip(step.arrays.values(), signature.parameters, strict=False):
        ours, theirs = binding.constants[f"{name}_overlaps"], str(parameter.may_alias_internally)
        if ours != theirs:
            raise ValueError(f"constants: {name}_overlaps: got {ours}; cuTile has {theirs}")


_FP32 = ("lse", "dlse", "delta", "dq_sum")


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
            name, rank = argument.tensor, 3 if argument.tensor in ("lse", "dlse", "delta") else 4
            known = [f"{name}_alignment", *(f"{name}_{dim}" for dim in EXTENTS)]
            places = [place, *range(place + 1, place + 1 + len(EXTENTS))]
            known += [f"{name}_{dim}" for dim in STRIDES[: rank - 1]]
            places += range(place + 1 + rank, place + rank + rank)
            found |= {(where, abi.divisor(constants[what])) for where, what in zip(places, known, strict=True)}
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
