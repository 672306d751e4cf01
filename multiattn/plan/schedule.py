"""Tiles: how wide and how many they are, and in which order they run. For the launches of more than one backend."""

from __future__ import annotations

import math
from typing import NamedTuple

from multiattn.packed import USUAL_LENGTH
from multiattn.plan.arch import GPUS, Arch
from multiattn.problem import Problem
from multiattn.sequences import SPLITS_MAX

SCHEDULERS = ("one_tile", "static", "dynamic")
"""``one_tile``: a block per tile of queries. ``static``, ``dynamic``: a block per SM, which takes every n-th tile, or
the next one that a counter in device memory gives it."""
COUNTER_BYTES = 16
"""Size of the tile counter of a dynamic scheduler: one int32, rounded as an allocator rounds it."""
ROWS_MAX = 2**31 - 1 - 256
"""The most rows of a sequence: they are counted in 32 bits, and a tile may end beyond the last one."""
STORED_BYTES = 1 << 30
"""The most memory for dS where a backward stores it. A launch has as many heads as it holds: 2 at N=16384."""
STORED_HEAD_BYTES = 2 << 30
"""The most for dS of one head of keys, where a backward stores no part of a head: N=32768."""
KV_BYTES_SIDE_BY_SIDE = 16 << 20
"""K and V of heads whose tiles run side by side: a part of L2 (40 MB on A100, 50 on H100). A guess, not measured."""


def query_tiles(problem: Problem, rows: int) -> int:
    """Tiles of so many queries, of all heads: the blocks of a launch that has one for each.

    Of a packed batch the most that there can be.
    """
    if problem.packing is not None:
        return problem.packing.tiles_max(problem.seq_q, rows) * problem.heads_q
    return -(-problem.seq_q // rows) * problem.heads_q * problem.batch


def key_tiles(problem: Problem, rows: int) -> int:
    """Tiles of so many keys, of all heads of keys."""
    if problem.packing is not None:
        return problem.packing.tiles_max(problem.seq_kv, rows) * problem.heads_kv
    return -(-problem.seq_kv // rows) * problem.heads_kv * problem.batch


def row_tiles(problem: Problem, rows: int) -> int:
    """Tiles of so many rows, of all sequences and heads of keys, where query heads that share keys are rows of one
    tile."""
    return problem.lengths[0] * problem.heads_kv * -(-problem.rows // rows)


EVEN_ENOUGH = 0.95
"""The share of the best split's evenness that a split with fewer parts must have to be taken. A guess."""


def choose_splits(problem: Problem, arch: Arch, *, tile_m: int, keys_min: int, blocks_per_sm: int) -> int:
    """The parts that the keys of each tile of rows are divided into, each a block's: what the host knows decides.

    As many as the caller asks for. Else the fewest that fill the SMs nearly as evenly as any number does that leaves
    each part `keys_min` keys of the longest sequence. The lengths themselves stay on the device, so that one launch
    fits all.
    """
    if problem.asked_splits is not None:
        return problem.asked_splits
    most = min(SPLITS_MAX, max(problem.seq_kv // keys_min, 1))
    tiles, places = max(row_tiles(problem, tile_m), 1), most_multiprocessors(arch) * blocks_per_sm
    waves = [tiles * splits / places for splits in range(1, most + 1)]
    evenness = [wave / math.ceil(wave) for wave in waves]
    return next(splits for splits, even in enumerate(evenness, 1) if even >= EVEN_ENOUGH * max(evenness))


def heads_side_by_side(problem: Problem) -> int:
    """Query heads whose tiles run at one time, so that what they share stays in L2: whole groups."""
    seq_kv = problem.seq_kv if problem.packing is None else USUAL_LENGTH
    kv_bytes = seq_kv * (problem.head_dim + problem.head_dim_v) * problem.torch_dtype.itemsize
    heads = max(1, KV_BYTES_SIDE_BY_SIDE // kv_bytes) * problem.group
    return min(heads, problem.batch * problem.heads_q)


def kv_heads_side_by_side(problem: Problem) -> int:
    """Heads of keys whose tiles run at one time in a backward, so that Q, dO and fp32 sums of dq stay in L2.

    Kernels without such sums go by the same number.
    """
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.torch_dtype.itemsize + 4 * problem.head_dim
    seq_q = problem.seq_q if problem.packing is None else USUAL_LENGTH
    heads = max(1, KV_BYTES_SIDE_BY_SIDE // (seq_q * row_bytes * problem.group))
    return min(heads, problem.batch * problem.heads_kv)


def kv_heads_of_section(problem: Problem, arch: Arch, *, tiles_of_head: int, shares: int = 1) -> int:
    """Heads of keys side by side of persistent blocks, which take the longest tiles of a section first.

    Shares of a tile count as heads. Under a mask tiles differ. Where heads share keys they are few and their tiles
    long: then a section has tiles for all SMs twice, and sections are of one size, so that the last one is not a small
    one with long tiles, as a simulation of the order showed. Causal, N=4096, 8 query heads a key head, CUDA's kernel
    over FlashAttention-4: D=64 1.00, before 0.86, D=128 0.86, before 0.64 (2026-11-26, H200, before H100).
    """
    heads_kv = problem.batch * problem.heads_kv * shares
    heads = min(kv_heads_side_by_side(problem) * shares, heads_kv)
    least = -(-2 * most_multiprocessors(arch) // max(tiles_of_head, 1))
    if (problem.group == 1 and shares == 1) or not problem.is_banded or heads >= least:
        return heads
    return -(-heads_kv // max(heads_kv // least, 1))


def most_multiprocessors(arch: Arch) -> int:
    """The most SMs that a product of an arch has: so many persistent blocks fill any of them. The CPU has one."""
    return max((gpu.sms for gpu in GPUS if gpu.arch == arch.name), default=1)


# ---------------------------------------------------------------- turns, where P and dS are stored


class Turn(NamedTuple):
    """A part of a problem whose P and dS are stored at a time."""

    first_head: int
    """The first head of keys, through the batch."""
    heads: int
    first_tile: int
    """The first tile of scores, of each query head."""
    tiles: int
    turn: int
    """The number of the turn among those of its heads, of which there are `turns`."""
    turns: int


def stored_turns(problem: Problem, rows: int, tile_bytes: int, sums_bytes: int = 0) -> list[Turn]:
    """Turns have whole heads of keys, or parts of one that are nearly as large; none where `STORED_BYTES` have no tile.

    Args:
        problem: neither packed nor in a cache.
        rows: queries of a tile of scores.
        tile_bytes: memory of a tile of queries, of all heads that share keys.
        sums_bytes: memory of sums beside them, where a head has parts.
    """
    heads, tiles = problem.batch * problem.heads_kv, -(-problem.seq_q // rows)
    head_bytes = tile_bytes * tiles
    if head_bytes <= STORED_BYTES:
        each = _even(heads, STORED_BYTES // max(head_bytes, 1))
        return [Turn(at, min(each, heads - at), 0, tiles, 0, 1) for at in range(0, heads, each)]
    if sums_bytes + tile_bytes > STORED_BYTES:
        return []
    each = _even(tiles, (STORED_BYTES - sums_bytes) // tile_bytes)
    firsts = range(0, tiles, each)
    parts = [(at, min(each, tiles - at), turn, len(firsts)) for turn, at in enumerate(firsts)]
    return [Turn(head, 1, *part) for head in range(heads) for part in parts]


def _even(count: int, most: int) -> int:
    """So many of each part that none has more than `most`, but at least one, and all have nearly as many."""
    parts = -(-count // max(most, 1))
    return max(-(-count // max(parts, 1)), 1)


# ---------------------------------------------------------------- columns, where tiles are powers of two

NARROWEST = 16
"""Columns: the smallest depth of a product that every arch's tensor cores take."""


def power_of_two(number: int) -> int:
    """The least that holds `number`; 1 for 0."""
    return 1 << (max(number, 1) - 1).bit_length()


def one_width(head_dim: int) -> int:
    """The power of two that holds head_dim."""
    return max(NARROWEST, power_of_two(head_dim))


def two_widths(head_dim: int) -> tuple[int, int] | None:
    """Half of `one_width`, and the power of two that holds the rest; None if half is too narrow."""
    first = one_width(head_dim) // 2
    return (first, one_width(head_dim - first)) if first >= NARROWEST else None


def three_widths(head_dim: int) -> tuple[int, int, int] | None:
    """The first of `two_widths`, and those of the rest; None where they are no fewer columns than two tiles."""
    first = one_width(head_dim) // 2
    rest = saving_widths(head_dim - first) if first >= NARROWEST else None
    return (first, *rest) if rest is not None else None


def saving_widths(head_dim: int) -> tuple[int, int] | None:
    """`two_widths` where they are fewer columns than one tile; else None. Of D=96 64 and 32 are a quarter less."""
    widths = two_widths(head_dim)
    return widths if widths is not None and sum(widths) < one_width(head_dim) else None
