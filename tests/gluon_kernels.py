"""Small kernels of Gluon, each for one thing that its interpreter does."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
