"""Hopper's backward in two passes on the CPU: configs, masks, walks of few steps, expressions, launches, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_runs import on_cpu
from gradient_checks import check, make_tensors

from multiattn import fmha_varlen, fmha_varlen_backward
from multiattn.cuda import BACKEND
from multiattn.cuda.backward_wgmma_two_pass import WgmmaTwoPassConfig
from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import launches_of
from multiattn.cuda.params import argument_of
from multiattn.operands import Operands, Options, with_score
from multiattn.packed import RAGGED_ROWS, PackingSpec
from multiattn.plan.arch import ARCHS, CPU
from multiattn.plan.backend import Plan, find_variant, make_plan
from multiattn.problem import Problem
from parity.case import Case
from parity.launch import launch_gradients, plan_case, prepare_case, prepare_gradients, save_forward
from parity.results import Contender

SM90 = ARCHS["sm90"]
VARIANT = find_variant(BACKEND, "wgmma_two_pass", "backward")
PLAIN = WgmmaTwoPassConfig(tile_m=64, tile_n=64)
DEEP = replace(PLAIN, q_stages=3, dout_stages=3, k_stages=3, v_stages=2)
KEPT = replace(DEEP, kv_in_registers=True)
AHEAD = replace(DEEP, ahead=True, dq_ahead=True)


def plan_of(problem: Problem, config: WgmmaTwoPassConfig | None = None, *, arch=SM90) -> Plan:
    """A Plan of the variant."""
    return make_plan(BACKEND, problem, arch, direction="backward", variant=VARIANT.name, config=config, probe=False)


def check_on_cpu(tensors, *, config=None, dlse=None, **options):
    """The gradients of q, k, v and dout, emulated, are as right as parity asks."""
    q, k, v, dout = tensors
    check(plan_of(Problem.of(q, k, v, **options), config, arch=CPU), q, k, v, dout, dlse)


# ---------------------------------------------------------------- emulated


@on_cpu
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 5)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        pytest.param(8, KEPT, id="d8_kept"),
        pytest.param(40, KEPT, id="d40_kept"),
        pytest.param(64, PLAIN, id="d64"),
        pytest.param(136, DEEP, id="d136"),
        pytest.param(160, KEPT, id="d160_kept"),
        pytest.param(192, DEEP, id="d192"),
        pytest.param(192, KEPT, id="d192_kept"),
        pytest.param(192, AHEAD, id="d192_ahead"),
        pytest.param(192, replace(KEPT, ahead=True), id="d192_kept_ahead"),
        pytest.param(256, PLAIN, id="d256"),
    ],
)
def test_it_computes_what_the_formulas_do(head_dim, config, options):
    check_on_cpu(
        make_tensors(heads_q=4, heads_kv=2, seq_q=150, seq_kv=200, head_dim=head_dim), config=config, **options
    )


@on_cpu
@pytest.mark.parametrize(
    ("seq_q", "seq_kv"), [(1, 1), (64, 256), (320, 64), (70, 20), (300, 40)], ids=lambda length: str(length)
)
@pytest.mark.parametrize("config", [PLAIN, AHEAD, KEPT], ids=["plain", "ahead", "kept"])
def test_walks_of_few_steps_follow_one_another(seq_q, seq_kv, config):
    """A block has several tiles, whose loads overlap: some see one block of the other sequence, some none."""
    tensors = make_tensors(batch=2, heads_q=6, heads_kv=2, seq_q=seq_q, seq_kv=seq_kv, head_dim=136)
    check_on_cpu(tensors, config=config, causal=True)


@on_cpu
def test_the_gradient_of_lse_is_part_of_delta():
    tensors = make_tensors(seq_q=100, seq_kv=130, head_dim=160)
    dlse = torch.randn(1, 2, 100, generator=torch.Generator().manual_seed(0))
    check_on_cpu(tensors, dlse=dlse, causal=True)


@on_cpu
@pytest.mark.parametrize("scale", [0.0, -0.2], ids=str)
def test_a_scale_may_be_zero_or_negative(scale):
    check_on_cpu(make_tensors(seq_q=70, seq_kv=90, head_dim=136), scale=scale)


@on_cpu
def test_fp16():
    check_on_cpu([it.half() for it in make_tensors(seq_q=70, seq_kv=90, head_dim=136)], causal=True)


@on_cpu
@pytest.mark.parametrize("head_dim", [160, 256])
@pytest.mark.parametrize("options", [{}, {"window": (25, 3)}], ids=["full", "window"])
def test_a_packed_batch_with_sinks(head_dim, options):
    """Sequences without queries, without keys and without both, and rows behind the last one."""
    lengths_q, lengths_kv, behind = (70, 0, 130, 5, 0), (30, 40, 200, 0, 0), 3
    starts_q, starts_kv = (torch.tensor((0, *it), dtype=torch.int32).cumsum(0).int() for it in (lengths_q, lengths_kv))
    rows_q, rows_kv = sum(lengths_q) + behind, sum(lengths_kv) + behind
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v, dout = (
        torch.randn(rows, heads, head_dim, generator=generator).half()
        for rows, heads in ((rows_q, 4), (rows_kv, 2), (rows_kv, 2), (rows_q, 4))
    )
    given = {
        **{"cu_seqlens_q": starts_q, "cu_seqlens_kv": starts_kv},
        **{"max_seqlen_q": max(lengths_q), "max_seqlen_kv": max(lengths_kv), "sinks": torch.linspace(-1, 1, 4)},
        **options,
    }
    out, lse = fmha_varlen(q, k, v, **given, backend="reference", return_lse=True)
    truth = fmha_varlen_backward(q, k, v, out, lse, dout, **given, backend="reference")
    made = fmha_varlen_backward(q, k, v, out, lse, dout, **given, backend="cuda", variant=VARIANT.name)
    for it, wanted in zip(made, truth, strict=True):
        torch.testing.assert_close(it.float(), wanted.float(), atol=1e-2, rtol=1e-2)


# ---------------------------------------------------------------- expressions

LATE = replace(PLAIN, dp_late=True)
CPU_DEVICE = torch.device("cpu")
MODIFIED = Case(
    name="two_pass_scores", why="", batch=2, heads_q=4, heads_kv=2, seq_q=150, seq_kv=200, alibi="batch", bias="bhqk",
    bias_hides=True, softcap=1.5,
)  # fmt: skip


def _expressions():
    """Each config with each mask; by day they take turns, as what has no expression has all of both."""
    masks = {"full": {}, "causal": {"causal": True}, "window": {"window": (30, 5)}}
    for head_dim, config, name, by_day in (
        (40, KEPT, "d40_kept", "full"),
        (64, AHEAD, "d64_ahead", "causal"),
        (136, LATE, "d136_late", "window"),
        (192, KEPT, "d192_kept", "causal"),
        (256, PLAIN, "d256", "window"),
    ):
        for mask, masked in masks.items():
            marks = () if mask == by_day else pytest.mark.nightly
            yield pytest.param(head_dim, config, masked, id=f"{name}-{mask}", marks=marks)


@on_cpu
@pytest.mark.parametrize(("head_dim", "config", "masked"), list(_expressions()))
def test_every_position_counts(head_dim, config, masked):
    """A bias, of which a sixth is -inf, and slopes: other numbers at a wrong query, key, head or batch entry."""
    case = replace(MODIFIED, head_dim=head_dim, **masked)
    inputs, _ = prepare_case(case, CPU_DEVICE)
    inputs = replace(inputs, slots=())
    plan = plan_case(case, Contender(backend="cuda", variant=VARIANT.name, direction="backward"), inputs)
    plan = replace(plan, config=config)
    upstream, truth = prepare_gradients(case, CPU_DEVICE)
    made = launch_gradients(plan, inputs, save_forward(case, "cuda", CPU_DEVICE), upstream)
    for got, expected in zip(made.all, truth.all[:3], strict=True):
        expected.check(got, plan)


@on_cpu
@pytest.mark.parametrize("heads_kv", [2, pytest.param(4, marks=pytest.mark.nightly)], ids=["gqa", "mha"])
def test_a_packed_batch_with_an_expression(heads_kv):
    """Positions and the number of the sequence are its own."""
    lengths_q, lengths_kv = (70, 0, 130, 5), (90, 40, 150, 0)
    starts_q, starts_kv = (torch.tensor((0, *it), dtype=torch.int32).cumsum(0).int() for it in (lengths_q, lengths_kv))
    generator = torch.Generator().manual_seed(heads_kv)
    q, k, v, dout = (
        torch.randn(sum(lengths), heads, 72, generator=generator).half()
        for lengths, heads in ((lengths_q, 4), (lengths_kv, heads_kv), (lengths_kv, heads_kv), (lengths_q, 4))
    )
    given = {
        **{"cu_seqlens_q": starts_q, "cu_seqlens_kv": starts_kv, "causal": True, "softcap": 3.0},
        **{"max_seqlen_q": max(lengths_q), "max_seqlen_kv": max(lengths_kv)},
        "alibi_slopes": torch.rand(4, 4, generator=generator),
    }
    out, lse = fmha_varlen(q, k, v, **given, backend="reference", return_lse=True)
    truth = fmha_varlen_backward(q, k, v, out, lse, dout, **given, backend="reference")
    made = fmha_varlen_backward(q, k, v, out, lse, dout, **given, backend="cuda", variant=VARIANT.name)
    for it, wanted in zip(made, truth, strict=True):
        torch.testing.assert_close(it.float(), wanted.float(), atol=1e-2, rtol=1e-2)


def modified(head_dim: int, *, wants_gradient: bool = False) -> Problem:
    """Scores with a bias."""
    q, k, v = (torch.zeros(1, 2, 48, head_dim, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.zeros(1, 2, 48, 48, requires_grad=wants_gradient)
    return Problem.of_operands(*with_score(Operands(q, k, v), Options(), 5.0, None, bias, None))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_is_the_one_for_expressions_without_gradients(head_dim, deterministic):
    options = {"direction": "backward", "deterministic": deterministic, "probe": False}
    assert make_plan(BACKEND, modified(head_dim), SM90, **options).variant == VARIANT.name


def test_gradients_of_captured_tensors_are_refused():
    problem = modified(64, wants_gradient=True)
    assert make_plan(BACKEND, problem, SM90, direction="backward", probe=False).variant == "atomic"
    assert [it.code for it in VARIANT.capability.why_not(problem, SM90)] == ["score_gradient"]


def test_a_bias_has_configs_of_its_own_where_registers_are_few():
    configs = [plan_of(modified(head_dim)).config for head_dim in (160, 192, 224, 256)]
    assert [(it.kv_in_registers, it.dp_late) for it in configs] == [
        *((True, False), (False, False), (False, False), (False, True)),
    ]
    assert any(it.dp_late for it in BACKEND.backward.candidates(VARIANT, modified(256), SM90))


# ---------------------------------------------------------------- launches


def problem_of(head_dim: int = 256, **sizes) -> Problem:
    given = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, **sizes}
    return Problem.contiguous(head_dim=head_dim, **given)


def test_two_persistent_kernels_follow_that_of_statistics():
    launches = launches_of(plan_of(problem_of()))
    entries = ["prepare_statistics", "backward_wgmma_queries", "backward_wgmma_keys"]
    assert [it.kernel.entry for it in launches] == entries
    assert all(it.kernel.overlaps for it in launches)
    assert [it.is_persistent for it in launches] == [False, True, True]
    assert [it.blocks for it in launches] == [2 * 4 * 3, 2 * 4 * 3, 2 * 2 * 8]


def test_blocks_add_nothing_up_in_memory():
    """That is why the same bits come each time."""
    plan = plan_of(problem_of())
    assert set(areas_of(plan)) == {"statistics", "workspace"}
    assert not any("dq_sum" in argument_of(it.kernel, plan).pointers.values() for it in launches_of(plan))


def test_a_config_and_a_problem_have_kernels_of_their_own():
    """Two kernels of one name would be one in a profile, and in a library."""
    plans = [
        plan_of(problem_of(head_dim, causal=causal, dtype=dtype), config)
        for head_dim, configs in ((192, (DEEP, KEPT, AHEAD, PLAIN)), (256, (PLAIN,)))
        for config in configs
        for causal in (False, True)
        for dtype in ("bf16", "fp16")
    ]
    kernels = {it.kernel for plan in plans for it in launches_of(plan)}
    assert len({it.name for it in kernels}) == len({(it.entry, it.traits) for it in kernels}) == len(kernels)


def test_workspace_is_eight_bytes_a_query():
    """Beside what tiles that are not full round up to, and counters."""
    problem = problem_of(seq_q=512, seq_kv=512)
    areas = areas_of(plan_of(problem))
    assert sum(areas.values()) - areas["workspace"] == problem.batch * problem.heads_q * problem.seq_q * 8


def test_each_kernel_is_told_where_its_tensors_are():
    plan = plan_of(problem_of())
    prepare, queries, keys = (argument_of(it.kernel, plan) for it in launches_of(plan))
    for kernel in (queries, keys):
        assert {it.tensor for it in kernel.maps.values()} == {"q", "k", "v", "dout"}
    pointers = set(prepare.pointers.values())
    assert {"statistics", "workspace"} <= pointers
    assert not {"dq_sum", "delta"} & pointers


def test_it_is_the_deterministic_one_and_the_one_for_wide_heads():
    assert VARIANT.deterministic
    for deterministic in (False, True):
        plan = make_plan(BACKEND, problem_of(192), SM90, direction="backward", deterministic=deterministic, probe=False)
        assert plan.variant == VARIANT.name
    long = problem_of(128, seq_q=2000, seq_kv=2000)
    for deterministic, name in ((False, "wgmma"), (True, VARIANT.name)):
        plan = make_plan(BACKEND, long, SM90, direction="backward", deterministic=deterministic, probe=False)
        assert plan.variant == name


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("head_dim", "config", "allowed"),
    [
        (256, KEPT, "up to 208"),
        (200, KEPT, "D up to 192"),
        (208, KEPT, "D up to 192"),
        (192, replace(PLAIN, tile_m=32), "64"),
        (192, replace(PLAIN, tile_n=128), "64"),
        (192, replace(PLAIN, q_stages=1), "2 to 8"),
        (192, replace(PLAIN, dout_stages=9), "2 to 8"),
        (192, replace(PLAIN, k_stages=1), "2 to 8"),
        (192, replace(PLAIN, v_stages=0), "1 to 8"),
        (192, replace(AHEAD, dp_late=True), "one of them"),
        (256, replace(PLAIN, q_stages=3), "232448 bytes a block on sm90"),
        (256, replace(PLAIN, v_stages=2), "232448 bytes a block on sm90"),
    ],
)
def test_a_config_that_cannot_run_is_refused_with_what_can(head_dim, config, allowed):
    reasons = config.why_not(problem_of(head_dim), SM90)
    assert any(allowed in reason.allowed for reason in reasons), reasons


def test_tensors_that_a_tensor_map_cannot_walk_are_refused():
    problem = Problem.contiguous(
        batch=1, heads_q=1, seq_q=RAGGED_ROWS + 1, head_dim=192, packing=PackingSpec(1), dtype="bf16"
    )
    assert any("packed batch" in reason.got for reason in PLAIN.why_not(problem, SM90))


def test_the_rules_fit():
    for rule in VARIANT.rules:
        for head_dim in range(8, rule.head_dim_max + 8, 8):
            if head_dim >= rule.head_dim_min:
                assert not rule.config.why_not(problem_of(head_dim), SM90)


def test_there_are_candidates_for_every_head_dim():
    for head_dim in (136, 192, 200, 256):
        found = BACKEND.backward.candidates(VARIANT, problem_of(head_dim), SM90)
        assert found
        assert len(set(found)) == len(found)
