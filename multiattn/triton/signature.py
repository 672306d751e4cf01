"""The arguments of a compiled kernel as Triton's own launcher hands them over, by the signature that Triton compiled.

So a launcher may go past Triton's, and an emitted kernel's Binding, made in `multiattn.triton.bind` without Triton, is
held against Triton's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from multiattn.plan import abi
from multiattn.problem import VECTOR_BYTES
from multiattn.triton.bind import ONE, SCRATCH, WHOLE, described, simple
from multiattn.triton.parameters import Constant, Descriptor, Float, Integer, Row, Tensor

if TYPE_CHECKING:
    from multiattn.triton.launch import Call

_TENSOR_MAP_DTYPES = {6: 6, 7: 7, 10: 9}
"""Triton's numbers of fp16, fp32 and bf16, which are the hardware's, and CUtensorMapDataType's."""
_USUAL: Mapping[str, object] = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}
"""Properties of a launch that needs no more than its arguments."""


def why_not(metadata: Any) -> str | None:
    """A reason why a launch needs more than its arguments, None if it does not."""
    for name, value in _USUAL.items():
        if (got := getattr(metadata, name, value)) != value:
            return f"{name}: got {got}; allowed {value}"
    return None


def image_of(metadata: Any) -> abi.Image:
    """The compiler's decisions of a launch."""
    threads = 32 * metadata.num_warps  # all, those that the compiler adds to specialise warps included
    return abi.Image(threads=threads, dynamic_smem_bytes=metadata.shared, boxes=tuple(_boxes(metadata)))


def _boxes(metadata: Any) -> Iterator[abi.Box]:
    """The compiler's decisions of each tensor descriptor."""
    for each in metadata.tensordesc_meta or ():
        extents, dtype = tuple(each["block_size"]), _TENSOR_MAP_DTYPES[each["elem_type"]]
        yield abi.Box(extents=extents, swizzle=each["swizzle"], dtype=dtype)


def binding_of(kernel: Any, call: Call) -> abi.Binding:
    """The Binding of a CompiledKernel by Triton's signature, held against its cubin.

    ValueError where the two differ, or where Triton compiled a parameter to what its row is not.
    """
    boxes = _boxes(kernel.metadata)
    arguments: list[abi.Argument] = []
    for name in kernel.src.fn.arg_names:
        arguments += _arguments(kernel.src.signature[name], name, call.table.rows[name], boxes)
    grid = (call.table.grid, 1, 1)
    binding = abi.Binding(arguments=(*arguments, *SCRATCH), grid=grid, image=image_of(kernel.metadata), constants={})
    abi.check(binding, abi.read_entry(kernel.asm["cubin"], kernel.metadata.name))
    return binding


_KINDS: Mapping[type[Row], Mapping[str, abi.Kind]] = {Float: {"fp32": "f32"}, Integer: {"i32": "i32", "i64": "i64"}}


def _arguments(kind: str, name: str, row: Row, boxes: Iterator[abi.Box]) -> tuple[abi.Argument, ...]:
    """A row as Triton's launcher hands it over, by its type in the compiled signature."""
    if kind == "constexpr" and (isinstance(row, Constant) or (isinstance(row, Integer) and row.value == 1)):
        return ()
    if kind.startswith("*") and isinstance(row, Tensor):
        return (simple(row),)
    if kind.startswith("tensordesc") and isinstance(row, Descriptor):
        return described(row, next(boxes))
    if isinstance(row, Float | Integer) and kind in _KINDS[type(row)]:
        return (abi.Number(kind=_KINDS[type(row)][kind], value=row.value),)
    raise ValueError(f"{name}: got {row}; Triton has {kind}")


def prove(binding: abi.Binding, call: Call, kernel: Any) -> None:
    """ValueError where a Binding is not what Triton's launcher would hand over for the same call."""
    metadata = kernel.metadata
    if reason := why_not(metadata):
        raise ValueError(f"{metadata.name}: {reason}, all that the loader can launch")
    theirs = binding_of(kernel, call)
    if theirs.arguments != binding.arguments:
        pairs = zip(theirs.arguments, binding.arguments, strict=False)
        different = next((f"got {mine}; Triton has {his}" for his, mine in pairs if his != mine), "of another number")
        raise ValueError(f"{metadata.name}: arguments: {different}")
    if binding.grid != theirs.grid:
        raise ValueError(f"{metadata.name}: grid: got {binding.grid}; Triton has {theirs.grid}")
    _prove_constants(binding, call, kernel)


def _prove_constants(binding: abi.Binding, call: Call, kernel: Any) -> None:
    """ValueError where Triton knows something of an argument that the constants do not tell, or the other way round."""
    names, told, rows = kernel.src.fn.arg_names, binding.constants, call.table.rows
    whole = {names[path[0]] for path, known in kernel.src.attrs.items() if ["tt.divisibility", 16] in known}
    given = abi.divisor(told["alignment"]) == VECTOR_BYTES
    ours = {name for name, text in told.items() if text.endswith(WHOLE)}
    ours |= {name for name, row in rows.items() if isinstance(row, Tensor) and (given or row.of not in ("q", "k", "v"))}
    if whole != ours:
        raise ValueError(f"{kernel.metadata.name}: multiples of 16: got {sorted(ours)}; Triton has {sorted(whole)}")
    fixed = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    values = {name: row.value for name, row in rows.items() if isinstance(row, Constant)}
    for name, text in told.items():
        value = getattr(values.get("C"), name, values.get(name.upper(), text))
        if str(value) != text:
            raise ValueError(f"{kernel.metadata.name}: {name.upper()}: got {text}; Triton has {value}")
    for name, value in {**values, **{name: 1 for name, text in told.items() if text == ONE and name in rows}}.items():
        if fixed.get(name) != value:
            raise ValueError(f"{kernel.metadata.name}: {name}: got {value}; Triton has {fixed.get(name)}")
