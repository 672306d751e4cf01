"""NVIDIA's driver as its library has it, for the host path of launches: it only remembers what it was asked."""

import ctypes
import threading
from dataclasses import dataclass

import torch

from multiattn.operands import Operands, with_score
from multiattn.plan import abi
from multiattn.problem import Problem, options_of, problem_of
from multiattn.run import compat, counters, driver
from multiattn.run.driver import CUlaunchConfig

INVALID_CONTEXT = 201
CONTEXT = 0xC0DE
DEVICE = 1


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One cuLaunchKernelEx. `parameters` are the bytes at each parameter's address, as far as a reader asks."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    stream: int
    overlaps: bool
    parameters: tuple[bytes, ...]
    places: tuple[int, ...]


def encode(of, address):
    """A tensor map as this driver makes it: the address, over and over."""
    return address.to_bytes(8, "little") * 16


class FakeDriver:
    """`did` has the names of what was done on the stream, in order; `encoded` what tensor maps were made of; `kernels`
    has the names of those that were loaded.

    `contexts` has the devices whose contexts were made current, and when a thread's was asked for; `current` is it.
    `sizes` are those of the parameters of the kernel, or by function of each, or of each launch in turn. `refuse` is
    how many launches fail for want of a context.
    """

    def __init__(self, sizes=()):
        self.sizes = sizes
        self.launched, self.did, self.cleared, self.encoded, self.loaded, self.attributes = [], [], [], [], [], []
        self.preferring, self.kernels = [], []
        self.resident, self.contexts, self.refuse, self.status = [], [], 0, 0
        self.current, self.context_status = CONTEXT, 0
        self.stream, self.capturing, self.memory = 70, False, 1 << 20

    def cuLaunchKernelEx(self, config, function, parameters, extra):  # noqa: N802
        assert extra is None
        if self.refuse:
            self.refuse -= 1
            return INVALID_CONTEXT
        if self.status:
            return self.status
        config = ctypes.cast(config, ctypes.POINTER(CUlaunchConfig))[0]
        sizes = self.sizes[function.value] if isinstance(self.sizes, dict) else self.sizes
        if sizes and isinstance(sizes[0], list):
            sizes = sizes[len(self.launched)]
        places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[: len(sizes)]
        if config.count:
            attribute = config.attributes[0]
            assert (config.count, attribute.id, attribute.value) == (1, 6, 1)
        self.launched.append(
            Launched(
                function=function.value,
                grid=tuple(config.grid),
                block=tuple(config.block),
                smem_bytes=config.smem_bytes,
                stream=config.stream or 0,
                overlaps=bool(config.count),
                parameters=tuple(ctypes.string_at(*pair) for pair in zip(places, sizes, strict=True)),
                places=tuple(places),
            )
        )
        self.did.append("launch")
        return 0

    def cuTensorMapEncodeTiled(self, place, dtype, rank, address, *layout):  # noqa: N802
        assert place.value % 64 == 0
        ctypes.memmove(place, encode(None, address.value), 128)
        self.encoded.append((address.value, dtype, rank, [list(it) for it in layout[:4]], layout[4:]))
        return 0

    def cuMemsetD8Async(self, address, value, size, stream):  # noqa: N802
        self.cleared.append((address.value, value, size.value, stream.value or 0))
        self.did.append("clear")
        return 0

    def cuMemAlloc_v2(self, memory, size):  # noqa: N802
        assert size.value == counters.STREAMS_MAX * counters.SPACING_BYTES
        memory._obj.value = self.memory or 0
        return 0 if self.memory else 2

    def cuStreamGetId(self, stream, found):  # noqa: N802
        self.did.append("id")
        found._obj.value = 1000 + (stream.value or 0)
        return 0

    def cuLibraryLoadData(self, library, code, *nothing):  # noqa: N802
        self.loaded.append(code)
        library._obj.value = len(self.loaded)
        return 0

    def cuLibraryGetKernel(self, kernel, library, symbol):  # noqa: N802
        kernel._obj.value = 0x100 * library.value + len(symbol)
        self.kernels.append(symbol.decode())
        return 0

    def attributes_of(self, attribute):
        """Kernels and the values that an attribute of theirs was set to."""
        return [(it[2], it[1]) for it in self.attributes if it[0] == attribute and len(it) > 2]

    def kernel_of(self, code, symbol):
        """The kernel that `cuLibraryGetKernel` gave of loaded code."""
        return 0x100 * (self.loaded.index(code) + 1) + len(symbol)

    def cuKernelGetFunction(self, function, kernel):  # noqa: N802
        self.resident.append(kernel.value)
        return 0

    def cuKernelSetAttribute(self, attribute, value, kernel, device):  # noqa: N802
        self.attributes.append((attribute, value, kernel.value, device.value))
        return 0

    def cuKernelSetCacheConfig(self, kernel, config, device):  # noqa: N802
        self.preferring.append((kernel.value, config, device.value))
        return 0

    def cuCtxGetCurrent(self, current):  # noqa: N802
        self.contexts.append("current?")
        current._obj.value = self.current
        return self.context_status

    def cuDeviceGet(self, handle, ordinal):  # noqa: N802
        handle._obj.value = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, found, device):  # noqa: N802
        found._obj.value = CONTEXT + device.value
        return 0

    def cuCtxSetCurrent(self, chosen):  # noqa: N802
        self.contexts.append(chosen.value - CONTEXT)
        return 0

    def cuGetErrorName(self, status, name):  # noqa: N802
        name._obj.value = {INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT"}.get(status, b"CUDA_ERROR_OTHER")
        return 0

    def cuGetErrorString(self, status, text):  # noqa: N802
        text._obj.value = b"its words"
        return 0


def install(monkeypatch, fake, device=DEVICE):
    """`fake` is the driver, and `device` the current GPU, whose current stream it knows."""
    monkeypatch.setattr(driver, "load_driver", lambda: fake)
    monkeypatch.setattr(driver, "_thread", threading.local())
    monkeypatch.setattr(driver, "_libraries", {})
    monkeypatch.setattr(counters, "counters_of", lambda device: counters.Counters())
    monkeypatch.setattr(counters, "_allocate", lambda size, device: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(compat, "current_stream", lambda device: fake.stream)
    monkeypatch.setattr(
        compat, "allocator", lambda layouts, device: lambda: [torch.empty(it[0], dtype=it[2]) for it in layouts]
    )
    return fake


def operands(*, batch=1, heads_q=4, heads_kv=2, seq_q=128, seq_kv=192, head_dim=32, dtype=torch.bfloat16):
    """Operands of both directions without dlse. k, v, dk and dv each have their own layout: none passes for another."""
    q = torch.zeros(batch, heads_q, seq_q, head_dim, dtype=dtype)
    k = torch.zeros(batch, seq_kv, heads_kv, head_dim, dtype=dtype).transpose(1, 2)
    v = torch.zeros(batch, heads_kv, seq_kv, head_dim, dtype=dtype)
    out, lse, dout, dq = q.clone(), torch.empty(q.shape[:3]), q.clone(), q.clone()
    return Operands(q, k, v, out, lse, dout, None, dq, torch.empty_like(k), torch.empty_like(v))


def asked(direction, *, has_scores=False, sizes=None, **options):
    """Operands of a call in one direction, and its problem; those of scores have slopes, a bias and a softcap."""
    given = operands(**sizes or {})
    if (sinks := options.get("sinks")) is not None:
        given = given._replace(sinks=sinks, delta=given.lse.clone())
    if direction == "forward":
        given = given._replace(dout=None, dq=None, dk=None, dv=None)
    problem = Problem.of(given.q, given.k, given.v, **options)
    if has_scores:
        (batch, heads, queries), keys = given.lse.shape, given.k.shape[2]
        bias = torch.zeros(batch, heads, keys, queries).transpose(2, 3)
        given, modified = with_score(given, options_of(problem), 2.0, torch.ones(heads), bias, None)
        problem = problem_of(given, modified)
    return given, problem


OPERANDS = set(Operands._fields) - {"delta"}
"""Names of tensors that are never areas of workspace."""


def check_launches(launched, bindings, tensors):
    """Every parameter is what the Binding of its kernel says; areas of workspace are where their first pointer is.

    Returns the addresses by name.
    """
    known = {name: tensor.data_ptr() for name, tensor in tensors.named.items()}
    for it, binding in zip(launched, bindings, strict=True):
        image = binding.image
        assert (it.grid, it.block, it.stream) == (binding.grid, (image.threads, 1, 1), 70)
        assert it.smem_bytes == image.dynamic_smem_bytes
        for got, argument in zip(it.parameters, binding.arguments, strict=True):
            has_one = isinstance(argument, abi.Pointer | abi.TensorMap)
            pointers = {0: argument.tensor} if has_one else getattr(argument, "pointers", {})
            for offset, name in pointers.items():
                if name not in (None, *OPERANDS):
                    known.setdefault(name, int.from_bytes(got[offset : offset + 8], "little"))
            assert got == abi.pack(argument, known, encode)
    return known


def check_run(driver, launcher, bindings, given):
    """`check_launches` of one call of a launcher."""
    driver.sizes = [[abi.size_of(it) for it in binding.arguments] for binding in bindings]
    driver.launched.clear()
    launcher(given)
    return check_launches(driver.launched, bindings, given)
