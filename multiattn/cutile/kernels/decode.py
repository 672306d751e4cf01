"""The forward of few queries in cuTile: Dao et al., "Flash-Decoding" (https://pytorch.org/blog/flash-decoding/).

With one query a head every key is read for next to no work, so all that counts is how fast the chip reads. Query heads
that share keys are rows of one tile (`rows`), so keys are read once, wherever they are (`keys`). The keys that a tile
sees are divided among `splits` blocks, enough to fill the chip. Each walks as any forward does and leaves a softmax of
its own part, divided by its sum of weights, and the log2 of that sum; a second kernel merges the parts (`merge`). With
one split the first kernel writes results itself.

Lengths of keys in a cache (`multiattn.sequences`), and the pages that have them, are read here alone.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import forward, rows, scaling, walk
from multiattn.cutile.kernels.constants import SplitKeysConstants
from multiattn.cutile.kernels.keys import number_at
from multiattn.cutile.kernels.packed import Sequence
from multiattn.cutile.kernels.tiles import Array32, Derived, Place, Reach, Tuple32, Vectors32


@ct.function
def find_place(const: Any, q: Any, k: Any, cache: Any, reach: Any, aux: Any) -> Any:
    """The rows that a block owns. Tiles of rows of all sequences are x of the grid, heads of keys y, splits z.

    `cache` has the lengths of keys, then the page table, where queries start and two arrays of scales, as far as there
    are any.
    """
    group = q.shape[1] // k.shape[1]
    batch, tile = ct.bid(0), 0
    if not const.one_tile:
        tiles_of_rows = ct.cdiv(q.shape[2] * group, const.tile_m)
        if const.packed_queries:
            tiles_of_rows = ct.num_blocks(0) // cache[0].shape[0]
        batch = ct.bid(0) // tiles_of_rows
        tile = ct.bid(0) - batch * tiles_of_rows
    offset_q, seq_q, seq_kv = 0, q.shape[2], k.shape[2]
    if const.cached:  # whatever the device says, rows are those that there are
        room = k.shape[2]
        if const.paged:
            room = room * cache[1].shape[1]
        seq_kv = max(0, min(number_at(cache[0], batch), room))
    if const.packed_queries:
        starts = cache[1 + const.paged]
        offset_q = max(0, min(number_at(starts, batch), q.shape[2]))
        seq_q = max(0, min(number_at(starts, batch + 1), q.shape[2]) - offset_q)
    row = tile * const.tile_m + ct.arange(const.tile_m, dtype=ct.int32)[:, None]  # [tile_m, 1]
    query = row // group
    first_key = None
    if const.cached and const.two_sided:
        first_key = max(0, tile * const.tile_m // group + (seq_kv - seq_q) - reach[0])
    entry = result = 0 if const.packed_queries else batch
    if const.divided:  # parts of one split lie behind those of another
        result = ct.bid(2) * q.shape[0] + entry
    return Place(
        batch=batch,
        head=ct.bid(1) * group + (row - query * group),  # [tile_m, 1]
        head_kv=ct.bid(1),
        tile=tile,
        seq_q=seq_q,
        seq_kv=seq_kv,
        reach=reach,
        aux=aux,
        sequence=Sequence(number=batch, offset_q=offset_q, offset_kv=0),
        query=query,
        group=group,
        entry=entry,
        result=result,
        cache=cache,
        scales=cache[1 + const.paged + const.packed_queries :],
        first_key=first_key,
    )


@ct.function
def attend_tile(const: Any, place: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any, scale: Any) -> None:
    """One tile of out and lse; or of one split's part of them."""
    blocks = walk.own_blocks(const, walk.with_tail(const, place, walk.key_blocks(const, place)))
    place, scale = scaling.with_key_scale(const, replace(place, blocks=blocks), scale)
    if const.divided:
        if blocks.begin < blocks.end:
            forward.forward_tile(const, place, q, k, v, out, lse, sinks, (), scale)
        else:
            nothing = ct.full((const.tile_m, 1), -math.inf, dtype=ct.float32)
            rows.store_lse(const, place, lse, nothing)
            if const.row_max:
                rows.store_lse(const, place, place.tops[0], nothing)
    else:
        forward.forward_tile(const, place, q, k, v, out, lse, sinks, (), scale)


def split_keys_kernel(const: SplitKeysConstants) -> Callable[..., None]:
    """out and lse of attention, or with `divided` a part of each for every split, one after another.

    q ``[B, Hq, Sq, D]`` or packed ``[1, Hq, T, D]``, k and v ``[B or pages, Hkv, rows, D]``; sinks: one ``[Hq]``, or
    none; cache: seqlens_kv, page_table, cu_seqlens_q, k_scale and v_scale, as far as there are any.
    """

    def split_keys(
        q: Array32, k: Array32, v: Array32, out: Array32, lse: Vectors32, tops: Tuple32, sinks: Tuple32,
        captured: Tuple32, cache: Tuple32, scale: float, reach: Reach, derived: Derived,
    ) -> None:  # fmt: skip
        if const.overlapped:
            ct.grid_dependency_control_launch_dependents()
        place = replace(find_place(const, q, k, cache, reach, derived + captured), tops=tops)
        if const.packed_queries:
            if place.tile * const.tile_m < place.seq_q * (q.shape[1] // k.shape[1]):
                attend_tile(const, place, q, k, v, out, lse, sinks, scale)
        else:
            attend_tile(const, place, q, k, v, out, lse, sinks, scale)

    return split_keys
