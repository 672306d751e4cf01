"""The Gluon kernels of gradients in two passes as far as they go with no GPU: plans, refusals, code, layouts."""

import functools
import re
from dataclasses import replace

import pytest
import torch
from gluon_plans import SM90, WINDOW, backward_plan, needs_compiler, needs_machine_code, problem

from multiattn import explain
from multiattn.inspect import sass
from multiattn.mask import CAUSAL, FULL
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.backend import find_variant, plan_variant
from multiattn.plan.toolchain import disassemble
from multiattn.problem import problem_of
from multiattn.sequences import Batching
from multiattn.triton import BACKEND
from multiattn.triton.bind import image_of
from multiattn.triton.calls import calls_of
from multiattn.triton.compile import export_plan, specialise
from multiattn.triton.families import areas_of, tables_of
from multiattn.triton.gluon_forward import BOOKKEEPING_BYTES
from multiattn.triton.gluon_two_pass import smem_bytes, why_not_fit
from multiattn.triton.table import Integer

triton = pytest.importorskip("triton")

VARIANT = find_variant(BACKEND, "warp_specialized_two_pass", "backward")
BY_QUERIES, BY_KEYS = KERNELS = ("gradient_of_own_queries", "gradients_of_own_keys")


plan_of = functools.partial(backward_plan, VARIANT)

# ---------------------------------------------------------------- what is planned


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=str)
def test_it_is_planned_for_every_head_dim_and_mask(head_dim, mask):
    plan = plan_of(head_dim, band=mask)
    assert tuple(table.kernel for table in tables_of(plan)) == ("prepare_statistics", *KERNELS)
    assert why_not_fit(plan.problem, SM90, plan.config) == ()
    assert plan.workspace_bytes >= sum(it.size_bytes for it in areas_of(plan).values())


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"head_dim": 264}, "head_dim"), ({"alignment": 8}, "alignment"), ({"dtype": "fp32"}, "dtype")],
)
def test_what_it_has_no_code_for_is_a_reason(changes, code):
    found = plan_variant(BACKEND, VARIANT, replace(problem(), **changes), SM90, direction="backward")
    assert code in [reason.code for reason in found]


SLOPES, BIAS = torch.ones(8), torch.zeros(1, 8, 64, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "modification", [{"softcap": 30.0}, {"alibi_slopes": SLOPES}, {"bias": BIAS}], ids=lambda it: next(iter(it))
)
def test_expressions_are_planned_but_for_gradients_of_what_they_capture(modification):
    given = {"softcap": None, "alibi_slopes": None, "bias": None, "score_mod": None, **modification}
    q = torch.empty(1, 8, 64, 128, dtype=torch.bfloat16)
    planned = problem_of(*with_score(Operands(q, q, q), Options(), *given.values()))
    plan = plan_variant(BACKEND, VARIANT, planned, SM90, direction="backward")
    assert [table.rows["factors"]["score"] for table in tables_of(plan)[1:]] == [Integer(value=1, specialised=True)] * 2
    if "bias" in modification:
        given["bias"] = BIAS.clone().requires_grad_()
        wanted = problem_of(*with_score(Operands(q, q, q), Options(), *given.values()))
        reasons = plan_variant(BACKEND, VARIANT, wanted, SM90, direction="backward")
        assert any("gradient" in str(reason) for reason in reasons)


def test_a_packed_batch_has_a_list_of_tiles_of_64_for_each_side():
    packed = problem(batch=1, batching=Batching.packed(3))
    plan = plan_variant(BACKEND, VARIANT, packed, SM90, direction="backward")
    lists, _statistics, queries, keys = tables_of(plan)
    assert (lists.rows["C"].value.query_tile, lists.rows["C"].value.key_tile) == (64, 64)
    assert queries.rows["sizes"]["tiles"].value == lists.rows["query_entries"].value
    assert keys.rows["sizes"]["tiles"].value == lists.rows["key_entries"].value


def test_it_promises_the_same_bits():
    found = explain(
        problem(), arch="sm90", backend="triton", direction="backward", deterministic=True, variant=VARIANT.name
    )
    assert found.variant == VARIANT.name


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_a_sweep_tries_what_fits_and_the_rule_first(head_dim):
    plan = plan_of(head_dim)
    found = BACKEND.backward.candidates(VARIANT, plan.problem, SM90)
    assert found[0] == plan.config
    assert len(set(found)) == len(found) > 1
    assert not any(why_not_fit(plan.problem, SM90, it) for it in found)


# ---------------------------------------------------------------- what the compiler makes of it


@functools.cache
def compiled(kernel, head_dim, mask, dtype="bf16"):
    plan = plan_of(head_dim, band=mask, dtype=dtype)
    (call,) = (it for it in calls_of(plan) if it.table.kernel == kernel)
    return specialise(call, SM90), plan


@needs_compiler
def test_shared_memory_and_code_are_what_they_are_said_to_be():
    found = [compiled(name, 96, CAUSAL, "fp16") for name in KERNELS]
    plan = found[0][1]
    assert 0 <= smem_bytes(plan.config, plan.problem) - max(it.metadata.shared for it, _ in found) < BOOKKEEPING_BYTES
    for kernel, _ in found:
        assert image_of(kernel.metadata).threads == 384
        ptx = kernel.asm["ptx"]
        for verb in (
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16",  # of the narrow piece
            "cp.async.bulk.tensor.4d",
            "shfl.sync.bfly",  # rows of gradients, which go from registers to memory
            "st.global.v4",
            "griddepcontrol.wait",
            "setmaxnreg",
        ):
            assert verb in ptx, verb
        assert "wgmma.mma_async.sync.aligned.m64n128k16" not in ptx  # head_dim is not padded to 128
        assert "stmatrix" not in ptx  # no layout is converted through shared memory


@needs_compiler
@pytest.mark.parametrize(("kernel", "barriers"), [(BY_QUERIES, 8), (BY_KEYS, 10)])
def test_every_barrier_that_is_made_is_waited_for(kernel, barriers):
    """See `ring.make_barriers`; beside them are the buffers of tiles, of words, of weights and of statistics."""
    code, _ = compiled(kernel, 128, FULL)
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg.memdesc<\d+x1xi64", code.asm["ttgir"])
    (used,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", code.asm["ttgir"])
    assert len(made) == barriers
    assert set(made) <= set(used.split(", "))


@needs_compiler
@needs_machine_code
@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [
        (256, CAUSAL),
        *(
            pytest.param(*it, marks=pytest.mark.nightly)
            for it in ((64, FULL), (96, WINDOW), (128, CAUSAL), (192, CAUSAL), (256, FULL))
        ),
    ],
    ids=str,
)
def test_nothing_is_spilled_in_their_steps(head_dim, mask):
    """The loops over blocks; what a tile has around them may wait in local memory for its end.

    At D=256 with the Triton that the rules are measured with: newer ones spill 24 words where gradients of queries are.
    """
    plan = plan_of(head_dim, band=mask)
    for kernel in export_plan(plan, ()):
        if kernel.kernel in KERNELS:
            code = sass.parse(disassemble(kernel.cubin))
            steps = [loop for loop in sass.find_loops(code) if loop.own and not loop.nested]
            spills = sum(code[place].name.startswith(("LDL", "STL")) for loop in steps for place in loop.body)
            assert len(steps) == 2
            assert spills == 0 or (head_dim > 192 and triton.__version__ > "3.7"), kernel.kernel


# ---------------------------------------------------------------- its layouts


@needs_compiler
@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
def test_a_gradient_is_stored_by_threads_that_have_16_bytes_in_a_row(columns):
    """Two exchanges of one bit each, which are shuffles: each pair of layouts differs in one lane's place."""
    plan = plan_of(max(columns, 16))
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
