"""The tester tested on caches with scores, masks, trees and 8-bit numbers: what goes wrong there must fail."""

from dataclasses import replace

import pytest
import torch
from parity_breaks import BY_NAME, CPU, attend, check, each, other

import multiattn
from multiattn.sequences import SCALES
from parity.cache_score_cases import caches_with_scores, stored_caches
from parity.launch import prepare_case
from parity.score_tensors import asked_of, bound_of_cache
from parity.tensors import Inputs
from parity.tolerance import Mismatch

CASES = [case for case in (*caches_with_scores(), *stored_caches()) if case.size == "any"]

# ---------------------------------------------------------------- what breaks them


def with_scores(**changes):
    """A runner whose scores are bound with changes to what was asked for."""

    def broken(case, inputs):
        score = bound_of_cache(case, asked_of(case, CPU), inputs.q, inputs.k, **changes)
        return attend(case, inputs, score=score)

    return broken


def at_first_keys(case, inputs):
    """A bias of the last keys is one of the first of the room."""
    bias = asked_of(case, CPU).options["bias"]
    is_bool = bias.dtype == torch.bool
    bias = torch.nn.functional.pad(bias, (0, case.seq_kv - bias.shape[3]), value=is_bool)
    return with_scores(last=None, **{"visible" if is_bool else "bias": bias})(case, inputs)


def with_captured(change, is_it=lambda tensor: True):
    """A runner where `change` has made others of the captured tensors that are meant."""

    def broken(case, inputs):
        tensors = tuple(change(it.clone()) if is_it(it) else it for it in inputs.score.tensors)
        return attend(case, inputs, score=inputs.score._replace(tensors=tensors))

    return broken


def is_tree(tensor):
    return tensor.ndim == 4 and tensor.shape[2] == tensor.shape[3]


def sibling_seen(tree):
    """In each tree a node sees one more, the first that is no ancestor: a bit of 16 by 16, or of 64 by 64."""
    hidden = ~tree if tree.dtype == torch.bool else tree == -torch.inf
    for seen, its in zip(tree, hidden, strict=True):
        places = its[0].tril().nonzero()
        if len(places):
            seen[0][tuple(places[-1])] = True if tree.dtype == torch.bool else 0.0
    return tree


def with_numbers(change):
    """A runner where `change` has made others of the numbers of a program: softcap and last, by name."""

    def broken(case, inputs):
        return attend(case, inputs, score=inputs.score._replace(scalars=change(dict(inputs.score.scalars))))

    return broken


def with_scales(change):
    """A runner where `change` has made others of both scales."""

    def broken(case, inputs):
        *where, of_k, of_v = inputs.cached.tensors
        tensors = (*where, *change(of_k.clone(), of_v.clone()))
        return attend(case, inputs, cached=inputs.cached._replace(tensors=tensors))

    return broken


def scales_exchanged(case, inputs):
    """V has the scales of k, and k those of v: their strides may differ, and so may what they are of."""
    *where, of_k, of_v = inputs.cached.tensors
    batching = inputs.cached.batching
    batching = batching._replace(k_scaling=batching.v_scaling, v_scaling=batching.k_scaling)
    return attend(case, inputs, cached=inputs.cached._replace(tensors=(*where, of_v, of_k), batching=batching))


def of_key_before(of_k, of_v):
    """Each key with the scale of the one before it, within a page."""
    return tuple(it.roll(1, dims=2).nan_to_num(0.03) for it in (of_k, of_v))


def of_first_page(of_k, of_v):
    return tuple(it[:1].nan_to_num(0.03).expand_as(it) for it in (of_k, of_v))


def shown_by_blocks(kinds):
    """Whole blocks for those that are seen in part."""
    return torch.where(kinds == 1, 2, kinds).to(kinds.dtype)


POSITIONS = (
    "cache_relative_logits_few cache_relative_logits_mixed cache_score_mod_freed cache_image_prefix cache_own_prefix"
)
TREES = "cache_tree_16 cache_tree_64 cache_tree_16_scores cache_tree_mixed cache_e4m3_tree"
PER_HEAD = "cache_e4m3_head_page_16 cache_int8_batch_dense cache_e4m3_token_page_16 cache_int8_head_token_page_64"
PER_TOKEN = "cache_e4m3_token_page_16 cache_int8_token_dense cache_int8_mixed"
BROKEN = {
    "positions are those of the call's rows": (with_scores(of_cache=False), POSITIONS),
    "positions off by the new tokens": (
        lambda case, inputs: attend(case, inputs, score=moved(case, inputs)), POSITIONS + " cache_relative_bias",
    ),
    "scores ignored": (other(score=None), POSITIONS + " cache_alibi_mixed cache_bias_of_keys " + TREES),
    "a sibling seen": (with_captured(sibling_seen, is_tree), TREES),
    "the tree of the next sequence": (with_captured(lambda it: it.roll(1, 0), is_tree), TREES),
    "columns of the tree one key early": (
        with_numbers(lambda it: it | {"last": it["last"] + 1}), "cache_tree_16 cache_tree_mixed",
    ),
    "a bias of the last keys at the first": (at_first_keys, "cache_tree_16_scores cache_tree_16"),
    "rows of the next tree node": (with_captured(lambda it: it.roll(1, 2), is_tree), TREES),
    "bias of the head before": (
        with_captured(lambda it: it.roll(1, 1)), "cache_bias_of_room cache_relative_logits_mixed",
    ),
    "bias a key late": (with_captured(lambda it: it.roll(1, 3)), "cache_bias_of_room cache_bias_of_keys"),
    "slopes of the first sequence": (with_captured(lambda it: it[:1].expand_as(it)), "cache_alibi_mixed"),
    "partial blocks shown whole": (
        with_captured(shown_by_blocks, lambda it: it.ndim == 4), "cache_image_prefix cache_own_prefix",
    ),
    "blocks of the head before": (with_captured(lambda it: it.roll(1, 1), lambda it: it.ndim == 4), "cache_own_prefix"),
    "the scale of the next head": (with_scales(lambda *it: [one.roll(1, 1) for one in it]), PER_HEAD),
    "k's scale of the next head": (with_scales(lambda k, v: (k.roll(1, 1), v)), PER_HEAD),
    "the scale of the next sequence": (
        with_scales(lambda *it: [one.roll(1, 0) for one in it]), "cache_int8_batch_dense",
    ),
    "v's scale for k's": (scales_exchanged, PER_HEAD + " cache_e4m3_tree cache_int8_sinks"),
    "the scale of the key before": (with_scales(of_key_before), PER_TOKEN),
    "scales of the first page": (with_scales(of_first_page), PER_TOKEN),
    "no scale of k": (with_scales(lambda k, v: (k.new_full(k.shape, 1 / 32), v)), PER_HEAD),
    "the bits of another dtype": (
        lambda case, inputs: attend(case, replace(inputs, v=inputs.v.view(torch.int8))), "cache_e4m3_head_page_16",
    ),
}  # fmt: skip


def moved(case, inputs):
    """The scores of positions that begin where the new tokens of the longest chunk end."""
    score_mod, mask_mod = (asked_of(case, CPU).options[it] for it in ("score_mod", "block_mask"))
    by, changes = case.most_queries, {}
    if score_mod is not None:
        changes["score_mod"] = lambda s, b, h, i, j: score_mod(s, b, h, (i - by).clamp(min=0), j)
    if mask_mod is not None:
        changes["mask_mod"] = lambda b, h, i, j: mask_mod.mask_mod(b, h, i - by, j)
    return bound_of_cache(case, asked_of(case, CPU), inputs.q, inputs.k, **changes)


@pytest.mark.parametrize(("broken", "name"), each(BROKEN))
def test_a_broken_result_fails(broken, name):
    case = BY_NAME[name]
    result = BROKEN[broken][0](case, prepare_case(case, CPU)[0])
    with pytest.raises(Mismatch):
        check(case, result)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_good_result_passes(case):
    check(case, attend(case, prepare_case(case, CPU)[0]))


# ---------------------------------------------------------------- the truth, made otherwise


def one_sequence(case, inputs, entry):
    """Rows of q of a sequence, its keys and values in fp64, and where its keys are among all."""
    queries, length = case.pairs[entry]
    starts = [0, *torch.tensor([it[0] for it in case.pairs]).cumsum(0).tolist()]
    is_packed = case.cache.queries is not None
    rows = (
        (slice(0, 1), slice(starts[entry], starts[entry + 1])) if is_packed else (slice(entry, entry + 1), slice(None))
    )
    q = inputs.q[rows[0], :, rows[1]].double()
    named = dict(zip(inputs.cached.batching.names, inputs.cached.tensors, strict=True))
    own = case.cache.owned(case)[entry]
    found = []
    for cache, scale in zip((inputs.k, inputs.v), (named.get(it) for it in SCALES), strict=True):
        its = torch.zeros(1, case.heads_kv, length, cache.shape[-1], dtype=torch.float64)
        for key in own:
            place, row = entry, key
            if case.cache.page is not None:
                place, row = int(named["page_table"][entry, key // case.cache.page]), key % case.cache.page
            its[0, :, key] = cache[place, :, row].double()
            if scale is not None:
                its[0, :, key] *= (scale[entry] if scale.ndim == 2 else scale[place, :, row]).double()[:, None]
        found.append(its)
    return rows, q, *found, queries, length


def own_bias(bias, entry, queries, length, room):
    """The bias of a sequence, ``[1, Hq|1, queries|1, length|1]``: of the room, or of the last keys."""
    bias = bias[entry : entry + 1] if bias.shape[0] > 1 else bias
    bias = bias[:, :, :queries] if bias.shape[2] > 1 else bias
    if bias.shape[3] == 1:
        return bias
    if bias.shape[3] == room:
        return bias[..., :length]
    last, neutral = bias[..., -length:] if length < bias.shape[3] else bias, True if bias.dtype == torch.bool else 0.0
    return torch.nn.functional.pad(last, (length - last.shape[3], 0), value=neutral)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_truth_is_attention_of_each_sequence_alone(case):
    """By `multiattn.reference` of its own keys, with its own mask of bools and a callable of its own positions."""
    inputs, truth = prepare_case(case, CPU)
    options = asked_of(case, CPU).options
    for entry in range(len(case.pairs)):
        (batch, rows), q, k, v, queries, length = one_sequence(case, inputs, entry)
        shift = length - queries
        named = {"causal": case.causal, "window": case.window, "softcap": case.softcap, "sinks": inputs.sinks}
        slopes, bias, score_mod = (options[it] for it in ("alibi_slopes", "bias", "score_mod"))
        if slopes is not None:
            named["alibi_slopes"] = slopes if slopes.ndim == 1 else slopes[entry : entry + 1]
        visible = torch.ones(1, case.heads_q, queries, length, dtype=torch.bool)
        if bias is not None and (its := own_bias(bias, entry, queries, length, case.seq_kv)).dtype == torch.bool:
            visible = visible & its
        elif bias is not None:
            named["bias"] = its.float() if its.dtype != torch.float32 else its
        if options["block_mask"] is not None:
            heads, i, j = torch.meshgrid(*map(torch.arange, (case.heads_q, queries, length)), indexing="ij")
            visible = visible & options["block_mask"].mask_mod(torch.tensor(entry), heads, i + shift, j)

        def of_sequence(s, b, h, i, j, entry=entry, shift=shift, visible=visible, score_mod=score_mod):
            if score_mod is not None:
                s = score_mod(s, torch.full_like(b, entry), h, i + shift, j)
            return torch.where(visible[0, h, i, j], s, -torch.inf)

        with torch.no_grad():
            out, lse = multiattn.reference(
                q, k, v, score_mod=of_sequence, scale=case.scale, compute_dtype=torch.float64, **named
            )
        torch.testing.assert_close(truth.out.truth[batch, :, rows], out, rtol=0, atol=1e-11)
        torch.testing.assert_close(truth.lse.truth[batch, :, rows], lse, rtol=0, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_public_call_has_the_problem_of_the_case(case):
    """Its program of scores, its scales and its lengths are what `fmha_kvcache` makes of the caller's arguments."""
    inputs, _ = prepare_case(case, CPU)
    named = dict(zip(inputs.cached.batching.names, inputs.cached.tensors, strict=True))
    is_packed = case.cache.queries is not None
    if is_packed:
        named["max_seqlen_q"] = case.most_queries
    q = inputs.q[0].transpose(0, 1) if is_packed else inputs.q
    named |= {"causal": case.causal, "window": case.window, "scale": case.scale, "sinks": inputs.sinks}
    with torch.no_grad():
        out = multiattn.fmha_kvcache(
            q, inputs.k, inputs.v, **named, **asked_of(case, CPU).options, num_splits=case.cache.splits, return_lse=True
        )
    found, lse = (out[0].transpose(0, 1)[None], out[1][None]) if is_packed else out
    _, truth = prepare_case(case, CPU)
    behind = slice(sum(it[0] for it in case.pairs) if is_packed else None)
    for got, want in ((found, truth.out), (lse, truth.lse)):
        replace(want, truth=want.truth[:, :, behind]).check(got[:, :, behind], "a call")


@pytest.mark.parametrize("name", ["cache_e4m3_token_page_16", "cache_int8_token_dense", "cache_e4m3_head_page_16"])
def test_a_write_to_scales_or_8_bit_numbers_shows(name):
    for change in ("scale", "key"):
        inputs = Inputs.of(BY_NAME[name], CPU)
        assert not inputs.were_written
        written = inputs.cached.tensors[-1] if change == "scale" else inputs.k.view(torch.uint8)
        written[0, 0] = 3
        assert inputs.were_written


@pytest.mark.parametrize("case", [it for it in CASES if it.cache.stored], ids=str)
def test_what_no_sequence_has_is_nan_or_its_scale_is(case):
    inputs = Inputs.of(case, CPU)
    owned = sum(map(len, case.cache.owned(case))) * case.heads_kv
    for cache, scale, granularity in zip(
        (inputs.k, inputs.v), inputs.cached.tensors[-2:], case.cache.scales, strict=True
    ):
        if granularity == "token":
            assert int(scale.isfinite().sum()) == owned
        stray = cache.float().isnan() if case.cache.stored == "e4m3" else cache == 127
        assert int((~stray.all(-1)).sum()) == owned
