"""docs/rules.md: the record of compiled rules as tables for people, one line where archs or masks agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from tabulate import tabulate

from bench.rule_table import NO_SPILLS_UP_TO, Row, place, spills_where_forbidden

HEADERS = (
    "D",
    "mask",
    "arch",
    "config",
    "kernel",
    "threads",
    "registers",
    "spills",
    "stack",
    "smem",
    "blocks",
    "warps",
)

INTRO = f"""# Every rule, compiled

Made by `python -m bench rules` from `bench/results/compiled/rules.json`; do not edit.

Each rule of each variant is compiled with no GPU for every arch that it names, in bf16, and read back with cuobjdump.

- **spills**: loads and stores of local memory in the loops that every block runs, then those elsewhere in the code: a
  causal forward kernel has a rare repair that may spill. Up to D={NO_SPILLS_UP_TO} there must be none in the loops of
  what a caller gets unasked; a rung that must be named may show what they cost, and of Gluon see docs/gluon.md.
- **stack** is in bytes a thread; **smem** in bytes a block, without the KiB that the system keeps.
- **blocks** of the kernel fit an SM at one time, limited by what is named; **warps** is their share of all that fit.
"""


def page(rows: Sequence[Row]) -> str:
    """The page, from the rows of a record."""
    parts = [INTRO.strip(), _compilers(rows)]
    ordered = sorted(rows, key=place)
    for (backend, direction), members in groupby(ordered, key=lambda row: (row.backend, row.direction)):
        parts.append(f"## {backend}, {direction}")
        for variant, of_variant in groupby(members, key=lambda row: row.variant):
            parts += [f"### {variant}", table(of_variant)]
    return "\n\n".join(parts) + "\n"


def table(rows: Iterable[Row], *, form: str = "github") -> str:
    """One line per kernel; archs of which all else is the same share one, then masks."""
    lines: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        lines.setdefault((row.mask, *_figures(row)), []).append(row.arch)
    merged: dict[tuple[Any, ...], list[str]] = {}
    for (mask, *figures), arches in lines.items():
        merged.setdefault((", ".join(arches), *figures), []).append(mask)
    body: list[tuple[Any, ...]] = [(key[1], " and ".join(masks), key[0], *key[2:]) for key, masks in merged.items()]
    body.sort(key=lambda line: line[0])
    return tabulate(body, headers=HEADERS, tablefmt=form, disable_numparse=True)


def _figures(row: Row) -> tuple[Any, ...]:
    hot = f"**{row.hot_spills}**" if spills_where_forbidden(row) else str(row.hot_spills)
    return (
        row.head_dim,
        row.config,
        row.kernel,
        row.threads,
        row.registers,
        f"{hot} + {row.other_spills}",
        row.stack_bytes,
        row.smem_bytes,
        f"{row.blocks}, {row.limiter}",
        f"{100 * row.share:.0f} %",
    )


def _compilers(rows: Sequence[Row]) -> str:
    found = {row.backend: row.compiler for row in sorted(rows, key=place)}
    return "Compilers: " + "; ".join(f"{name}: {compiler}" for name, compiler in found.items()) + "."
