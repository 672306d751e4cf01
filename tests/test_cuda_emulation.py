"""The emulation of a GPU: its verbs and masks against plain arithmetic, and every mistake that it finds."""

import ctypes
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from cuda_runs import on_cpu

from multiattn.cuda.cpu import host
from multiattn.mask import CAUSAL, FULL, Band
from multiattn.plan.abi import TENSOR_MAP_BYTES, Box, TensorMap

pytestmark = on_cpu

UNITS = Path(__file__).parent / "cuda_units"
ALIGNMENT = 64
DEPTH = 72
COLUMNS = (8, 40, 64, 80, 128, 256)


class Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_ubyte * TENSOR_MAP_BYTES) for name in ("a", "b", "out")),
        ("c", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("row", ctypes.c_int32),
        ("column", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def library():
    return host.load(host.build_source(source("verbs.cpp")))


@pytest.fixture(scope="module")
def mistakes():
    return host.load(host.build_source(MISTAKES_SOURCE))


def source(name):
    """A file with what both of them share."""
    shared = (UNITS / "shared.h").read_text().replace("#pragma once\n", "")
    return (UNITS / name).read_text().replace('#include "shared.h"\n', shared)


def encode(tensor, rows, *, strides=None, address=None):
    """The map of `tensor` [B, H, S, D], or of one that is laid out otherwise."""
    strides = tuple(2 * stride for stride in tensor.stride()[:3]) if strides is None else strides
    box = Box(extents=(1, 1, rows, 64), swizzle=3, dtype=6)
    made = TensorMap(tensor="q", shape=tuple(tensor.shape), strides=strides, box=box)
    return host.encode_map(made, tensor.data_ptr() if address is None else address)


def run(
    library, kernel, *, a=None, b=None, out=None, c=None, rows_a=64, rows_b=64, row=0, column=0, threads=128,
    smem_bytes=49152, blocks=1, cluster=1,
):  # fmt: skip
    a, b, out = (torch.zeros(2, 2, 64, 64, dtype=torch.float16) if tensor is None else tensor for tensor in (a, b, out))
    c = torch.zeros(512) if c is None else c.clone()
    counter = torch.zeros(1, dtype=torch.int32)
    memory = ctypes.create_string_buffer(ctypes.sizeof(Arguments) + ALIGNMENT)
    arguments = Arguments.from_buffer(memory, -ctypes.addressof(memory) % ALIGNMENT)
    for name, tensor, rows in (("a", a, rows_a), ("b", b, rows_b), ("out", out, 64)):
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
@pytest.mark.parametrize("kind", ["ss", "ss_mn", "rs", "rs_mn"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_wgmma_multiplies_what_tma_loads(library, columns, kind, dtype):
    torch.manual_seed(columns)
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    a_mn, b_mn = kind == "ss_mn", kind.endswith("mn")
    a = strided(2, 2, *((DEPTH, 48) if a_mn else (50, DEPTH)), dtype=torch_dtype)
    rows_b, depth_b = (DEPTH, columns) if b_mn else (max(columns - 3, 1), DEPTH)
    b = strided(2, 2, rows_b, depth_b, dtype=torch_dtype)
    c = torch.randn(64, columns)
    added = (kind, dtype) in {("ss", "fp16"), ("ss_mn", "bf16"), ("rs", "bf16"), ("rs_mn", "fp16")}
    left, right = a[1, 1].T if a_mn else a[1, 1], b[1, 1] if b_mn else b[1, 1].T
    expected = padded(left, 64, DEPTH) @ padded(right, DEPTH, columns) + (c.double() if added else 0)
    boxes = {"rows_a": 80 if a_mn else 64, "rows_b": 80 if b_mn else columns}
    result, counters = run(library, f"{kind}_{dtype}_{columns}", a=a, b=b, c=c, smem_bytes=120_000, **boxes)
    torch.testing.assert_close(result.double(), expected, atol=3e-5, rtol=1e-5)
    assert counters.tma_loads == (1 if a_mn else 2) + (math.ceil(columns / 64) if b_mn else 2)


THREADS = torch.arange(128.0)
LANES = 31.0 - torch.arange(32) // 2
KERNELS = {
    # a wait for some groups completes the oldest
    "two_groups": ({"a": torch.ones(2, 2, 64, 64, dtype=torch.float16)}, torch.full((128,), 16.0)),
    # a bulk load copies bytes as they are when somebody waits
    "copy_run": ({"c": torch.arange(256.0)}, THREADS.where(THREADS != 1, 2.0).repeat(2)),
    # a bulk add adds floats when its thread waits: at the end the older group alone was added
    "add_runs": ({"c": torch.full((512,), 0.5)}, 0.5 + torch.cat([THREADS, 2 * THREADS, torch.full((2,), 0.5)])),
    # stmatrix writes what ldmatrix reads, of matrix 2 rows 0 to 7 of the next chunk; a predicate chooses who stores
    "matrices": ({"threads": 32}, torch.cat([THREADS, 4 * THREADS[20:24] + 2, torch.tensor([1.0, 2, 3, 4, 3.25])])),
    "vote": (
        {"threads": 64},
        torch.cat([torch.arange(32.0).long() ^ 3, 100 + (torch.arange(32, 64) ^ 3), LANES, 32 + LANES]).float(),
    ),
    "read_unwritten": ({"threads": 32}, torch.full((32,), math.nan)),
    "tickets": (
        {},
        torch.cat([2 * THREADS + 1, torch.tensor([float(max(2 * i, 3) << 16 | max(i, 2)) for i in range(128)])]),
    ),
    # who takes a ticket gives way: to the next block, or the last one there
    "tickets_of_blocks": ({"blocks": 3, "threads": 32}, torch.tensor([0.0, 1, 1, 1, 1])),
    "turns": (
        {"c": torch.ones(5), "blocks": 4, "threads": 32},
        torch.tensor([2 * (2 * (2 * (2.0 * 1 + 1) + 0) + 3) + 2, 6, 3, 12, 9]),
    ),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_verbs_are_plain_arithmetic(library, kernel):
    options, expected = KERNELS[kernel]
    c, counters = run(library, kernel, **options)
    torch.testing.assert_close(c[: len(expected)], expected, rtol=0, atol=0, equal_nan=True)
    assert kernel != "copy_run" or counters.tma_loads == 0  # which counts boxes


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
    run(library, "copy_box", a=a, out=out, row=row, column=column)
    assert torch.equal(out, expected)


def test_tma_stores_what_threads_wrote(library):
    out = torch.full((1, 2, 61, 56), math.nan, dtype=torch.float16)
    run(library, "write_box", out=out, a=out)
    row, column = torch.arange(61)[:, None], torch.arange(56)[None]
    expected = torch.where(column % 2 == 0, row, column - 1).half()
    assert torch.equal(out, expected.expand(1, 2, 61, 56))


def test_a_grid_is_of_whole_clusters(mistakes):
    with pytest.raises(host.EmulationError, match="a grid of 3 blocks, which are no whole clusters of 2"):
        run(mistakes, "nothing", blocks=3, cluster=2)


def test_rounding_is_to_nearest_even_and_keeps_what_is_not_finite(library):
    values = torch.tensor(
        [0.0, -0.0, 1.0, 1 + 2**-11, 1 + 3 * 2**-11, 65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2**-24,
         2.0**-14 - 2.0**-26, -3.14159, 1e-30, 3.3e38, math.inf, -math.inf, 1e38, 1 + 2**-8, 1 + 3 * 2**-9,
         6.1e-5, 0.1, 1 / 3, -2.5e-7, 12345.678, -1e-8, 5e-8, 100.0, 1000.0, 2049.0, 2051.0, 0.5]
    )  # fmt: skip
    c, _ = run(library, "round_floats", c=torch.cat([values, torch.zeros(32)]), threads=32)
    for half, dtype in zip(c.to(torch.int64).split(32), (torch.float16, torch.bfloat16), strict=True):
        assert torch.equal(half, values.to(dtype).view(torch.int16).to(torch.int64) & 0xFFFF)


def test_what_does_not_compile_is_an_error_with_the_compilers_words():
    with pytest.raises(host.BuildError, match="no_such_verb"):
        host.build_source('#include "multiattn/ptx.cuh"\nint x = no_such_verb();\n')


MISTAKES_SOURCE = source("mistakes.cpp")
# The kernel, its threads where they are not 128, and the error; of a cluster where it says so.
MISTAKES = [
    (name, int(threads or 128), bool(cluster), error)
    for cluster, threads, name, error in re.findall(
        r'^(CLUSTER_)?MISTAKE(?:_OF|_AT_BARRIER)?\((?:(\d+), )?(\w+), "(.*)"\) \{', MISTAKES_SOURCE, re.MULTILINE
    )
]


def test_no_mistake_is_left_out():
    assert len(MISTAKES) == len(re.findall(r"^(?:CLUSTER_)?MISTAKE", MISTAKES_SOURCE, re.MULTILINE)) == 115


@pytest.mark.parametrize(("kernel", "threads", "cluster", "error"), MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_a_mistake_is_an_error_that_says_where(mistakes, kernel, threads, cluster, error):
    with pytest.raises(host.EmulationError, match=rf"{kernel}: block \d, thread \d+: ") as raised:
        run(mistakes, kernel, threads=threads, blocks=1 + cluster, cluster=1 + cluster)
    assert error in str(raised.value)
    run(mistakes, "nothing", threads=threads)  # and nothing is broken by it


def test_a_deadlock_says_what_each_block_waits_for(mistakes):
    """It names those that are there."""
    with pytest.raises(host.EmulationError, match=r"block 0, .* await_global\(5, .*\nblock 1, .* await_global\(6, "):
        run(mistakes, "awaits_what_nobody_adds", threads=32, blocks=3)


@pytest.mark.parametrize(
    ("strides", "offset", "rows", "message"),
    [
        ((128, 128, 120), 0, 64, "has a stride of 120 bytes, no multiple of 16"),
        ((128, 128, 128), 8, 64, "has an address that is not aligned to 16 bytes"),
        ((128, 128, 128), 0, 264, "has a box of 264 rows, beyond 256"),
    ],
)
def test_a_map_that_the_driver_would_refuse_is_an_error(mistakes, monkeypatch, strides, offset, rows, message):
    def spoilt(tensor, _):
        return made(tensor, rows, strides=strides, address=tensor.data_ptr() // 16 * 16 + offset)

    made = encode
    monkeypatch.setitem(globals(), "encode", spoilt)
    with pytest.raises(host.EmulationError, match=message):
        run(mistakes, "checked_map")


# ---------------------------------------------------------------- masks, and the blocks that loops walk over


TILE = 4  # of blocks that are walked over, and of the tile that walks
SOURCE = f"""
#include "multiattn/mask.cuh"

using namespace multiattn;

struct Sizes {{
  int seq_q, seq_kv, left, right;
}};

template <Band BAND>
void ask(const Sizes& sizes, int* visible, int* all, int* keys, int* queries) {{
  const Mask<BAND> mask(sizes);
  const int rows = (sizes.seq_q + {TILE - 1}) / {TILE}, columns = (sizes.seq_kv + {TILE - 1}) / {TILE};
  for (int i = 0; i < sizes.seq_q; ++i)
    for (int j = 0; j < columns * {TILE}; ++j) *visible++ = mask.visible(i, j);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) *all++ = mask.all_visible(i * {TILE}, {TILE}, j * {TILE}, {TILE});
  const auto put = [](int*& out, const Blocks& it) {{
    for (int bound : {{it.begin, it.full_begin, it.full_end, it.end}}) *out++ = bound;
  }};
  for (int i = 0; i < rows; ++i) put(keys, mask.template keys<{TILE}>(i * {TILE}, {TILE}));
  for (int j = 0; j < columns; ++j) put(queries, mask.template queries<{TILE}>(j * {TILE}, {TILE}, rows));
}}

extern "C" void ask_full(const Sizes& it, int* a, int* b, int* c, int* d) {{ ask<Band::FULL>(it, a, b, c, d); }}
extern "C" void ask_causal(const Sizes& it, int* a, int* b, int* c, int* d) {{ ask<Band::CAUSAL>(it, a, b, c, d); }}
extern "C" void ask_two_sided(const Sizes& it, int* a, int* b, int* c, int* d) {{
  ask<Band::TWO_SIDED>(it, a, b, c, d);
}}
"""

BANDS = (FULL, CAUSAL, *(Band(*it) for it in itertools.product((0, 1, 3, 4, 9, None), repeat=2) if it != (None, None)))
LENGTHS = list(itertools.product((1, 3, 4, 9, 22), repeat=2))


@pytest.fixture(scope="module")
def masks():
    return host.load(host.build_source(SOURCE))


def check_blocks(bounds, seen):
    """`seen` is what each row of a tile sees. Blocks that any row sees are walked over, those that all see are full.

    The last block may be short.
    """
    begin, full_begin, full_end, end = bounds
    assert 0 <= begin <= full_begin <= full_end <= end
    blocks = seen.split(TILE, dim=1)
    some, every = (torch.tensor([bool(test(block)) for block in blocks]) for test in (torch.any, torch.all))
    places = torch.arange(len(blocks))
    assert torch.equal((places >= begin) & (places < end), some)
    assert torch.equal((places >= full_begin) & (places < full_end), every)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_blocks_are_those_that_are_seen(masks, band):
    for seq_q, seq_kv in LENGTHS:
        rows, columns = -(-seq_q // TILE), -(-seq_kv // TILE)
        sizes = (ctypes.c_int32 * 4)(seq_q, seq_kv, *band.reach(seq_q, seq_kv))
        shapes = (seq_q, columns * TILE), (rows, columns), (rows, 4), (columns, 4)
        found = [torch.full(shape, -1, dtype=torch.int32) for shape in shapes]
        getattr(masks, f"ask_{band.kind}")(ctypes.byref(sizes), *(ctypes.c_void_p(it.data_ptr()) for it in found))
        visible, all_visible, keys, queries = found
        truth = torch.zeros(seq_q, columns * TILE, dtype=torch.bool)  # keys beyond the end are invisible
        truth[:, :seq_kv] = band.visible(seq_q, seq_kv, torch.device("cpu"))
        assert torch.equal(visible.bool(), truth)
        tiles = [[tile.all() for tile in row.split(TILE, dim=1)] for row in truth.split(TILE)]
        assert torch.equal(all_visible.bool(), torch.tensor(tiles))
        for bounds, seen in zip(keys.tolist(), truth.split(TILE), strict=True):
            check_blocks(bounds, seen)
        for bounds, seen in zip(queries.tolist(), truth.T.split(TILE), strict=True):
            check_blocks(bounds, seen)
