"""A model of waves and tiles: the share of a GPU's time that the visible pairs of a problem take, given its kernels.

The rest is what head_dim and lengths are padded to, what a tile costs beside its products, and the last wave of tiles,
for which SMs wait. Rates of one kernel in two problems are as these shares: a measured rate predicts another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from multiattn.problem import Problem

Side = Literal["q", "kv"]

BEGIN_ROWS = 64
"""The rows that a step of `Walk.begin` has."""
LONGEST_WEIGHT = 0.2
"""How much of the longest tile under a mask SMs wait at the end. H200, 2026-11, backward with 5 and 8 query heads a
key head, N=7777 and 4096: of 0.1 to 0.4 this comes nearest to CUDA's rate over Triton's."""
LAST_TILE = 0.25
"""The part of a last tile's rows beyond the end that costs as much as rows do. CUDA's rate over Triton's in forwards,
whose tiles of 192 queries have most of them, is then 2.6 % off in cells left out, else 3.2 % (H100, H200, 2026-11)."""
SEAM_COLUMNS = 8
"""A second piece costs as many columns. H200, 2026-11, forward, Triton's rate over CUDA's, each over cuDNN's beside it:
D=80 of 64 and 16 columns 0.87 to 0.94, D=96 of 64 and 32 0.90, D=144 0.95, D=160 of 128 and 32 1.0."""
EX2_COLUMNS = 128
"""An exponential takes as long as so many multiply-adds, 2048 / 16 a clock on sm90: no forward below D=64 is faster."""
TILES_LOOKED_AT = 128
"""The most tiles of a head under a mask that are looked at; of more every n-th is."""


class Walk(NamedTuple):
    """A kernel of a launch as waves have it."""

    owns: Side
    """The rows that a block owns a tile of. It walks over the others."""
    rows: int
    """Rows of the tile that a block owns, and of those that it walks over, `step`."""
    step: int
    pieces: tuple[float, ...]
    """Columns of products: head_dim, padded, in one piece or several."""
    products: int = 2
    """How many a step has; with one there are no scores."""
    begin: float = 3.0
    """The cost of a tile beside its walk, in steps of `BEGIN_ROWS` rows: one rate then fits all lengths."""
    blocks_per_sm: int = 1
    parts: int = 1
    """Blocks that divide the walk of each tile."""
    is_even: bool = False
    """The last tiles are divided, so that no SM waits for another."""
    slowness: float = 1.0
    """Factor of its time for what tiles do not show: rows that memory has in no whole sectors."""

    @property
    def columns(self) -> float:
        """The columns of one piece that take as long."""
        used = [it for it in self.pieces if it]
        least = EX2_COLUMNS / self.products if self.products > 1 else 0.0
        return max(sum(used) + SEAM_COLUMNS * (len(used) - 1), least)

    def time(self, problem: Problem, multiprocessors: int) -> float:
        """SMs times the time of the last of them, in multiply-adds of one that never waits; 0 where nothing is seen."""
        heads = problem.batch * (problem.heads_q if self.owns == "q" else problem.heads_kv)
        tiles, mean, longest = self._steps(problem)
        group, begin = (1 if self.owns == "q" else problem.group), self.begin * BEGIN_ROWS / self.step
        tiles *= heads * self.parts
        mean, longest = (it * group / self.parts + begin for it in (mean, longest))
        last = tiles * mean / multiprocessors + LONGEST_WEIGHT * longest * problem.is_banded / self.blocks_per_sm
        if longest and not self.is_even:  # blocks that share an SM are faster where others have ended: halfway
            waves = -(-tiles // multiprocessors), -(-tiles // (multiprocessors * self.blocks_per_sm))
            in_waves = mean * (waves[0] + waves[1] * self.blocks_per_sm) / 2
            last = max(last + (in_waves - last) * max(2 * mean / longest - 1, 0.0), longest)
        return multiprocessors * last * self.rows * self.step * self.columns * self.slowness

    def _steps(self, problem: Problem) -> tuple[int, float, float]:
        """Tiles of a head, the mean of their steps, and the most."""
        own, other = problem.seq_q, problem.seq_kv
        left, right = problem.band.reach(own, other)
        level = other - own
        if self.owns == "kv":
            own, other, left, right, level = other, own, right, left, -level
        tiles = -(-own // self.rows)
        last_rows = 1 - (1 - LAST_TILE) * (tiles * self.rows - own) / self.rows
        if not problem.is_banded or not tiles:
            steps = -(-other // self.step)
            return tiles, steps * (tiles - 1 + last_rows) / max(tiles, 1), steps
        found = []
        for tile in range(tiles - 1, -1, -math.ceil(tiles / TILES_LOOKED_AT)):
            first, last = tile * self.rows, min((tile + 1) * self.rows, own)
            begin, end = max(first + level - left, 0), min(last + level + right, other)
            steps = max(-(-end // self.step) - begin // self.step, 0)
            found.append(steps * (last_rows if tile == tiles - 1 else 1.0))
        return tiles, sum(found) / len(found), max(found)


def efficiency(problem: Problem, walks: Sequence[Walk], multiprocessors: int) -> float:
    """The share of the SMs' time that products of visible pairs take; 0 where there are none."""
    pairs = problem.visible_pairs * problem.batch * problem.heads_q * problem.mean_width
    time = sum(it.products * it.time(problem, multiprocessors) for it in walks)
    return pairs * sum(it.products for it in walks) / time if time > 0 else 0.0
