"""The backward with ds kept in memory: five products in two kernels, and each sum in one order.

`stored_key_grads` is `backward.key_grads` that also writes each block of ``ds^T``, rounded as its own product takes it;
`stored_query_grads` then has a single product left, ``dq = ds @ k``. Two passes make scores and dp twice, and one pass
adds dq up by atomics, for which its warps wait for each other in every block. A whole ds grows with the square of the
length: so both kernels run in turns, for as many heads at a time as `configs.STORED_BYTES` hold.

ds is ``[heads, tiles of dq, Skv, dq_tile_m]``, so that what blocks of either kernel write and read is close together.
"""

from collections.abc import Callable
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import backward, tiles, walk, wide
from multiattn.cutile.kernels.constants import BackwardConstants, RowDeltaConstants
from multiattn.cutile.kernels.tiles import ZERO, Array32, ConstBool, Numbers, Place, Vectors32

First = tuple[int, ...]
"""The number of the first tile of a launch, of those of all heads; and that of its first head of queries."""


@ct.function
def number_of(first: Any) -> Any:
    """The number of the block's tile."""
    return ct.bid(1) * ct.num_blocks(0) + ct.bid(0) + first[0]


@ct.function
def find_keys(const: Any, q: Any, k: Any, order: Any, first: Any) -> Any:
    """`backward.find_key_tile` of a launch that begins at any head."""
    heads, seq_kv = tiles.heads_of_keys(const, k), k.shape[2]
    in_section = ct.cdiv(seq_kv, const.tile_n) * order.together
    number = number_of(first)
    section, rest = number // in_section, number % in_section
    head_of_all = section * order.together + rest % order.together
    batch, head = head_of_all // heads, head_of_all % heads
    tile, head_kv = rest // order.together, tiles.head_of_share(const, head)
    return Place(batch=batch, head=head, head_kv=head_kv, tile=tile, seq_q=q.shape[2], seq_kv=seq_kv, reach=(), aux=())


@ct.function
def add_block(const: Any, place: Any, keys: Any, ds: Any, slot: Any, block: Any, acc: Any, masked: ConstBool) -> Any:
    """Take one block of keys into a tile of dq."""
    index = (slot, place.tile, block, 0)
    tile = ct.load(ds, index, (1, 1, const.tile_n, const.tile_m), padding_mode=ZERO, latency=const.latency)
    tile = tile.reshape((const.tile_n, const.tile_m))
    if masked:  # nobody has written what lies beyond the diagonal
        tile = ct.where(tiles.is_visible(const, place, block).transpose(), tile, 0.0).astype(keys.dtype)
    rows = wide.load(const, const.qk, keys, (place.batch, place.head_kv, block), const.tile_n, const.latency)
    return wide.add(const.qk, tile.transpose(), rows, acc)


# ---------------------------------------------------------------- kernels


def deltas_kernel(const: RowDeltaConstants) -> Callable[..., None]:
    """Before both: delta."""

    def deltas(out: Array32, dout: Array32, dlse: Vectors32, delta: Vectors32) -> None:
        rows = backward.find_rows(const, out)
        douts = wide.load(const, const.vo, dout, rows, const.tile_m, 2)
        backward.row_delta(const, out, douts, dlse, delta, rows)

    return deltas


def stored_key_grads_kernel(const: BackwardConstants) -> Callable[..., None]:
    """dk and dv, and ds for the other one."""

    def stored_key_grads(
        q: Array32, k: Array32, v: Array32, lse: Vectors32, dout: Array32, delta: Vectors32, ds: Array32,
        dk: Array32, dv: Array32, score_factor: float, grad_factor: float, numbers: Numbers, first: First,
    ) -> None:  # fmt: skip
        given = backward.Given(
            q=q, k=k, v=v, lse=lse, dout=dout, delta=delta, dk=dk, dv=dv, score_factor=score_factor,
            grad_factor=grad_factor, ds=ds, ds_first=first,
        )  # fmt: skip
        backward.key_grads_tile(const, find_keys(const, q, k, tiles.order_of(numbers), first), given)

    return stored_key_grads


def stored_query_grads_kernel(const: BackwardConstants) -> Callable[..., None]:
    """dq, of the ds that the other one has left."""

    def stored_query_grads(
        k: Array32, ds: Array32, dq: Array32, grad_factor: float, numbers: Numbers, first: First
    ) -> None:
        order = tiles.order_of(numbers)
        number = tiles.digits_of(const, dq, number_of(first), order)
        place = tiles.place_tile(const, dq, k, (), order, (), number, False)
        slot = backward.slot_of(dq, place, first)
        acc = wide.zeros(const.qk, const.tile_m)
        blocks = walk.key_blocks(const, place)
        full_end = blocks.full_end
        if not const.banded:
            full_end = blocks.end  # of a block that is not full, zeros come of the loads
        for block in range(0, full_end):
            acc = add_block(const, place, k, ds, slot, block, acc, False)
        if const.banded:
            for block in range(full_end, blocks.end):
                acc = add_block(const, place, k, ds, slot, block, acc, True)
        backward.store_query_grads(const, dq, (place.batch, place.head, place.tile), acc, grad_factor)

    return stored_query_grads
