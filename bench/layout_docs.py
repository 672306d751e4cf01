"""Tables and pictures of docs/swizzle.md and docs/fragments.md: banks, and the tensor core's fragments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from bench.report import markdown
from multiattn.inspect import fragments
from multiattn.inspect.layout import ACCESSES, PERIOD, SharedTile, key_formula, traffic

PICTURES: Mapping[str, SharedTile] = MappingProxyType(
    {f"swizzle-{name}.svg": SharedTile(rows=16, columns=64, swizzle=bits) for name, bits in (("none", 0), ("xor", 3))}
)
WIDTHS = (16, 32, 48, 64, 96, 256, 1024)
ROWS = range(PERIOD)


def keys_block() -> str:
    """The key of each row, for each span."""
    kinds = (("multiple of 8", 64), ("other multiple of 4", 32), ("other even number", 16))
    tiles = [(name, SharedTile.of_kernels(16, columns)) for name, columns in kinds]
    rows = [(name, it.span, f"`{key_formula(it)}`", " ".join(str(it.key(row)) for row in ROWS)) for name, it in tiles]
    return markdown(("chunks of a row", "SPAN", "key(row)", f"rows 0 to {PERIOD - 1}"), rows)


def conflicts_block() -> str:
    """Wavefronts of one 8x8 matrix by width and swizzle."""
    rows = []
    for columns in WIDTHS:
        widest = SharedTile.of_kernels(16, columns).widest_swizzle
        tiles = [SharedTile(rows=16, columns=columns, swizzle=bits) for bits in range(widest + 1)]
        reads = [[traffic(tile, ACCESSES[name]) for name in ("q", "k", "v")] for tile in tiles]
        counts = [" or ".join(dict.fromkeys(f"{it.wavefronts / it.requests:g}" for it in its)) for its in reads]
        rows.append((columns, tiles[0].chunks, tiles[0].span, *counts, *[""] * (4 - len(counts))))
    return markdown(("columns", "chunks", "SPAN", "0 bits", "1 bit", "2 bits", "3 bits"), rows)


def accesses_block() -> str:
    """Wavefronts of every access to a 64x64 tile."""
    plain, xored = (SharedTile(rows=64, columns=64, swizzle=bits) for bits in (0, 3))
    found = [(access, traffic(plain, access), traffic(xored, access)) for access in ACCESSES.values()]
    rows = [(it.title, f"`{it.instruction}`", a.requests, a.wavefronts, b.wavefronts) for it, a, b in found]
    return markdown(("access", "instruction", "requests", "wavefronts without", "with"), rows)


def ldmatrix_block() -> str:
    """The lane that gives the address of each row of an 8x8 matrix in memory, and those that get its elements."""
    rows = []
    for row in range(8):
        getters = []
        for transposed in (False, True):
            held = {fragments.matrix_element(lane, half, transposed=transposed): f"{lane}{('lo', 'hi')[half]}"
                    for lane in range(32) for half in range(2)}  # fmt: skip
            getters.append(" ".join(held[row, column] for column in range(8)))
        givers = ", ".join(str(lane) for lane in range(32) if fragments.matrix_row(lane)[1] == row)
        rows.append((f"**{row}**", givers, *getters))
    headers = ("row", "lanes that give its address (matrix 0, 1, 2, 3)", "lanes that get columns 0 to 7", "with .trans")
    return markdown(headers, rows)


def operands_block() -> str:
    """The 8x8 part of a 16x16 part of a tile that lands in each register, by reader."""
    rows = []
    for title, reader, transposed in fragments.READS:
        places = (fragments.loaded(reader, 0, register, 0, transposed=transposed) for register in range(4))
        rows.append((title, *(f"rows {row}-{row + 7}, columns {column}-{column + 7}" for row, column in places)))
    return markdown(("read", *(f"register {register}" for register in range(4))), rows)


Blocks = Mapping[str, Callable[[], str]]
SWIZZLE: Blocks = MappingProxyType({"keys": keys_block, "conflicts": conflicts_block, "accesses": accesses_block})
FRAGMENTS: Blocks = MappingProxyType({"ldmatrix": ldmatrix_block, "operands": operands_block})
