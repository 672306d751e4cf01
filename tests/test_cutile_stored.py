"""cuTile's backward with ds in memory: tiles and heads at a time, what nobody has written, what does not fit."""

import math
from dataclasses import replace

import pytest
import torch
from gradient_checks import check, make_tensors

from multiattn import Problem
from multiattn.cutile import backward
from multiattn.cutile.rules.shorthand import one_pass, queries, stored
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import find_variant, get, make_plan
from multiattn.plan.support import Unsupported

pytest.importorskip("cuda.tile")

from multiattn.cutile.families import launches_of

BACKEND = get("cutile")
CONFIG = stored(one_pass(16, 32, heads_together=2), queries(64, 32, heads_together=2))
both_masks = pytest.mark.parametrize("causal", [False, True])


def plan_of(problem, config=CONFIG, arch="cpu"):
    return make_plan(BACKEND, problem, ARCHS[arch], direction="backward", variant="stored", config=config, probe=False)


def bytes_of_heads(heads, seq_q, seq_kv):
    """Memory for the ds of so many heads of queries, in tiles of 64."""
    return heads * -(-seq_q // 64) * 64 * seq_kv * 2


@both_masks
def test_tiles_begin_at_queries_of_their_own_without_a_mask_only(causal):
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=256, head_dim=64, causal=causal)
    _, keys, queries = launches_of(plan_of(problem, replace(CONFIG, stagger=7)))
    _, plain_keys, plain_queries = launches_of(plan_of(problem))
    assert (keys == plain_keys, queries == plain_queries) == (causal, True)
    assert keys.constants.stagger == (0 if causal else 7)


@both_masks
@pytest.mark.parametrize(("heads", "at_a_time"), [(2, 1), (4, 2), (7, 2), (8, 4), (12, 4), (16, 8)])
def test_gradients_of_some_heads_at_a_time(heads, at_a_time, causal, monkeypatch):
    """As memory holds `heads` heads of queries, two of which share keys: parts of an entry, or whole entries."""
    q, k, v, dout = make_tensors(batch=3, heads_q=8, heads_kv=4, seq_q=64, seq_kv=64, head_dim=16)
    monkeypatch.setattr(backward, "STORED_BYTES", bytes_of_heads(heads, 64, 64))
    plan = plan_of(Problem.of(q, k, v, causal=causal))
    assert backward.heads_at_a_time(plan.problem, CONFIG) == at_a_time
    assert len(launches_of(plan)) == 1 + 2 * math.ceil(12 / at_a_time)
    assert plan.workspace_bytes <= backward.STORED_BYTES + 4 * q[..., 0].numel()
    check(plan, q, k, v, dout)


@pytest.mark.parametrize("lengths", [(64, 64), (100, 70), (70, 100), (16, 128)])
def test_ds_that_nobody_has_written_reaches_no_gradient(lengths, monkeypatch):
    q, k, v, dout = make_tensors(heads_q=2, heads_kv=2, seq_q=lengths[0], seq_kv=lengths[1], head_dim=16)
    empty = torch.empty

    def poisoned(*args, **kinds):
        made = empty(*args, **kinds)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    check(plan_of(Problem.of(q, k, v, causal=True)), q, k, v, dout)


def test_it_refuses_what_one_head_has_no_memory_for():
    problem = Problem.contiguous(batch=1, heads_q=8, heads_kv=8, seq_q=4096, head_dim=256)
    variant = find_variant(BACKEND, "stored", "backward")
    config = replace(CONFIG, tile_m=64, dq=replace(CONFIG.dq, tile_m=128))
    assert not variant.fits(problem, ARCHS["sm90"], config)
    long = replace(problem, seq_q=1 << 17, seq_kv=1 << 17)
    (reason,) = variant.fits(long, ARCHS["sm90"], config)
    assert reason.allowed == f"{backward.STORED_BYTES >> 20} MiB"
    assert make_plan(BACKEND, long, ARCHS["sm90"], direction="backward", probe=False).variant != "stored"
    (reason,) = variant.fits(problem, ARCHS["sm90"], replace(config, dq=replace(config.dq, tile_m=32)))
    assert (reason.got, reason.allowed) == ("dq.tile_m=32", "tile_m=64 and more")
    (reason,) = variant.fits(problem, ARCHS["sm90"], replace(config, stagger=-1))
    assert (reason.got, reason.allowed) == ("stagger=-1", "0 and more")


@pytest.mark.parametrize("options", [{"window": (9, 4)}, {"sinks": torch.zeros(2)}], ids=str)
def test_it_refuses_what_it_has_no_code_for(options):
    q, k, v, _ = make_tensors(heads_q=2, heads_kv=2, head_dim=16)
    with pytest.raises(Unsupported):
        plan_of(Problem.of(q, k, v, **options))
