"""The tester tested: results broken on purpose must each fail, correct ones must pass, no budget may be vacuous."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity_breaks import (
    BY_NAME,
    CPU,
    LISTED,
    WIDTHS,
    WINDOWS,
    Break,
    Result,
    attend,
    changed_lists,
    check,
    each,
    first_entries,
    moved_bounds,
    of_head_before,
    of_row_before,
    one_less,
    other,
    then,
)  # fmt: skip

from multiattn import Problem, merge, reference
from multiattn.operands import Operands
from multiattn.plan.backend import BACKENDS, get
from multiattn.truth import tolerance as truth
from parity import tolerance
from parity.case import BACKWARD_HEAD_DIM_MAX, Case, Memory
from parity.cases import CASES, suite
from parity.launch import prepare_case
from parity.memory import GUARD, POISON, POISON_8, poisoned
from parity.tensors import Inputs, Outputs
from parity.tolerance import (
    Allowance,
    Expected,
    Mismatch,
    Truth,
    deviate,
    probe_rounding,
    reference_in_chunks,
    truncation,
)

CPU_CASES = suite(CPU)

# ---------------------------------------------------------------- results broken on purpose


def with_offset(shift: int | None) -> Break:
    """Causal attention whose diagonal is `shift` keys to the right of where it belongs, or begins at the top left."""

    def broken(case: Case, inputs: Inputs) -> Result:
        q, k, v = (tensor.float() for tensor in (inputs.q, inputs.k, inputs.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(case.head_dim)
        query, key = torch.arange(case.seq_q)[:, None], torch.arange(case.seq_kv)
        last = query + (0 if shift is None else case.seq_kv - case.seq_q + shift)
        scores = scores.masked_fill(key > last, -math.inf)
        lse = scores.logsumexp(dim=-1)
        return (scores.softmax(dim=-1).nan_to_num(0.0) @ v).to(case.torch_dtype), lse

    return broken


def with_mask(change: Callable[[Any], Any]) -> Break:
    """A block mask with another mask inside of its partial blocks."""

    def broken(case: Case, inputs: Inputs) -> Result:
        program = replace(inputs.score.program, mask=change(inputs.score.program.mask))
        return attend(case, inputs, score=inputs.score._replace(program=program))

    return broken


def with_lists(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    """A block mask one of whose lists is another."""
    return lambda case, inputs: attend(case, inputs, blocks=changed_lists(inputs.blocks, **{name: change}))


def other_window(left: int, right: int) -> Break:
    """A window with other bounds, each by so much."""
    return lambda case, inputs: attend(case, inputs, window=moved_bounds(case, left, right))


def moved(dimension: int) -> Break:
    """A score whose tensor is read one element further on."""

    def broken(case: Case, inputs: Inputs) -> Result:
        tensors = (inputs.score.tensors[0].roll(1, dims=dimension),)
        return attend(case, inputs, score=inputs.score._replace(tensors=tensors))

    return broken


def with_keys(change: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    """Attention over the keys and values that `change` makes of the right ones."""
    return lambda case, inputs: attend(case, replace(inputs, k=change(inputs.k), v=change(inputs.v)))


def scale_off_by_1_percent(case: Case, inputs: Inputs) -> Result:
    return attend(case, inputs, scale=1.01 * (1 / math.sqrt(case.head_dim) if case.scale is None else case.scale))


def softcap_off_by_2_percent(case: Case, inputs: Inputs) -> Result:
    return attend(case, inputs, score=inputs.score._replace(scalars={"softcap": 1.02 * case.softcap}))


def last_columns_dropped(case: Case, inputs: Inputs) -> Result:
    """D rounded down to a multiple of 16 in Q @ K."""
    q = inputs.q.clone()
    q[..., case.head_dim // 16 * 16 :] = 0
    return attend(case, replace(inputs, q=q))


def lse_without_maximum(case: Case, inputs: Inputs) -> Result:
    out, lse = attend(case, inputs)
    scale = case.scale or 1 / math.sqrt(case.head_dim)
    scores = inputs.q.float() @ inputs.k.float().transpose(-1, -2) * scale
    return out, lse - scores.amax(dim=-1)


def empty_rows_average(case: Case, inputs: Inputs) -> Result:
    """A row with no key gets the mean of V, as a finite mask value makes it."""
    out, lse = attend(case, inputs)
    return torch.where(lse.isinf()[..., None], inputs.v.float().mean(dim=2, keepdim=True).to(out.dtype), out), lse


def written(place: tuple, value: float) -> Break:
    """Right but for one place of out."""

    def broken(case: Case, inputs: Inputs) -> Result:
        out, lse = attend(case, inputs)
        out[place] = value
        return out, lse

    return broken


def wrong_where_nan_may_be(out: torch.Tensor, lse: torch.Tensor) -> Result:
    """A wrong finite number where 0 * NaN may make NaN: in a row that does not see the key."""
    out[:, 0, 1, 0] += 1.0
    return out, lse


BROKEN: dict[str, tuple[Break, str]] = {
    "scale off by 1 %": (
        scale_off_by_1_percent, "d64_fp16_full d64_bf16_causal d256_bf16_causal len_1x300_full scale_one",
    ),
    "scale ignored": (other(scale=1.0), "d8_bf16_full scale_zero scale_tiny scale_negative"),
    "sign of the scale lost": (
        lambda case, inputs: attend(case, inputs, scale=-case.scale), "scale_one scale_negative scale_negative_causal",
    ),
    "mask ignored": (other(causal=False), "d64_bf16_causal len_128x128_causal len_3x300_causal"),
    "sees one key more": (with_offset(1), "d64_bf16_causal len_127x128_causal len_203x113_causal len_3x300_causal"),
    "sees one key less": (with_offset(-1), "d64_bf16_causal len_128x128_causal len_300x3_causal len_1x1_causal"),
    "top left": (with_offset(None), "d64_bf16_causal len_127x128_causal len_128x127_causal len_1x300_causal"),
    "window ignored": (
        other(window=None), "window_7_3 window_130_causal window_left_only window_right_only window_30_0_113x203",
    ),
    **{f"a window with more keys {by}": (other_window(*by), cases) for by, cases in WINDOWS.items()},
    "a wide window one key less on the right": (other_window(0, -1), "window_0_128_129x257"),
    "sink ignored": (
        other(sinks=None), "sinks_full sinks_large sinks_some sinks_empty_rows sinks_empty_keys sinks_gpt_oss",
    ),
    "sink scaled": (
        lambda case, inputs: attend(case, inputs, sinks=inputs.sinks / math.sqrt(case.head_dim)),
        "sinks_full sinks_large sinks_some sinks_empty_rows sinks_empty_keys sinks_gpt_oss",
    ),
    "sink of the next head": (
        lambda case, inputs: attend(case, inputs, sinks=inputs.sinks.roll(1)),
        "sinks_full sinks_large sinks_some sinks_gpt_oss",
    ),
    "score ignored": (
        other(score=None),
        "softcap_d64_bf16 softcap_large alibi_causal alibi_batch bias_bhqk bias_k bias_hides_rows score_mod_composite",
    ),
    "softcap off by 2 %": (
        softcap_off_by_2_percent, "softcap_d128_fp16 softcap_d40_bf16 softcap_scale_negative softcap_sinks_empty_rows",
    ),
    "slope of the next head": (moved(-1), "alibi_causal alibi_batch alibi_gqa_d128 alibi_window alibi_softcap"),
    "bias of the wrong head": (moved(1), "bias_bhqk bias_hqk bias_bhq bias_hk bias_bhk bias_gqa_d256"),
    "bias of the next key": (moved(3), "bias_bhqk bias_hqk bias_k bias_bqk bias_hides_d128"),
    "bias of the wrong batch entry": (moved(0), "bias_bhqk bias_bqk bias_bk bias_bhk"),
    "blocks ignored": (
        other(score=None, blocks=None),
        "blocks_causal blocks_document blocks_prefix_lm blocks_sliding_window blocks_block_diagonal blocks_per_head "
        "varlen_blocks_uneven",
    ),
    "partial blocks seen whole": (
        with_mask(lambda mask: None),
        "blocks_causal blocks_document blocks_natten_2d blocks_of_256x256_d40 blocks_softcap blocks_sinks "
        "varlen_blocks_uneven varlen_blocks_nan_neighbours varlen_blocks_window " + LISTED,
    ),
    "full blocks left out": (with_lists("full_kv_num_blocks", torch.zeros_like), "blocks_causal blocks_noop"),
    "the last partial block left out": (
        with_lists("kv_num_blocks", one_less),
        "blocks_causal blocks_document blocks_prefix_lm blocks_broadcast blocks_of_192x96_d96 varlen_blocks_uneven "
        + LISTED,
    ),
    "the last full block left out": (
        with_lists("full_kv_num_blocks", one_less),
        "blocks_of_64_full_cut blocks_of_128_full_cut varlen_blocks_apart varlen_blocks_nan_neighbours " + LISTED,
    ),
    "lists of the head before": (
        lambda case, inputs: attend(case, inputs, blocks=of_head_before(inputs.blocks)), LISTED,
    ),
    "a block twice": (
        lambda case, inputs: merge(
            *attend(case, inputs), *attend(case, inputs, blocks=first_entries(inputs.blocks)),
        ),
        "blocks_causal blocks_document blocks_block_diagonal varlen_blocks_uneven " + LISTED,
    ),
    "blocks of the row before": (
        with_lists("kv_indices", lambda indices: indices.roll(1, dims=-2)),
        "blocks_causal blocks_sliding_window blocks_block_diagonal blocks_of_32x32_d128 varlen_blocks_uneven",
    ),
    "lists of the sequence before": (
        lambda case, inputs: attend(case, inputs, blocks=of_row_before(inputs.blocks)),
        "varlen_blocks_uneven varlen_blocks_apart varlen_blocks_nan_neighbours varlen_blocks_window",
    ),
    "last key dropped": (
        with_keys(lambda tensor: tensor[:, :, :-1]),
        "d64_bf16_full len_1x300_full len_128x128_full len_129x257_full ascending_full gqa4_b1",
    ),
    "zero-filled keys of the ragged tile counted": (
        with_keys(lambda tensor: torch.nn.functional.pad(tensor, (0, 0, 0, 5))),
        "d64_bf16_full d128_fp16_full len_1x300_full len_129x257_full",
    ),
    "heads swapped": (
        then(lambda out, lse: (out.flip(1), lse.flip(1))), "d64_bf16_full len_1x1_full gqa4_b1 len_300x1_full",
    ),
    "v of the next group": (
        lambda case, inputs: attend(case, replace(inputs, v=inputs.v.roll(1, dims=1))),
        "d64_bf16_full gqa4_b1 gqa8_b1 gqa3_b2",
    ),
    "batches swapped": (with_keys(lambda tensor: tensor.flip(0)), "mha_b2 mqa5_b2 gqa3_b2 bshd"),
    "last columns dropped": (last_columns_dropped, "d40_fp16_full d72_fp16_full"),
    "lse in log2": (
        then(lambda out, lse: (out, lse / math.log(2))), "d64_bf16_full len_1x1_full scale_zero large_bf16",
    ),
    "lse without the maximum": (lse_without_maximum, "d64_bf16_full scale_one large_bf16"),
    "lse rounded to 16 bits": (
        then(lambda out, lse: (out, lse.to(out.dtype).float())), "d64_bf16_full d64_fp16_full scale_one",
    ),
    "one NaN": (written((-1, -1, 0, 3), math.nan), "d64_bf16_full d64_fp16_causal nan_v_full"),
    "one NaN in lse": (
        then(lambda out, lse: (out, lse.index_fill(2, torch.tensor([0]), math.nan))), "d64_bf16_full d64_fp16_causal",
    ),
    "a row of zeros": (written((0, 0, -1), 0.0), "d64_bf16_full d64_fp16_causal len_1x300_full scale_zero"),
    "not normalised": (
        then(lambda out, lse: (out * 1.05, lse)), "d64_bf16_full d64_fp16_causal len_300x1_full len_256x256_causal",
    ),
    "NaN swallowed": (
        then(lambda out, lse: (out.nan_to_num(0.0, 0.0, 0.0), lse.nan_to_num(0.0))),
        "nan_k_causal nan_v_causal nan_v_full inf_k_full inf_v_causal",
    ),
    "NaN reaches another column": (written((slice(None), 0, -1, 1), math.nan), "nan_v_causal nan_v_prefix"),
    "NaN reaches another head": (
        written((slice(None), -1, slice(None), slice(None, None, 3)), math.nan), "nan_v_causal nan_v_prefix",
    ),
    "wrong where NaN may be": (then(wrong_where_nan_may_be), "nan_v_causal nan_v_prefix"),
    "infinities made finite": (
        then(lambda out, lse: (out.masked_fill(out.isinf(), 65504.0), lse)), "inf_v_causal inf_v_full",
    ),
    "empty rows average": (empty_rows_average, "len_203x113_causal len_300x3_causal len_128x127_causal empty_keys"),
    "lse of empty rows is 0": (
        then(lambda out, lse: (out, lse.masked_fill(lse.isinf(), 0.0))),
        "len_203x113_causal len_200x1_causal empty_keys",
    ),
    **WIDTHS,
}  # fmt: skip


@pytest.mark.parametrize(("broken", "name"), each(BROKEN))
def test_a_broken_result_fails(broken, name):
    case = BY_NAME[name]
    inputs, _ = prepare_case(case, CPU)
    result = BROKEN[broken][0](case, inputs)
    with pytest.raises(Mismatch):
        check(case, result)


@pytest.mark.parametrize("case", CPU_CASES, ids=str)
def test_a_correct_result_passes_and_no_budget_is_vacuous(case):
    inputs, truth = prepare_case(case, CPU)
    check(case, attend(case, inputs))
    for expected, share in ((truth.out, 0.1), (truth.lse, 1e-5)):
        finite = expected.truth[expected.truth.isfinite()]
        signal = float(finite.abs().max()) if finite.numel() else 0.0
        at_least = 0.0 if expected.name == "out" else 1.0
        assert expected.budget.max <= share * max(signal, at_least)


@pytest.mark.parametrize("name", ["d64_bf16_causal", "len_203x113_causal", "len_3x300_causal"])
def test_what_breaks_the_mask_breaks_nothing_else(name):
    case = BY_NAME[name]
    inputs, _ = prepare_case(case, CPU)
    check(case, with_offset(0)(case, inputs))


# ---------------------------------------------------------------- the table


def test_cases_are_unique_and_say_why():
    assert len(BY_NAME) == len(CASES) == len({replace(case, name="", why="") for case in CASES})
    assert all(case.why for case in CASES)


def test_cases_have_the_size_that_they_say():
    assert all(case.size == "any" for case in CPU_CASES)
    assert max(it.heads_q * sum(q * kv for q, kv in it.pairs) for it in CPU_CASES) <= 1 << 18
    for case in CASES:
        if case.size == "huge":
            row = case.head_dim + case.layout.row_pad
            assert max(case.seq_kv * row, case.heads_q * case.seq_q * row) > 1 << 31


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("case", CPU_CASES, ids=str)
def test_inputs_lie_in_nan_and_are_the_same_each_time(case):
    one, two = Inputs.of(case, CPU), Inputs.of(case, CPU)
    for a, b in ((one.q, two.q), (one.k, two.k), (one.v, two.v)):
        assert torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
    of_bytes = POISON_8 * 0x101, 0x101  # of 8-bit numbers, and of bools
    for memory in one.memory:
        poison = int(memory[0])
        guard = GUARD if poison == POISON else GUARD // 2
        assert poison in (POISON, *of_bytes)
        assert bool((memory[:guard] == poison).all())
        assert bool((memory[-guard:] == poison).all())
    assert not one.were_written


def test_layouts_have_the_alignment_and_the_strides_they_promise():
    names = {
        16: ("d64_bf16_full", "padded_rows", "stray_strides", "bshd", "packed_full"),
        8: ("aligned_8_bytes",),
        2: ("offset_base", "odd_rows", "odd_all"),
    }
    for alignment, its in names.items():
        for name in its:
            inputs = Inputs.of(BY_NAME[name], CPU)
            assert Problem.of(inputs.q, inputs.k, inputs.v).alignment == alignment, name
    assert Inputs.of(BY_NAME["broadcast_heads"], CPU).k.stride(1) == 0
    assert Inputs.of(BY_NAME["broadcast_batch"], CPU).v.stride(0) == 0


@pytest.mark.parametrize("name", ["k_transposed", "v_transposed", "k_transposed_odd_v"])
def test_k_and_v_that_lie_apart_share_no_stride_and_nor_do_their_gradients(name):
    case = BY_NAME[name]
    inputs = Inputs.of(case, CPU)
    problem = Problem.of(inputs.q, inputs.k, inputs.v, causal=case.causal)
    for k, v in ((problem.strides_k, problem.strides_v), (problem.strides_dk, problem.strides_dv)):
        assert all(a != b for a, b in zip(k[1:], v[1:], strict=True))  # heads and rows; a dense batch may be alike
    assert problem.strides_k != problem.strides_v


def test_packed_needs_one_length():
    with pytest.raises(ValueError, match="share one sequence"):
        Inputs.of(Case(name="x", why="x", layout=Memory(order="packed"), seq_q=3, seq_kv=4), CPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_poison_is_nan(dtype):
    assert bool(poisoned(8, dtype, CPU).isnan().all())


def test_a_write_beside_an_output_or_to_an_input_shows():
    outputs = Outputs.of(Problem.contiguous(batch=1, heads_q=1, seq_q=3, head_dim=8), CPU)
    assert not outputs.guards_were_written
    outputs.memory[0][-GUARD] = math.nan  # not even another NaN goes unnoticed
    assert outputs.guards_were_written
    inputs = Inputs.of(BY_NAME["padded_rows"], CPU)
    inputs.k[0, 0, 0, 0] += 1
    assert inputs.were_written


# ---------------------------------------------------------------- the tolerance


def test_atol_is_the_rounding_of_an_addition():
    truth = torch.tensor([1.0, -2.0, math.nan, math.inf], dtype=torch.float64)
    rounded = truth[:2].bfloat16()
    assert probe_rounding(truth, torch.bfloat16) == 2 * float(((rounded + 0.3 - 0.3) - rounded).abs().max())
    assert 0 < probe_rounding(truth, torch.bfloat16) <= 2 * 2.3 * torch.finfo(torch.bfloat16).eps


def test_a_mismatch_names_the_place_both_values_the_budget_and_the_plan():
    expected = Expected(name="out", truth=torch.zeros(2, 3, dtype=torch.float64), budget=Allowance(max=0.5, rms=0.5))
    got = torch.zeros(2, 3)
    got[1, 2] = 0.75
    with pytest.raises(Mismatch, match=r"(?s)allowed 5\.000e-01.*\[1, 2\]: got 0\.75, want 0.*the plan"):
        expected.check(got, "the plan")


def test_many_small_errors_exceed_the_rms_budget_and_the_ratio_is_that_of_the_larger():
    expected = Expected(name="out", truth=torch.zeros(100, dtype=torch.float64), budget=Allowance(max=1.0, rms=0.1))
    one = torch.tensor([0.9] + [0.0] * 99)
    expected.check(one, "")
    assert expected.ratio(deviate(one, expected.truth)) == pytest.approx(0.9)
    many = torch.full((100,), 0.2)
    with pytest.raises(Mismatch, match="rms error"):
        expected.check(many, "")
    assert expected.ratio(deviate(many, expected.truth)) == pytest.approx(2.0)
    assert expected.ratio(deviate(torch.full((100,), math.nan), expected.truth)) == math.inf


def test_deviations_are_the_same_in_chunks(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    got, want = (torch.randn(5, 7, generator=generator) for _ in range(2))
    got[2, 3], want[4, 1], got[4, 6], want[4, 6] = math.nan, math.inf, -math.inf, -math.inf
    whole = deviate(got, want)
    assert (whole.strangers, whole.first_stranger) == (2, 2 * 7 + 3)
    monkeypatch.setattr(truth, "CHUNK", 4)
    parts = deviate(got, want)
    assert replace(parts, rms=0.0) == replace(whole, rms=0.0)
    assert parts.rms == pytest.approx(whole.rms)


@pytest.mark.parametrize(
    "name", ["len_203x113_causal", "len_129x257_full", "gqa4_b1", "inf_v_causal", "window_7_3", "sinks_empty_rows"]
)
def test_the_reference_is_the_same_in_chunks(name, monkeypatch):
    case = BY_NAME[name]
    inputs, _ = prepare_case(case, CPU)
    q, k, v = inputs.q, inputs.k, inputs.v
    options = {"causal": case.causal, "window": case.window, "sinks": inputs.sinks}
    problem = Problem.of(q, k, v, **options)
    whole = reference(q, k, v, compute_dtype=torch.float64, **options)
    monkeypatch.setattr(truth, "CHUNK", 11 * case.heads_q * max(case.seq_kv, case.head_dim))
    parts = reference_in_chunks(Operands(q, k, v, sinks=inputs.sinks), problem, torch.float64)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_a_hidden_nan_may_reach_the_rows_of_its_tile_as_nan():
    """0 * NaN = NaN is what a masked key's value makes in a tensor core."""
    case = BY_NAME["nan_v_causal"]
    inputs, truth = prepare_case(case, CPU)
    out, _ = attend(case, inputs)
    out[:, 0, :, ::3] = math.nan
    truth.out.check(out, "a plan")


def test_inputs_on_which_naive_overflows_cannot_be_judged():
    q = torch.full((1, 1, 4, 64), 200.0, dtype=torch.float16)
    with pytest.raises(ValueError, match="no tolerance can be derived"):
        Truth.of(q, q, q, causal=False, scale=None)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("head_dim", "seq"), [(64, 2048), (256, 300)])
def test_an_lse_of_sums_in_fp16_is_held_to_what_they_lose(head_dim, seq, causal):
    """Not to more: a scale off by 1 % fails, as for every lse; and by half a percent."""
    generator = torch.Generator().manual_seed(seq)
    q, k, v = (torch.randn(1, 2, seq, head_dim, generator=generator).half() for _ in range(3))
    truth = Truth.of(q, k, v, causal=causal, scale=None)
    expected = truth.lse_in_halves()
    one_rounding = torch.randn(truth.lse.truth.shape, generator=generator) * 1e-5
    expected.check(truth.lse.truth.float() + one_rounding, "a plan")
    with pytest.raises(Mismatch):
        truth.lse.check(truth.lse.truth.float() + one_rounding, "a plan")
    for off in (1.01, 0.995):
        scale = off / math.sqrt(head_dim)
        _, lse = reference(q, k, v, causal=causal, scale=scale)
        with pytest.raises(Mismatch):
            expected.check(lse, "a plan")


def test_the_chunks_of_an_lse_of_sums_in_fp16_fit(monkeypatch):
    q, k = torch.randn(2, 4, 33, 40).half(), torch.randn(2, 2, 50, 40).half()
    operands, problem = Operands(q, k, k), Problem.of(q, k, k, causal=True)
    whole = tolerance.lse_of_sums_in_halves(operands, problem)
    monkeypatch.setattr(tolerance, "CHUNK", 2 * 4 * 50 * 7)
    assert torch.equal(tolerance.lse_of_sums_in_halves(operands, problem), whole)


def test_no_backend_has_a_backward_for_heads_that_cases_leave_out():
    variants = (variant for name in BACKENDS for variant in get(name).backward.variants)
    assert max(variant.capability.head_dim_max for variant in variants) == BACKWARD_HEAD_DIM_MAX


def test_what_a_score_loses_on_a_tensor_core_is_part_of_the_budget_of_lse():
    q, v = torch.randn(1, 1, 16, 1024).half(), torch.randn(1, 1, 16, 1024).half()
    lse = Truth.of(q, q, v, causal=False, scale=None).lse
    assert lse.budget.max >= truncation(lse.truth, 1024) > 0
