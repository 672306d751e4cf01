"""Rules of the kernels that divide keys into parts, for all arches. Some of Hopper are measured.

A tile has as many rows as a sequence, if these are few: then bytes count, not products, and an SM needs some 64 KiB of
keys in flight. Keys that are in no cache come here unasked with few rows alone: other kernels take many of them better.
"""

from __future__ import annotations

from dataclasses import replace

from multiattn.plan.config import COMPILED, Rule
from multiattn.triton.decode import HEAD_DIM_MAX, VALUES_MAX, TritonSplitConfig
from multiattn.triton.kernels.constants import FEW_ROWS
from multiattn.triton.rules.shorthand import decode

_CPU, _SM90 = ("cpu",), ("sm90",)
_BLACKWELL, _LARGE = ("sm100", "sm103"), ("sm80",)
_SMALL = ("sm86", "sm89", "sm120", "sm121")  # 99 KiB of shared memory a block
_INTERPRETED = "interpreted, 2 cores, 2026-11: few and large tiles take the fewest operations"
_IN_FLIGHT = "a guess: 128 KiB of keys in flight on an SM"
_FEW_64 = "H200 2026-11-26: B=8 32/8 8k 38.7 us, two warps 38.2; pages of 16 39.5, 39.6; B=1 32/8 1k 6.6, 7.7"
_FEW_64_16 = (
    "H200 2026-11-26: B=128 64/8 1k, pages of 16, 71.8 us, 3 stages 81.3: 5 programs an SM; B=8 32/8 8k 41.2, 39.7"
)
_FEW_128 = "H200 2026-11-26: B=32 16 heads 8k 483 us, 3 stages 541: 3 programs an SM; B=8 32/8 8k 69.4, 68.2"
_FEW_256 = (
    "H200 2026-11-26: B=32 16 heads 1k 133 us, 3 stages 151; B=8 16/2 8k 41.2, 40.4; B=1 64/8 1k 9.7, more parts 10.8"
)
_CHUNK = "H200 2026-11-26: 512 queries, 64k, 8/1: 313 us, 128 rows 343; pages of 64 340, 389, pages of 16 410, 397"
_WGMMA = "a guess: the tile of a wgmma, no spills"
_BYTES = COMPILED + "all rows are a tile of mma.sync, no spills in the loop"
_PRODUCTS = COMPILED + "tiles of the forward without caches, no spills"
_LITTLE_MEMORY = COMPILED + "99 KiB of shared memory a block"
_SHARED = COMPILED + "8 warps share the accumulator, no spills"
_SPILLS_OUTSIDE = COMPILED + "spills outside the loop alone"
_TWO_PROGRAMS = COMPILED + "of k that has v two programs share an SM; no spills"
_ALL_ROWS = COMPILED + "8 warps share the accumulator, no spills"
_FEW_SPILLS = COMPILED + "the tile of a wgmma: 5 spills in the loop, or 26 of v that is not in k; 64 keys 52"


def _latent(
    arches: tuple[str, ...], why: str, shape: tuple[int, int, int, int], blocks: int, *, rows_max: int | None = None
) -> Rule[TritonSplitConfig]:
    """A rule for absorbed latent attention: k and v fit the memory of a block as one tensor, and as two."""
    return decode(arches, (257, HEAD_DIM_MAX), why, shape, blocks, rows_max=rows_max, v_max=VALUES_MAX)


_RULES: tuple[Rule[TritonSplitConfig], ...] = (
    decode(_CPU, (1, HEAD_DIM_MAX), _INTERPRETED, (16, 64, 4, 1), rows_max=16),
    decode(_CPU, (1, HEAD_DIM_MAX), _INTERPRETED, (32, 64, 4, 1), rows_max=FEW_ROWS),
    decode(_CPU, (1, HEAD_DIM_MAX), _INTERPRETED, (64, 64, 4, 1)),
    # ---------------------------------------------------------------- sm90
    decode(_SM90, (1, 64), _FEW_64, (16, 64, 4, 3), 4, rows_max=16, page_multiple=32, widens=True),
    decode(_SM90, (1, 64), _FEW_64_16, (16, 64, 4, 4), 4, rows_max=16, widens=True),
    decode(_SM90, (65, 128), _FEW_128, (16, 64, 4, 4), 2, rows_max=16, widens=True),
    decode(_SM90, (129, 256), _FEW_256, (16, 32, 4, 4), 2, rows_max=16, keys_min=128),
    decode(_SM90, (1, 64), _IN_FLIGHT, (32, 64, 4, 3), 4, rows_max=FEW_ROWS),
    decode(_SM90, (65, 128), _IN_FLIGHT, (32, 64, 4, 3), 2, rows_max=FEW_ROWS),
    decode(_SM90, (129, 256), _IN_FLIGHT, (32, 32, 4, 3), 2, rows_max=FEW_ROWS),
    decode(_SM90, (1, 128), _WGMMA, (64, 64, 4, 3), 2, rows_max=64),
    decode(_SM90, (1, 64), _WGMMA, (128, 64, 8, 3), 2),
    decode(_SM90, (65, 128), _CHUNK, (64, 64, 4, 3), 2),
    decode(_SM90, (129, 256), _WGMMA, (128, 32, 8, 2), 1),
    # ---------------------------------------------------------------- sm80, sm100, sm103
    decode((*_LARGE, *_BLACKWELL), (1, 128), _BYTES, (16, 64, 4, 3), 2, rows_max=16),
    decode((*_LARGE, *_BLACKWELL), (129, 256), _BYTES, (16, 32, 4, 3), 2, rows_max=16),
    decode((*_LARGE, *_BLACKWELL), (1, 128), _BYTES, (32, 64, 4, 3), 2, rows_max=FEW_ROWS),
    decode((*_LARGE, *_BLACKWELL), (129, 256), _BYTES, (32, 32, 4, 3), 2, rows_max=FEW_ROWS),
    decode(_BLACKWELL, (1, 128), _PRODUCTS, (128, 64, 8, 3), 1),
    decode(_BLACKWELL, (129, 256), _SPILLS_OUTSIDE, (128, 32, 8, 2), 1),
    decode(_LARGE, (1, 128), _PRODUCTS, (128, 64, 8, 2), 1),
    decode(_LARGE, (129, 256), _SHARED, (64, 32, 8, 2), 1),
    # ---------------------------------------------------------------- little shared memory
    decode(_SMALL, (1, 64), _BYTES, (16, 64, 4, 3), 2, rows_max=16),
    decode(_SMALL, (65, 256), _LITTLE_MEMORY, (16, 32, 4, 3), 1, rows_max=16),
    decode(_SMALL, (1, 64), _BYTES, (32, 64, 4, 3), 2, rows_max=FEW_ROWS),
    decode(_SMALL, (65, 256), _LITTLE_MEMORY, (32, 32, 4, 3), 1, rows_max=FEW_ROWS),
    decode(_SMALL, (1, 64), _PRODUCTS, (64, 64, 4, 2), 1),
    decode(_SMALL, (65, 128), _PRODUCTS, (128, 32, 8, 3), 1),
    decode(_SMALL, (129, 256), _SHARED, (64, 32, 8, 2), 1),
    # ---------------------------------------------------------------- more columns than one tile has
    _latent((*_SM90, *_BLACKWELL), _TWO_PROGRAMS, (16, 32, 8, 3), 2, rows_max=16),
    _latent(_LARGE, _ALL_ROWS, (16, 32, 8, 3), 1, rows_max=16),
    _latent(_SMALL, _LITTLE_MEMORY, (16, 32, 8, 2), 1, rows_max=16),
    _latent((*_SM90, *_BLACKWELL), _ALL_ROWS, (32, 32, 8, 3), 1, rows_max=FEW_ROWS),
    _latent(_LARGE, _ALL_ROWS, (32, 32, 8, 2), 1, rows_max=FEW_ROWS),
    _latent(_SM90, _FEW_SPILLS, (64, 32, 8, 2), 1),
    _latent((*_LARGE, *_BLACKWELL), _SPILLS_OUTSIDE, (64, 32, 8, 2), 1),
    _latent(_SMALL, _LITTLE_MEMORY, (32, 16, 8, 2), 1),
)
"""The first that applies wins: those for the fewest rows come first."""


def _of_many_rows(rule: Rule[TritonSplitConfig]) -> tuple[Rule[TritonSplitConfig], ...]:
    """A rule for caches, and for callers that name the variant."""
    return replace(rule, cached=True), replace(rule, only_named=True)


RULES: tuple[Rule[TritonSplitConfig], ...] = tuple(
    each for rule in _RULES for each in ((rule,) if rule.rows_max in (16, FEW_ROWS) else _of_many_rows(rule))
)
