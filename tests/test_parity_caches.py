"""The tester tested on packed batches and caches: what goes wrong between sequences, pages and parts must fail."""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch
from parity_breaks import BY_NAME, CPU, attend, check, each, options_of, other, then

import multiattn
from multiattn.operands import Operands
from multiattn.problem import options_of as its_options
from multiattn.reference import attend as attend_to
from parity.cache_cases import cached, caches
from parity.cache_tensors import NO_PAGE
from parity.launch import launch_plan, plan_case, prepare_case
from parity.results import Contender
from parity.tensors import Inputs
from parity.tolerance import Mismatch, operands_and_problem, reference_in_chunks

PACKED = "varlen_apart_d64_full varlen_apart_d64_causal varlen_uneven_d64_causal varlen_window"


def moved(case, inputs, side, by):
    """The case with sequences that end, and those behind them start, `by` rows later."""
    cu_seqlens = [it.clone() for it in inputs.packed.cu_seqlens]
    part = cu_seqlens[side][1:-1]
    part += by * ((part > -by) & (part + by <= cu_seqlens[side][-1])).int()
    return attend(case, inputs, packed=inputs.packed._replace(cu_seqlens=tuple(cu_seqlens)))


def neighbour_seen(case, inputs):
    """Each sequence also sees the first key of the next one, as a tile does that is not cut."""
    out, lse = attend(case, inputs)
    starts_q, starts_kv = (it.tolist() for it in inputs.packed.cu_seqlens)
    operands, problem = operands_and_problem(inputs.q, inputs.k, inputs.v, **options_of(case, inputs, packed=None))
    for entry in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[entry : entry + 2]), slice(starts_kv[entry], starts_kv[entry + 1] + 1)
        own = Operands(operands.q[:, :, rows], operands.k[:, :, keys], operands.v[:, :, keys], sinks=inputs.sinks)
        part_out, lse[:, :, rows] = attend_to(own, its_options(problem), torch.float32)
        out[:, :, rows] = part_out.to(out.dtype)
    return out, lse


def behind(value):
    """Rows that are in no sequence have this value."""

    def broken(case, inputs):
        out, lse = attend(case, inputs)
        end = sum(case.cache.queries) if case.cache else int(inputs.packed.cu_seqlens[0][-1])
        out[:, :, end:] = value
        return out, lse

    return broken


def neighbours_nan(case, inputs):
    """A weight of zero times the NaN of the next sequence, in the last row of one that is not NaN."""
    out, lse = attend(case, inputs)
    end = int(inputs.packed.cu_seqlens[0][2])
    out[:, :, end - 1, 0] = math.nan
    return out, lse


def biased_by_first(case, inputs):
    tensors = tuple(it[:1].expand_as(it) if it.ndim == 4 else it for it in inputs.score.tensors)
    return attend(case, inputs, score=inputs.score._replace(tensors=tensors))


# ---------------------------------------------------------------- caches


CACHES = [case for case in caches() if case.size == "any"]
CACHED = "cache_page_16 cache_page_5 cache_page_1 cache_mixed cache_splits_3_few cache_window_few"


def with_tensor(place, change):
    """A runner where `change` has made another of one of the tensors that say where keys and queries are."""

    def broken(case, inputs):
        tensors = list(inputs.cached.tensors)
        tensors[place] = change(tensors[place].clone(), case)
        return attend(case, inputs, cached=inputs.cached._replace(tensors=tuple(tensors)))

    return broken


def one_less(lengths, case):
    return (lengths - 1).clamp(min=0)


def one_more(lengths, case):
    return lengths + (lengths % case.cache.page != 0).int()  # within a page that it has


def first_pages_exchanged(table, case):
    first = table[0].clone()
    table[0, :2] = first[:2].flip(0)
    return table


def rows_of_one_before(starts, case):
    starts[1:-1] = (starts[1:-1] - 1).clamp(min=0)
    return starts


def zeros_counted(case, inputs):
    """A tail of zeros counted: keys that score 0 beside those that there are."""
    k, v = (it.nan_to_num(0.0) for it in (inputs.k, inputs.v))
    lengths, *rest = inputs.cached.tensors
    longer = torch.where(lengths % (case.cache.page or case.seq_kv) == 0, lengths, lengths + 1)
    return attend(case, replace(inputs, k=k, v=v, cached=inputs.cached._replace(tensors=(longer, *rest))))


def with_sinks_of_parts(case, inputs):
    """A sink for each of three parts: log 3 more."""
    return attend(case, inputs, sinks=inputs.sinks + math.log(3))


def heads_in_the_order_of_rows(case, inputs):
    """Query heads that go round the heads of keys, not in groups."""
    out, lse = attend(case, replace(inputs, q=inputs.q.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)))
    return out, lse


# ---------------------------------------------------------------- all of them, each found

BROKEN = {
    "a key of the neighbour seen": (neighbour_seen, PACKED),
    "queries' cu_seqlens off by one": (lambda case, inputs: moved(case, inputs, 0, -1), PACKED),
    "keys' cu_seqlens off by one": (lambda case, inputs: moved(case, inputs, 1, 1), PACKED),
    "keys' cu_seqlens one less": (lambda case, inputs: moved(case, inputs, 1, -1), PACKED),
    "lse in the wrong row": (then(lambda out, lse: (out, lse.roll(1, dims=-1))), PACKED),
    "the batch as one sequence": (other(packed=None), "varlen_apart_d64_causal"),
    "bias of the first sequence": (biased_by_first, "varlen_bias"),
    "NaN of a neighbour": (neighbours_nan, "varlen_nan_neighbours_d64 varlen_nan_neighbours_d128"),
    "the last key left out": (with_tensor(0, one_less), CACHED + " cache_dense cache_d512_bf16_page_16"),
    "a key of the page's tail": (with_tensor(0, one_more), "cache_page_16 cache_shared_page cache_mixed"),
    "another sequence's tail": (with_tensor(0, lambda it, case: it + (it == 23).int()), "cache_shared_page"),
    "zeros of the tail counted": (zeros_counted, "cache_dense cache_page_16_unaligned"),
    "pages in the order of memory": (
        with_tensor(1, lambda table, case: table.masked_fill(table < NO_PAGE, 0)),
        "cache_page_16 cache_page_1 cache_page_5",
    ),
    "two pages exchanged": (with_tensor(1, first_pages_exchanged), "cache_page_16 cache_page_5"),
    "rows one before": (with_tensor(2, rows_of_one_before), "cache_mixed cache_splits_7_mixed"),
    "one length for all": (with_tensor(0, lambda it, case: it.clamp(max=9)), "cache_shared_page cache_mixed"),
    "mask ignored": (other(causal=False, window=None), "varlen_uneven_d64_causal cache_mixed cache_window"),
    "diagonal one further": (
        other(causal=False, window=(None, 1)), "cache_speculative_4 cache_splits_3_few cache_mixed",
    ),
    "sinks ignored": (other(sinks=None), "cache_sinks cache_sinks_mixed"),
    "a sink of each part": (with_sinks_of_parts, "cache_sinks_mixed"),
    "score ignored": (other(score=None), "cache_softcap"),
    "heads go round": (heads_in_the_order_of_rows, "cache_page_16 cache_mixed"),
    "rows behind the last are not written": (behind(math.nan), "varlen_behind varlen_sinks"),
    "rows behind the last are zero": (behind(0.0), "cache_mixed cache_fewer_than_room cache_packed_no_query"),
    "rows behind the last are written": (
        behind(1.0), "varlen_behind varlen_sinks cache_mixed cache_packed_no_capacity",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("broken", "name"), each(BROKEN))
def test_a_broken_result_fails(broken, name):
    case = BY_NAME[name]
    result = BROKEN[broken][0](case, prepare_case(case, CPU)[0])
    with pytest.raises(Mismatch):
        check(case, result)


@pytest.mark.parametrize("case", CACHES, ids=str)
def test_the_truth_is_attention_of_each_sequence_alone(case):
    """Its keys are found one by one. Rows of q that are in no sequence have no truth but that nobody writes them."""
    inputs, truth = prepare_case(case, CPU)
    queries = case.cache.queries
    starts = None if queries is None else [0, *itertools.accumulate(queries)]
    for entry, own in enumerate(case.cache.owned(case)):
        k, v = (rows_of(it, case, inputs, entry, own) for it in (inputs.k, inputs.v))
        batch, rows = (entry, slice(None)) if starts is None else (0, slice(starts[entry], starts[entry + 1]))
        q = inputs.q[batch : batch + 1, :, rows]
        operands, problem = operands_and_problem(q, k, v, **options_of(case, inputs, cached=None))
        out, lse = reference_in_chunks(operands, problem, torch.float64)
        torch.testing.assert_close(truth.out.truth[batch, :, rows], out[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(truth.lse.truth[batch, :, rows], lse[0], rtol=0, atol=1e-12)
    if starts is not None:
        assert truth.out.truth[:, :, starts[-1] :].isnan().all()
        assert truth.lse.truth[:, :, starts[-1] :].isnan().all()


def rows_of(cache, case, inputs, entry, own):
    """The rows of a sequence, ``[1, Hkv, length, D or Dv]``, each some number; those that were freed are 0."""
    found = cache.new_zeros(1, case.heads_kv, own.stop, cache.shape[-1])
    for key in own:
        place, row = entry, key
        if case.cache.page is not None:
            place, row = int(inputs.cached.tensors[1][entry, key // case.cache.page]), key % case.cache.page
        found[0, :, key] = cache[place, :, row]
    assert found.isfinite().all()
    return found


@pytest.mark.parametrize("case", CACHES, ids=str)
def test_what_no_sequence_has_is_nan_and_no_page_is_named_beyond_a_length(case):
    inputs = Inputs.of(case, CPU)
    lengths, page = torch.tensor(case.cache.lengths, dtype=torch.int64), case.cache.page
    rows, rows_v = (int(it[..., 0].isfinite().sum()) for it in (inputs.k, inputs.v))
    assert (rows, rows_v) == tuple(int(it.isfinite().all(dim=-1).sum()) for it in (inputs.k, inputs.v))
    assert rows == rows_v
    owned = case.cache.owned(case)
    if not case.cache.shared:
        assert rows == sum(map(len, owned)) * case.heads_kv
    if page is not None:
        table = inputs.cached.tensors[1]
        places, first = torch.arange(table.shape[1]), torch.tensor([it.start // page for it in owned])
        used = (places >= first[:, None]) & (places < (-(-lengths // page))[:, None])
        assert {*table[~used].tolist()} <= {NO_PAGE, -1}
        assert table[used].unique().numel() == int(used.sum()) - case.cache.shared
        assert case.cache.freed or case.cache.slack + table[used].unique().numel() == inputs.k.shape[0]


def test_a_call_takes_a_table_without_pages_before_a_window():
    """A window that begins a key earlier needs one of them, and the call says which."""
    inputs = Inputs.of(BY_NAME["cache_freed_16_71"], CPU)
    named = dict(zip(("seqlens_kv", "page_table"), inputs.cached.tensors, strict=True))
    call = functools.partial(multiattn.fmha_kvcache, inputs.q, inputs.k, inputs.v, **named, causal=True)
    for way in (call, torch.compile(call, backend="eager")):
        assert way(window=(71, 0)).isfinite().all()
    for window in ((72, 0), None):
        with pytest.raises(ValueError, match=r"page_table: got .* of sequence 0 at .*; allowed 0 to 22,"):
            call(window=window)


def test_k_and_v_lie_in_memory_as_cases_say():
    for name, strides in (
        ("cache_dense", (40 * 2 * 64, 64, 128, 1)),
        ("cache_page_16", (16 * 2 * 64, 64, 128, 1)),
        ("cache_page_16_heads_first", (16 * 2 * 64, 16 * 64, 64, 1)),
        ("cache_page_16_joint", (2 * 16 * 2 * 64, 64, 128, 1)),
        ("cache_page_16_rows_joint", (2 * 16 * 2 * 64, 2 * 16 * 64, 128, 1)),
        ("cache_page_16_unaligned", (16 * 2 * 67, 67, 134, 1)),
    ):
        inputs = Inputs.of(BY_NAME[name], CPU)
        dense = BY_NAME[name].cache.page is None
        assert inputs.k.stride()[dense:] == inputs.v.stride()[dense:] == strides[dense:], name
        is_one = inputs.k.untyped_storage().data_ptr() == inputs.v.untyped_storage().data_ptr()
        assert is_one == (BY_NAME[name].cache.joint != "none")


def test_a_write_to_what_says_where_keys_are_shows():
    for place in range(3):
        inputs = Inputs.of(BY_NAME["cache_mixed"], CPU)
        inputs.cached.tensors[place][..., 0] += 1
        assert inputs.were_written


def test_a_plan_is_that_of_the_call():
    """A decode step needs no mask."""
    for name, mask in (("cache_decode_causal", "full"), ("cache_speculative_4", "causal"), ("cache_mixed", "causal")):
        case = BY_NAME[name]
        plan = plan_case(case, Contender(backend="cuda"), prepare_case(case, CPU)[0])
        assert (plan.variant, plan.problem.mask) == ("split_keys", mask)


def test_workspaces_are_nan_before_a_launch(monkeypatch):
    case = BY_NAME["cache_splits_3"]
    inputs = prepare_case(case, CPU)[0]
    seen = []
    monkeypatch.setattr(multiattn, "launch", lambda *given, **named: seen.append(torch.empty(4).isnan().all()))
    launch_plan(plan_case(case, Contender(backend="cuda"), inputs), inputs)
    assert seen == [True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seq_kv": 20}, "whole pages of 16; got 20"),
        ({"shared": 2}, r"shared must be pages of both .*; got 2 of \[2, 1\]"),
    ],
)
def test_a_case_that_is_none_is_named(changes, said):
    with pytest.raises(ValueError, match=said):
        Inputs.of(cached("x", "x", (20, 9), page=16, **changes), CPU)
