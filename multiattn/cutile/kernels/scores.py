"""The modification of scores, of both directions: the one place that calls the functions of a program.

``const.score`` is None, or those functions (`multiattn.cutile.score`), and `Place.aux` what they read. Without one, a
score is the product of q and k, and its factor makes it one of the log2 domain.
"""

from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import tiles
from multiattn.cutile.kernels.tiles import ConstBool


@ct.function
def modify(const: Any, place: Any, s: Any, block: Any) -> Any:
    """Scores ``[tile_m, tile_n]`` of a block of keys, of products of q and k; without a program these."""
    if const.score is not None:
        row, col = tiles.positions(const, place, block)
        s = const.score.score(s, place.batch, place.head, row, col, place.seq_q, place.seq_kv, place.aux)
    return s


@ct.function
def modify_with_slope(const: Any, place: Any, s: Any, factor: Any, block: Any, transposed: ConstBool) -> Any:
    """Scores in the log2 domain ``[tile_m, tile_n]``, or transposed as s, and the slope of each, None where all are 1.

    `factor` makes scores of s without a program.
    """
    slope = None
    if const.score is None:
        s = s * factor
    else:
        row, col = tiles.positions(const, place, block)
        if transposed:
            row, col = row.transpose(), col.transpose()
        if const.score.is_additive:
            s = const.score.score(s, place.batch, place.head, row, col, place.seq_q, place.seq_kv, place.aux)
        else:
            s, slope = const.score.score_and_slope(
                s, place.batch, place.head, row, col, place.seq_q, place.seq_kv, place.aux
            )
    return s, slope
