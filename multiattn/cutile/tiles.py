"""What the forward and the backward kernels share: annotations, where a tile lives, and which keys its rows see."""

# cuda.tile is untyped, and so are its decorators and aliases:
# mypy: disable-error-code="untyped-decorator, valid-type"

from dataclasses import dataclass
from typing import Annotated, Any

import cuda.tile as ct

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]
ConstFloat = ct.Constant[float]
# head_dim is static: else a D that is no multiple of 16 is loaded element by element on sm80 to sm89 (seen in the SASS
# at D=40: 288 LDG; static: 24 LDGSTS).
Array32 = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Array64 = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,), index_dtype=ct.int64)]
Rows64 = ct.IndexedWithInt64[ct.Array]

ZERO = ct.PaddingMode.ZERO


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the block's queries and the keys they see live: the one spot that knows about batches and heads."""

    batch: Any
    head: Any
    head_kv: Any
    tile: Any
    seq_q: Any
    seq_kv: Any


@ct.function
def find_place(shape: Any, q: Any, k: Any) -> Any:
    """What a block owns that takes one tile of queries."""
    return place_tile(shape, q, k, ct.bid(1) * ct.num_blocks(0) + ct.bid(0))


@ct.function
def place_tile(shape: Any, q: Any, k: Any, number: Any) -> Any:
    """Where the tile of queries of a number lives; numbers of all heads count on from 0.

    `heads_together` heads (a divisor of the heads of q) advance together, so that blocks that run at one time share
    keys in L2. Causal: the last tiles, which see most keys, go first, and the short ones fill the tail.
    """
    heads = q.shape[1]
    tiles = ct.cdiv(q.shape[2], shape.tile_m)
    section = number // (tiles * shape.heads_together)
    rest = number % (tiles * shape.heads_together)
    tile = rest // shape.heads_together
    if shape.causal:
        tile = tiles - 1 - tile
    batch_head = section * shape.heads_together + rest % shape.heads_together
    head = batch_head % heads
    return Place(
        batch=batch_head // heads,
        head=head,
        head_kv=head // (heads // k.shape[1]),
        tile=tile,
        seq_q=q.shape[2],
        seq_kv=k.shape[2],
    )


@ct.function
def key_blocks(shape: Any, place: Any) -> Any:
    """(first, first_masked, end): every row sees all of blocks ``first..first_masked``; the rest needs the mask."""
    if shape.causal:
        offset = place.seq_kv - place.seq_q
        first_row = place.tile * shape.tile_m
        seen_by_first_row = max(0, min(first_row + offset + 1, place.seq_kv))
        seen_by_last_row = max(0, min(first_row + offset + shape.tile_m, place.seq_kv))
        return 0, seen_by_first_row // shape.tile_n, ct.cdiv(seen_by_last_row, shape.tile_n)
    return 0, place.seq_kv // shape.tile_n, ct.cdiv(place.seq_kv, shape.tile_n)


@ct.function
def is_visible(shape: Any, place: Any, block: Any) -> Any:
    """Which keys of a block each query sees, bool ``[tile_m, tile_n]``; causal is bottom-right aligned.

    Causal needs no look at the end: the last query sees the last key, and of rows beyond it nothing is kept.
    """
    row = place.tile * shape.tile_m + ct.arange(shape.tile_m, dtype=ct.int32)[:, None]
    col = block * shape.tile_n + ct.arange(shape.tile_n, dtype=ct.int32)[None, :]
    if shape.causal:
        return col <= row + (place.seq_kv - place.seq_q)
    return col < place.seq_kv
