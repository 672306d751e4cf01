"""The forward for Hopper on the CPU, emulated: grids, loads, rare values; and compiled for a GPU."""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import replace

import pytest
import torch
from cuda_runs import check_refused, on_cpu, run_forward, with_nvrtc
from wgmma_plans import CONFIG, FLIPPED, SM90, plan_of, problem_of

from bench.record import example_score
from multiattn.cuda import BACKEND
from multiattn.cuda.bind import bind
from multiattn.cuda.cpu import host
from multiattn.cuda.forward_wgmma import WgmmaConfig
from multiattn.cuda.instances import kernels_of, launches_of
from multiattn.cuda.params import params_of
from multiattn.cuda.rules.hopper import WGMMA_RULES
from multiattn.cuda.variants import WGMMA
from multiattn.inspect.sass import parse, parted_arrivals
from multiattn.mask import CAUSAL, FULL, Band
from multiattn.operands import Operands
from multiattn.plan import abi, schedule
from multiattn.plan.arch import CPU
from multiattn.plan.backend import Plan, plan_variant
from multiattn.plan.toolchain import disassemble
from multiattn.problem import Problem
from multiattn.sequences import Batching

EMULATED = WGMMA_RULES[-1].config

# ---------------------------------------------------------------- run on the CPU


def run_wgmma(config, **sizes):
    """Two sequences of four heads, two of keys."""
    given = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 300, "seq_kv": 150, "dtype": "bf16", **sizes}
    return run_forward(variant=WGMMA.name, config=config, **given)


@on_cpu
@pytest.mark.parametrize(("cluster", "blocks"), [(1, 1 + 3 + 4), (2, 1 + 1 + 4 + 4)])
def test_what_is_short_of_a_tile_is_the_first_which_sees_the_fewest_keys(cluster, blocks):
    """512 queries in tiles of 192: these end at 128, 320 and 512. A cluster loads for the last of its two."""
    config = replace(CONFIG, tile_m=192, tile_n=128, cluster=cluster, scheduler="one_tile")
    plan, _, counts = run_wgmma(config, seq_q=512, seq_kv=512, causal=True)
    tiles = config.query_tiles(plan.problem)
    assert counts.tma_loads == (tiles + 2 * blocks) * 2 * 4


@on_cpu
@pytest.mark.parametrize(
    ("cluster", "window", "blocks"),
    [
        (1, (100, 0), 2 + 6 + 8 + 8),
        (2, (100, 0), 2 * 6 + 2 * 12),  # for both of a cluster's tiles together
        (1, (0, 40), 4 + 6 + 6 + 4),
    ],
)
def test_blocks_beyond_either_edge_of_a_band_are_not_loaded(cluster, window, blocks):
    """448 queries and keys in tiles of 128 and 32: these end at 64, 192, 320 and 448."""
    config = replace(CONFIG, tile_n=32, cluster=cluster, scheduler="one_tile")
    plan, _, counts = run_wgmma(config, seq_q=448, seq_kv=448, window=window)
    tiles = config.query_tiles(plan.problem)
    assert counts.tma_loads == (tiles + 2 * blocks) * 2 * 4


@on_cpu
@pytest.mark.parametrize(("causal", "cluster", "scheduler"), [(False, 1, "dynamic"), (True, 2, "static")])
def test_heads_run_in_sections(monkeypatch, causal, cluster, scheduler):
    """Two of the eight heads are a section; under a causal mask the last section has four."""
    monkeypatch.setattr(schedule, "KV_BYTES_SIDE_BY_SIDE", 1)
    plan, *_ = run_wgmma(replace(CONFIG, cluster=cluster, scheduler=scheduler), seq_q=500, causal=causal)
    assert params_of(kernels_of(plan)[-1], plan).forward.heads_per_section == 2


PLACES = """
#include "forward_wgmma_producer.cuh"
extern "C" void places(bool causal, int tiles, int heads, int heads_per_section, int* out) {
  using multiattn::Band, multiattn::scheduled_place;
  for (int block = 0; block < tiles * heads; ++block) {
    const auto it = causal ? scheduled_place<Band::CAUSAL>(block, tiles, heads, heads_per_section)
                           : scheduled_place<Band::TWO_SIDED>(block, tiles, heads, heads_per_section);
    *out++ = it.head;
    *out++ = it.place;
  }
}
"""


@on_cpu
@pytest.mark.parametrize(
    ("causal", "tiles", "sections"),
    [
        (False, 3, [(0, 1), (2, 3), (4, 5), (6,)]),
        (True, 3, [(0, 1), (2, 3), (4, 5, 6)]),  # the last section has the heads of two
        (True, 256, [(0, 1), (2, 3), (4, 5), (6,)]),  # but for many tiles a head
    ],
)
def test_tiles_run_section_by_section_longest_first(causal, tiles, sections):
    places = host.load(host.build_source(PLACES)).places
    found = (ctypes.c_int * (2 * tiles * 7))()
    places(ctypes.c_bool(causal), tiles, 7, 2, found)
    expected = [(head, place) for heads in sections for place in range(tiles) for head in heads]
    assert list(zip(found[::2], found[1::2], strict=True)) == expected


LOG2_OF_SUM = """
#include "multiattn/ptx_sm90.cuh"
#include "forward_wgmma_output.cuh"
extern "C" float log2_of_sum(float sum) { return multiattn::log2_of_sum(sum); }
"""


@on_cpu
def test_the_logarithm_of_a_sum_has_its_exponent_apart():
    """As exact for a sum of any size as for one from 1 to 2; what is not finite stays what it is."""
    log2 = host.load(host.build_source(LOG2_OF_SUM)).log2_of_sum
    log2.argtypes, log2.restype = [ctypes.c_float], ctypes.c_float
    for exponent, mantissa in itertools.product((-126, -20, -1, 0, 1, 17, 127), (1.0, 1.25, 1.5, 1.9375)):
        assert log2(math.ldexp(mantissa, exponent)) == pytest.approx(exponent + math.log2(mantissa), rel=1e-6, abs=1e-6)
    assert log2(math.inf) == math.inf
    assert math.isnan(log2(math.nan))


@on_cpu
@pytest.mark.parametrize("tma_store", [True, False])
def test_one_column_that_is_not_finite_is_found_wherever_it_is(tma_store):
    """The key is one that few rows see; each head's V has it in another column, one for each place of a lane."""

    def plant(q, k, v):
        for head, column in enumerate((1, 22, 43, 60)):
            v[head // 2, head % 2, 100, column] = torch.nan

    run_wgmma(replace(EMULATED, tma_store=tma_store), causal=True, seq_q=150, change=plant)


@on_cpu
def test_a_row_whose_weights_are_all_zero_has_an_lse_of_minus_infinity():
    """Rounding the maximum of such large scores alone makes exp2 of them 0: out and lse must tell the same."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.full((1, 1, 70, 64), 60000.0 + 32 * i, dtype=torch.float16) for i in (0, 12))
    v = torch.randn(1, 1, 70, 64, generator=generator).to(torch.float16)
    problem = Problem.of(q, k, v, causal=False, scale=None)
    score, scale = 64 * q[0, 0, 0, 0].double() * k[0, 0, 0, 0].double(), float(torch.tensor(problem.scale_log2))
    score = float(score.float())
    assert score * scale - float(torch.tensor(score * scale).float()) < -150  # what exp2 is taken of

    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
    BACKEND.forward.prepare(plan_of(problem, EMULATED, CPU))(Operands(q, k, v, out, lse))
    assert (out == 0).all()
    assert (lse == -math.inf).all()


# ---------------------------------------------------------------- compiled


@on_cpu
def test_a_kernel_of_an_illegal_config_does_not_compile():
    cases = {
        "tile_n: multiples of 16": {"tile_n": 72},
        "cluster: 1, 2": {"cluster": 3, "scheduler": "static"},
        "a cluster's blocks take their tiles together": {"cluster": 2},
        "stages: 3 to 16": {"stages": 2},
        "q_slots: 1 to 3": {"q_slots": 4},
        "tile_m: 128, 192": {"tile_m": 64},
    }
    refused = {}
    for message, changed in cases.items():
        config = replace(CONFIG, **changed)
        assert config.why_not(problem_of(), CPU)
        (launch,) = launches_of(replace(plan_of(problem_of()), config=config))
        refused[message] = launch.kernel.traits
    packed = replace(problem_of(), batch=1, batching=Batching.packed(2))
    (_, launch) = launches_of(replace(plan_of(packed), config=replace(CONFIG, cluster=2, scheduler="static")))
    refused["in a packed batch a cluster's tiles are of several sequences"] = launch.kernel.traits
    check_refused("forward_wgmma_traits.cuh", refused)


@with_nvrtc
@pytest.mark.parametrize("window", [(None, 0), (1023, 0)], ids=["causal", "two_sided"])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "config"),
    [
        (40, "fp16", replace(CONFIG, scheduler="one_tile", tma_store=False)),
        (128, "bf16", replace(CONFIG, **{**FLIPPED, "tile_m": 128, "tile_n": 48, "q_in_registers": False})),
        (64, "bf16", WgmmaConfig(tile_m=192, tile_n=128, stages=8, q_slots=2, pingpong=True, lazy_max=True)),
    ],
    ids=str,
)
def test_compiles_without_a_gpu(head_dim, dtype, config, window):
    """With the registers that its warpgroups have, and shared memory as Python says."""
    plan = plan_of(problem_of(head_dim, dtype=dtype, window=window), config)
    assert isinstance(plan, Plan)
    (compiled,) = BACKEND.forward.export(plan, ())
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.dynamic_smem_bytes == config.smem_bytes(plan.problem)
    entry = abi.read_entry(compiled.cubin, compiled.kernel)
    abi.check(bind(plan, launches_of(plan)[0].image()), entry)
    assert 0 < entry.registers <= 65536 // config.threads
    if (code := disassemble(compiled.cubin)) is not None:
        assert not parted_arrivals(parse(code))  # the last of these configs hung


@with_nvrtc
@pytest.mark.nightly
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_no_warp_parts_in_a_kernel_of_the_rules(head_dim):
    """As tuned kernels are read one by one: whatever head_dim and dtype, an arrival that has become a jump may hang."""
    scores = (None, example_score(reads_keys=False), example_score(reads_keys=True))
    for dtype, band, score in itertools.product(("fp16", "bf16"), (FULL, CAUSAL, Band(1023, 0)), scores):
        plans = {}
        for seq in sorted({rule.seq_min for rule in WGMMA_RULES} | {512, 16384}):
            problem = replace(problem_of(head_dim, dtype=dtype, band=band, seq_q=seq, seq_kv=seq), score=score)
            plan = plan_variant(BACKEND, WGMMA, problem, SM90)
            plans[plan.config] = plan
        for plan in plans.values():
            (compiled,) = BACKEND.forward.export(plan, ())
            code = disassemble(compiled.cubin)
            if code is None:
                pytest.skip("no cuobjdump")
            assert not parted_arrivals(parse(code)), plan
