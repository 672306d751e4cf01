"""Custom calls of XLA, made without XLA: on PyTorch's current stream, with memory of PyTorch's allocator.

A library for JAX has its kernels behind handlers of XLA's FFI. A handler is a C function that takes a frame: where its
buffers are, and a table of functions by which it asks the runtime for a stream and for memory. Both are made by hand
here, as version 0.1 of `xla/ffi/api/c_api.h` has them. So all that a handler launches is in order with PyTorch's work,
is timed by its events and captured in its CUDA graphs. With XLA it would be on a stream of XLA's own, which no event of
PyTorch sees.

A handler checks how many arguments it gets, and their types: a wrong one is a `HandlerError`. It does not expect that
memory may be refused: where PyTorch has none left, the process ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Any, ClassVar, NamedTuple

import torch

DTYPES = {torch.float16: 10, torch.bfloat16: 16, torch.float32: 11, torch.int32: 4}
"""XLA_FFI_DataType of a tensor's dtype."""
SCALARS: Mapping[type, tuple[int, Any]] = {bool: (1, ctypes.c_bool), int: (5, c_int64), float: (12, ctypes.c_double)}
"""XLA_FFI_DataType and C type of an attribute's value."""
BUFFER = 1
"""XLA_FFI_ArgType_BUFFER, XLA_FFI_RetType_BUFFER."""
SCALAR = 3
"""XLA_FFI_AttrType_SCALAR."""
EXECUTE = 3
"""XLA_FFI_ExecutionStage_EXECUTE."""


# ---------------------------------------------------------------- structures


class Growing(Structure):
    """A structure that may get more fields: it begins with its size."""

    _fields_: ClassVar[Sequence[Any]] = (("struct_size", c_size_t), ("extension_start", c_void_p))

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"struct_size": ctypes.sizeof(self), **values})


def _growing(name: str, **fields: Any) -> Any:
    """The structure XLA_FFI_<name> with these fields behind its size."""
    return type(name, (Growing,), {"_fields_": tuple(fields.items())})


Buffer = _growing("Buffer", dtype=c_int, data=c_void_p, rank=c_int64, dims=POINTER(c_int64))
"""A dense tensor."""


class Span(Structure):
    """XLA_FFI_ByteSpan: a string without a zero behind it."""

    _fields_ = (("ptr", c_char_p), ("len", c_size_t))


class Scalar(Structure):
    """XLA_FFI_Scalar: an attribute's value."""

    _fields_ = (("dtype", c_int), ("value", c_void_p))


_ITEMS = {"size": c_int64, "types": POINTER(c_int)}
Buffers = _growing("Args", **_ITEMS, items=POINTER(c_void_p))
"""Also XLA_FFI_Rets."""
Attributes = _growing("Attrs", **_ITEMS, names=POINTER(c_void_p), items=POINTER(c_void_p))
"""Sorted by name."""

_CALL = {"api": c_void_p, "context": c_void_p, "stage": c_int}
Frame = _growing("CallFrame", **_CALL, arguments=Buffers, results=Buffers, attributes=Attributes, future=c_void_p)
"""All that a handler gets."""
FRAME_BYTES = Frame.future.offset
"""The size that handlers insist on, in which the header does not count `future`."""

ErrorRequest = _growing("Error_Create_Args", message=c_char_p, code=c_int)
MessageRequest = _growing("Error_GetMessage_Args", error=c_void_p, message=c_char_p)
"""XLA_FFI_Error_Destroy_Args is its beginning."""
StreamRequest = _growing("Stream_Get_Args", context=c_void_p, stream=c_void_p)
AllocateRequest = _growing(
    "DeviceMemory_Allocate_Args", context=c_void_p, size=c_size_t, alignment=c_size_t, data=c_void_p
)
FreeRequest = _growing("DeviceMemory_Free_Args", context=c_void_p, size=c_size_t, data=c_void_p)
OrdinalRequest = _growing("DeviceOrdinal_Get_Args", context=c_void_p, ordinal=c_int32)

FUNCTIONS: Mapping[str, Any] = {
    **{"error_create": ErrorRequest, "error_message": MessageRequest, "error_destroy": MessageRequest},
    **{"handler_register": None, "stream": StreamRequest, "type_register": None, "context_get": None},
    **{"state_set": None, "state_get": None, "allocate": AllocateRequest, "free": FreeRequest},
    **{"pool_schedule": None, "pool_threads": None},
    **{"future_create": None, "future_set_available": None, "future_set_error": None},
    **{"run_id": None, "ordinal": OrdinalRequest},
}
"""The runtime's functions in the order of the table, and what each is asked with. None stands for a function that no
kernel of attention asks for: the table has NULL there."""

FUNCTION = ctypes.PYFUNCTYPE(c_void_p, c_void_p)
"""Handlers and the runtime's functions: a pointer to a structure for a pointer to an error, or NULL."""


_VERSION = {"version_size": c_size_t, "version_extension": c_void_p, "major": c_int, "minor": c_int}
Table = _growing("Api", **_VERSION, internal=c_void_p, **dict.fromkeys(FUNCTIONS, c_void_p))
"""The runtime's functions, behind their version."""
VERSION_BYTES = Table.internal.offset - Table.version_size.offset
"""The size of XLA_FFI_Api_Version, which lies inside the table."""


# ---------------------------------------------------------------- calls


class Spec(NamedTuple):
    """The shape and dtype of a dense tensor; no elements stand for an argument that is absent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        """The shape and dtype of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)


class HandlerError(RuntimeError):
    """A handler refused its arguments, or CUDA refused a call of it."""


class Launch:
    """One handler and its arguments, laid out once: where tensors are is all that a call has to fill in."""

    def __init__(
        self, capsule: object, arguments: Sequence[Spec], results: Sequence[Spec], attributes: Mapping[str, Any]
    ) -> None:
        self._kept: list[Any] = []  # everything that structures point at
        self._scratch: dict[int, torch.Tensor] = {}
        self._errors: dict[int, bytes] = {}
        self._device = torch.device("cpu")
        self._handler = FUNCTION(_address(capsule))
        self._arguments = [self._buffer(spec) for spec in arguments]
        self._results = [self._buffer(spec) for spec in results]
        version = {"version_size": VERSION_BYTES, "major": 0, "minor": 1}
        table = self._keep(Table(**version))
        for name, request in FUNCTIONS.items():
            if request is not None:
                answer = self._keep(FUNCTION(self._answer(getattr(self, f"_{name}"), request)))
                setattr(table, name, ctypes.cast(answer, c_void_p))
        self._frame = Frame(
            struct_size=FRAME_BYTES,
            api=ctypes.addressof(table),
            stage=EXECUTE,
            arguments=self._buffers(self._arguments),
            results=self._buffers(self._results),
            attributes=self._attributes(attributes),
        )

    def __call__(self, arguments: Sequence[torch.Tensor | None], results: Sequence[torch.Tensor | None]) -> None:
        """Launch on the current stream of the first argument's device; HandlerError with what the handler says.

        Tensors are dense and as their specs say; None for what is absent.
        """
        first = arguments[0]
        assert first is not None
        self._device = first.device
        for buffer, tensor in zip((*self._arguments, *self._results), (*arguments, *results), strict=True):
            buffer.data = None if tensor is None else tensor.data_ptr()
        error = self._handler(ctypes.addressof(self._frame))
        self._scratch.clear()
        if error:
            raise HandlerError(self._errors.pop(error).decode(errors="replace"))

    # What a handler asks for while it runs.

    def _stream(self, request: Any) -> None:
        if self._device.type == "cuda":
            request.stream = torch.cuda.current_stream(self._device).cuda_stream

    def _ordinal(self, request: Any) -> None:
        request.ordinal = self._device.index or 0

    def _allocate(self, request: Any) -> None:
        memory = torch.empty(max(request.size, 1), dtype=torch.uint8, device=self._device)
        self._scratch[memory.data_ptr()] = memory
        request.data = memory.data_ptr()

    def _free(self, request: Any) -> None:
        del self._scratch[request.data]  # PyTorch gives it to later work on this stream, as it does with any tensor's

    def _error_create(self, request: Any) -> int:
        return self._note(request.message)

    def _error_message(self, request: Any) -> None:
        request.message = self._errors[request.error]

    def _error_destroy(self, request: Any) -> None:
        del self._errors[request.error]

    def _note(self, message: bytes) -> int:
        number = max(self._errors, default=0) + 1
        self._errors[number] = message
        return number

    def _answer(self, function: Callable[[Any], int | None], request: Any) -> Callable[[int], int | None]:
        """A function of the table. An exception cannot pass through the handler, so it becomes an error."""

        def answer(address: int) -> int | None:
            try:
                return function(request.from_address(address))
            except Exception as error:  # broad: whatever it is, C++ stands between here and its caller
                return self._note(f"{type(error).__name__}: {error}".encode())

        return answer

    # How structures are made.

    def _keep(self, item: Any) -> Any:
        self._kept.append(item)
        return item

    def _buffer(self, spec: Spec) -> Any:
        dims = self._keep((c_int64 * len(spec.shape))(*spec.shape))
        return Buffer(dtype=DTYPES[spec.dtype], rank=len(spec.shape), dims=dims)

    def _buffers(self, buffers: Sequence[Any]) -> Any:
        types = self._array(c_int, [BUFFER] * len(buffers))
        return Buffers(size=len(buffers), types=types, items=self._places(buffers))

    def _attributes(self, attributes: Mapping[str, Any]) -> Any:
        names, items = [], []
        for name, value in sorted(attributes.items()):
            dtype, kind = SCALARS[type(value)]
            names.append(self._keep(Span(name.encode(), len(name))))
            items.append(self._keep(Scalar(dtype, ctypes.addressof(self._keep(kind(value))))))
        told = {"types": self._array(c_int, [SCALAR] * len(items)), "names": self._places(names)}
        return Attributes(size=len(items), items=self._places(items), **told)

    def _places(self, items: Sequence[Structure]) -> Any:
        return self._array(c_void_p, [ctypes.addressof(item) for item in items])

    def _array(self, kind: Any, values: Sequence[int]) -> Any:
        return self._keep((kind * len(values))(*values))


def _address(capsule: object) -> int:
    """The handler in a capsule, as a module returns it for `jax.ffi.register_ffi_target`."""
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.argtypes, name_of.restype = (ctypes.py_object,), c_char_p
    pointer_of.argtypes, pointer_of.restype = (ctypes.py_object, c_char_p), c_void_p
    found: int = pointer_of(capsule, name_of(capsule))
    return found
