"""The modification of scores, of both directions: the one place that calls the functions of a program.

``const.score`` is None, or those functions (`multiattn.cutile.score`), and `Place.aux` what they read. Without one, a
score is the product of q and k, and its factor makes it one of the log2 domain.
"""

from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import tiles
from multiattn.cutile.kernels.tiles import ConstBool


@ct.function
def has_score(const: Any) -> Any:
    """True if a program has scores of its own: one may have a mask alone."""
    return const.score is not None and const.score.score is not None


@ct.function
def modify(const: Any, place: Any, s: Any, block: Any) -> Any:
    """Scores ``[tile_m, tile_n]`` of a block of keys, of products of q and k; without a program these."""
    if has_score(const):
        row, col = tiles.positions(const, place, block)
        batch = tiles.batch_of(const, place)
        s = const.score.score(s, batch, place.head, row, col, place.seq_q, place.seq_kv, place.aux)
    return s


@ct.function
def modify_with_slope(const: Any, place: Any, s: Any, factor: Any, block: Any, transposed: ConstBool) -> Any:
    """Scores in the log2 domain ``[tile_m, tile_n]``, or transposed as s, and the slope of each, None where all are 1.

    `factor` makes scores of s without a program.
    """
    slope = None
    if not has_score(const):
        s = s * factor
    else:
        row, col = tiles.positions(const, place, block)
        if transposed:
            row, col = row.transpose(), col.transpose()
        batch = tiles.batch_of(const, place)
        if const.score.is_additive:
            s = const.score.score(s, batch, place.head, row, col, place.seq_q, place.seq_kv, place.aux)
        else:
            s, slope = const.score.score_and_slope(s, batch, place.head, row, col, place.seq_q, place.seq_kv, place.aux)
    return s, slope


@ct.function
def wants_gradients(const: Any) -> Any:
    """True if captured tensors want a gradient."""
    return const.score is not None and const.score.load_gradients is not None


@ct.function
def add_gradients(const: Any, place: Any, raw: Any, dscore: Any, block: Any, sums: Any) -> None:
    """Add to the gradients of captured tensors, of transposed tiles ``[tile_n, tile_m]``.

    `raw` is the product of q and k, `dscore` the gradient of the modified score, in the natural domain.
    """
    row, col = tiles.positions(const, place, block)
    row, col = row.transpose(), col.transpose()
    batch = tiles.batch_of(const, place)
    const.score.load_gradients(raw, dscore, batch, place.head, row, col, place.seq_q, place.seq_kv, place.aux, sums, 1)
