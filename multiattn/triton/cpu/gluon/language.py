"""Gluon's language as the kernels name it, `gl` and its modules, in Python."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from multiattn.triton.cpu.gluon import barriers, layouts, memory, ptx, tensors, tma, values, wgmma
from multiattn.triton.cpu.gluon.errors import LayoutError
from multiattn.triton.cpu.gluon.machine import partition, running
from multiattn.triton.cpu.gluon.values import STORAGE, Value, binary, lift, made, needs_block, plain, sizes, unary


class LanguageModule:
    """A module of Gluon's: what is not here is Gluon's own if it is a type or a layout, and an error if not."""

    def __init__(self, name: str, own: Any, parts: dict[str, Any]) -> None:
        self._name, self._own = name, own
        self.__dict__.update(parts)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        if isinstance(value, type | type(gl.float32)):
            return value
        raise NotImplementedError(f"the interpreter of Gluon has no {self._name}.{name}")


# ---------------------------------------------------------------- blocks


def _arange(start: Any, end: Any, layout: Any = None) -> Value:
    start, end, layout = int(plain(start)), int(plain(end)), plain(layout)
    layouts.check_registers(layout, (end - start,), partition().warps)
    return Value(torch.arange(start, end, dtype=torch.int32), gl.int32, layout)


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    shape, dtype, layout = sizes(shape), plain(dtype), plain(layout)
    number = lift(value, dtype)
    layouts.check_registers(layout, shape, partition().warps)
    return Value(torch.full(shape, number.data, dtype=STORAGE[dtype]), dtype, layout)


def _convert_layout(value: Any, layout: Any, assert_trivial: Any = False) -> Value:
    """The block in registers of another layout."""
    value, layout = needs_block(value), plain(layout)
    layouts.check_registers(layout, value.shape, partition().warps)
    if plain(assert_trivial) and not layouts.is_trivial(value.dtype, value.shape, value.layout, layout):
        raise LayoutError(f"conversion from {value.layout} to {layout} is not trivial")
    return Value(value.data, value.dtype, layout, value.memory)


# ---------------------------------------------------------------- elements


def _operation(name: str) -> Callable[..., Value]:
    def operate(x: Any, y: Any) -> Value:
        x, y = plain(x), plain(y)
        return made(binary(name, x, y) if isinstance(x, Value) or isinstance(y, Value) else binary(name, lift(x), y))

    return operate


def _extreme(name: str) -> Callable[..., Value]:
    def choose(x: Any, y: Any, propagate_nan: Any = None) -> Value:
        result: Value = _operation(name)(x, y)
        if propagate_nan is not None and "ALL" in str(plain(propagate_nan)):
            result = values.select((lift(x) != x) | (lift(y) != y), math.nan, result)
        return result

    return choose


def _abs(x: Any) -> Value:
    x = lift(x)
    return Value(abs(x.data), x.dtype, x.layout)


# ---------------------------------------------------------------- reductions


def _reduction(of_elements: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[Any, Any], Value]:
    def reduced(input: Any, axis: Any) -> Value:
        x, axis = needs_block(input), plain(axis)
        data = of_elements(x.data, axis)
        if len(x.shape) == 1:
            return Value(data.item(), x.dtype)
        return Value(data, x.dtype, gl.SliceLayout(axis, x.layout))

    return reduced


def _largest(data: torch.Tensor, axis: int) -> torch.Tensor:
    """A NaN counts only where there is nothing else."""
    found = data.amax(axis)
    if data.is_floating_point() and bool(found.isnan().any()):
        found = torch.where(data.isnan().all(axis), found, data.nan_to_num(-math.inf, math.inf, -math.inf).amax(axis))
    return found


# ---------------------------------------------------------------- the block of threads


def _num_programs(axis: Any) -> Value:
    return Value(running().programs if plain(axis) == 0 else 1, gl.int32)


def _program_id(axis: Any) -> Value:
    return Value(running().program if plain(axis) == 0 else 0, gl.int32)


def _warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = None) -> Any:
    return running().specialize(functions_and_args, [int(plain(it)) for it in worker_num_warps])


def _range(*bounds: Any, **_: Any) -> range:
    return range(*(int(plain(it)) for it in bounds))


_OF_FLOATS = ("exp2", "log2", "sqrt", "floor", "sin", "cos")

PARTS: dict[str, Any] = {
    "static_range": _range, "range": _range,
    "arange": _arange, "full": _full, "convert_layout": _convert_layout, "to_tensor": lift,
    "cast": values.cast, "where": values.select,
    "maximum": _extreme("maximum"), "minimum": _extreme("minimum"),
    "abs": _abs, "div_rn": _operation("truediv"), "fmod": _operation("mod"),
    **{name: functools.partial(unary, getattr(torch, name)) for name in _OF_FLOATS},
    "sqrt_rn": functools.partial(unary, torch.sqrt),
    "sum": _reduction(lambda data, axis: data.sum(axis, dtype=data.dtype)), "max": _reduction(_largest),
    "load": tensors.load, "store": tensors.store, "atomic_add": tensors.atomic_add,
    "allocate_shared_memory": memory.allocate_shared_memory, "inline_asm_elementwise": ptx.inline_asm_elementwise,
    "program_id": _program_id, "num_programs": _num_programs, "num_warps": lambda: partition().warps,
    "warp_specialize": _warp_specialize,
}  # fmt: skip
OF_HOPPER: dict[str, Any] = {
    "fence_async_shared": memory.fence_async_shared, "warpgroup_mma": wgmma.warpgroup_mma,
    "warpgroup_mma_wait": wgmma.warpgroup_mma_wait,
}  # fmt: skip
OF_MBARRIER: dict[str, Any] = {
    name: getattr(barriers, name) for name in ("init", "invalidate", "expect", "arrive", "wait")
}
OF_TMA: dict[str, Any] = {name: it for name, it in vars(tma).items() if name.startswith(("async_", "store_wait"))}

LANGUAGE = LanguageModule("gl", gl, PARTS)
"""In place of `gl`, and of `tl` where functions are of both languages."""


@functools.cache
def modules() -> dict[str, LanguageModule]:
    """In place of Gluon's modules, by the last part of their names."""
    from triton.experimental.gluon.language.nvidia import ampere, hopper

    made = {
        "async_copy": LanguageModule("async_copy", ampere.async_copy, {"mbarrier_arrive": barriers.arrive_each}),
        "mbarrier": LanguageModule("mbarrier", hopper.mbarrier, OF_MBARRIER),
        "tma": LanguageModule("tma", hopper.tma, OF_TMA),
    }
    made["hopper"] = LanguageModule("hopper", hopper, {**OF_HOPPER, **made})
    return made
