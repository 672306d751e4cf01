"""Settings of all tests."""

import gc
import itertools
import os

import driver_fakes
import pytest
import torch
import tune_fakes

from multiattn.run import cache, calls

os.environ["MULTIATTN_TUNED"] = "0"  # no test depends on what this user has tuned
torch.set_num_threads(1)  # `make test` runs a process on each core


def pytest_collection_finish():
    """Let no collection of garbage look again at all that was imported and collected: that takes 0.4 s a time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Let Python end as always: what is frozen is not freed, and libtriton reports what outlives it."""
    gc.unfreeze()


def forget_calls():
    calls._forward.clear()
    calls._backward.clear()


@pytest.fixture
def fresh_calls():
    """No call finds what one before the test made ready, nor one after it what the test did."""
    forget_calls()
    yield
    forget_calls()


@pytest.fixture
def driver(monkeypatch):
    """A driver that only remembers what it was asked."""
    return driver_fakes.install(monkeypatch, driver_fakes.FakeDriver())


@pytest.fixture
def own_caches(monkeypatch, tmp_path, fresh_calls):
    """The folders in which compilers keep what they make: of this test alone, as other processes compile, too."""
    triton = pytest.importorskip("triton")
    folders = tmp_path / "multiattn", tmp_path / "triton"
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(folders[0]))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folders[1]))
    return folders


@pytest.fixture
def gpu(monkeypatch):
    """That of `tune_fakes`, whose kernels take the time that a test says."""
    yield from tune_fakes.install_gpu(monkeypatch)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The files of what is tuned, of a test's own."""
    yield from tune_fakes.install_folder(monkeypatch, tmp_path)


@pytest.fixture
def ran(monkeypatch):
    """PyTorch's attention is ours; the directions that ours ran, in order."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    import multiattn.integrations.torch as provider
    from multiattn.integrations import flash, sdpa

    directions = []
    for module, direction in itertools.product((sdpa, flash), ("forward", "backward")):
        run = getattr(module, f"run_{direction}")

        def spy(ready, *arguments, direction=direction, run=run):
            directions.append(direction)
            return run(ready, *arguments)

        monkeypatch.setattr(module, f"run_{direction}", spy)
    activate_flash_attention_impl(provider.NAME)
    yield directions
    provider.use("auto")
    restore_flash_attention_impl()
