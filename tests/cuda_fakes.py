"""A driver for the host path of GPU launches that only remembers what it was asked."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch


class FakeDriver:
    """Just what launch.py calls; `launched` holds (arguments, parameter struct) of each cuLaunchKernel.

    `did` has the names of what was done on the stream, in order; `encoded` the addresses that tensor maps were made of.
    """

    CUresult = SimpleNamespace(CUDA_SUCCESS="ok", CUDA_ERROR_INVALID_CONTEXT=SimpleNamespace(name="invalid context"))
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="smem")

    def __init__(self, params):
        self.params = params
        self.launched, self.attributes, self.contexts, self.refuse = [], [], 0, 0
        self.overlapping = 0
        self.cleared, self.encoded, self.did = [], [], []
        self.stream, self.capturing, self.memory = 70, False, 1 << 20

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, smem, stream, kernel_params, extra):  # noqa: N802
        if self.refuse:
            self.refuse -= 1
            return (self.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        struct = ctypes.cast(kernel_params, ctypes.POINTER(ctypes.c_void_p))[0]
        params = self.params.from_buffer_copy(ctypes.string_at(struct, ctypes.sizeof(self.params)))
        self.launched.append(((function, gx, gy, gz, bx, by, bz, smem, stream, extra), params))
        self.did.append("launch")
        return ("ok",)

    CUlaunchConfig = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="overlap")

    @staticmethod
    def CUlaunchAttribute():  # noqa: N802
        return SimpleNamespace(value=SimpleNamespace())

    def cuLaunchKernelEx(self, config, function, kernel_params, extra):  # noqa: N802
        (attribute,) = config.attrs
        assert (config.numAttrs, attribute.id) == (1, "overlap")
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        self.overlapping += 1
        return self.cuLaunchKernel(function, *grid, *block, config.sharedMemBytes, config.hStream, kernel_params, extra)

    def cuMemsetD8Async(self, address, value, size, stream):  # noqa: N802
        self.cleared.append((address, value, size, stream))
        self.did.append("clear")
        return ("ok",)

    def cuMemAlloc(self, size):  # noqa: N802
        return ("no memory", 0) if self.memory is None else ("ok", self.memory)

    def cuStreamGetId(self, stream):  # noqa: N802
        return "ok", 1000 + stream

    def cuTensorMapEncodeTiled(self, place, dtype, rank, address, *layout):  # noqa: N802
        """By the driver's library, not cuda-bindings. The map is the address, over and over."""
        ctypes.memmove(place, address.value.to_bytes(8, "little") * 16, 128)
        self.encoded.append((address.value, dtype, rank, [list(it) for it in layout[:4]], layout[4:]))
        return 0

    def cuLibraryLoadData(self, *arguments):  # noqa: N802
        return "ok", "library"

    def cuLibraryGetKernel(self, library, name):  # noqa: N802
        return "ok", f"kernel {name.decode()}"

    def cuKernelGetFunction(self, kernel):  # noqa: N802
        return "ok", kernel.replace("kernel", "function")

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        self.attributes.append((attribute, value))
        return ("ok",)

    def make_context_current(self, device):
        assert device == 1
        self.contexts += 1

    def cuGetErrorString(self, result):  # noqa: N802
        return "ok", b"no context"


def install(monkeypatch, folder, params):
    """The driver of launch.py, with the second of several H200 current; its kernels take `params`."""
    from multiattn import context
    from multiattn.cuda import counters, launch
    from multiattn.cuda import driver as calls

    fake = FakeDriver(params)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(b"cubin")
    monkeypatch.setattr(launch, "driver", fake)
    monkeypatch.setattr(launch, "make_context_current", fake.make_context_current)
    monkeypatch.setattr(launch, "ensure_context", lambda device: None)
    monkeypatch.setattr(launch, "cubin_path", lambda kernel, arch: cubin)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_load", launch._load.__wrapped__)
    monkeypatch.setattr(launch, "_load_library", launch._load_library.__wrapped__)
    monkeypatch.setattr(context, "_load_driver", lambda: fake)
    monkeypatch.setattr(counters, "driver", fake)
    monkeypatch.setattr(calls, "driver", fake)
    monkeypatch.setattr(launch, "counters_of", counters.counters_of.__wrapped__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: fake.stream + device, raising=False)
    return fake
