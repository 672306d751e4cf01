"""What Triton's launcher hands to the driver for a compiled kernel, read from the signature that Triton compiled.

So an emitted kernel's Binding, made in `multiattn.triton.bind` without Triton, is held against Triton's own, and a
launcher may go past Triton's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from multiattn import abi
from multiattn.triton.bind import ONE, WHOLE

if TYPE_CHECKING:
    from multiattn.triton.gluon.launch import GluonCall
    from multiattn.triton.launch import Call

    AnyForward: TypeAlias = Call | GluonCall

_TENSOR_MAP_DTYPES = {6: 6, 10: 9}
"""Triton's numbers of fp16 and bf16, which are the hardware's, and CUtensorMapDataType's."""
_ITEM_BYTES = 2
_SCRATCH = 2  # pointers behind a kernel's own arguments: global and profile scratch
_USUAL: Mapping[str, object] = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}
"""What a launch needs no more than its arguments for."""


def why_not(metadata: Any, *, overlap: bool = False) -> str | None:
    """What a kernel needs beyond its arguments, None if nothing. With `overlap` a launch can do what its PDL asks."""
    usual = _USUAL if overlap else {**_USUAL, "launch_pdl": False}
    for name, value in usual.items():
        if (got := getattr(metadata, name, value)) != value:
            return f"{name}: got {got}; allowed {value}"
    return None


def image_of(metadata: Any) -> abi.Image:
    """What the compiler decided of a launch."""
    threads = 32 * metadata.num_warps  # all, those that the compiler adds to specialise warps included
    return abi.Image(threads=threads, dynamic_smem_bytes=metadata.shared, boxes=tuple(_boxes(metadata)))


def _boxes(metadata: Any) -> Iterator[abi.Box]:
    """What the compiler decided of each tensor descriptor."""
    for each in metadata.tensordesc_meta or ():
        extents, dtype = tuple(each["block_size"]), _TENSOR_MAP_DTYPES[each["elem_type"]]
        yield abi.Box(extents=extents, swizzle=each["swizzle"], dtype=dtype)


def arguments_of(kernel: Any, given: tuple[Any, ...], names: Mapping[int, str]) -> tuple[abi.Argument, ...]:
    """What Triton hands over.

    Args:
        kernel: a CompiledKernel.
        given: what its launcher would be given: every argument of the kernel's function.
        names: the name of each pointer among these, by its `id`; they may be objects of any kind.
    """
    boxes = _boxes(kernel.metadata)
    found: list[abi.Argument] = []
    for name, value in zip(kernel.src.fn.arg_names, given, strict=True):
        found += _expand(kernel.src.signature[name], value, names, boxes)
    return (*found, *(abi.Pointer(tensor=None),) * _SCRATCH)


def _expand(kind: str, value: Any, names: Mapping[int, str], boxes: Iterator[abi.Box]) -> list[abi.Argument]:
    """An argument as Triton's launcher hands it over, by its type in the compiled signature."""
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [abi.Pointer(tensor=names[id(value)])]
    if kind.startswith("tensordesc"):
        strides = tuple(stride * _ITEM_BYTES for stride in value.strides[:-1])
        return [
            abi.TensorMap(tensor=names[id(value.base)], shape=tuple(value.shape), strides=strides, box=next(boxes)),
            *(abi.Number(kind="i32", value=extent) for extent in value.shape),
            *(abi.Number(kind="i64", value=stride) for stride in value.strides),
        ]
    numbers: dict[str, abi.Kind] = {"fp32": "f32", "i32": "i32", "i64": "i64"}
    return [abi.Number(kind=numbers[kind], value=value)]


def prove(binding: abi.Binding, call: AnyForward, kernel: Any) -> None:
    """ValueError where a Binding is not what Triton's launcher would hand over for the same call."""
    metadata = kernel.metadata
    if reason := why_not(metadata, overlap=True):  # one that may overlap need not
        raise ValueError(f"{metadata.name}: {reason}, all that the loader can launch")
    stubs = {name: object() for name in (*abi.TENSORS, *([abi.WORKSPACE] if binding.workspace_bytes else []))}
    theirs = arguments_of(kernel, call.arguments(**stubs), {id(stub): name for name, stub in stubs.items()})
    if theirs != binding.arguments:
        pairs = zip(theirs, binding.arguments, strict=False)
        different = next((f"got {mine}; Triton has {his}" for his, mine in pairs if his != mine), "of another number")
        raise ValueError(f"{metadata.name}: arguments: {different}")
    if binding.grid != (call.grid, 1, 1):
        raise ValueError(f"{metadata.name}: grid: got {binding.grid}; Triton has {call.grid}")
    _prove_constants(binding, call, kernel)


def _prove_constants(binding: abi.Binding, call: AnyForward, kernel: Any) -> None:
    """ValueError where Triton knows something of an argument that the constants do not tell, or the other way round."""
    names, constants = kernel.src.fn.arg_names, binding.constants
    pointers, values = call.specialised_on(constants)
    whole = {names[path[0]] for path, known in kernel.src.attrs.items() if ["tt.divisibility", 16] in known}
    told = {name for name, text in constants.items() if text.endswith(WHOLE)} | pointers
    if whole != told:
        raise ValueError(f"{kernel.metadata.name}: multiples of 16: got {sorted(told)}; Triton has {sorted(whole)}")
    fixed = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    ours = {**values, **{name: 1 for name, text in constants.items() if text == ONE and name in names}}
    for name, value in ours.items():
        if fixed.get(name) != value:
            raise ValueError(f"{kernel.metadata.name}: {name}: got {value}; Triton has {fixed.get(name)}")
