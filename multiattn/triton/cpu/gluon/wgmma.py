"""Products by a warpgroup's tensor cores, which go on while the warpgroup does."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

from multiattn.triton.cpu.gluon.errors import LayoutError, RaceError
from multiattn.triton.cpu.gluon.machine import partition
from multiattn.triton.cpu.gluon.memory import SharedAccess, View
from multiattn.triton.cpu.gluon.values import Value, needs_block, plain


class _Product:
    """A product under way: it reads shared memory until the partition has waited."""

    def __init__(self, operands: tuple[Any, ...]) -> None:
        self.is_done = False
        self.reads: list[tuple[View, SharedAccess]] = []
        for operand in operands:
            if isinstance(operand, View):
                self.reads.append((operand, operand.part.begin_read(partition(), "a product's read")))

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


def warpgroup_mma(a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: Any = False) -> Accumulator:
    """a b + acc, begun."""
    before = acc.result if isinstance(acc, Accumulator) else needs_block(acc)
    _check(a, b, before)
    if not plain(is_async):
        raise NotImplementedError("the interpreter of Gluon has no product that is waited for where it is made")
    total = a.data.float() @ b.data.float()
    if bool(use_acc):
        total = total + before.data
    product = _Product((a, b))
    partition().products.append(product)
    return Accumulator(Value(total.to(before.data.dtype), before.dtype, before.layout), product)


def _check(a: Any, b: Any, acc: Value) -> None:
    """LayoutError where wgmma has no such operands, as far as Gluon's compiler does not ask."""
    layout = acc.layout
    if not isinstance(b, View) or not isinstance(b.layout, gl.NVMMASharedLayout):
        raise LayoutError(f"second operand: got {_told(b)}; allowed shared memory with an NVMMASharedLayout")
    if isinstance(a, View):
        if not isinstance(a.layout, gl.NVMMASharedLayout):
            raise LayoutError(f"first operand: got {_told(a)}; allowed shared memory with an NVMMASharedLayout")
    elif a.layout != gl.DotOperandLayout(0, layout, 2):
        raise LayoutError(f"first operand: got {a.layout}; allowed DotOperandLayout(0, {layout}, 2)")
    (m, k), (k_of_b, n) = a.shape, b.shape
    if k != k_of_b or acc.shape != (m, n) or a.dtype != b.dtype:
        raise LayoutError(f"product of {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)} to {list(acc.shape)}")


def _told(operand: Any) -> str:
    return f"{type(operand).__name__} with {getattr(operand, 'layout', None)}"


def warpgroup_mma_wait(num_outstanding: Any, deps: Any) -> Any:
    """Until at most so many of the partition's products are under way; `deps` as they are then."""
    products = partition().products
    while len(products) > int(plain(num_outstanding)):
        products.pop(0).end()
    results = tuple(it.result if isinstance(it, Accumulator) and it.product.is_done else it for it in deps)
    return results[0] if len(results) == 1 else results
