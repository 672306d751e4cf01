"""Stream-K for Hopper's backward: which tiles of keys are divided among SMs, and into what ranges.

Persistent blocks take whole tiles. Where there are few, all wait for the longest: then each is divided into shares.
Where all are as long, the last leave SMs idle: these are divided into ranges. Either is by steps of the walks over
queries (Osama et al., "Stream-K", arXiv 2301.03598), and the parts' gradients are summed in the workspace.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from multiattn.cuda.family import FP32_BYTES
from multiattn.mask import Band
from multiattn.plan.schedule import key_tiles
from multiattn.problem import Problem

PART_STEPS = 6
"""Steps that a share costs: a walk that begins and ends, and the way to the sums."""
LONGEST_WEIGHT = 0.4
"""How much of the longest share under a mask SMs wait at the end. Both fit the times of 1 to 8 shares at D=128, N=4096,
causal (H200, 2026-11-26): 16 query heads on 2 of keys 458, 525, 544, 524 TFLOPS; on one of keys 315, 456, 534, 563; 4
heads of one batch entry 281, 372, 331, 282."""
SHARES = (1, 2, 4, 8)
"""Also the divisors of a group up to the largest: shares that each begin with a head run side by side on one Q. H200,
2026-11-29, full, N=3333: 28 heads on 4 at D=128 have 549 TFLOPS in 7 shares, 476 whole, 483 in ranges."""
LEAST_SHARE_STEPS, LEAST_RANGE_STEPS = 16, 32
"""The fewest steps of the longest share, and of a range. Guesses."""
LEAST_GAIN = 1.03
"""How much faster shares must promise to be than whole tiles."""
FEW = 2
"""Tiles of an SM up to which they are divided into shares. At 4, D=64 with 8 query heads a key head, N=4096, was 5 %
slower."""
LEAST_SAVED_STEPS = 24
"""Steps that ranges must save. H200, 2026-11-26, full: N=4096 1 to 2 % faster, 8192 1 to 3 %, 16384 2 to 7 %; with 16
and fewer steps saved up to 3 % slower. 2026-11-29, where heads share keys: D=64 25 on 5 N=7777 525 TFLOPS, 423 whole;
24 on 8 N=5000 501, 434; D=128 40 on 8 N=3333 B=2 599, 493."""
APART_COST = 1.6
"""A step of ranges where heads share keys, in steps of whole tiles: blocks are at different heads and share no Q
and dO. H200, 2026-11-29, full, 64 heads on 8 at D=128, N=4096: 506 TFLOPS in ranges of 481 steps for 512; Triton's
whole ones 634."""
_KEY_WARPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Divided:
    """A schedule of tiles in equal shares, or whole up to `ranges_from` and then in ranges of so many steps.

    With shares `ranges_from` is their number, behind which there are no ranges.
    """

    tiles: int
    shares: int = 1
    ranges_from: int
    ranges: int = 0
    range_steps: int = 0

    def sums_bytes(self, columns: int, tile_n: int) -> int:
        """Workspace of the divided tiles: `columns` of dk and dv in fp32, and a count of steps for each warp."""
        divided = self.tiles if self.shares > 1 else self.tiles - self.ranges_from
        return divided * (tile_n * columns + _KEY_WARPS) * FP32_BYTES


def division_of(problem: Problem, tile_m: int, tile_n: int, multiprocessors: int) -> Divided | None:
    """How tiles are divided among so many SMs; None where whole ones are as good, or in a packed batch."""
    if not multiprocessors or problem.packing is not None:
        return None
    steps = steps_of_tiles(problem, tile_m, tile_n)
    tiles, longest = key_tiles(problem, tile_n), max(steps, default=0)
    seen = sum(it > 0 for it in steps) * problem.batch * problem.heads_kv
    total = sum(steps) * problem.batch * problem.heads_kv
    if not seen:
        return None

    def steps_of_sm(shares: int) -> float:
        parts = seen * shares / multiprocessors
        if not problem.is_banded:  # all are as long
            return math.ceil(parts) * (longest / shares + PART_STEPS)
        share = longest / shares
        return max(share, total / multiprocessors + LONGEST_WEIGHT * share) + parts * PART_STEPS

    is_few = seen <= FEW * multiprocessors
    divisors = (it for it in range(1, SHARES[-1] + 1) if problem.group % it == 0)
    possible = [it for it in {*SHARES, *divisors} if it == 1 or (is_few and longest >= it * LEAST_SHARE_STEPS)]
    shares = min(possible, key=lambda it: steps_of_sm(it) * (1.0 if it == 1 else LEAST_GAIN))
    if shares > 1:
        return Divided(tiles=tiles, shares=shares, ranges_from=tiles * shares)
    divided = tiles % multiprocessors
    range_steps = max(-(-divided * longest // multiprocessors), LEAST_RANGE_STEPS)
    if problem.is_banded or longest - range_steps < LEAST_SAVED_STEPS or not divided:
        return None
    if problem.group > 1 and (divided == tiles or range_steps * APART_COST > longest):
        return None
    ranges = -(-divided * longest // range_steps)
    return Divided(tiles=tiles, ranges_from=tiles - divided, ranges=ranges, range_steps=range_steps)


def steps_of_tiles(problem: Problem, tile_m: int, tile_n: int) -> list[int]:
    """The steps of each tile of keys of a head."""
    return [it * problem.group for it in _steps_of_head(problem.band, problem.seq_q, problem.seq_kv, tile_m, tile_n)]


@functools.lru_cache(maxsize=256)
def _steps_of_head(band: Band, seq_q: int, seq_kv: int, tile_m: int, tile_n: int) -> tuple[int, ...]:
    """The tiles of queries that see each tile of keys of a head, as `Mask::queries` in mask.cuh counts them."""
    left, right = band.reach(seq_q, seq_kv)
    level, found = seq_kv - seq_q, []
    for first in range(0, seq_kv, tile_n):
        begin = max(first - level - right, 0) if band.hides_keys else 0
        end = min(min(first + tile_n, seq_kv) - level + left, seq_q) if band.is_two_sided else seq_q
        found.append(max(-(-end // tile_m) - begin // tile_m, 0))
    return tuple(found)
