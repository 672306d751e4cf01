"""Models of tiles and fragments: against the C++, against CuTe's formula, and what the command says of them."""

import ctypes
import itertools
import re
from pathlib import Path

import pytest
import torch
from cuda_runs import on_cpu

from multiattn import __main__ as cli
from multiattn.cuda.cpu import host
from multiattn.inspect import fragments
from multiattn.inspect.layout import ACCESSES, WARP, SharedTile, traffic
from multiattn.inspect.layout_svg import draw

HEAD_DIMS = range(8, 1025, 8)
READS = dict(zip(("q", "k", "v"), fragments.READS, strict=True))
ROWS = 64
WIDTHS = (8, 72, 136, 328, *range(16, 273, 16), 320, 512, 768, 1024)

CONSTANTS = f"""
#include <utility>

constexpr int TILE_ROWS = {ROWS};
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
struct Arguments {
  int columns, swizzled;
  const uint16* given;
  uint32* out;
};
template <class Use>
void dispatch(const Arguments& arguments, Use use) {
  if (arguments.swizzled)
    with_tile<true>(arguments.columns, use, Widths{});
  else
    with_tile<false>(arguments.columns, use, Widths{});
}

// given: [TILE_ROWS, 1024], what the tile is filled with; out: the registers of every fragment of it, [.., 32, 4].
#define READ(NAME, READER, LOAD)                                                                          \\
  KERNEL(32, 1) NAME(PARAMETERS(Arguments) arguments) {                                                   \\
    uint32* out = arguments.out + 4 * thread_index();                                                     \\
    dispatch(arguments, [&]<class T>(Type<T>) {                                                           \\
      for (int row = 0; row < T::ROWS; ++row)                                                             \\
        for (int chunk = thread_index(); chunk < T::CHUNKS; chunk += 32)                                  \\
          store_shared_16(T::chunk(0, row, chunk), load_global_16(arguments.given + 1024 * row + 8 * chunk));\\
      sync_block();                                                                                       \\
      for (int row = 0; row < T::ROWS; row += 16)                                                         \\
        for (int column = 0; column < T::WIDTH; column += 16, out += 128) {                               \\
          const Fragment found = FragmentReader<T>::READER().LOAD(0, row, column);                        \\
          for (int i = 0; i < 4; ++i) out[i] = found.reg[i];                                              \\
        }                                                                                                 \\
    });                                                                                                   \\
  }
READ(read_q, down, load)
READ(read_k, right, load)
READ(read_v, down, load_transposed)

// Copies the words of the tile to `out` in the order of their addresses.
template <class T>
void show(const Arguments& arguments, int threads) {
  sync_block();
  for (int word = 4 * thread_index(); word < T::BYTES / 4; word += 4 * threads) {
    const Chunk chunk = load_shared_16(4 * word);
    for (int i = 0; i < 4; ++i) arguments.out[word + i] = chunk.word[i];
  }
}
// given: [threads, 1024], each row full of its index
KERNEL(128, 1) copy(PARAMETERS(Arguments) arguments) {
  dispatch(arguments, [&]<class T>(Type<T>) {
    load_tile<T, 128, true>(0, arguments.given + 1024 * thread_index(), 0, T::ROWS);
    cp_async_commit();
    cp_async_wait<0>();
    show<T>(arguments, 128);
  });
}
KERNEL(32, 1) pair(PARAMETERS(Arguments) arguments) {
  dispatch(arguments, [&]<class T>(Type<T>) {
    const PairWriter<T> writer;
    for (int row = 0; row < T::ROWS; row += 8)
      for (int chunk = 0; chunk < T::CHUNKS; ++chunk)
        writer.store(0, row, chunk, (row / 8 * T::CHUNKS + chunk) * 32 + thread_index());
    show<T>(arguments, 32);
  });
}

// given: a of each lane [32, 4], then b [32, 2]; out: 1 + a * b of each lane.
template <int REGISTERS, class D, class Multiply>
void multiply(const Arguments& arguments, D one, Multiply mma) {
  const int lane = thread_index();
  const uint32* const given = reinterpret_cast<const uint32*>(arguments.given);
  uint32 a[4];
  D d[REGISTERS];
  for (int i = 0; i < 4; ++i) a[i] = given[4 * lane + i];
  for (D& it : d) it = one;
  mma(d, a, given[128 + 2 * lane], given[128 + 2 * lane + 1]);
  std::memcpy(arguments.out + REGISTERS * lane, d, sizeof d);
}
KERNEL(32, 1) multiply_fp16(PARAMETERS(Arguments) arguments) { multiply<4>(arguments, 1.0f, mma_m16n8k16<fp16>); }
KERNEL(32, 1) multiply_bf16(PARAMETERS(Arguments) arguments) { multiply<4>(arguments, 1.0f, mma_m16n8k16<bf16>); }
KERNEL(32, 1) multiply_to_fp16(PARAMETERS(Arguments) arguments) {
  multiply<2>(arguments, pack<fp16>(1.0f, 1.0f), mma_m16n8k16_fp16);
}
"""


class Arguments(ctypes.Structure):
    _fields_ = (
        ("columns", ctypes.c_int),
        ("swizzled", ctypes.c_int),
        ("given", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


@pytest.fixture(scope="module")
def library():
    return host.load(host.build_source(CONSTANTS + SOURCE))


def tile_of(columns, swizzled, rows=ROWS):
    return SharedTile.of_kernels(rows, columns) if swizzled else SharedTile(rows=rows, columns=columns, swizzle=0)


def run(library, kernel, columns=16, swizzled=0, *, threads=32, given=None):
    tile = tile_of(columns, swizzled)
    out = torch.zeros(tile.rows * tile.pitch // 4, dtype=torch.int32)
    arguments = Arguments(columns, swizzled, 0 if given is None else given.data_ptr(), out.data_ptr())
    counters = host.run(library, kernel, arguments, blocks=1, threads=threads, smem_bytes=tile.rows * tile.pitch)
    return out, counters


def spread(place, *shape):
    """Rows and columns of what `place` says of each lane, register and half: tensors of `shape`, as an index."""
    places = itertools.product(*map(range, shape))
    rows, columns = torch.tensor([place(*it) for it in places]).T.reshape(2, *shape)
    return rows, columns


# ---------------------------------------------------------------- tiles against the C++


@on_cpu
@pytest.mark.parametrize("swizzled", [0, 1])
@pytest.mark.parametrize("name", READS)
def test_fragments_and_conflicts_are_those_of_the_emulation(library, name, swizzled):
    elements = torch.arange(ROWS * 1024).to(torch.int16).reshape(ROWS, 1024)
    _, reader, transposed = READS[name]
    rows, columns = spread(lambda *it: fragments.loaded(reader, *it, transposed=transposed), WARP, 4, 2)
    for width in WIDTHS:
        tile = tile_of(width, swizzled)
        registers, counters = run(library, f"read_{name}", width, swizzled, given=elements)
        cost = traffic(tile, ACCESSES[name])
        assert (4 * counters.ldmatrix, counters.bank_conflicts) == (cost.requests, cost.wavefronts - cost.requests)
        starts = itertools.product(range(0, ROWS, 16), range(0, width, 16))
        expected = torch.stack([elements[row + rows, column + columns] for row, column in starts])
        assert torch.equal(registers.view(torch.int16).reshape(expected.shape), expected), width


@on_cpu
@pytest.mark.parametrize("swizzled", [0, 1])
def test_stores_are_made_by_the_threads_that_the_model_says(library, swizzled):
    ids = torch.arange(128, dtype=torch.int16)[:, None].repeat(1, 1024)
    for columns in WIDTHS:
        tile = tile_of(columns, swizzled)
        words = run(library, "copy", columns, swizzled, threads=128, given=ids)[0].tolist()
        for request in ACCESSES["copy"].requests(tile) if columns == tile.width else ():  # padding is zeroed
            threads = [words[address // 4] & 0xFFFF for _, address in request]
            assert threads[0] % 8 == 0, columns
            assert threads == list(range(threads[0], threads[0] + 8)), columns
        words = run(library, "pair", columns, swizzled)[0].tolist()
        touched = [address for request in ACCESSES["pair"].requests(tile) for _, address in request]
        assert [words[address // 4] for address in touched] == list(range(len(touched))), columns


# ---------------------------------------------------------------- fragments against the emulation


@on_cpu
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("multiply_fp16", torch.float16), ("multiply_bf16", torch.bfloat16), ("multiply_to_fp16", torch.float16)],
)
def test_mma_takes_and_gives_what_the_functions_say(library, kernel, dtype):
    torch.manual_seed(0)
    a, b = (torch.randint(-4, 5, (16, columns)).to(dtype) for columns in (16, 8))  # small integers: every sum is exact
    of_a, of_b = spread(fragments.operand_a, 32, 4, 2), spread(fragments.operand_b, 32, 2, 2)
    out, _ = run(library, kernel, given=torch.cat([a[of_a].flatten(), b[of_b].flatten()]))
    found = torch.full((16, 8), torch.nan)
    if kernel == "multiply_to_fp16":
        found[spread(fragments.accumulator_fp16, 32, 2, 2)] = out.view(torch.float16)[:128].reshape(32, 2, 2).float()
    else:
        found[spread(fragments.accumulator, 32, 4)] = out.view(torch.float32)[:128].reshape(32, 4)
    assert torch.equal(found, 1 + a.float() @ b.float())


def test_readers_load_the_operands_of_an_mma_and_two_accumulators_are_one():
    """Q, K and V as the forward kernel reads them; K's rows and V's columns are B's columns."""
    for lane, register, half in itertools.product(range(32), range(4), range(2)):
        q, k, v = (fragments.loaded(how, lane, register, half, transposed=flag) for _, how, flag in fragments.READS)
        assert q == fragments.operand_a(lane, register, half)
        along_k, column = fragments.operand_b(lane, register % 2, half)
        assert k == (column + register // 2 * 8, along_k)
        assert v == (along_k, column + register // 2 * 8)
        row, column = fragments.accumulator(lane, register % 2 * 2 + half)  # `as_operand` puts two beside each other
        assert q == (row, column + register // 2 * 8)


# ---------------------------------------------------------------- what the model says


def test_the_kernels_swizzle_leaves_no_conflict_at_any_head_dim():
    for head_dim in HEAD_DIMS[1::2]:  # padded to a multiple of 16: every other one is laid out as the next
        costs = [traffic(SharedTile.of_kernels(16, head_dim), access) for access in ACCESSES.values()]
        assert all((it.wavefronts, dict(it.collisions)) == (it.requests, {}) for it in costs), head_dim


@pytest.mark.parametrize(
    ("columns", "swizzle", "of_a_matrix", "rows"),
    [
        (64, 0, 8, ((0, 1, 2, 3, 4, 5, 6, 7),)),
        (64, 1, 4, ((0, 2, 4, 6), (1, 3, 5, 7))),
        (64, 2, 2, ((0, 4), (1, 5), (2, 6), (3, 7))),
        (32, 0, 4, ((0, 2, 4, 6), (1, 3, 5, 7))),
        (80, 0, 2, ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_rows_that_collide_are_named(columns, swizzle, of_a_matrix, rows):
    tile = SharedTile(rows=32, columns=columns, swizzle=swizzle)
    for name in READS:
        found = traffic(tile, ACCESSES[name])
        assert found.requests == 8 * tile.width // 16
        assert found.wavefronts == of_a_matrix * found.requests
        assert dict(found.collisions) == {rows: found.requests}


@pytest.mark.parametrize("columns", [16, 32, 64])
def test_up_to_64_columns_it_is_the_swizzle_of_cute(columns):
    """Swizzle<B, 3, 3>: bits 6 to 6 + B of the element's index are XORed into bits 3 to 3 + B."""
    for bits in range(SharedTile.of_kernels(16, columns).widest_swizzle + 1):
        tile = SharedTile(rows=16, columns=columns, swizzle=bits)
        for row, chunk in itertools.product(range(16), range(tile.chunks)):
            index = row * columns + chunk * 8
            assert tile.address(row, chunk) == 2 * (index ^ (index & ((1 << bits) - 1) << 6) >> 3)


# ---------------------------------------------------------------- the command


def command(capsys, *arguments):
    status = cli.main(["layout", *arguments])
    return status, capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tile", "64x"], ["'64x'", "ROWSxCOLUMNS"]),
        (["--tile", "60x63"], ["rows: got 60", "multiples of 16", "columns: got 63", "multiples of 8"]),
        (["--tile", "0x0"], ["rows: got 0", "columns: got 0"]),
        (["--tile", "64x48", "--swizzle", "3"], ["swizzle: got 3 for 48 columns", "allowed 0 to 1"]),
        (["--tile", "64x64", "--swizzle", "4"], ["swizzle: got '4'", "auto, 0, 1, 2, 3"]),
        (["--tile", "1024x1024"], ["1024x1024", "232448 bytes"]),
        (["--tile", "64x64", "--svg", "/no/such/folder/x.svg"], ["/no/such/folder/x.svg"]),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(capsys, arguments, words):
    status, said = command(capsys, *arguments)
    assert (status, said.out) == (2, "")
    assert all(word in said.err for word in words), said.err


def test_text_and_picture_agree(capsys, tmp_path):
    path = tmp_path / "tile.svg"
    status, said = command(capsys, "--tile", "32x80", "--swizzle", "0", "--svg", str(path))
    assert status == 0
    assert path.read_text() == draw(SharedTile(rows=32, columns=80, swizzle=0))
    assert "read K as operand B (right): 0 4, 1 5, 2 6, 3 7, in 40 of 40 requests" in said.out
    status, said = command(capsys, "--tile", "32x80", "--elements")
    assert said.out.endswith("first:\nnone\n")
    (line,) = [line for line in said.out.splitlines() if line.startswith("row 4")]
    swizzled = SharedTile.of_kernels(32, 80)
    assert line.split()[2:] == [str(swizzled.bank(4, column)) for column in range(0, 80, 2)]


# ---------------------------------------------------------------- pages

DOCS = Path(__file__).parent.parent / "docs"


def lines_of(page, first):
    """Lines of a page's tables whose first cell looks so, as cells."""
    lines = [re.split(r"\s*\|\s*", line.strip("| ")) for line in (DOCS / page).read_text().splitlines() if "|" in line]
    found = [cells for cells in lines if re.fullmatch(first, cells[0])]
    assert found
    return found


def test_the_page_on_swizzles_counts_wavefronts_as_the_model_does():
    for columns, chunks, span, *told in lines_of("swizzle.md", r"\d+"):
        kernels = SharedTile.of_kernels(16, int(columns))
        assert (int(chunks), int(span)) == (kernels.chunks, kernels.span)
        of_bits = [SharedTile(rows=16, columns=int(columns), swizzle=it) for it in range(kernels.widest_swizzle + 1)]
        for name in ("q", "k", "v"):
            counts = [traffic(tile, ACCESSES[name]) for tile in of_bits]
            assert [f"{it.wavefronts / it.requests:g}" for it in counts] == [it for it in told if it]
    plain, xored = (SharedTile(rows=64, columns=64, swizzle=bits) for bits in (0, 3))
    for title, _, *told in lines_of("swizzle.md", "|".join(re.escape(it.title) for it in ACCESSES.values())):
        (access,) = (it for it in ACCESSES.values() if it.title == title)
        counts = traffic(plain, access), traffic(xored, access)
        assert list(map(int, told)) == [counts[0].requests, *(it.wavefronts for it in counts)]


@pytest.mark.parametrize(("name", "bits"), [("none", 0), ("xor", 3)])
def test_the_pictures_are_of_the_model(name, bits):
    assert (DOCS / f"swizzle-{name}.svg").read_text() == draw(SharedTile(rows=16, columns=64, swizzle=bits))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_page_on_fragments_has_each_lane_where_the_model_has_it(transposed):
    for row, _, *told in lines_of("fragments.md", r"\*\*\d\*\*"):
        for column, holder in enumerate(told[transposed].split()):
            lane, half = int(holder[:-2]), holder.endswith("hi")
            assert fragments.matrix_element(lane, half, transposed=transposed) == (int(row.strip("*")), column)
