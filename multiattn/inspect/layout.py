"""Where a tile's elements lie in shared memory, and how many wavefronts it takes to read and to write them.

A model of cuda/include/multiattn/{swizzle,tile}.cuh in plain Python; tests/test_cuda_layout.py holds it to the C++.
Shared memory has 32 banks of 4 bytes and serves each of them once a wavefront (CUDA C++ Programming Guide, "Shared
Memory"). What goes together: the 8 rows of one 8x8 matrix of ldmatrix; 8 neighbouring threads, where each moves 16
bytes; the whole warp, where each moves 4. docs/swizzle.md explains it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from multiattn.plan.arch import ARCHS

BANKS = 32
BANK_BYTES = 4
ELEMENT_BYTES = 2
CHUNK_BYTES = 16
CHUNK_ELEMENTS = CHUNK_BYTES // ELEMENT_BYTES
BANKS_OF_CHUNK = CHUNK_BYTES // BANK_BYTES
BANK_GROUPS = BANKS // BANKS_OF_CHUNK
"""Groups of 4 neighbouring banks, as many as a chunk fills."""
PERIOD = 8
"""Rows after which the pattern of banks repeats: 8 rows are a multiple of 128 bytes at any width."""
WARP = 32
SMEM_LIMIT = max(arch.smem_per_block for arch in ARCHS.values())

_TILE = re.compile(r"(\d{1,9})\s*[x,]\s*(\d{1,9})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A tile of 16-bit elements in shared memory, with `swizzle` low bits of a row's chunk index XORed.

    ValueError names every field that is not accepted.
    """

    rows: int
    columns: int
    """With data; a row is padded to a multiple of 16."""
    swizzle: int

    def __post_init__(self) -> None:
        problems = []
        if self.rows < 16 or self.rows % 16:
            problems.append(f"rows: got {self.rows}; allowed multiples of 16, as a fragment has 16 rows")
        if self.columns < 8 or self.columns % 8:
            problems.append(f"columns: got {self.columns}; allowed multiples of 8, as a chunk has 8 elements")
        if not problems and self.rows * self.pitch > SMEM_LIMIT:
            what = f"{self.rows}x{self.columns}, {self.rows * self.pitch} bytes with its padding"
            problems.append(
                f"tile: got {what}; allowed up to {SMEM_LIMIT} bytes, the most that a block has on any arch"
            )
        if not problems and self.swizzle not in range(self.widest_swizzle + 1):
            allowed = " or ".join(map(str, range(self.widest_swizzle + 1)))
            problems.append(
                f"swizzle: got {self.swizzle} for {self.columns} columns, {self.chunks} chunks a row; allowed "
                f"{allowed}, as an XOR must stay within {1 << self.widest_swizzle} neighbouring chunks of the row"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @classmethod
    def of_kernels(cls, rows: int, columns: int) -> Tile:
        """The tile as the kernels lay it out where they swizzle."""
        plain = cls(rows=rows, columns=columns, swizzle=0)
        return cls(rows=rows, columns=columns, swizzle=plain.widest_swizzle)

    @classmethod
    def parse(cls, tile: str, swizzle: str = "auto") -> Tile:
        """From text such as ``64x64`` and ``auto``, ``0``, ``1``, ``2``, ``3``; ValueError for any other."""
        size = _TILE.fullmatch(tile.strip())
        if size is None:
            raise ValueError(f"tile: got {tile!r}; allowed ROWSxCOLUMNS, as in 64x64")
        if not re.fullmatch("auto|[0-3]", swizzle):
            raise ValueError(f"swizzle: got {swizzle!r}; allowed auto, 0, 1, 2, 3: how many bits are XORed")
        rows, columns = int(size[1]), int(size[2])
        if swizzle == "auto":
            return cls.of_kernels(rows, columns)
        return cls(rows=rows, columns=columns, swizzle=int(swizzle))

    @property
    def chunks(self) -> int:
        """Chunks of a row, padding included: an even number."""
        return -(-self.columns // 16) * 2

    @property
    def width(self) -> int:
        """Elements from row to row."""
        return self.chunks * CHUNK_ELEMENTS

    @property
    def pitch(self) -> int:
        """Bytes from row to row."""
        return self.chunks * CHUNK_BYTES

    @property
    def span(self) -> int:
        """Neighbouring chunks among which the kernels XOR at this width: the rows that start in one bank group."""
        return 8 if self.chunks % 8 == 0 else 4 if self.chunks % 4 == 0 else 2

    @property
    def widest_swizzle(self) -> int:
        """The bits that the kernels XOR at this width, log2(span); more would leave the row."""
        return self.span.bit_length() - 1

    def key(self, row: int) -> int:
        """The bits that are XORed into the chunk indices of a row."""
        return row // (BANK_GROUPS // self.span) % (1 << self.swizzle)

    def address(self, row: int, chunk: int) -> int:
        """Bytes from the start of the tile to a chunk."""
        return row * self.pitch + (chunk ^ self.key(row)) * CHUNK_BYTES

    def bank_group(self, row: int, chunk: int) -> int:
        """Which of the 8 groups of 4 banks a chunk fills."""
        return self.address(row, chunk) // CHUNK_BYTES % BANK_GROUPS

    def bank(self, row: int, column: int) -> int:
        """Which bank an element falls in; elements 2i and 2i + 1 share one."""
        within = column % CHUNK_ELEMENTS * ELEMENT_BYTES
        return (self.address(row, column // CHUNK_ELEMENTS) + within) // BANK_BYTES % BANKS


@dataclass(frozen=True, kw_only=True, slots=True)
class Touch:
    """One thread's part of a request."""

    row: int
    address: int
    """A multiple of `bytes`."""
    bytes: int
    """The same all over a request."""


Request = Sequence[Touch]
"""Touches that shared memory serves in one wavefront if no two rows collide."""
Place = tuple[int, int]
"""A row and a chunk of it."""


def wavefronts(request: Request) -> int:
    """The most different words that one bank must give or take for a request."""
    return max(map(len, _rows_of_banks(request).values()))


def colliding_rows(request: Request) -> tuple[tuple[int, ...], ...]:
    """The sets of rows that meet in a bank at different words, in order; nothing where there is no conflict."""
    found = {tuple(sorted(rows.values())) for rows in _rows_of_banks(request).values() if len(rows) > 1}
    return tuple(sorted(found))


def _rows_of_banks(request: Request) -> Mapping[int, Mapping[int, int]]:
    """Per bank, or group of banks that one thread fills: the row of each different address that is wanted there."""
    rows: dict[int, dict[int, int]] = {}
    for touch in request:
        place = touch.address // touch.bytes
        rows.setdefault(place % (BANKS * BANK_BYTES // touch.bytes), {})[place] = touch.row
    return rows


# ---------------------------------------------------------------- who touches what at one time


def down(lane: int) -> Place:
    """Row and chunk of a 16x16 fragment whose address a lane gives in `FragmentReader::down`."""
    return lane % 16, lane // 16


def right(lane: int) -> Place:
    """The same for `FragmentReader::right`."""
    return lane // 16 * 8 + lane % 8, lane // 8 % 2


def fragment_requests(tile: Tile, reader: Callable[[int], Place], row: int, column: int) -> list[Request]:
    """The four 8x8 matrices that one ldmatrix.x4 reads of the fragment at `row` and `column` (elements)."""
    touches = []
    for lane in range(WARP):
        lane_row, lane_chunk = reader(lane)
        touches.append(_touch(tile, row + lane_row, column // CHUNK_ELEMENTS + lane_chunk))
    return [touches[first : first + 8] for first in range(0, WARP, 8)]


def _reads(reader: Callable[[int], Place]) -> Callable[[Tile], Iterable[list[Request]]]:
    def of_tile(tile: Tile) -> Iterable[list[Request]]:
        for row in range(0, tile.rows, 16):
            for column in range(0, tile.width, 16):
                yield fragment_requests(tile, reader, row, column)

    return of_tile


def _copies(tile: Tile) -> Iterable[list[Request]]:
    """`load_tile`: `span` neighbouring threads share a row, 8 of them store at one time."""
    for row in range(0, tile.rows, BANK_GROUPS // tile.span):
        for chunk in range(0, tile.chunks, tile.span):
            yield [[_touch(tile, row + thread // tile.span, chunk + thread % tile.span) for thread in range(8)]]


def _pairs(tile: Tile) -> Iterable[list[Request]]:
    """`PairWriter`: the lanes hold 8 rows of one chunk, 4 bytes each."""
    for row in range(0, tile.rows, 8):
        for chunk in range(tile.chunks):
            yield [[_touch(tile, row + lane // 4, chunk, lane % 4 * 4, 4) for lane in range(WARP)]]


def _touch(tile: Tile, row: int, chunk: int, offset: int = 0, size: int = CHUNK_BYTES) -> Touch:
    return Touch(row=row, address=tile.address(row, chunk) + offset, bytes=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """One way in which the kernels touch a whole tile: batches of requests, each batch one instruction's."""

    title: str
    instruction: str
    batches: Callable[[Tile], Iterable[list[Request]]]


ACCESSES: Mapping[str, Access] = MappingProxyType(
    {
        "q": Access(title="read Q as operand A (down)", instruction="ldmatrix.x4", batches=_reads(down)),
        "k": Access(title="read K as operand B (right)", instruction="ldmatrix.x4", batches=_reads(right)),
        "v": Access(title="read V as operand B (down)", instruction="ldmatrix.x4.trans", batches=_reads(down)),
        "copy": Access(title="load_tile, 8 threads", instruction="cp.async 16", batches=_copies),
        "pair": Access(title="PairWriter, a warp", instruction="st.shared.b32", batches=_pairs),
    }
)
"""By a short name; the first three are the ways in which ldmatrix reads a tile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The cost of touching every element of a tile once."""

    instructions: int
    """Fragments for ldmatrix; for stores, those of one request: 8 threads of 16 bytes, or a warp of 4."""
    requests: int
    wavefronts: int
    worst: int
    """Wavefronts beyond one a request, of the instruction that has most."""
    collisions: Mapping[tuple[tuple[int, ...], ...], int]
    """Rows that meet in a bank, counted from the first of the request's; and in how many requests."""

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond one a request."""
        return self.wavefronts - self.requests


def traffic(tile: Tile, access: Access) -> Traffic:
    """Count the wavefronts of one access to a whole tile."""
    instructions = requests = total = worst = 0
    collisions: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for batch in access.batches(tile):
        needed = [wavefronts(request) for request in batch]
        instructions += 1
        requests += len(batch)
        total += sum(needed)
        worst = max(worst, sum(needed) - len(batch))
        for request in batch:
            if found := colliding_rows(request):
                first = min(touch.row for touch in request)
                collisions[tuple(tuple(row - first for row in rows) for rows in found)] += 1
    return Traffic(
        instructions=instructions,
        requests=requests,
        wavefronts=total,
        worst=worst,
        collisions=MappingProxyType(dict(collisions)),
    )


# ---------------------------------------------------------------- for people and programs


def describe(tile: Tile, *, elements: bool = False) -> str:
    """The tile's banks and conflicts as text; with `elements` a number per pair of elements, not one per chunk."""
    return "\n".join([_headline(tile), "", *_grid(tile, elements), "", *_traffic_lines(tile)])


def as_data(tile: Tile, *, elements: bool = False) -> dict[str, Any]:
    """The same as plain data: bank groups of every row, or with `elements` the bank of every pair of elements too."""
    data: dict[str, Any] = {
        "tile": {"rows": tile.rows, "columns": tile.columns, "swizzle": tile.swizzle},
        "width": tile.width,
        "pitch": tile.pitch,
        "chunks": tile.chunks,
        "kernels_swizzle": tile.widest_swizzle,
        "keys": [tile.key(row) for row in range(tile.rows)],
        "bank_groups": [[tile.bank_group(row, chunk) for chunk in range(tile.chunks)] for row in range(tile.rows)],
    }
    if elements:
        data["banks"] = [[tile.bank(row, pair) for pair in range(0, tile.width, 2)] for row in range(tile.rows)]
    data["accesses"] = {}
    for name, access in ACCESSES.items():
        found = traffic(tile, access)
        data["accesses"][name] = {
            "title": access.title,
            "instruction": access.instruction,
            "instructions": found.instructions,
            "requests": found.requests,
            "wavefronts": found.wavefronts,
            "conflicts": found.conflicts,
            "most_conflicts_of_an_instruction": found.worst,
            "collisions": [{"rows": rows, "requests": count} for rows, count in found.collisions.items()],
        }
    return data


def key_formula(tile: Tile) -> str:
    """The key of a row as an expression, for people."""
    rows = BANK_GROUPS // tile.span
    if tile.swizzle == 0:
        return "0"
    return f"row % {1 << tile.swizzle}" if rows == 1 else f"row / {rows} % {1 << tile.swizzle}"


def banks_of_group(group: int) -> str:
    """The banks of a group, as in ``4-7``."""
    return f"{group * BANKS_OF_CHUNK}-{group * BANKS_OF_CHUNK + BANKS_OF_CHUNK - 1}"


def _headline(tile: Tile) -> str:
    padded = f" padded to {tile.width}" if tile.width != tile.columns else ""
    whose = (
        "as the kernels have it" if tile.swizzle == tile.widest_swizzle else f"the kernels take {tile.widest_swizzle}"
    )
    bits = "1 bit" if tile.swizzle == 1 else f"{tile.swizzle} bits"
    return (
        f"{tile.rows}x{tile.columns}{padded}: {tile.chunks} chunks of 16 bytes a row, pitch {tile.pitch} bytes\n"
        f"swizzle: {bits} of the chunk index, key(row) = {key_formula(tile)} ({whose})"
    )


def _grid(tile: Tile, elements: bool) -> list[str]:
    """One line per row of the pattern."""
    if elements:
        heads = [str(column) for column in range(0, tile.width, 2)]
        cells = [[str(tile.bank(row, column)) for column in range(0, tile.width, 2)] for row in range(PERIOD)]
        title = "bank of the elements at each even column and the next"
    else:
        heads = [str(chunk) for chunk in range(tile.chunks)]
        cells = [[banks_of_group(tile.bank_group(row, chunk)) for chunk in range(tile.chunks)] for row in range(PERIOD)]
        title = "banks of each chunk"
    size = max(len(cell) for line in (heads, *cells) for cell in line)
    lines = [f"{title}; the same in every {PERIOD} rows"]
    lines.append("       " + "  ".join(head.rjust(size) for head in heads))
    lines += [f"row {row}  " + "  ".join(cell.rjust(size) for cell in line) for row, line in enumerate(cells)]
    return lines


def _traffic_lines(tile: Tile) -> list[str]:
    """A table of the accesses, then the rows that collide."""
    found = {name: traffic(tile, access) for name, access in ACCESSES.items()}
    lines = [f"{'':28}{'instruction':19}{'count':>7}{'requests':>10}{'wavefronts':>12}{'conflicts':>11}{'worst':>7}"]
    for name, access in ACCESSES.items():
        it = found[name]
        lines.append(
            f"{access.title:28}{access.instruction:19}{it.instructions:>7}{it.requests:>10}{it.wavefronts:>12}"
            f"{it.conflicts:>11}{it.worst:>7}"
        )
    lines += [
        "requests: an 8x8 matrix, 8 threads of 16 bytes, or a warp of 4 bytes; conflicts: wavefronts beyond one a",
        "request, all over the tile; worst: those of one instruction, for ldmatrix of one 16x16 fragment",
        "",
    ]
    if any(it.collisions for it in found.values()):
        lines.append("rows counted from a request's first:")
    for name, access in ACCESSES.items():
        for rows, count in found[name].collisions.items():
            sets = ", ".join(" ".join(map(str, members)) for members in rows)
            lines.append(f"{access.title}: rows {sets} meet in a bank, in {count} of {found[name].requests} requests")
    if not any(it.collisions for it in found.values()):
        lines.append("no two rows of a request meet in a bank")
    return lines
