"""A driver for the host path of GPU launches of the cuda backend that only remembers what it was asked."""

from __future__ import annotations

import ctypes

import driver_fakes


class FakeDriver(driver_fakes.FakeDriver):
    """NVIDIA's library of kernels that take `params`, of which `structs` has those of each launch."""

    def __init__(self, params):
        super().__init__((ctypes.sizeof(params),))
        self.params, self.kernels = params, []

    def cuLibraryGetKernel(self, kernel, library, symbol):  # noqa: N802
        self.kernels.append(symbol.decode())
        return super().cuLibraryGetKernel(kernel, library, symbol)

    @property
    def structs(self):
        return [self.params.from_buffer_copy(launched.parameters[0]) for launched in self.launched]


def install(monkeypatch, folder, params):
    """The driver, with the second of several H200 current; its kernels take `params`. `kernels` has their names."""
    from multiattn.cuda import launch

    fake = driver_fakes.install(monkeypatch, FakeDriver(params))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(b"cubin")
    monkeypatch.setattr(launch, "cubin_path", lambda kernel, arch: cubin)
    monkeypatch.setattr(launch, "_load", launch._load.__wrapped__)  # for once, nothing is kept
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    return fake
