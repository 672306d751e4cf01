"""Hopper's forward over caches: its configs and rules, emulated on the CPU, and compiled for a GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from cuda_runs import check_refused, on_cpu, with_nvrtc

from multiattn import explain
from multiattn.cuda import BACKEND
from multiattn.cuda.cpu.host import CpuLauncher
from multiattn.cuda.decode_wgmma import SplitWgmmaConfig
from multiattn.cuda.family import areas_of
from multiattn.cuda.instances import launches_of
from multiattn.cuda.variants import SPLIT_KEYS, SPLIT_KEYS_WGMMA, WGMMA
from multiattn.inspect.sass import hot_loops, parse, parted_arrivals
from multiattn.kvcache import Where, with_cache
from multiattn.mask import Window
from multiattn.operands import Operands, Options
from multiattn.paged import CacheSpec
from multiattn.plan.arch import ARCHS, CPU
from multiattn.plan.backend import Plan, make_plan
from multiattn.plan.toolchain import disassemble
from multiattn.problem import Problem, problem_of
from parity.tolerance import Truth

SM90 = ARCHS["sm90"]
CONFIG = SplitWgmmaConfig(tile_m=128, tile_n=64, stages=4, splits=1)


def cached(page: int | None = 64, *, head_dim: int = 128, group: int = 8, queries: int = 16, **sizes: Any) -> Problem:
    """Eight sequences of up to 8192 keys, and as many heads of keys; causal, bf16."""
    max_pages = -(-8192 // page) if page else 0
    spec = CacheSpec(8, 8 * max_pages or 8, page, max_pages, max_pages)
    given = {"batch": 8, "heads_q": 8 * group, "heads_kv": 8, "seq_q": queries, "seq_kv": 8192, "causal": True, **sizes}
    return Problem.contiguous(head_dim=head_dim, cache=spec, **given)


# ---------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("changed", "got", "allowed"),
    [
        ({"tile_m": 96}, "tile_m=96", "64, 128, 192"),
        ({"tile_n": 72}, "tile_n=72", "multiples of 16"),
        ({"stages": 2}, "stages=2", "3 to 16"),
        ({"splits": 300}, "splits=300", "1 to 256"),
        ({"tile_m": 64, "pingpong": True}, "pingpong with tile_m=64", "128, 192"),
        ({"tile_n": 240, "stages": 3}, "244 registers", "up to 208 with 2 warpgroups"),
        ({"tile_n": 192, "stages": 3, "q_in_registers": True}, "with 208 registers for all else", "up to 188"),
        ({"stages": 16}, "295424 bytes", "232448 bytes a block on sm90"),
        ({"gathers": True, "tile_m": 192}, "gathers with tile_m=192", "64, 128"),
        ({"gathers": True, "tile_n": 144, "stages": 3}, "gathers with tile_n=144", "up to 128"),
    ],
    ids=str,
)
def test_a_config_that_no_kernel_is_made_for_says_why(changed, got, allowed):
    reasons = replace(CONFIG, **changed).why_not(cached(192 if changed.get("tile_n", 64) > 128 else 64), SM90)
    assert {reason.code for reason in reasons} == {"config"}
    assert any(got in reason.got and allowed in reason.allowed for reason in reasons)


@pytest.mark.parametrize(
    ("page", "tile_n", "rows"), [(None, 128, 128), (256, 128, 128), (64, 128, 64), (16, 128, 16), (48, 128, 16)]
)
def test_a_box_is_what_no_page_and_no_tile_ends_within(page, tile_n, rows):
    assert replace(CONFIG, tile_n=tile_n).keys_of_box(cached(page)) == rows


def test_registers_are_kept_for_as_much_of_q_as_has_room():
    kept = replace(CONFIG, q_in_registers=True)
    assert [it.kept_steps(cached()) for it in (CONFIG, kept, replace(kept, tile_m=192))] == [0, 8, 4]


# ---------------------------------------------------------------- choice


@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        (cached(queries=1), SPLIT_KEYS),
        (cached(queries=4), SPLIT_KEYS),
        (cached(queries=5), SPLIT_KEYS_WGMMA),
        (cached(queries=512), SPLIT_KEYS_WGMMA),
        (cached(None, queries=16), SPLIT_KEYS_WGMMA),
        (cached(1), SPLIT_KEYS_WGMMA),
        (cached(100), SPLIT_KEYS_WGMMA),
        (replace(cached(), alignment=8), SPLIT_KEYS),
        (Problem.contiguous(batch=1, heads_q=8, heads_kv=1, seq_q=16, seq_kv=8192, head_dim=128), SPLIT_KEYS_WGMMA),
        (Problem.contiguous(batch=8, heads_q=16, seq_q=128, seq_kv=512, head_dim=128), SPLIT_KEYS_WGMMA),
        (Problem.contiguous(batch=9, heads_q=16, seq_q=128, seq_kv=512, head_dim=128), WGMMA),
        (Problem.contiguous(batch=9, heads_q=16, seq_q=33, seq_kv=512, head_dim=64), WGMMA),
        (Problem.contiguous(batch=9, heads_q=16, seq_q=32, seq_kv=512, head_dim=64), SPLIT_KEYS),
        (Problem.contiguous(batch=9, heads_q=16, heads_kv=8, seq_q=64, seq_kv=512, head_dim=128), SPLIT_KEYS_WGMMA),
        (Problem.contiguous(batch=1, heads_q=8, heads_kv=1, seq_q=512, seq_kv=8192, head_dim=128), WGMMA),
    ],
    ids=[
        "1 query",
        "4",
        "5",
        "512",
        "dense",
        "pages of 1",
        "pages of 100",
        "unaligned",
        "plain",
        "plain, 128 heads",
        "144 heads",
        "of 33 queries",
        "of 32",
        "that share keys",
        "plain, 512",
    ],
)
def test_it_takes_what_has_more_rows_than_mma_sync_reads_keys_for(problem, variant):
    assert explain(problem, backend="cuda", arch="sm90").variant == variant.name
    assert explain(problem, backend="cuda", arch="sm80").variant != SPLIT_KEYS_WGMMA.name


@pytest.mark.parametrize("page", [1, 100])
def test_pages_that_tma_cannot_walk_are_gathered(page):
    plan = explain(cached(page), backend="cuda", variant=SPLIT_KEYS_WGMMA.name, arch="sm90")
    assert plan.config.gathers
    (reason,) = replace(plan.config, gathers=False).why_not(cached(page), SM90)
    assert (reason.code, reason.got, reason.allowed) == ("page", f"pages of {page} keys", "multiples of 8")


def test_pages_that_are_more_boxes_than_lanes_are_a_reason():
    (reason,) = replace(CONFIG, tile_n=80).why_not(cached(8, head_dim=256), SM90)
    assert (reason.code, reason.got) == ("page", "40 boxes for 80 keys in pages of 8")


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_has_a_rule_that_fits(head_dim):
    for queries, page in itertools.product((8, 16, 512), (None, 5, 8, 16, 64)):
        plan = explain(cached(page, head_dim=head_dim, queries=queries), backend="cuda", arch="sm90")
        assert (plan.variant, plan.config.tile_m) == (SPLIT_KEYS_WGMMA.name, 64 if queries == 8 else 128)
        assert plan.config.stages * plan.config.tile_n * max(head_dim, 64) * 2 >= 85 << 10  # bytes on their way


def test_on_a_cpu_it_must_be_named():
    assert make_plan(BACKEND, cached(), CPU, probe=False).variant == SPLIT_KEYS.name
    assert make_plan(BACKEND, cached(), CPU, variant=SPLIT_KEYS_WGMMA.name, probe=False).config.tile_m == 128


def test_kernels_of_different_configs_have_different_names_and_types():
    flipped = {"tile_m": 192, "tile_n": 80, "stages": 5, "q_in_registers": True, "pingpong": True, "lazy_max": True}
    flipped |= {"gathers": True}
    configs = [CONFIG, *(replace(CONFIG, **{name: it}) for name, it in flipped.items())]
    problems = [cached(16), cached(None), cached(32)]
    plans = [plan_of(cached(), it) for it in configs] + [plan_of(it, CONFIG) for it in problems]
    kernels = [launches_of(plan)[0].kernel for plan in plans]
    assert len({it.name for it in kernels}) == len({it.traits for it in kernels}) == len(plans)
    assert kernels[0].name == "split_keys_wgmma_bf16_d128_causal_128x64_s4_pages64"


def test_parts_are_merged_from_workspace():
    one, two = (plan_of(cached(), replace(CONFIG, splits=splits)) for splits in (1, 2))
    assert [len(launches_of(it)) for it in (one, two)] == [1, 2]
    assert [set(areas_of(it)) for it in (one, two)] == [set(), {"partial_out", "partial_lse"}]
    tiles = 8 * 8  # of 128 rows, which are 16 queries of 8 heads
    assert [launches_of(it)[0].blocks for it in (one, two)] == [tiles, 2 * tiles]


def plan_of(problem: Problem, config: SplitWgmmaConfig | None = None, arch: Any = SM90) -> Plan:
    """A Plan of the variant."""
    return make_plan(BACKEND, problem, arch, variant=SPLIT_KEYS_WGMMA.name, config=config, probe=False)


# ---------------------------------------------------------------- run on the CPU


class Call(NamedTuple):
    """A call over a cache of three sequences, with poison wherever none of them has keys."""

    lengths: tuple[int, ...] = (17, 0, 100)
    queries: int = 3
    page: int | None = 16
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    packed: tuple[int, ...] | None = None
    causal: bool = True
    window: Window | None = None
    scale: float | None = None
    sinks: bool = False
    softcap: float | None = None
    splits: int = 2
    growth: float = 0.0
    """Scores grow by about so much, in the order in which the kernel walks: from the last key to the first."""


def check(call: Call, **changed: Any) -> Plan:
    """The emulated kernel, held to the reference sequence by sequence; `changed` is of the config that rules give."""
    generator = torch.Generator().manual_seed(1)
    (heads_q, heads_kv), most = call.heads, max(call.lengths)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(call.dtype)

    keys = [(make(1, heads_kv, it, call.head_dim), make(1, heads_kv, it, call.head_dim)) for it in call.lengths]
    for k, _ in keys:
        k[..., 0] = call.growth * torch.linspace(1, 0, k.shape[2]) if call.growth else k[..., 0]
    counts = call.packed or (call.queries,) * len(keys)
    queries = [make(1, heads_q, it, call.head_dim) for it in counts]
    for it in queries:
        it[..., 0] = 8.0 if call.growth else it[..., 0]  # a scale of 1/8 at D=64
    sinks = torch.randn(heads_q, generator=generator) if call.sinks else None
    if call.packed is None:
        q, cu_seqlens, max_q = torch.cat(queries), None, None
    else:
        q = torch.cat(queries, dim=2)[0].transpose(0, 1).contiguous()
        cu_seqlens, max_q = torch.tensor([0, *counts]).cumsum(0).int(), max(counts)
    k, v, table = in_pages(keys, call.page, generator) if call.page else (*in_entries(keys, most + 3), None)

    options = Options.of(
        causal=call.causal,
        window=call.window,
        scale=call.scale,
        has_sinks=call.sinks,
        backend="cuda",
        variant=None,
        deterministic=None,
    )
    where = Where(torch.tensor(call.lengths).int(), table, cu_seqlens, max_q, call.splits)
    operands, options = with_cache(q, k, v, options, where, call.softcap, sinks)
    plan = plan_of(problem_of(operands, options), arch=CPU)
    if changed:
        plan = plan_of(plan.problem, replace(plan.config, **changed), CPU)
    out, lse = torch.full_like(operands.q, math.nan), torch.full(operands.q.shape[:3], math.nan)
    CpuLauncher(plan)(operands._replace(out=out, lse=lse))

    row = 0
    for entry, (its_q, its_keys) in enumerate(zip(queries, keys, strict=True)):
        place = slice(None), slice(None), slice(row, row + its_q.shape[2])
        own = (slice(entry, entry + 1),) if call.packed is None else place
        row += its_q.shape[2]
        if call.softcap is not None:  # at scores of a few it changes little else than what the cap says
            check_softcap(call, its_q, its_keys, out[own], lse[own])
        elif its_q.shape[2]:
            truth = Truth.of(its_q, *its_keys, causal=call.causal, window=call.window, scale=call.scale, sinks=sinks)
            for got, expected in zip((out[own], lse[own]), truth.of_plan(plan), strict=True):
                expected.check(got, plan)
    return plan


def check_softcap(
    call: Call, q: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> None:
    """A plain softmax of capped scores, which are causal."""
    k, v = (it.double().repeat_interleave(q.shape[1] // it.shape[1], dim=1) for it in keys)
    scores = q.double() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = call.softcap * torch.tanh(scores / call.softcap)
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
    scores = scores.masked_fill(hidden, -math.inf)
    seen = ~hidden.all(dim=-1)
    torch.testing.assert_close(lse.double(), scores.logsumexp(dim=-1), atol=1e-3, rtol=0)
    expected = torch.where(seen[..., None], scores.softmax(dim=-1).nan_to_num(0.0) @ v, 0.0)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=0)


def in_pages(
    keys: list[tuple[torch.Tensor, torch.Tensor]], page: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values in pages of one tensor, ``[page, Hkv, D]`` each, in any order, and the table."""
    _, heads, _, head_dim = keys[0][0].shape
    most = -(-max(k.shape[2] for k, _ in keys) // page) + 1
    both = torch.full((len(keys) * most, 2, page, heads, head_dim), math.nan).to(keys[0][0].dtype)
    table = torch.randperm(len(keys) * most, generator=generator).view(len(keys), most).int()
    for entry, given in enumerate(keys):
        rows = given[0].shape[2]
        used = -(-rows // page)
        for number in range(used):
            for which, tensor in enumerate(given):
                part = tensor[0, :, number * page : (number + 1) * page].transpose(0, 1)
                both[table[entry, number], which, : part.shape[0]] = part
        table[entry, used:] = 2**30
    return both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2), table


def in_entries(keys: list[tuple[torch.Tensor, torch.Tensor]], room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in an entry for each sequence."""
    made = []
    for which in range(2):
        cache = torch.full((len(keys), keys[0][0].shape[1], room, keys[0][0].shape[3]), math.nan).to(keys[0][0].dtype)
        for entry, given in enumerate(keys):
            cache[entry, :, : given[which].shape[2]] = given[which][0]
        made.append(cache)
    return made[0], made[1]


_LONG = {"lengths": (150, 5, 256), "queries": 40, "heads": (4, 1)}
THREE = {"tile_m": 192, "tile_n": 48, "q_in_registers": True}


@on_cpu
@pytest.mark.parametrize(
    ("call", "changed"),
    [
        (Call(), {}),
        (Call(splits=1), {"stages": 3}),
        (Call(splits=5, lengths=(128, 1, 97), causal=False, queries=1), {}),
        (Call(page=64, lengths=(150, 64, 33), queries=9), {"tile_n": 128, "stages": 3}),
        (Call(page=128, **_LONG), {}),
        (Call(page=256, **_LONG, splits=1), {"tile_n": 128, "stages": 3, "q_in_registers": True}),
        (Call(page=48, **_LONG), THREE),
        (Call(page=8, lengths=(64, 63, 65), heads=(6, 2)), {"tile_n": 48}),
        (Call(page=None, lengths=(77, 0, 101), queries=17), {}),
        (Call(page=32, lengths=(200, 33, 128), queries=17, window=(20, None)), {}),
        (Call(page=32, lengths=(200, 33, 128), queries=17, window=(20, 7), causal=False, splits=3), {}),
        (Call(sinks=True), {}),
        (Call(sinks=True, splits=1, scale=-0.3), {}),
        (Call(packed=(2, 0, 37)), {"lazy_max": True}),
        (Call(**_LONG, page=128, growth=40.0), {"lazy_max": True}),
        (Call(**_LONG, page=128, growth=40.0, dtype=torch.float16, splits=1), {"lazy_max": True, "pingpong": False}),
        (Call(packed=(40, 1, 3), splits=1, scale=0.0), {"pingpong": False}),
        (Call(head_dim=40, dtype=torch.float16, queries=9), {}),
        (Call(head_dim=128, dtype=torch.float16, queries=33), {"q_in_registers": True}),
        (Call(head_dim=256, queries=20), {"stages": 3}),
        (Call(softcap=5.0), {}),
        (Call(splits=6, lengths=(192, 170, 33), causal=False), {}),
        (Call(page=1), {}),
        (Call(page=None, lengths=(77, 0, 101), queries=17, softcap=5.0), {"gathers": True}),
        (Call(page=5, lengths=(128, 1, 97), queries=9, splits=1), {"stages": 3}),
        (Call(page=16, **_LONG), {"gathers": True, "tile_n": 64, "stages": 5, "lazy_max": True}),
        (Call(page=100, **_LONG, splits=1), {"tile_n": 128, "stages": 3, "q_in_registers": True}),
        (Call(page=7, lengths=(64, 63, 65), heads=(6, 2), packed=(2, 0, 37)), {"tile_n": 48}),
        (Call(page=3, head_dim=72, dtype=torch.float16, queries=9, sinks=True), {}),
        (Call(page=5, lengths=(40, 0, 450), queries=9), {"stages": 12}),
        (Call(page=1, lengths=(300, 70, 9), queries=33, splits=1), {"stages": 16, "lazy_max": True}),
        (Call(page=1, head_dim=256, queries=20, window=(20, None), splits=3), {"stages": 5}),
    ],
    ids=str,
)
def test_it_computes_attention(call, changed):
    """Whatever lies in rows of pages and caches that no sequence has, or in entries of the table that none needs."""
    plan = check(call, **changed)
    assert plan.config.splits == call.splits


@on_cpu
@pytest.mark.parametrize(("queries", "splits"), [(33, 1), (33, 3)])
def test_plain_calls_divide_keys_too(queries, splits):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, heads, seq, 64, generator=generator) for heads, seq in ((4, queries), (2, 101), (2, 101)))
    q, k, v = (it.to(torch.bfloat16) for it in (q, k, v))
    found = plan_of(Problem.of(q, k, v, causal=True), arch=CPU)
    plan = plan_of(found.problem, replace(found.config, splits=splits), CPU)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:3], math.nan)
    CpuLauncher(plan)(Operands(q, k, v, out, lse))
    for got, expected in zip((out, lse), Truth.of(q, k, v, causal=True).of_plan(plan), strict=True):
        expected.check(got, plan)


# ---------------------------------------------------------------- compiled


@on_cpu
def test_a_kernel_of_an_illegal_config_does_not_compile():
    cases = {
        "tile_m: 64, 128, 192": {"tile_m": 256},
        "tile_n: multiples of 16": {"tile_n": 72},
        "stages: 3 to 16": {"stages": 2},
        "pingpong: of two warpgroups or three": {"tile_m": 64, "pingpong": True},
        "a lane for each box of a tile": {"tile_n": 160},
        "gathers: for two warpgroups": {"gathers": True, "tile_m": 192},
        "gathers: for two warpgroups, a lane for each key": {"gathers": True, "tile_n": 144, "stages": 3},
    }
    problem, refused = cached(8), {}
    for message, changed in cases.items():
        config = replace(CONFIG, **changed)
        assert config.why_not(problem, CPU)
        refused[message] = launches_of(replace(plan_of(problem, CONFIG), config=config))[0].kernel.traits
    check_refused("split_keys_wgmma_traits.cuh", refused)


@with_nvrtc
@pytest.mark.parametrize(
    ("problem", "changed"),
    [
        pytest.param(cached(), {}, id="128 rows"),
        pytest.param(cached(), {"gathers": False}, id="128 rows in boxes", marks=pytest.mark.nightly),
        pytest.param(cached(16, queries=8), {}, id="64 rows", marks=pytest.mark.nightly),
        pytest.param(cached(16, queries=8), {"gathers": False}, id="64 rows in boxes"),
        pytest.param(
            cached(queries=512),
            {"tile_m": 192, "tile_n": 64, "stages": 10, "q_in_registers": True},
            id="192 rows",
        ),
        pytest.param(cached(None, head_dim=256, dtype="fp16"), {}, id="D=256", marks=pytest.mark.nightly),
    ],
)
def test_compiles_without_a_gpu(problem, changed):
    """With no spills in its loops, and with no warp that may part."""
    plan = plan_of(problem)
    plan = plan_of(problem, replace(plan.config, splits=1, **changed))
    (compiled,) = BACKEND.forward.export(plan, ())
    assert compiled.dynamic_smem_bytes == plan.config.smem_bytes(problem)
    if (text := disassemble(compiled.cubin)) is not None:
        code = parse(text)
        assert not parted_arrivals(code)
        hot = {place for loop in hot_loops(code) for place in loop.body}
        assert hot
        assert not [code[place].name for place in hot if code[place].name.startswith(("LDL", "STL"))]
