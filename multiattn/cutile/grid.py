"""Grids: how many blocks a launch has, and how many heads advance together. Pure Python: no cuTile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from multiattn.cutile.configs import CutileConfig
from multiattn.problem import Problem

Grid = tuple[int, int, int]

MAX_GRID_X = 2**24 - 1  # cuda.tile's own limit for each dimension
MAX_GRID_Y = 2**16 - 1  # CUDA's
MAX_BLOCKS = 2**31 - 1
GRID_ALLOWED = "a grid within 2^24 x 2^16, and fewer than 2^31 blocks"


def factor_grid(blocks: int) -> Grid | None:
    """A grid of exactly so many blocks, in x and y; None if there is none.

    Nor is there one of more than 2^31 - 1: a kernel numbers them in 32 bits.
    """
    if blocks > MAX_BLOCKS:
        return None
    for y in range(max(1, -(-blocks // MAX_GRID_X)), MAX_GRID_Y + 1):
        if blocks % y == 0:
            return blocks // y, y, 1
    return None


def count_query_tiles(problem: Problem, tile: int) -> int:
    """Tiles of `tile` queries of every head."""
    return -(-problem.seq_q // tile) * problem.heads_q * problem.batch


def count_key_tiles(problem: Problem, tile: int) -> int:
    """Tiles of `tile` keys of every head of keys."""
    return -(-problem.seq_kv // tile) * problem.heads_kv * problem.batch


def divisor_near(wanted: int, heads: int) -> int:
    """The number of heads that advance together: of those that divide `heads` the nearest by ratio, else the smaller.

    Of 11 heads it is 11, not 1, where 8 are wanted: one head at a time costs masked problems up to a tenth.
    """
    divisors = (it for low in range(1, math.isqrt(heads) + 1) if heads % low == 0 for it in (low, heads // low))
    return min(divisors, key=lambda count: (max(wanted / count, count / wanted), count))


# ---------------------------------------------------------------- of the forward


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """Heads that advance together; `spanning`: counted over batch entries, whose heads are then a divisor of them."""

    heads: int
    spanning: bool = False


def together_of(problem: Problem, config: CutileConfig) -> Together:
    """As many heads as the config wants, or nearly: where it wants more than a batch entry has, of several of them.

    A banded section ends with its short tiles, and the next begins with long ones. Where a section is a fraction of
    what runs at one time, the last long ones begin late, and most SMs wait for them. Powers of two of entries, so that
    batches of many sizes share code.
    """
    fit = config.heads_together // problem.heads_q if problem.is_banded else 0
    entries = math.gcd(1 << fit.bit_length() >> 1, problem.batch) if fit else 1
    if entries == 1:
        return Together(heads=divisor_near(config.heads_together, problem.heads_q))
    return Together(heads=entries * problem.heads_q, spanning=True)


def is_linear(problem: Problem, config: CutileConfig, together: Together) -> bool:
    """True if the grid numbers the tiles of all heads: its blocks take several, or it is too large in y or z."""
    x, y, z = _grid_by_head(problem, config, together)
    return config.scheduler == "static" or x > MAX_GRID_X or max(y, z) > MAX_GRID_Y


def _grid_by_head(problem: Problem, config: CutileConfig, together: Together) -> Grid:
    x = -(-problem.seq_q // config.tile_m) * together.heads
    if together.spanning:
        return x, problem.batch * problem.heads_q // together.heads, 1
    return x, problem.heads_q // together.heads, problem.batch


def grid_of(
    problem: Problem, config: CutileConfig, together: Together, multiprocessors: int, *, linear: bool
) -> Grid | None:
    """Blocks in x, y and z on a device of so many SMs; None if there are too many. `linear`: of code that numbers."""
    if not linear:
        return _grid_by_head(problem, config, together)
    tiles = count_query_tiles(problem, config.tile_m)
    grid = factor_grid(tiles)
    if grid is not None and config.scheduler == "static":
        return min(tiles, multiprocessors * (config.occupancy or 1)), 1, 1
    return grid
