"""The launch of a kernel by the driver, by Triton's calling convention. Pure Python: no Triton.

Arguments in order, without the constants; a pointer is an address; a tensor descriptor is a CUtensorMap by value, its
extents in 32 bit, its strides in 64 bit; after the kernel's own come two pointers to scratch memory, which is not used.
An integer that is 1 is a constant, one that is a multiple of 16 is known to be one, where the kernel specialises on it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.triton.families import assumed_of, family_of, tables_of
from multiattn.triton.plain import is_ragged_list
from multiattn.triton.table import Assumed, Constant, Descriptor, Integer, KernelTable, Scalar, Tensor

ONE, WHOLE = "the constant 1", " multiple of 16"
_SCRATCH = (abi.Pointer(tensor=None),) * 2
"""Behind a kernel's own arguments: global and profile scratch."""


def is_loadable(plan: Plan) -> bool:
    """True where the loader of emitted kernels can launch a plan: a forward of one kernel."""
    return family_of(plan).is_emitted and plan.problem.packing is None


def bind(plan: Plan, image: abi.Image, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel: what its compiler said.
        emitted: what the kernel's code is specialised on; None while it is being emitted.
    """
    problem, own, there = plan.problem, assumed_of(plan), emitted or {}
    if not is_loadable(plan):
        got = f"variant {plan.variant}" if problem.packing is None else "a packed batch"
        raise ValueError(f"launch: got one of {got}, which may have several kernels; allowed launches of one")
    constants: dict[str, str] = {}
    abi.exactly(constants, dtype=problem.dtype, head_dim=problem.head_dim, mask=problem.band.kind)
    abi.exactly(constants, scale_sign=problem.scale_sign)
    if problem.score is not None:
        abi.exactly(constants, score=problem.score.program.digest)
    if (blocks := problem.blocks) is not None:
        sizes = f"{blocks.queries}x{blocks.keys}" + (" with full ones" if blocks.has_full else "")
        abi.exactly(constants, blocks=sizes, ragged_list=is_ragged_list(problem))
    alignment = abi.multiple(constants, there, "alignment", own.alignment, own.alignment)
    flag = abi.flag(constants, there, family_of(plan).flag_name, own.flag)
    (table,) = tables_of(plan, assumed=Assumed(alignment=alignment, flag=flag))
    binding = binding_of(table, image, there)
    constants.update(binding.constants)
    return replace(binding, constants=constants, workspace_bytes=plan.workspace_bytes)


def binding_of(table: KernelTable, image: abi.Image, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of one kernel of a launch; its constants are those of integers alone."""
    described = sum(isinstance(row, Descriptor) for row in table.rows.values())
    if len(image.boxes) != described:
        raise ValueError(f"boxes: got {len(image.boxes)}; allowed {described}, one for each descriptor")
    boxes = iter(image.boxes)
    constants: dict[str, str] = {}
    arguments: list[abi.Argument] = []
    for name, _, row in table.leaves():
        if isinstance(row, Tensor):
            arguments.append(abi.Pointer(tensor=row.of))
        elif isinstance(row, float):
            arguments.append(abi.Number(kind="f32", value=row))
        elif isinstance(row, Descriptor):
            arguments += _described(row, next(boxes))
        elif isinstance(row, Integer):
            value = row.value
            accepts = functools.partial(_accepts, value=value)
            known = abi.settle(constants, emitted or {}, name, known_of(row), accepts)
            if known != ONE:
                arguments.append(abi.Number(kind="i64" if known.startswith("i64") else "i32", value=value))
    grid = (table.grid, 1, 1)
    return abi.Binding(arguments=(*arguments, *_SCRATCH), grid=grid, image=image, constants=constants)


def _described(row: Descriptor, box: abi.Box) -> tuple[abi.Argument, ...]:
    """A tensor descriptor, with the box that the compiler chose."""
    shape, strides = row.layout.shape, row.layout.strides
    in_bytes = tuple(stride * row.layout.dtype.itemsize for stride in strides[:-1])
    return (
        abi.TensorMap(tensor=row.of, shape=shape, strides=in_bytes, box=box),
        *(abi.Number(kind="i32", value=extent) for extent in shape),
        *(abi.Number(kind="i64", value=stride) for stride in strides),
    )


def known_of(row: Integer) -> str:
    """The specialisation of an integer by Triton's JIT: its width and, if allowed, `ONE` or that 16 divides it."""
    width = "i32" if abi.INT32_MIN <= row.value <= abi.INT32_MAX else "i64"
    if not row.specialised:
        return width
    if row.value == 1:
        return ONE
    return width + WHOLE if row.value % 16 == 0 else width


def _accepts(there: str, value: int) -> bool:
    """True where code that was specialised on `there` takes a value."""
    if there == ONE:
        return value == 1
    if there.startswith("i32") and not abi.INT32_MIN <= value <= abi.INT32_MAX:
        return False
    return not there.endswith(WHOLE) or value % 16 == 0


# ---------------------------------------------------------------- held against what Triton compiled

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
    abi.check(binding, _entry_of(kernel))
    return binding


@functools.cache
def _entry_of(kernel: Any) -> abi.KernelEntry:
    """The entry of a CompiledKernel in its cubin, read once: calls of all sizes share it."""
    return abi.read_entry(kernel.asm["cubin"], kernel.metadata.name)


def _specialised(row: Scalar) -> tuple[str, bool, object]:
    """The specialisation of a row: how its type begins, whether it is known to be a multiple of 16, its value."""
    if isinstance(row, Tensor):
        return "*", row.is_aligned, _VARIABLE
    if isinstance(row, Descriptor):
        return "tensordesc", False, _VARIABLE
    if isinstance(row, float):
        return "fp32", False, _VARIABLE
    if isinstance(row, Constant):
        return "constexpr", False, row.value
    assert isinstance(row, Integer)
    if (known := known_of(row)) == ONE:
        return "constexpr", False, 1
    return known.removesuffix(WHOLE), known.endswith(WHOLE), _VARIABLE


def _told(kind: str, is_whole: bool, value: object) -> str:
    return kind + (WHOLE if is_whole else "") + ("" if value is _VARIABLE else f" {value}")
