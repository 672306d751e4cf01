"""Hopper's own kernels on the GPU, in every way to run them: sweeps may choose any, rules have few of them."""

import faulthandler
import os
from collections.abc import Iterator

import pytest
import torch

import multiattn
from multiattn.cuda import backward_wgmma
from multiattn.operands import Operands
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, detect
from multiattn.plan.backend import Direction, Plan, plan_variant
from multiattn.run.calls import prepare
from parity.cases import CASES
from parity.launch import launch_gradients, launch_plan, prepare_case, prepare_gradients, problem_of, save_forward
from parity.turns import ways_of

ON_CPU = os.environ.get("MULTIATTN_TEST_HOPPER") == "cpu"  # the same cases emulated, to try this file


def missing() -> str:
    if ON_CPU:
        return ""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return "" if detect(torch.device("cuda")) == ARCHS["sm90"] else "the GPU is no Hopper"


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DEVICE = torch.device("cpu" if ON_CPU else "cuda")
DEADLINE_S = 120.0
FAMILIES: tuple[tuple[str, Direction, str], ...] = (
    ("cuda", "forward", "wgmma"),
    ("cuda", "backward", "wgmma"),
    ("cuda", "backward", "wgmma_ordered"),
    ("cuda", "backward", "wgmma_two_pass"),
    ("cuda", "backward", "wgmma_stored"),
    ("cuda", "forward", "wgmma_twin"),
    ("cuda", "backward", "wgmma_wide"),
    ("triton", "forward", "warp_specialized"),
    ("triton", "forward", "warp_specialized_twin"),
    ("triton", "backward", "warp_specialized"),
    ("triton", "backward", "warp_specialized_two_pass"),
)
NAMES = (
    "long_d64_causal", "long_d128_full", "long_d256_causal", "long_d40", "long_d96",  # many tiles
    "long_chunk_causal", "long_empty_rows", "long_inf_v_causal", "long_window_100_50_empty_d128",
    "descending_causal", "twin_peaks_causal",
)  # fmt: skip
"""With few head_dims and masks: each has code of its own in every way, which takes most of the time."""
WIDE = ("wgmma_twin", "wgmma_wide", "warp_specialized_twin")
WIDE_NAMES = ("long_d512", "d264_v512_window_sinks", "d320_v256_softcap_alibi", "d384_v320_bias", "d328_negative_scale")
SHORT, WIDE_SHORT = "d64_bf16_causal", "d264_bf16_causal"
BY_NAME = {case.name: case for case in CASES}
LAUNCHES = 2 if ON_CPU else 100


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """A kernel that hangs ends the session: whatever touches the device afterwards would hang as well."""
    faulthandler.dump_traceback_later(DEADLINE_S * (100 if ON_CPU else 1), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def _short(family: tuple[str, Direction, str]) -> str:
    return WIDE_SHORT if family[2] in WIDE else SHORT


def plans(family: tuple[str, Direction, str], name: str) -> Iterator[Plan]:
    """The plans of every way of a family that takes a case."""
    backend, direction, variant = family
    case = BY_NAME[name]
    problem = problem_of(case, prepare_case(case, DEVICE)[0])
    for way in ways_of(registry.get(backend), direction):
        if way.variant.name == variant:
            found = plan_variant(
                registry.get(backend), way.variant, problem, detect(DEVICE), way.config, direction=direction
            )
            if isinstance(found, Plan):
                yield found


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, id="-".join((*family, name)), marks=pytest.mark.xdist_group(name))
        for family in FAMILIES
        for name in (WIDE_NAMES if family[2] in WIDE else NAMES)
    ],
)
def test_every_way_computes_attention(family, name, monkeypatch):
    """And its gradients; one process has all of a case, as they share its truth.

    Heads of keys come one after another, so that sums of dq are emptied by tiles of earlier ones: at D=128 no case of
    parity has more heads than a section.
    """
    case = BY_NAME[_short(family) if ON_CPU else name]
    monkeypatch.setattr(backward_wgmma, "kv_heads_of_section", lambda *_, **__: 1)
    if family[1] == "backward" and case.no_backward:
        pytest.skip(case.no_backward)
    inputs, truth = prepare_case(case, DEVICE)
    for plan in plans(family, case.name):
        if family[1] == "forward":
            found, expected = launch_plan(plan, inputs).all, truth.of_plan(plan)
        else:
            upstream, of_gradients = prepare_gradients(case, DEVICE)
            saved = save_forward(case, "cuda", DEVICE)
            found, expected = launch_gradients(plan, inputs, saved, upstream).all, of_gradients.all
        for got, wanted in zip(found, expected, strict=True):
            wanted.check(got, plan)


@pytest.mark.parametrize("family", [it for it in FAMILIES if it != ("cuda", "backward", "wgmma")], ids="-".join)
def test_every_launch_gives_the_same_bits(family):
    """Where some blocks have a second tile: Gluon's mbarriers that nobody waited for spoiled one launch in 300.

    Of Gluon's backward in one pass dq is summed up in any order, of CUDA's also parts of dk and dv.
    """
    case = BY_NAME[_short(family) if ON_CPU else "long_d512" if family[2] in WIDE else "long_d64_causal"]
    inputs, _ = prepare_case(case, DEVICE)
    given = Operands(inputs.q, inputs.k, inputs.v)
    if family[1] == "backward":
        upstream, saved = prepare_gradients(case, DEVICE)[0], save_forward(case, "cuda", DEVICE)
        given = given._replace(out=saved.out, lse=saved.lse, dout=upstream.dout, dlse=upstream.dlse)
    for plan in plans(family, case.name):
        names = ("out", "lse") if plan.direction == "forward" else ("dq", "dk", "dv")
        layouts = plan.problem.layouts
        made = {
            it: torch.empty_strided(layouts[it].shape, layouts[it].strides, dtype=layouts[it].dtype, device=DEVICE)
            for it in names
        }
        launch = prepare(plan, DEVICE)
        launch(given._replace(**made))
        steady = [it for it in names if it != "dq" or registry.variant_of(plan).deterministic]
        first = {it: made[it].clone() for it in steady}
        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(LAUNCHES):
            launch(given._replace(**made))
            differ += torch.stack([(made[it] != first[it]).any() for it in steady]).any()
        assert differ.item() == 0, plan


def test_sums_of_dq_are_empty_before_tiles_of_later_heads_add_to_them(monkeypatch):
    """In sections of one head, so that all heads but the first have sums that tiles of the one before have emptied."""
    monkeypatch.setattr(backward_wgmma, "kv_heads_of_section", lambda *_, **__: 1)
    case = BY_NAME["d128_bf16_causal" if ON_CPU else "long_d128_full"]
    inputs, _ = prepare_case(case, DEVICE)
    (upstream, truth), saved = prepare_gradients(case, DEVICE), save_forward(case, "cuda", DEVICE)
    plan = next(plans(("cuda", "backward", "wgmma"), case.name))
    assert plan.problem.heads_kv * plan.problem.batch > 1
    for _ in range(LAUNCHES):
        for got, wanted in zip(launch_gradients(plan, inputs, saved, upstream).all, truth.all, strict=True):
            wanted.check(got, plan)


def test_twins_run_between_other_kernels():
    """A warpgroup took a slot for full before its twin's piece had come: the GPU failed within seconds."""
    heads, seq = (1, 200) if ON_CPU else (16, 4096)
    q, k, v = (torch.randn(1, heads, seq, 512, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    other = torch.randn(seq, seq, device=DEVICE, dtype=torch.bfloat16)
    first = multiattn.fmha(q, k, v, causal=True, backend="cuda", variant="wgmma_twin")
    for _ in range(LAUNCHES // 2):
        out = [multiattn.fmha(q, k, v, causal=True, backend="cuda", variant="wgmma_twin") for _ in range(8)]
        for _ in range(4):
            other @ other
        assert all(torch.equal(it, first) for it in out)
