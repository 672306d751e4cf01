"""The launcher of compiled Triton kernels: the driver's launch is what Triton's would be, or Triton's own is used."""

import functools
import threading
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import driver_fakes
import pytest
import torch
from triton import knobs
from triton.runtime.driver import driver as triton_driver

from multiattn import Problem
from multiattn.operands import Operands, with_score
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import make_plan
from multiattn.problem import options_of, problem_of
from multiattn.sequences import Batching
from multiattn.triton import BACKEND, launch
from multiattn.triton import compile as compiling
from multiattn.triton.bind import bind, checked_binding
from multiattn.triton.calls import Call, calls_of
from multiattn.triton.compile import compile_sources, specialise
from multiattn.triton.table import Constant, Integer, Tensor

pytestmark = pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason="; ".join(map(str, BACKEND.probe_compiler())))

DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MULTIPROCESSORS = 3
SINKS = torch.zeros(4)
CASES = {
    "descriptors": ("forward", "full", "sm90", {}),
    "pointers": ("forward", "full", "sm80", {"causal": True, "scale": -1.0}),
    "all ones": ("forward", "full", "sm80", {"sizes": {"heads_q": 1, "heads_kv": 1, "seq_q": 1}}),
    "gluon": ("forward", "warp_specialized", "sm90", {"sizes": {"head_dim": 48}, "causal": True}),
    "window": ("forward", "full", "sm90", {"window": (40, 3), "sinks": SINKS}),
    "scores": ("forward", "full", "sm90", {"causal": True, "sinks": SINKS, "has_scores": True}),
    "packed": ("forward", "full", "sm80", {"causal": True}),
    "parts": ("forward", "split_keys", "sm90", {"sizes": {"seq_q": 1}}),
    **{variant.name: ("backward", variant.name, "sm90", {}) for variant in BACKEND.backward.variants},
    "packed gradients": ("backward", "warp_specialized", "sm90", {}),
    "its gradients": ("backward", "two_pass", "sm80", {"window": (16, 1), "sinks": SINKS}),
    "gradients of scores": ("backward", "atomic", "sm80", {"sizes": {"seq_q": 1}, "has_scores": True}),
}
AT_NIGHT = ("packed gradients", "its gradients", "warp_specialized_two_pass", "two_pass", "scores")
"""Those that take longest to compile, of kinds of kernels that others have, too."""


def plan_of(case):
    direction, variant, arch, options = CASES[case]
    given, problem = driver_fakes.asked(direction, **options)
    if case.startswith("packed"):
        sizes = {"heads_q": 4, "heads_kv": 2, "seq_q": 90, "seq_kv": 70, "head_dim": 64}
        problem = Problem.contiguous(batch=1, batching=Batching.packed(3), **sizes, **options)
        given = Operands.like(problem.layouts, lambda it: torch.empty_strided(it.shape, it.strides, dtype=it.dtype))
        own = () if direction == "backward" else ("dout", "dq", "dk", "dv")
        given = given._replace(**dict.fromkeys(("delta", "dlse", *own)))
    plan = make_plan(BACKEND, problem, ARCHS[arch], direction=direction, variant=variant, probe=False)
    if case == "gluon":
        plan = replace(plan, config=replace(plan.config, scheduler="dynamic"))
    return plan, given


@functools.cache
def compiled(case):
    plan, _ = plan_of(case)
    return tuple(specialise(call, plan.arch) for call in calls_of(plan))


class Kernel:
    """A CompiledKernel as on a GPU, where `launched` has what goes through Triton: (grid, arguments, stream)."""

    def __init__(self, kernel, **metadata):
        self.src, self.asm = kernel.src, kernel.asm
        self.metadata = SimpleNamespace(**{**kernel.metadata._asdict(), **metadata})
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.launched.append((grid, arguments, stream))


def function_of(driver, kernel):
    return driver.kernel_of(kernel.asm["cubin"], kernel.metadata.name)


def prepare(monkeypatch, case, **metadata):
    """The launcher of a case and the driver; the kernels are those that the compiler gives."""
    plan, _ = plan_of(case)
    kernels = [Kernel(kernel, **metadata) for kernel in compiled(case)]
    return prepare_with(monkeypatch, plan, kernels)


def prepare_with(monkeypatch, plan, kernels):
    driver = driver_fakes.install(monkeypatch, driver_fakes.FakeDriver())
    monkeypatch.setattr("multiattn.run.launch._warned", set())
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(launch, "compile_sources", lambda sources: kernels)
    for call, kernel in zip(calls_of(plan), kernels, strict=True):
        monkeypatch.setattr(call.kernel, "warmup", lambda *arguments, kernel=kernel, **options: kernel)
    return BACKEND.op(plan.direction).prepare(plan), driver, kernels


@pytest.mark.parametrize(
    "case", [pytest.param(it, marks=pytest.mark.nightly if it in AT_NIGHT else ()) for it in CASES]
)
def test_the_driver_is_handed_every_tensor_of_each_kernel(monkeypatch, case):
    plan, given = plan_of(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launcher, driver, kernels = prepare(monkeypatch, case)
        for dlse in (None, None, given.lse.clone())[: 3 if plan.direction == "backward" else 2]:
            calls = calls_of(plan, has_dlse=dlse is not None, multiprocessors=MULTIPROCESSORS)
            bindings = [checked_binding(kernel, call.table) for kernel, call in zip(kernels, calls, strict=True)]
            known = driver_fakes.check_run(driver, launcher, bindings, given._replace(dlse=dlse))
            assert [it.function for it in driver.launched] == [function_of(driver, it) for it in kernels]
    assert all(kernel.launched == [] for kernel in kernels)
    assert [it.overlaps for it in driver.launched] == [kernel.metadata.launch_pdl for kernel in kernels]
    assert any(it.overlaps for it in driver.launched) == (
        case in ("gluon", "parts", "warp_specialized", "warp_specialized_two_pass", "packed gradients")
    )
    sizes = {function_of(driver, it): it.metadata.shared for it in kernels}
    assert dict(driver.attributes_of(DYNAMIC_SMEM)) == {it: size for it, size in sizes.items() if size}
    assert {it for it, *_ in driver.preferring} == {it for it, size in sizes.items() if size > 48 * 1024}
    assert triton_driver._active is None  # to make one takes a C compiler
    if case == "gluon":
        assert known[abi.WORKSPACE] == driver.cleared[0][0]
        assert driver.launched[0].grid == (MULTIPROCESSORS, 1, 1)
        assert sum(isinstance(it, abi.TensorMap) for it in bindings[0].arguments) == 8


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
    plan, given = plan_of("pointers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launcher, driver, (kernel,) = prepare(monkeypatch, "pointers", **metadata)
    launcher(given)
    ((grid, arguments, stream),) = kernel.launched
    assert (grid, stream) == ((calls_of(plan)[0].table.grid, 1, 1), 70)
    assert all(got is wanted for got, wanted in zip(arguments, given[:5], strict=False))
    assert driver.launched == []


def test_a_bug_of_ours_is_not_told_as_another_release(monkeypatch):
    """Arguments that Triton specialises on are ours; only the functions that do it are private."""

    def stubs(call):
        raise TypeError("ours")

    plan, _ = plan_of("two_pass")
    monkeypatch.setattr(Call, "stubs", stubs)
    with pytest.raises(TypeError, match="ours"):
        launch._for_driver(plan, calls_of(plan), 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("launch_enter_hook", lambda metadata: None),
        ("launch_exit_hook", SimpleNamespace(calls=[print])),
        ("kernel_load_end_hook", SimpleNamespace(calls=[print])),
        ("jit_post_compile_hook", print),
        ("add_stages_inspection_hook", print),
        ("debug", True),
    ],
)
@pytest.mark.parametrize("case", ["pointers", "gluon", "parts", "atomic"])
def test_launches_that_somebody_listens_to_go_through_triton(monkeypatch, name, value, case):
    """With memory of PyTorch's for areas of workspace, and for a counter of tiles, which is zero."""
    plan, given = plan_of(case)
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, name, value)
        launcher, driver, kernels = prepare(monkeypatch, case)
        if plan.direction == "backward":
            launcher(given)  # which is when it is made
    if plan.direction == "forward":
        launcher(given)
    assert driver.launched == []
    for call, kernel in zip(calls_of(plan), kernels, strict=True):
        ((_, arguments, _),) = kernel.launched
        named = dict(zip(call.table.rows, arguments, strict=True))
        assert case != "gluon" or named["counter"].tolist() == [0] * 4
        assert "delta" not in named or named["delta"].shape == given.lse.shape


@pytest.mark.parametrize("other", ["another signature", "another cubin", "no metadata", "less metadata"])
def test_a_release_that_is_not_known_goes_through_triton_and_says_so_once(monkeypatch, other):
    plan, given = plan_of("descriptors")
    kernel = Kernel(compiled("descriptors")[0])
    if other == "another signature":
        names = {name: kind if kind != "fp32" else "fp64" for name, kind in kernel.src.signature.items()}
        kernel.src = SimpleNamespace(**{**vars(kernel.src), "signature": names})
    elif other == "another cubin":
        kernel.asm = {"cubin": compiled("pointers")[0].asm["cubin"]}
    elif other == "no metadata":
        del kernel.metadata
    else:
        kernel.metadata.tensordesc_meta = None
    with pytest.warns(RuntimeWarning, match="Triton's own launcher is used"):
        launcher, driver, _ = prepare_with(monkeypatch, plan, [kernel])
    launcher(given)
    assert (len(kernel.launched), driver.launched) == (1, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BACKEND.forward.prepare(plan)


def test_the_jit_compiles_the_kernels_of_a_launch_at_one_time(monkeypatch):
    """Each waits for the others, in a thread that has the launch's device."""
    kernels = compiled("two_pass")
    together, devices = threading.Barrier(len(kernels), timeout=60), []
    kernel = SimpleNamespace(warmup=lambda *_, **__: together.wait())
    calls = [SimpleNamespace(kernel=kernel, table=it.table, stubs=tuple) for it in calls_of(plan_of("two_pass")[0])]
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    assert len(calls) > 1
    assert sorted(launch._by_jit(calls, 3)) == [*range(len(calls))]
    assert devices == [3] * len(calls)


class FakeSource:
    """A source whose Python and whose compiler go into `seen`; with `together` its compiler waits for the others'."""

    target = "sm90"

    def __init__(self, key, is_gluon, seen, together=None):
        self.key, self.is_gluon, self.seen, self.together = key, is_gluon, seen, together

    def compile(self, *, wait=int, then=int):
        try:
            wait()
            self.seen.append(f"python {self.key}")
            time.sleep(0.01)
        finally:
            self.seen.append(f"end {self.key}")
            then()
        if self.together is None:
            raise ValueError(self.key)
        self.together.wait()
        return f"code of {self.key}"


def test_kernels_of_a_launch_are_compiled_at_one_time_but_their_python(monkeypatch):
    """Python takes turns, Gluon's first; the compilers wait for each other."""
    monkeypatch.setattr(compiling, "_known", {})
    together, seen = threading.Barrier(3, timeout=60), []
    monkeypatch.setattr(compiling.ahead, "begin", lambda: seen.append("a backward ahead begins"))
    sources = [FakeSource(key, key == "b", seen, together) for key in "abc"]
    assert compile_sources(sources) == [f"code of {key}" for key in "abc"]
    python = [f"{step} {key}" for key in "bac" for step in ("python", "end")]
    assert seen == [*python, "a backward ahead begins"]
    assert compile_sources(sources[::-1]) == [f"code of {key}" for key in "cba"]
    assert len(seen) == 7


def test_a_kernel_that_fails_holds_up_no_other_and_is_compiled_again(monkeypatch):
    monkeypatch.setattr(compiling, "_known", {})
    seen, alone = [], threading.Barrier(1)
    sources = [FakeSource("bad", True, seen), FakeSource("good", False, seen, alone)]
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            compile_sources(sources)
    assert seen.count("python bad") == seen.count("python good") == 2
    sources[0].together = alone
    assert compile_sources(sources) == ["code of bad", "code of good"]


@pytest.mark.parametrize("case", ["packed", pytest.param("warp_specialized_two_pass", marks=pytest.mark.nightly)])
def test_what_is_compiled_ahead_is_what_a_launch_wants(monkeypatch, tmp_path, case):
    """The launch compiles nothing more."""
    monkeypatch.setattr(compiling, "_known", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plan, _ = plan_of(case)
    expected = [kernel.asm["cubin"] for kernel in compiled(case)]
    BACKEND.op(plan.direction).compile_ahead(plan)
    monkeypatch.setattr(compiling.triton, "compile", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda it: SimpleNamespace(multi_processor_count=132))
    driver = driver_fakes.install(monkeypatch, driver_fakes.FakeDriver())
    BACKEND.op(plan.direction).prepare(plan)
    assert driver.loaded == expected


@pytest.mark.parametrize(
    ("name", "row", "error"),
    [
        ("q", 1.0, r"q: got 1\.0; Triton has \*bf16 multiple of 16"),
        ("q", Tensor(of="q", is_aligned=False), r"q: got .*; Triton has \*bf16 multiple of 16"),
        ("scale", Integer(value=3), r"scale: got Integer.*; Triton has fp32"),
        ("sizes", {"seq_q": Integer(value=128, specialised=True)}, r"seq_q: got .*; Triton has i32$"),
        ("strides", {"q": {"q_batch": Integer(value=16, specialised=True)}}, r"q_batch: got .*; Triton has i32$"),
        ("C", Constant(value="another"), r"C: got .*; Triton has constexpr TileConstants"),
    ],
    ids=lambda it: it if isinstance(it, str) and it.isidentifier() else "",
)
def test_a_row_that_is_not_what_triton_compiled_is_refused(name, row, error):
    plan, _ = plan_of("pointers")
    (kernel,), (call,) = compiled("pointers"), calls_of(plan)
    binding = checked_binding(kernel, call.table)
    assert bind(plan, binding.image).arguments == binding.arguments
    with pytest.raises(ValueError, match=error):
        checked_binding(kernel, replace(call.table, rows={**call.table.rows, name: row}))


def test_an_emitted_kernel_takes_any_bias_and_softcap_of_its_own_program():
    plan, given = plan_of("scores")
    (kernel,), (call,) = compiled("scores"), calls_of(plan)
    image = checked_binding(kernel, call.table).image
    known, plain = bind(plan, image).constants, options_of(plan.problem)._replace(score=None)
    slopes, bias = given.captured
    for softcap, other, same in ((3.0, bias.contiguous(), True), (2.0, bias[:, :1], False), (None, bias, False)):
        modified = problem_of(*with_score(given, plain, softcap, slopes, other, None))
        assert (bind(replace(plan, problem=modified), image, known).constants["score"] == known["score"]) == same


def test_a_table_of_other_names_is_refused():
    plan, _ = plan_of("pointers")
    (call,) = calls_of(plan)
    with pytest.raises(ValueError, match=r"attention_forward: got rows .*; allowed"):
        Call(plan, replace(call.table, rows=dict(reversed(call.table.rows.items()))))
