"""The host path of a GPU launch, against a driver that only remembers what it was asked: no GPU needed."""

import ctypes
import math
import threading
from dataclasses import replace

import driver_fakes
import pytest
import torch
from cuda_runs import CONFIG, with_nvrtc

from multiattn.cuda import BACKEND, launch
from multiattn.cuda.axes import SPLIT_Q
from multiattn.cuda.backward_mma import dq_sum_bytes
from multiattn.cuda.instances import kernels_of, launches_of
from multiattn.cuda.params import params_of
from multiattn.cuda.score import lowered_of, with_aux
from multiattn.cuda.source import BackwardParams, ForwardParams, WgmmaParams
from multiattn.cuda.variants import WGMMA
from multiattn.operands import Operands, Options, with_score
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import make_plan
from multiattn.problem import Problem
from multiattn.run import cache

pytestmark = with_nvrtc


class FakeDriver(driver_fakes.FakeDriver):
    """NVIDIA's library: `kernels` has the names of all that were loaded, `structs` the `params` of each launch."""

    def __init__(self, params):
        super().__init__((ctypes.sizeof(params),))
        self.params, self.kernels = params, []

    def cuLibraryGetKernel(self, kernel, library, symbol):  # noqa: N802
        self.kernels.append(symbol.decode())
        return super().cuLibraryGetKernel(kernel, library, symbol)

    @property
    def structs(self):
        return [self.params.from_buffer_copy(launched.parameters[0]) for launched in self.launched]


@pytest.fixture
def install(monkeypatch, tmp_path):
    """A driver of kernels that take such a struct, with the second of several H200 current; nothing is compiled."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(b"cubin")
    monkeypatch.setattr(launch, "cubin_path", lambda kernel, arch: cubin)
    monkeypatch.setattr(launch, "_load", launch._load.__wrapped__)  # for once, nothing is kept
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    return lambda params: driver_fakes.install(monkeypatch, FakeDriver(params))


def plan_of(problem, variant=SPLIT_Q, config=None, direction="forward"):
    options = {"direction": direction, "variant": variant.name, "config": config, "probe": False}
    return make_plan(BACKEND, problem, ARCHS["sm90"], **options)


def tensors(dtype=torch.float16):
    q, k = torch.zeros(2, 4, 300, 64, dtype=dtype), torch.zeros(2, 2, 500, 64, dtype=dtype)
    return q, k, k.clone(), torch.empty_like(q), torch.empty(2, 4, 300)


def test_a_launch_is_what_the_plan_says(install):
    driver = install(ForwardParams)
    q, k, v, out, lse = tensors()
    plan = plan_of(Problem.of(q, k, v, causal=True))
    BACKEND.forward.prepare(plan)(Operands(q, k, v, out, lse))
    ((launched,), (params,), (kernel,)) = driver.launched, driver.structs, driver.kernels
    assert kernel.startswith("forward_fp16_d64_causal_")
    assert [launched.function] == driver.resident
    assert launched.grid == (8 * math.ceil(300 / plan.config.tile_m), 1, 1)
    assert launched.block == (plan.config.threads, 1, 1)
    needed = plan.config.smem_bytes(plan.problem, SPLIT_Q)
    assert (launched.smem_bytes, launched.stream, launched.overlaps) == (needed, 70, False)
    assert driver.attributes == [(8, needed, launched.function, driver_fakes.DEVICE)]
    pointers = [params.q, params.k, params.v, params.out, params.lse]
    assert pointers == [tensor.data_ptr() for tensor in (q, k, v, out, lse)]
    assert (params.group, params.seq_q, params.seq_kv, params.heads) == (2, 300, 500, 8)
    assert (params.scale_sign, params.scale_log2) == (1, pytest.approx(math.log2(math.e) / 8))


def test_a_launch_on_hopper_has_tensor_maps_and_a_counter(install):
    hopper = install(WgmmaParams)
    q, k, v, out, lse = tensors(torch.bfloat16)
    plan = plan_of(Problem.of(q, k, v, causal=True), WGMMA, CONFIG)
    BACKEND.forward.prepare(plan)(Operands(q, k, v, out, lse))
    ((launched,), (params,), (kernel,)) = hopper.launched, hopper.structs, hopper.kernels
    assert kernel.startswith("forward_wgmma_bf16_d64_causal_")
    needed = CONFIG.smem_bytes(plan.problem)
    assert (launched.function, launched.grid, launched.block) == (hopper.resident[0], (24, 1, 1), (384, 1, 1))
    assert (launched.smem_bytes, launched.stream, launched.overlaps) == (needed, 70, True)
    assert launched.places[0] % abi.TENSOR_MAP_ALIGNMENT == 0
    named = {"q": q, "k": k, "v": v, "out": out}
    for name, tensor in named.items():
        assert bytes(getattr(params, f"map_{name}")) == tensor.data_ptr().to_bytes(8, "little") * 16
        assert getattr(params.forward, name) == tensor.data_ptr()
    assert params.forward.lse == lse.data_ptr()
    assert hopper.did == ["id", "clear", "launch"]
    row = 64 * 2  # bytes
    assert hopper.encoded[0] == (
        *(q.data_ptr(), 9, 4),
        [[64, 300, 4, 2], [row, 300 * row, 4 * 300 * row], [64, 128, 1, 1], [1, 1, 1, 1]],
        (0, 3, 3, 0),
    )


@pytest.mark.parametrize(("scheduler", "blocks"), [("one_tile", 240), ("static", 132), ("dynamic", 132)])
def test_a_scheduler_has_its_grid_and_its_counter(install, scheduler, blocks):
    hopper = install(WgmmaParams)
    q, k = torch.zeros(20, 4, 300, 64, dtype=torch.bfloat16), torch.zeros(20, 2, 500, 64, dtype=torch.bfloat16)
    plan = plan_of(Problem.of(q, k, k), WGMMA, replace(CONFIG, scheduler=scheduler))
    BACKEND.forward.prepare(plan)(Operands(q, k, k, torch.empty_like(q), torch.empty(20, 4, 300)))
    ((launched,), (params,)) = hopper.launched, hopper.structs
    assert launched.grid == (blocks, 1, 1)
    assert (params.forward.next_tile is not None) == bool(hopper.cleared) == (scheduler == "dynamic")


def test_a_window_and_sinks_are_arguments(install):
    """Bounds are numbers, at most those that hide nothing; sinks are an operand of a kernel of its own name."""
    driver, sinks = install(ForwardParams), torch.zeros(4)
    q, k, v, out, lse = tensors()
    plan = plan_of(Problem.of(q, k, v, window=(70, None), sinks=sinks))
    BACKEND.forward.prepare(plan)(Operands(q, k, v, out, lse, sinks=sinks))
    ((params,), (kernel,)) = driver.structs, driver.kernels
    assert kernel.startswith("forward_fp16_d64_two_sided_")
    assert kernel.endswith("_sinks")
    assert (params.left, params.right, params.sinks) == (70, 299, sinks.data_ptr())


def test_a_launch_hands_over_what_the_expression_reads(install):
    bias = torch.zeros(1, 2, 48, 96)[..., ::2]
    q = torch.zeros(1, 2, 48, 64, dtype=torch.bfloat16)
    operands, options = with_score(Operands(q, q, q), Options(), 5.0, None, bias, None)
    plan = plan_of(Problem.of_operands(operands, options))
    driver = install(with_aux(ForwardParams, lowered_of(plan)))
    BACKEND.forward.prepare(plan)(operands._replace(out=operands.q.clone(), lse=torch.empty(1, 2, 48)))
    ((params,), (kernel,)) = driver.structs, driver.kernels
    aux = params.aux
    assert kernel == kernels_of(plan)[0].name
    assert params.plain.q == operands.q.data_ptr()
    assert aux.tensor0 == bias.data_ptr()
    assert (aux.tensor0_stride1, aux.tensor0_stride2, aux.tensor0_stride3) == bias.stride()[1:]
    assert aux.x0 == pytest.approx(plan.problem.scale / 5.0)
    assert aux.x1 == pytest.approx(5.0 * math.log2(math.e))
    assert (params.plain.scale_sign, params.plain.scale_log2) == (1, 1.0)


@pytest.mark.parametrize("variant", ["atomic", "two_pass"])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("has_dlse", [False, True])
def test_a_backward_launches_its_kernels_in_order_with_one_struct(install, variant, has_dlse, has_sinks):
    driver = install(BackwardParams)
    given = driver_fakes.operands(batch=2, seq_q=300, seq_kv=500, head_dim=64, dtype=torch.float16)
    given = given._replace(dlse=given.lse.clone() if has_dlse else None)
    given = given._replace(delta=given.lse.clone()) if has_sinks else given
    problem = Problem.of(given.q, given.k, given.v, causal=True, sinks=torch.zeros(4) if has_sinks else None)
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction="backward", variant=variant, probe=False)
    BACKEND.backward.prepare(plan)(given)
    assert driver.kernels[: len(driver.launched)] == [each.kernel.name for each in launches_of(plan)]
    assert [each.function for each in driver.launched] == driver.resident[-len(driver.launched) :]
    assert {each.stream for each in driver.launched} == {70}
    assert len({each.places for each in driver.launched}) == 1
    params = driver.structs[0]
    for name, tensor in (given.named | {"dlse": given.dlse}).items():
        assert getattr(params, name) == (None if tensor is None else tensor.data_ptr()), name
    for name in ("k", "v", "dk", "dv"):
        found = getattr(params, f"strides_{name}")
        assert (found.batch, found.head, found.seq) == getattr(given, name).stride()[:3], name
    assert (params.delta is not None, params.dq_sum is not None) == (True, variant == "atomic")
    if variant == "atomic" and not has_sinks:
        assert params.delta - params.dq_sum == dq_sum_bytes(problem)


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
    params = params_of(kernels_of(plan)[-1], plan)
    assert (params.scale_sign, params.scale_log2) == (sign, pytest.approx(problem.scale_log2))
    assert params.scale_log2 >= torch.finfo(torch.float32).tiny


def test_heads_share_l2_in_whole_groups():
    for seq_kv, heads_kv, expected in ((1 << 10, 4, 8), (1 << 16, 4, 2), (1 << 12, 64, 16)):
        problem = Problem.contiguous(batch=1, heads_q=2 * heads_kv, heads_kv=heads_kv, seq_q=4, seq_kv=seq_kv,
                                     head_dim=128)  # fmt: skip
        plan = plan_of(problem)
        assert params_of(kernels_of(plan)[-1], plan).heads_per_section == expected
