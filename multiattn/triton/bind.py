"""The launch of an emitted forward kernel by the driver, by Triton's calling convention. Pure Python: no Triton.

Arguments in order, without the constants; a pointer is an address; a tensor descriptor is a CUtensorMap by value, its
extents in 32 bit, its strides in 64 bit; after the kernel's own come two pointers to scratch memory, which is not used.
An integer that is 1 is a constant, one that is a multiple of 16 is known to be one, where the kernel specialises on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.triton.gluon_configs import VARIANT as GLUON
from multiattn.triton.parameters import (
    FLAGS,
    Assumed,
    Constant,
    Descriptor,
    Float,
    Integer,
    Row,
    Table,
    Tensor,
    assumed_of,
    tables_of,
)

ONE, WHOLE = "the constant 1", " multiple of 16"
SCRATCH = (abi.Pointer(tensor=None),) * 2
"""Behind a kernel's own arguments: global and profile scratch."""


def bind(plan: Plan, image: abi.Image, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel: what its compiler said.
        emitted: what the kernel's code is specialised on; None while it is being emitted.
    """
    constants, table = settle(plan, emitted or {})
    described_rows = sum(isinstance(row, Descriptor) for row in table.rows.values())
    if len(image.boxes) != described_rows:
        raise ValueError(f"boxes: got {len(image.boxes)}; allowed {described_rows}, one for each descriptor")
    boxes = iter(image.boxes)
    arguments: list[abi.Argument] = []
    for name, row in table.rows.items():
        if isinstance(row, Integer):
            arguments += _integer(constants, emitted or {}, name, row)
        elif isinstance(row, Descriptor):
            arguments += described(row, next(boxes))
        elif not isinstance(row, Constant):
            arguments.append(simple(row))
    return abi.Binding(
        arguments=(*arguments, *SCRATCH),
        grid=(table.grid, 1, 1),
        image=image,
        constants=constants,
        workspace_bytes=plan.workspace_bytes,
    )


def settle(plan: Plan, emitted: Mapping[str, str]) -> tuple[dict[str, str], Table]:
    """The constants of the whole kernel, and its table as code that has those takes it."""
    problem, own = plan.problem, assumed_of(plan)
    constants: dict[str, str] = {}
    abi.exactly(constants, dtype=problem.dtype, head_dim=problem.head_dim, causal=problem.causal)
    abi.exactly(constants, scale_sign=problem.scale_sign)
    alignment = abi.multiple(constants, emitted, "alignment", own.alignment, own.alignment)
    flag = abi.flag(constants, emitted, FLAGS[plan.variant == GLUON], own.flag)
    (table,) = tables_of(plan, assumed=Assumed(alignment=alignment, flag=flag))
    return constants, table


def simple(row: Row) -> abi.Argument:
    """A row that is one argument whatever its value."""
    if isinstance(row, Tensor):
        return abi.Pointer(tensor=row.of)
    assert isinstance(row, Float)
    return abi.Number(kind="f32", value=row.value)


def described(row: Descriptor, box: abi.Box) -> tuple[abi.Argument, ...]:
    """A tensor descriptor, with the box that the compiler chose."""
    shape, strides = row.layout.shape, row.layout.strides
    in_bytes = tuple(stride * row.layout.dtype.itemsize for stride in strides[:-1])
    return (
        abi.TensorMap(tensor=row.of, shape=shape, strides=in_bytes, box=box),
        *(abi.Number(kind="i32", value=extent) for extent in shape),
        *(abi.Number(kind="i64", value=stride) for stride in strides),
    )


def _integer(constants: dict[str, str], emitted: Mapping[str, str], name: str, row: Integer) -> list[abi.Argument]:
    """An integer as the kernel takes it, not at all where it is a constant."""
    value = row.value
    known = abi.settle(constants, emitted, name, _known_of(row), lambda there: _accepts(there, value))
    if known == ONE:
        return []
    return [abi.Number(kind="i64" if known.startswith("i64") else "i32", value=value)]


def _known_of(row: Integer) -> str:
    """What Triton's JIT makes of an integer: its width and, if it may, `ONE` or whether it is a multiple of 16."""
    width = "i32" if abi.INT32_MIN <= row.value <= abi.INT32_MAX else "i64"
    if not row.specialised:
        return width
    if row.value == 1:
        return ONE
    return width + WHOLE if row.value % 16 == 0 else width


def _accepts(there: str, value: int) -> bool:
    """Whether code that was specialised on `there` takes a value."""
    if there == ONE:
        return value == 1
    if there.startswith("i32") and not abi.INT32_MIN <= value <= abi.INT32_MAX:
        return False
    return not there.endswith(WHOLE) or value % 16 == 0
