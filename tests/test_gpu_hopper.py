"""The forwards for Hopper on the GPU, in every way to run them: sweeps may choose any, rules have few of them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import pytest
import torch
from gluon_plans import gluon_ways
from wgmma_plans import SM90, ways

from multiattn import launch
from multiattn.cuda.variants import WGMMA
from multiattn.inspect.pool import run_isolated
from multiattn.plan.arch import detect
from multiattn.plan.backend import Plan, get, make_plan
from multiattn.problem import Problem
from parity.tolerance import Truth

ON_CPU = os.environ.get("MULTIATTN_TEST_HOPPER") == "cpu"  # the same cases emulated, to try this file
WGMMA_WAYS = tuple(("cuda", WGMMA.name, *way) for way in ways())
GLUON_WAYS = () if ON_CPU else tuple(("triton", "warp_specialized", *way) for way in gluon_ways())
WAYS = (*WGMMA_WAYS, *GLUON_WAYS)


def missing():
    if ON_CPU:
        return ""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return "" if detect(torch.device("cuda")) == SM90 else "the GPU is no Hopper"


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DEVICE = "cpu" if ON_CPU else "cuda"
DEADLINE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Case:
    seq_q: int
    seq_kv: int
    batch: int = 1
    heads_q: int = 4
    heads_kv: int = 2
    window: tuple[int | None, int | None] | None = None
    """Where the way is causal, its right bound is 0."""
    scale: float | None = None
    dtype: torch.dtype = torch.bfloat16
    growth: float = 1.0
    """Factor of the first keys, which a walk from the last one to the first comes to at its end."""
    grown: int | None = None
    """How many of them; a third unless told otherwise."""
    spoilt: tuple[int, float] | None = None
    """A key whose values are all this."""


CASES = {
    "one tile": Case(seq_q=33, seq_kv=2048),
    "ragged": Case(seq_q=500, seq_kv=333, scale=-0.2),
    "more keys": Case(seq_q=333, seq_kv=1111, scale=0.0),
    "rows that see no key": Case(seq_q=1111, seq_kv=130),
    "many tiles": Case(seq_q=200, seq_kv=200, batch=16, heads_q=12, heads_kv=12),
    "an idle warpgroup": Case(seq_q=8 * 192 - 100, seq_kv=777, batch=3),
    "a window": Case(seq_q=700, seq_kv=700, window=(150, 40)),
    "a window narrower than a block": Case(seq_q=500, seq_kv=600, window=(7, 3), scale=-0.2),
    "a window that some rows see no key of": Case(seq_q=1111, seq_kv=500, window=(300, None)),
    "a window, maxima outgrown": Case(seq_q=700, seq_kv=700, window=(300, 0), growth=200.0),
    "a window, many tiles": Case(seq_q=900, seq_kv=900, batch=3, heads_q=40, heads_kv=8, window=(200, 0)),
    "NaN": Case(seq_q=600, seq_kv=600, spoilt=(500, float("nan"))),
    "inf": Case(seq_q=600, seq_kv=600, spoilt=(3, float("inf"))),
    "fp16": Case(seq_q=300, seq_kv=700, dtype=torch.float16),
    "maxima outgrown": Case(seq_q=700, seq_kv=700, growth=200.0),
    "maxima outgrown by one key": Case(seq_q=700, seq_kv=700, growth=200.0, grown=1),
    "maxima outgrown, fp16": Case(seq_q=700, seq_kv=700, growth=20.0, dtype=torch.float16),
    "maxima outgrown, many tiles": Case(seq_q=900, seq_kv=900, batch=3, heads_q=40, heads_kv=8, growth=200.0),
    "maxima outgrown, NaN": Case(seq_q=600, seq_kv=600, growth=200.0, spoilt=(500, float("nan"))),
}
"""In the first of them a cluster's first block has nothing to do; in others only one of its blocks sees some keys."""


def plan_of(backend, variant, head_dim, causal, config, q=None, k=None, v=None, window=None, scale=None):
    if q is None:
        problem = Problem.contiguous(batch=1, heads_q=4, seq_q=512, head_dim=head_dim, causal=causal, window=window)
        return make_plan(get(backend), problem, SM90, variant=variant, config=config)
    problem = Problem.of(q, k, v, causal=causal, window=window, scale=scale)
    plan = make_plan(get(backend), problem, detect(q.device), variant=variant, config=config)
    assert isinstance(plan, Plan), plan
    return plan


def compile_way(way):
    plans = [plan_of(*way, window=window) for window in (None, (150, 40))]
    return sum(len(get(plan.backend).forward.export(plan, ())) for plan in plans)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All at once: one after another they would take minutes."""
    if not ON_CPU:
        failed = [it.error for it in run_isolated(compile_way, WAYS, jobs=os.cpu_count(), timeout_s=120) if it.error]
        assert not failed


def launched(plan, q, k, v):
    """out and lse. A kernel that hangs ends the session: whatever touches the device afterwards would hang as well."""
    out = q.new_empty_strided(q.shape, (*plan.problem.strides_out, 1)).fill_(torch.nan)
    lse = torch.full(q.shape[:3], torch.nan, device=q.device)
    launch(plan, q, k, v, out, lse)
    await_device(plan)
    return out, lse


def await_device(plan):
    """Until what was launched of a plan has ended."""
    if DEVICE == "cuda":
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + DEADLINE_S
        while not done.query():
            if time.monotonic() > deadline:
                print(f"hangs: {plan}", flush=True)
                os._exit(99)


def way_id(way):
    backend, _, head_dim, causal, config = way
    return f"{backend} D{head_dim} {'causal' if causal else 'full'} {config}"


@pytest.mark.parametrize("way", WAYS, ids=way_id)
def test_every_way_computes_attention(way):
    head_dim = way[2]
    for name, case in CASES.items():
        generator = torch.Generator(device=DEVICE).manual_seed(len(name))

        def draw(heads, seq, case=case, generator=generator):
            shape = (case.batch, seq, heads, head_dim)
            return torch.randn(shape, generator=generator, device=DEVICE).to(case.dtype).transpose(1, 2)

        q, k, v = draw(case.heads_q, case.seq_q), draw(case.heads_kv, case.seq_kv), draw(case.heads_kv, case.seq_kv)
        k[:, :, : case.seq_kv // 3 if case.grown is None else case.grown] *= case.growth
        if case.spoilt:
            key, value = case.spoilt
            v[:, :, key] = value
        plan = plan_of(*way, q, k, v, case.window, case.scale)
        results = launched(plan, q, k, v)
        truth = Truth.of(q, k, v, causal=way[3], window=case.window, scale=case.scale)
        for expected, got in zip(truth.of_plan(plan), results, strict=True):
            expected.check(got, f"{name}: {plan}")
        for again, got in zip(launched(plan, q, k, v), results, strict=True):
            torch.testing.assert_close(again, got, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", WAYS, ids=way_id)
def test_every_launch_gives_the_same_bits(way):
    """Where some blocks have a second tile: Gluon's mbarriers that nobody waited for spoiled one launch in 300."""
    launches = 2 if ON_CPU else 500
    generator = torch.Generator(device=DEVICE).manual_seed(7)
    batch, heads, seq_q, seq_kv = (1, 2, 200, 300) if ON_CPU else (2, 16, 1000, 1536)

    def draw(heads, seq):
        return torch.randn((batch, heads, seq, way[2]), generator=generator, device=DEVICE).to(torch.bfloat16)

    q, k, v = draw(heads, seq_q), draw(heads // 2, seq_kv), draw(heads // 2, seq_kv)
    plan = plan_of(*way, q, k, v)
    first = launched(plan, q, k, v)
    out, lse = map(torch.empty_like, first)
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(launches):
        launch(plan, q, k, v, out, lse)
        differ += (out != first[0]).any() | (lse != first[1]).any()
    await_device(plan)
    assert differ.item() == 0
