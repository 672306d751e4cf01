"""Products by a warpgroup's tensor cores, which go on while the warpgroup does."""

from __future__ import annotations

import math
from typing import Any

from triton.experimental.gluon import language as gl

from multiattn.triton.cpu.gluon.errors import GluonError, LayoutError, RaceError
from multiattn.triton.cpu.gluon.machine import partition
from multiattn.triton.cpu.gluon.memory import Read, View
from multiattn.triton.cpu.gluon.values import Value, needs_block, plain


class _Product:
    """A product under way: it reads shared memory until the partition has waited."""

    def __init__(self, operands: tuple[Any, ...]) -> None:
        self.is_done = False
        self.reads: list[tuple[View, Read]] = []
        for operand in operands:
            if isinstance(operand, View):
                operand.part.check_seen(partition(), "a product's read", by_tensor_core=True)
                self.reads.append((operand, operand.part.begin_read(partition(), "product's read")))

    def end(self) -> None:
        """Its partition waited for it."""
        self.is_done = True
        for operand, read in self.reads:
            operand.part.end_read(read)


class Accumulator(Value):
    """A product's result before a wait: registers that nobody may touch but further products."""

    def __init__(self, result: Value, product: _Product) -> None:
        self.dtype, self.layout, self.memory = result.dtype, result.layout, None
        self.result, self.product = result, product

    @property
    def data(self) -> Any:
        """Not there."""
        raise RaceError("the result of a product is used before a warpgroup_mma_wait for it returned it")

    @property
    def shape(self) -> Any:
        """That of the result."""
        return self.result.shape


def warpgroup_mma(
    a: Any, b: Any, acc: Any, *, use_acc: Any = True, precision: Any = None, max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Value:  # fmt: skip
    """a b + acc, begun; or done, where it is not asynchronous."""
    before = acc.result if isinstance(acc, Accumulator) else needs_block(acc)
    _check(a, b, before)
    total = a.data.float() @ b.data.float()
    if bool(use_acc):
        total = total + before.data
    product = _Product((a, b))
    partition().products.append(product)
    result = Value(total.to(before.data.dtype), before.dtype, before.layout)
    if plain(is_async):
        return Accumulator(result, product)
    _end_but(0)
    return result


def _check(a: Any, b: Any, acc: Value) -> None:
    """LayoutError where wgmma has no such operands."""
    layout, who = acc.layout, partition()
    if not isinstance(layout, gl.NVMMADistributedLayout) or list(layout.version) != [3, 0]:
        raise LayoutError(f"accumulator: got {layout}; allowed an NVMMADistributedLayout of version [3, 0]")
    if who.warps % 4 or math.prod(layout.warps_per_cta) != who.warps:
        raise LayoutError(f"accumulator: got {layout} in {who.warps} warps; allowed its own number, whole warpgroups")
    if not isinstance(b, View) or not isinstance(b.layout, gl.NVMMASharedLayout):
        raise LayoutError(f"second operand: got {_told(b)}; allowed shared memory with an NVMMASharedLayout")
    if isinstance(a, View):
        if not isinstance(a.layout, gl.NVMMASharedLayout):
            raise LayoutError(f"first operand: got {_told(a)}; allowed shared memory with an NVMMASharedLayout")
    else:
        bits = needs_block(a).dtype.primitive_bitwidth
        if a.layout != gl.DotOperandLayout(0, layout, 32 // bits):
            raise LayoutError(f"first operand: got {a.layout}; allowed DotOperandLayout(0, {layout}, {32 // bits})")
    (m, k), (k_of_b, n) = a.shape, b.shape
    if k != k_of_b or acc.shape != (m, n):
        raise LayoutError(f"product of {list(a.shape)} and {list(b.shape)} added to {list(acc.shape)}")
    if a.dtype != b.dtype or not a.dtype.is_floating():
        raise LayoutError(f"product of {a.dtype} and {b.dtype}; allowed one floating-point type")
    instruction = list(layout.instr_shape)
    if m % 64 or k % (256 // a.dtype.primitive_bitwidth) or n % instruction[1]:
        raise LayoutError(f"product of {list(a.shape)} and {list(b.shape)} by instructions of {instruction}")


def _told(operand: Any) -> str:
    return f"{type(operand).__name__} with {getattr(operand, 'layout', None)}"


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    """Until at most so many of the partition's products are under way; `deps` as they are then."""
    if deps is None:
        raise GluonError("warpgroup_mma_wait: got no deps")
    _end_but(int(plain(num_outstanding)))
    results = tuple(it.result if isinstance(it, Accumulator) and it.product.is_done else it for it in deps)
    return results[0] if len(results) == 1 else results


def _end_but(number: int) -> None:
    products = partition().products
    while len(products) > number:
        products.pop(0).end()
