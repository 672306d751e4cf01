"""What a kernel is compiled for: records that it captures. A changed field is other code. Pure Python: no cuTile."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST_TILE = 16
"""Rows: the smallest m, n and k that every arch's tensor cores take."""


@dataclass(frozen=True, kw_only=True)
class ForwardConstants:
    """Of the forward kernel. The rung's flags are those of `CutileStep`, the ways to run those of `CutileConfig`."""

    tile_m: int
    tile_n: int
    tile_d: int
    """head_dim rounded up to a power of two, with `tail_d` half of that; loads fill up with zeros, stores clip it."""
    tail_d: int
    """What is left of head_dim, rounded up to a power of two, where it is a part of its own (`parts`); else 0."""
    banded: bool
    masked: bool
    """Whether any block of keys needs a mask: banded, or the last one is not full."""
    heads_together: int
    spanning: bool
    """Whether those are heads of several batch entries."""
    grouped: bool
    """Whether heads of q share those of k."""
    linear_grid: bool
    """Whether tiles are numbered, as they must be of a static grid, or a block's place is its place in the grid."""
    sign: int
    """Of the scale: 1, -1 or 0."""
    k_latency: int | None
    v_latency: int | None
    tma: bool
    exp2: bool
    flush_to_zero: bool
    scale_after_max: bool
    k_transposed: bool
    approximate_division: bool
    ln_base: float
    lazy_max: bool
    headroom: float
    """log2 of how much less than one the largest weight of the keys that set the maxima is, with `lazy_max`."""
    diagonal_first: bool
    """Whether `lazy_max` takes the maxima of the first block that needs a mask, of which each row sees some key."""
    pipeline: str
    static_grid: bool
    """Whether a block takes every n-th tile of n blocks, not one."""
    exp2_fma_sixteenths: int
    """Of the weights of `lazy_max`: what share of them is a polynomial on the FMA units."""
    q_in_registers: bool


@dataclass(frozen=True, kw_only=True)
class BackwardConstants:
    """Of a backward kernel with products."""

    tile_m: int
    tile_n: int
    tile_d: int
    """head_dim rounded up to a power of two; loads fill the rest with zeros, stores clip it."""
    banded: bool
    ragged: bool
    """Whether the last block of keys is not full."""
    heads_together: int
    latency: int
    """Of the loads in the loop."""
    tma: bool
    tma_columns: bool
    """Whether what the fp32 arrays ``[B, Hq, Sq]`` hold of a row ends at a multiple of 16 bytes, as TMA would clip."""
    spanning = False


@dataclass(frozen=True, kw_only=True)
class QueryGradsConstants(BackwardConstants):
    """Of the first of two passes."""

    has_dlse: bool


@dataclass(frozen=True, kw_only=True)
class RowConstants:
    """Of a kernel that has rows only, before or after the one pass."""

    tile_m: int
    tile_d: int
    latency = 2
    tma = True
    tma_columns = False


@dataclass(frozen=True, kw_only=True)
class RowDeltaConstants(RowConstants):
    """Of the one before."""

    has_dlse: bool


KernelConstants = ForwardConstants | BackwardConstants | RowConstants
