"""cuTile's forward: grids, orders of tiles, 64 bits, rules, candidates, and what it refuses. Parity has the numbers."""

import inspect
import itertools
import random
from dataclasses import replace

import pytest
import torch

import multiattn
from multiattn import Problem
from multiattn.cutile import families, forward, launches
from multiattn.cutile.bind import bind
from multiattn.cutile.forward import FAMILY, PIPELINES, widths_of
from multiattn.cutile.launches import Together
from multiattn.mask import FULL
from multiattn.operands import Operands
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS, Arch
from multiattn.plan.backend import find_variant, get, make_plan, plan_variant
from multiattn.plan.schedule import query_tiles

ct = pytest.importorskip("cuda.tile")

from cutile_checks import check, make_inputs  # noqa: E402 - needs cuda.tile

from multiattn.cutile.compile import get_kernel  # noqa: E402 - as above

BACKEND = get("cutile")
WAYS = [("forward", "full"), ("backward", "two_pass"), ("backward", "atomic")]
SMALL = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=64)


@pytest.mark.parametrize(
    ("wanted", "heads", "got"),
    [
        (1, 16, 1), (4, 16, 4), (8, 16, 8), (32, 8, 8), (8, 12, 6), (8, 11, 11), (8, 13, 13), (2, 21, 3), (2, 11, 1),
        (8, 21, 7), (8, 71, 1), (4, 1, 1), (6, 12, 6), (4, 32 * 1009, 4), (2, 9, 3),
    ],
)  # fmt: skip
def test_as_many_heads_together_as_divide_them(wanted, heads, got):
    assert launches.divisor_near(wanted, heads) == got


@pytest.mark.parametrize(
    ("wanted", "batch", "heads", "got"),
    [
        (8, 4, 16, Together(heads=8)), (32, 1, 8, Together(heads=8)), (32, 32, 8, Together(heads=32, entries=4)),
        (16, 16, 8, Together(heads=16, entries=2)), (15, 16, 8, Together(heads=8)), (8, 2, 11, Together(heads=11)),
        (8, 64, 1, Together(heads=8, entries=8)), (32, 3, 8, Together(heads=8)),
        (32, 6, 8, Together(heads=16, entries=2)),
        (32, 1009, 8, Together(heads=8)), (1, 5, 7, Together(heads=1)),
    ],
)  # fmt: skip
def test_heads_together_are_of_several_batch_entries_where_one_has_too_few(wanted, batch, heads, got):
    problem = Problem.contiguous(batch=batch, heads_q=heads, seq_q=64, head_dim=64, causal=True)
    config = FAMILY.config(tile_m=64, tile_n=64, heads_together=wanted)
    assert forward.together_of(problem, config) == got
    assert forward.together_of(replace(problem, band=FULL), config).entries == 1


@pytest.mark.parametrize("heads_together", [1, 3, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_every_order_of_tiles_covers_every_tile_of_a_linear_grid(heads_together, causal, monkeypatch):
    monkeypatch.setattr(forward, "is_linear", lambda *_: True)
    q, k, v = make_inputs(batch=2, heads_q=4, heads_kv=2, seq_kv=150, head_dim=16)
    config = FAMILY.config(tile_m=32, tile_n=16, heads_together=heads_together)
    check(config, q, k, v, causal=causal)  # the interpreter raises if two blocks own one tile


def test_a_product_and_a_shift_divide():
    made = random.Random(0)
    most = launches.MAX_QUOTIENT - 1
    for divisor in (*range(1, 2000), *(made.randrange(1, most) for _ in range(2000)), most):
        factor, shift = launches.reciprocal(divisor)
        assert 0 < factor < 2**31
        near = most // divisor * divisor
        for number in (0, 1, divisor - 1, divisor, most, near, near - 1, made.randrange(most)):
            assert number * factor >> shift == number // divisor


def test_grids_of_many_blocks():
    one, config = Together(heads=1), FAMILY.config(tile_m=64, tile_n=64)
    few = Problem.contiguous(batch=70_000, heads_q=4, seq_q=64, head_dim=8)
    assert launches.factor_grid(query_tiles(few, 64)) == (280_000, 1, 1)
    many = Problem.contiguous(batch=2**20, heads_q=64, seq_q=1, head_dim=8)
    x, y, _ = launches.factor_grid(query_tiles(many, 64))
    assert x * y == 2**26
    assert x <= launches.MAX_GRID_X
    assert forward.is_linear(few, config, one)
    assert not forward.is_linear(replace(few, batch=60_000), config, one)
    assert forward.is_linear(replace(few, batch=2**15, heads_q=2**14), config, Together(heads=1))
    assert launches.factor_grid(2**31 - 1) is None  # a prime
    assert launches.factor_grid(2**31 - 2**16) is not None
    assert launches.factor_grid(2**31) is None  # which a kernel would number in 32 bits


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
    assert launches.needs_64bit(problem) == launches.needs_64bit(problem, backward=True) == exceeds
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], probe=False)
    binding = bind(plan)
    assert binding.constants["int64"] == str(exceeds)
    of_arrays = binding.arguments[: 4 * 9 + 7]
    narrow = [it.value for it in of_arrays if isinstance(it, abi.Number) and it.kind == "i32"]
    assert bool(narrow) != exceeds
    assert all(value <= abi.INT32_MAX for value in narrow)


# ---------------------------------------------------------------- launches


@pytest.mark.parametrize("is_64bit", [False, True])
def test_a_launch_has_the_parameters_of_its_kernel_in_order(is_64bit, monkeypatch):
    if is_64bit:
        monkeypatch.setattr("multiattn.plan.abi.INT32_MAX", 0)
    for (direction, variant), has_dlse in itertools.product(WAYS, (False, True)):
        plan = make_plan(BACKEND, SMALL, ARCHS["sm90"], direction=direction, variant=variant, probe=False)
        for launch in families.launches_of(plan, has_dlse=has_dlse):
            kernel = get_kernel(launch)
            assert list(inspect.signature(kernel._pyfunc).parameters) == [
                *launch.arrays,
                *launch.optional,
                *launch.scalars,
            ]
            nodes = kernel._annotated_function.parameter_annotations
            for array, node in zip(launch.arrays.values(), nodes, strict=False):
                known = node.array or ct.ArrayAnnotation()
                assert (known.index_dtype, launch.is_64bit) == (ct.int64 if is_64bit else ct.int32, is_64bit)
                assert known.static_shape_dims == ((3,) if len(array.layout.shape) == 4 else ())


@pytest.mark.parametrize(("direction", "variant"), WAYS)
def test_cutile_itself_gets_the_strides_that_were_planned(direction, variant, monkeypatch):
    """PyTorch leaves the stride of a one-element dimension arbitrary, and cuTile would specialise on it."""
    from multiattn.cutile.launch import through_cutile

    launched = []
    monkeypatch.setattr("cuda.tile.launch", lambda stream, grid, kernel, args: launched.append((stream, args)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    q, k, v = make_inputs(seq_q=1)
    problem = Problem.of(q, k, v)
    odd = [q.as_strided(q.shape, (5, 64, 3, 1)), k.as_strided(k.shape, (7, 9, 64, 1)), v]
    row = torch.empty(q.shape[:3]).as_strided(q.shape[:3], (1, 1, 3))
    rest = (q, row, *map(torch.empty_like, (q, k, v))) if direction == "backward" else ()
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], direction=direction, variant=variant, probe=False)
    through_cutile(plan)(Operands(*odd, q, row, *rest))
    known = problem.layouts
    for launch, (stream, args) in zip(families.launches_of(plan, has_dlse=bool(rest)), launched, strict=True):
        assert stream == "stream"
        for name, tensor in zip(launch.tensors, args, strict=False):
            assert tensor.stride() == known[name].strides, name
            assert name not in "qkv" or tensor.data_ptr() == odd["qkv".index(name)].data_ptr()


def test_the_default_device_does_not_matter():
    q, k, v = make_inputs(head_dim=16)
    expected = multiattn.fmha(q, k, v, causal=True, backend="cutile")
    with torch.device("meta"):
        out = multiattn.fmha(q, k, v, causal=True, backend="cutile")
    assert torch.equal(out, expected)


# ---------------------------------------------------------------- rules and candidates


@pytest.mark.parametrize(("head_dim", "seq", "few"), [(256, 4096, False), (256, 8192, True), (128, 16384, True)])
def test_a_sweep_tries_few_heads_together_where_the_keys_of_four_crowd_l2(head_dim, seq, few):
    """The keys and values of one head are 4, 8 and 8 MiB, of an L2 of 50."""
    variant = find_variant(BACKEND, "full")
    problem = Problem.contiguous(batch=1, heads_q=16, seq_q=seq, head_dim=head_dim, causal=True)
    tried = BACKEND.forward.candidates(variant, problem, ARCHS["sm90"])
    heads = {config.heads_together for config in tried if config.lazy_max and config.scheduler == "one_tile"}
    assert heads == ({1, 2, 4, 8, 16, 32} if few else {4, 8, 16, 32})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [40, 64, 88, 112, 120, 128, 184, 208, 256])
def test_a_sweep_tries_what_the_rules_have(head_dim, dtype, causal):
    variant = find_variant(BACKEND, "full")
    for seq in (512, 1024, 2048, 3000, 4096, 8192, 16384):
        sizes = {"batch": 16384 // seq, "heads_q": 2048 // head_dim, "seq_q": seq, "head_dim": head_dim}
        problem = Problem.contiguous(**sizes, causal=causal, dtype=dtype)
        plan = make_plan(BACKEND, problem, ARCHS["sm90"], probe=False)
        assert plan.config in BACKEND.forward.candidates(variant, problem, ARCHS["sm90"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", range(40, 128, 16))
def test_keys_whose_rows_are_no_whole_sectors_are_read_by_tiles_of_128_queries(head_dim, dtype, causal):
    """Tiles of 64 read them twice as often, at half the rate: D=40 had 171 TFLOPS for 317."""
    for seq in (512, 1024, 3000, 4096, 16384):
        sizes = {"batch": 16384 // seq, "heads_q": 2048 // head_dim, "seq_q": seq, "head_dim": head_dim}
        problem = Problem.contiguous(**sizes, causal=causal, dtype=dtype)
        assert make_plan(BACKEND, problem, ARCHS["sm90"], probe=False).config.tile_m == 128


@pytest.mark.parametrize(
    ("head_dim", "causal", "parts"), [(88, True, 2), (104, True, 3), (200, True, 3), (72, False, 2)]
)
def test_head_dims_between_powers_of_two_have_parts(head_dim, causal, parts):
    problem = Problem.contiguous(batch=4, heads_q=16, seq_q=4096, head_dim=head_dim, causal=causal)
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], probe=False)
    assert sum(width > 0 for width in widths_of(problem, plan.config)) == parts
    assert plan.config in BACKEND.forward.candidates(find_variant(BACKEND, "full"), problem, ARCHS["sm90"])


# ---------------------------------------------------------------- refused


THIRD = "with split_head_dim, where three parts have fewer columns than two"


@pytest.mark.parametrize(
    ("change", "got", "allowed"),
    [
        ({"tile_m": 48}, "tile_m=48", "powers of two from 16"),
        ({"tile_n": 8}, "tile_n=8", "powers of two from 16"),
        ({"blocks_per_sm": 0}, "blocks_per_sm=0", "1 to 32"),
        ({"warps": 16}, "warps=16", "None, 4 or 8 (others need tileiras 13.5)"),
        ({"k_latency": 11}, "k_latency=11", "1 to 10"),
        ({"v_latency": 0}, "v_latency=0", "1 to 10"),
        ({"heads_together": 0}, "heads_together=0", "1 or more"),
        ({"pipeline": "pears"}, "pipeline=pears", ", ".join(PIPELINES)),
        ({"lazy_max": False, "pipeline": "pairs"}, "pipeline=pairs without lazy_max", "plain"),
        ({"scheduler": "dynamic"}, "scheduler=dynamic", "one_tile, static"),
        ({"q_in_registers": True, "arch": "sm103"}, "q_in_registers=True on sm103", "False"),
        ({"split_head_dim": True, "head_dim": 16}, "split_head_dim=True at head_dim=16", "more than 16"),
        ({"split_head_dim": True, "split_tail": True, "head_dim": 96}, "split_tail=True at head_dim=96", THIRD),
        ({"split_tail": True, "head_dim": 104}, "split_tail=True at head_dim=104", THIRD),
    ],
)
def test_configs_that_cannot_be(change, got, allowed):
    variant = find_variant(BACKEND, "full")
    problem = replace(SMALL, head_dim=change.pop("head_dim", 64))
    arch = ARCHS[change.pop("arch", "sm90")]
    config = FAMILY.config(**{"tile_m": 64, "tile_n": 64, "lazy_max": True, **change})
    reasons = plan_variant(BACKEND, variant, problem, arch, config)
    assert [(reason.code, reason.got, reason.allowed) for reason in reasons] == [("config", got, allowed)]


@pytest.mark.parametrize(("installed", "got"), [(None, "no cuda-tile"), ("1.2.0", "cuda-tile 1.2.0")])
def test_a_missing_module_is_a_reason(monkeypatch, installed, got):
    monkeypatch.setattr("multiattn.plan.toolchain.version_of", lambda _: installed)
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
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("multiattn.cutile._tileiras_version", lambda: "13.4.92")
    monkeypatch.setattr("multiattn.run.driver.load_driver", lambda: None)
    reasons = BACKEND.probe(Arch(name="gfx942", title="AMD GPU"))
    assert ("driver", "no NVIDIA driver") in [(reason.code, reason.got) for reason in reasons]
