"""The Gluon kernels of gradients for Hopper as far as they go with no GPU: plans, refusals, code, layouts.

One variant makes all gradients in one pass, the other in two.
"""

import functools
import re
from dataclasses import replace

import pytest
import torch
from gluon_plans import HEADS, SM90, backward_plan, needs_compiler, problem, scored

from multiattn import explain
from multiattn.mask import CAUSAL, FULL
from multiattn.plan.backend import Plan, find_variant, plan_variant
from multiattn.triton import BACKEND, gluon_backward, gluon_two_pass
from multiattn.triton.bind import image_of
from multiattn.triton.calls import calls_of
from multiattn.triton.compile import specialise
from multiattn.triton.families import tables_of
from multiattn.triton.gluon_forward import BOOKKEEPING_BYTES
from multiattn.triton.table import Integer

ONE, TWO = (find_variant(BACKEND, name, "backward") for name in ("warp_specialized", "warp_specialized_two_pass"))
ROOMS = {ONE: gluon_backward, TWO: gluon_two_pass}
BY_QUERIES, BY_KEYS = PASSES = ("gradient_of_own_queries", "gradients_of_own_keys")
KERNELS = {ONE: ("prepare_statistics", "gradients", "round_dq"), TWO: ("prepare_statistics", *PASSES)}
both = pytest.mark.parametrize("variant", [ONE, TWO], ids=lambda it: it.name)


def call_of(plan, kernel):
    (call,) = (it for it in calls_of(plan) if it.table.kernel == kernel)
    return call


# ---------------------------------------------------------------- what is planned


@pytest.mark.parametrize(
    ("variant", "changes", "code"),
    [
        (ONE, {"head_dim": 136}, "head_dim"),
        (TWO, {"head_dim": 264}, "head_dim"),
        *((variant, {"alignment": 8}, "alignment") for variant in (ONE, TWO)),
        *((variant, {"dtype": "fp32"}, "dtype") for variant in (ONE, TWO)),
    ],
)
def test_what_there_is_no_code_for_is_a_reason(variant, changes, code):
    found = plan_variant(BACKEND, variant, replace(problem(), **changes), SM90, direction="backward")
    assert code in [reason.code for reason in found]


def test_two_passes_promise_the_same_bits():
    asked = {"arch": "sm90", "backend": "triton", "direction": "backward", "deterministic": True}
    assert explain(problem(), **asked).variant != ONE.name
    assert explain(problem(), **asked, variant=TWO.name).variant == TWO.name


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param({"heads_q": 16, "heads_kv": 16, "seq_q": 512, "head_dim": 64}, 64, id="256 KiB each"),
        pytest.param({"heads_q": 16, "heads_kv": 16, "seq_q": 2048}, 8, id="2 MiB each"),
        pytest.param({"heads_q": 16, "heads_kv": 4, "seq_q": 2048}, 2, id="8 MiB of four heads of queries each"),
        pytest.param({"heads_q": 16, "heads_kv": 16, "seq_q": 1 << 17}, 1, id="more than L2 each"),
    ],
)
@both
def test_heads_side_by_side_share_queries_and_sums_that_l2_has_room_for(variant, sizes, expected):
    """As in CUDA. By K and V alone they were twice as many: sums of dq of N=512 left an H100's L2 before their last."""
    plan = backward_plan(variant, band=FULL, batch=16, **sizes)
    (table,) = (it for it in tables_of(plan) if it.kernel in ("gradients", "gradients_of_own_keys"))
    assert table.rows["sizes"]["together"].value == expected


@pytest.mark.parametrize(("variant", "expected"), [(ONE, 6), (TWO, 4)])
def test_a_section_of_shared_keys_under_a_mask_has_tiles_for_all_sms_twice(variant, expected):
    """64 heads of keys with 64 tiles of 128 keys, or 128 of 64, on 132 SMs: in sections of one size."""
    plan = backward_plan(variant, band=CAUSAL, batch=16, heads_q=16, heads_kv=4, seq_q=8192)
    (table,) = (it for it in tables_of(plan) if it.kernel in ("gradients", "gradients_of_own_keys"))
    assert table.rows["sizes"]["together"].value == expected


# ---------------------------------------------------------------- what modifies scores

SLOPES, BIAS = torch.empty(HEADS), torch.empty(1, HEADS, 256, 256, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("variant", "head_dim", "modifications", "reason"),
    [
        (ONE, 64, {"softcap": 30.0}, None),
        (ONE, 64, {"alibi_slopes": SLOPES}, None),
        (ONE, 128, {"alibi_slopes": SLOPES}, None),
        (ONE, 128, {"softcap": 30.0}, "registers for gradients, scores and weights"),
        (ONE, 64, {"bias": BIAS}, "reads an element of a tensor for each key"),
        *((TWO, 128, it, None) for it in ({"softcap": 30.0}, {"alibi_slopes": SLOPES}, {"bias": BIAS})),
        (TWO, 128, {"bias": BIAS.clone().requires_grad_()}, "gradient"),
    ],
)
def test_expressions_that_there_are_registers_for_are_taken(variant, head_dim, modifications, reason):
    found = plan_variant(BACKEND, variant, scored(head_dim, **modifications), SM90, direction="backward")
    if reason is not None:
        assert any(reason in str(it) for it in found)
        return
    assert isinstance(found, Plan)
    factors = [table.rows["factors"]["score"] for table in tables_of(found) if "factors" in table.rows]
    assert set(factors) == {Integer(value=1, specialised=True)}


# ---------------------------------------------------------------- what the compiler makes of it


@functools.cache
def compiled(variant, kernel, head_dim, mask, dtype="bf16"):
    plan = backward_plan(variant, head_dim, band=mask, dtype=dtype)
    return specialise(call_of(plan, kernel), SM90), plan


_VERBS = (
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16",  # of the narrow piece
    "cp.async.bulk.tensor.4d",
    "griddepcontrol.wait",
    "setmaxnreg",
)


@needs_compiler
@pytest.mark.parametrize(
    ("variant", "threads", "verbs", "none"),
    [
        (ONE, 512, ("red.relaxed.gpu.global.add.v4.f32", "stmatrix"), "mma.sync.aligned.m16n8k16"),
        # Rows of gradients go from registers to memory, and no layout is converted through shared memory.
        (TWO, 384, ("shfl.sync.bfly", "st.global.v4"), "stmatrix"),
    ],
)
def test_shared_memory_and_code_are_what_they_are_said_to_be(variant, threads, verbs, none):
    names = [name for name in KERNELS[variant] if name.startswith("gradient")]
    found = [compiled(variant, name, 96, CAUSAL, "fp16") for name in names]
    plan = found[0][1]
    spare = ROOMS[variant].smem_bytes(plan.config, plan.problem) - max(it.metadata.shared for it, _ in found)
    assert 0 <= spare < BOOKKEEPING_BYTES
    for kernel, _ in found:
        assert image_of(kernel.metadata).threads == threads
        ptx = kernel.asm["ptx"]
        for verb in (*_VERBS, *verbs):
            assert verb in ptx, verb
        assert "wgmma.mma_async.sync.aligned.m64n128k16" not in ptx  # head_dim is not padded to 128
        assert none not in ptx


@needs_compiler
@pytest.mark.parametrize(
    ("variant", "kernel", "head_dim", "barriers"),
    [(ONE, "gradients", 64, 10), (TWO, BY_QUERIES, 128, 8), (TWO, BY_KEYS, 128, 10)],
)
def test_every_barrier_that_is_made_is_waited_for(variant, kernel, head_dim, barriers):
    """See `ring.make_barriers`; beside them are the buffers of tiles, of words, of weights and of statistics."""
    code, _ = compiled(variant, kernel, head_dim, FULL)
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg.memdesc<\d+x1xi64", code.asm["ttgir"])
    (used,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", code.asm["ttgir"])
    assert len(made) == barriers
    assert set(made) <= set(used.split(", "))


@needs_compiler
@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
def test_a_gradient_is_stored_by_threads_that_have_16_bytes_in_a_row(columns):
    """Two exchanges of one bit each, which are shuffles: each pair of layouts differs in one lane's place."""
    plan = backward_plan(TWO, max(columns, 16))
    constants = tables_of(plan)[-1].rows["C"].value
    (between,), (stored,) = constants.between, constants.stored
    assert constants.wide == columns
    places = sorted(map(tuple, (*stored.reg_bases, *stored.lane_bases, *stored.warp_bases)))
    assert places == sorted(
        [*((1 << bit, 0) for bit in range(6)), *((0, 1 << bit) for bit in range(columns.bit_length() - 1))]
    )
    assert sum(a != b for a, b in zip(between.lane_bases, stored.lane_bases, strict=True)) <= 1
    if columns >= 32:
        assert [list(it) for it in stored.reg_bases[:3]] == [[0, 1], [0, 2], [0, 4]]
