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
from multiattn.plan.arch import detect
from multiattn.plan.backend import get, make_plan
from multiattn.plan.config import Config
from multiattn.problem import Problem
from parity.tolerance import Truth

ON_CPU = os.environ.get("MULTIATTN_TEST_HOPPER") == "cpu"  # the same cases emulated, to try this file


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
    growth: float = 1.0
    """Factor of the first keys, which a walk from the last one to the first comes to at its end; at most 20 in fp16."""
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
    "maxima outgrown": Case(seq_q=700, seq_kv=700, growth=200.0),
    "maxima outgrown by one key": Case(seq_q=700, seq_kv=700, growth=200.0, grown=1),
    "maxima outgrown, many tiles": Case(seq_q=900, seq_kv=900, batch=3, heads_q=40, heads_kv=8, growth=200.0),
    "maxima outgrown, NaN": Case(seq_q=600, seq_kv=600, growth=200.0, spoilt=(500, float("nan"))),
}
"""In the first of them a cluster's first block has nothing to do; in others only one of its blocks sees some keys."""


@dataclass(frozen=True)
class Way:
    """Dtypes take turns, and so do scales in Gluon: each would have kernels of its own."""

    turn: int
    backend: str
    variant: str
    head_dim: int
    causal: bool
    config: Config

    @property
    def dtype(self):
        return torch.float16 if self.turn // 2 % 2 else torch.bfloat16

    def plan(self, q, k, v, window=None, scale=None):
        if self.backend == "triton" and self.turn % 3:
            scale = None
        problem = Problem.of(q, k, v, causal=self.causal, window=window, scale=scale)
        return make_plan(get(self.backend), problem, detect(q.device), variant=self.variant, config=self.config)

    def __str__(self):
        return f"{self.backend} D{self.head_dim} {'causal' if self.causal else 'full'} {self.config}"


WAYS = [Way(turn, "cuda", WGMMA.name, *way) for turn, way in enumerate(ways())]
WAYS += [] if ON_CPU else [Way(turn, "triton", "warp_specialized", *way) for turn, way in enumerate(gluon_ways())]
each_way = pytest.mark.parametrize(
    "way", [pytest.param(way, id=str(way), marks=pytest.mark.xdist_group(str(way))) for way in WAYS]
)
"""One process has both tests of a way: what one compiles the other finds."""


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


@each_way
def test_every_way_computes_attention(way):
    for name, case in CASES.items():
        generator = torch.Generator(device=DEVICE).manual_seed(len(name))

        def draw(heads, seq, case=case, generator=generator):
            shape = (case.batch, seq, heads, way.head_dim)
            return torch.randn(shape, generator=generator, device=DEVICE).to(way.dtype).transpose(1, 2)

        q, k, v = draw(case.heads_q, case.seq_q), draw(case.heads_kv, case.seq_kv), draw(case.heads_kv, case.seq_kv)
        growth = min(case.growth, 20.0) if way.dtype == torch.float16 else case.growth
        k[:, :, : case.seq_kv // 3 if case.grown is None else case.grown] *= growth
        if case.spoilt:
            key, value = case.spoilt
            v[:, :, key] = value
        plan = way.plan(q, k, v, case.window, case.scale)
        results = launched(plan, q, k, v)
        truth = Truth.of(q, k, v, causal=way.causal, window=case.window, scale=plan.problem.scale)
        for expected, got in zip(truth.of_plan(plan), results, strict=True):
            expected.check(got, f"{name}: {plan}")
        for again, got in zip(launched(plan, q, k, v), results, strict=True):
            torch.testing.assert_close(again, got, rtol=0, atol=0, equal_nan=True)


@each_way
def test_every_launch_gives_the_same_bits(way):
    """Where some blocks have a second tile: Gluon's mbarriers that nobody waited for spoiled one launch in 300."""
    launches = 2 if ON_CPU else 500
    generator = torch.Generator(device=DEVICE).manual_seed(7)
    batch, heads, seq_q, seq_kv = (1, 2, 200, 300) if ON_CPU else (2, 16, 1000, 1536)

    def draw(heads, seq):
        return torch.randn((batch, heads, seq, way.head_dim), generator=generator, device=DEVICE).to(way.dtype)

    q, k, v = draw(heads, seq_q), draw(heads // 2, seq_kv), draw(heads // 2, seq_kv)
    plan = way.plan(q, k, v)
    first = launched(plan, q, k, v)
    out, lse = map(torch.empty_like, first)
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(launches):
        launch(plan, q, k, v, out, lse)
        differ += (out != first[0]).any() | (lse != first[1]).any()
    await_device(plan)
    assert differ.item() == 0
