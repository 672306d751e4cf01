"""A driver for the host path of GPU launches of the cuda backend that only remembers what it was asked."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import driver_fakes

FUNCTION = 0xF00


class FakeDriver(driver_fakes.FakeDriver):
    """NVIDIA's library of kernels that take `params`, of which `structs` has those of each launch."""

    def __init__(self, params):
        super().__init__((ctypes.sizeof(params),))
        self.params = params

    @property
    def structs(self):
        return [self.params.from_buffer_copy(launched.parameters[0]) for launched in self.launched]


class FakeBindings:
    """Just what launch.py calls of cuda-bindings: loading, and launches of a backward by `cuLaunchKernel`."""

    CUresult = SimpleNamespace(CUDA_SUCCESS="ok", CUDA_ERROR_INVALID_CONTEXT=SimpleNamespace(name="invalid context"))
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="smem")

    def __init__(self):
        self.attributes, self.kernels, self.launched, self.refuse = [], [], [], 0

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, smem, stream, kernel_params, extra):  # noqa: N802
        if self.refuse:
            self.refuse -= 1
            return (self.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        struct = ctypes.cast(kernel_params, ctypes.POINTER(ctypes.c_void_p))[0]
        self.launched.append((function, (gx, gy, gz), (bx, by, bz), smem, stream, struct))
        return ("ok",)

    def cuLibraryLoadData(self, *arguments):  # noqa: N802
        return "ok", "library"

    def cuLibraryGetKernel(self, library, name):  # noqa: N802
        self.kernels.append(name.decode())
        return "ok", FUNCTION + len(self.kernels) - 1

    def cuKernelGetFunction(self, kernel):  # noqa: N802
        return "ok", kernel

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        self.attributes.append((attribute, value))
        return ("ok",)

    def cuGetErrorString(self, result):  # noqa: N802
        return "ok", b"no context"


def install(monkeypatch, folder, params):
    """The driver of launch.py, with the second of several H200 current; its kernels take `params`."""
    from multiattn.cuda import driver as calls
    from multiattn.cuda import launch

    fake = driver_fakes.install(monkeypatch, FakeDriver(params))
    fake.bindings = FakeBindings()
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(b"cubin")
    monkeypatch.setattr(launch, "driver", fake.bindings)
    monkeypatch.setattr(calls, "driver", fake.bindings)
    monkeypatch.setattr(launch, "cubin_path", lambda kernel, arch: cubin)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_load", launch._load.__wrapped__)
    monkeypatch.setattr(launch, "_load_library", launch._load_library.__wrapped__)
    return fake
