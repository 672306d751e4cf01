"""The holders of a fragment's elements, against the PTX ISA and the emulation."""

import ctypes
import itertools

import pytest
import torch

from multiattn.cuda.cpu import host
from multiattn.cuda.tools import probe_host
from multiattn.inspect import fragments
from multiattn.inspect.layout import down, right

LANES, HALVES = range(32), range(2)

needs_gxx = pytest.mark.skipif(bool(probe_host()), reason="; ".join(map(str, probe_host())))

SOURCE = """
#include "multiattn/ptx.cuh"
#include "multiattn/tile.cuh"

using namespace multiattn;

struct Arguments {
  const uint32* a;  // [32, 4]: of each lane
  const uint32* b;  // [32, 2]
  uint32* out;      // [32, 4]
};

template <class E>
void multiply(const Arguments& arguments) {
  const int lane = thread_index();
  uint32 a[4];
  float d[4] = {};
  for (int i = 0; i < 4; ++i) a[i] = arguments.a[4 * lane + i];
  mma_m16n8k16<E>(d, a, arguments.b[2 * lane], arguments.b[2 * lane + 1]);
  for (int i = 0; i < 4; ++i) arguments.out[4 * lane + i] = float_bits(d[i]);
}
KERNEL(32, 1) multiply_fp16(PARAMETERS(Arguments) arguments) { multiply<fp16>(arguments); }
KERNEL(32, 1) multiply_bf16(PARAMETERS(Arguments) arguments) { multiply<bf16>(arguments); }
KERNEL(32, 1) multiply_to_fp16(PARAMETERS(Arguments) arguments) {
  const int lane = thread_index();
  uint32 a[4], d[2] = {};
  for (int i = 0; i < 4; ++i) a[i] = arguments.a[4 * lane + i];
  mma_m16n8k16_fp16(d, a, arguments.b[2 * lane], arguments.b[2 * lane + 1]);
  for (int i = 0; i < 2; ++i) arguments.out[4 * lane + i] = d[i];
}

// The elements of a 16x16 tile are their own indices.
template <class Load>
void load_tile_of_indices(const Arguments& arguments, Load load) {
  const int lane = thread_index();
  using T = Tile<16, 16>;
  for (int chunk = 0; chunk < 2; ++chunk)
    if (lane < 16) {
      Chunk value;
      for (uint32 i = 0; i < 4; ++i) {
        const uint32 index = 16 * lane + 8 * chunk + 2 * i;
        value.word[i] = index | (index + 1) << 16;
      }
      store_shared_16(T::chunk(0, lane, chunk), value);
    }
  sync_block();
  const Fragment fragment = load();
  for (int i = 0; i < 4; ++i) arguments.out[4 * lane + i] = fragment.reg[i];
}
using Reader = FragmentReader<Tile<16, 16>>;
KERNEL(32, 1) read_down(PARAMETERS(Arguments) arguments) {
  load_tile_of_indices(arguments, [] { return Reader::down().load(0, 0, 0); });
}
KERNEL(32, 1) read_right(PARAMETERS(Arguments) arguments) {
  load_tile_of_indices(arguments, [] { return Reader::right().load(0, 0, 0); });
}
KERNEL(32, 1) read_down_transposed(PARAMETERS(Arguments) arguments) {
  load_tile_of_indices(arguments, [] { return Reader::down().load_transposed(0, 0, 0); });
}
"""


class Arguments(ctypes.Structure):
    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("out", ctypes.c_void_p))


@pytest.fixture(scope="module")
def library():
    return host.load(host.build_source(SOURCE))


def run(library, kernel, a=None, b=None):
    """The registers of each lane afterwards: int32 [32, 4]."""
    out = torch.zeros(32, 4, dtype=torch.int32)
    arguments = Arguments(*(0 if it is None else it.data_ptr() for it in (a, b)), out.data_ptr())
    host.run(library, kernel, arguments, blocks=1, threads=32, smem_bytes=1024)
    return out


def halves(registers):
    """[32, n] of 32 bits as [32, n, 2] of 16."""
    return registers.view(torch.int16).reshape(32, -1, 2)


# ---------------------------------------------------------------- the PTX ISA


def test_the_formulas_are_those_of_the_ptx_isa():
    """Transcribed from "Matrix Fragments for mma.m16n8k16 with floating point type"; i counts elements there."""
    for lane in LANES:
        group_id, thread_in_group = lane >> 2, lane % 4
        for i in range(8):
            row = group_id if 0 <= i < 2 or 4 <= i < 6 else group_id + 8
            column = thread_in_group * 2 + (i & 1) + (0 if i < 4 else 8)
            assert fragments.operand_a(lane, i // 2, i % 2) == (row, column)
        for i in range(4):
            row = thread_in_group * 2 + (i & 1) + (0 if i < 2 else 8)
            assert fragments.operand_b(lane, i // 2, i % 2) == (row, group_id)
        for i in range(4):
            row = group_id if i < 2 else group_id + 8
            column = thread_in_group * 2 + (i & 1)
            assert fragments.accumulator(lane, i) == (row, column)
            assert fragments.accumulator_fp16(lane, i // 2, i % 2) == (row, column)


# ---------------------------------------------------------------- the emulation


@needs_gxx
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("multiply_fp16", torch.float16), ("multiply_bf16", torch.bfloat16), ("multiply_to_fp16", torch.float16)],
)
def test_mma_takes_and_gives_what_the_functions_say(library, kernel, dtype):
    torch.manual_seed(0)
    a = torch.randint(-4, 5, (16, 16)).to(dtype)  # small integers: every sum is exact
    b = torch.randint(-4, 5, (16, 8)).to(dtype)
    packed_a, packed_b = torch.empty(32, 4, 2, dtype=dtype), torch.empty(32, 2, 2, dtype=dtype)
    for lane, half in itertools.product(LANES, HALVES):
        for register in range(4):
            packed_a[lane, register, half] = a[fragments.operand_a(lane, register, half)]
        for register in range(2):
            packed_b[lane, register, half] = b[fragments.operand_b(lane, register, half)]
    out = run(library, kernel, packed_a, packed_b)
    found = torch.full((16, 8), torch.nan)
    for lane in LANES:
        if kernel == "multiply_to_fp16":
            for register, half in itertools.product(range(2), HALVES):
                value = halves(out).view(torch.float16)[lane, register, half]
                found[fragments.accumulator_fp16(lane, register, half)] = value.float()
        else:
            for register in range(4):
                found[fragments.accumulator(lane, register)] = out.view(torch.float32)[lane, register]
    assert torch.equal(found, a.float() @ b.float())


@needs_gxx
@pytest.mark.parametrize(
    ("kernel", "reader", "transposed"),
    [("read_down", down, False), ("read_right", right, False), ("read_down_transposed", down, True)],
)
def test_ldmatrix_gives_what_the_functions_say(library, kernel, reader, transposed):
    found = halves(run(library, kernel))
    for lane, register, half in itertools.product(LANES, range(4), HALVES):
        row, column = fragments.loaded(reader, lane, register, half, transposed=transposed)
        assert found[lane, register, half] == 16 * row + column


def test_readers_load_the_operands_of_an_mma():
    """Q, K and V as the forward kernel reads them; K's rows and V's columns are B's columns."""
    for lane, register, half in itertools.product(LANES, range(4), HALVES):
        q, k, v = (fragments.loaded(how, lane, register, half, transposed=flag) for _, how, flag in fragments.READS)
        assert q == fragments.operand_a(lane, register, half)
        along_k, column = fragments.operand_b(lane, register % 2, half)
        assert k == (column + register // 2 * 8, along_k)
        assert v == (along_k, column + register // 2 * 8)


def test_two_accumulators_are_one_operand():
    """`as_operand`: registers of the left and the right accumulator, in pairs, are those of A."""
    for lane, register, half in itertools.product(LANES, range(4), HALVES):
        row, column = fragments.accumulator(lane, register % 2 * 2 + half)
        assert fragments.operand_a(lane, register, half) == (row, column + register // 2 * 8)


def test_lanes_give_the_addresses_of_the_rows_they_are_said_to():
    for lane in LANES:
        matrix, row = fragments.matrix_row(lane)
        for reader in (down, right):
            first_row, chunk = reader(8 * matrix)
            assert reader(lane) == (first_row + row, chunk)
