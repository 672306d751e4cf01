"""The interpreter of Gluon by small kernels: arithmetic, layouts, PTX, shared memory, TMA, partitions."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
import triton
from gluon_kernels import (
    SWIZZLED,
    add_four,
    copy,
    count,
    divide,
    mismatch,
    mix,
    multiply,
    pack,
    read_undefined,
    reduce,
    share,
)
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from multiattn.plan.support import OutOfBoundsError
from multiattn.triton.cpu.gluon import run
from multiattn.triton.cpu.gluon.errors import BarrierError, GluonError, LayoutError, RaceError

# ---------------------------------------------------------------- arithmetic


def test_integers_wrap_and_are_divided_towards_zero():
    x, y = torch.arange(-64, 64, dtype=torch.int32) * 1000, torch.arange(128, dtype=torch.int32) % 7 - 9
    quotients, remainders, wrapped = (torch.zeros_like(x) for _ in range(3))
    run(divide, 1, x, y, quotients, remainders, wrapped, 70001)
    assert torch.equal(quotients, torch.div(x, y, rounding_mode="trunc"))
    assert torch.equal(remainders, torch.fmod(x, y))
    assert torch.equal(wrapped[1:], (x * 65537)[1:])
    wrapping = (70001 * 65537 + (1 << 31)) % (1 << 32) - (1 << 31)
    assert wrapped[0] == -(wrapping // 3)


def test_sixteen_bits_are_rounded_and_wider_ones_win():
    half, single = torch.randn(128, dtype=torch.bfloat16), torch.randn(128)
    out = torch.empty(128)
    run(mix, 1, half, single, out, 0.1)
    assert torch.equal(out, (half * 1.3).float() + single * 0.1)


def test_reductions_and_shapes():
    x = torch.randn(16, 32)
    x[3, 5], x[4] = torch.nan, torch.nan
    sums, most = torch.empty(32), torch.empty(16)
    run(reduce, 1, x, sums, most)
    expected = x.nan_to_num(-9).amax(1)
    expected[4] = torch.nan  # only where there is nothing else
    torch.testing.assert_close(most, expected, equal_nan=True)
    torch.testing.assert_close(sums, x.sum(1).repeat(2), equal_nan=True)


MISMATCHES = ("other layouts", "other dimension", "other warps", "other rank")


@pytest.mark.parametrize("kind", MISMATCHES)
def test_layouts_that_do_not_fit_are_refused(kind):
    with pytest.raises(LayoutError, match=r"\[at gluon_kernels.py:\d+ in mismatch\]"):
        run(mismatch, 1, torch.zeros(16, dtype=torch.int32), kind)


@pytest.mark.parametrize("kind", [*MISMATCHES, "a condition of many", "nothing"])
def test_gluons_compiler_refuses_the_same(kind):
    source = GluonASTSource(mismatch, {"x": "*i32", "KIND": "constexpr"}, {(1,): kind}, {})
    with pytest.raises((CompilationError, RuntimeError)) if kind != "nothing" else contextlib.nullcontext():
        triton.compile(source, target=GPUTarget("cuda", 90, 32))


def test_a_block_is_no_condition():
    with pytest.raises(GluonError, match="its elements may differ"):
        run(mismatch, 1, torch.zeros(16, dtype=torch.int32), "a condition of many")


# ---------------------------------------------------------------- memory


def test_atomics_and_bounds():
    counter, hits, values = (torch.zeros(it, dtype=torch.int32) for it in (1, 2, 3))
    run(count, 3, counter, hits, values, 3)
    assert (counter.item(), hits.tolist(), values.tolist()) == (3, [192, 108], [30, 31, 32])
    with pytest.raises(OutOfBoundsError, match="load in program 0: 1 of 4 active lanes"):
        run(count, 1, torch.zeros_like(counter), hits, values, 4)


def test_what_a_mask_leaves_out_is_undefined():
    out = torch.zeros(256)
    run(read_undefined, 1, torch.ones(5), out)
    assert out[:5].eq(1).all()
    assert out[5:128].isnan().all()
    assert out[133:].eq(2).all()


# ---------------------------------------------------------------- PTX


def test_ptx_of_packed_elements_and_of_masks():
    x = torch.randn(64, 64)
    packed, hidden = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, 64)
    run(pack, 1, x, packed, hidden)
    assert torch.equal(packed, x.bfloat16() * 2)
    distance = torch.arange(64)[None, :] - torch.arange(64)[:, None]
    assert torch.equal(hidden, torch.where((distance >= 0) & (distance < 5), x, -torch.inf))


@pytest.mark.parametrize(("copies", "warps"), [(1, [8, 1]), (2, [16, 1])])
def test_ptx_that_writes_is_done_by_every_thread(copies, warps):
    """By threads that have copies of an element, too: what a GPU does, and hardly what was meant."""
    layout = gl.BlockedLayout([1, 4], [2, 16], warps, [1, 0])
    sums, x = torch.zeros(16, 64), torch.randn(16, 64)
    run(add_four, 1, sums, x, 0, layout, num_warps=warps[0])
    assert torch.equal(sums, copies * x)


def test_ptx_refuses_addresses_that_are_not_aligned_or_outside():
    layout = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    for offset in (1, 4):
        with pytest.raises(OutOfBoundsError):
            run(add_four, 1, torch.zeros(16, 64), torch.randn(16, 64), offset, layout)


# ---------------------------------------------------------------- shared memory, TMA and products


def maps():
    source, target = torch.randn(70, 80).bfloat16(), torch.zeros(70, 80).bfloat16()
    described = [TensorDescriptor.from_tensor(it, [64, 64], SWIZZLED.value) for it in (source, target)]
    return source, target, *described


def test_a_box_outside_of_its_tensor_is_zeros_and_is_not_stored():
    source, target, *described = maps()
    run(copy, 1, *described, "")
    expected = torch.zeros(64, 64).bfloat16()
    expected[3:, :40] = 2 * source[:61, 40:]
    assert torch.equal(target[:64, 16:], expected)
    assert not target[64:].any()
    assert not target[:, :16].any()


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("read too early", RaceError, "conflicts with a write by TMA, which is under way"),
        ("no parity", BarrierError, "parity: got 2"),
        ("no fence", RaceError, "without a fence_async_shared"),
        ("written too early", RaceError, "conflicts with a store by TMA"),
        ("no more", BarrierError, "no mbarrier was made"),
    ],
)
def test_shared_memory_that_is_used_too_early_or_too_late(kind, error, says):
    with pytest.raises(error, match=says):
        run(copy, 1, *maps()[2:], kind)


def test_products_in_a_row():
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    out = torch.empty(64, 64)
    run(multiply, 1, a, b, out, "")
    torch.testing.assert_close(out, a.float() @ b.float() + a.float() @ b.float().T)


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("no fence", RaceError, "a product's read .* without a fence_async_shared"),
        ("no operand", LayoutError, "first operand: got"),
        ("overwritten", RaceError, "a write of .* conflicts with a product's read"),
        ("no wait", RaceError, "the result of a product is used before"),
        ("a wait for the first alone", RaceError, "the result of a product is used before"),
    ],
)
def test_products_that_are_not_waited_for(kind, error, says):
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    with pytest.raises(error, match=says):
        run(multiply, 1, a, b, torch.empty(64, 64), kind)


# ---------------------------------------------------------------- partitions


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_two_partitions_write_and_meet_at_a_barrier(seed):
    out = torch.empty(513)
    run(share, 1, out, 8, "each thread arrives", seed=seed)
    assert torch.equal(out[:512].view(16, 32), torch.tensor([0.0, 8.0]).repeat_interleave(8)[:, None].expand(16, 32))
    assert out[512] == 7


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(
    ("second", "kind", "error", "says"),
    [
        (8, "nothing", RaceError, "a read of buffer 0 .*(nothing orders before it|was never written)"),
        (4, "each thread arrives", RaceError, "a write of buffer 0 .* conflicts with a write of .*nothing orders"),
        (8, "each thread arrives, but no fence", RaceError, "no release, without a fence_async_shared after a write"),
        (8, "each thread adds an arrival", BarrierError, "increment_count: got True .* allowed False"),
    ],
)
def test_two_partitions_in_each_others_way(second, kind, error, says, seed):
    with pytest.raises(error, match=f"(?s){says}"):
        run(share, 1, torch.empty(513), second, kind, seed=seed)


@pytest.mark.nightly  # a process of its own
def test_libtriton_has_nothing_to_report_when_python_ends():
    """Neither what tests froze nor what Gluon's layouts lead to outlives Python."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-q",
        "-p",
        "no:cacheprovider",
        f"{__file__}::test_reductions_and_shapes",
    ]
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False, timeout=120)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "nanobind" not in done.stdout + done.stderr
