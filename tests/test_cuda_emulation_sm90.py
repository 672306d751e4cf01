"""What sm90 adds to the emulation: wgmma, TMA and barriers against plain arithmetic, and every mistake it finds."""

from __future__ import annotations

import ctypes
import math
import re
from pathlib import Path

import pytest
import torch

from multiattn.cuda.emulation import host, tensor_map
from multiattn.cuda.tools import probe_host

pytestmark = pytest.mark.skipif(bool(probe_host()), reason="; ".join(map(str, probe_host())))

UNITS = Path(__file__).parent / "cuda_units"
ALIGNMENT = 64
DEPTH = 72
COLUMNS = (8, 40, 64, 80, 128, 256)


class Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_ubyte * tensor_map.BYTES) for name in ("a", "b", "out")),
        ("c", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("row", ctypes.c_int32),
        ("column", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def library():
    return host.load(host.build_source(source("sm90.cpp")))


@pytest.fixture(scope="module")
def mistakes():
    return host.load(host.build_source(source("sm90_mistakes.cpp")))


def source(name):
    header = '#include "sm90.h"\n'
    text = (UNITS / name).read_text()
    assert header in text
    return text.replace(header, (UNITS / "sm90.h").read_text().replace("#pragma once\n", ""))


def encode(tensor, rows):
    """Of `tensor` [B, H, S, D]."""
    strides = tuple(2 * stride for stride in tensor.stride()[2::-1])
    return tensor_map.encode(tensor.data_ptr(), tuple(tensor.shape[::-1]), strides, rows)


def run(
    library, kernel, *, a=None, b=None, out=None, c=None, rows_b=64, row=0, column=0, threads=128, smem_bytes=49152,
    blocks=1, cluster=1,
):  # fmt: skip
    a, b, out = (torch.zeros(2, 2, 64, 64, dtype=torch.float16) if tensor is None else tensor for tensor in (a, b, out))
    c = torch.zeros(512) if c is None else c
    counter = torch.zeros(1, dtype=torch.int32)
    memory = ctypes.create_string_buffer(ctypes.sizeof(Arguments) + ALIGNMENT)
    arguments = Arguments.from_buffer(memory, -ctypes.addressof(memory) % ALIGNMENT)
    for name, tensor, rows in (("a", a, 64), ("b", b, rows_b), ("out", out, 64)):
        getattr(arguments, name)[:] = encode(tensor, rows)
    arguments.c, arguments.counter, arguments.row, arguments.column = c.data_ptr(), counter.data_ptr(), row, column
    sizes = {"blocks": blocks, "threads": threads, "smem_bytes": smem_bytes, "cluster": cluster}
    return c, host.run(library, kernel, arguments, **sizes)


def strided(*shape, dtype):
    """Random [B, H, S, D] in memory [S + 1, H, B, D + 8], where what is between is NaN."""
    batch, heads, rows, depth = shape
    memory = torch.full((rows + 1, heads, batch, depth + 8), math.nan, dtype=dtype)
    tensor = memory[:rows, ..., :depth].permute(2, 1, 0, 3)
    return tensor.copy_(torch.randn(shape))


def padded(matrix, rows, columns):
    return torch.nn.functional.pad(matrix.double(), (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["ss", "rs", "rs_mn"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_wgmma_multiplies_what_tma_loads(library, columns, kind, dtype):
    torch.manual_seed(columns)
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    a = strided(2, 2, 50, DEPTH, dtype=torch_dtype)
    rows_b, depth_b = (DEPTH, columns) if kind == "rs_mn" else (max(columns - 3, 1), DEPTH)
    b = strided(2, 2, rows_b, depth_b, dtype=torch_dtype)
    c = torch.randn(64, columns)
    added = (kind, dtype) in {("ss", "fp16"), ("rs", "bf16"), ("rs_mn", "fp16")}
    left, right = padded(a[1, 1], 64, DEPTH), b[1, 1].double() if kind == "rs_mn" else b[1, 1].double().T
    expected = left @ padded(right, DEPTH, columns) + (c.double() if added else 0)
    box_rows = 80 if kind == "rs_mn" else columns
    result, counters = run(library, f"{kind}_{dtype}_{columns}", a=a, b=b, c=c, rows_b=box_rows, smem_bytes=120_000)
    torch.testing.assert_close(result.double(), expected, atol=3e-5, rtol=1e-5)
    panels = math.ceil(columns / 64) if kind == "rs_mn" else 2
    assert (counters.wgmma, counters.tma_loads) == (5, 2 + panels)


def test_a_wait_for_some_groups_completes_the_oldest(library):
    a = torch.ones(2, 2, 64, 64, dtype=torch.float16)
    c, _ = run(library, "two_groups", a=a)
    assert (c[:128] == 16).all()


@pytest.mark.parametrize(("row", "column"), [(0, 0), (10, 24), (-5, -8), (40, 64), (70, 0), (0, 200)])
def test_tma_leaves_out_what_is_beyond_the_tensor(library, row, column):
    torch.manual_seed(0)
    a = strided(2, 2, 60, 88, dtype=torch.float16)
    out = strided(2, 2, 70, 72, dtype=torch.float16)
    expected = out.clone()
    into = (slice(max(at, 0), max(at, 0) + 64) for at in (row, column))
    place = expected[1, 1][tuple(into)]
    around = torch.nn.functional.pad(a[1, 1], (64, 300, 64, 200))  # zeros around it
    place[:] = around[64 + row :, 64 + column :][: place.shape[0], : place.shape[1]]
    _, counters = run(library, "copy_box", a=a, out=out, row=row, column=column)
    assert torch.equal(out, expected)
    assert (counters.tma_loads, counters.tma_stores) == (1, 1)


def test_tma_stores_what_threads_wrote(library):
    out = torch.full((1, 2, 61, 56), math.nan, dtype=torch.float16)
    run(library, "write_box", out=out, a=out)
    row, column = torch.arange(61)[:, None], torch.arange(56)[None]
    expected = torch.where(column % 2 == 0, row, column - 1).half()
    assert torch.equal(out, expected.expand(1, 2, 61, 56))


def test_a_ring_of_slots_turns(library):
    a = torch.randn(1, 1, 70, 64).half()
    c, _ = run(library, "ring", a=a, threads=160)
    rows = torch.arange(128) % 64
    expected = sum(a[0, 0, rows + i, 0].float() + 1000 * i if i < 7 else 0 for i in range(7))
    torch.testing.assert_close(c[:128], expected)


def test_blocks_of_a_cluster_fill_a_ring_together(library):
    b = torch.randn(1, 1, 70, 64).half()
    c, counters = run(library, "cluster_ring", b=b, rows_b=32, threads=160, blocks=4, cluster=2)
    rows = torch.arange(64)
    sums = sum(b[0, 0, rows + i, 0].float() if i < 5 else 0 for i in range(5))
    torch.testing.assert_close(
        c.view(4, 2, 64), torch.tensor([0, 1000, 0, 1000])[:, None, None] + sums.expand(4, 2, 64)
    )
    assert (counters.blocks, counters.tma_loads) == (4, 4 * 5)


def test_a_grid_is_of_whole_clusters(library):
    with pytest.raises(host.EmulationError, match="a grid of 3 blocks, which are no whole clusters of 2"):
        run(library, "cluster_ring", rows_b=32, threads=160, blocks=3, cluster=2)


def test_warpgroups_take_turns(library):
    c, _ = run(library, "turns", threads=256)
    assert c[:8].tolist() == [0, 1] * 4


def test_registers_are_raised_when_others_have_lowered_theirs(library):
    c, _ = run(library, "registers", threads=384)
    assert torch.equal(c[:384], (torch.arange(384) // 32 * 32).float())


def test_stmatrix_writes_what_ldmatrix_reads_and_a_predicate_chooses_who_stores(library):
    c, _ = run(library, "matrices", threads=32)
    assert c[:128].tolist() == list(range(128))
    assert c[128:132].tolist() == [4 * lane + 2 for lane in range(20, 24)]  # matrix 2: rows 0 to 7 of the next chunk
    assert c[132:137].tolist() == [1.0, 2.0, 3.0, 4.0, 3.25]


def test_tickets_are_unique(library):
    c, _ = run(library, "tickets")
    assert c[:128].tolist() == [2 * i + 1 for i in range(128)]
    threads = range(128)
    assert c[128:256].tolist() == [max(2 * i, 3) << 16 | max(i, 2) for i in threads]


MISTAKES = {
    "arrival_without_init": "mbarrier_arrive: there is no mbarrier at 16384: mbarrier_init is missing",
    "wait_without_init": "mbarrier_wait: there is no mbarrier at 16384",
    "expectation_without_init": "mbarrier_arrive_expect: there is no mbarrier at 16384",
    "init_not_seen": "thread 64: mbarrier_arrive: no barrier follows the mbarrier_init of 16384",
    "init_twice": "mbarrier_init: the mbarrier at 16384 exists already",
    "misaligned_mbarrier": "mbarrier_init: address 16388 is not aligned to 8 bytes",
    "mbarrier_of_nobody": "mbarrier_init: a count of 0",
    "too_many_mbarriers": "mbarrier_init: the emulation has no more than 64 mbarriers",
    "too_many_arrivals": "more arrivals than the 1 of a phase at the mbarrier(16384, phase 0: 1 of 1 arrivals, ",
    "bytes_never_come": "in mbarrier_wait(16384, phase 0: 1 of 1 arrivals, 8192 bytes missing);",
    "too_many_bytes": "tma_load: more bytes than expected came to the mbarrier(16384, phase 0: ",
    "wait_for_nobody": "deadlock: threads 0-127 in mbarrier_wait(16384, phase 0: 1 of 2 arrivals, 0 bytes missing);",
    "odd_parity": "mbarrier_wait: a parity of 2",
    "phase_missed": "mbarrier_wait: the phase after the one waited for has gone by, too: mbarrier(16384, phase 2",
    "matrix_outside": "stmatrix_x4: address 49152 is outside the 49152 bytes of shared memory",
    "matrix_of_half_a_warp": "thread 16: returns while its warp waits in stmatrix_x4",
    "misaligned_tile": "tma_load: address 512 is not aligned to 1024 bytes",
    "tile_outside": "tma_load: address 41984 is outside the 49152 bytes of shared memory",
    "mbarrier_not_fenced": "tma_load: no fence_mbarrier_init follows the mbarrier_init of 16384",
    "load_without_mbarrier": "tma_load: there is no mbarrier at 16384",
    "mbarrier_overwritten": "tma_load: overwrites the mbarrier at 16384",
    "no_map": "prefetch_map: the tensor map is none of the emulation's",
    "misaligned_map": "prefetch_map: the tensor map is not aligned to 64 bytes",
    "load_read_too_early": "reads a TMA load under way at shared address 256",
    "load_read_after_another_wait": "reads, without a wait on its mbarrier, what a TMA load wrote at shared",
    "load_overwritten_too_early": "overwrites a TMA load under way at shared address 128",
    "load_over_a_load": "tma_load: overwrites a TMA load under way at shared address 0",
    "load_over_what_is_read": "tma_load: overwrites, with no barrier between, what was read by thread 0 at",
    "load_after_a_lonely_arrival": "tma_load: overwrites, with no barrier between, what was read by thread 1 at",
    "load_over_what_is_written": "tma_load: overwrites, with no barrier between, what was written by thread 0",
    "load_left_behind": "returns, the last thread of the block, with TMA loads under way",
    "store_not_fenced": "tma_store: reads, with no fence_async_shared after it, what thread 0 wrote",
    "store_fenced_too_late": "tma_store: reads, with no barrier after its fence_async_shared, what thread 0 wrote",
    "store_without_barrier": "tma_store: reads, with no barrier after its fence_async_shared, what thread 0 wrote",
    "store_of_a_load_under_way": "tma_store: reads a TMA load under way",
    "store_of_a_load_not_waited_for": "tma_store: reads, without a wait on its mbarrier, what a TMA load wrote",
    "store_before_the_tensor": "tma_store: begins before the tensor, which is an illegal instruction",
    "stored_memory_overwritten": "overwrites what a TMA store under way reads at shared address 4096",
    "load_over_stored_memory": "tma_load: overwrites what a TMA store under way reads",
    "stored_memory_overwritten_by_others": "overwrites, with no barrier between, what was read by thread 0",
    "store_not_waited_for": "returns without a wait for its TMA stores to read shared memory",
    "store_not_committed": "returns without a wait for its TMA stores to read shared memory",
    "wgmma_of_a_load_under_way": "wgmma_ss: reads a TMA load under way",
    "wgmma_without_wait_on_mbarrier": "wgmma_ss: reads, without a wait on its mbarrier, what a TMA load wrote",
    "wgmma_of_writes_not_fenced": "wgmma_ss: reads, with no fence_async_shared after it, what thread 0 wrote",
    "wgmma_of_writes_without_barrier": "wgmma_ss: reads, with no barrier after its fence_async_shared, what thread",
    "wgmma_diverges": "divergent warpgroup: this thread is in wgmma_ss, another one in wgmma_commit",
    "wgmma_missing_in_a_warp": "divergent warpgroup: this thread is in wgmma_wait, another one in wgmma_fence",
    "wgmma_descriptors_differ": "wgmma_ss: the threads of the warpgroup differ in its descriptors or constants",
    "wgmma_threads_missing": "wgmma_fence: needs all 128 threads of the warpgroup; 32 returned",
    "wgmma_left_by_a_thread": "thread 127: returns while its warpgroup waits in wgmma_wait",
    "wgmma_of_half_a_warpgroup": "wgmma_fence: the thread is in no whole warpgroup of 128",
    "wgmma_not_waited_for": "returns with wgmmas under way",
    "wgmma_not_committed": "returns with wgmmas under way",
    "wgmma_diverges_from_a_warps_collective": "this lane is in wgmma_wait, another one in sync_warp",
    "wgmma_outside": "wgmma_ss: address 49152 is outside the 49152 bytes of shared memory",
    "wgmma_without_swizzle": "wgmma_ss: a descriptor without the 128-byte swizzle",
    "wgmma_with_base_offset": "wgmma_ss: a descriptor with a base offset",
    "weights_changed_under_way": "wgmma_wait: thread 100 changed operand A of a wgmma_rs under way",
    "sums_changed_under_way": "wgmma_wait: thread 100 wrote accumulators of a wgmma under way",
    "sums_overlap": "wgmma_ss: accumulators that are a part of another wgmma's under way",
    "sums_elsewhere": "wgmma_ss: accumulators at another place than in the warpgroup's other threads",
    "load_over_what_wgmma_reads": "tma_load: overwrites what a wgmma under way reads",
    "write_over_what_wgmma_reads": "store_shared_4: overwrites what a wgmma under way reads",
    "load_before_all_warps_are_done": "tma_load: overwrites, with no barrier between, what a wgmma of warpgroup 0",
    "barrier_zero": "named_barrier_sync: a barrier 0, there are 1 to 15",
    "barrier_sixteen": "named_barrier_arrive: a barrier 16, there are 1 to 15",
    "barrier_of_48": "named_barrier_sync: 48 threads: a multiple of 32",
    "barrier_of_more_than_there_are": "named_barrier_sync: 160 threads: a multiple of 32, as many as the block has",
    "barrier_counts_differ": "named_barrier_sync: barrier 1 is of 96 threads here, of 128 elsewhere",
    "barrier_met_twice": "named_barrier_arrive: barrier 1 is not complete, and the warp comes to it once more",
    "barrier_of_parts_of_warps": "named_barrier_sync: barrier 1 got 16 lanes of a warp",
    "barrier_incomplete": "deadlock: threads 0-63 in named_barrier_sync(64 of 128 threads are there);",
    "barrier_against_a_warps_collective": "this lane is in named_barrier_sync, another one in sync_warp",
    "registers_of_no_unit": "lower_registers: 25 registers: a multiple of 8 from 24 to 256",
    "too_few_registers": "lower_registers: 16 registers: a multiple of 8 from 24 to 256",
    "too_many_registers": "raise_registers: 264 registers: a multiple of 8 from 24 to 256",
    "lowered_upwards": "lower_registers: 176 registers a thread, where the warpgroup has 168",
    "raised_downwards": "raise_registers: 160 registers a thread, where the warpgroup has 168",
    "registers_differ": "lower_registers: the threads of the warpgroup differ in its descriptors or constants",
    "registers_nobody_has": "in raise_registers(64 a thread are free)",
    "load_before_earlier_grids_have_ended": "await_earlier_grids: global memory was touched before it",
    "ticket_before_earlier_grids_have_ended": "await_earlier_grids: global memory was touched before it",
    "read_across_barriers_of_others": "reads, with no barrier between, what was written by thread 0",
    "read_of_a_late_write": "reads, with no barrier between, what was written by thread 0",
    "overwritten_before_all_have_read": "overwrites, with no barrier between, what was read by thread 0",
}


MISTAKES_OF_CLUSTERS = {
    "arrival_before_the_other_block_has_begun": "thread 0: mbarrier_arrive_if: no barrier follows the mbarrier_init",
    "arrival_at_no_block": "mbarrier_arrive_if: a rank of 2 in a cluster of 2",
    "arrival_at_a_block_that_has_ended": "block 0, thread 0: mbarrier_arrive_if: block 1 of the cluster has ended",
    "load_over_what_the_other_block_reads": "block 0, thread 0: tma_load_to_all: overwrites a TMA load under way",
    "address_of_the_other_block": "block 1, thread 0: store_shared_4: address 0 is outside the 49152 bytes of shared",
    "mbarrier_of_a_cluster_not_fenced": "mbarrier_arrive_if: no barrier follows the mbarrier_init of",
    "memory_read_after_meeting_the_cluster": "load_shared_4: reads, with no barrier between, what was written by",
    "cluster_incomplete": "deadlock: threads 0-31 in meet_cluster; threads 32-63 in mbarrier_wait(278528, ",
}


THREADS = {
    name: int(threads)
    for name, threads in re.findall(r"^(?:CLUSTER_)?MISTAKE\((\w+), (\d+)\)", source("sm90_mistakes.cpp"), re.M)
}


@pytest.mark.parametrize("kernel", MISTAKES)
def test_a_mistake_is_an_error_that_says_where(mistakes, kernel):
    with pytest.raises(host.EmulationError, match=rf"{kernel}: block 0, thread \d+: ") as raised:
        run(mistakes, kernel, threads=THREADS[kernel])
    assert MISTAKES[kernel] in str(raised.value)
    run(mistakes, "nothing", threads=THREADS[kernel])  # and nothing is broken by it


@pytest.mark.parametrize("kernel", MISTAKES_OF_CLUSTERS)
def test_a_mistake_of_a_cluster_is_an_error_that_says_where(mistakes, kernel):
    with pytest.raises(host.EmulationError) as raised:
        run(mistakes, kernel, threads=THREADS[kernel], blocks=2, cluster=2)
    assert MISTAKES_OF_CLUSTERS[kernel] in str(raised.value)


def test_every_kernel_of_a_mistake_is_run():
    assert {*THREADS} == {*MISTAKES, *MISTAKES_OF_CLUSTERS, "nothing", "checked_map"}


@pytest.mark.parametrize(
    ("strides", "offset", "rows", "message"),
    [
        ((120, 128, 128), 0, 64, "has a stride of 120 bytes, no multiple of 16"),
        ((128, 128, 128), 8, 64, "has an address that is not aligned to 16 bytes"),
        ((128, 128, 128), 0, 264, "has a box of 264 rows, beyond 256"),
    ],
)
def test_a_map_that_the_driver_would_refuse_is_an_error(mistakes, monkeypatch, strides, offset, rows, message):
    def spoilt(tensor, _):
        return tensor_map.encode(tensor.data_ptr() // 16 * 16 + offset, tuple(tensor.shape[::-1]), strides, rows)

    monkeypatch.setitem(globals(), "encode", spoilt)
    with pytest.raises(host.EmulationError, match=message):
        run(mistakes, "checked_map")
