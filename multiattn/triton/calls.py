"""A kernel of a launch with its arguments, as Triton takes them: for a launch, for compiling and for interpreting."""

from __future__ import annotations

import functools
import importlib
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from multiattn.layout import VECTOR_BYTES
from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.triton.families import areas_of, family_of, tables_of
from multiattn.triton.family import KERNELS, LIST_TILES
from multiattn.triton.score import functions_of
from multiattn.triton.table import ELEMENT_BYTES, Constant, Descriptor, Integer, KernelTable, Parameter, Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryStub:
    """Stands for memory where only its type and address are asked, or how aligned that is: while compiling."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Its address, or one that is as aligned."""
        return self.address


class Call:
    """A kernel of a launch with its table."""

    def __init__(self, plan: Plan, table: KernelTable) -> None:
        """ValueError for a table that is not the kernel's."""
        self.kernel: Any = _kernel_of(plan, table.kernel)
        self.is_gluon = getattr(self.kernel, "is_gluon", bool)()  # Triton's interpreted functions do not say
        if tuple(self.kernel.arg_names) != tuple(table.rows):
            raise ValueError(f"{table.kernel}: got rows {list(table.rows)}; allowed {self.kernel.arg_names}")
        self.table = _with_functions(table, self.is_gluon)
        known = {**plan.problem.layouts, **areas_of(plan)}
        self._dtypes = {name: layout.dtype for name, layout in known.items()}

    def given(self, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        """Every argument of the kernel; `tensors` has operands and areas of workspace by name."""
        return tuple(self._value(row, lambda of: tensors[of.of]) for row in self.table.rows.values())

    def stubs(self) -> tuple[Any, ...]:
        """Every argument, with stand-ins for the tensors: what the kernel is specialised on.

        Also for integers that it is not: in a tuple Triton specialises on every one.
        """
        return tuple(self._value(_unknown(row), self._stub) for row in self.table.rows.values())

    def _stub(self, row: Tensor | Descriptor) -> MemoryStub:
        is_aligned = isinstance(row, Descriptor) or row.is_aligned
        return MemoryStub(dtype=self._dtypes[row.of], address=VECTOR_BYTES if is_aligned else ELEMENT_BYTES)

    def _value(self, row: Parameter, tensor_of: Callable[[Any], Any]) -> Any:
        if isinstance(row, Mapping):
            values = (self._value(each, tensor_of) for each in row.values())
            return _record(*row)(*values)
        if isinstance(row, Tensor):
            return tensor_of(row)
        if isinstance(row, Descriptor):
            return _describe(row, tensor_of(row), self.is_gluon)
        return row if isinstance(row, float) else row.value


@functools.cache
def _record(*names: str) -> Any:
    """A tuple whose items kernels ask for by name."""
    return namedtuple("Record", names)  # typing's would want their types


def _kernel_of(plan: Plan, name: str) -> Any:
    """A jitted kernel by its name in tables. Its module is imported now: Triton reads the source of each function."""
    module = "lists" if name == LIST_TILES else family_of(plan).kernels[name]
    return getattr(importlib.import_module(f"{KERNELS}.{module}"), name)


_UNKNOWN = 3
"""Stands for an integer of which code may only know how wide it is: not 1, nor a multiple of 16."""


def _unknown(row: Parameter) -> Parameter:
    """A row with a stand-in for each integer that is not specialised on."""
    if isinstance(row, Mapping):
        return {name: _unknown(it) for name, it in row.items()}
    if not isinstance(row, Integer) or row.specialised:
        return row
    fits = abi.INT32_MIN <= row.value <= abi.INT32_MAX
    return replace(row, value=_UNKNOWN if fits else (1 << 32) + _UNKNOWN)


def calls_of(plan: Plan, *, has_dlse: bool = False, multiprocessors: int | None = None) -> tuple[Call, ...]:
    """The kernels that a launch of `plan` runs, in order."""
    return tuple(Call(plan, table) for table in tables_of(plan, has_dlse=has_dlse, multiprocessors=multiprocessors))


def _with_functions(table: KernelTable, is_gluon: bool) -> KernelTable:
    """The table with jitted functions in place of an expression."""
    row = table.rows["C"]
    assert isinstance(row, Constant)
    constants = row.value
    if getattr(constants, "score", None) is None:
        return table
    if is_gluon:
        functions = functions_of(constants.score, gluon=True)
    else:
        functions = functions_of(constants.score, constants.gradients, listed=constants.blocks is not None)
    constants = replace(constants, score=functions)
    return replace(table, rows={**table.rows, "C": Constant(value=constants)})


def _describe(row: Descriptor, tensor: Any, is_gluon: bool) -> Any:
    """A TensorDescriptor without its constructor, whose checks are done (they are the variant's capability)."""
    kind: Any = TensorDescriptor
    shape, strides = list(row.layout.shape), list(row.layout.strides)
    block, more = [*[1] * (len(shape) - 2), row.rows, row.columns], {}
    if is_gluon:  # which wants to know the layout in shared memory
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia import hopper

        kind, dtype = hopper.TensorDescriptor, getattr(gl, str(row.layout.dtype).removeprefix("torch."))
        more = {"layout": gl.NVMMASharedLayout.get_default_for(block, dtype)}
    descriptor = kind.__new__(kind)
    more |= {"padding": "zero", "round_f32_to_tf32": False}
    descriptor.__dict__.update(base=tensor, shape=shape, strides=strides, block_shape=block, **more)
    return descriptor
