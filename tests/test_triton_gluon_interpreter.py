"""The interpreter of Gluon by small kernels: arithmetic, layouts, PTX, shared memory, TMA, partitions."""

# ruff: noqa: N803, SIM102, SIM108 - constexprs are upper case, and one of two ifs may be the compiler's

import contextlib
import os
import subprocess
import sys

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from multiattn.plan.support import OutOfBoundsError
from multiattn.triton.cpu.gluon import run
from multiattn.triton.cpu.gluon.errors import BarrierError, GluonError, LayoutError, RaceError

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


# ---------------------------------------------------------------- arithmetic


@gluon.jit
def divide(x, y, quotients, remainders, wrapped, number):
    at = gl.arange(0, 128, LINE)
    a, b = gl.load(x + at), gl.load(y + at)
    gl.store(quotients + at, a // b)
    gl.store(remainders + at, a % b)
    gl.store(wrapped + at, a * 65537)
    gl.store(wrapped, number * 65537 // -3)


@gluon.jit
def mix(half, single, out, factor):
    at = gl.arange(0, 128, LINE)
    rounded = gl.load(half + at) * 1.3  # a number takes the other's type
    gl.store(out + at, rounded + gl.load(single + at) * factor)


@gluon.jit
def reduce(x, sums, most):
    rows = gl.arange(0, 16, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, 32, gl.SliceLayout(0, TILE))
    tile = gl.load(x + rows[:, None] * 32 + columns[None, :])
    gl.store(most + rows, gl.max(tile, 1))
    by_parts = gl.sum(gl.sum(tile.reshape([16, 4, 8]), 2), 1)
    gl.store(sums + rows, gl.convert_layout(by_parts, gl.SliceLayout(1, TILE)))
    gl.store(sums + 16 + rows, gl.sum(tile.permute((1, 0)).permute((1, 0)), 1))


@gluon.jit
def mismatch(x, KIND: gl.constexpr):
    rows = gl.arange(0, 16, gl.SliceLayout(1, TILE))
    if KIND == "other layouts":
        gl.store(x + rows, gl.arange(0, 16, gl.SliceLayout(1, ACC)))
    if KIND == "other dimension":
        rows = rows[None, :]
    if KIND == "other warps":
        gl.arange(0, 64, gl.BlockedLayout([1], [32], [2], [0]))
    if KIND == "other rank":
        gl.full([16, 32], 0, gl.int32, LINE)
    if KIND == "a condition of many":
        if rows > 3:
            gl.store(x + rows, rows)


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
    with pytest.raises(LayoutError, match=r"\[at test_triton_gluon_interpreter.py:\d+ in mismatch\]"):
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


@gluon.jit
def count(counter, hits, values, LANES: gl.constexpr):
    at = gl.arange(0, 128, LINE)
    gl.atomic_add(hits + at // 64, 1, mask=at < 100)
    ticket = gl.atomic_add(counter, 1)
    gl.store(values + ticket, gl.program_id(0) + 10 * gl.num_programs(0))
    gl.load(values + at, mask=at < LANES)


@gluon.jit
def read_undefined(x, out):
    at = gl.arange(0, 128, LINE)
    gl.store(out + at, gl.load(x + at, mask=at < 5))
    gl.store(out + 128 + at, gl.load(x + at, mask=at < 5, other=2.0))


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


@gluon.jit
def pack(x, packed, hidden):
    rows = gl.arange(0, 64, gl.SliceLayout(1, ACC))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, ACC))[None, :]
    tile = gl.load(x + rows * 64 + columns)
    halves = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [tile], gl.bfloat16, is_pure=True, pack=2
    )
    doubled = gl.inline_asm_elementwise(
        "{.reg .b32 t; mov.b32 t, $1; add.rn.bf16x2 $0, t, t;}", "=r,r", [halves], gl.bfloat16, is_pure=True, pack=2
    )
    gl.store(packed + rows * 64 + columns, doubled)
    seen = gl.inline_asm_elementwise(
        "{.reg .pred p; setp.lt.u32 p, $2, 5; selp.f32 $0, $1, 0fFF800000, p;}", "=f,f,r", [tile, columns - rows],
        gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    gl.store(hidden + rows * 64 + columns, seen)


@gluon.jit
def add_four(sums, x, OFFSET: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11}; // $0 $1 $2 $3 $5 $6 $7",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [sums + OFFSET + rows * 64 + columns, gl.load(x + rows * 64 + columns)],
        gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


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


@gluon.jit
def copy(source, target, KIND: gl.constexpr):
    """A box of 64 x 64 by way of shared memory."""
    buffer = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, 64 * 64 * 2)
    tma_load(source, [-3, 40], full, buffer)
    if KIND == "read too early":
        buffer.load(ACC)
    mbarrier.wait(full, 2 if KIND == "no parity" else 0)
    tile = buffer.load(ACC)
    buffer.store(tile + tile)
    if KIND != "no fence":
        fence_async_shared()
    tma_store(target, [0, 16], buffer)
    if KIND == "written too early":
        buffer.store(tile)
    tma.store_wait(0)
    mbarrier.invalidate(full)
    if KIND == "no more":
        mbarrier.arrive(full)


@gluon.jit
def multiply(a, b, out, KIND: gl.constexpr):
    rows = gl.arange(0, 64, gl.SliceLayout(1, ACC))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, ACC))[None, :]
    at = rows * 64 + columns
    right = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SWIZZLED, gl.load(b + at))
    if KIND != "no fence":
        fence_async_shared()
    left = gl.load(a + at)
    if KIND == "no operand":
        warpgroup_mma(left, right, gl.full([64, 64], 0.0, gl.float32, ACC))
    left = gl.convert_layout(left, gl.DotOperandLayout(0, ACC, 2))
    zeros = gl.full([64, 64], 0.0, gl.float32, ACC)
    once = warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
    twice = warpgroup_mma(left, right.permute((1, 0)), once, is_async=True)
    if KIND == "overwritten":
        right.store(gl.load(a + at))
    if KIND == "no wait":
        gl.store(out + at, twice)
    if KIND == "a wait for the first alone":
        twice = warpgroup_mma_wait(1, [twice])
    else:
        twice = warpgroup_mma_wait(0, [twice])
    gl.store(out + at, twice)


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


@gluon.jit
def write_rows(buffer, there, FIRST: gl.constexpr, KIND: gl.constexpr):
    buffer.slice(FIRST, 8).store(gl.full([8, 32], FIRST, gl.float32, TILE))
    if KIND == "each thread arrives":
        fence_async_shared()
    if (KIND == "each thread arrives") | (KIND == "each thread arrives, but no fence"):
        async_copy.mbarrier_arrive(there, increment_count=False)
        mbarrier.wait(there, 0)
    if KIND == "each thread adds an arrival":
        async_copy.mbarrier_arrive(there, increment_count=True)


@gluon.jit
def write_first(buffer, there, out, FIRST: gl.constexpr, KIND: gl.constexpr):
    write_rows(buffer, there, FIRST, KIND)
    rows = gl.arange(0, 16, gl.SliceLayout(1, TILE))[:, None]
    columns = gl.arange(0, 32, gl.SliceLayout(0, TILE))[None, :]
    gl.store(out + rows * 32 + columns, buffer.load(TILE))
    return FIRST + 7


@gluon.jit
def share(out, SECOND: gl.constexpr, KIND: gl.constexpr):
    buffer = gl.allocate_shared_memory(gl.float32, [16, 32], PLAIN)
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(there, count=256)
    result = gl.warp_specialize(
        [(write_first, (buffer, there, out, 0, KIND)), (write_rows, (buffer, there, SECOND, KIND))], [4], [128]
    )
    gl.store(out + 512, result)


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
    one_test = f"{__file__}::test_reductions_and_shapes"
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", one_test]
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False, timeout=120)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "nanobind" not in done.stdout + done.stderr
