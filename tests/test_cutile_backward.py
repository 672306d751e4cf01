"""cuTile's backward: orders of tiles and blocks, launches, rules, ds in memory, and what is compiled."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from gradient_checks import check, make_tensors, run

from multiattn import Problem
from multiattn.cutile import backward
from multiattn.cutile.rules.shorthand import one_pass, queries, stored
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import find_variant, get, make_plan
from multiattn.plan.support import Unsupported
from multiattn.sequences import Batching

pytest.importorskip("cuda.tile")

from multiattn.cutile import cpu
from multiattn.cutile.families import launches_of
from multiattn.cutile.launches import needs_64bit
from multiattn.cutile.rules.shorthand import two_passes

BACKEND = get("cutile")
VARIANTS = [variant.name for variant in BACKEND.backward.variants]
CPU = ARCHS["cpu"]

TWO_KERNELS = {"two_pass": two_passes, "stored": stored}

each_variant = pytest.mark.parametrize("variant", VARIANTS)
both_masks = pytest.mark.parametrize("causal", [False, True])


def plan_of(variant, problem, config=None, arch=CPU):
    return make_plan(BACKEND, problem, arch, direction="backward", variant=variant, config=config, probe=False)


def config_of(variant, **fields):
    """A config of the variant's kind."""
    config = one_pass(16, 32, **fields)
    return TWO_KERNELS[variant](config, queries(64, 64)) if variant in TWO_KERNELS else config


@both_masks
@pytest.mark.parametrize(("variant", "launches"), [("two_pass", 2), ("stored", 3)])
def test_two_kernels_give_the_same_bits_in_every_order_of_blocks(variant, launches, causal, monkeypatch):
    q, k, v, dout = make_tensors(heads_q=4, heads_kv=2, seq_q=100, seq_kv=130, head_dim=16)
    dlse = torch.randn(q.shape[:3], generator=torch.Generator().manual_seed(1))
    plan = plan_of(variant, Problem.of(q, k, v, causal=causal))
    launch, seed = cpu.launch, itertools.count()
    monkeypatch.setattr(cpu, "launch", lambda *args: launch(*args, seed=next(seed)))
    first, second = (run(plan, q, k, v, dout, dlse) for _ in range(2))
    assert next(seed) == 2 * launches
    assert all(map(torch.equal, first, second))


# ---------------------------------------------------------------- launches


@each_variant
def test_64_bits_where_a_gradient_needs_them(variant):
    """One head of keys may stand for all of them: dk is then as large as if it did not."""
    sizes = {"batch": 2, "heads_q": 64, "seq_q": 1, "seq_kv": 2**17, "head_dim": 256}
    broadcast = replace(Problem.contiguous(**sizes), strides_k=(0, 0, 256), strides_v=(0, 0, 256))
    assert not needs_64bit(broadcast)
    assert all(launch.is_64bit for launch in launches_of(plan_of(variant, broadcast, arch=ARCHS["sm90"])))


BATCHES = [(4096, None), (7777, None), (4096, Batching.packed(3))]


@both_masks
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("seq", "batching"), BATCHES, ids=["4096", "7777", "packed"])
@each_variant
def test_no_step_loads_columns_one_by_one(variant, seq, batching, head_dim, causal):
    """TMA cannot load the caller's own lse where rows are no multiple of 16 bytes: a copy is loaded."""
    problem = Problem.contiguous(
        batch=1,
        heads_q=4,
        seq_q=seq,
        head_dim=head_dim,
        causal=causal,
        batching=None if variant == "stored" else batching,
    )
    found = {it.kernel: it.constants for it in launches_of(plan_of(variant, problem, arch=ARCHS["sm90"]))}
    (own,) = (found[it] for it in backward.OF_KEYS if it in found)
    assert own.tma_columns
    assert ("copy_columns" in found) == own.own_columns == (problem.packing is not None or seq % 4 != 0)


CELLS = [
    # By measurements, whose figures `backward.settled` has.
    ((1, 25, 5, 7777, 64), False, 5),
    ((1, 25, 5, 7777, 64), True, 1),
    ((1, 64, 8, 4096, 128), False, 1),
    ((1, 64, 8, 4096, 128), True, 2),
    ((1, 64, 8, 8192, 128), False, 2),  # a head of keys a launch, as ds has the memory for
    ((1, 64, 8, 8192, 128), True, 4),
    # By waves alone.
    ((1, 32, 8, 2048, 128), True, 2),
    ((4, 32, 8, 4096, 128), True, 1),
    ((1, 64, 8, 65536, 128), False, 1),
    ((1, 8, 1, 64, 64), False, 1),
    ((1, 16, 16, 4096, 64), True, 1),
]


@pytest.mark.parametrize(("sizes", "causal", "shares"), CELLS)
def test_few_heads_of_keys_are_divided(sizes, causal, shares):
    batch, heads_q, heads_kv, seq, head_dim = sizes
    problem = Problem.contiguous(
        batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=seq, head_dim=head_dim, causal=causal
    )
    plan = plan_of(None, problem, arch=ARCHS["sm90"])
    assert (plan.config.parts, plan.config.walks(problem)[0].parts) == (shares, shares)
    assert ("sum_shares" in {it.kernel for it in launches_of(plan)}) == (shares > 1)
    assert find_variant(BACKEND, plan.variant, "backward").settle(problem, plan.arch, plan.config) == plan.config


@both_masks
@pytest.mark.parametrize("seq", [100, 101])
@pytest.mark.parametrize("shares", [1, 2, 4])
@each_variant
def test_gradients_of_shares(variant, shares, seq, causal):
    q, k, v, dout = make_tensors(batch=2, heads_q=8, heads_kv=2, seq_q=seq, seq_kv=130, head_dim=16)
    problem = Problem.of(q, k, v, causal=causal)
    check(plan_of(variant, problem, config_of(variant, shares=shares, heads_together=2)), q, k, v, dout)
    with pytest.raises(Unsupported, match="shares=3; allowed a divisor of 4 heads"):
        plan_of(variant, problem, config_of(variant, shares=3))


# ---------------------------------------------------------------- tiles of two parts


@both_masks
@pytest.mark.parametrize("fields", [{}, {"keys_in_registers": True}, {"shares": 2}, {"delta_first": True}], ids=str)
@pytest.mark.parametrize(("head_dim", "widths"), [(24, (16, 16)), (40, (32, 16)), (64, (32, 32))])
@each_variant
def test_gradients_of_two_parts(variant, head_dim, widths, fields, causal):
    if variant == "two_pass":
        fields = {name: it for name, it in fields.items() if name != "delta_first"}
    config = config_of(variant, split_head_dim=True, **fields)
    q, k, v, dout = make_tensors(heads_q=4, heads_kv=2, seq_q=100, seq_kv=130, head_dim=head_dim)
    problem = Problem.of(q, k, v, causal=causal)
    assert {it.pieces[:2] for it in config.walks(problem)} >= {widths}
    for turned in (False, True) if variant == "atomic" else (False,):
        check(plan_of(variant, problem, replace(config, dq_transposed=turned)), q, k, v, dout)


@each_variant
def test_two_parts_are_refused_where_there_are_none(variant):
    narrow = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=16)
    with pytest.raises(Unsupported, match="split_head_dim=True at D=16; allowed more than 16"):
        plan_of(variant, narrow, config_of(variant, split_head_dim=True))


# ---------------------------------------------------------------- with ds in memory


CONFIG = stored(one_pass(16, 32, heads_together=2), queries(64, 32, heads_together=2))


@both_masks
def test_tiles_begin_at_queries_of_their_own_without_a_mask_only(causal):
    problem = Problem.contiguous(batch=1, heads_q=2, seq_q=256, head_dim=64, causal=causal)
    _, keys, queries = launches_of(plan_of("stored", problem, replace(CONFIG, stagger=7)))
    _, plain_keys, plain_queries = launches_of(plan_of("stored", problem, CONFIG))
    assert (keys == plain_keys, queries == plain_queries) == (causal, True)
    assert keys.constants.stagger == (0 if causal else 7)


@both_masks
@pytest.mark.parametrize(("heads", "at_a_time"), [(2, 1), (4, 2), (7, 2), (8, 4), (12, 4), (16, 8)])
def test_gradients_of_some_heads_at_a_time(heads, at_a_time, causal, monkeypatch):
    """As memory holds `heads` heads of queries, two of which share keys: parts of an entry, or whole entries."""
    q, k, v, dout = make_tensors(batch=3, heads_q=8, heads_kv=4, seq_q=64, seq_kv=64, head_dim=16)
    monkeypatch.setattr(backward, "STORED_BYTES", heads * 64 * 64 * 2)
    plan = plan_of("stored", Problem.of(q, k, v, causal=causal), CONFIG)
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
    check(plan_of("stored", Problem.of(q, k, v, causal=True), CONFIG), q, k, v, dout)


def test_it_refuses_what_one_head_has_no_memory_for():
    problem = Problem.contiguous(batch=1, heads_q=8, heads_kv=8, seq_q=4096, head_dim=256)
    variant = find_variant(BACKEND, "stored", "backward")
    config = replace(CONFIG, tile_m=64, dq=replace(CONFIG.dq, tile_m=128))
    assert not variant.fits(problem, ARCHS["sm90"], config)
    long = replace(problem, seq_q=1 << 17, seq_kv=1 << 17)
    (reason,) = variant.fits(long, ARCHS["sm90"], config)
    assert reason.allowed == f"{backward.STORED_BYTES >> 20} MiB"
    assert make_plan(BACKEND, long, ARCHS["sm90"], direction="backward", probe=False).variant != "stored"


@pytest.mark.parametrize("options", [{"window": (9, 4)}, {"sinks": torch.zeros(2)}], ids=str)
def test_it_refuses_what_it_has_no_code_for(options):
    q, k, v, _ = make_tensors(heads_q=2, heads_kv=2, head_dim=16)
    with pytest.raises(Unsupported):
        plan_of("stored", Problem.of(q, k, v, **options), CONFIG)
