"""The forward for Hopper, dense and over caches: configs, rules, launches; emulated; and compiled with no GPU."""

import ctypes
import itertools
import math
from dataclasses import replace

import pytest
import torch
from cuda_runs import CONFIG, check_refused, on_cpu, run_forward, run_gxx, with_nvrtc
from parity_breaks import BY_NAME
from parity_breaks import CPU as CASES_DEVICE

from bench.matrix import SUITES
from bench.record import example_score
from multiattn import block_mask, explain, fmha, fmha_backward
from multiattn.block_mask import KEYS_OF_QUERIES, QUERIES_OF_KEYS, BlockSpec
from multiattn.cuda import BACKEND, mask_bits
from multiattn.cuda.axes import SPLIT_Q
from multiattn.cuda.bind import bind
from multiattn.cuda.cpu import host
from multiattn.cuda.decode_wgmma import SplitWgmmaConfig
from multiattn.cuda.family import areas_of
from multiattn.cuda.forward_mma import CudaConfig
from multiattn.cuda.forward_wgmma import SHAPES, WgmmaConfig
from multiattn.cuda.instances import launches_of
from multiattn.cuda.mask_bits import MaskBits
from multiattn.cuda.params import params_of
from multiattn.cuda.rules.hopper import WGMMA_RULES
from multiattn.cuda.source import BackwardParams, ForwardParams, WgmmaParams
from multiattn.cuda.variants import SPANNING, SPLIT_KEYS, SPLIT_KEYS_WGMMA, WGMMA, candidates
from multiattn.cuda.wgmma import tensor_maps
from multiattn.inspect.sass import hot_loops, parse, parted_arrivals
from multiattn.mask import CAUSAL, FULL, Band
from multiattn.operands import Operands
from multiattn.plan import abi, schedule
from multiattn.plan.arch import ARCHS, CPU
from multiattn.plan.backend import make_plan, plan_variant
from multiattn.plan.toolchain import disassemble
from multiattn.problem import Problem
from multiattn.run import calls
from multiattn.sequences import Batching
from parity import test_parity as parity
from parity.launch import launch_plan, prepare_case
from parity.launch import problem_of as case_problem
from parity.results import Contender

SM90 = ARCHS["sm90"]
FLIPPED = {
    **{"tile_m": 192, "cluster": 2, "tile_n": 80, "stages": 3, "scheduler": "static", "q_slots": 2},
    **{"q_in_registers": True, "pingpong": True, "lazy_max": True, "tma_store": False},
}


def problem_of(head_dim=64, **sizes):
    """Two sequences of four heads, two of keys; full, bf16, unless told otherwise."""
    given = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, **sizes}
    return Problem.contiguous(head_dim=head_dim, **given)


def plan_of(problem, config=CONFIG, arch=SM90, variant=WGMMA):
    """A Plan of the variant, with `config`."""
    return make_plan(BACKEND, problem, arch, variant=variant.name, config=config, probe=False)


# ---------------------------------------------------------------- configs


def test_a_config_without_a_variant_is_for_its_own():
    other = CudaConfig(tile_m=64, tile_n=32, warps=4, stages=2)
    assert make_plan(BACKEND, problem_of(), SM90, config=other, probe=False).variant == SPLIT_Q.name


def test_registers_are_output_scores_weights_and_kept_q():
    assert CONFIG.registers_at_least(problem_of(128)) == 64 + 32 + 16
    assert replace(CONFIG, tile_n=176).registers_at_least(problem_of(128)) == 64 + 88 + 44
    with_q = replace(CONFIG, q_in_registers=True)
    assert with_q.registers_at_least(problem_of(72)) == 36 + 32 + 16 + 20
    assert [with_q.kept_steps(problem_of(256, causal=it)) for it in (False, True)] == [5, 4]
    assert with_q.registers_at_least(problem_of(256)) == 128 + 32 + 16 + 20
    assert CONFIG.kept_steps(problem_of(72)) == 0
    three = replace(CONFIG, tile_m=192, tma_store=False)
    assert [three.registers_at_least(problem_of(144, causal=it)) for it in (False, True)] == [120, 140]


def test_the_suites_that_are_swept_have_a_head_dim_of_each_class():
    head_dims = {cell.head_dim for cell in (*SUITES["standard"], *SUITES["between"])}
    classes = [widest for widest, widest_v in SHAPES if widest == widest_v]
    assert [min(widest for widest in classes if it <= widest) for it in sorted(head_dims)] == classes


# ---------------------------------------------------------------- choice


def test_hopper_gets_it_with_a_rule_that_fits_and_no_other_arch():
    for head_dim, causal in itertools.product(range(8, 257, 8), (False, True)):
        plan = explain(problem_of(head_dim, causal=causal), backend="cuda", arch="sm90")
        assert plan.variant == WGMMA.name
        assert plan.workspace_bytes == (16 if plan.config.scheduler == "dynamic" else 0)
    for arch in ("sm80", "sm89", "sm100", "sm120"):
        assert explain(problem_of(), backend="cuda", arch=arch).variant == SPLIT_Q.name
    assert set(SPANNING) >= {WGMMA.name}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"alignment": 8}, "alignment: got 8 bytes; allowed base addresses and strides that are multiples of 16 bytes"),
        ({"strides_k": (2**40, 64, 64)}, f"strides: got k with a stride of {2**41} bytes; allowed multiples of 16"),
    ],
    ids=["unaligned", "a long stride"],
)
def test_what_tma_cannot_walk_is_refused_with_the_variant_that_can(changed, told):
    problem = replace(problem_of(), **changed)
    (reason,) = explain(problem, backend="cuda", variant=WGMMA.name, arch="sm90")
    assert told in str(reason)
    assert explain(problem, backend="cuda", arch="sm90").variant == SPLIT_Q.name


@pytest.mark.parametrize("reads_keys", [False, True], ids=["alibi", "bias"])
def test_modified_scores_have_rules_of_their_own_with_exact_maxima(reads_keys):
    """An expression may hide all that a block has, and takes registers that wide tiles have not left."""
    for head_dim, causal in itertools.product(range(8, 257, 8), (False, True)):
        problem = replace(problem_of(head_dim, causal=causal), score=example_score(reads_keys=reads_keys))
        plan = explain(problem, backend="cuda", arch="sm90")
        assert (plan.variant, plan.config.lazy_max) == (WGMMA.name, False)
        assert not reads_keys or plan.config.tile_n <= 64
        (reason,) = replace(plan.config, lazy_max=True).why_not(problem, SM90)
        assert (reason.got, reason.allowed) == ("lazy_max with an expression for scores", "exact maxima")
        assert not any(it.lazy_max for it in candidates(WGMMA, problem, SM90))


def test_on_a_cpu_it_must_be_named():
    plan = make_plan(BACKEND, problem_of(), CPU, probe=False)
    assert plan.variant == SPLIT_Q.name
    assert any("for callers that name the variant (emulated" in line for line in plan.rejected)
    assert make_plan(BACKEND, problem_of(), CPU, variant=WGMMA.name, probe=False).config == WGMMA_RULES[-1].config
    assert make_plan(BACKEND, cached(), CPU, probe=False).variant == SPLIT_KEYS.name
    assert make_plan(BACKEND, cached(), CPU, variant=SPLIT_KEYS_WGMMA.name, probe=False).config.tile_m == 128


# ---------------------------------------------------------------- kernels and parameters


def test_a_persistent_grid_is_as_large_as_the_device_and_of_whole_clusters():
    """Three tiles of queries are two clusters a head, of which the last has a block with nothing to do."""
    (launch,) = launches_of(plan_of(problem_of()))
    assert [launch.grid(it) for it in (4, 132)] == [4, 3 * 2 * 4]
    (launch,) = launches_of(plan_of(problem_of(), replace(CONFIG, scheduler="one_tile")))
    assert launch.grid(4) == 3 * 2 * 4
    plan = plan_of(problem_of(), replace(CONFIG, scheduler="static", cluster=2))
    (launch,) = launches_of(plan)
    assert [launch.grid(it) for it in (5, 132)] == [4, 4 * 2 * 4]
    assert (params_of(launches_of(plan)[-1], plan).forward.tiles, launch.kernel.cluster) == (4, 2)
    maps = tensor_maps(plan.problem, plan.config.box_rows(plan.problem))
    assert [it.box.extents[2] for it in maps.values()] == [128, 32, 32, 64]


@on_cpu
@pytest.mark.parametrize("kind", [ForwardParams, BackwardParams, WgmmaParams], ids=lambda kind: kind.__name__)
def test_parameters_lie_where_the_compiler_puts_them(kind):
    """Python reads their names and types from the header; how they are laid out it must know itself."""
    own = f"multiattn::{kind.__name__}"
    checks = [f"sizeof({own}) == {ctypes.sizeof(kind)}"]
    fields = [name for name, *_ in kind._fields_ if name != "_padding"]
    checks += [f"offsetof({own}, {name}) == {getattr(kind, name).offset}" for name in fields]
    source = '#include <cstddef>\n#include "multiattn/params.h"\n'
    source += "".join(f'static_assert({check}, "");\n' for check in checks)
    done = run_gxx(source, "-fsyntax-only")
    assert done.returncode == 0, done.stderr


def test_tensor_maps_are_those_of_the_tensors():
    q = torch.zeros(2, 300, 4, 72, dtype=torch.float16).transpose(1, 2)
    k = torch.zeros(2, 1, 500, 72, dtype=torch.float16).expand(2, 2, 500, 72)
    v = torch.zeros(2, 500, 2, 72, dtype=torch.float16).transpose(1, 2)
    problem = Problem.of(q, k, v)
    maps = tensor_maps(problem, replace(CONFIG, tile_n=80).box_rows(problem))
    assert list(maps) == ["q", "k", "v", "out"]
    assert (maps["q"].shape, maps["q"].strides) == ((2, 4, 300, 72), (300 * 4 * 144, 144, 4 * 144))
    assert (maps["k"].shape, maps["k"].strides) == ((2, 2, 500, 72), (500 * 144, 0, 144))
    assert (maps["v"].shape, maps["v"].strides) == ((2, 2, 500, 72), (500 * 288, 144, 288))
    assert [it.box.extents for it in maps.values()] == [(1, 1, rows, 64) for rows in (128, 80, 80, 64)]
    assert {(it.box.swizzle, it.box.dtype, it.l2_promotion) for it in maps.values()} == {(3, 6, 3)}
    assert list(tensor_maps(problem_of(), replace(CONFIG, tma_store=False).box_rows(problem_of()))) == ["q", "k", "v"]


# ---------------------------------------------------------------- caches: configs and choice


SPLIT = SplitWgmmaConfig(tile_m=128, tile_n=64, stages=4, splits=1)


def cached(page=64, *, head_dim=128, group=8, queries=16, **sizes):
    """Eight sequences of up to 8192 keys, and as many heads of keys; causal, bf16."""
    max_pages = -(-8192 // page) if page else 0
    spec = Batching.cached(8, 8 * max_pages or 8, page, max_pages)
    given = {"batch": 8, "heads_q": 8 * group, "heads_kv": 8, "seq_q": queries, "seq_kv": 8192, "causal": True, **sizes}
    return Problem.contiguous(head_dim=head_dim, batching=spec, **given)


@pytest.mark.parametrize(
    ("page", "tile_n", "rows"), [(None, 128, 128), (256, 128, 128), (64, 128, 64), (16, 128, 16), (48, 128, 16)]
)
def test_a_box_is_what_no_page_and_no_tile_ends_within(page, tile_n, rows):
    assert replace(SPLIT, tile_n=tile_n).keys_of_box(cached(page)) == rows


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


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_has_a_rule_that_fits(head_dim):
    for queries, page in itertools.product((8, 16, 512), (None, 5, 8, 16, 64)):
        plan = explain(cached(page, head_dim=head_dim, queries=queries), backend="cuda", arch="sm90")
        assert (plan.variant, plan.config.tile_m) == (SPLIT_KEYS_WGMMA.name, 64 if queries == 8 else 128)
        assert plan.config.stages * plan.config.tile_n * max(head_dim, 64) * 2 >= 85 << 10  # bytes on their way


def test_parts_are_merged_from_workspace():
    one, two = (plan_of(cached(), replace(SPLIT, splits=splits), variant=SPLIT_KEYS_WGMMA) for splits in (1, 2))
    assert [len(launches_of(it)) for it in (one, two)] == [1, 2]
    assert [set(areas_of(it)) for it in (one, two)] == [set(), {"partial_out", "partial_lse"}]
    tiles = 8 * 8  # of 128 rows, which are 16 queries of 8 heads
    assert [launches_of(it)[0].blocks for it in (one, two)] == [tiles, 2 * tiles]


# ---------------------------------------------------------------- run on the CPU

EMULATED = WGMMA_RULES[-1].config


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
    assert params_of(launches_of(plan)[-1], plan).forward.heads_per_section == 2


@on_cpu
@pytest.mark.parametrize("tma_store", [True, False])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 128), (64, 64)])
def test_k_and_v_may_have_buffers_of_their_own(head_dim, head_dim_v, tma_store):
    """Two tiles of queries see 4 and 8 blocks of keys, of which each of their two warpgroups skips some."""
    config = replace(EMULATED, stages=2, v_stages=1, lazy_max=True, tma_store=tma_store)
    sizes = {"seq_q": 256, "seq_kv": 256, "head_dim": head_dim, "head_dim_v": head_dim_v}
    _, _, counts = run_wgmma(config, window=(100, 0), **sizes)
    panels = head_dim // 64, (head_dim + head_dim_v) // 64  # of Q, of K and V
    assert counts.tma_loads == (2 * panels[0] + (4 + 8) * panels[1]) * 2 * 4


@on_cpu
@pytest.mark.parametrize("values", ["ascending", "descending", "twin_peaks"])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("blocks_document", replace(EMULATED, lazy_max=True, pingpong=True)),
        ("blocks_natten_2d", replace(EMULATED, lazy_max=True)),
        ("blocks_whole", replace(EMULATED, tile_m=64, teams=3, lazy_max=True)),
        ("varlen_blocks_uneven", replace(EMULATED, tile_m=64, teams=3, lazy_max=True)),
    ],
)
def test_maxima_of_listed_blocks_are_outgrown(name, config, values):
    """In full and in partial blocks, whose scores are then made again and hidden again."""
    changes = {"sinks": None, "values": values}
    if name in ("blocks_document", "blocks_natten_2d"):
        changes |= {"seq_q": 300, "seq_kv": 300, "blocks": (128, 128)}
    case = replace(BY_NAME[name], **changes)
    inputs, truth = prepare_case(case, CASES_DEVICE)
    plan = make_plan(BACKEND, case_problem(case, inputs), CPU, variant=WGMMA.name, config=config)
    for got, expected in zip(launch_plan(plan, inputs).all, truth.of_plan(plan), strict=True):
        expected.check(got, plan)


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
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("of", ["full_cut", pytest.param("by_head", marks=pytest.mark.nightly)])
def test_lists_of_tiles_by_the_rule_whatever_parity_deals(of, size):
    """Parity's turns may give the whole of a tile of two warpgroups, or the stages of each, to another case."""
    case = BY_NAME[f"blocks_of_{size}_{of}"]
    parity.test_parity(case, Contender(backend="cuda", variant=WGMMA.name), CASES_DEVICE)
    backward = Contender(backend="cuda", variant=WGMMA.name, direction="backward")
    parity.test_gradients(case, backward, "cuda", CASES_DEVICE)


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
    dense = {
        "tile_n: multiples of 16": {"tile_n": 72},
        "cluster: 1, 2": {"cluster": 3, "scheduler": "static"},
        "a cluster's blocks take their tiles together": {"cluster": 2},
        "stages: 3 to 16": {"stages": 2},
        "q_slots: 1 to 3": {"q_slots": 4},
        "tile_m: 128, 192": {"tile_m": 64},
    }
    of_caches = {
        "tile_m: 128, 192, of groups and lists also 64": {"tile_m": 256},
        "pingpong: of two warpgroups or three": {"tile_m": 64, "pingpong": True},
        "a lane for each box of a tile": {"tile_n": 160},
        "gathers: for two warpgroups": {"gathers": True, "tile_m": 192},
        "gathers: for two warpgroups, a lane for each key": {"gathers": True, "tile_n": 144, "stages": 3},
    }
    asked = (plan_of(problem_of()), dense), (plan_of(cached(8), SPLIT, variant=SPLIT_KEYS_WGMMA), of_caches)
    refused = {}
    for plan, cases in asked:
        for message, changed in cases.items():
            config = replace(plan.config, **changed)
            assert config.why_not(plan.problem, CPU)
            refused[message] = launches_of(replace(plan, config=config))[0].kernel.traits
    packed = replace(problem_of(), batch=1, batching=Batching.packed(2))
    (_, launch) = launches_of(replace(plan_of(packed), config=replace(CONFIG, cluster=2, scheduler="static")))
    refused["in a packed batch a cluster's tiles are of several sequences"] = launch.kernel.traits
    check_refused("forward_wgmma_traits.cuh", refused)


@on_cpu
@pytest.mark.parametrize("blocks", [None, BlockSpec(128, 64, has_full=True)], ids=["packed", "packed blocks"])
def test_the_most_buffers_leave_room_for_barriers(blocks):
    problem = replace(problem_of(window=(9, 9)), batch=1, batching=Batching.packed(2), blocks=blocks)
    problem = replace(problem, lists=((1, 1, 5), (1, 1, 5, 9)) * 4 if blocks else ())
    config = replace(CONFIG, tile_m=128 if blocks else 192, tile_n=128 if blocks else 64, stages=16, q_slots=3)
    (_, launch) = launches_of(replace(plan_of(problem), config=config.settled(problem, SM90)))
    source = f'#include "forward_wgmma_traits.cuh"\ntemplate struct multiattn::SharedLayout<{launch.kernel.traits}>;\n'
    assert run_gxx(source, "-fsyntax-only").stderr == ""


@with_nvrtc
@pytest.mark.parametrize(
    ("problem", "changed"),
    [
        pytest.param(cached(), {}, id="128 rows"),
        pytest.param(cached(), {"gathers": False}, id="128 rows in boxes", marks=pytest.mark.nightly),
        pytest.param(cached(16, queries=8), {}, id="64 rows", marks=pytest.mark.nightly),
        pytest.param(cached(16, queries=8), {"gathers": False}, id="64 rows in boxes"),
        pytest.param(cached(queries=512), {"tile_m": 192, "tile_n": 64, "stages": 10}, id="192 rows"),
        pytest.param(cached(None, head_dim=256, dtype="fp16"), {}, id="D=256", marks=pytest.mark.nightly),
    ],
)
def test_caches_compile_without_a_gpu(problem, changed):
    """With no spills in its loops, and with no warp that may part."""
    rule = plan_of(problem, None, variant=SPLIT_KEYS_WGMMA).config
    plan = plan_of(problem, replace(rule, splits=1, **changed), variant=SPLIT_KEYS_WGMMA)
    (compiled,) = BACKEND.forward.export(plan, ())
    assert compiled.dynamic_smem_bytes == plan.config.smem_bytes(problem)
    if (text := disassemble(compiled.cubin)) is not None:
        code = parse(text)
        assert not parted_arrivals(code)
        hot = {place for loop in hot_loops(code) for place in loop.body}
        assert hot
        assert not [code[place].name for place in hot if code[place].name.startswith(("LDL", "STL"))]


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


def test_bits_of_a_mask_say_what_its_expression_says(monkeypatch):
    """Bits of all blocks, of the first of each list, and of none, in both directions."""
    ids = torch.arange(300) // 70
    mask = block_mask(lambda b, h, i, j: (ids[i] + ids[j]) % 3 < 2, None, None, 300, 300, device="cpu", block_size=64)
    q, k, v, dout = (torch.randn(1, heads, 300, 64, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    found = []
    for most in (1 << 20, 6_000, 0):
        monkeypatch.setattr(mask_bits, "BYTES_MAX", most)
        calls._forward.clear(), calls._backward.clear()
        out, lse = fmha(q, k, v, block_mask=mask, backend="cuda", variant="wgmma", return_lse=True)
        given = {"block_mask": mask, "backend": "cuda", "variant": "wgmma"}
        found.append((out, lse, *fmha_backward(q, k, v, out, lse, dout, **given)))
    problem = explain(q, k, v, **given).problem
    assert MaskBits.of(problem, KEYS_OF_QUERIES, 32) is None  # no room
    monkeypatch.setattr(mask_bits, "BYTES_MAX", 6_000)
    assert all(not MaskBits.of(problem, *it).spec["all_bits"] for it in ((KEYS_OF_QUERIES, 32), (QUERIES_OF_KEYS, 64)))
    for one in found[:-1]:
        assert all(map(torch.equal, one, found[-1]))


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(0, 64), (64, 0)])
def test_a_mask_without_lists_has_no_bits(seq_q, seq_kv):
    q, k = (torch.empty(1, 4, it, 64, dtype=torch.bfloat16) for it in (seq_q, seq_kv))
    mask = block_mask(lambda b, h, i, j: i >= j, None, None, seq_q, seq_kv, device="cpu")
    for direction in ("forward", "backward"):
        plan = explain(q, k, k, block_mask=mask, backend="cuda", variant="wgmma", arch="sm90", direction=direction)
        assert "mask_bits" not in areas_of(plan)
