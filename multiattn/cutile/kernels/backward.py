"""The backward kernels in cuTile: Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 2, and that in two passes.

Both start from what a forward saved, ``p = exp2(s * score_factor - lse * log2(e))``, with ``ds = p * (dp - delta)``,
where ``dp = dout @ v^T`` and ``delta = rowsum(dout * out) - dlse``.

- Two passes: `query_grads` owns a tile of queries and walks over the keys that they see, ``dq += ds @ k``; it also
  leaves delta. Then `key_grads` owns a tile of keys and walks over the queries that see them, ``dv += p^T @ dout`` and
  ``dk += ds^T @ q``. Every sum has one order.
- One pass: `row_deltas` leaves delta and clears an fp32 sum of dq; `all_grads` is `key_grads` that also adds each
  block's ``ds @ k`` to that sum, in any order; `round_query_grads` makes dq of it.

A block of keys computes everything transposed, ``s^T = k @ q^T``, so that p^T and ds^T come out of one product as the
left operand of the next. The factor of dq and dk comes last, once an element.
"""

# cuda.tile is untyped, and so are its decorators and aliases:
# mypy: disable-error-code="untyped-decorator, valid-type"

import math
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels.tiles import (
    ZERO,
    Array32,
    Array64,
    ConstBool,
    ConstInt,
    Place,
    Rows64,
    find_place,
    is_visible,
    key_blocks,
)
from multiattn.problem import LOG2_E

Rows32 = ct.Array


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is fixed when a kernel is compiled."""

    tile_m: Any
    tile_n: Any
    tile_d: Any
    """head_dim rounded up to a power of two; loads fill the rest with zeros, stores clip it."""
    causal: Any
    ragged: Any
    """Whether the last block of keys is not full."""
    heads_together: Any
    spanning: Any
    """Whether those are heads of several batch entries: never here."""
    latency: Any
    """Of the loads in the loop."""
    tma: Any
    tma_columns: Any
    """Whether what the fp32 arrays ``[B, Hq, Sq]`` hold of a row ends at a multiple of 16 bytes, as TMA would clip."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The gradients of a tile of keys so far, fp32 ``[tile_n, tile_d]``; dk without its factor."""

    dk: Any
    dv: Any


@ct.function
def load_rows(shape: Any, array: Any, index: Any, rows: Any, latency: Any) -> Any:
    """A tile of one head's rows, ``[rows, tile_d]``, with zeros beyond the ends."""
    tile = ct.load(array, index, (1, 1, rows, shape.tile_d), padding_mode=ZERO, latency=latency, allow_tma=shape.tma)
    return tile.reshape((rows, shape.tile_d))


@ct.function
def load_column(shape: Any, array: Any, index: Any) -> Any:
    """What an fp32 array ``[B, Hq, Sq]`` holds of a tile's queries, ``[tile_m]``, with zeros beyond the end."""
    tile = ct.load(
        array, index, (1, 1, shape.tile_m), padding_mode=ZERO, latency=shape.latency, allow_tma=shape.tma_columns
    )
    return tile.reshape((shape.tile_m,))


@ct.function
def load_lse(shape: Any, lse: Any, index: Any) -> Any:
    """The lse of a tile's queries in the log2 domain, ``[tile_m]``; +inf, no weight, for one that sees no key."""
    values = load_column(shape, lse, index)
    return ct.where(values == -math.inf, math.inf, values * LOG2_E)


@ct.function
def row_delta(shape: Any, out: Any, dout: Any, dlse: Any, delta: Any, index: Any, has_dlse: ConstBool) -> Any:
    """Compute and store ``rowsum(dout * out) - dlse`` of a tile of queries: out as an array, dout as a tile."""
    o = load_rows(shape, out, (*index, 0), shape.tile_m, 2)
    value = ct.sum(o.astype(ct.float32) * dout.astype(ct.float32), axis=-1)  # [tile_m]
    if has_dlse:
        value = value - load_column(shape, dlse, index)
    # Without TMA: of a single row (B = Hq = 1) its store clips at 16 bytes, and so writes past the end.
    ct.store(delta, index, value.reshape((1, 1, shape.tile_m)), allow_tma=False)
    return value


@ct.function
def add_keys(
    shape: Any, place: Any, q: Any, dout: Any, k: Any, v: Any, lse: Any, delta: Any, score_factor: Any,
    acc: Any, block: Any, masked: ConstBool,
) -> Any:  # fmt: skip
    """Take one block of keys into a tile of dq; q and dout are tiles ``[tile_m, tile_d]``, lse and delta columns."""
    none = ct.full((shape.tile_m, shape.tile_n), 0.0, dtype=ct.float32)
    index = (place.batch, place.head_kv, block, 0)
    keys = load_rows(shape, k, index, shape.tile_n, shape.latency)
    values = load_rows(shape, v, index, shape.tile_n, shape.latency)
    s = ct.mma(q, keys.transpose(), none)  # [tile_m, tile_n]
    dp = ct.mma(dout, values.transpose(), none)
    p = ct.exp2(s * score_factor - lse, flush_to_zero=True)
    ds = p * (dp - delta)
    if masked:  # by selection: of a key beyond the end, p may be inf
        ds = ct.where(is_visible(shape, place, block), ds, 0.0)
    return ct.mma(ds.astype(k.dtype), keys, acc)


@ct.function
def query_grads_block(
    shape: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, delta: Any, dq: Any,
    score_factor: Any, grad_factor: Any, has_dlse: ConstBool,
) -> None:  # fmt: skip
    """One block: a tile of dq and of delta."""
    place = find_place(shape, q, k)
    rows = (place.batch, place.head, place.tile)
    queries = load_rows(shape, q, (*rows, 0), shape.tile_m, 2)
    douts = load_rows(shape, dout, (*rows, 0), shape.tile_m, 2)
    d = row_delta(shape, out, douts, dlse, delta, rows, has_dlse)[:, None]
    m = load_lse(shape, lse, rows)[:, None]
    acc = ct.full((shape.tile_m, shape.tile_d), 0.0, dtype=ct.float32)
    first, first_masked, end = key_blocks(shape, place)
    for block in range(first, first_masked):
        acc = add_keys(shape, place, queries, douts, k, v, m, d, score_factor, acc, block, False)
    if shape.causal or shape.ragged:
        for block in range(first_masked, end):
            acc = add_keys(shape, place, queries, douts, k, v, m, d, score_factor, acc, block, True)
    grads = (acc * grad_factor).astype(dq.dtype).reshape((1, 1, shape.tile_m, shape.tile_d))
    ct.store(dq, (*rows, 0), grads, allow_tma=shape.tma)


@ct.function
def find_key_tile(shape: Any, q: Any, k: Any) -> Any:
    """(batch, head of keys, tile) of a block that takes a tile of keys.

    `heads_together` heads (a divisor of the heads of k) advance together. Causal: the first tiles, which most queries
    see, go first.
    """
    heads = k.shape[1]
    tiles = ct.cdiv(k.shape[2], shape.tile_n)
    block = ct.bid(1) * ct.num_blocks(0) + ct.bid(0)
    section = block // (tiles * shape.heads_together)
    rest = block % (tiles * shape.heads_together)
    batch_head = section * shape.heads_together + rest % shape.heads_together
    return batch_head // heads, batch_head % heads, rest // shape.heads_together


@ct.function
def query_blocks(shape: Any, tile: Any, seq_q: Any, seq_kv: Any) -> Any:
    """(first, first_full, end): blocks before `first_full` need a mask; from there on every row sees every key.

    A key beyond the end needs none: what it gets is not stored.
    """
    end = ct.cdiv(seq_q, shape.tile_m)
    if shape.causal:
        first_row = max(0, tile * shape.tile_n - (seq_kv - seq_q))
        first_full_row = max(0, tile * shape.tile_n + (shape.tile_n - 1) - (seq_kv - seq_q))
        return first_row // shape.tile_m, min(ct.cdiv(first_full_row, shape.tile_m), end), end
    return 0, 0, end


@ct.function
def add_queries(
    shape: Any, place: Any, key_tile: Any, keys: Any, values: Any, q: Any, lse: Any, dout: Any, delta: Any,
    score_factor: Any, dq_sum: Any, sums: Any, masked: ConstBool,
) -> Any:  # fmt: skip
    """Take one block of queries into a tile of dk and dv; keys and values are tiles ``[tile_n, tile_d]``.

    With `dq_sum`, an fp32 view of such tiles, also add the block's share of dq to it.
    """
    none = ct.full((shape.tile_n, shape.tile_m), 0.0, dtype=ct.float32)
    rows = (place.batch, place.head, place.tile)
    m = load_lse(shape, lse, rows)[None, :]
    d = load_column(shape, delta, rows)[None, :]
    queries = load_rows(shape, q, (*rows, 0), shape.tile_m, shape.latency)
    douts = load_rows(shape, dout, (*rows, 0), shape.tile_m, shape.latency)
    s = ct.mma(keys, queries.transpose(), none)  # [tile_n, tile_m]
    p = ct.exp2(s * score_factor - m, flush_to_zero=True)
    if masked:
        visible = is_visible(shape, place, key_tile).transpose()
        p = ct.where(visible, p, 0.0)
    dv = ct.mma(p.astype(q.dtype), douts, sums.dv)
    dp = ct.mma(values, douts.transpose(), none)  # [tile_n, tile_m]
    ds = p * (dp - d)
    if shape.ragged and dq_sum is not None:  # a key beyond the end: its own rows are not stored, but dq sums over it
        ds = ct.where(
            (key_tile * shape.tile_n + ct.arange(shape.tile_n, dtype=ct.int32) < place.seq_kv)[:, None], ds, 0.0
        )
    ds = ds.astype(q.dtype)
    dk = ct.mma(ds, queries, sums.dk)
    if dq_sum is not None:
        share = ct.mma(ds.transpose(), keys, ct.full((shape.tile_m, shape.tile_d), 0.0, dtype=ct.float32))
        dq_sum.atomic_store_add((*rows, 0), share.reshape((1, 1, shape.tile_m, shape.tile_d)))
    return Sums(dk=dk, dv=dv)


@ct.function
def key_grads_block(
    shape: Any, q: Any, k: Any, v: Any, lse: Any, dout: Any, delta: Any, dq_sum: Any, dk: Any, dv: Any,
    score_factor: Any, grad_factor: Any,
) -> None:  # fmt: skip
    """One block: a tile of dk and of dv, summed over the queries of the group's heads."""
    batch, head_kv, tile = find_key_tile(shape, q, k)
    index = (batch, head_kv, tile, 0)
    keys = load_rows(shape, k, index, shape.tile_n, 2)
    values = load_rows(shape, v, index, shape.tile_n, 2)
    seq_q, seq_kv = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    zeros = ct.full((shape.tile_n, shape.tile_d), 0.0, dtype=ct.float32)
    sums = Sums(dk=zeros, dv=zeros)
    first, first_full, end = query_blocks(shape, tile, seq_q, seq_kv)
    # The heads of the group and their blocks in one loop: one pipeline of loads, and no registers for a second counter.
    if shape.causal:
        masked = max(0, first_full - first)
        for step in range(0, group * masked):
            place = Place(
                batch=batch, head=head_kv * group + step // masked, head_kv=head_kv, tile=first + step % masked,
                seq_q=seq_q, seq_kv=seq_kv,
            )  # fmt: skip
            sums = add_queries(shape, place, tile, keys, values, q, lse, dout, delta, score_factor, dq_sum, sums, True)
    full = max(0, end - first_full)
    for step in range(0, group * full):
        place = Place(
            batch=batch, head=head_kv * group + step // full, head_kv=head_kv, tile=first_full + step % full,
            seq_q=seq_q, seq_kv=seq_kv,
        )  # fmt: skip
        sums = add_queries(shape, place, tile, keys, values, q, lse, dout, delta, score_factor, dq_sum, sums, False)
    dk_tile = (sums.dk * grad_factor).astype(dk.dtype).reshape((1, 1, shape.tile_n, shape.tile_d))
    dv_tile = sums.dv.astype(dv.dtype).reshape((1, 1, shape.tile_n, shape.tile_d))
    ct.store(dk, index, dk_tile, allow_tma=shape.tma)
    ct.store(dv, index, dv_tile, allow_tma=shape.tma)


def query_grads(
    q: Array32, k: Array32, v: Array32, out: Array32, lse: Rows32, dout: Array32, dlse: Rows32, delta: Rows32,
    dq: Array32, score_factor: float, grad_factor: float,
    tile_m: ConstInt, tile_n: ConstInt, tile_d: ConstInt, causal: ConstBool, ragged: ConstBool,
    heads_together: ConstInt, latency: ConstInt, tma: ConstBool, tma_columns: ConstBool, has_dlse: ConstBool,
) -> None:  # fmt: skip
    """First of two passes: dq and delta."""
    shape = Shape(
        tile_m=tile_m, tile_n=tile_n, tile_d=tile_d, causal=causal, ragged=ragged, heads_together=heads_together,
        spanning=False, latency=latency, tma=tma, tma_columns=tma_columns,
    )  # fmt: skip
    query_grads_block(shape, q, k, v, out, lse, dout, dlse, delta, dq, score_factor, grad_factor, has_dlse)


def key_grads(
    q: Array32, k: Array32, v: Array32, lse: Rows32, dout: Array32, delta: Rows32, dk: Array32, dv: Array32,
    score_factor: float, grad_factor: float,
    tile_m: ConstInt, tile_n: ConstInt, tile_d: ConstInt, causal: ConstBool, ragged: ConstBool,
    heads_together: ConstInt, latency: ConstInt, tma: ConstBool, tma_columns: ConstBool,
) -> None:  # fmt: skip
    """Second of two passes: dk and dv."""
    shape = Shape(
        tile_m=tile_m, tile_n=tile_n, tile_d=tile_d, causal=causal, ragged=ragged, heads_together=heads_together,
        spanning=False, latency=latency, tma=tma, tma_columns=tma_columns,
    )  # fmt: skip
    key_grads_block(shape, q, k, v, lse, dout, delta, None, dk, dv, score_factor, grad_factor)


def all_grads(
    q: Array32, k: Array32, v: Array32, lse: Rows32, dout: Array32, delta: Rows32, dq_sum: Array32, dk: Array32,
    dv: Array32, score_factor: float, grad_factor: float,
    tile_m: ConstInt, tile_n: ConstInt, tile_d: ConstInt, causal: ConstBool, ragged: ConstBool,
    heads_together: ConstInt, latency: ConstInt, tma: ConstBool, tma_columns: ConstBool,
) -> None:  # fmt: skip
    """One pass: dk, dv, and dq added up in any order in `dq_sum`, fp32 like dq, without its factor."""
    shape = Shape(
        tile_m=tile_m, tile_n=tile_n, tile_d=tile_d, causal=causal, ragged=ragged, heads_together=heads_together,
        spanning=False, latency=latency, tma=tma, tma_columns=tma_columns,
    )  # fmt: skip
    view = dq_sum.tiled_view((1, 1, tile_m, tile_d))
    key_grads_block(shape, q, k, v, lse, dout, delta, view, dk, dv, score_factor, grad_factor)


def row_deltas(
    out: Array32, dout: Array32, dlse: Rows32, delta: Rows32, dq_sum: Array32,
    tile_m: ConstInt, tile_d: ConstInt, has_dlse: ConstBool,
) -> None:  # fmt: skip
    """Before one pass: delta, and zeros in `dq_sum`."""
    rows = find_rows(out, tile_m)
    shape = row_shape(tile_m, tile_d)
    row_delta(shape, out, load_rows(shape, dout, (*rows, 0), tile_m, 2), dlse, delta, rows, has_dlse)
    ct.store(dq_sum, (*rows, 0), ct.full((1, 1, tile_m, tile_d), 0.0, dtype=ct.float32))


def round_query_grads(dq_sum: Array32, dq: Array32, grad_factor: float, tile_m: ConstInt, tile_d: ConstInt) -> None:
    """After one pass: dq of its sum."""
    rows = find_rows(dq, tile_m)
    grads = load_rows(row_shape(tile_m, tile_d), dq_sum, (*rows, 0), tile_m, 2) * grad_factor
    ct.store(dq, (*rows, 0), grads.astype(dq.dtype).reshape((1, 1, tile_m, tile_d)))


@ct.function
def find_rows(array: Any, tile_m: ConstInt) -> Any:
    """(batch, head, tile) of a block that takes `tile_m` rows."""
    tiles = ct.cdiv(array.shape[2], tile_m)
    block = ct.bid(1) * ct.num_blocks(0) + ct.bid(0)
    batch_head = block // tiles
    return batch_head // array.shape[1], batch_head % array.shape[1], block % tiles


@ct.function
def row_shape(tile_m: ConstInt, tile_d: ConstInt) -> Any:
    """The Shape of a kernel that has rows only."""
    return Shape(
        tile_m=tile_m,
        tile_n=tile_m,
        tile_d=tile_d,
        causal=False,
        ragged=False,
        heads_together=1,
        spanning=False,
        latency=2,
        tma=True,
        tma_columns=False,
    )


def make_kernel(function: Any, is_64bit: bool) -> Any:
    """The ``@ct.kernel`` of one of the functions above, with shapes, strides and offsets in 32 or in 64 bit."""
    if not is_64bit:
        return ct.kernel(function)
    wide = FunctionType(function.__code__, function.__globals__, function.__name__ + "_64bit")
    wider = {Array32: Array64, Rows32: Rows64}
    wide.__annotations__ = {name: wider.get(kind, kind) for name, kind in function.__annotations__.items()}
    return ct.kernel(wide)
