"""The model of tiles in shared memory: against the C++, against CuTe's formula, and what the command says of it."""

import ctypes
import itertools
import json
from xml.etree import ElementTree

import pytest
import torch

from multiattn import __main__ as cli
from multiattn.cuda.cpu import host
from multiattn.cuda.tools import probe_host
from multiattn.inspect.layout import ACCESSES, BANK_GROUPS, Tile, colliding_rows, traffic, wavefronts
from multiattn.inspect.layout_svg import FILLS, draw

HEAD_DIMS = range(8, 1025, 8)
READS = ("q", "k", "v")
ROWS = 64
WIDTHS = (*range(16, 273, 16), 320, 512, 768, 1024)

needs_gxx = pytest.mark.skipif(bool(probe_host()), reason="; ".join(map(str, probe_host())))

CONSTANTS = f"""
#include <utility>

constexpr int TILE_ROWS = {ROWS};
using HeadDims = std::integer_sequence<int, {", ".join(map(str, HEAD_DIMS))}>;
using Widths = std::integer_sequence<int, {", ".join(map(str, WIDTHS))}>;
"""
SOURCE = """
#include "multiattn/ptx.cuh"
#include "multiattn/tile.cuh"

using namespace multiattn;

template <class T>
struct Type {};

// Calls `use` with the tile of TILE_ROWS rows, `columns` elements wide, one of COLUMNS.
template <bool SWIZZLED, class Use, int... COLUMNS>
void with_tile(int columns, Use use, std::integer_sequence<int, COLUMNS...>) {
  ((columns == COLUMNS ? use(Type<Tile<TILE_ROWS, COLUMNS, SWIZZLED>>{}) : void()), ...);
}
template <class Widths, class Use>
void dispatch(int columns, int swizzled, Use use) {
  if (swizzled)
    with_tile<true>(columns, use, Widths{});
  else
    with_tile<false>(columns, use, Widths{});
}

// out: [TILE_ROWS, CHUNKS]; the number of chunks
extern "C" int addresses(int columns, int swizzled, uint32* out) {
  int chunks = 0;
  dispatch<HeadDims>(columns, swizzled, [&]<class T>(Type<T>) {
    chunks = T::CHUNKS;
    for (int row = 0; row < T::ROWS; ++row)
      for (int chunk = 0; chunk < chunks; ++chunk) *out++ = T::chunk(0, row, chunk);
  });
  return chunks;
}

struct Arguments {
  int columns, swizzled;
  const uint16* ids;  // [threads, 1024], each row full of its index
  uint32* out;        // [TILE_ROWS * width / 2], the words of the tile
};

template <class Load>
void read_tile(const Arguments& arguments, Load load) {
  dispatch<Widths>(arguments.columns, arguments.swizzled, [&]<class T>(Type<T>) {
    for (int row = 0; row < T::ROWS; row += 16)
      for (int column = 0; column < T::WIDTH; column += 16) load(Type<T>{}, row, column);
  });
}
KERNEL(32, 1) read_q(PARAMETERS(Arguments) arguments) {
  read_tile(arguments, []<class T>(Type<T>, int row, int column) { FragmentReader<T>::down().load(0, row, column); });
}
KERNEL(32, 1) read_k(PARAMETERS(Arguments) arguments) {
  read_tile(arguments, []<class T>(Type<T>, int row, int column) { FragmentReader<T>::right().load(0, row, column); });
}
KERNEL(32, 1) read_v(PARAMETERS(Arguments) arguments) {
  read_tile(arguments, []<class T>(Type<T>, int row, int column) {
    FragmentReader<T>::down().load_transposed(0, row, column);
  });
}

// Copies the words of the tile to `out` in the order of their addresses.
template <class T>
void show(const Arguments& arguments, int threads) {
  sync_block();
  for (int word = 4 * thread_index(); word < T::BYTES / 4; word += 4 * threads) {
    const Chunk chunk = load_shared_16(4 * word);
    for (int i = 0; i < 4; ++i) arguments.out[word + i] = chunk.word[i];
  }
}
KERNEL(128, 1) copy(PARAMETERS(Arguments) arguments) {
  dispatch<Widths>(arguments.columns, arguments.swizzled, [&]<class T>(Type<T>) {
    load_tile<T, 128, true>(0, arguments.ids + 1024 * thread_index(), 0, T::ROWS);
    cp_async_commit();
    cp_async_wait<0>();
    show<T>(arguments, 128);
  });
}
KERNEL(32, 1) pair(PARAMETERS(Arguments) arguments) {
  dispatch<Widths>(arguments.columns, arguments.swizzled, [&]<class T>(Type<T>) {
    const PairWriter<T> writer;
    for (int row = 0; row < T::ROWS; row += 8)
      for (int chunk = 0; chunk < T::CHUNKS; ++chunk)
        writer.store(0, row, chunk, (row / 8 * T::CHUNKS + chunk) * 32 + thread_index());
    show<T>(arguments, 32);
  });
}
"""


class Arguments(ctypes.Structure):
    _fields_ = (
        ("columns", ctypes.c_int),
        ("swizzled", ctypes.c_int),
        ("ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


@pytest.fixture(scope="module")
def library():
    return host.load(host.build_source(CONSTANTS + SOURCE))


def tile_of(columns, swizzled, rows=ROWS):
    return Tile.of_kernels(rows, columns) if swizzled else Tile(rows=rows, columns=columns, swizzle=0)


def run(library, kernel, columns, swizzled, *, threads=32, ids=None):
    tile = tile_of(columns, swizzled)
    out = torch.zeros(tile.rows * tile.pitch // 4, dtype=torch.int32)
    arguments = Arguments(columns, swizzled, ids.data_ptr() if ids is not None else 0, out.data_ptr())
    counters = host.run(library, kernel, arguments, blocks=1, threads=threads, smem_bytes=tile.rows * tile.pitch)
    return out.tolist(), counters


# ---------------------------------------------------------------- against the C++


@needs_gxx
@pytest.mark.parametrize("swizzled", [0, 1])
def test_addresses_are_those_of_the_header(library, swizzled):
    found = (ctypes.c_uint32 * (ROWS * 128))()
    for columns in HEAD_DIMS:
        tile = tile_of(columns, swizzled)
        assert library.addresses(columns, swizzled, found) == tile.chunks, columns
        places = itertools.product(range(ROWS), range(tile.chunks))
        expected = [tile.address(row, chunk) for row, chunk in places]
        assert expected == found[: len(expected)], columns


@needs_gxx
@pytest.mark.parametrize("swizzled", [0, 1])
@pytest.mark.parametrize("name", READS)
def test_conflicts_are_those_that_the_emulation_counts(library, name, swizzled):
    for columns in WIDTHS:
        _, counters = run(library, f"read_{name}", columns, swizzled)
        expected = traffic(tile_of(columns, swizzled), ACCESSES[name])
        assert (counters.ldmatrix, counters.bank_conflicts) == (expected.instructions, expected.conflicts), columns


@needs_gxx
@pytest.mark.parametrize("swizzled", [0, 1])
def test_copies_are_stored_by_the_threads_that_the_model_says(library, swizzled):
    ids = torch.arange(128, dtype=torch.int16)[:, None].repeat(1, 1024)
    for columns in WIDTHS:
        words, _ = run(library, "copy", columns, swizzled, threads=128, ids=ids)
        for (request,) in ACCESSES["copy"].batches(tile_of(columns, swizzled)):
            threads = [words[touch.address // 4] & 0xFFFF for touch in request]
            assert threads[0] % 8 == 0, columns
            assert threads == list(range(threads[0], threads[0] + 8)), columns


@needs_gxx
@pytest.mark.parametrize("swizzled", [0, 1])
def test_pairs_are_stored_where_the_model_says(library, swizzled):
    for columns in WIDTHS:
        words, _ = run(library, "pair", columns, swizzled)
        touched = [touch for (request,) in ACCESSES["pair"].batches(tile_of(columns, swizzled)) for touch in request]
        assert [words[touch.address // 4] for touch in touched] == list(range(len(touched))), columns


# ---------------------------------------------------------------- what it says


def test_the_kernels_swizzle_leaves_no_conflict_at_any_head_dim():
    seen = {}  # a head_dim is padded to a multiple of 16: every second one is laid out as the one before it
    for head_dim in HEAD_DIMS:
        tile = Tile.of_kernels(16, head_dim)
        layout = tuple(tile.address(row, chunk) for row in range(16) for chunk in range(tile.chunks))
        if layout not in seen:
            seen[layout] = [traffic(tile, access) for access in ACCESSES.values()]
        assert all((it.conflicts, it.worst, dict(it.collisions)) == (0, 0, {}) for it in seen[layout]), head_dim
    assert len(seen) == len(HEAD_DIMS) / 2


@pytest.mark.parametrize(
    ("columns", "swizzle", "of_a_matrix", "rows"),
    [
        (64, 0, 8, ((0, 1, 2, 3, 4, 5, 6, 7),)),
        (128, 0, 8, ((0, 1, 2, 3, 4, 5, 6, 7),)),
        (64, 1, 4, ((0, 2, 4, 6), (1, 3, 5, 7))),
        (64, 2, 2, ((0, 4), (1, 5), (2, 6), (3, 7))),
        (32, 0, 4, ((0, 2, 4, 6), (1, 3, 5, 7))),
        (80, 0, 2, ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_rows_that_collide_are_named(columns, swizzle, of_a_matrix, rows):
    tile = Tile(rows=32, columns=columns, swizzle=swizzle)
    fragments = 2 * tile.width // 16
    for name in READS:
        found = traffic(tile, ACCESSES[name])
        assert (found.instructions, found.requests) == (fragments, 4 * fragments)
        assert found.wavefronts == of_a_matrix * found.requests
        assert found.worst == 4 * (of_a_matrix - 1)
        assert dict(found.collisions) == {rows: found.requests}
        for batch in ACCESSES[name].batches(tile):
            assert all(wavefronts(request) == of_a_matrix for request in batch)
            assert all(len(colliding_rows(request)) == len(rows) for request in batch)


@pytest.mark.parametrize("columns", [16, 32, 64])
def test_up_to_64_columns_it_is_the_swizzle_of_cute(columns):
    """Swizzle<B, 3, 3>: bits 6 to 6 + B of the element's index are XORed into bits 3 to 3 + B."""
    for bits in range(Tile.of_kernels(16, columns).widest_swizzle + 1):
        tile = Tile(rows=16, columns=columns, swizzle=bits)
        for row, chunk in itertools.product(range(16), range(tile.chunks)):
            index = row * columns + chunk * 8
            assert tile.address(row, chunk) == 2 * (index ^ (index & ((1 << bits) - 1) << 6) >> 3)


def test_every_element_has_a_bank_and_pairs_share_one():
    tile = Tile.of_kernels(16, 48)
    for row in range(16):
        banks = [tile.bank(row, column) for column in range(tile.width)]
        assert banks[::2] == banks[1::2]
        assert [bank // 4 for bank in banks[::8]] == [tile.bank_group(row, chunk) for chunk in range(tile.chunks)]
        assert banks[:8:2] == list(range(banks[0], banks[0] + 4))


# ---------------------------------------------------------------- the command


def command(capsys, *arguments):
    status = cli.main(["layout", *arguments])
    return status, capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tile", "64"], ["'64'", "ROWSxCOLUMNS"]),
        (["--tile", "64x"], ["'64x'", "ROWSxCOLUMNS"]),
        (["--tile", "64x60"], ["columns: got 60", "multiples of 8"]),
        (["--tile", "60x63"], ["rows: got 60", "multiples of 16", "columns: got 63"]),
        (["--tile", "0x0"], ["rows: got 0", "columns: got 0"]),
        (["--tile", "64x48", "--swizzle", "3"], ["swizzle: got 3 for 48 columns", "allowed 0 or 1"]),
        (["--tile", "64x64", "--swizzle", "4"], ["swizzle: got '4'", "auto, 0, 1, 2, 3"]),
        (["--tile", "1024x1024"], ["1024x1024", "232448 bytes"]),
        (["--tile", "64x64", "--svg", "/no/such/folder/x.svg"], ["/no/such/folder/x.svg"]),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(capsys, arguments, words):
    status, said = command(capsys, *arguments)
    assert (status, said.out) == (2, "")
    assert all(word in said.err for word in words), said.err


def test_text_json_and_picture_agree(capsys, tmp_path):
    path = tmp_path / "tile.svg"
    status, said = command(capsys, "--tile", "32x80", "--swizzle", "0", "--json", "--elements", "--svg", str(path))
    assert status == 0
    data = json.loads(said.out)
    tile = Tile(rows=32, columns=80, swizzle=0)
    assert data["bank_groups"] == [[tile.bank_group(row, chunk) for chunk in range(10)] for row in range(32)]
    assert data["banks"][5][:5] == [8, 9, 10, 11, 12]
    assert data["accesses"]["k"]["conflicts"] == 40
    assert data["accesses"]["k"]["collisions"] == [{"rows": [[0, 4], [1, 5], [2, 6], [3, 7]], "requests": 40}]
    assert path.read_text() == draw(tile)
    status, said = command(capsys, "--tile", "32x80", "--swizzle", "0")
    assert "rows 0 4, 1 5, 2 6, 3 7 meet in a bank, in 40 of 40 requests" in said.out
    status, said = command(capsys, "--tile", "32x80", "--elements")
    assert "no two rows of a request meet in a bank" in said.out
    (line,) = [line for line in said.out.splitlines() if line.startswith("row 4")]
    swizzled = Tile.of_kernels(32, 80)
    assert line.split()[2:] == [str(swizzled.bank(4, column)) for column in range(0, 80, 2)]


# ---------------------------------------------------------------- pictures and pages


@pytest.mark.parametrize("size", ["16x64", "64x8", "32x256"])
@pytest.mark.parametrize("swizzle", ["0", "auto"])
def test_a_picture_has_a_labelled_cell_for_every_chunk(size, swizzle):
    tile = Tile.parse(size, swizzle)
    root = ElementTree.fromstring(draw(tile))
    space = "{http://www.w3.org/2000/svg}"
    fills = [box.get("fill") for box in root.iter(f"{space}rect") if box.get("fill") in FILLS]
    groups = [tile.bank_group(row, chunk) for row in range(16) for chunk in range(tile.chunks)]
    assert fills == [FILLS[group] for group in (*groups, *range(BANK_GROUPS))]
    labels = [text.text for text in root.iter(f"{space}text")]
    assert sum("-" in label and label.replace("-", "").isdigit() for label in labels) == len(groups)
