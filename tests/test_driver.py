"""The driver, and a thread's CUDA context, against a driver that only remembers what it was asked."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import driver_fakes
import pytest
import torch

from multiattn.run import compat
from multiattn.run import driver as module
from multiattn.run import execute as launching


def test_a_thread_without_a_context_gets_that_of_pytorch_once(driver):
    driver.current = 0
    for _ in range(3):
        module.ensure_context(1)
    assert driver.contexts == ["current?", 1]
    with ThreadPoolExecutor(1) as other:
        other.submit(module.ensure_context, 0).result()
    assert driver.contexts[2:] == ["current?", 0]


def test_a_context_that_is_there_stays_unless_another_is_asked_for(driver):
    module.ensure_context(0)
    assert driver.contexts == ["current?"]
    module.make_context_current(1)
    assert driver.contexts[1:] == [1]


def test_without_a_driver_nothing_happens_unless_it_must(monkeypatch):
    driver_fakes.install(monkeypatch, None)
    module.ensure_context(0)
    with pytest.raises(OSError, match="no NVIDIA driver"):
        module.make_context_current(0)


def test_an_error_has_the_drivers_words(driver):
    driver.context_status = 3
    with pytest.raises(RuntimeError, match="cuCtxGetCurrent: CUDA_ERROR_OTHER: its words"):
        module.ensure_context(0)


def test_every_launch_sees_to_it(monkeypatch):
    seen = []
    monkeypatch.setattr(launching, "ensure_context", lambda index: seen.append(f"context {index}"))
    monkeypatch.setattr(compat, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: contextlib.nullcontext(seen.append(f"device {device.index}"))
    )
    for device in (torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 0)):
        with launching.on_device(device):
            seen.append(f"body {device}")
    assert seen == ["body cpu", "context 1", "body cuda:1", "device 0", "context 0", "body cuda:0"]
