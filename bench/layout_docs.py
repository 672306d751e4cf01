"""docs/swizzle.md and docs/fragments.md: ``python -m bench.layout_docs`` makes their tables and pictures again.

What stands between ``<!-- layout:NAME -->`` and ``<!-- /layout -->`` is generated; ``--check`` only says what is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bench import verb_sass
from bench.errors import InputError
from multiattn.cuda import fragments
from multiattn.cuda.layout import ACCESSES, BANK_GROUPS, PERIOD, Tile, describe, key_formula, traffic
from multiattn.cuda.layout_svg import draw

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("swizzle.md", "fragments.md")
PICTURES: Mapping[str, Tile] = MappingProxyType(
    {
        "swizzle-none.svg": Tile(rows=16, columns=64, swizzle=0),
        "swizzle-xor.svg": Tile(rows=16, columns=64, swizzle=3),
    }
)
WIDTHS = (16, 32, 48, 64, 80, 96, 128, 192, 256, 512, 1024)

_MARKED = re.compile(r"(<!-- layout:([\w-]+) -->\n).*?(<!-- /layout -->)", re.DOTALL)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# ---------------------------------------------------------------- swizzle.md


def example(swizzle: int) -> str:
    """What the command prints for the tile of the pictures."""
    tile = Tile(rows=16, columns=64, swizzle=swizzle)
    return f"```\n$ python -m multiattn layout --tile 16x64 --swizzle {swizzle}\n{describe(tile)}\n```"


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


def sass_block() -> str:
    """What each verb becomes."""
    return verb_sass.table(verb_sass.all_instructions())


def unlisted_block() -> str:
    """The verbs that have no row, and why."""
    return "\n".join(f"- `{name}`: {why}" for name, why in verb_sass.WITHOUT_ROW.items())


BLOCKS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "groups": groups_block,
        "keys": keys_block,
        "conflicts": conflicts_block,
        "accesses": accesses_block,
        "example-none": lambda: example(0),
        "example-xor": lambda: example(3),
        "a": a_block,
        "b": b_block,
        "c": c_block,
        "ldmatrix": ldmatrix_block,
        "operands": operands_block,
        "unlisted": unlisted_block,
        "sass": sass_block,
        "compilers": lambda: f"{verb_sass.compilers()}.",
    }
)
COMPILED = ("sass", "compilers")
"""Blocks that need NVRTC and cuobjdump."""
NOT_COMPARED = ("compilers",)
"""A newer compiler that gives the same table leaves it current."""


def blocks_of(text: str) -> dict[str, str]:
    """What stands between the markers of a page, by name."""
    return {match[2]: match[0][len(match[1]) : -len(match[3])].strip("\n") for match in _MARKED.finditer(text)}


def render(text: str, *, compiled: bool) -> str:
    """`text` with every block made again, those that need a compiler only where `compiled`.

    InputError for a marker that names no block.
    """

    def replacement(match: re.Match[str]) -> str:
        name = match[2]
        if name not in BLOCKS:
            raise InputError(f"<!-- layout:{name} -->: nothing generates it; there are {', '.join(BLOCKS)}")
        if name in COMPILED and not compiled:
            return match[0]
        return f"{match[1]}\n{BLOCKS[name]()}\n\n{match[3]}"

    return _MARKED.sub(replacement, text)


def stale(page: str, *, compiled: bool) -> list[str]:
    """The blocks of a page that are not what generates them, by name."""
    text = (DOCS / page).read_text()
    old, new = blocks_of(text), blocks_of(render(text, compiled=compiled))
    return [name for name in old if old[name] != new[name] and name not in NOT_COMPARED]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages and pictures, or with ``--check`` only compare; 1 where that finds something stale."""
    parser = argparse.ArgumentParser(prog="python -m bench.layout_docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where something is stale")
    options = parser.parse_args(arguments)
    missing = verb_sass.why_not()
    if missing:
        print(f"the table of SASS is left as it is: {missing}")
    old = [f"{page}: {name}" for page in PAGES for name in stale(page, compiled=missing is None)]
    for name, tile in PICTURES.items():
        path = DOCS / name
        if not path.exists() or path.read_text() != draw(tile):
            old.append(name)
            if not options.check:
                path.write_text(draw(tile))
    if not options.check:
        for page in PAGES:
            path = DOCS / page
            if stale(page, compiled=missing is None):
                path.write_text(render(path.read_text(), compiled=missing is None))
    print("".join(f"{'stale' if options.check else 'written'}: {name}\n" for name in old) or "all current\n", end="")
    return int(bool(old) and options.check)


if __name__ == "__main__":
    sys.exit(main())
