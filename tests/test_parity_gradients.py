"""Parity of gradients: the truth, its tester tested with gradients broken on purpose, and finite differences."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from parity_breaks import (
    BY_NAME,
    CPU,
    LISTED,
    WINDOWS,
    changed_lists,
    each,
    first_entries,
    moved_bounds,
    of_head_before,
    one_less,
    options_of,
)

from multiattn import reference, reference_backward
from multiattn.block_mask import BlockLists
from multiattn.operands import Operands
from multiattn.problem import options_of as its_options
from multiattn.reference import attend
from multiattn.reference import differentiate as gradients_of
from multiattn.score import eager
from multiattn.truth import gradients
from parity.case import Case
from parity.cases import suite
from parity.gradients import by_autograd, differentiate_in_chunks, exactly
from parity.launch import prepare_case, prepare_gradients, problem_of
from parity.tolerance import PRODUCTS_AT_ONCE, Mismatch, operands_and_problem, truncation

CPU_CASES = [case for case in suite(CPU) if not case.no_backward]


@pytest.fixture(
    scope="module",
    params=[pytest.param(it, marks=pytest.mark.nightly if it.nightly else (), id=str(it)) for it in CPU_CASES],
)
def case(request):
    """A case for several tests, which run one after another: they share its truth."""
    return request.param


Grads = tuple[torch.Tensor, ...]
Break = Callable[[Case], Grads]


def differentiate(case: Case, **changes: object) -> Grads:
    """A good backward's gradients of what a good forward saved, in fp32; `changes` to its arguments break it."""
    inputs, _ = prepare_case(case, CPU)
    upstream, _ = prepare_gradients(case, CPU)
    options = options_of(case, inputs, slots=inputs.slots)
    del options["cached"]
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    forward, problem = operands_and_problem(**tensors, **options)
    out, lse = attend(forward, its_options(problem), torch.float32)
    saved = {"out": out.to(case.torch_dtype), "lse": lse, "dout": upstream.dout, "dlse": upstream.dlse}
    given = tensors | saved | options | changes
    saved = {name: given.pop(name) for name in saved}
    operands, problem = operands_and_problem(**given)
    return gradients_of(operands._replace(**saved), its_options(problem), torch.float32)


def check(case: Case, grads: Grads) -> None:
    _, truth = prepare_gradients(case, CPU)
    for grad, expected in zip(grads, truth.all, strict=True):
        expected.check(grad.to(case.torch_dtype) if expected.name in ("dq", "dk", "dv") else grad, "a plan")


# ---------------------------------------------------------------- gradients broken on purpose


def scale_off_by_1_percent(case: Case) -> Grads:
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    return differentiate(case, scale=scale * 1.01)


def other(**changes: object) -> Break:
    """Gradients with other options."""
    return lambda case: differentiate(case, **changes)


def other_window(left: int, right: int) -> Break:
    """Gradients of a window with other bounds, each by so much."""
    return lambda case: differentiate(case, window=moved_bounds(case, left, right))


def shifted(case: Case, shift: int) -> Grads:
    """A backward whose diagonal is `shift` keys to the right of where that of its forward was."""
    inputs, _ = prepare_case(case, CPU)
    upstream, _ = prepare_gradients(case, CPU)
    q, k, v, dout = (tensor.float() for tensor in (inputs.q, inputs.k, inputs.v, upstream.dout))
    scale = 1 / math.sqrt(case.head_dim)
    out, lse = reference(inputs.q, inputs.k, inputs.v, causal=True)
    query, key = torch.arange(case.seq_q)[:, None], torch.arange(case.seq_kv)
    visible = key <= query + case.seq_kv - case.seq_q + shift
    lse = lse.masked_fill(lse.isinf(), math.inf)
    p = torch.exp(q @ k.mT * scale - lse[..., None]).masked_fill(~visible, 0.0)
    delta = (dout * out).sum(-1) - (0.0 if upstream.dlse is None else upstream.dlse)
    ds = p * (dout @ v.mT - delta[..., None]) * scale
    return ds @ k, ds.mT @ q, p.mT @ dout


def without_slope(case: Case) -> Grads:
    """As if what modifies scores only added to them."""
    prepare_gradients(case, CPU)  # the truth, before anything is broken
    slope, eager.slope = eager.slope, lambda bound, scores, part=None: torch.ones_like(scores)
    try:
        return differentiate(case)
    finally:
        eager.slope = slope


def of_captured(case: Case) -> Grads:
    """Right gradients of captured tensors."""
    _, truth = prepare_gradients(case, CPU)
    return tuple(expected.truth for expected in truth.dcaptured)


def only_from(axis: int) -> Break:
    """Gradients of captured tensors that are not reduced: from the first batch entry, head or query alone."""

    def broken(case: Case) -> Grads:
        upstream, _ = prepare_gradients(case, CPU)
        changes = {}
        for name in ("dout", "dlse"):
            if (tensor := getattr(upstream, name)) is not None:
                changes[name] = torch.zeros_like(tensor)
                changes[name].narrow(axis, 0, 1).copy_(tensor.narrow(axis, 0, 1))
        plain = len(differentiate(case)) - len(of_captured(case))
        return (*differentiate(case)[:plain], *differentiate(case, **changes)[plain:])

    return broken


def partial_blocks_seen_whole(case: Case) -> Grads:
    inputs, _ = prepare_case(case, CPU)
    program = replace(inputs.score.program, mask=None)
    return differentiate(case, score=inputs.score._replace(program=program))


def with_lists(change: Callable[[BlockLists], BlockLists]) -> Break:
    """Gradients by other lists of blocks than the forward had."""
    return lambda case: differentiate(case, blocks=change(prepare_case(case, CPU)[0].blocks))


def a_block_twice(case: Case) -> Grads:
    return tuple(a + b for a, b in zip(differentiate(case), with_lists(first_entries)(case), strict=True))


def a_key_of_each_sequence_left_out(case: Case) -> Grads:
    """Sequences of a packed batch end a key too early."""
    inputs, _ = prepare_case(case, CPU)
    cu_seqlens_q, cu_seqlens_kv = inputs.packed.cu_seqlens
    less = cu_seqlens_kv.clone()
    less[1:-1] -= (less[1:-1] > 0).int()
    return differentiate(case, packed=inputs.packed._replace(cu_seqlens=(cu_seqlens_q, less)))


def delta_as_wide_as_k(case: Case) -> Grads:
    """The sum over out * dout ends with the columns that K has."""
    inputs, _ = prepare_case(case, CPU)
    out, _ = reference(inputs.q, inputs.k, inputs.v, causal=case.causal)
    out[..., case.head_dim :] = 0
    return differentiate(case, out=out)


def half_of_dv_twice(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Grads:
    return dq, dk, torch.cat([dv[..., : dv.shape[-1] // 2]] * 2, dim=-1)


def last_tile_of_keys_dropped(case: Case) -> Grads:
    """The walk over the keys ends a tile early: dq lacks it, and dk and dv of these keys are zero."""
    assert not case.causal  # else fewer keys would move the mask
    inputs, _ = prepare_case(case, CPU)
    keys = (case.seq_kv - 1) // 64 * 64
    dq, dk, dv = differentiate(case, k=inputs.k[:, :, :keys], v=inputs.v[:, :, :keys])
    rest = (0, 0, 0, case.seq_kv - keys)
    return dq, torch.nn.functional.pad(dk, rest), torch.nn.functional.pad(dv, rest)


def last_tile_of_queries_dropped(case: Case) -> Grads:
    """The walk over the queries ends a tile early: dk and dv lack it."""
    inputs, _ = prepare_case(case, CPU)
    _, lse = reference(inputs.q, inputs.k, inputs.v, causal=case.causal, window=case.window, scale=case.scale)
    lse[:, :, (case.seq_q - 1) // 64 * 64 :] = math.inf  # no weight
    return differentiate(case)[0], *differentiate(case, lse=lse)[1:]


def then(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Grads]) -> Break:
    """Right gradients, changed."""
    return lambda case: change(*differentiate(case))


def empty_rows_nan(case: Case) -> Grads:
    """exp(-inf - -inf), as lse = -inf gives where nothing guards it."""
    dq, dk, dv = differentiate(case)
    dq[:, :, : case.seq_q - case.seq_kv] = math.nan
    return dq, dk, dv


def one_nan(case: Case) -> Grads:
    dq, dk, dv = differentiate(case)
    dk[-1, -1, case.seq_kv // 2, 3] = math.nan
    return dq, dk, dv


# A gradient alone, and by less: fp16, which rounds eight times finer than bf16, shows it in every case.
ALONE = "d64_fp16_full d128_fp16_causal d256_fp16_full d40_fp16_full large_fp16"
PACKED = "varlen_apart_d64_full varlen_apart_d64_causal varlen_uneven_d64_causal"
BROKEN: dict[str, tuple[Break, str]] = {
    "scale off by 1 %": (scale_off_by_1_percent, "d64_fp16_full d128_fp16_causal d256_fp16_full large_fp16 scale_one"),
    "dk and dv off by 5 %": (
        then(lambda dq, dk, dv: (dq, dk * 1.05, dv * 1.05)),
        "d64_fp16_full d128_bf16_causal len_256x256_causal large_bf16",
    ),
    "dq off by 2 %": (then(lambda dq, dk, dv: (dq * 1.02, dk, dv)), ALONE),
    "dk off by 2 %": (then(lambda dq, dk, dv: (dq, dk * 1.02, dv)), ALONE),
    "dv off by 2 %": (then(lambda dq, dk, dv: (dq, dk, dv * 1.02)), ALONE),
    "mask ignored": (other(causal=False), "d64_bf16_causal len_128x128_causal len_200x329_causal len_203x113_causal"),
    "sees one key more": (
        lambda case: shifted(case, 1), "d64_bf16_causal len_127x128_causal len_203x113_causal len_3x300_causal",
    ),
    "sees one key less": (
        lambda case: shifted(case, -1), "d64_bf16_causal len_128x128_causal len_300x3_causal len_1x1_causal",
    ),
    **{f"a window with more keys {by}": (other_window(*by), cases) for by, cases in WINDOWS.items()},
    "sink scaled": (
        lambda case: differentiate(case, sinks=prepare_case(case, CPU)[0].sinks / math.sqrt(case.head_dim)),
        "sinks_full sinks_causal_d128 sinks_gpt_oss sinks_empty_rows",
    ),
    "dsinks of the next head": (
        then(lambda dq, dk, dv, dsinks: (dq, dk, dv, dsinks.roll(1))),
        "sinks_full sinks_causal_d128 sinks_gpt_oss sinks_large",
    ),
    "dsinks of one batch entry": (
        then(lambda dq, dk, dv, dsinks: (dq, dk, dv, dsinks / 2)), "sinks_gpt_oss sinks_full sinks_causal_d128",
    ),
    "slope of the score missing": (
        without_slope,
        "softcap_d40_bf16 softcap_d128_fp16 softcap_large softcap_scale_negative score_mod_composite score_mod_powers",
    ),
    "score ignored": (
        lambda case: (*differentiate(case, score=None, slots=()), *of_captured(case)),
        "softcap_d64_bf16 alibi_causal bias_bhqk bias_hides_rows score_mod_composite",
    ),
    "dbias of one batch entry": (only_from(0), "bias_hqk bias_hk bias_qk bias_k score_mod_shared_bias"),
    "dbias of one head": (only_from(1), "bias_bqk bias_qk bias_bk bias_k"),
    "dbias of one query": (only_from(2), "bias_bhk bias_hk bias_k alibi_causal score_mod_learned_softcap"),
    "dbias of the next head": (
        then(lambda dq, dk, dv, dbias: (dq, dk, dv, dbias.roll(1, dims=1))), "bias_bhqk bias_bhk bias_hk bias_gqa_d256",
    ),
    "partial blocks seen whole": (
        partial_blocks_seen_whole,
        "blocks_causal blocks_document blocks_natten_2d blocks_of_256x256_d40 blocks_softcap " + LISTED,
    ),
    "the last partial block left out": (
        with_lists(lambda blocks: changed_lists(blocks, kv_num_blocks=one_less)), "blocks_causal " + LISTED,
    ),
    "the last full block left out": (
        with_lists(lambda blocks: changed_lists(blocks, full_kv_num_blocks=one_less)),
        "blocks_of_64_full_cut " + LISTED,
    ),
    "lists of the head before": (with_lists(of_head_before), LISTED),
    "a block twice": (a_block_twice, "blocks_causal blocks_block_diagonal " + LISTED),
    "last tile of keys dropped": (
        last_tile_of_keys_dropped, "d64_bf16_full d64_fp16_full len_129x257_full ascending_full",
    ),
    "last tile of queries dropped": (
        last_tile_of_queries_dropped, "d64_bf16_full len_128x128_full len_129x129_causal len_256x256_causal",
    ),
    "a key of each sequence left out": (a_key_of_each_sequence_left_out, PACKED),
    "dq of a neighbour's row": (then(lambda dq, dk, dv: (dq.roll(1, dims=2), dk, dv)), PACKED),
    "dk of a neighbour's row": (then(lambda dq, dk, dv: (dq, dk.roll(1, dims=2), dv)), PACKED),
    "dk and dv swapped": (then(lambda dq, dk, dv: (dq, dv, dk)), "d64_bf16_full d64_fp16_causal gqa4_b1 len_1x1_full"),
    "dk of the next group": (then(lambda dq, dk, dv: (dq, dk.roll(1, dims=1), dv)), "d64_bf16_full gqa4_b1 gqa8_b1"),
    "delta missing": (
        lambda case: differentiate(case, out=torch.zeros_like(prepare_case(case, CPU)[0].q), dlse=None),
        "d64_bf16_full d64_fp16_causal len_300x1_full len_256x256_causal",
    ),
    "delta as wide as k": (delta_as_wide_as_k, "d64_v128_full d64_v128_causal d40_v72_full d8_v256_causal"),
    "half of dv twice": (then(half_of_dv_twice), "d192_v128_full d64_v128_causal d320_v256_causal"),
    "dlse ignored": (other(dlse=None), "d64_fp16_causal gqa4_b1 len_300x1_full len_203x113_causal large_fp16"),
    "empty rows NaN": (empty_rows_nan, "len_203x113_causal len_300x3_causal len_128x127_causal len_200x1_causal"),
    "one NaN": (one_nan, "d64_bf16_full gqa4_b1"),
}  # fmt: skip


@pytest.mark.parametrize(("broken", "name"), each(BROKEN))
def test_a_broken_gradient_fails(broken, name):
    grads = BROKEN[broken][0](BY_NAME[name])
    with pytest.raises(Mismatch):
        check(BY_NAME[name], grads)


def test_correct_gradients_pass_and_no_budget_is_vacuous(case):
    check(case, differentiate(case))
    _, truth = prepare_gradients(case, CPU)
    for expected in truth.all:
        finite = expected.truth[expected.truth.isfinite()].abs()
        signal = float(finite.max()) if finite.numel() else 0.0
        assert expected.budget.max <= 0.15 * max(signal, LEAST_SIGNAL.get((case.name, expected.name), 1e-3))


LEAST_SIGNAL = {
    # Gradients that cancel: each weight is 1 or 0, so that dp - delta is what rounding leaves of larger numbers.
    ("ascending_full", "dq"): 4.0,
    ("ascending_full", "dk"): 8.0,
    ("blocks_of_128_far_below", "dq"): 4.0,
    ("blocks_of_128_far_below", "dk"): 12.0,
    ("blocks_of_128_full_below", "dq"): 4.0,
    ("blocks_of_128_full_below", "dk"): 12.0,
    # A clamp's slope is 0 or 1: naive has another one where rounding takes a score over the limit.
    ("score_mod_clamped", "dq"): 3.0,
    ("score_mod_clamped", "dk"): 3.0,
    ("score_mod_in_place", "dq"): 5.0,
    ("score_mod_in_place", "dk"): 5.0,
    # What all keys of a row share moves lse alone, and nothing where that has no gradient.
    ("bias_bh", "dcaptured0"): 1.0,
    ("bias_bq", "dcaptured0"): 1.0,
    ("bias_hq", "dcaptured0"): 1.0,
    ("bias_hides_rows", "dcaptured0"): 1.0,
    # One number, of terms that cancel.
    ("score_mod_learned_softcap", "dcaptured0"): 1.0,
}
"""Below this a budget is not compared with the largest gradient."""


# ---------------------------------------------------------------- the truth


def test_the_truth_is_the_reference_differentiated(case):
    if case.values == "nan_neighbours":
        pytest.skip("autograd multiplies neighbours by zero, and NaN stays NaN")
    inputs, _ = prepare_case(case, CPU)
    upstream, truth = prepare_gradients(case, CPU)
    given = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks")}
    given |= {"dout": upstream.dout, "dlse": upstream.dlse}
    doubles = Operands(
        **{name: None if it is None else it.double() for name, it in given.items()},
        captured=tuple(it.double() if it.is_floating_point() else it for it in inputs.captured),
        indices=inputs.indices,
    )
    grads = differentiate_in_chunks(doubles, problem_of(case, inputs), by_autograd, keep=torch.float64)
    # Slopes times distances are fp32 at any dtype, as in kernels; autograd rounds their gradients, and formulas do not.
    rtol = 1e-6 if case.score_mod == "composite" else 1e-9
    for grad, expected in zip(grads, truth.all, strict=True):
        torch.testing.assert_close(grad, expected.truth, rtol=rtol, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_backward_may_be_fed_with_any_good_rounding_of_out(seed):
    """The gradient of few captured numbers is a walk of out's roundings: one alone may end near 0 by chance."""
    case = BY_NAME["score_mod_composite"]
    inputs, _ = prepare_case(case, CPU)
    options = options_of(case, inputs, slots=inputs.slots)
    del options["cached"]
    forward, problem = operands_and_problem(q=inputs.q, k=inputs.k, v=inputs.v, **options)
    out, _ = attend(forward, its_options(problem), torch.float32)
    noise = torch.rand(out.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
    noisy = out * (1 + 2 * torch.finfo(case.torch_dtype).eps * noise)
    check(case, differentiate(case, out=noisy.to(case.torch_dtype)))


@pytest.mark.parametrize(
    "name", ["d64_bf16_causal", "len_203x113_causal", "gqa4_b1", "mqa5_b2", "window_7_3", "sinks_empty_rows"]
)
def test_the_truth_is_the_same_in_chunks(name, monkeypatch):
    case = BY_NAME[name]
    inputs, _ = prepare_case(case, CPU)
    upstream, _ = prepare_gradients(case, CPU)
    options = {"causal": case.causal, "window": case.window, "sinks": inputs.sinks, "compute_dtype": torch.float64}
    out, lse = reference(inputs.q, inputs.k, inputs.v, **options)
    given = inputs.q, inputs.k, inputs.v
    whole = reference_backward(*given, out, lse, upstream.dout, dlse=upstream.dlse, **options)
    monkeypatch.setattr(gradients, "GRAD_CHUNK", 11 * case.heads_q * max(case.seq_kv, case.head_dim))
    operands = Operands(*given, dout=upstream.dout, dlse=upstream.dlse, sinks=inputs.sinks)
    parts = differentiate_in_chunks(operands, problem_of(case, inputs), exactly, keep=torch.float64)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- sums of a tensor core


def test_truncation_is_what_sums_rounded_toward_zero_lose():
    """As tensor cores add: 16 products at a time, exactly, then toward zero onto fp32."""
    generator = np.random.default_rng(0)
    steps, columns = 1 << 15, 256
    kept, exact = np.zeros(columns, np.float32), np.zeros(columns)
    for part in generator.standard_normal((steps, columns)):
        exact += part
        total = kept + part  # fp64
        kept = total.astype(np.float32)
        kept = np.where(np.abs(kept) > np.abs(total), np.nextafter(kept, np.float32(0)), kept)
    lost = float(np.abs(kept - exact).max())
    allowed = truncation(torch.from_numpy(exact), steps * PRODUCTS_AT_ONCE)
    assert allowed / 8 < lost < allowed


def test_truncation_is_nothing_beside_a_rounding_at_usual_lengths():
    ones = torch.ones(3)
    assert truncation(ones, 16384) < 0.02 * torch.finfo(torch.bfloat16).eps
    assert truncation(torch.empty(0), 16384) == 0.0
