"""The host path of a GPU launch, against a driver that only remembers what it was asked: no GPU needed."""

import threading
from dataclasses import replace

import driver_fakes
import pytest
import torch
from cuda_runs import CONFIG, with_nvrtc

from multiattn.cuda import BACKEND, compile, launch
from multiattn.cuda.axes import SPLIT_Q
from multiattn.cuda.backward_mma import dq_sum_bytes
from multiattn.cuda.instances import launches_of
from multiattn.cuda.params import argument_of, params_of
from multiattn.cuda.variants import WGMMA
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import make_plan
from multiattn.problem import Problem
from multiattn.run import cache

pytestmark = with_nvrtc
SINKS = torch.zeros(4)
HOPPER = ("wgmma", "wgmma_ordered", "wgmma_two_pass", "wgmma_stored", "wgmma_wide", "split_keys")
"""Variants whose kernels begin while those before them end."""
SIZES = {"batch": 2, "seq_q": 300, "seq_kv": 500, "head_dim": 64}
CASES = {
    "mma": ("forward", SPLIT_Q.name, {"causal": True}),
    "hopper": ("forward", WGMMA.name, {"causal": True}),
    "window": ("forward", SPLIT_Q.name, {"window": (70, None), "sinks": SINKS}),
    "scores": ("forward", SPLIT_Q.name, {"has_scores": True}),
    "parts": ("forward", "split_keys", {"sizes": SIZES | {"seq_q": 1}}),
    **{f"{it.name} gradients": ("backward", it.name, {"causal": True}) for it in BACKEND.backward.variants},
    "gradients of sinks": ("backward", "atomic", {"causal": True, "sinks": SINKS}),
    "two passes of sinks": ("backward", "two_pass", {"sinks": SINKS}),
    "gradients of scores": ("backward", "two_pass", {"has_scores": True}),
}


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A driver with the second of several H200 current; nothing is compiled."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(b"cubin")
    monkeypatch.setattr(launch, "cubin_path", lambda kernel, arch: cubin)
    monkeypatch.setattr(launch, "_load", launch._load.__wrapped__)  # for once, nothing is kept
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    return driver_fakes.install(monkeypatch, driver_fakes.FakeDriver())


def plan_of(problem, variant=SPLIT_Q.name, config=None, direction="forward"):
    options = {"direction": direction, "variant": variant, "config": config, "probe": False}
    return make_plan(BACKEND, problem, ARCHS["sm90"], **options)


def bindings_of(plan, *, has_dlse=False):
    return [
        abi.Binding(
            arguments=(argument_of(it, plan, has_dlse=has_dlse),), grid=(it.grid(132), 1, 1), image=it.image(),
            constants={},
        )
        for it in launches_of(plan)
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_driver_is_handed_every_tensor_of_each_kernel(driver, case):
    """In order, each kernel with one struct, whose numbers parity holds by emulation."""
    direction, variant, options = CASES[case]
    given, problem = driver_fakes.asked(direction, **{"sizes": SIZES, **options})
    plan = plan_of(problem, variant, direction=direction)
    launcher, launches = BACKEND.op(direction).prepare(plan), launches_of(plan)
    for dlse in (None, given.lse.clone())[: 2 if direction == "backward" else 1]:
        bindings = bindings_of(plan, has_dlse=dlse is not None)
        known = driver_fakes.check_run(driver, launcher, bindings, given._replace(dlse=dlse))
        assert driver.kernels[-len(launches) :] == [it.kernel.name for it in launches]
        assert [it.function for it in driver.launched] == driver.resident[-len(launches) :]
        assert {it.overlaps for it in driver.launched} == {variant in HOPPER}
    sizes = {it.function: it.smem_bytes for it in driver.launched if it.smem_bytes > 48 * 1024}
    assert sizes.items() <= dict(driver.attributes_of(8)).items()
    if case == "atomic gradients":
        assert known["delta"] - known["dq_sum"] == dq_sum_bytes(problem)
        assert len({it.places for it in driver.launched}) == 1  # one struct for all


def test_names_of_kernels_and_bounds_of_a_window():
    """Bounds are numbers, at most those that hide nothing; sinks are an operand of a kernel of its own name."""
    problem = Problem.contiguous(heads_q=4, **SIZES, window=(70, None), has_sinks=True)
    launched = launches_of(plan_of(problem))[-1]
    kernel = launched.kernel
    assert kernel.name.startswith("forward_bf16_d64_two_sided_")
    assert kernel.name.endswith("_sinks")
    params = params_of(launched, plan_of(problem))
    assert (params.left, params.right) == (70, 299)


def test_hopper_has_tensor_maps_and_a_counter(driver):
    given, problem = driver_fakes.asked("forward", sizes=SIZES, causal=True)
    plan = plan_of(problem, WGMMA.name, CONFIG)
    driver_fakes.check_run(driver, BACKEND.forward.prepare(plan), bindings_of(plan), given)
    (launched,) = driver.launched
    assert (launched.grid, launched.block, launched.smem_bytes) == ((24, 1, 1), (384, 1, 1), CONFIG.smem_bytes(problem))
    assert launched.places[0] % abi.TENSOR_MAP_ALIGNMENT == 0
    assert driver.did == ["id", "clear", "launch"]
    row = 64 * 2  # bytes
    assert driver.encoded[0] == (
        *(given.q.data_ptr(), 9, 4),
        [[64, 300, 4, 2], [row, 300 * row, 4 * 300 * row], [64, 128, 1, 1], [1, 1, 1, 1]],
        (0, 3, 3, 0),
    )


@pytest.mark.parametrize(("scheduler", "blocks"), [("one_tile", 240), ("static", 132), ("dynamic", 132)])
def test_a_scheduler_has_its_grid_and_its_counter(driver, scheduler, blocks):
    given, problem = driver_fakes.asked("forward", sizes=SIZES | {"batch": 20})
    plan = plan_of(problem, WGMMA.name, replace(CONFIG, scheduler=scheduler))
    known = driver_fakes.check_run(driver, BACKEND.forward.prepare(plan), bindings_of(plan), given)
    assert driver.launched[0].grid == (blocks, 1, 1)
    assert (abi.WORKSPACE in known) == bool(driver.cleared) == (scheduler == "dynamic")


def test_what_is_compiled_ahead_is_compiled_at_one_time_and_not_again(monkeypatch, tmp_path):
    """Each kernel waits for the others; a launch would find them on disk."""
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=64, head_dim=64)
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction="backward", probe=False)
    kernels = {it.kernel for it in launches_of(plan)}
    together, made = threading.Barrier(len(kernels), timeout=60), []

    def compile_one(source, target):
        together.wait()
        made.append(target)
        return b"code"

    monkeypatch.setattr("multiattn.cuda.compile._compile", compile_one)
    for _ in range(2):
        BACKEND.backward.compile_ahead(plan)
    assert len(made) == len(kernels) > 1


@pytest.mark.parametrize(
    ("scale", "sign"), [(2.0, 1), (-0.5, -1), (0.0, 0), (1e-44, 0), (-1e-40, 0)], ids=lambda value: str(value)
)
def test_the_sign_of_the_scale_is_apart(scale, sign):
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=4, head_dim=8, scale=scale)
    plan = plan_of(problem)
    params = params_of(launches_of(plan)[-1], plan)
    assert (params.scale_sign, params.scale_log2) == (sign, pytest.approx(problem.scale_log2))
    assert params.scale_log2 >= torch.finfo(torch.float32).tiny


def test_heads_share_l2_in_whole_groups():
    for seq_kv, heads_kv, expected in ((1 << 10, 4, 8), (1 << 16, 4, 2), (1 << 12, 64, 16)):
        problem = Problem.contiguous(batch=1, heads_q=2 * heads_kv, heads_kv=heads_kv, seq_q=4, seq_kv=seq_kv,
                                     head_dim=128)  # fmt: skip
        plan = plan_of(problem)
        assert params_of(launches_of(plan)[-1], plan).heads_per_section == expected


def test_kernels_that_take_turns_are_exported_once(monkeypatch):
    problem = Problem.contiguous(batch=1, heads_q=8, seq_q=16384, head_dim=256)
    plan = plan_of(problem, "wgmma_stored", direction="backward")
    assert len(launches_of(plan)) == 1 + 2 * 4
    monkeypatch.setattr(compile, "_compile", lambda source, target: b"")
    exported = [it.kernel for it in compile.export_plan(plan, ())]
    assert len(exported) == len(set(exported)) == 3
