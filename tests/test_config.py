"""Rules and configs: each field of a rule is a condition, each limit of a config a reason, told in its own words."""

from dataclasses import fields, replace

import pytest
import torch

from multiattn.block_mask import BlockSpec
from multiattn.cuda.backward_wgmma_two_pass import TwoPassQueriesConfig
from multiattn.operands import Operands, Options, with_score
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, find_variant, plan_variant
from multiattn.plan.config import COMPILED, Config, Rule, conditions, select
from multiattn.plan.features import Features
from multiattn.plan.support import Capability
from multiattn.problem import Problem
from multiattn.sequences import Batching, Scaling


def problem(**changes):
    return Problem.contiguous(**{"batch": 2, "heads_q": 2, "seq_q": 1000, "head_dim": 64} | changes)


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
    ("kind", "its", "words"),
    [
        ("packed", problem(batch=1, batching=Batching.packed(3, 0, 0)), "for batches [B, H, S, D]"),
        ("cached", problem(batch=3, batching=Batching.cached(3, 3)), "for keys that are in no cache"),
    ],
)
def test_packed_batches_and_caches_have_their_own_rules_and_those_for_both(kind, its, words):
    mine, others = (replace(ANY, **{kind: is_its}) for is_its in (True, False))
    assert select((others, mine, ANY), its, SM80)[0] is mine
    assert select((others, ANY), its, SM80)[0] is ANY
    assert others.reject(its, SM80) == words


def paged(page):
    cache = Batching.cached(3, 9, page=page, max_pages=160 // (page or 160))
    return problem(batch=3, seq_q=1, seq_kv=160, batching=cache)


EDGES = {"seq_min": 1000, "seq_max": 1000, "batch_max": 2, "head_dim_min": 64, "head_dim_max": 64}
TAKEN = (
    *(({"whole_sectors": True}, problem(head_dim=it), it % 16 == 0) for it in (64, 72, 80, 88, 96)),
    *(({"whole_sectors": False}, problem(head_dim=it), it % 16 != 0) for it in (64, 72, 80, 88, 96)),
    *(
        ({"ragged": is_ragged, "config": Config(tile_m=64, tile_n=tile_n)}, problem(seq_kv=keys), it == is_ragged)
        for tile_n, keys, it in ((64, 128, False), (64, 192, False), (128, 192, True))
        for is_ragged in (True, False)
    ),
    *(({"ragged": it}, problem(batch=1, seq_q=1024, batching=Batching.packed(3, 0, 0)), it) for it in (True, False)),
    *(({"page_multiple": 16}, it, True) for it in (paged(32), paged(None), problem())),
    ({"page_multiple": 16}, paged(5), False),
    (EDGES, problem(), True),
    (EDGES, problem(seq_q=10, seq_kv=1000), True),  # the longer of the two lengths counts
    ({"smem_min": SM90.smem_per_block}, problem(), True),
)


@pytest.mark.parametrize(("condition", "its", "takes"), TAKEN)
def test_a_condition_takes_what_it_says(condition, its, takes):
    """Edges are inside, keys are ragged by the tile of the config, rows of whole sectors are of 32 bytes."""
    words = replace(ANY, **condition).reject(its, SM90)
    assert (words is None) == takes
    assert "page_multiple" not in condition or words in (None, "for pages of multiples of 16 keys")


def test_rows_are_queries_of_all_heads_that_share_a_key():
    sizes = {"heads_q": 8, "heads_kv": 2, "seq_kv": 50}
    packed = problem(batch=1, seq_q=50, batching=Batching.cached(9, 9, max_q=3), **sizes)
    for few in (problem(seq_q=3, **sizes), packed):
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
    sharing, cached = problem(batch=4, heads_kv=1), problem(batch=4, batching=Batching.cached(4, 4))
    for others in (problem(batch=3), sharing, cached):
        assert rule.reject(others, SM80, named=False) is None


@pytest.mark.parametrize(("side", "heads", "words"), [("q", 8, "queries"), ("kv", 4, "keys")])
def test_rows_of_all_heads_may_have_to_be_many(side, heads, words):
    """Unless the variant is named."""
    rule = replace(ANY, **{f"{words}_min": 2 * heads * 50})
    sizes = {"batch": 2, "heads_q": 8, "heads_kv": 4, "seq_q": 50, "seq_kv": 50}
    assert rule.reject(problem(**sizes), SM80, named=False) is None
    few = problem(**sizes | {f"seq_{side}": 49})
    assert rule.reject(few, SM80, named=False) == f"for {2 * heads * 50} {words} of all heads and more"
    assert rule.reject(few, SM80) is None


def test_a_rule_for_callers_that_name_the_variant():
    """Its evidence is told only where it applies."""
    rule = replace(ANY, only_named=True)
    assert select((rule,), problem(), SM80) == (rule, ())
    words = "rule tile_m=64 tile_n=64: for callers that name the variant (a guess)"
    assert select((rule,), problem(), SM80, named=False) == (None, (words,))
    rule = replace(rule, seq_min=4096)
    assert rule.reject(problem(), SM80, named=False) == rule.reject(problem(), SM80) == "for lengths in 4096.."


def test_a_rule_covers_what_it_would_shadow():
    wide = Rule(arches=("sm90", "sm80"), config=Config(tile_m=64, tile_n=64), why="x")
    narrow = {
        **dict.fromkeys(
            ("whole_sectors", "ragged", "banded", "scored", "reads_keys", "packed", "cached", "stored", "mapped"), True
        ),
        **{
            "arches": ("sm90",),
            "head_dim_min": 65,
            "head_dim_max": 128,
            "head_dim_v_max": 64,
            "page_multiple": 16,
            "block_multiple": 64,
            "dtype": "bf16",
        },
        **{
            "rows_min": 2,
            "rows_max": 16,
            "lone_max": 100,
            "queries_min": 5,
            "queries_max": 99,
            "busy_min": 0.5,
            "keys_min": 5,
            "seq_min": 100,
            "seq_max": 200,
            "batch_max": 4,
        },
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


def scored(bias):
    """The problem of a call with this bias."""
    q = torch.zeros(2, 2, 100, 64, dtype=torch.bfloat16)
    return Problem.of_operands(*with_score(Operands(q, q, q), Options(), None, None, bias, None))


def stored(scaling):
    """A problem of a cache of 8-bit numbers."""
    return problem(batching=Batching.cached(2, 2, k_scaling=scaling, v_scaling=scaling), stored="e4m3")


BIAS = torch.zeros(1, 1, 100, 100)
FEATURES = {
    "sinks": problem(has_sinks=True),
    "row_max": problem(row_max=True),
    "score": scored(BIAS),
    "gradients": scored(BIAS.clone().requires_grad_()),
    "blocks": replace(problem(), blocks=BlockSpec(128, 128, False)),
    "keys": problem(batching=Batching.cached(2, 2)),
    "packed_queries": problem(batch=1, batching=Batching.packed(3)),
    "stored": stored(Scaling(shape=(2, 2), strides=(2, 1))),
    "per_token": stored(Scaling(per_token=True, shape=(2, 2, 1000), strides=(2000, 1000, 1))),
}
"""A problem for each feature that a kernel may have no code for."""
NAMES = {
    "gradients": "score_gradient",
    "blocks": "block_mask",
    "keys": "cache",
    "packed_queries": "packing",
    "per_token": "stored",
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_refused_by_name_where_there_is_no_code_for_it(name):
    """A new field of `Features` needs a problem here, and a refusal."""
    always = {"dtype", "head_dim", "head_dim_v", "mask", "aligned", "v_in_k"}
    assert {*Features._fields} - always == set(FEATURES)
    refusals = Capability(arches=()).why_not(FEATURES[name], SM80)
    assert NAMES.get(name, name) in [reason.code for reason in refusals]
    assert Features.of(FEATURES[name]) != Features.of(problem())


# ---------------------------------------------------------------- configs that no kernel is made for, of every family


SMEM = "232448 bytes a block on sm90"
THIRD = "with split_head_dim, where three parts have fewer columns than two"


def asked_of(variant, number):
    """A problem for this variant, whose head_dim is the number; for `split_keys_wgmma` that of the keys of a page."""
    sizes = {"batch": 2, "heads_q": 8, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, "head_dim": number}
    if variant == "split_keys":
        sizes["seq_q"] = 1
    if "twin" in variant:
        sizes |= {"seq_q": 16, "head_dim": max(number, 264)}
    if variant == "split_keys_wgmma":
        pages = -(-500 // number)
        cache = Batching.cached(2, 2 * pages, number, pages)
        sizes |= {"seq_q": 16, "seq_kv": pages * number, "head_dim": 128, "batching": cache}
    return Problem.contiguous(**sizes)


# Of each family its fields, then the number of a problem, what differs from them, what came and what is allowed.
# No fields: those of the rule for this head_dim.
ROWS = {
    ("triton", "forward", "full"): ({"tile_m": 64, "tile_n": 64, "warps": 4, "stages": 2}, (
        (256, {"tile_m": 128, "tile_n": 128, "warps": 8, "stages": 4}, "bytes of shared memory", SMEM),
    )),
    ("triton", "forward", "split_keys"): ({"tile_m": 16, "tile_n": 64, "warps": 4, "stages": 3}, (
        (128, {"tile_m": 64, "tile_n": 256}, "bytes of shared memory", SMEM),
    )),
    ("triton", "forward", "warp_specialized"): ({"tile_m": 128, "tile_n": 128, "stages": 4, "q_slots": 2}, (
        (128, {"stages": 9}, "bytes", SMEM),
        (128, {"tile_m": 192}, "160 registers for output, scores and weights", ""),
    )),
    ("triton", "backward", "warp_specialized"): (None, (
        (128, {"q_stages": 6}, "bytes", SMEM),
        (128, {"early_scores": True}, "256 registers for gradients, scores and weights", ""),
    )),
    ("triton", "backward", "warp_specialized_two_pass"): (None, (
        (128, {"k_stages": 8}, "bytes", SMEM),
        (200, {"kv_in_registers": True}, "", ""),  # a gradient of D=256 takes 128 registers, K would take 64 more
        (256, {"kv_in_registers": True}, "", ""),
    )),
    ("triton", "backward", "stored"): (None, (
        (256, {"products.tile_m": 256}, "", "divisors of tiles of scores"),
        (256, {"products.stages": 8}, "bytes of shared memory", SMEM),
        (256, {"part": 8}, "part=8", "powers of two from 16 to 256"),
    )),
    ("cutile", "forward", "full"): ({"tile_m": 64, "tile_n": 64, "lazy_max": True}, (
        (64, {"tile_m": 48}, "tile_m=48", "powers of two from 16"),
        (64, {"tile_n": 8}, "tile_n=8", "powers of two from 16"),
        (64, {"blocks_per_sm": 0}, "blocks_per_sm=0", "1 to 32"),
        (64, {"warps": 16}, "warps=16", "None, 4 or 8 (others need tileiras 13.5)"),
        (64, {"k_latency": 11}, "k_latency=11", "1 to 10"),
        (64, {"v_latency": 0}, "v_latency=0", "1 to 10"),
        (64, {"heads_together": 0}, "heads_together=0", "1 or more"),
        (64, {"pipeline": "pears"}, "pipeline=pears", "plain, ahead, pairs, pilot, pilot_pairs"),
        (64, {"lazy_max": False, "pipeline": "pairs"}, "pipeline=pairs without lazy_max", "plain"),
        (64, {"scheduler": "dynamic"}, "scheduler=dynamic", "one_tile, static"),
        (16, {"split_head_dim": True}, "split_head_dim=True at D=16", "more than 16"),
        (96, {"split_head_dim": True, "split_tail": True}, "split_tail=True at D=96", THIRD),
        (104, {"split_tail": True}, "split_tail=True at D=104", THIRD),
    )),
    ("cutile", "backward", "two_pass"): (None, (
        (64, {"dq_transposed": True}, "", "False"),
        (64, {"delta_first": True}, "", "False"),
    )),
    ("cutile", "backward", "stored"): (None, (
        (64, {"dq_transposed": True}, "", "False"),
        (64, {"dq.tile_m": 32}, "dq.tile_m=32", "tile_m=64 and more"),
    )),
    ("cuda", "forward", "split_q+swizzle_qkv"): ({"tile_m": 128, "tile_n": 128, "warps": 8, "stages": 2}, (
        (256, {}, f"{(128 + 4 * 128) * 512} bytes", SMEM),
    )),
    ("cuda", "forward", "wgmma"): ({"tile_m": 128, "tile_n": 64}, (
        (64, {"tile_m": 64}, "tile_m=64", "128, 192"),
        (64, {"cluster": 2}, "scheduler=dynamic with cluster=2", "one_tile, static"),
        (64, {"tile_n": 256}, "224 registers", "up to 208 with 2 warpgroups"),
        (64, {"tile_n": 224, "q_in_registers": True}, "q_in_registers with 200 registers for all else", "up to 192"),
        (64, {"tile_m": 192, "tile_n": 160}, "152 registers", "up to 144 with 3 warpgroups"),
        (256, {"tile_n": 48, "stages": 16}, "459264 bytes", SMEM),
    )),
    ("cuda", "forward", "wgmma_twin"): ({"tile_m": 64, "tile_n": 64, "piece": 128, "slots": 8, "before": 4}, (
        (512, {"piece": 0}, "piece=0", "64, 128, 192"),
        (512, {"piece": 192}, "384 columns of v a warpgroup", "up to 256"),
        (512, {"slots": 5}, "5 slots for D=512", "6 or more"),
        (512, {"slots": 10}, "240128 bytes", SMEM),
        (512, {"before": 5}, "before=5 of 4 pieces", "1 to 4"),
    )),
    ("cuda", "forward", "split_keys_twin"): ({"tile_m": 64, "tile_n": 64, "piece": 128, "slots": 8, "before": 4}, (
        (512, {"slots": 12, "splits": 1}, "272896 bytes", SMEM),
    )),
    ("cuda", "backward", "wgmma"): ({"tile_m": 64, "tile_n": 128}, (
        (128, {}, "", "half_dq"),
        (128, {"half_dq": True, "dout_stages": 3, "k_in_registers": True}, "", "up to 176"),
        (96, {"k_in_registers": True, "k_stages": 2}, "", "up to 152"),
        (96, {"k_in_registers": True, "early_scores": True, "k_stages": 2}, "", "up to 176"),
        (72, {"early_scores": True}, "", "half_dq"),
        (128, {"half_dq": True, "dq_by_tma": True, "k_stages": 2}, "bytes", SMEM),
        (128, {"half_dq": True, "dout_stages": 3, "q_stages": 6}, "bytes", SMEM),
    )),
    ("cuda", "backward", "wgmma_two_pass"): ({"tile_m": 64, "tile_n": 64}, (
        (256, {"kv_in_registers": True}, "", "up to 208"),
        (200, {"kv_in_registers": True}, "", "D up to 192"),
        (16, {"kept_steps": 4}, "kept_steps=4 of D=16", "up to 1"),
        (256, {"q_stages": 3}, "bytes", SMEM),
        (256, {"dq": TwoPassQueriesConfig(v_stages=2)}, "bytes", SMEM),
        (64, {"dq": TwoPassQueriesConfig(k_stages=1)}, "k_stages=1", "2 to 8"),
    )),
    ("cuda", "backward", "atomic"): ({"tile_m": 64, "tile_n": 128, "warps": 8, "stages": 2}, (
        (128, {"tile_m": 40}, "", "tile_m in multiples of 16"),
        (128, {"tile_n": 96}, "", "tile_n in multiples of 16 per pair of warps"),
        (128, {"warps": 6, "tile_n": 48}, "", "2, 4, 8, 16"),
        (128, {"tile_n": 256}, "bytes", SMEM),
    )),
    ("cuda", "backward", "two_pass"): (None, (
        (128, {"dq": None}, "", "a QueryConfig as dq"),
        (128, {"dq.tile_m": 48}, "", "dq: tile_m in multiples of 16 per warp"),
        (128, {"dq.stages": 3}, "stages=3", "1, 2"),
    )),
    ("cuda", "forward", "split_keys_wgmma"): ({"tile_m": 128, "tile_n": 64, "stages": 4, "splits": 1}, (
        (64, {"tile_m": 64, "pingpong": True}, "pingpong with tile_m=64", "128, 192"),
        (192, {"tile_n": 240, "stages": 3}, "244 registers", "up to 208 with 2 warpgroups"),
        (64, {"stages": 16}, "295424 bytes", SMEM),
        (64, {"gathers": True, "tile_m": 192}, "gathers with tile_m=192", "64, 128"),
        (192, {"gathers": True, "tile_n": 144, "stages": 3}, "gathers with tile_n=144", "up to 128"),
        (8, {"tile_n": 256, "stages": 3}, "boxes for 256 keys in pages of 8", ""),
    )),
}  # fmt: skip


def changed(config, changes):
    """A config with other fields; `dq.` begins those of one within."""
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        config = replace(config, **{outer: changed(getattr(config, outer), {inner: value}) if inner else value})
    return config


def assert_refused(whose, asked, config, got, allowed):
    reasons = find_variant(registry.get(whose[0]), whose[2], whose[1]).fits(asked, SM90, config)
    told = [(it.code, it.got, it.allowed) for it in reasons]
    assert any(code in ("config", "page") and got in came and allowed in may for code, came, may in told), told


@pytest.mark.parametrize(
    ("whose", "number", "changes", "got", "allowed"),
    [(whose, *row) for whose, (_, rows) in ROWS.items() for row in rows],
    ids=lambda it: "-".join(it) if isinstance(it, tuple) else str(it),
)
def test_a_config_that_does_not_fit_is_a_reason(whose, number, changes, got, allowed):
    name, direction, own = whose
    variant, given = find_variant(registry.get(name), own, direction), ROWS[whose][0]
    asked = asked_of(own, number)
    if given is None:
        config = plan_variant(registry.get(name), variant, asked, SM90, direction=direction).config
    else:
        config = variant.config_type(**given)
    assert_refused(whose, asked, changed(config, changes), got, allowed)


CANDIDATES = (-1, 0, 3, 7, 9, 17, 33, 300, 2000, "random")
"""Values of which each field that is limited refuses one."""


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", BACKENDS)
def test_each_limit_of_a_field_is_told(name, direction):
    """Configs are those that the package's own rules have for Hopper."""
    told = set()
    for variant in registry.get(name).op(direction).offered:
        asked = asked_of(variant.name, 64)
        config = plan_variant(registry.get(name), variant, asked, SM90, direction=direction).config
        nested = getattr(config, "dq", None)
        limited = ((part, it) for part in (config, nested) if part for it in fields(part) if "limit" in it.metadata)
        for part, field in limited:
            allows, words = field.metadata["limit"]
            of_its_type = (it for it in CANDIDATES if isinstance(it, str) == (field.type == "str"))
            wrong = next(it for it in of_its_type if not allows(it))
            own = replace(part, **{field.name: wrong})
            own = own if part is config else replace(config, dq=own)
            assert_refused((name, direction, variant.name), asked, own, f"{field.name}={wrong}", words)
            told.add(field.name)
    assert len(told) >= 5
