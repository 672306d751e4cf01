"""What is fixed when the forward kernel is compiled, and what its loops carry."""

# cuda.tile is untyped, and so are its decorators:
# mypy: disable-error-code="untyped-decorator"

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from multiattn.cutile.configs import SMALLEST_TILE

PLAIN, AHEAD, PAIRS, APART, PILOT, PILOT_PAIRS = 0, 1, 2, 3, 4, 5
"""Pipelines, as `PIPELINES` of the configs has them."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is fixed when the kernel is compiled."""

    tile_m: Any
    tile_n: Any
    tile_d: Any
    """head_dim rounded up to a power of two, with `tail_d` half of that; loads fill up with zeros, stores clip it."""
    tail_d: Any
    """What is left of head_dim, rounded up to a power of two, where it is a part of its own (`parts`); else 0."""
    causal: Any
    masked: Any
    """Whether any block of keys needs a mask: causal, or the last one is not full."""
    heads_together: Any
    spanning: Any
    """Whether those are heads of several batch entries."""
    grouped: Any
    """Whether heads of q share those of k."""
    linear_grid: Any
    """Whether tiles are numbered, as they must be of a static grid, or a block's place is its place in the grid."""
    sign: Any
    """Of the scale: 1, -1 or 0."""
    k_latency: Any  # or None, as v_latency
    v_latency: Any
    tma: Any
    exp2: Any  # from here on as in `Step`
    flush_to_zero: Any
    scale_after_max: Any
    k_transposed: Any
    approximate_division: Any
    ln_base: Any
    lazy_max: Any
    headroom: Any
    """log2 of how much less than one the largest weight of the keys that set the maxima is, with `lazy_max`."""
    diagonal_first: Any
    """Whether `lazy_max` takes the maxima of the first block that needs a mask, of which each row sees some key."""
    pipeline: Any
    static_grid: Any
    """Whether a block takes every n-th tile of n blocks, not one."""
    exp2_fma_sixteenths: Any
    """Of the weights of `lazy_max`: what share of them is a polynomial on the FMA units."""
    q_in_registers: Any


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Running softmax of the tile's rows, fp32."""

    acc: Any  # [tile_m, head_dim]
    m: Any  # [tile_m, 1], in the domain of the step; with lazy_max of one block's keys, or of some
    l: Any  # [tile_m, SUMS]  # noqa: E741 - the paper's name


@ct.function
def pilot_of(shape: Any) -> Any:
    """The same tile of queries with as few keys as a tile can have."""
    return Shape(
        tile_m=shape.tile_m,
        tile_n=SMALLEST_TILE,
        tile_d=shape.tile_d,
        tail_d=shape.tail_d,
        causal=shape.causal,
        masked=True,
        heads_together=1,
        spanning=False,
        grouped=shape.grouped,
        linear_grid=shape.linear_grid,
        sign=shape.sign,
        k_latency=None,
        v_latency=None,
        tma=shape.tma,
        exp2=shape.exp2,
        flush_to_zero=shape.flush_to_zero,
        scale_after_max=shape.scale_after_max,
        k_transposed=shape.k_transposed,
        approximate_division=shape.approximate_division,
        ln_base=shape.ln_base,
        lazy_max=False,
        headroom=0.0,
        diagonal_first=False,
        pipeline=PLAIN,
        static_grid=False,
        exp2_fma_sixteenths=0,
        q_in_registers=False,
    )
