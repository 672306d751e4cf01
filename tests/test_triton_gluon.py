"""Triton's Gluon kernels for Hopper as far as they go with no GPU: plans, refusals, what the compiler makes of them.

What they compute is shown by parity and `test_triton_gluon_cpu.py`, interpreted, and on a GPU by `test_gpu_hopper.py`.
"""

import functools
import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from multiattn import Problem, explain
from multiattn.inspect.facts import read_kernel
from multiattn.mask import CAUSAL, FULL, Band
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Plan, find_variant, make_plan, plan_variant
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import problem_of
from multiattn.triton import BACKEND, gluon_backward, gluon_twin, gluon_two_pass
from multiattn.triton.bind import image_of
from multiattn.triton.calls import calls_of
from multiattn.triton.compile import export_plan, specialise
from multiattn.triton.families import tables_of
from multiattn.triton.gluon_forward import (
    BOOKKEEPING_BYTES,
    GluonConfig,
    class_of,
    columns_of,
    pieces_of,
    smem_bytes,
    why_not_fit,
)
from multiattn.triton.score import lowered_score
from multiattn.triton.staged import follows_distance, stages_of, under_diagonal
from multiattn.triton.table import Integer

SM90 = ARCHS["sm90"]
WINDOW = Band(300, 5)
needs_compiler = pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))
shares_code = pytest.mark.xdist_group("Gluon's forward")  # which one process compiles for several tests
needs_machine_code = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump reads machine code")


def problem(head_dim=128, **options):
    """Heads that share keys, and a last tile that is not full, of queries and of keys."""
    sizes = {"batch": 2, "heads_q": 8, "heads_kv": 2, "seq_q": 1000, "head_dim": head_dim, **options}
    return Problem.contiguous(**sizes)


HEADS, LENGTH = 8, 256


def scored(head_dim=128, band=FULL, **modifications):
    """A problem with an expression."""
    q = torch.empty(1, HEADS, LENGTH, head_dim, dtype=torch.bfloat16)
    given = {"softcap": None, "alibi_slopes": None, "bias": None, "score_mod": None, **modifications}
    return replace(problem_of(*with_score(Operands(q, q, q), Options(), *given.values())), band=band)


VARIANT = find_variant(BACKEND, "warp_specialized")
TWINS = find_variant(BACKEND, "warp_specialized_twin")
ONE, TWO = (find_variant(BACKEND, name, "backward") for name in ("warp_specialized", "warp_specialized_two_pass"))
"""Variants of gradients."""


def plan_of(head_dim=128, config=None, variant=VARIANT, **options):
    """The plan of a variant for `problem`, by its rule where there is no config."""
    direction = "forward" if variant in (VARIANT, TWINS) else "backward"
    found = plan_variant(BACKEND, variant, problem(head_dim, **options), SM90, config, direction=direction)
    assert isinstance(found, Plan), found
    return found


# ---------------------------------------------------------------- what is planned


def test_it_is_what_triton_runs_on_hopper_but_for_what_tma_cannot_read():
    found = explain(problem(), arch="sm90", backend="triton")
    assert (found.variant, found.workspace_bytes) == (VARIANT.name, 16)
    odd = replace(problem(), strides_q=(8000 * 128, 1000 * 128, 132), alignment=8)
    assert explain(odd, arch="sm90", backend="triton").variant == "full"
    (reason,) = explain(odd, arch="sm90", backend="triton", variant=VARIANT.name)
    assert (reason.code, reason.got) == ("alignment", "8 bytes")
    for variant, wide in ((ONE, 136), (TWO, 264)):
        for asked, code in ((odd, "alignment"), (problem(wide), "head_dim")):
            assert [it.code for it in plan_variant(BACKEND, variant, asked, SM90, direction="backward")] == [code]


@pytest.mark.parametrize(
    ("blocks", "head_dim", "expected"),
    [
        ((128, 128), 128, (128, 128, VARIANT.name, ONE.name)),
        ((256, 128), 64, (64, 128, VARIANT.name, ONE.name)),
        ((64, 64), 128, (64, 64, VARIANT.name, "two_pass")),
        ((192, 128), 96, (64, 64, VARIANT.name, ONE.name)),
        ((128, 64), 256, (128, 64, VARIANT.name, "two_pass")),
        ((96, 96), 128, (32, 32, "full", "two_pass")),
    ],
)
def test_tiles_divide_the_blocks_of_a_block_mask(blocks, head_dim, expected):
    q = torch.empty(1, 2, 768, head_dim, dtype=torch.bfloat16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 768, 768, device="cpu", BLOCK_SIZE=blocks)
    asked = problem_of(*with_score(Operands(q, q, q), Options(), None, None, None, None, mask))
    found = [make_plan(BACKEND, asked, SM90, direction=it, probe=False) for it in ("forward", "backward")]
    (constants,) = (it.rows["C"].value for it in tables_of(found[0]))
    assert (constants.tile_m, constants.tile_n, *(it.variant for it in found)) == expected


def test_pieces_cover_head_dim_with_few_columns_to_spare():
    for head_dim in range(8, 257, 8):
        wide, narrow = pieces_of(head_dim)
        assert all(columns >= 16 and columns.bit_count() == 1 for columns in (wide, narrow) if columns)
        assert head_dim <= wide + narrow <= max(16, 1 << (head_dim - 1).bit_length())
        assert narrow < wide or not narrow
        assert wide + narrow - head_dim < max(16, head_dim / 3)


def test_k_and_v_of_different_widths_have_pieces_of_the_same_columns():
    """And of no more columns than the wider alone, so that what fits with two wide ones fits with a narrower one."""
    found = {
        (192, 128): (128, 64),
        (128, 64): (64, 64),
        (40, 72): (64, 16),
        (256, 128): (128, 128),
        (8, 256): (128, 128),
    }
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        wide, narrow = pieces = pieces_of(head_dim, head_dim_v)
        assert pieces == found.get((head_dim, head_dim_v), pieces)
        assert pieces == pieces_of(head_dim_v, head_dim)
        assert sum(pieces) <= sum(pieces_of(max(head_dim, head_dim_v)))
        for width in (head_dim, head_dim_v):
            assert columns_of(width, pieces) == (wide if width <= wide else wide + narrow) >= width


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_sweep_tries_the_schedulers_and_what_may_not_pay(head_dim):
    found = BACKEND.forward.candidates(VARIANT, problem(head_dim, causal=True), SM90)
    assert {config.scheduler for config in found} == {"one_tile", "static", "dynamic"}
    assert {config.pingpong for config in found} == {config.lazy_max for config in found} == {True, False}


@pytest.mark.parametrize(("head_dim", "widest"), [(8, 64), (80, 96), (97, 128), (144, 192), (176, 192), (200, 256)])
def test_a_sweep_tries_as_many_stages_as_all_of_a_class_has_room_for(head_dim, widest):
    assert class_of(head_dim) == widest
    found = BACKEND.forward.candidates(VARIANT, problem(head_dim, causal=True), SM90)
    assert found == BACKEND.forward.candidates(VARIANT, problem(widest, causal=True), SM90)
    assert all(why_not_fit(problem(widest), SM90, replace(it, stages=it.stages + 1)) for it in found)
    assert class_of(264) is None


# ---------------------------------------------------------------- what modifies scores

SLOPES, BIAS = torch.empty(8), torch.empty(1, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("modifications", "keeps"),
    [
        ({"softcap": 30.0}, (True, True)),
        ({"alibi_slopes": SLOPES}, (False, True)),
        ({"alibi_slopes": SLOPES, "softcap": 30.0}, (False, True)),
        ({"bias": BIAS}, (False, False)),
        ({"bias": BIAS[:, :, :, :1]}, (True, True)),
        ({"bias": BIAS[:, :, :1]}, (False, False)),
        ({"score_mod": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q)}, (True, True)),
        ({"score_mod": lambda s, b, h, q, kv: torch.where(kv < q, s, -1.0)}, (False, False)),
    ],
)
def test_maxima_are_kept_where_scores_fall_with_the_distance_or_know_nothing_of_keys(modifications, keeps):
    lowered = lowered_score(scored(**modifications), SM90)
    assert (follows_distance(lowered), follows_distance(under_diagonal(lowered))) == keeps
    for band, keep in zip((FULL, CAUSAL, WINDOW), (*keeps, keeps[0]), strict=True):
        plan = plan_variant(BACKEND, VARIANT, scored(band=band, **modifications), SM90)
        assert plan.config.lazy_max
        assert tables_of(plan)[0].rows["C"].value.lazy_max == keep


def test_a_stage_has_what_need_not_be_computed_again():
    lowered = lowered_score(scored(bias=BIAS, alibi_slopes=SLOPES), SM90)
    once, ahead, rest = stages_of(under_diagonal(lowered).score)
    assert [it.op for it in once] == ["mul"]  # a slope in the log2 domain
    assert [it.op for it in ahead] == ["load"]
    assert ("scaled_distance" in repr(rest), "load" in repr(rest), "abs" in repr(rest)) == (True, False, False)


def test_a_distance_has_a_sign_only_from_the_diagonal():
    """A distance of queries alone may be negative where a key is seen: with more keys than queries."""
    lowered = lowered_score(scored(score_mod=lambda s, b, h, q, kv: s - torch.abs(q - kv)), SM90)
    assert under_diagonal(lowered) == lowered


# ---------------------------------------------------------------- what the compiler makes of it


@functools.cache
def compiled(head_dim, config, band):
    """A CompiledKernel and its plan, with the rule's config where none is given."""
    plan = plan_of(head_dim, config, band=band, dtype="fp16")
    return specialise(*calls_of(plan), SM90), plan


LAZY = GluonConfig(tile_m=128, tile_n=64, lazy_max=True)


def deep(**options):
    return GluonConfig(tile_m=192, tile_n=64, stages=12, q_slots=2, **options)


@needs_compiler
@shares_code
@pytest.mark.parametrize(
    ("head_dim", "mask", "config"),
    [
        (64, WINDOW, deep(lazy_max=True, pingpong=True)),  # compiled for its barriers, too
        *(
            pytest.param(*it, None, marks=pytest.mark.nightly)
            for it in ((64, CAUSAL), (160, CAUSAL), (256, FULL), (256, WINDOW))
        ),
    ],
    ids=str,
)
def test_it_compiles_with_as_much_shared_memory_as_the_config_says(head_dim, mask, config):
    kernel, plan = compiled(head_dim, config, mask)
    assert image_of(kernel.metadata).threads == 128 * (plan.config.warpgroups + 1)
    assert 0 <= smem_bytes(plan.config, plan.problem) - kernel.metadata.shared < BOOKKEEPING_BYTES


@needs_compiler
@shares_code
def test_its_code_is_what_the_config_asks_for():
    ptx = compiled(96, LAZY, CAUSAL)[0].asm["ptx"]
    for verb in (
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",  # scores, and the wide piece of the output
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16",  # its narrow piece
        "cp.async.bulk.tensor.4d",
        "griddepcontrol.wait",
        "setmaxnreg",
        "cvt.rn.f16x2.f32",
    ):
        assert verb in ptx, verb
    assert "mma.sync.aligned.m16n8k16" not in ptx
    assert "wgmma.mma_async.sync.aligned.m64n128k16" not in ptx  # head_dim is not padded to 128


@needs_compiler
@shares_code
@pytest.mark.parametrize(
    ("head_dim", "config", "mask", "allocations"),
    [
        (96, LAZY, CAUSAL, 10),  # of two pieces
        (64, deep(lazy_max=True, pingpong=True), WINDOW, 9),
        *(
            pytest.param(64, deep(lazy_max=lazy, pingpong=turns), mask, 7 + lazy + turns, marks=pytest.mark.nightly)
            for lazy, turns in itertools.product((False, True), (False, True))
            for mask in ((CAUSAL,) if lazy or turns else (CAUSAL, WINDOW))
        ),
    ],
    ids=str,
)
def test_barriers_are_waited_for_and_come_after_what_they_order(head_dim, config, mask, allocations):
    """An mbarrier that nobody waits for would give its memory away while an SM still has its state there.

    And between what a warpgroup reads of a slot and the one arrival that lets the producer write there is a barrier.
    """
    kernel, _ = compiled(head_dim, config, mask)
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\)", kernel.asm["ttgir"])
    assert len(made) == allocations
    (used,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", kernel.asm["ttgir"])
    assert set(made) <= set(used.split(", "))
    verb = r"ld\.shared|ldmatrix|bar(?:rier)?\.(?:warp\.)?sync|mbarrier\.(?:arrive\.shared|try_wait)"
    verbs = re.findall(verb, kernel.asm["ptx"])
    arrivals = [place for place, verb in enumerate(verbs) if verb == "mbarrier.arrive.shared"]
    assert len(arrivals) > 10
    assert {verbs[place - 1] for place in arrivals} <= {"bar.sync", "barrier.sync", "bar.warp.sync"}


@needs_compiler
@shares_code
def test_a_tile_is_judged_by_the_sums_of_whole_rows():
    """Not of what a row's four threads have: each may be finite where their sum is not. Parity has it as twin_peaks."""
    ptx = compiled(96, LAZY, CAUSAL)[0].asm["ptx"]  # of the tests before
    from_others = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%r\d+),", ptx))
    added = re.findall(r"add\.f32\s+(%r\d+), (%r\d+), (%r\d+);", ptx)
    exchanged = {total for total, *parts in added if from_others & set(parts)}
    judged = re.findall(r"setp\.lt\.f32\s+%p\d+, (%r\d+), 0f7149F2CA;", ptx)  # 1e30
    assert len(judged) == 2 * LAZY.warpgroups  # a thread has parts of two rows
    assert set(judged) <= exchanged


@needs_compiler
@needs_machine_code
@pytest.mark.nightly
@pytest.mark.parametrize(("band", "more"), [(CAUSAL, 1), (FULL, 2)], ids=str)
def test_alibi_takes_a_sum_for_each_score_and_a_product_where_distance_has_no_sign(band, more):
    """Beside the product with the scale. No position is converted but of rows, each before two keys."""
    counts = []
    for modifications in ({"score_mod": lambda s, *at: s * 2.0}, {"alibi_slopes": SLOPES}):
        plan = plan_variant(BACKEND, VARIANT, scored(band=band, **modifications), SM90)
        plan = replace(plan, config=replace(plan.config, lazy_max=False))
        (kernel,) = export_plan(plan, ())
        facts = read_kernel(kernel, plan)
        scores = facts.hot_loops * plan.config.tile_n // 2
        counts.append([facts.hot[name] / scores for name in ("FP32", "conversion")])
    (fp32, conversions), (more_fp32, more_conversions) = counts
    assert more_fp32 - fp32 == pytest.approx(more, abs=0.5)
    assert more_conversions - conversions < 0.5


# ---------------------------------------------------------------- gradients: all in one pass, or in two


ROOMS = {ONE: gluon_backward, TWO: gluon_two_pass}


SIDE_BY_SIDE = (
    ({"heads_kv": 16, "seq_q": 512, "head_dim": 64}, 64),  # 256 KiB each
    ({"heads_kv": 16, "seq_q": 2048}, 8),  # 2 MiB each
    ({"heads_kv": 4, "seq_q": 2048}, 2),  # 8 MiB of four heads of queries each
    ({"heads_kv": 16, "seq_q": 1 << 17}, 1),  # more than L2 each
)


@pytest.mark.parametrize(
    ("variant", "band", "sizes", "expected"),
    [
        *((variant, FULL, *it) for variant in (ONE, TWO) for it in SIDE_BY_SIDE),
        # 64 heads of keys with 64 tiles of 128 keys, or 128 of 64, on 132 SMs twice: in sections of one size.
        *((variant, CAUSAL, {"heads_kv": 4, "seq_q": 8192}, heads) for variant, heads in ((ONE, 6), (TWO, 4))),
    ],
    ids=lambda it: getattr(it, "name", str(it)),
)
def test_heads_side_by_side_share_queries_and_sums_that_l2_has_room_for(variant, band, sizes, expected):
    """As in CUDA. By K and V alone they were twice as many: sums of dq of N=512 left an H100's L2 before their last."""
    plan = plan_of(variant=variant, band=band, batch=16, heads_q=16, **sizes)
    (table,) = (it for it in tables_of(plan) if it.kernel in ("gradients", "gradients_of_own_keys"))
    assert table.rows["sizes"]["together"].value == expected


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


_VERBS = (
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
    "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16",  # of the narrow piece
    "cp.async.bulk.tensor.4d",
    "griddepcontrol.wait",
    "setmaxnreg",
)


@needs_compiler
@pytest.mark.parametrize(
    ("variant", "barriers", "threads", "verbs", "none"),
    [
        (ONE, {"gradients": 10}, 512, ("red.relaxed.gpu.global.add.v4.f32", "stmatrix"), "mma.sync.aligned.m16n8k16"),
        # Rows of gradients go from registers to memory, and no layout is converted through shared memory.
        (
            TWO,
            {"gradient_of_own_queries": 8, "gradients_of_own_keys": 10},
            384,
            ("shfl.sync.bfly", "st.global.v4"),
            "stmatrix",
        ),
    ],
)
def test_shared_memory_and_code_are_what_they_are_said_to_be(variant, barriers, threads, verbs, none):
    """Every barrier that is made is waited for: see `ring.make_barriers`. Beside them are buffers of tiles."""
    plan = plan_of(96, variant=variant, band=CAUSAL, dtype="fp16")
    calls = [call for call in calls_of(plan) if call.table.kernel in barriers]
    kernels = [specialise(call, SM90) for call in calls]
    spare = ROOMS[variant].smem_bytes(plan.config, plan.problem) - max(it.metadata.shared for it in kernels)
    assert 0 <= spare < BOOKKEEPING_BYTES
    for call, kernel in zip(calls, kernels, strict=True):
        assert image_of(kernel.metadata).threads == threads
        ptx, ttgir = kernel.asm["ptx"], kernel.asm["ttgir"]
        for verb in (*_VERBS, *verbs):
            assert verb in ptx, verb
        assert "wgmma.mma_async.sync.aligned.m64n128k16" not in ptx  # head_dim is not padded to 128
        assert none not in ptx
        made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg.memdesc<\d+x1xi64", ttgir)
        (used,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
        assert len(made) == barriers[call.table.kernel]
        assert set(made) <= set(used.split(", "))


@needs_compiler
@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
def test_a_gradient_is_stored_by_threads_that_have_16_bytes_in_a_row(columns):
    """Two exchanges of one bit each, which are shuffles: each pair of layouts differs in one lane's place."""
    plan = plan_of(max(columns, 16), variant=TWO)
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


# ---------------------------------------------------------------- heads wider than 256


@needs_compiler
@needs_machine_code
@pytest.mark.parametrize(("head_dim", "head_dim_v", "band"), [(512, 512, FULL), (264, 512, WINDOW)], ids=str)
def test_twins_keep_their_outputs_in_registers(head_dim, head_dim_v, band):
    """Each has half of them; and all that a turn needs of descriptors is made where it is used, not kept."""
    plan = plan_of(head_dim, variant=TWINS, head_dim_v=head_dim_v, band=band, dtype="fp16")
    (kernel,) = export_plan(plan, ("ptx", "ttgir"))
    spare = gluon_twin.smem_bytes(plan.config, plan.problem) - kernel.dynamic_smem_bytes
    assert (kernel.threads, 0 <= spare < BOOKKEEPING_BYTES) == (384, True)
    ptx, ttgir = kernel.texts["ptx"].decode(), kernel.texts["ttgir"].decode()
    for verb in (*_VERBS[:1], *_VERBS[2:], f"wgmma.mma_async.sync.aligned.m64n{plan.config.piece}k16.f32.f16.f16"):
        assert verb in ptx, verb
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg.memdesc<\d+x1xi64", ttgir)
    (used,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
    assert len(made) == 9
    assert set(made) <= set(used.split(", "))
    assert read_kernel(kernel, plan).hot_spills < 8
