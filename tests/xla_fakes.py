"""Handlers of XLA custom calls that are Python functions."""

from __future__ import annotations

import contextlib
import ctypes
import math

import torch
from bench_fakes import stand_in

from bench import peers_jax, xla_ffi


class FakeCall:
    """A handler's view of its frame."""

    def __init__(self, address):
        self.frame = xla_ffi.Frame.from_address(address)
        assert (self.frame.struct_size, self.frame.stage) == (xla_ffi.FRAME_BYTES, xla_ffi.EXECUTE)
        self.arguments, self.results = (self._tensors(it) for it in (self.frame.arguments, self.frame.results))
        self.error = None

    @property
    def attributes(self):
        """Values by name, in the order of the frame."""
        found, its = {}, self.frame.attributes
        kinds = dict(xla_ffi.SCALARS.values())
        for i in range(its.size):
            assert its.types[i] == xla_ffi.SCALAR
            name, scalar = xla_ffi.Span.from_address(its.names[i]), xla_ffi.Scalar.from_address(its.items[i])
            found[name.ptr[: name.len].decode()] = kinds[scalar.dtype].from_address(scalar.value).value
        return found

    def ask(self, name, request):
        """The request, answered by the runtime; its error is the handler's."""
        table = xla_ffi.Table.from_address(self.frame.api)
        error = xla_ffi.FUNCTION(getattr(table, name))(ctypes.addressof(request))
        self.error = self.error or error
        return request

    def fail(self, message):
        """End with an error."""
        request = xla_ffi.ErrorRequest(message=message.encode())
        table = xla_ffi.Table.from_address(self.frame.api)
        self.error = xla_ffi.FUNCTION(table.error_create)(ctypes.addressof(request))

    @staticmethod
    def _tensors(buffers):
        dtypes = {number: dtype for dtype, number in xla_ffi.DTYPES.items()}
        found = []
        for i in range(buffers.size):
            assert buffers.types[i] == xla_ffi.BUFFER
            it = xla_ffi.Buffer.from_address(buffers.items[i])
            shape, dtype = it.dims[: it.rank], dtypes[it.dtype]
            if not it.data:
                assert shape == [0]
                found.append(torch.empty(0, dtype=dtype))
                continue
            memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(it.data)
            found.append(torch.frombuffer(memory, dtype=dtype).view(shape))
        return found


@contextlib.contextmanager
def wheel(monkeypatch, **functions):
    """The wheel flash-attn3-jax, with such handlers."""
    with handlers(**functions) as registered:
        stand_in(monkeypatch, peers_jax.MODULE.partition(".")[0])
        stand_in(monkeypatch, peers_jax.MODULE, get_ffi_registrations=lambda: registered)
        yield
        for launches in (peers_jax._forward, peers_jax._backward):
            launches.cache_clear()


@contextlib.contextmanager
def handlers(**functions):
    """Capsules of handlers that are functions of a FakeCall, as long as they are needed."""

    def handler_of(function):
        def handle(address):
            call = FakeCall(address)
            try:
                function(call)
            except Exception as error:
                call.fail(repr(error))
            return call.error

        return xla_ffi.FUNCTION(handle)

    made = {name: handler_of(it) for name, it in functions.items()}
    make = ctypes.pythonapi.PyCapsule_New
    make.argtypes, make.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
    yield {name: make(ctypes.cast(it, ctypes.c_void_p), None, None) for name, it in made.items()}
    made.clear()  # until here their memory is needed
