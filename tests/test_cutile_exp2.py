"""cuTile's exponentials on the FMA units: the polynomial and its share of a tile, interpreted and as compiled."""

import math
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace

import exp2_model as exp2
import numpy as np
import pytest
import torch

from multiattn import Problem
from multiattn.cutile.configs import PIPELINES, CutileConfig
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.plan.exp2_fma import is_polynomial

ct = pytest.importorskip("cuda.tile")

from cutile_checks import check, grow, make_inputs  # noqa: E402 - needs cuda.tile
from cutile_checks import launch as attend  # noqa: E402 - as above

from multiattn.cutile.cpu import launch  # noqa: E402 - as above
from multiattn.cutile.kernels.exp2 import exp2_fma, exp2_shared, is_on_fma  # noqa: E402 - as above
from multiattn.plan.toolchain import find_cuobjdump, resource_usage  # noqa: E402 - as above

BACKEND = get("cutile")
CONFIG = CutileConfig(tile_m=32, tile_n=32, lazy_max=True, exp2_fma_fraction=1 / 2)
TILE = 1024
FP32_ROUNDING = 2**-24

needs_compiler = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()) or find_cuobjdump() is None, reason="needs tileiras and cuobjdump"
)


@ct.kernel
def powers(x, y):
    i = ct.bid(0)
    ct.store(y, (i,), exp2_fma(ct.load(x, (i,), (TILE,))))


@ct.kernel
def shared_powers(x, y, chosen, sixteenths: ct.Constant[int]):
    tile = ct.load(x, (0, 0), x.shape)
    ct.store(y, (0, 0), exp2_shared(tile, sixteenths, True))
    ct.store(chosen, (0, 0), is_on_fma(tile.shape, sixteenths).astype(ct.int32))


def interpret(x):
    """`exp2_fma` of the kernel."""
    padded = np.zeros(-(-x.size // TILE) * TILE, dtype=np.float32)
    padded[: x.size] = x
    y = torch.full((padded.size,), math.nan)
    launch((padded.size // TILE,), powers, (torch.from_numpy(padded), y))
    return y.numpy()[: x.size]


def test_the_polynomial_is_the_model_but_for_what_contraction_saves():
    """The interpreter rounds each of its four products, the compiler none: by at most half a ulp of 2 each."""
    x = exp2.samples(-140, 127)
    got, expected = interpret(x).astype(np.float64), exp2.exp2_fma(x).astype(np.float64)
    assert (np.abs(got - expected) <= 2 * 4 * FP32_ROUNDING * expected).all()
    normal = x[x >= -126]
    errors = np.abs(interpret(normal) / np.exp2(normal.astype(np.float64)) - 1)
    assert 0.8 * exp2.MAX_ERROR[4] < errors.max() < exp2.MAX_ERROR[4] + 2 * 4 * FP32_ROUNDING


def test_the_polynomial_is_exact_at_whole_numbers_and_saturates():
    whole = np.arange(-126, 128, dtype=np.float32)
    assert np.array_equal(interpret(whole), np.ldexp(np.float32(1), whole.astype(int)))
    large = np.array([127.5, 128, 300, 1e6, 3e38, np.inf], dtype=np.float32)
    assert (interpret(large) == np.float32(2.0**127)).all()
    small = np.array([-126.5, -127, -128, -1e6, -3e38, -np.inf], dtype=np.float32)
    assert not interpret(small).any()
    assert not np.signbit(interpret(small)).any()
    assert np.isnan(interpret(np.array([np.nan, -np.nan], dtype=np.float32))).all()


@pytest.mark.parametrize(("tile_n", "sixteenths"), [(16, 4), (16, 8), (32, 2), (32, 6), *((64, i) for i in range(9))])
def test_a_thread_has_the_share_that_is_asked_for(tile_n, sixteenths):
    """The accumulator of mma.sync and wgmma: lane t has columns 2 (t % 4) and the next of rows t / 4 and that + 8."""
    x, chosen = torch.full((64, tile_n), 0.3), torch.full((64, tile_n), -1, dtype=torch.int32)
    y = torch.full_like(x, math.nan)
    launch((1,), shared_powers, (x, y, chosen, sixteenths))
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        row, column = 16 * warp + lane // 4, 2 * (lane % 4)
        pairs = [chosen[row + 8 * h, 8 * j + column : 8 * j + column + 2] for j in range(tile_n // 8) for h in (0, 1)]
        assert [pair.tolist() for pair in pairs] == [2 * [is_polynomial(i, sixteenths)] for i in range(len(pairs))]
    assert chosen.sum().item() == 64 * tile_n * sixteenths // 16
    polynomial = interpret(np.array([0.3], dtype=np.float32))[0]
    assert polynomial != torch.exp2(torch.tensor(0.3)).item()
    assert torch.equal(y == polynomial.item(), chosen == 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_attention(pipeline, causal):
    check(replace(CONFIG, pipeline=pipeline), *make_inputs(seq_q=64, seq_kv=113, head_dim=40), causal=causal)


@pytest.mark.parametrize(("dtype", "start"), [(torch.bfloat16, 40), (torch.float16, 100), (torch.bfloat16, 180)])
def test_scores_that_grow_by_hundreds_are_caught(start, dtype):
    """Beyond the exponent of fp32 a polynomial that did not saturate would give any weight, and none too large."""
    q, k, v = make_inputs(dtype=dtype, spread=4.0)
    check(CONFIG, q, grow(k, start=start, factor=20.0), v, causal=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_does_what_it_does_with_ex2(name, value):
    tensors = dict(zip("qkv", make_inputs(head_dim=16), strict=True))
    tensors[name][:, :, 80, 5] = value
    for ours, theirs in zip(
        attend(CONFIG, **tensors, causal=True),
        attend(replace(CONFIG, exp2_fma_fraction=0.0), **tensors, causal=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2, equal_nan=True)


def test_the_kernel_has_the_share_of_its_config():
    """The same weights but for the error of the polynomial: lse differs, and by no more than that."""
    tensors = make_inputs(seq_q=64, seq_kv=128)
    _, exact = attend(replace(CONFIG, exp2_fma_fraction=0.0), *tensors)
    _, lse = attend(CONFIG, *tensors)
    assert not torch.equal(lse, exact)
    bound = exp2.MAX_ERROR[4] + 2 * 4 * FP32_ROUNDING
    # A row's sums differ by rounding, too, an ulp of lse at most.
    assert ((lse - exact).abs() <= bound + exact.abs() * 2**-23).all()


@pytest.mark.parametrize("causal", [False, True])
def test_a_sweep_tries_it_where_ex2_is_scarce(causal):
    (variant,) = BACKEND.forward.offered
    for head_dim in (64, 128):
        problem = Problem.contiguous(batch=4, heads_q=8, seq_q=4096, head_dim=head_dim, causal=causal)
        found = {config.exp2_fma_sixteenths for config in BACKEND.forward.candidates(variant, problem, ARCHS["sm90"])}
        assert found == ({0, 1, 2} if head_dim == 64 else {0})


# ---------------------------------------------------------------- what the compiler makes of it


def compile_one(config):
    """A rule's kernel at D=64, and how often each instruction stands in it."""
    problem = Problem.contiguous(batch=4, heads_q=32, seq_q=4096, head_dim=64)
    plan = make_plan(BACKEND, problem, ARCHS["sm90"], config=config, probe=False)
    (compiled,) = BACKEND.forward.export(plan, ())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        command = [find_cuobjdump(), "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?\s*(\S+)", text)), resource_usage(compiled.cubin)


@needs_compiler
def test_hopper_saves_ex2_and_moves_nothing():
    """In each of two loops, over blocks of keys and over those of what is done again, which has all of ex2."""
    config = CutileConfig(tile_m=64, tile_n=64, occupancy=4, heads_together=4, lazy_max=True)
    plain, before = compile_one(config)
    shared, after = compile_one(replace(config, exp2_fma_fraction=3 / 16))
    saved = plain["MUFU.EX2"] - shared["MUFU.EX2"]
    assert saved > 0
    assert saved % 6 == 0
    assert shared["FFMA"] == plain["FFMA"] + 4 * saved  # contracted, as the model has it
    moves = [
        sum(count for name, count in it.items() if name.startswith(("SHFL", "LDS", "STS"))) for it in (plain, shared)
    ]
    assert moves[0] == moves[1]
    assert after.registers == before.registers
    assert after.stack_bytes <= 24  # no rule has a share on the FMA units
    assert after.smem_bytes <= before.smem_bytes + 64 * 64 * 2  # one more block of keys in flight
