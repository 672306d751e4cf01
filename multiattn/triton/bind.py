"""The launch of a kernel by the driver, by Triton's calling convention. Pure Python: no Triton.

Arguments in order, without the constants; a pointer is an address; a tensor descriptor is a CUtensorMap by value, its
extents in 32 bit, its strides in 64 bit; after the kernel's own come two pointers to scratch memory, which is not used.
An integer that is 1 is a constant, one that is a multiple of 16 is known to be one, where the kernel specialises on it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.triton.gluon_configs import VARIANT as GLUON
from multiattn.triton.parameters import (
    FLAGS,
    Assumed,
    Descriptor,
    Float,
    Integer,
    KernelTable,
    Tensor,
    assumed_of,
    tables_of,
)

ONE, WHOLE = "the constant 1", " multiple of 16"
_SCRATCH = (abi.Pointer(tensor=None),) * 2
"""Behind a kernel's own arguments: global and profile scratch."""


def bind(plan: Plan, image: abi.Image, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel: what its compiler said.
        emitted: what the kernel's code is specialised on; None while it is being emitted.
    """
    problem, own, there = plan.problem, assumed_of(plan), emitted or {}
    constants: dict[str, str] = {}
    abi.exactly(constants, dtype=problem.dtype, head_dim=problem.head_dim, causal=problem.causal)
    abi.exactly(constants, scale_sign=problem.scale_sign)
    alignment = abi.multiple(constants, there, "alignment", own.alignment, own.alignment)
    flag = abi.flag(constants, there, FLAGS[plan.variant == GLUON], own.flag)
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
        elif isinstance(row, Float):
            arguments.append(abi.Number(kind="f32", value=row.value))
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
