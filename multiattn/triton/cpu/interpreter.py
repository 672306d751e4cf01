"""Run a Triton kernel's own source on CPU tensors, for truth and debugging: `run`.

It is Triton's interpreter (NumPy, one program after the other) made honest:

- bf16 is computed as the GPU does it: operands widened to fp32, the result rounded to nearest even. Triton 3.6 to 3.9
  store bf16 as integers and then do integer arithmetic on them. So are conversions from and to e4m3, NaN included.
- Every load, store and atomic, through pointers or descriptors, is checked against the tensor arguments; an address
  outside all of them raises `OutOfBoundsError`.
- It works whatever TRITON_INTERPRET is, and leaves `triton.language` as it was, so that kernels can be compiled and
  launched in the same process before and after. (Triton's own leaves ``triton.language.core`` patched.)

Slow by design: 50 to 150 ms for a small problem. For a debugger or a print, put it in the kernel: it is Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.jit import KernelInterface, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from multiattn.plan.support import OutOfBoundsError
from multiattn.progress import interpreting
from multiattn.run.fork import hold_across_fork
from multiattn.run.threads import one_thread

Array = npt.NDArray[Any]
Extent = tuple[int, int]


class _Language:
    """`triton.language`, which is patched for the whole process while a kernel is interpreted.

    One thread may have it to patch, or any number to compile, who need it as it is.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._compiling = 0
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Have it alone; a thread that has it may ask again."""
        with self.changed:
            if self._owner != threading.get_ident():
                self.changed.wait_for(lambda: self._owner is None and not self._compiling)
                self._owner = threading.get_ident()
            self._depth += 1

    def release(self) -> None:
        """Give back what `acquire` gave."""
        with self.changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self.changed.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    @contextlib.contextmanager
    def as_it_is(self) -> Iterator[None]:
        """Have it with others that want it as it is."""
        with self.changed:
            self.changed.wait_for(lambda: self._owner is None)
            self._compiling += 1
        try:
            yield
        finally:
            with self.changed:
                self._compiling -= 1
                self.changed.notify_all()


exclusive_language = _Language()
"""Held while a kernel is interpreted, and while one is compiled afresh; `as_it_is` for kernels of a launch."""
hold_across_fork(exclusive_language)
hold_across_fork(exclusive_language.changed)  # taken first and given back last: no other thread is in its midst


def run(kernel: KernelInterface[Any], grid: int, *args: Any, **kwargs: Any) -> None:
    """Run every program of a one-dimensional grid of a ``@triton.jit`` kernel on CPU tensors.

    Args:
        kernel: the kernel; it and all it calls may live in any modules, `triton.language` among them.
        grid: number of programs.
        args, kwargs: of the kernel: CPU tensors, `TensorDescriptor`, numbers, None, tuples of these, constexprs; also
            jitted functions, in tuples and frozen records of constexprs.

    Raises:
        OutOfBoundsError: a load or store outside every tensor argument.
        Exception: whatever the kernel raises, untouched.
    """
    with exclusive_language, _patched_language() as builder:
        function = _as_python(kernel)
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        constexprs = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
        builder.extents = [_extent(value) for value in flat(named.values()) if _is_memory(value)]
        converted = {
            name: with_functions(value, _as_python) if name in constexprs else _to_argument(value)
            for name, value in named.items()
        }
        builder.set_grid_dim(grid, 1, 1)
        with one_thread(), interpreting(f"the Triton kernel {kernel.fn.__name__}", grid) as work:
            for program in work.over(range(grid)):
                builder.set_grid_idx(program, 0, 0)
                function(**converted)


class _HonestBuilder(interpreter.InterpreterBuilder):  # type: ignore[misc]  # Triton has no stubs
    """Triton's interpreter with bf16 arithmetic and a bounds check."""

    def __init__(self) -> None:
        super().__init__()
        # By default each sum of integers is made again in 64 bits, half of all time, for an assertion that is off.
        self.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        self.extents: list[Extent] = []
        """[first, last) byte of each tensor argument."""

    def create_masked_load(self, ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_bounds("load", ptrs, mask)
        return super().create_masked_load(ptrs, mask, *args, **kwargs)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_bounds("store", ptrs, mask)
        return super().create_masked_store(ptrs, value, mask, *args, **kwargs)

    def create_atomic_rmw(self, kind: Any, ptr: Any, val: Any, mask: Any, *args: Any) -> Any:
        self._check_bounds("atomic", ptr, mask)
        return super().create_atomic_rmw(kind, ptr, val, mask, *args)

    def create_descriptor_reduce(self, kind: Any, descriptor: Any, value: Any, offsets: Any) -> None:
        """An atomic on a descriptor's block, which Triton's interpreter lacks. Elements outside are left out."""
        if kind != ir.DESCRIPTOR_REDUCE_KIND.ADD or value.dtype.scalar != tl.float32:
            raise NotImplementedError(f"descriptor reduction: got {kind} of {value.dtype}; allowed an fp32 addition")
        pointers, inside = descriptor.materialize_pointers(offsets)
        relaxed, scope = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
        self.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, inside, relaxed, scope)

    def create_inline_asm(self, text: str, constraints: Any, values: Any, types: Any, is_pure: Any, pack: Any) -> Any:
        """Launches run one after another: what orders them has nothing to do. Triton's interpreter takes no PTX."""
        if any(
            it.strip() and not it.strip().startswith("griddepcontrol.") for it in text.partition("//")[0].split(";")
        ):
            raise NotImplementedError(f"the interpreter has no PTX but griddepcontrol; got {text!r}")
        zeros = [interpreter.TensorHandle(np.zeros(1, dtype=np.int32), tl.int32) for _ in types]
        return SimpleNamespace(get_result=zeros.__getitem__)

    def _check_bounds(self, what: str, ptrs: Any, mask: Any) -> None:
        addresses, active = np.broadcast_arrays(ptrs.data, mask.data)
        addresses = addresses[active.astype(bool)]
        size = np.uint64(max(1, ptrs.get_element_ty().primitive_bitwidth // 8))
        lowest, end = (int(addresses.min()), int(addresses.max() + size)) if addresses.size else (0, 0)
        if not addresses.size or any(first <= lowest and end <= last for first, last in self.extents):
            return
        inside = np.zeros(addresses.shape, dtype=bool)
        for first, last in self.extents:
            inside |= (addresses >= np.uint64(first)) & (addresses + size <= np.uint64(last))
        if not inside.all():
            raise OutOfBoundsError(
                f"{what} in program {self.grid_idx}: {np.count_nonzero(~inside)} of {inside.size} active lanes "
                f"are outside every tensor argument"
            )

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        return self._in_fp32(super().binary_op, lhs, rhs, op)

    def unary_op(self, arg: Any, op: Any) -> Any:
        return self._in_fp32(super().unary_op, arg, op)

    def _in_fp32(self, compute: Callable[..., Any], *operands: Any) -> Any:
        if not any(_is_bf16(operand) for operand in operands):
            return compute(*operands)
        result = compute(*(_to_fp32(operand) if _is_bf16(operand) else operand for operand in operands))
        return _to_bf16(result) if result.data.dtype.kind == "f" else result  # a comparison stays a bool

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        if _is_bf16(src):
            src = _to_fp32(src)
        elif src.dtype.scalar == tl.float8e4nv != dst_type.scalar:
            src = _of_e4m3(src)
        if dst_type.scalar == tl.float8e4nv != src.dtype.scalar:
            return _to_e4m3(src)
        if dst_type.scalar != tl.bfloat16:
            return super().cast_impl(src, dst_type)
        return _to_bf16(src)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if {src.dtype.scalar, dst_type.scalar} & {tl.bfloat16, tl.float8e4nv}:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def create_dot(self, a: Any, b: Any, d: Any, *args: Any) -> Any:
        # A product of two 16-bit numbers is exact in fp32, where NumPy has a fast matrix product.
        return super().create_dot(_widen(a), _widen(b), d, *args)

    def get_bf16(self, value: float) -> Any:
        return _to_bf16(self.get_fp32(value))


def _is_bf16(operand: Any) -> bool:
    return isinstance(operand, interpreter.TensorHandle) and bool(operand.dtype.scalar == tl.bfloat16)


def _to_fp32(handle: Any) -> Any:
    bits = np.asarray(handle.data).astype(np.uint32) << np.uint32(16)
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _to_bf16(handle: Any) -> Any:
    """Round to nearest even; a NaN stays one."""
    values: Array = np.asarray(handle.data, dtype=np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded = np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
    return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)


def _of_e4m3(handle: Any) -> Any:
    """In fp32, exact."""
    bits = np.ascontiguousarray(handle.data, dtype=np.uint8)
    values: Array = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
    return interpreter.TensorHandle(values.reshape(np.shape(handle.data)), tl.float32)


def _to_e4m3(handle: Any) -> Any:
    """Round to nearest even, and saturate as a GPU does; a NaN stays one."""
    values = torch.from_numpy(np.ascontiguousarray(handle.data, dtype=np.float32))
    largest = torch.finfo(torch.float8_e4m3fn).max
    bits = values.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return interpreter.TensorHandle(bits.reshape(np.shape(handle.data)), tl.float8e4nv)


def _widen(handle: Any) -> Any:
    if _is_bf16(handle):
        return _to_fp32(handle)
    if handle.dtype.scalar == tl.float16:
        return interpreter.TensorHandle(handle.data.astype(np.float32), tl.float32)
    return handle


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """The arguments of a kernel, and those in tuples."""
    for value in values:
        if isinstance(value, tuple):
            yield from flat(value)
        else:
            yield value


def with_functions(value: Any, function_of: Callable[[Any], Any]) -> Any:
    """A constant in which every jitted function is one of Python, as `function_of` makes it."""
    if isinstance(value, KernelInterface):
        return function_of(value)
    if isinstance(value, tuple):
        items = (with_functions(it, function_of) for it in value)
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {it.name: getattr(value, it.name) for it in dataclasses.fields(value)}
        after = {name: with_functions(it, function_of) for name, it in before.items()}
        changed = {name: it for name, it in after.items() if it is not before[name] and it != before[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _as_python(kernel: KernelInterface[Any]) -> Any:
    return _rewritten_module(kernel.fn)[kernel.fn.__name__]


def _to_argument(value: Any) -> Any:
    """The value that the kernel gets for an argument: a number as a scalar of the type it has when compiled."""
    if isinstance(value, tuple):
        items = map(_to_argument, value)
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, float):  # Triton's interpreter leaves it a Python float, which takes any type it meets
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return interpreter._implicit_cvt(value)


def _is_memory(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, TensorDescriptor))


def _extent(value: torch.Tensor | TensorDescriptor) -> Extent:
    """[first, last) byte that the elements of an argument span."""
    tensor = value.base if isinstance(value, TensorDescriptor) else value
    if tensor.device.type != "cpu":
        raise ValueError(f"the interpreter takes CPU tensors; got one on {tensor.device}")
    if tensor.numel() == 0:
        return (0, 0)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


@functools.cache
def _rewritten_module(function: types.FunctionType) -> dict[str, Any]:
    """A copy of the namespace that `function` lives in, with every jitted function in it as plain Python."""
    return _rewrite_namespace(function.__globals__)


@functools.cache
def _rewritten_standard() -> dict[str, Any]:
    """Triton's own library of jitted functions, rewritten: tl.max, tl.sum, tl.zeros and so on."""
    return _rewrite_namespace(vars(tl.standard))


def _rewrite_namespace(namespace: dict[str, Any]) -> dict[str, Any]:
    # Triton's rewriter compiles into the globals of the function that it is given and adds its own names to them: so
    # it gets a function with globals of its own, and the module stays untouched.
    copy = dict(namespace)
    home = namespace["__name__"]
    for name, value in namespace.items():
        if isinstance(value, KernelInterface) and value.fn.__module__ != home:
            copy[name] = _as_python(value)
        elif isinstance(value, KernelInterface):
            source = types.FunctionType(value.fn.__code__, copy, name, value.fn.__defaults__)
            source.__kwdefaults__ = value.fn.__kwdefaults__
            source.__annotations__ = value.fn.__annotations__
            copy[name] = interpreter.FunctionRewriter(source).rewrite_ast()
    copy["interpreter_semantic"] = _semantic()
    return copy


@functools.cache
def _semantic() -> Any:
    return interpreter.TritonSemantic(_HonestBuilder())


_make_block_type = tl.core.block_type.__init__
_block_types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}


def _remembering_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """``block_type.__init__``, which for each value checks a shape and makes a name: a fifth of all time. Once here."""
    key = element_ty.name, tuple(shape)
    if element_ty.is_ptr() or any(type(extent) is not int for extent in shape):
        _make_block_type(self, element_ty, shape)
    elif key in _block_types:
        vars(self).update(_block_types[key], element_ty=element_ty)
    else:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = dict(vars(self))


@contextlib.contextmanager
def _patched_language() -> Iterator[_HonestBuilder]:
    """`triton.language` computing with NumPy, as Triton's interpreter patches it; as before afterwards."""
    mangle_type(0)  # its first call imports modules that want `triton.language` as it is
    semantic = _semantic()
    standard = _rewritten_standard()
    jitted = {name: standard[name] for name, value in vars(tl.standard).items() if isinstance(value, KernelInterface)}
    owners: Sequence[Any] = (
        tl, tl.core, tl.math, tl.standard, tl.core.tensor, tl.core.dtype, tl.core.block_type,
        tl.core.condition, tl.core.tensor_descriptor_base, interpreter,
    )  # fmt: skip
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        interpreter.interpreter_semantic = semantic
        interpreter.interpreter_builder = semantic.builder
        tl.core.block_type.__init__ = _remembering_block_type
        interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        # NumPy >= 2.4 has no int() of a one-element array, which Triton 3.6 takes of every loop bound.
        tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
        for owner in (tl, tl.standard):
            for name in jitted.keys() & vars(owner).keys():
                setattr(owner, name, jitted[name])
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # an all-nan row, an overflow to inf: as on the GPU
            yield semantic.builder
    finally:
        for owner, attributes in before:
            for name in vars(owner).keys() - attributes.keys():
                delattr(owner, name)
            for name, value in attributes.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)
