"""The backward with ds kept in memory: five products in two kernels, and each sum in one order.

`stored_key_grads` is `backward.key_grads` that also writes each block of ``ds^T``, rounded as its own product takes it;
`stored_query_grads` then has a single product left, ``dq = ds @ k``. Two passes make scores and dp twice, and one pass
adds dq up by atomics, for which its warps wait for each other in every block. A whole ds grows with the square of the
length: so both kernels run in turns, for as many heads at a time as `configs.STORED_BYTES` hold.

ds is ``[heads, tiles of dq, Skv, dq_tile_m]``, so that what blocks of either kernel write and read is close together.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import backward, tiles
from multiattn.cutile.kernels.backward import KeyGradSums
from multiattn.cutile.kernels.constants import BackwardConstants, RowDeltaConstants
from multiattn.cutile.kernels.tiles import ZERO, Array32, ConstBool, Numbers, Place, Vectors32

First = tuple[int, ...]
"""The number of the first tile of a launch, of those of all heads; and that of its first head of queries."""


@ct.function
def number_of(first: Any) -> Any:
    """The number of the block's tile."""
    return ct.bid(1) * ct.num_blocks(0) + ct.bid(0) + first[0]


@ct.function
def slot_of(q: Any, place: Any, first: Any) -> Any:
    """Where the ds of the place's head is."""
    return place.batch * q.shape[1] + place.head - first[1]


@ct.function
def find_keys(const: Any, q: Any, k: Any, order: Any, first: Any) -> Any:
    """`backward.find_key_tile` of a launch that begins at any head."""
    heads, seq_kv = k.shape[1], k.shape[2]
    in_section = ct.cdiv(seq_kv, const.tile_n) * order.together
    number = number_of(first)
    section, rest = number // in_section, number % in_section
    head_of_all = section * order.together + rest % order.together
    batch, head = head_of_all // heads, head_of_all % heads
    tile = rest // order.together
    return Place(batch=batch, head=head, head_kv=head, tile=tile, seq_q=q.shape[2], seq_kv=seq_kv, reach=(), aux=())


@ct.function
def add_queries(
    const: Any, place: Any, key_tile: Any, keys: Any, values: Any, given: Any, ds: Any, slot: Any, sums: Any,
    masked: ConstBool,
) -> Any:  # fmt: skip
    """Take one block of queries into a tile of dk and dv, and write its ds; keys and values ``[tile_n, tile_d]``."""
    none = ct.full((const.tile_n, const.tile_m), 0.0, dtype=ct.float32)
    rows = (place.batch, place.head, place.tile)
    m = backward.load_lse(const, given.lse, rows)[None, :]
    d = backward.load_column(const, given.delta, rows)[None, :]
    queries = tiles.load_tile(const, given.q, (*rows, 0), const.tile_m, const.latency)
    douts = tiles.load_tile(const, given.dout, (*rows, 0), const.tile_m, const.latency)
    s = ct.mma(keys, queries.transpose(), none)  # [tile_n, tile_m]
    p = ct.exp2(s * given.score_factor - m, flush_to_zero=True)
    seen = backward.is_seen(const, place, key_tile, masked)
    if seen is not None:
        p = ct.where(seen, p, 0.0)
    dv = ct.mma(p.astype(keys.dtype), douts, sums.dv)
    if const.delta_first:
        less = ct.mma(values, douts.transpose(), none - d)  # [tile_n, tile_m]
        block = (p * less).astype(keys.dtype)
    else:
        dp = ct.mma(values, douts.transpose(), none)  # [tile_n, tile_m]
        block = (p * (dp - d)).astype(keys.dtype)
    parts = ds.shape[3] // const.tile_m
    index = (slot, place.tile // parts, key_tile, place.tile % parts)
    ct.store(ds, index, block.reshape((1, 1, const.tile_n, const.tile_m)))
    dk = ct.mma(block, queries, sums.dk)
    return KeyGradSums(dk=dk, dv=dv)


@ct.function
def add_block(const: Any, place: Any, keys: Any, ds: Any, slot: Any, block: Any, acc: Any, masked: ConstBool) -> Any:
    """Take one block of keys into a tile of dq."""
    index = (slot, place.tile, block, 0)
    tile = ct.load(ds, index, (1, 1, const.tile_n, const.tile_m), padding_mode=ZERO, latency=const.latency)
    tile = tile.reshape((const.tile_n, const.tile_m))
    if masked:  # nobody has written what lies beyond the diagonal
        tile = ct.where(tiles.is_visible(const, place, block).transpose(), tile, 0.0).astype(keys.dtype)
    rows = tiles.load_tile(const, keys, (place.batch, place.head_kv, block, 0), const.tile_n, const.latency)
    return ct.mma(tile.transpose(), rows, acc)


# ---------------------------------------------------------------- kernels


def deltas_kernel(const: RowDeltaConstants) -> Callable[..., None]:
    """Before both: delta."""

    def deltas(out: Array32, dout: Array32, dlse: Vectors32, delta: Vectors32) -> None:
        rows = backward.find_rows(const, out)
        backward.row_delta(const, out, tiles.load_tile(const, dout, (*rows, 0), const.tile_m, 2), dlse, delta, rows)

    return deltas


def stored_key_grads_kernel(const: BackwardConstants) -> Callable[..., None]:
    """dk and dv, and ds for the other one."""

    def stored_key_grads(
        q: Array32, k: Array32, v: Array32, lse: Vectors32, dout: Array32, delta: Vectors32, ds: Array32,
        dk: Array32, dv: Array32, score_factor: float, grad_factor: float, numbers: Numbers, first: First,
    ) -> None:  # fmt: skip
        given = backward.Given(q=q, lse=lse, dout=dout, delta=delta, score_factor=score_factor, dcaptured=())
        mine = find_keys(const, q, k, tiles.order_of(numbers), first)
        index = (mine.batch, mine.head_kv, mine.tile, 0)
        keys = tiles.load_tile(const, k, index, const.tile_n, 2)
        values = tiles.load_tile(const, v, index, const.tile_n, 2)
        group = q.shape[1] // k.shape[1]
        zeros = ct.full((const.tile_n, const.tile_d), 0.0, dtype=ct.float32)
        sums = KeyGradSums(dk=zeros, dv=zeros)
        blocks = tiles.query_blocks(const, mine)
        if const.banded:
            masked = max(0, blocks.full_begin - blocks.begin)
            for step in range(0, group * masked):
                place = replace(mine, head=mine.head_kv * group + step // masked, tile=blocks.begin + step % masked)
                slot = slot_of(q, place, first)
                sums = add_queries(const, place, mine.tile, keys, values, given, ds, slot, sums, True)
        full = max(0, blocks.full_end - blocks.full_begin)
        for step in range(0, group * full):
            number = step
            if const.stagger > 0:
                number = step + mine.tile * const.stagger
            place = replace(mine, head=mine.head_kv * group + step // full, tile=blocks.full_begin + number % full)
            slot = slot_of(q, place, first)
            sums = add_queries(const, place, mine.tile, keys, values, given, ds, slot, sums, False)
        dk_tile = (sums.dk * grad_factor).astype(dk.dtype).reshape((1, 1, const.tile_n, const.tile_d))
        dv_tile = sums.dv.astype(dv.dtype).reshape((1, 1, const.tile_n, const.tile_d))
        ct.store(dk, index, dk_tile, allow_tma=const.tma)
        ct.store(dv, index, dv_tile, allow_tma=const.tma)

    return stored_key_grads


def stored_query_grads_kernel(const: BackwardConstants) -> Callable[..., None]:
    """dq, of the ds that the other one has left."""

    def stored_query_grads(
        k: Array32, ds: Array32, dq: Array32, grad_factor: float, numbers: Numbers, first: First
    ) -> None:
        order = tiles.order_of(numbers)
        number = tiles.digits_of(const, dq, number_of(first), order)
        place = tiles.place_tile(const, dq, k, (), order, (), number, False)
        slot = slot_of(dq, place, first)
        acc = ct.full((const.tile_m, const.tile_d), 0.0, dtype=ct.float32)
        blocks = tiles.key_blocks(const, place)
        full_end = blocks.full_end
        if not const.banded:
            full_end = blocks.end  # of a block that is not full, zeros come of the loads
        for block in range(0, full_end):
            acc = add_block(const, place, k, ds, slot, block, acc, False)
        if const.banded:
            for block in range(full_end, blocks.end):
                acc = add_block(const, place, k, ds, slot, block, acc, True)
        grads = (acc * grad_factor).astype(dq.dtype).reshape((1, 1, const.tile_m, const.tile_d))
        ct.store(dq, (place.batch, place.head, place.tile, 0), grads, allow_tma=const.tma)

    return stored_query_grads
