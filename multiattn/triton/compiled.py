"""Compiled kernels held against their tables, so that a launch may go past Triton's own launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multiattn.plan import abi
from multiattn.triton.bind import ONE, WHOLE, binding_of, known_of
from multiattn.triton.parameters import Constant, Descriptor, Float, Integer, KernelTable, Scalar, Tensor

_TENSOR_MAP_DTYPES = {6: 6, 7: 7, 10: 9}
"""Triton's numbers of fp16, fp32 and bf16, which are the hardware's, and CUtensorMapDataType's."""
_USUAL: Mapping[str, object] = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}
"""Properties of a launch that needs no more than its arguments."""
_VARIABLE = object()
"""In place of the value of a parameter that is no constant."""


def why_not(metadata: Any) -> str | None:
    """A reason why a launch needs more than its arguments, None if it does not."""
    for name, value in _USUAL.items():
        if (got := getattr(metadata, name, value)) != value:
            return f"{name}: got {got}; allowed {value}"
    return None


def image_of(metadata: Any) -> abi.Image:
    """The compiler's decisions of a launch."""
    boxes = (
        abi.Box(extents=tuple(it["block_size"]), swizzle=it["swizzle"], dtype=_TENSOR_MAP_DTYPES[it["elem_type"]])
        for it in metadata.tensordesc_meta or ()
    )
    threads = 32 * metadata.num_warps  # all, those that the compiler adds to specialise warps included
    return abi.Image(threads=threads, dynamic_smem_bytes=metadata.shared, boxes=tuple(boxes))


def checked_binding(kernel: Any, table: KernelTable) -> abi.Binding:
    """The Binding of a CompiledKernel. ValueError where Triton, or the cubin, has parameters other than the table's."""
    source = kernel.src
    for name, path, row in table.leaves():
        kind = source.signature[source.fn.arg_names[path[0]]]
        for index in path[1:]:
            kind = kind[index]
        is_whole = ["tt.divisibility", 16] in source.attrs.get(path, ())
        theirs = (kind, is_whole, source.constants.get(path, _VARIABLE))
        prefix, *ours = _specialised(row)
        if not kind.startswith(prefix) or [*theirs[1:]] != ours:
            raise ValueError(f"{table.kernel}: {name}: got {row}; Triton has {_told(*theirs)}")
    binding = binding_of(table, image_of(kernel.metadata))
    abi.check(binding, abi.read_entry(kernel.asm["cubin"], kernel.metadata.name))
    return binding


def _specialised(row: Scalar) -> tuple[str, bool, object]:
    """The specialisation of a row: how its type begins, whether it is known to be a multiple of 16, its value."""
    if isinstance(row, Tensor):
        return "*", row.is_aligned, _VARIABLE
    if isinstance(row, Descriptor):
        return "tensordesc", False, _VARIABLE
    if isinstance(row, Float):
        return "fp32", False, _VARIABLE
    if isinstance(row, Constant):
        return "constexpr", False, row.value
    assert isinstance(row, Integer)
    if (known := known_of(row)) == ONE:
        return "constexpr", False, 1
    return known.removesuffix(WHOLE), known.endswith(WHOLE), _VARIABLE


def _told(kind: str, is_whole: bool, value: object) -> str:
    return kind + (WHOLE if is_whole else "") + ("" if value is _VARIABLE else f" {value}")
