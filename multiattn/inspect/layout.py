"""Where a tile's elements lie in shared memory, and how many wavefronts it takes to read and to write them.

A model of cuda/include/multiattn/{swizzle,tile}.cuh in plain Python; tests/test_cuda_layout.py holds it to the C++.
Shared memory has 32 banks of 4 bytes and serves each of them once a wavefront (CUDA C++ Programming Guide, "Shared
Memory"). What goes together: the 8 rows of one 8x8 matrix of ldmatrix; 8 neighbouring threads, where each moves 16
bytes; the whole warp, where each moves 4. docs/swizzle.md explains it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from multiattn.inspect.options import table
from multiattn.plan.arch import ARCHS

BANK_BYTES, ELEMENT_BYTES, CHUNK_BYTES = 4, 2, 16
LINE_BYTES = 128
"""Bytes after which the 32 banks repeat."""
CHUNK_ELEMENTS = CHUNK_BYTES // ELEMENT_BYTES
BANK_GROUPS = LINE_BYTES // CHUNK_BYTES
"""Groups of 4 neighbouring banks, as many as a chunk fills."""
PERIOD = 8
"""Rows after which the pattern of banks repeats: 8 rows are a multiple of 128 bytes at any width."""
WARP = 32
SMEM_LIMIT = max(arch.smem_per_block for arch in ARCHS.values())

_TILE = re.compile(r"(\d{1,9})\s*[x,]\s*(\d{1,9})")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTile:
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
        if not problems and (size := self.rows * self.pitch) > SMEM_LIMIT:
            got = f"{self.rows}x{self.columns}, {size} bytes with its padding"
            problems.append(f"tile: got {got}; allowed up to {SMEM_LIMIT} bytes, the most that a block has on any arch")
        if not problems and self.swizzle not in range(self.widest_swizzle + 1):
            allowed = f"0 to {self.widest_swizzle}, as an XOR must stay within {self.span} neighbouring chunks of a row"
            problems.append(f"swizzle: got {self.swizzle} for {self.columns} columns; allowed {allowed}")
        if problems:
            raise ValueError("; ".join(problems))

    @classmethod
    def of_kernels(cls, rows: int, columns: int) -> SharedTile:
        """The tile as the kernels lay it out where they swizzle."""
        plain = cls(rows=rows, columns=columns, swizzle=0)
        return replace(plain, swizzle=plain.widest_swizzle)

    @classmethod
    def parse(cls, tile: str, swizzle: str = "auto") -> SharedTile:
        """From text such as ``64x64`` and ``auto``, ``0``, ``1``, ``2``, ``3``; ValueError for any other."""
        size = _TILE.fullmatch(tile.strip())
        if size is None:
            raise ValueError(f"tile: got {tile!r}; allowed ROWSxCOLUMNS, as in 64x64")
        if not re.fullmatch("auto|[0-3]", swizzle):
            raise ValueError(f"swizzle: got {swizzle!r}; allowed auto, 0, 1, 2, 3: how many bits are XORed")
        rows, columns = int(size[1]), int(size[2])
        found = cls.of_kernels(rows, columns)
        return found if swizzle == "auto" else replace(found, swizzle=int(swizzle))

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
        """The one of the 8 groups of 4 banks that a chunk fills."""
        return self.address(row, chunk) % LINE_BYTES // CHUNK_BYTES

    def bank(self, row: int, column: int) -> int:
        """The bank that an element falls in; elements 2i and 2i + 1 share one."""
        within = column % CHUNK_ELEMENTS * ELEMENT_BYTES
        return (self.address(row, column // CHUNK_ELEMENTS) + within) % LINE_BYTES // BANK_BYTES


Place = tuple[int, int]
"""A row and a chunk of it."""
Touches = Sequence[tuple[int, int]]
"""Row and address that each thread touches of what goes together: one wavefront, if no two rows collide."""


# ---------------------------------------------------------------- who touches what at one time


def down(lane: int) -> Place:
    """Row and chunk of a 16x16 fragment whose address a lane gives in `FragmentReader::down`."""
    return lane % 16, lane // 16


def right(lane: int) -> Place:
    """The place that a lane reads for `FragmentReader::right`."""
    return lane // 16 * 8 + lane % 8, lane // 8 % 2


def _reads(reader: Callable[[int], Place]) -> Callable[[SharedTile], Iterator[Touches]]:
    """ldmatrix.x4 of each 16x16 fragment: four 8x8 matrices, 8 lanes give the rows of each."""

    def of_tile(tile: SharedTile) -> Iterator[Touches]:
        for row, chunk, lane in itertools.product(range(0, tile.rows, 16), range(0, tile.chunks, 2), range(0, WARP, 8)):
            places = [(row + below, chunk + beside) for below, beside in map(reader, range(lane, lane + 8))]
            yield [(place[0], tile.address(*place)) for place in places]

    return of_tile


def _copies(tile: SharedTile) -> Iterator[Touches]:
    """`load_tile`: `span` neighbouring threads share a row, 8 of them store at one time."""
    for row, chunk in itertools.product(range(0, tile.rows, 8 // tile.span), range(0, tile.chunks, tile.span)):
        places = [(row + thread // tile.span, chunk + thread % tile.span) for thread in range(8)]
        yield [(place[0], tile.address(*place)) for place in places]


def _pairs(tile: SharedTile) -> Iterator[Touches]:
    """`PairWriter`: the lanes hold 8 rows of one chunk, 4 bytes each."""
    for row, chunk in itertools.product(range(0, tile.rows, 8), range(tile.chunks)):
        rows = [row + lane // 4 for lane in range(WARP)]
        yield [(it, tile.address(it, chunk) + lane % 4 * 4) for lane, it in enumerate(rows)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """One way in which the kernels touch a whole tile."""

    title: str
    instruction: str
    requests: Callable[[SharedTile], Iterator[Touches]]
    bytes: int = CHUNK_BYTES
    """Bytes that a thread moves."""


ACCESSES: Mapping[str, Access] = MappingProxyType(
    {
        "q": Access(title="read Q as operand A (down)", instruction="ldmatrix.x4", requests=_reads(down)),
        "k": Access(title="read K as operand B (right)", instruction="ldmatrix.x4", requests=_reads(right)),
        "v": Access(title="read V as operand B (down)", instruction="ldmatrix.x4.trans", requests=_reads(down)),
        "copy": Access(title="load_tile, 8 threads", instruction="cp.async 16", requests=_copies),
        "pair": Access(title="PairWriter, a warp", instruction="st.shared.b32", requests=_pairs, bytes=BANK_BYTES),
    }
)
"""By a short name; the first three are the ways in which ldmatrix reads a tile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The cost of touching every element of a tile once."""

    requests: int
    """8x8 matrices, 8 threads of 16 bytes, or warps of 4 bytes a thread."""
    wavefronts: int
    """As many, if nothing collides."""
    collisions: Mapping[tuple[tuple[int, ...], ...], int]
    """Rows that meet in a bank, counted from the first of the request's; and in how many requests."""


def traffic(tile: SharedTile, access: Access) -> Traffic:
    """Count the wavefronts of one access to a whole tile."""
    requests = total = 0
    collisions: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for request in access.requests(tile):
        banks: dict[int, dict[int, int]] = {}  # or groups that one thread fills: the row of each address wanted there
        first, _ = min(request)
        for row, address in request:
            banks.setdefault(address % LINE_BYTES // access.bytes, {})[address] = row - first
        requests += 1
        total += max(map(len, banks.values()))
        if met := {tuple(sorted(rows.values())) for rows in banks.values() if len(rows) > 1}:
            collisions[tuple(sorted(met))] += 1
    return Traffic(requests=requests, wavefronts=total, collisions=MappingProxyType(dict(collisions)))


# ---------------------------------------------------------------- for people


def describe(tile: SharedTile, *, elements: bool = False) -> str:
    """The tile's banks and conflicts as text; with `elements` a number per pair of elements, not one per chunk."""
    padded = f" padded to {tile.width}" if tile.width != tile.columns else ""
    is_theirs = tile.swizzle == tile.widest_swizzle
    whose = "as the kernels have it" if is_theirs else f"the kernels take {tile.widest_swizzle}"
    if elements:
        title, heads = "bank of the elements at each even column and the next", range(0, tile.width, 2)
        cells = [[str(tile.bank(row, column)) for column in heads] for row in range(PERIOD)]
    else:
        title, heads = "banks of each chunk", range(tile.chunks)
        cells = [[banks_of_group(tile.bank_group(row, chunk)) for chunk in heads] for row in range(PERIOD)]
    found = {access: traffic(tile, access) for access in ACCESSES.values()}
    costs = [(it.title, it.instruction, cost.requests, cost.wavefronts) for it, cost in found.items()]
    lines = [
        f"{tile.rows}x{tile.columns}{padded}: {tile.chunks} chunks of 16 bytes a row, pitch {tile.pitch} bytes",
        f"bits of the chunk index that are XORed: {tile.swizzle}, key(row) = {key_formula(tile)} ({whose})",
        f"\n{title}; the same in every {PERIOD} rows",
        table([(f"row {row}", *line) for row, line in enumerate(cells)], ("", *map(str, heads))),
        "\nrequests: an 8x8 matrix, 8 threads of 16 bytes, or a warp of 4 bytes",
        table(costs, ("access", "instruction", "requests", "wavefronts")),
        "\nrows that meet in a bank, counted from a request's first:",
    ]
    for access, cost in found.items():
        for rows, count in cost.collisions.items():
            sets = ", ".join(" ".join(map(str, members)) for members in rows)
            lines.append(f"{access.title}: {sets}, in {count} of {cost.requests} requests")
    return "\n".join(lines if any(it.collisions for it in found.values()) else [*lines, "none"])


def key_formula(tile: SharedTile) -> str:
    """The key of a row as an expression, for people."""
    rows = BANK_GROUPS // tile.span
    if tile.swizzle == 0:
        return "0"
    return f"row % {1 << tile.swizzle}" if rows == 1 else f"row / {rows} % {1 << tile.swizzle}"


def banks_of_group(group: int) -> str:
    """The banks of a group, as in ``4-7``."""
    return f"{4 * group}-{4 * group + 3}"
