"""bench.xla_ffi: a handler gets its frame as XLA would lay it out."""

import ctypes

import pytest
import torch
from xla_fakes import handlers

from bench import xla_ffi
from bench.xla_ffi import HandlerError, Launch, Spec


def test_structures_have_the_sizes_of_the_header():
    """As g++ has them of c_api.h, version 0.1."""
    sizes = {name: ctypes.sizeof(getattr(xla_ffi, name)) for name in ("Buffer", "Span", "Scalar", "Buffers")}
    assert sizes == {"Buffer": 48, "Span": 16, "Scalar": 16, "Buffers": 40}
    frame, table = xla_ffi.Frame, xla_ffi.Table
    assert [getattr(frame, it).offset for it in ("stage", "arguments", "results", "attributes")] == [32, 40, 80, 120]
    assert (xla_ffi.FRAME_BYTES, ctypes.sizeof(table)) == (168, 192)
    assert [getattr(table, it).offset for it in ("stream", "allocate", "free", "ordinal")] == [80, 120, 128, 184]


def test_a_handler_gets_tensors_attributes_and_memory():
    told = {}

    def handler(call):
        told.update(call.attributes)
        first, absent = call.arguments
        assert absent.numel() == 0
        assert call.ask("ordinal", xla_ffi.OrdinalRequest()).ordinal == 0
        assert call.ask("stream", xla_ffi.StreamRequest()).stream is None  # a CPU has none
        memory = call.ask("allocate", xla_ffi.AllocateRequest(size=first.nbytes)).data
        ctypes.memmove(memory, first.data_ptr(), first.nbytes)
        ctypes.memmove(call.results[0].data_ptr(), memory, first.nbytes)
        call.ask("free", xla_ffi.FreeRequest(size=first.nbytes, data=memory))

    given, copied = torch.randn(3, 5), torch.zeros(3, 5)
    attributes = {"scale": 0.5, "causal": True, "left": -1}
    with handlers(copy=handler) as registered:
        launch = Launch(registered["copy"], [Spec.of(given), Spec((0,), torch.int32)], [Spec.of(copied)], attributes)
        for _ in range(2):
            launch([given, None], [copied])
            assert torch.equal(copied, given)
            given = given + 1  # somewhere else
    assert list(told.items()) == sorted(attributes.items())


def test_what_a_handler_refuses_is_an_error_and_so_is_what_it_cannot_get():
    def refuse(call):
        call.fail("head_dim is 12")

    def exhaust(call):
        call.ask("free", xla_ffi.FreeRequest(data=1))

    given = torch.randn(3)
    with handlers(refuse=refuse, exhaust=exhaust) as registered:
        for name, told in (("refuse", "head_dim is 12"), ("exhaust", "KeyError: 1")):
            with pytest.raises(HandlerError, match=told):
                Launch(registered[name], [Spec.of(given)], [], {})([given], [])
