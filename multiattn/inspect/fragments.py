"""The lane and register that hold each element of a matrix, for mma.m16n8k16 and ldmatrix with 16-bit elements.

PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix"; lane / 4 is its groupID,
lane % 4 its threadID_in_group. A register holds two elements, `half` 0 the low one; only an fp32 accumulator holds one.
tests/test_cuda_layout.py holds each function to cuda/cpu/verbs.cpp, and the table of docs/fragments.md to them.
"""

from __future__ import annotations

from collections.abc import Callable

from multiattn.inspect.layout import CHUNK_ELEMENTS, Place, down, right

Element = tuple[int, int]
"""Row and column of a matrix."""


def operand_a(lane: int, register: int, half: int) -> Element:
    """Row and column of A [16, 16] in register 0 to 3."""
    return lane // 4 + register % 2 * 8, lane % 4 * 2 + half + register // 2 * 8


def operand_b(lane: int, register: int, half: int) -> Element:
    """Row (of K) and column of B [16, 8] in register 0 or 1."""
    return lane % 4 * 2 + half + register * 8, lane // 4


def accumulator(lane: int, register: int) -> Element:
    """Row and column of C and D [16, 8] in fp32, in register 0 to 3."""
    return lane // 4 + register // 2 * 8, lane % 4 * 2 + register % 2


def accumulator_fp16(lane: int, register: int, half: int) -> Element:
    """Row and column of C and D [16, 8] in fp16, in register 0 or 1."""
    return accumulator(lane, 2 * register + half)


def matrix_element(lane: int, half: int, *, transposed: bool) -> Element:
    """Row and column, in memory, of what ldmatrix puts into a lane's register of an 8x8 matrix."""
    row, column = lane // 4, lane % 4 * 2 + half
    return (column, row) if transposed else (row, column)


def loaded(reader: Callable[[int], Place], lane: int, register: int, half: int, *, transposed: bool) -> Element:
    """Row and column of a 16x16 part of a tile that a lane gets by `FragmentReader`, with `layout.down` or `right`."""
    row, column = matrix_element(lane, half, transposed=transposed)
    first_row, first_chunk = reader(register * 8)  # the lane that gives the address of the matrix' first row
    return first_row + row, first_chunk * CHUNK_ELEMENTS + column


READS: tuple[tuple[str, Callable[[int], Place], bool], ...] = (
    ("A: `down().load` of Q", down, False),
    ("B: `right().load` of K", right, False),
    ("B: `down().load_transposed` of V", down, True),
)
"""How the forward kernel reads its operands: what and how, the reader, and whether ldmatrix transposes."""
