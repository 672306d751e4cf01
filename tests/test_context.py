"""A thread's CUDA context, against a driver that only remembers what it was asked."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from multiattn import context, launching

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
    monkeypatch.setattr(context, "_thread", threading.local())


def use(monkeypatch, driver):
    monkeypatch.setattr(context, "load_driver", lambda: driver)
    return driver


def test_a_thread_without_a_context_gets_that_of_pytorch_once(monkeypatch):
    driver = use(monkeypatch, FakeDriver())
    for _ in range(3):
        context.ensure_context(1)
    assert driver.asked == ["current?", "primary of 1", f"set {PRIMARY:#x}"]
    with ThreadPoolExecutor(1) as other:
        other.submit(context.ensure_context, 0).result()
    assert driver.asked[3:] == ["current?", "primary of 0", f"set {PRIMARY:#x}"]


def test_a_context_that_is_there_stays(monkeypatch):
    driver = use(monkeypatch, FakeDriver(current=0xBEEF))
    context.ensure_context(0)
    assert driver.asked == ["current?"]


def test_one_that_is_asked_for_takes_the_place_of_another(monkeypatch):
    driver = use(monkeypatch, FakeDriver(current=0xBEEF))
    context.make_context_current(1)
    assert driver.asked == ["primary of 1", f"set {PRIMARY:#x}"]


def test_without_a_driver_nothing_happens_unless_it_must(monkeypatch):
    use(monkeypatch, None)
    context.ensure_context(0)
    with pytest.raises(OSError, match="cuda"):
        context.make_context_current(0)


def test_an_error_has_the_drivers_words(monkeypatch):
    use(monkeypatch, FakeDriver(status=3))
    with pytest.raises(RuntimeError, match="CUDA driver: CUDA_ERROR_NOT_INITIALIZED: initialization error"):
        context.ensure_context(0)


def test_every_launch_sees_to_it(monkeypatch):
    ensured = []
    monkeypatch.setattr(launching, "ensure_context", ensured.append)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    with launching._on(torch.device("cpu")), launching._on(torch.device("cuda", 1)):
        pass
    assert ensured == [1]
    assert isinstance(launching._on(torch.device("cuda", 0)), torch.cuda.device)  # makes its own current
