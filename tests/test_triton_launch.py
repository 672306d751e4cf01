"""The launcher of a compiled Triton kernel: the driver's launch is what Triton's would be, or Triton's own is used."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from types import SimpleNamespace

import driver_fakes
import pytest
import torch

from multiattn import Problem
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import make_plan
from multiattn.problem import Operands
from multiattn.triton import BACKEND
from multiattn.triton.bind import bind

pytestmark = pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())))

FUNCTION = 1 << 40
CASES = {
    "descriptors GQA": ("full", "sm90", {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 100, "seq_kv": 130}),
    "pointers causal": (
        "pointer_full",
        "sm80",
        {"batch": 2, "heads_q": 4, "seq_q": 100, "causal": True, "scale": -1.0},
    ),
    "pointers all ones": ("pointer_full", "sm120", {"batch": 1, "heads_q": 1, "seq_q": 1}),
}


def plan_of(case):
    variant, arch, sizes = CASES[case]
    problem = Problem.contiguous(head_dim=64, **sizes)
    return make_plan(BACKEND, problem, ARCHS[arch], variant=variant, probe=False)


@functools.cache
def compiled(case):
    from multiattn.triton.compile import specialise
    from multiattn.triton.launch import calls_of

    plan = plan_of(case)
    return specialise(*calls_of(plan), plan.arch)


class Kernel:
    """A CompiledKernel as on a GPU, where `launched` has what goes through Triton: (grid, arguments, stream)."""

    def __init__(self, case, **metadata):
        kernel = compiled(case)
        self.src, self.asm, self.function = kernel.src, kernel.asm, FUNCTION
        self.metadata = SimpleNamespace(**{**kernel.metadata._asdict(), **metadata})
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.launched.append((grid, arguments, stream))


def prepare(monkeypatch, case, kernel):
    """The Plan, its launcher and the driver, of the kernel that the JIT gives."""
    from multiattn.triton.kernels import forward
    from multiattn.triton.signature import image_of

    plan = plan_of(case)
    binding = bind(plan, image_of(compiled(case).metadata))
    fake = driver_fakes.FakeDriver([abi.size_of(argument) for argument in binding.arguments])
    driver = driver_fakes.install(monkeypatch, fake)
    monkeypatch.setattr(forward.attention_forward, "warmup", lambda *arguments, **options: kernel)
    return plan, BACKEND.forward.prepare(plan), driver, binding


def tensors(plan):
    problem = plan.problem
    shape = (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim)
    keys = (problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim)
    q, k, v = (torch.zeros(each, dtype=torch.bfloat16) for each in (shape, keys, keys))
    return Operands(q, k, v, torch.empty_like(q), torch.empty(shape[:3]))


@pytest.fixture
def _not_yet_warned(monkeypatch):
    from multiattn.triton import launch

    monkeypatch.setattr(launch, "_warned", set())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("_not_yet_warned")
def test_the_driver_is_handed_what_the_binding_says(monkeypatch, case):
    kernel = Kernel(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan, launch, driver, binding = prepare(monkeypatch, case, kernel)
    given = tensors(plan)
    for _ in range(2):
        launch(given)
    addresses = {name: it.data_ptr() for name, it in zip(("q", "k", "v", "out", "lse"), given, strict=False)}
    encode = lambda of, address: address.to_bytes(8, "little") * 16  # noqa: E731  # as the fake driver
    wanted = tuple(abi.pack(argument, addresses, encode) for argument in binding.arguments)
    assert [launched.parameters for launched in driver.launched] == [wanted] * 2
    launched = driver.launched[0]
    threads, smem_bytes = 32 * kernel.metadata.num_warps, kernel.metadata.shared
    assert (launched.function, launched.grid, launched.block) == (FUNCTION, binding.grid, (threads, 1, 1))
    assert (launched.smem_bytes, launched.stream, launched.overlaps) == (smem_bytes, 70, False)
    assert kernel.launched == []
    assert launch.kernels[0].keeps is kernel  # which unloads the code when nobody has it


@pytest.mark.usefixtures("_not_yet_warned")
def test_a_kernel_that_may_overlap_does(monkeypatch):
    case = "pointers all ones"
    plan, launch, driver, _ = prepare(monkeypatch, case, Kernel(case, launch_pdl=True))
    launch(tensors(plan))
    assert driver.launched[0].overlaps


@pytest.mark.usefixtures("_not_yet_warned")
@pytest.mark.parametrize(
    "metadata",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 16},
        {"profile_scratch_size": 16},
        {"shared": 229 * 1024},
    ],
    ids=str,
)
def test_what_needs_more_than_arguments_goes_through_triton(monkeypatch, metadata):
    """By name of its stream: else Triton asks its process-wide driver, which another thread may have set to any."""
    case = "pointers causal"
    kernel = Kernel(case, **metadata)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan, launch, driver, _ = prepare(monkeypatch, case, kernel)
    given = tensors(plan)
    launch(given)
    ((grid, arguments, stream),) = kernel.launched
    assert (grid, stream) == ((2 * 4 * -(-100 // plan.config.tile_m), 1, 1), 70)
    assert all(got is wanted for got, wanted in zip(arguments, given[:5], strict=False))
    assert driver.launched == []


@pytest.mark.usefixtures("_not_yet_warned")
def test_launches_that_somebody_listens_to_go_through_triton(monkeypatch):
    from triton import knobs

    case = "pointers causal"
    for listens in (lambda metadata: None, SimpleNamespace(calls=[print])):
        kernel = Kernel(case)
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, "launch_exit_hook", listens)
            plan, launch, _, _ = prepare(patch, case, kernel)
        with monkeypatch.context() as patch:
            driver_fakes.install(patch, driver_fakes.FakeDriver())
            launch(tensors(plan))
        assert len(kernel.launched) == 1


@pytest.mark.usefixtures("_not_yet_warned")
@pytest.mark.parametrize("other", ["another signature", "another cubin", "no metadata", "less metadata"])
def test_a_release_that_is_not_known_goes_through_triton_and_says_so_once(monkeypatch, other):
    case = "descriptors GQA"
    kernel = Kernel(case)
    if other == "another signature":
        names = {name: kind if kind != "fp32" else "fp64" for name, kind in kernel.src.signature.items()}
        kernel.src = SimpleNamespace(fn=kernel.src.fn, signature=names)
    elif other == "another cubin":
        kernel.asm = {"cubin": compiled("pointers causal").asm["cubin"]}
    elif other == "no metadata":
        del kernel.metadata
    else:
        kernel.metadata.tensordesc_meta = None
    with pytest.warns(RuntimeWarning, match="Triton's own launcher is used"):
        plan, launch, driver, _ = prepare(monkeypatch, case, kernel)
    launch(tensors(plan))
    assert (len(kernel.launched), driver.launched) == (1, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(monkeypatch, case, kernel)


def test_a_binding_of_another_grid_is_refused():
    from multiattn.triton.launch import calls_of
    from multiattn.triton.signature import image_of, prove

    case = "pointers all ones"
    plan, kernel = plan_of(case), compiled(case)
    binding = bind(plan, image_of(kernel.metadata))
    prove(binding, calls_of(plan)[0], kernel)
    with pytest.raises(ValueError, match="grid: got"):
        prove(replace(binding, grid=(7, 1, 1)), calls_of(plan)[0], kernel)


@pytest.mark.usefixtures("_not_yet_warned")
def test_a_gluon_kernel_has_its_maps_its_counter_and_may_overlap(monkeypatch):
    from multiattn.triton.compile import specialise
    from multiattn.triton.gluon_configs import VARIANT
    from multiattn.triton.kernels.gluon import forward
    from multiattn.triton.launch import calls_of
    from multiattn.triton.signature import image_of

    problem = Problem.contiguous(batch=2, heads_q=4, heads_kv=2, seq_q=300, head_dim=96, causal=True)
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], variant=VARIANT, probe=False)
    plan = replace(plan, config=replace(plan.config, scheduler="dynamic"))
    (call,) = calls_of(plan)
    kernel = specialise(call, plan.arch)
    loaded = Kernel("pointers all ones")
    loaded.src, loaded.asm, loaded.metadata = kernel.src, kernel.asm, kernel.metadata
    binding = bind(plan, image_of(kernel.metadata))
    driver = driver_fakes.install(
        monkeypatch, driver_fakes.FakeDriver([abi.size_of(argument) for argument in binding.arguments])
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=5))
    monkeypatch.setattr(forward.attention_forward, "warmup", lambda *arguments, **options: loaded)
    launch = BACKEND.forward.prepare(plan)
    given = tensors(plan)
    for driver.stream in (0, 70, 0):
        launch(given)
    addresses = {name: it.data_ptr() for name, it in zip(("q", "k", "v", "out", "lse"), given, strict=False)}
    encode = lambda of, address: address.to_bytes(8, "little") * 16  # noqa: E731  # as the fake driver
    counters = [address for address, *_ in driver.cleared]
    for launched, counter in zip(driver.launched, (*counters, counters[0]), strict=True):
        addresses[abi.WORKSPACE] = counter
        assert launched.parameters == tuple(abi.pack(argument, addresses, encode) for argument in binding.arguments)
        assert (launched.overlaps, launched.grid, launched.block[0]) == (True, (5, 1, 1), binding.image.threads)
    assert sum(isinstance(argument, abi.TensorMap) for argument in binding.arguments) == 8


# ---------------------------------------------------------------- backward


@pytest.mark.usefixtures("_not_yet_warned")
@pytest.mark.parametrize("variant", [variant.name for variant in BACKEND.backward.variants])
def test_a_backward_hands_the_driver_every_tensor_of_each_of_its_kernels(monkeypatch, variant):
    """k, v, dk and dv are laid out each in its own way, so that none passes for another; with and without dlse."""
    from multiattn.triton import signature
    from multiattn.triton.compile import specialise
    from multiattn.triton.kernels import backward
    from multiattn.triton.launch import calls_of

    q = torch.zeros(1, 4, 128, 32, dtype=torch.bfloat16)
    k, v = torch.zeros(1, 192, 2, 32).bfloat16().transpose(1, 2), torch.zeros(1, 2, 192, 32).bfloat16()
    plan = make_plan(BACKEND, Problem.of(q, k, v), ARCHS["sm90"], direction="backward", variant=variant, probe=False)
    code = {}
    for index, call in enumerate(calls_of(plan)):
        kernel, loaded = specialise(call, plan.arch), Kernel("pointers all ones")
        loaded.src, loaded.asm, loaded.metadata = kernel.src, kernel.asm, kernel.metadata
        loaded.function = FUNCTION + index
        monkeypatch.setattr(getattr(backward, call.table.kernel), "warmup", lambda *args, kernel=loaded, **how: kernel)
        code[call.table.kernel] = loaded
    driver = driver_fakes.install(monkeypatch, driver_fakes.FakeDriver({}))
    row = torch.empty(1, 4, 128)
    given = Operands(q, k, v, q.clone(), row, q.clone(), None, q.clone(), torch.empty_like(k), torch.empty_like(v))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch = BACKEND.backward.prepare(plan)
        for dlse in (None, row.clone()):
            driver.launched.clear()
            calls = calls_of(plan, has_dlse=dlse is not None)
            bindings = {
                code[call.table.kernel].function: signature.binding_of(code[call.table.kernel], call) for call in calls
            }
            driver.sizes = {it: [abi.size_of(each) for each in of.arguments] for it, of in bindings.items()}
            launch(given._replace(dlse=dlse))
            assert [it.function for it in driver.launched] == list(bindings)
            known = {name: it.data_ptr() for name, it in given._replace(dlse=dlse)._asdict().items() if it is not None}
            # The kernel that comes before others has delta as a pointer, and with one pass also dq_sum.
            first, *_ = driver.launched
            for got, argument in zip(first.parameters, bindings[first.function].arguments, strict=True):
                if isinstance(argument, abi.Pointer) and argument.tensor in ("delta", "dq_sum"):
                    known[argument.tensor] = int.from_bytes(got, "little")
            encode = lambda of, address: address.to_bytes(8, "little") * 16  # noqa: E731  # as the fake driver
            for launched in driver.launched:
                arguments = bindings[launched.function].arguments
                assert launched.parameters == tuple(abi.pack(argument, known, encode) for argument in arguments)
                assert all(kernel.launched == [] for kernel in code.values())


def test_a_table_of_other_names_is_refused():
    from multiattn.triton.launch import Call
    from multiattn.triton.parameters import tables_of

    plan = plan_of("pointers causal")
    (table,) = tables_of(plan)
    rows = dict(reversed(table.rows.items()))
    with pytest.raises(ValueError, match=r"attention_forward: got rows .*; allowed"):
        Call(plan, replace(table, rows=rows))
