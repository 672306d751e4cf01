"""Layouts, as Gluon's own compiler infers them: it is asked, once for each question.

Operations are made in a module of MLIR that is never compiled; what they come to has the layout that is wanted.
"""

from __future__ import annotations

import atexit
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language._semantic import GluonSemantic

from multiattn.triton.cpu.gluon.errors import LayoutError
from multiattn.triton.ending import end_quietly

Shape = tuple[int, ...]
THREADS = 32
"""In a warp."""


@functools.cache
def semantics() -> GluonSemantic[Any]:
    """Gluon's semantics over a function that stays open."""
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    module = builder.create_module()
    module.set_attr("ttg.target", builder.get_string_attr("cuda:90"))
    for name, number in (("num-warps", 4), ("num-ctas", 1), ("threads-per-warp", THREADS)):
        module.set_attr(f"ttg.{name}", builder.get_int32_attr(number))
    function = builder.get_or_insert_function(module, "asked", builder.get_function_ty([], []), "public", False)
    module.push_back(function)
    builder.set_insertion_point_to_start(function.add_entry_block())
    semantic = GluonSemantic(builder)
    semantic.kept = (context, module, function)  # what the builder points to
    atexit.register(semantics.cache_clear)  # before Python ends: libtriton reports what outlives it
    end_quietly()
    return semantic


def _register_tensor(layout: Any, shape: Shape, dtype: Any = gl.float32) -> Any:
    return semantics().full(list(shape), 0, dtype, layout)


def _shared(layout: Any, shape: Shape, dtype: Any) -> Any:
    return semantics().allocate_shared(dtype, list(shape), layout, None)


# ---------------------------------------------------------------- registers


@functools.cache
def reshaped(layout: Any, shape: Shape, to: Shape) -> Any:
    """The layout of registers after a reshape."""
    return semantics().reshape(_register_tensor(layout, shape), list(to), False).type.layout


@functools.cache
def permuted(layout: Any, shape: Shape, order: Shape) -> Any:
    """The layout of registers after a permutation of the dimensions."""
    return semantics().permute(_register_tensor(layout, shape), order).type.layout


@functools.cache
def is_trivial(dtype: Any, shape: Shape, layout: Any, to: Any) -> bool:
    """True if registers need not move to be in another layout."""
    value = _register_tensor(layout, shape, dtype)
    builder = semantics().builder
    wanted = _core.distributed_type(dtype, list(shape), to).to_ir(builder)
    return bool(builder.is_convert_layout_trivial(wanted, value.handle))


@functools.cache
def check_registers(layout: Any, shape: Shape, warps: int) -> None:
    """LayoutError where blocks of `shape` cannot be in registers of so many warps with that layout."""
    if layout.rank != len(shape):
        raise LayoutError(f"layout: got {layout} of rank {layout.rank}; allowed rank {len(shape)}, of {list(shape)}")
    if (got := _warps_of(layout)) != warps:
        raise LayoutError(f"layout: got {layout} of {got} warps; allowed {warps}, which this partition has")


def _warps_of(layout: Any) -> int:
    if isinstance(layout, gl.SliceLayout | gl.DotOperandLayout):
        return _warps_of(layout.parent)
    if isinstance(layout, gl.DistributedLinearLayout):
        return 1 << len(layout.warp_bases)
    return math.prod(layout.warps_per_cta)


@functools.cache
def elements_of_threads(layout: Any, shape: Shape) -> torch.Tensor:
    """Flat places of a block's elements, ``[threads, registers]``: some several times, where threads have copies."""
    linear = layout
    if not isinstance(layout, gl.DistributedLinearLayout):
        linear = gl.constexpr(semantics().to_linear_layout(layout, list(shape))).value
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]

    def places(bases: Sequence[Sequence[int]]) -> list[int]:
        found = [0]
        for basis in bases:  # a linear layout: places of sums are xors of places
            step = sum(it * stride for it, stride in zip(basis, strides, strict=True))
            found += [place ^ step for place in found]
        return found

    threads, registers = places([*linear.lane_bases, *linear.warp_bases]), places(linear.reg_bases)
    return torch.tensor([[thread ^ register for register in registers] for thread in threads])


# ---------------------------------------------------------------- shared memory


@functools.cache
def shared_reshaped(layout: Any, dtype: Any, shape: Shape, to: Shape) -> Any:
    """The layout of a buffer that is seen in another shape."""
    return semantics().memdesc_reshape(_shared(layout, shape, dtype), list(to)).layout


@functools.cache
def shared_permuted(layout: Any, dtype: Any, shape: Shape, order: Shape) -> Any:
    """The layout of a buffer with its dimensions in another order."""
    return semantics().memdesc_trans(_shared(layout, shape, dtype), list(order)).layout
