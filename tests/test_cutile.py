"""cuTile's forward: grids, orders of tiles, 64 bits, rules, candidates, and what it refuses. Parity has the numbers."""

import inspect
import math
from dataclasses import replace

import pytest
import torch

import multiattn
from multiattn import Problem, reference
from multiattn.cutile import grid, table
from multiattn.cutile.bind import bind
from multiattn.cutile.configs import CutileConfig
from multiattn.cutile.grid import Together
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS, GPU_ARCHS, Arch
from multiattn.plan.backend import get, make_plan, plan_variant
from multiattn.problem import Operands

ct = pytest.importorskip("cuda.tile")

from cutile_checks import make_inputs  # noqa: E402 - needs cuda.tile

from multiattn.cutile.compile import get_kernel  # noqa: E402 - as above

BACKEND = get("cutile")
SMALL = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=64)


@pytest.mark.parametrize(
    ("wanted", "heads", "got"),
    [
        (1, 16, 1), (4, 16, 4), (8, 16, 8), (32, 8, 8), (8, 12, 6), (8, 11, 11), (8, 13, 13), (2, 21, 3), (2, 11, 1),
        (8, 21, 7), (8, 71, 1), (4, 1, 1), (6, 12, 6), (4, 32 * 1009, 4), (2, 9, 3),
    ],
)  # fmt: skip
def test_as_many_heads_together_as_divide_them(wanted, heads, got):
    assert grid.divisor_near(wanted, heads) == got


@pytest.mark.parametrize(
    ("wanted", "batch", "heads", "got"),
    [
        (8, 4, 16, Together(heads=8)), (32, 1, 8, Together(heads=8)), (32, 32, 8, Together(heads=32, spanning=True)),
        (16, 16, 8, Together(heads=16, spanning=True)), (15, 16, 8, Together(heads=8)), (8, 2, 11, Together(heads=11)),
        (8, 64, 1, Together(heads=8, spanning=True)), (32, 3, 8, Together(heads=8)),
        (32, 6, 8, Together(heads=16, spanning=True)),
        (32, 1009, 8, Together(heads=8)), (1, 5, 7, Together(heads=1)),
    ],
)  # fmt: skip
def test_heads_together_are_of_several_batch_entries_where_one_has_too_few(wanted, batch, heads, got):
    problem = Problem.contiguous(batch=batch, heads_q=heads, seq_q=64, head_dim=64, causal=True)
    config = CutileConfig(tile_m=64, tile_n=64, heads_together=wanted)
    assert grid.together_of(problem, config) == got
    assert not grid.together_of(replace(problem, causal=False), config).spanning


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("heads_together", [1, 3, 4, 8, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_every_order_of_tiles_covers_every_tile(heads_together, causal, linear, monkeypatch):
    if linear:
        monkeypatch.setattr(table, "is_linear", lambda *_: True)
    q, k, v = make_inputs(batch=2, heads_q=4, heads_kv=2, seq_kv=150, head_dim=16)
    config = CutileConfig(tile_m=32, tile_n=16, heads_together=heads_together)
    plan = make_plan(BACKEND, Problem.of(q, k, v, causal=causal), ARCHS["cpu"], config=config)
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:3], math.nan)
    multiattn.launch(plan, q, k, v, out, lse)  # the interpreter raises if two blocks own one tile
    truth, truth_lse = reference(q, k, v, causal=causal)
    torch.testing.assert_close(out.float(), truth, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, truth_lse, rtol=1e-5, atol=1e-5)


def test_grids_of_many_blocks():
    one, config = Together(heads=1), CutileConfig(tile_m=64, tile_n=64)
    few = Problem.contiguous(batch=70_000, heads_q=4, seq_q=64, head_dim=8)
    assert grid.factor_grid(grid.count_query_tiles(few, 64)) == (280_000, 1, 1)
    many = Problem.contiguous(batch=2**20, heads_q=64, seq_q=1, head_dim=8)
    x, y, _ = grid.factor_grid(grid.count_query_tiles(many, 64))
    assert x * y == 2**26
    assert x <= grid.MAX_GRID_X
    assert grid.is_linear(few, config, one)
    assert not grid.is_linear(replace(few, batch=60_000), config, one)
    assert grid.factor_grid(2**31 - 1) is None  # a prime
    assert grid.factor_grid(2**31 - 2**16) is not None
    assert grid.factor_grid(2**31) is None  # which a kernel would number in 32 bits


# ---------------------------------------------------------------- 64 bits


@pytest.mark.parametrize(
    ("sizes", "exceeds"),
    [
        ({"batch": 2, "seq_q": 2**22}, False),  # the last of 2^31 elements
        ({"batch": 2, "seq_q": 2**22 + 1}, True),
        ({"seq_q": 2**23 - 1}, False),
        ({"seq_q": 2**23}, True),  # whose only batch entry and head have strides all the same, of 2^31
    ],
)
def test_64_bit_exactly_when_an_offset_or_a_stride_needs_it(sizes, exceeds):
    problem = Problem.contiguous(**{"batch": 1, "heads_q": 1, "head_dim": 256, **sizes})
    assert table.needs_64bit(problem) == table.needs_64bit(problem, backward=True) == exceeds
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], probe=False)
    binding = bind(plan)
    assert binding.constants["int64"] == str(exceeds)
    narrow = [it.value for it in binding.arguments if isinstance(it, abi.Number) and it.kind == "i32"]
    assert bool(narrow) != exceeds
    assert all(value <= abi.INT32_MAX for value in narrow)


def test_the_64_bit_kernel_is_the_same_kernel(monkeypatch):
    q, k, v = make_inputs()
    expected = multiattn.fmha(q, k, v, causal=True, scale=0.11, backend="cutile")
    monkeypatch.setattr("multiattn.plan.abi.INT32_MAX", 0)
    plan = make_plan(BACKEND, Problem.of(q, k, v, causal=True, scale=0.11), ARCHS["cpu"])
    assert table.needs_64bit(plan.problem)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    multiattn.launch(plan, q, k, v, out, lse)
    assert torch.equal(out, expected)


# ---------------------------------------------------------------- launches


@pytest.mark.parametrize("is_64bit", [False, True])
def test_a_launch_has_the_parameters_of_its_kernel_in_order(is_64bit, monkeypatch):
    if is_64bit:
        monkeypatch.setattr("multiattn.plan.abi.INT32_MAX", 0)
    ways = [("forward", "full"), ("backward", "two_pass"), ("backward", "atomic")]
    for (direction, variant), has_dlse in ((way, has_dlse) for way in ways for has_dlse in (False, True)):
        plan = make_plan(BACKEND, SMALL, ARCHS["sm90"], direction=direction, variant=variant, probe=False)
        for launch in table.launches_of(plan, has_dlse=has_dlse):
            kernel = get_kernel(launch)
            assert list(inspect.signature(kernel._pyfunc).parameters) == [*launch.arrays, *launch.scalars]
            nodes = kernel._annotated_function.parameter_annotations
            for array, node in zip(launch.arrays.values(), nodes, strict=False):
                known = node.array or ct.ArrayAnnotation()
                assert (known.index_dtype, launch.is_64bit) == (ct.int64 if is_64bit else ct.int32, is_64bit)
                assert known.static_shape_dims == ((3,) if len(array.layout.shape) == 4 else ())


def test_cutile_itself_gets_the_strides_that_were_planned(monkeypatch):
    """PyTorch leaves the stride of a one-element dimension arbitrary, and cuTile would specialise on it."""
    from multiattn.cutile.launch import through_cutile

    launched = []
    monkeypatch.setattr("cuda.tile.launch", lambda stream, grid, kernel, args: launched.append((stream, args)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    q, k, v = make_inputs(seq_q=1)
    odd_q, odd_k = q.as_strided(q.shape, (5, 64, 3, 1)), k.as_strided(k.shape, (7, 9, 64, 1))
    problem = Problem.of(odd_q, odd_k, v)
    assert problem == Problem.of(q, k, v)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], probe=False)
    through_cutile(plan)(Operands(odd_q, odd_k, v, out, lse.as_strided(lse.shape, (1, 1, 3))))
    ((stream, args),) = launched
    assert stream == "stream"
    for got, given in zip(args, (q, k, v, out, lse), strict=False):
        assert got.stride() == given.stride()
        assert got.data_ptr() == given.data_ptr()
    assert args[2] is v


def test_the_default_device_does_not_matter():
    q, k, v = make_inputs(head_dim=16)
    expected = multiattn.fmha(q, k, v, causal=True, backend="cutile")
    with torch.device("meta"):
        out = multiattn.fmha(q, k, v, causal=True, backend="cutile")
    assert torch.equal(out, expected)


# ---------------------------------------------------------------- rules and candidates


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_arch_has_a_rule_for_every_head_dim(head_dim):
    problem = Problem.contiguous(batch=1, heads_q=8, seq_q=4096, head_dim=head_dim)
    for arch in ARCHS.values():
        plan = make_plan(BACKEND, problem, arch, probe=False)
        assert isinstance(plan.config, CutileConfig)
        assert plan.why


@pytest.mark.parametrize("name", GPU_ARCHS)
def test_queries_are_in_registers_where_products_take_any_from_there(name):
    (variant,) = BACKEND.forward.offered
    config = CutileConfig(tile_m=64, tile_n=64, q_in_registers=True)
    found = plan_variant(BACKEND, variant, SMALL, ARCHS[name], config)
    if name in ("sm100", "sm103"):
        assert [(it.got, it.allowed) for it in found] == [(f"q_in_registers=True on {name}", "False")]
    else:
        assert found.config == config


def test_candidates_are_distinct_and_fit():
    (variant,) = BACKEND.forward.offered
    for head_dim in (64, 128, 256):
        problem = Problem.contiguous(batch=4, heads_q=16, heads_kv=4, seq_q=4096, head_dim=head_dim, causal=True)
        for name in GPU_ARCHS:
            configs = BACKEND.forward.candidates(variant, problem, ARCHS[name])
            assert 12 <= len(configs) <= (190 if name == "sm90" else 20)
            assert len(set(configs)) == len(configs)


@pytest.mark.parametrize(("head_dim", "seq", "few"), [(256, 4096, False), (256, 8192, True), (128, 16384, True)])
def test_a_sweep_tries_few_heads_together_where_the_keys_of_four_crowd_l2(head_dim, seq, few):
    """The keys and values of one head are 4, 8 and 8 MiB, of an L2 of 50."""
    (variant,) = BACKEND.forward.offered
    problem = Problem.contiguous(batch=1, heads_q=16, seq_q=seq, head_dim=head_dim, causal=True)
    tried = BACKEND.forward.candidates(variant, problem, ARCHS["sm90"])
    heads = {config.heads_together for config in tried if config.lazy_max and config.scheduler == "one_tile"}
    assert heads == ({1, 2, 4, 8, 16, 32} if few else {4, 8, 16, 32})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sweep_tries_what_the_rules_have(head_dim, causal):
    (variant,) = BACKEND.forward.offered
    for seq in (512, 1024, 2048, 4096, 8192, 16384):
        sizes = {"batch": 16384 // seq, "heads_q": 2048 // head_dim, "seq_q": seq, "head_dim": head_dim}
        problem = Problem.contiguous(**sizes, causal=causal)
        plan = make_plan(BACKEND, problem, ARCHS["sm90"], probe=False)
        assert plan.config in BACKEND.forward.candidates(variant, problem, ARCHS["sm90"])


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"tile_m": 48}, "tile_m=48"),
        ({"tile_n": 8}, "tile_n=8"),
        ({"occupancy": 0}, "occupancy=0"),
        ({"num_worker_warps": 16}, "num_worker_warps=16"),
        ({"k_latency": 11}, "k_latency=11"),
        ({"v_latency": 0}, "v_latency=0"),
        ({"heads_together": 0}, "heads_together=0"),
        ({"lazy_max": True, "pipeline": "pears"}, "pipeline=pears"),
        ({"pipeline": "pairs"}, "pipeline=pairs without lazy_max"),
        ({"scheduler": "dynamic"}, "scheduler=dynamic"),
    ],
)
def test_configs_that_cannot_be(change, got):
    (variant,) = BACKEND.forward.offered
    config = CutileConfig(**{"tile_m": 64, "tile_n": 64, **change})
    (reason,) = plan_variant(BACKEND, variant, SMALL, ARCHS["sm90"], config)
    assert reason.code == "config"
    assert got in reason.got


@pytest.mark.parametrize(("installed", "got"), [(None, "no cuda-tile"), ("1.2.0", "cuda-tile 1.2.0")])
def test_a_missing_module_is_a_reason(monkeypatch, installed, got):
    monkeypatch.setattr("multiattn.cutile.version_of", lambda _: installed)
    for arch in (ARCHS["cpu"], ARCHS["sm90"]):
        reason = BACKEND.probe(arch)[0]
        assert (reason.code, reason.got) == ("module", got)
    assert BACKEND.versions()["tileiras"] is None


@pytest.mark.parametrize(("found", "got"), [(None, "no tileiras"), ("13.2.51", "tileiras 13.2.51")])
def test_a_missing_compiler_is_a_reason_only_where_it_is_needed(monkeypatch, found, got):
    monkeypatch.setattr("multiattn.cutile._tileiras_version", lambda: found)
    assert BACKEND.probe(ARCHS["cpu"]) == ()
    (reason,) = BACKEND.probe_compiler()
    assert (reason.code, reason.got) == ("compiler", got)
    assert reason in BACKEND.probe(ARCHS["sm90"])


def test_an_old_driver_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("multiattn.cutile._driver_version", lambda: (12, 8))
    monkeypatch.setattr("multiattn.cutile._tileiras_version", lambda: "13.4.92")
    (reason,) = BACKEND.probe(ARCHS["sm90"])
    assert (reason.code, reason.got) == ("driver", "a driver for CUDA 12.8")


def test_no_nvidia_driver_is_a_reason(monkeypatch):
    """As beside an AMD GPU, where torch too says that CUDA is available."""

    def not_found(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("multiattn.cutile._tileiras_version", lambda: "13.4.92")
    monkeypatch.setattr("multiattn.cutile.ctypes.CDLL", not_found)
    reasons = BACKEND.probe(Arch(name="gfx942", title="AMD GPU"))
    assert ("driver", "no libcuda.so.1") in [(reason.code, reason.got) for reason in reasons]
