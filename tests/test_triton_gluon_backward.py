"""The Gluon kernel of all gradients for Hopper as far as it goes with no GPU: plans, refusals, code, small kernels."""

import functools
import re
from dataclasses import replace

import pytest
import torch
from gluon_plans import SM90, WINDOW, backward_plan, needs_compiler, needs_machine_code, problem

from multiattn import explain
from multiattn.inspect.facts import read_kernel
from multiattn.mask import CAUSAL, FULL
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import Plan, find_variant, plan_variant
from multiattn.plan.toolchain import version_of
from multiattn.problem import problem_of
from multiattn.sequences import Batching
from multiattn.triton import BACKEND
from multiattn.triton.bind import image_of
from multiattn.triton.calls import calls_of
from multiattn.triton.compile import export_plan, specialise
from multiattn.triton.cpu import interpreter
from multiattn.triton.families import tables_of
from multiattn.triton.gluon_backward import areas_of, smem_bytes, why_not_fit
from multiattn.triton.gluon_forward import BOOKKEEPING_BYTES
from multiattn.triton.kernels import backward_rows
from multiattn.triton.kernels.constants import StatisticsConstants

VARIANT = find_variant(BACKEND, "warp_specialized", "backward")


plan_of = functools.partial(backward_plan, VARIANT)

# ---------------------------------------------------------------- what is planned


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=str)
def test_it_is_planned_for_every_head_dim_and_mask_up_to_128(head_dim, mask):
    plan = plan_of(head_dim, band=mask)
    names = [table.kernel for table in tables_of(plan)]
    assert names == ["prepare_statistics", "gradients", "round_dq"]
    assert why_not_fit(plan.problem, SM90, plan.config) == ()
    assert plan.workspace_bytes >= sum(it.size_bytes for it in areas_of(plan.problem).values())


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"head_dim": 136}, "head_dim"), ({"alignment": 8}, "alignment"), ({"dtype": "fp32"}, "dtype")],
)
def test_what_it_has_no_code_for_is_a_reason(changes, code):
    found = plan_variant(BACKEND, VARIANT, replace(problem(), **changes), SM90, direction="backward")
    assert code in [reason.code for reason in found]


def test_other_gpus_are_refused():
    for arch in ("sm80", "sm100"):
        (reason,) = plan_variant(BACKEND, VARIANT, problem(), by_name(arch), direction="backward")
        assert (reason.code, reason.allowed) == ("arch", "cpu, sm90")


def test_the_same_bits_are_asked_of_another_variant():
    found = explain(problem(), arch="sm90", backend="triton", direction="backward", deterministic=True)
    assert found.variant != VARIANT.name


# ---------------------------------------------------------------- its small kernels


def lane_and_place(query, column):
    """Number of a query's column among the sums of 16 queries of 8 columns each: PTX ISA, wgmma's matrix D."""
    lane = query % 8 * 4 + column % 8 // 2
    return column // 8 * 128 + lane * 4 + query // 8 % 2 * 2 + column % 2


@pytest.mark.parametrize(("head_dim", "pieces"), [(64, (64, 0)), (40, (32, 16)), (8, (16, 0))])
def test_dq_is_read_in_the_order_of_accumulators(head_dim, pieces):
    seq, heads, tiles, columns = 100, 2, 2, sum(pieces)
    dq = torch.randn(1, heads, seq, head_dim)
    sums = torch.zeros(1, heads, tiles, 64 * columns)
    for query in range(seq):
        tile, row = divmod(query, 64)
        for column in range(head_dim):
            first, width, at = (0, pieces[0], 0) if column < pieces[0] else (pieces[0], pieces[1], 64 * pieces[0])
            at += row // 16 * 16 * width + lane_and_place(row, column - first)
            sums[0, :, tile, at] = dq[0, :, query, column]
    got = torch.full((1, heads, seq, head_dim), float("nan"), dtype=torch.bfloat16)
    constants = StatisticsConstants(head_dim=head_dim, head_pad=64, wide=pieces[0], narrow=pieces[1])
    strides = tuple(stride // 8 for stride in got.stride()[:3])
    given = (sums, got, None, None, 0.5, seq, heads, tiles, strides, constants)
    interpreter.run(backward_rows.round_dq, tiles * heads, *given)
    assert torch.equal(got, (dq * 0.5).bfloat16())


@pytest.mark.parametrize("has_dlse", [False, True])
def test_statistics_are_in_the_order_in_which_threads_want_them(has_dlse):
    seq, heads, tiles, head_dim = 100, 2, 2, 40
    out, dout = (torch.randn(1, heads, seq, head_dim).bfloat16() for _ in range(2))
    lse, dlse = torch.randn(1, heads, seq), torch.randn(1, heads, seq)
    lse[0, 0, 3] = -float("inf")  # it sees no key
    statistics = torch.full((1, heads, tiles, 2, 64), float("nan"))
    sums, delta = torch.full((1, heads, tiles, 64 * 48), float("nan")), torch.full((1, heads, seq), float("nan"))
    counter = torch.ones(4, dtype=torch.int32)
    strides = tuple(stride // 8 for stride in out.stride()[:3])
    constants = StatisticsConstants(head_dim=head_dim, head_pad=64, wide=32, narrow=16)
    sizes = (seq if has_dlse else 0, seq, heads, tiles)
    given = (out, dout, lse, dlse, delta, statistics, sums, counter, None, None, *sizes)
    interpreter.run(backward_rows.prepare_statistics, tiles * heads, *given, strides, constants)
    expected = (out.float() * dout.float()).sum(-1) - (dlse if has_dlse else 0)
    torch.testing.assert_close(delta, expected)
    assert not sums.any()
    assert counter[0] == 0
    for query in range(64 * tiles):
        tile, row = divmod(query, 64)
        place = (
            row // 16 * 16 + lane_and_place(row, row % 8) % 32 // 4 * 0 + row % 8 // 2 * 4 + row // 8 % 2 * 2 + row % 2
        )
        own = statistics[0, :, tile, :, place]
        if query >= seq:
            assert own[:, 0].isposinf().all()
            assert not own[:, 1].any()
            continue
        natural = lse[0, :, query]
        log2 = natural * 1.4426950408889634
        log2[natural == -float("inf")] = float("inf")
        torch.testing.assert_close(own[:, 0], log2)
        torch.testing.assert_close(own[:, 1], expected[0, :, query])


# ---------------------------------------------------------------- what the compiler makes of it


@functools.cache
def compiled(head_dim, mask, dtype="bf16"):
    """The kernel of gradients."""
    plan = plan_of(head_dim, band=mask, dtype=dtype)
    (call,) = (it for it in calls_of(plan) if it.table.kernel == "gradients")
    return specialise(call, SM90), plan


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param({"heads_q": 16, "heads_kv": 16, "seq_q": 512, "head_dim": 64}, 64, id="256 KiB each"),
        pytest.param({"heads_q": 16, "heads_kv": 16, "seq_q": 2048}, 8, id="2 MiB each"),
        pytest.param({"heads_q": 16, "heads_kv": 4, "seq_q": 2048}, 2, id="8 MiB of four heads of queries each"),
        pytest.param({"heads_q": 16, "heads_kv": 16, "seq_q": 1 << 17}, 1, id="more than L2 each"),
    ],
)
@pytest.mark.parametrize("name", ["warp_specialized", "warp_specialized_two_pass"])
def test_heads_side_by_side_share_queries_and_sums_that_l2_has_room_for(name, sizes, expected):
    """As in CUDA. By K and V alone they were twice as many: sums of dq of N=512 left an H100's L2 before their last."""
    plan = backward_plan(find_variant(BACKEND, name, "backward"), band=FULL, batch=16, **sizes)
    (table,) = (it for it in tables_of(plan) if it.kernel in ("gradients", "gradients_of_own_keys"))
    assert table.rows["sizes"]["together"].value == expected


@pytest.mark.parametrize(("name", "expected"), [("warp_specialized", 6), ("warp_specialized_two_pass", 4)])
def test_a_section_of_shared_keys_under_a_mask_has_tiles_for_all_sms_twice(name, expected):
    """64 heads of keys with 64 tiles of 128 keys, or 128 of 64, on 132 SMs: in sections of one size."""
    plan = backward_plan(
        find_variant(BACKEND, name, "backward"), band=CAUSAL, batch=16, heads_q=16, heads_kv=4, seq_q=8192
    )
    (table,) = (it for it in tables_of(plan) if it.kernel in ("gradients", "gradients_of_own_keys"))
    assert table.rows["sizes"]["together"].value == expected


@needs_compiler
def test_its_code_is_what_it_is_said_to_be():
    kernel, plan = compiled(96, CAUSAL, "fp16")
    assert image_of(kernel.metadata).threads == 512
    assert 0 <= smem_bytes(plan.config, plan.problem) - kernel.metadata.shared < BOOKKEEPING_BYTES
    ptx = kernel.asm["ptx"]
    for verb in (
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16",  # of the narrow piece
        "red.relaxed.gpu.global.add.v4.f32",
        "cp.async.bulk.tensor.4d",
        "stmatrix",
        "griddepcontrol.wait",
        "setmaxnreg",
    ):
        assert verb in ptx, verb
    assert "wgmma.mma_async.sync.aligned.m64n128k16" not in ptx  # head_dim is not padded to 128
    assert "mma.sync.aligned.m16n8k16" not in ptx


@needs_compiler
def test_every_barrier_that_is_made_is_waited_for():
    kernel, _ = compiled(64, FULL)
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\)", kernel.asm["ttgir"])
    (used,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", kernel.asm["ttgir"])
    assert len(made) == 18
    assert set(made) <= set(used.split(", "))


@needs_compiler
@needs_machine_code
@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [
        (64, CAUSAL),
        *(
            pytest.param(*it, marks=pytest.mark.nightly)
            for it in ((64, FULL), (64, WINDOW), (96, CAUSAL), (128, CAUSAL))
        ),
        pytest.param(128, FULL, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_nothing_is_spilled_in_its_loops(head_dim, mask):
    if head_dim > 64 and version_of("triton") > "3.7":
        pytest.skip("above D=64 the code of newer Tritons spills: they no longer see that addresses are uniform")
    plan = plan_of(head_dim, band=mask, seq_q=1024)
    (kernel,) = (it for it in export_plan(plan, ()) if it.kernel == "gradients")
    assert read_kernel(kernel, plan).hot_spills == 0


@needs_compiler
def test_a_packed_batch_compiles_with_maps_of_five_dimensions():
    plan = plan_of(128, batch=1, band=CAUSAL, batching=Batching.packed(3))
    names = [table.kernel for table in tables_of(plan)]
    assert names == ["list_tiles", "prepare_statistics", "gradients", "round_dq"]
    (call,) = (it for it in calls_of(plan) if it.table.kernel == "gradients")
    assert "cp.async.bulk.tensor.5d" in specialise(call, SM90).asm["ptx"]


# ---------------------------------------------------------------- what modifies scores


def scored(head_dim, **modifications):
    """A problem with an expression."""
    q = torch.empty(1, 8, 256, head_dim, dtype=torch.bfloat16)
    given = {"softcap": None, "alibi_slopes": None, "bias": None, "score_mod": None, **modifications}
    return problem_of(*with_score(Operands(q, q, q), Options(), *given.values()))


@pytest.mark.parametrize(
    ("head_dim", "modifications", "reason"),
    [
        (64, {"softcap": 30.0}, None),
        (64, {"alibi_slopes": torch.empty(8)}, None),
        (128, {"alibi_slopes": torch.empty(8)}, None),
        (128, {"softcap": 30.0}, "registers for gradients, scores and weights"),
        (64, {"bias": torch.empty(1, 8, 256, 256, dtype=torch.bfloat16)}, "reads an element of a tensor for each key"),
    ],
)
def test_expressions_that_there_are_registers_for_are_taken(head_dim, modifications, reason):
    found = plan_variant(BACKEND, VARIANT, scored(head_dim, **modifications), SM90, direction="backward")
    assert isinstance(found, Plan) if reason is None else any(reason in str(it) for it in found)


@needs_compiler
@needs_machine_code
@pytest.mark.nightly
@pytest.mark.parametrize("modifications", [{"softcap": 30.0}, {"alibi_slopes": torch.empty(8)}], ids=list)
def test_modified_scores_spill_nothing_in_loops(modifications):
    plan = plan_variant(BACKEND, VARIANT, scored(64, **modifications), SM90, direction="backward")
    (kernel,) = (it for it in export_plan(plan, ()) if it.kernel == "gradients")
    assert read_kernel(kernel, plan).hot_spills == 0
