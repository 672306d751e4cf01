"""cuTile's forward on a GPU: compiled once by its own compiler, launched by the driver, or else by cuTile itself."""

from __future__ import annotations

import platform
import warnings
from types import SimpleNamespace

import driver_fakes
import pytest
import torch

from multiattn import Problem
from multiattn.cutile.bind import bind
from multiattn.cutile.families import launches_of
from multiattn.operands import Operands
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.plan.schedule import most_multiprocessors

BACKEND = get("cutile")
pytestmark = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())) or "compiler found"
)


def plan_of(**sizes):
    sizes = {"batch": 1, "heads_q": 2, "seq_q": 128, "head_dim": 32, **sizes}
    return make_plan(BACKEND, Problem.contiguous(**sizes), ARCHS["sm90"], probe=False)


def tensors(plan):
    problem = plan.problem
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim)
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(3))
    return Operands(q, k, v, torch.empty_like(q), torch.empty(shape[:3]))


@pytest.fixture
def driver(monkeypatch):
    """A driver of a process that has compiled nothing and launches by cuTile into `by_cutile`."""
    from multiattn.cutile import launch as launching

    fake = driver_fakes.FakeDriver([abi.size_of(it) for it in bind(plan_of()).arguments])
    fake.by_cutile = []
    monkeypatch.setattr(launching, "_known", {})
    monkeypatch.setattr(launching, "_ahead", {})
    monkeypatch.setattr("multiattn.run.launch._warned", set())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    device = SimpleNamespace(multi_processor_count=most_multiprocessors(ARCHS["sm90"]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr("cuda.tile.launch", lambda stream, grid, kernel, args: fake.by_cutile.append((grid, args)))
    return driver_fakes.install(monkeypatch, fake)


@pytest.fixture
def compiled(monkeypatch):
    """Compilations: (signature, the limit of time)."""
    from cuda.tile._cext import default_tile_context

    from multiattn.cutile import compile as compiling

    seen, export_kernel = [], compiling.export_kernel

    def export(kernel, signatures, *arguments, **options):
        seen.append((signatures[0].symbol, default_tile_context.config.compiler_timeout_sec))
        export_kernel(kernel, signatures, *arguments, **options)

    monkeypatch.delenv("CUDA_TILE_COMPILER_TIMEOUT_SEC", raising=False)
    monkeypatch.setattr(compiling, "export_kernel", export)
    return seen


def test_the_driver_is_handed_what_the_binding_says(driver, compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_of()
        launch = BACKEND.forward.prepare(plan)
    assert [limit for _, limit in compiled] == [120.0]
    given = tensors(plan)
    for _ in range(2):
        launch(given)
    assert (driver.by_cutile, len(compiled), len(driver.loaded)) == ([], 1, 1)
    driver_fakes.check_launches(driver.launched, [bind(plan)] * 2, given)
    assert {(it.block, it.smem_bytes, it.overlaps) for it in driver.launched} == {((1, 1, 1), 0, False)}


def test_plans_with_one_signature_share_code(driver, compiled):
    launchers = [BACKEND.forward.prepare(plan_of(**sizes)) for sizes in ({}, {"seq_q": 256}, {"batch": 3}, {})]
    assert len(compiled) == len(driver.loaded) == 1
    assert len({launcher.kernels[0].function for launcher in launchers}) == 1
    BACKEND.forward.prepare(plan_of(causal=True))
    assert len(compiled) == len(driver.loaded) == 2


def test_what_was_compiled_ahead_is_loaded_and_kept_no_longer(driver, compiled):
    from multiattn.cutile import launch as launching

    for _ in range(2):
        BACKEND.forward.compile_ahead(plan_of())
    assert (len(compiled), len(driver.loaded), len(launching._ahead)) == (1, 0, 1)
    launchers = [BACKEND.forward.prepare(plan_of(**sizes)) for sizes in ({}, {"seq_q": 256})]
    assert (len(compiled), len(driver.loaded), launching._ahead) == (1, 1, {})
    assert len({launcher.kernels[0].function for launcher in launchers}) == 1


def test_a_compiler_that_takes_too_long_is_an_error(driver, monkeypatch):
    from multiattn.cutile import compile as compiling

    def export(*arguments, **options):
        raise TimeoutError("too long")

    monkeypatch.setattr(compiling, "export_kernel", export)
    with pytest.raises(TimeoutError, match="too long"):
        BACKEND.forward.prepare(plan_of())
    assert driver.by_cutile == []


def test_another_machine_is_left_to_cutile(driver, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    plan = plan_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch = BACKEND.forward.prepare(plan)
    launch(tensors(plan))
    ((grid, args),) = driver.by_cutile
    assert grid == bind(plan).grid
    assert (args[0].shape, driver.launched) == ((1, 2, 128, 32), [])


def test_a_release_that_is_not_known_is_left_to_cutile_and_says_so_once(driver, monkeypatch):

    def nothing(cubin):
        raise ValueError("cubin: got 0 sections .nv.tileir.debug_txt; allowed one")

    monkeypatch.setattr("multiattn.cutile.launch.tile_ir", nothing)
    plan = plan_of()
    with pytest.warns(RuntimeWarning, match="got 0 sections .*; ct.launch is used"):
        launch = BACKEND.forward.prepare(plan)
    launch(tensors(plan))
    assert (len(driver.by_cutile), driver.launched) == (1, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BACKEND.forward.prepare(plan)


# ---------------------------------------------------------------- backward


@pytest.mark.parametrize("variant", ["atomic", "two_pass"])
def test_a_backward_hands_the_driver_every_tensor_of_each_of_its_kernels(driver, compiled, variant):
    """With and without dlse."""
    operands = driver_fakes.operands()
    problem = Problem.of(operands.q, operands.k, operands.v)
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction="backward", variant=variant, probe=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch = BACKEND.backward.prepare(plan)
        count = len(compiled)
        for dlse in (None, operands.lse.clone()):
            given = operands._replace(dlse=dlse)
            driver.launched.clear()
            bindings = [it.binding for it in launches_of(plan, has_dlse=dlse is not None)]
            driver.sizes = [[abi.size_of(it) for it in binding.arguments] for binding in bindings]
            launch(given)
            driver_fakes.check_launches(driver.launched, bindings, given)
    assert len(compiled) == count + 1  # of the kernel that reads dlse
    assert driver.by_cutile == []
