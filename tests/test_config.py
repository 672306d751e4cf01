"""Rules as data: each field is a condition, and what was passed over is said with why."""

from dataclasses import fields, replace

import pytest
import torch

from multiattn.block_mask import BlockSpec
from multiattn.operands import Operands, Options, with_score
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS
from multiattn.plan.config import COMPILED, Config, Rule, conditions, select
from multiattn.plan.features import Features
from multiattn.plan.support import Capability
from multiattn.problem import Problem, problem_of
from multiattn.sequences import Batching


def problem(batch=2, seq=1000, seq_kv=None, head_dim=64, causal=False):
    return Problem.contiguous(
        batch=batch, heads_q=2, seq_q=seq, seq_kv=seq_kv, head_dim=head_dim, causal=causal, dtype="bf16"
    )


ANY = Rule(arches=("sm80", "sm90"), config=Config(tile_m=64, tile_n=64), why="a guess")
SM80, SM90 = ARCHS["sm80"], ARCHS["sm90"]

CONDITIONS = {
    "arch": ({"arches": ("sm90",)}, "for sm90"),
    "head_dim": ({"head_dim_min": 65}, "for D in 65..256"),
    "sectors": ({"whole_sectors": False}, "for rows other than a whole number of 32-byte sectors"),
    "ragged": ({"ragged": False}, "for lengths of keys that 64 divides"),
    "causal": ({"banded": True}, "for causal"),
    "full": ({"banded": False}, "for full"),
    "scored": ({"scored": True}, "for modified scores"),
    "reads_keys": ({"reads_keys": True}, "for scores that read an element for each key"),
    "packed": ({"packed": True}, "for packed batches"),
    "cached": ({"cached": True}, "for caches"),
    "few rows": ({"rows_min": 1001}, "for 1001 to any number of queries of the heads that share a key"),
    "many rows": ({"rows_max": 999}, "for 0 to 999 queries of the heads that share a key"),
    "dtype": ({"dtype": "fp16"}, "for fp16"),
    "long": ({"seq_min": 1001}, "for lengths in 1001.."),
    "short": ({"seq_max": 999}, "for lengths in 0..999"),
    "batch": ({"batch_max": 1}, "for batches of up to 1"),
    "shared memory": ({"smem_min": SM80.smem_per_block + 1}, f"for {SM80.smem_per_block + 1} bytes of shared memory"),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_each_condition_rejects_in_its_own_words(name):
    condition, words = CONDITIONS[name]
    rule = replace(ANY, **condition)
    causal = name == "full"
    assert rule.reject(problem(causal=causal), SM80).startswith(words)
    chosen, rejected = select((rule, ANY), problem(causal=causal), SM80)
    assert chosen is ANY
    assert select((rule,), problem(causal=causal), SM80) == (None, rejected)
    assert rejected == (() if name == "arch" else (f"rule {rule.config}: {rule.reject(problem(causal=causal), SM80)}",))


@pytest.mark.parametrize(
    ("kind", "batching", "words"),
    [
        ("packed", Batching.packed(3, 0, 0), "for batches [B, H, S, D]"),
        ("cached", Batching.cached(3, 3), "for keys that are in no cache"),
    ],
)
def test_packed_batches_and_caches_have_their_own_rules_and_those_for_both(kind, batching, words):
    batch = 1 if kind == "packed" else 3
    its = Problem.contiguous(batch=batch, heads_q=4, seq_q=1, seq_kv=1000, head_dim=64, batching=batching)
    mine, others = (replace(ANY, **{kind: is_its}) for is_its in (True, False))
    assert select((others, mine, ANY), its, SM80)[0] is mine
    assert select((others, ANY), its, SM80)[0] is ANY
    assert others.reject(its, SM80) == words


def test_a_rule_for_pages_of_a_multiple_is_for_caches_without_pages_too():
    rule, page_of_5, page_of_32, dense = (
        replace(ANY, page_multiple=16), *(
            Problem.contiguous(
                batch=3, heads_q=4, seq_q=1, seq_kv=160, head_dim=64,
                batching=Batching.cached(3, 9, page=page, max_pages=160 // (page or 160)),
            )
            for page in (5, 32, None)
        ),
    )  # fmt: skip
    assert rule.reject(page_of_5, SM80) == "for pages of multiples of 16 keys"
    for of_any in (page_of_32, dense, problem()):
        assert rule.reject(of_any, SM80) is None


def test_rows_are_queries_of_all_heads_that_share_a_key():
    plain = Problem.contiguous(batch=2, heads_q=8, heads_kv=2, seq_q=3, seq_kv=50, head_dim=64)
    packed = Problem.contiguous(
        batch=1, heads_q=8, heads_kv=2, seq_q=50, seq_kv=50, head_dim=64, batching=Batching.cached(9, 9, max_q=3)
    )
    for few in (plain, packed):
        assert few.rows == 12
        assert replace(ANY, rows_min=12, rows_max=12).reject(few, SM80) is None
        assert replace(ANY, rows_min=13).reject(few, SM80).startswith("for 13 to")
        assert replace(ANY, rows_max=11).reject(few, SM80).startswith("for 0 to 11")


def test_heads_that_share_no_keys_may_be_limited():
    """Unless the variant is named; neither caches nor heads that share keys are."""
    rule = replace(ANY, lone_max=7)
    lone = problem(batch=4)
    assert rule.reject(lone, SM80, named=False) == "for up to 7 heads that share no keys"
    assert rule.reject(lone, SM80) is None
    sharing = Problem.contiguous(batch=4, heads_q=2, heads_kv=1, seq_q=100, head_dim=64)
    cached = Problem.contiguous(batch=4, heads_q=2, seq_q=1, seq_kv=100, head_dim=64, batching=Batching.cached(4, 4))
    for others in (problem(batch=3), sharing, cached):
        assert rule.reject(others, SM80, named=False) is None


def test_a_rule_for_callers_that_name_the_variant():
    """Its evidence is told only where it applies."""
    rule = replace(ANY, only_named=True)
    assert select((rule,), problem(), SM80) == (rule, ())
    words = "rule tile_m=64 tile_n=64: for callers that name the variant (a guess)"
    assert select((rule,), problem(), SM80, named=False) == (None, (words,))
    rule = replace(rule, seq_min=4096)
    assert rule.reject(problem(), SM80, named=False) == rule.reject(problem(), SM80) == "for lengths in 4096.."


def test_edges_are_inside():
    rule = replace(ANY, seq_min=1000, seq_max=1000, batch_max=2, head_dim_min=64, head_dim_max=64)
    assert rule.reject(problem(), SM90) is None
    assert replace(ANY, smem_min=SM90.smem_per_block).reject(problem(), SM90) is None
    assert rule.reject(problem(seq=10, seq_kv=1000), SM90) is None, "the longer of the two lengths counts"


@pytest.mark.parametrize(("head_dim", "whole"), [(64, True), (72, False), (80, True), (88, False), (96, True)])
def test_rows_of_whole_sectors_are_of_32_bytes(head_dim, whole):
    of_row = Problem.contiguous(batch=1, heads_q=1, seq_q=16, head_dim=head_dim)
    assert (replace(ANY, whole_sectors=True).reject(of_row, SM90) is None) == whole
    assert (replace(ANY, whole_sectors=False).reject(of_row, SM90) is None) == (not whole)


@pytest.mark.parametrize(("tile_n", "seq_kv", "ragged"), [(64, 128, False), (64, 192, False), (128, 192, True)])
def test_keys_are_ragged_by_the_tile_of_the_config(tile_n, seq_kv, ragged):
    config, keys = Config(tile_m=64, tile_n=tile_n), problem(seq=100, seq_kv=seq_kv)
    assert (replace(ANY, config=config, ragged=True).reject(keys, SM90) is None) == ragged
    assert (replace(ANY, config=config, ragged=False).reject(keys, SM90) is None) == (not ragged)


def test_a_packed_batch_has_ragged_keys():
    packed = Problem.contiguous(batch=1, heads_q=4, seq_q=1024, head_dim=64, batching=Batching.packed(3, 0, 0))
    assert replace(ANY, ragged=True).reject(packed, SM90) is None
    assert replace(ANY, ragged=False).reject(packed, SM90) is not None


def test_a_rule_covers_what_it_would_shadow():
    wide = Rule(arches=("sm90", "sm80"), config=Config(tile_m=64, tile_n=64), why="x")
    narrow = {
        **dict.fromkeys(
            ("whole_sectors", "ragged", "banded", "scored", "reads_keys", "packed", "cached", "mapped"), True
        ),
        **{"arches": ("sm90",), "head_dim_min": 65, "head_dim_max": 128, "page_multiple": 16, "dtype": "bf16"},
        **{"rows_min": 2, "rows_max": 16, "lone_max": 100, "seq_min": 100, "seq_max": 200, "batch_max": 4},
        **{"smem_min": 1000, "only_named": True},
    }
    assert set(narrow) == set(conditions()), "a new condition needs a value here"
    rule = replace(wide, **narrow)
    assert wide.covers(rule)
    assert rule.covers(rule)
    for name, value in narrow.items():
        others = [getattr(wide, name)]
        if isinstance(value, bool):
            others.append(False)
        elif isinstance(value, int):
            others.append(value + 1 if name.endswith("_max") else value - 1)
        for other in others:
            assert not rule.covers(replace(rule, **{name: other})), name
    assert not rule.covers(replace(rule, config=Config(tile_m=64, tile_n=32)))


TIMED = {"cpu", "sm90"}
"""Archs that somebody ran a sweep on."""
EVIDENCE = ("H200", "H100", COMPILED, "interpreted", "emulated", "a guess")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_rule_for_gpus_that_nobody_timed_says_so(name, direction):
    rules = [rule for variant in registry.get(name).op(direction).offered for rule in variant.rules]
    untimed = [rule for rule in rules if not TIMED & set(rule.arches)]
    assert untimed
    assert [rule.why for rule in rules if not rule.why.startswith(EVIDENCE)] == []
    assert [rule.why for rule in untimed if not rule.why.startswith(COMPILED)] == []
    assert all(len(rule.why) > len(COMPILED) for rule in untimed)


def plain(**changes):
    sizes = {"batch": 2, "heads_q": 2, "seq_q": 100, "head_dim": 64, **changes}
    return Problem.contiguous(**sizes)


def scored(bias):
    """The problem of a call with this bias."""
    q = torch.zeros(2, 2, 100, 64, dtype=torch.bfloat16)
    return problem_of(*with_score(Operands(q, q, q), Options(), None, None, bias, None))


BIAS = torch.zeros(1, 1, 100, 100)


FEATURES = {
    "sinks": plain(has_sinks=True),
    "score": scored(BIAS),
    "gradients": scored(BIAS.clone().requires_grad_()),
    "blocks": replace(plain(), blocks=BlockSpec(128, 128, False)),
    "keys": plain(batching=Batching.cached(2, 2)),
    "packed_queries": plain(batch=1, batching=Batching.packed(3)),
}
"""A problem for each feature that a kernel may have no code for."""
NAMES = {"gradients": "score_gradient", "blocks": "block_mask", "keys": "cache", "packed_queries": "packing"}


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_refused_by_name_where_there_is_no_code_for_it(name):
    """A new field of `Features` needs a problem here, and a refusal."""
    always = {"dtype", "head_dim", "head_dim_v", "mask", "aligned"}
    assert {it.name for it in fields(Features)} - always == set(FEATURES)
    refusals = Capability(arches=()).why_not(FEATURES[name], SM80)
    assert NAMES.get(name, name) in [reason.code for reason in refusals]
    assert Features.of(FEATURES[name]) != Features.of(plain())
