"""The driver, and a thread's CUDA context, against a driver that only remembers what it was asked."""

import threading
from concurrent.futures import ThreadPoolExecutor

import driver_fakes
import pytest
import torch

from multiattn.run import compat
from multiattn.run import driver as module
from multiattn.run import execute as launching

PRIMARY = 0xC0DE


class FakeDriver:
    def __init__(self, current=0, status=0):
        self.current, self.status, self.asked = current, status, []

    def cuCtxGetCurrent(self, result):  # noqa: N802
        self.asked.append("current?")
        result._obj.value = self.current
        return self.status

    def cuDeviceGet(self, result, ordinal):  # noqa: N802
        result._obj.value = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, result, device):  # noqa: N802
        self.asked.append(f"primary of {device.value}")
        result._obj.value = PRIMARY
        return 0

    def cuCtxSetCurrent(self, chosen):  # noqa: N802
        self.asked.append(f"set {chosen.value:#x}")
        return 0

    def cuGetErrorName(self, status, result):  # noqa: N802
        result._obj.value = b"CUDA_ERROR_NOT_INITIALIZED"
        return 0

    def cuGetErrorString(self, status, result):  # noqa: N802
        result._obj.value = b"initialization error"
        return 0


@pytest.fixture(autouse=True)
def _fresh_threads(monkeypatch):
    monkeypatch.setattr(module, "_thread", threading.local())


def use(monkeypatch, driver):
    monkeypatch.setattr(module, "load_driver", lambda: driver)
    return driver


def test_a_thread_without_a_context_gets_that_of_pytorch_once(monkeypatch):
    driver = use(monkeypatch, FakeDriver())
    for _ in range(3):
        module.ensure_context(1)
    assert driver.asked == ["current?", "primary of 1", f"set {PRIMARY:#x}"]
    with ThreadPoolExecutor(1) as other:
        other.submit(module.ensure_context, 0).result()
    assert driver.asked[3:] == ["current?", "primary of 0", f"set {PRIMARY:#x}"]


def test_a_context_that_is_there_stays(monkeypatch):
    driver = use(monkeypatch, FakeDriver(current=0xBEEF))
    module.ensure_context(0)
    assert driver.asked == ["current?"]


def test_one_that_is_asked_for_takes_the_place_of_another(monkeypatch):
    driver = use(monkeypatch, FakeDriver(current=0xBEEF))
    module.make_context_current(1)
    assert driver.asked == ["primary of 1", f"set {PRIMARY:#x}"]


def test_without_a_driver_nothing_happens_unless_it_must(monkeypatch):
    use(monkeypatch, None)
    module.ensure_context(0)
    with pytest.raises(OSError, match="no NVIDIA driver"):
        module.make_context_current(0)


def test_an_error_has_the_drivers_words(monkeypatch):
    use(monkeypatch, FakeDriver(status=3))
    with pytest.raises(RuntimeError, match="cuCtxGetCurrent: CUDA_ERROR_NOT_INITIALIZED: initialization error"):
        module.ensure_context(0)


def test_every_launch_sees_to_it(monkeypatch):
    ensured = []
    monkeypatch.setattr(launching, "ensure_context", ensured.append)
    monkeypatch.setattr(compat, "current_device", lambda: 1)
    with launching._on(torch.device("cpu")), launching._on(torch.device("cuda", 1)):
        pass
    assert ensured == [1]
    assert isinstance(launching._on(torch.device("cuda", 0)), torch.cuda.device)  # makes its own current


def test_the_drivers_properties_of_a_kernel(monkeypatch):
    names = pytest.importorskip("cuda.bindings.driver").CUfunction_attribute
    fake = driver_fakes.install(monkeypatch, driver_fakes.FakeDriver())
    found = module.attributes(b"cubin", "entry", driver_fakes.DEVICE, threads=128, dynamic_smem_bytes=6)
    assert found == {
        "registers": 100 + names.CU_FUNC_ATTRIBUTE_NUM_REGS,
        "static_smem_bytes": 100 + names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        "local_bytes": 100 + names.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
        "max_threads": 100 + names.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        "binary_version": 100 + names.CU_FUNC_ATTRIBUTE_BINARY_VERSION,
        "blocks_per_sm": 4 + 6,
    }
    assert fake.attributes == [(names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 6)]
    assert "blocks_per_sm" not in module.attributes(b"cubin", "entry", driver_fakes.DEVICE)
    assert len(fake.unloaded) == len(fake.loaded) == 2
