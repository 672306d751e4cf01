"""Tables and pictures of docs/swizzle.md and docs/fragments.md: banks, and the tensor core's fragments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from bench.errors import InputError
from multiattn.inspect import fragments
from multiattn.inspect.layout import ACCESSES, BANK_GROUPS, PERIOD, Tile, key_formula, traffic

PICTURES: Mapping[str, Tile] = MappingProxyType(
    {
        "swizzle-none.svg": Tile(rows=16, columns=64, swizzle=0),
        "swizzle-xor.svg": Tile(rows=16, columns=64, swizzle=3),
    }
)
WIDTHS = (16, 32, 48, 64, 80, 96, 128, 192, 256, 512, 1024)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# ---------------------------------------------------------------- swizzle.md


def keys_block() -> str:
    """The key of each row, for each span."""
    tiles = [Tile.of_kernels(16, columns) for columns in (64, 32, 16)]
    names = ("multiple of 8", "other multiple of 4", "other even number")
    rows = [
        (name, tile.span, f"`{key_formula(tile)}`", " ".join(str(tile.key(row)) for row in range(PERIOD)))
        for name, tile in zip(names, tiles, strict=True)
    ]
    return markdown(("chunks of a row", "SPAN", "key(row)", f"rows 0 to {PERIOD - 1}"), rows)


def groups_block() -> str:
    """Where each row starts without a swizzle: what the XOR has to tell apart."""
    rows = []
    for columns in (64, 32, 16, 48):
        tile = Tile(rows=16, columns=columns, swizzle=0)
        starts = [tile.bank_group(row, 0) for row in range(PERIOD)]
        shared = BANK_GROUPS // len(set(starts))
        rows.append((columns, tile.chunks, " ".join(map(str, starts)), shared, tile.span))
    return markdown(
        ("columns", "chunks", f"bank group of chunk 0, rows 0 to {PERIOD - 1}", "rows a group", "SPAN"), rows
    )


def conflicts_block() -> str:
    """Wavefronts of one 8x8 matrix by width and swizzle."""
    rows = []
    for columns in WIDTHS:
        tiles = [
            Tile(rows=16, columns=columns, swizzle=bits)
            for bits in range(Tile.of_kernels(16, columns).widest_swizzle + 1)
        ]
        counts = []
        for tile in tiles:
            reads = [traffic(tile, ACCESSES[name]) for name in ("q", "k", "v")]
            counts.append(" or ".join(dict.fromkeys(f"{it.wavefronts / it.requests:g}" for it in reads)))
        rows.append((columns, tiles[0].chunks, tiles[0].span, *counts, *[""] * (4 - len(counts))))
    return markdown(("columns", "chunks", "SPAN", "0 bits", "1 bit", "2 bits", "3 bits"), rows)


def accesses_block() -> str:
    """Wavefronts of every access to a 64x64 tile."""
    plain, xored = Tile(rows=64, columns=64, swizzle=0), Tile(rows=64, columns=64, swizzle=3)
    rows = []
    for access in ACCESSES.values():
        without, with_it = traffic(plain, access), traffic(xored, access)
        rows.append((access.title, f"`{access.instruction}`", without.requests, without.wavefronts, with_it.wavefronts))
    return markdown(("access", "instruction", "requests", "wavefronts without", "with"), rows)


# ---------------------------------------------------------------- fragments.md


def grid(held: Mapping[fragments.Element, str], rows: int, columns: int, corner: str, *, down: bool = False) -> str:
    """A matrix with the holder of each pair in its cell; pairs lie along a row, or `down` a column.

    InputError where a pair is not the low and the high half of one register.
    """
    high, wide = (2, 1) if down else (1, 2)
    body = []
    for row in range(0, rows, high):
        holders = [held[row, column] for column in range(0, columns, wide)]
        seconds = [held[row + high - 1, column + wide - 1] for column in range(0, columns, wide)]
        if seconds != [f"{holder} high" for holder in holders]:
            raise InputError(f"row {row}: the pairs of {holders} are split")
        body.append((f"**{_span(row, high)}**", *holders))
    return markdown((corner, *(_span(column, wide) for column in range(0, columns, wide))), body)


def _span(first: int, count: int) -> str:
    return ", ".join(map(str, range(first, first + count)))


def a_block() -> str:
    """Who holds operand A."""
    return grid(fragments.holders(fragments.operand_a, 4, "a"), 16, 16, "row \\ k")


def b_block() -> str:
    """Who holds operand B."""
    return grid(fragments.holders(fragments.operand_b, 2, "b"), 16, 8, "k \\ column", down=True)


def c_block() -> str:
    """Who holds the accumulator: fp32 first, then fp16."""
    rows = []
    for row in range(16):
        cells = []
        for column in range(0, 8, 2):
            lane, register = row % 8 * 4 + column // 2, row // 8
            first, second = (fragments.accumulator(lane, 2 * register + half) for half in (0, 1))
            pair = [fragments.accumulator_fp16(lane, register, half) for half in (0, 1)]
            if not [first, second] == pair == [(row, column), (row, column + 1)]:
                raise InputError(f"accumulator: T{lane} does not hold row {row}, columns {column} and {column + 1}")
            cells.append(f"T{lane} c{2 * register}, c{2 * register + 1} / h{register}")
        rows.append((f"**{row}**", *cells))
    return markdown(("row \\ column", *(f"{column}, {column + 1}" for column in range(0, 8, 2))), rows)


def ldmatrix_block() -> str:
    """Per row of an 8x8 matrix in memory: whose address it is, and who gets its elements."""
    rows = []
    for row in range(8):
        plain, transposed = ([""] * 8, [""] * 8)
        for lane in range(32):
            for half in range(2):
                for cells, flag in ((plain, False), (transposed, True)):
                    at, column = fragments.matrix_element(lane, half, transposed=flag)
                    if at == row:
                        cells[column] = f"{lane}{'hi' if half else 'lo'}"
        givers = ", ".join(str(lane) for lane in range(32) if fragments.matrix_row(lane)[1] == row)
        rows.append((f"**{row}**", givers, " ".join(plain), " ".join(transposed)))
    headers = ("row", "lanes that give its address (matrix 0, 1, 2, 3)", "lanes that get columns 0 to 7", "with .trans")
    return markdown(headers, rows)


def operands_block() -> str:
    """Which 8x8 part of a 16x16 part of a tile lands in which register, by reader."""
    rows = []
    for title, reader, transposed in fragments.READS:
        places = []
        for register in range(4):
            row, column = fragments.loaded(reader, 0, register, 0, transposed=transposed)
            places.append(f"rows {row}-{row + 7}, columns {column}-{column + 7}")
        rows.append((title, *places))
    return markdown(("read", "register 0", "register 1", "register 2", "register 3"), rows)


SWIZZLE: Mapping[str, Callable[[], str]] = MappingProxyType(
    {"groups": groups_block, "keys": keys_block, "conflicts": conflicts_block, "accesses": accesses_block}
)
FRAGMENTS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {"a": a_block, "b": b_block, "c": c_block, "ldmatrix": ldmatrix_block, "operands": operands_block}
)
