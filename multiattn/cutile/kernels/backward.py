"""The backward kernels in cuTile: Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 2, and that in two passes.

Both start from what a forward saved, ``p = exp2(s * score_factor - lse * log2(e))``, with ``ds = p * (dp - delta)``,
where ``dp = dout @ v^T`` and ``delta = rowsum(dout * out) - dlse``. A program of scores (`scores`) makes another s of
it, which needs no factor, and a slope, by which ds is multiplied.

- Two passes: `query_grads` owns a tile of queries and walks over the keys that they see, ``dq += ds @ k``; it also
  leaves delta. Then `key_grads` owns a tile of keys and walks over the queries that see them, ``dv += p^T @ dout`` and
  ``dk += ds^T @ q``. Every sum has one order.
- One pass: `row_deltas` leaves delta and clears an fp32 sum of dq; `all_grads` is `key_grads` that also adds each
  block's ``ds @ k`` to that sum, in any order; `round_query_grads` makes dq of it.

A block of keys computes everything transposed, ``s^T = k @ q^T``, so that p^T and ds^T come out of one product as the
left operand of the next. The factor of dq and dk comes last, once an element.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct

from multiattn.cutile.kernels import packed, scores, tiles, walk, wide
from multiattn.cutile.kernels.constants import (
    BackwardConstants,
    ColumnConstants,
    QueryGradsConstants,
    RoundConstants,
    RowDeltaConstants,
    SumSharesConstants,
)
from multiattn.cutile.kernels.parts import Parts
from multiattn.cutile.kernels.tiles import (
    ZERO,
    Array32,
    ConstBool,
    ConstInt,
    Derived,
    Numbers,
    Place,
    Reach,
    Tuple32,
    Vectors32,
    head_of_share,
    heads_of_keys,
)
from multiattn.validate import LOG2_E


@dataclass(frozen=True, kw_only=True)
class Given:
    """The arrays and numbers of a kernel; None for those that it has not."""

    q: Any
    k: Any
    v: Any
    out: Any = None
    lse: Any
    dout: Any
    dlse: Any = None
    delta: Any
    dq: Any = None
    dq_sum: Any = None
    """fp32, to which blocks add in any order."""
    dk: Any = None
    dv: Any = None
    score_factor: Any
    grad_factor: Any
    dcaptured: Any = ()
    """The gradients of captured tensors, to which blocks add: a tuple, empty where nobody wants any."""
    ds: Any = None
    """Where blocks of ds are stored, and `stored.First`."""
    ds_first: Any = None


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Tiles of queries and of dout, with columns ``[tile_m, 1]`` of lse and delta."""

    q: Any
    dout: Any
    lse: Any
    delta: Any


@dataclass(frozen=True, kw_only=True)
class KeyGradSums:
    """The gradients of a tile of keys so far, fp32; dk without its factor."""

    dk: Any
    dv: Any


@ct.function
def load_column(const: Any, array: Any, index: Any) -> Any:
    """A tile of queries' part of an fp32 array ``[B, Hq, Sq]``: ``[tile_m]``, with zeros beyond the end."""
    shape, tma = (1, 1, const.tile_m), const.tma_columns
    if const.cut:
        tile = tiles.view_of(const, array, shape, (1, 1, 1)).load(index, latency=const.latency, allow_tma=tma)
    else:
        tile = ct.load(array, index, shape, padding_mode=ZERO, latency=const.latency, allow_tma=tma)
    return tile.reshape((const.tile_m,))


@ct.function
def column_tile(const: Any, place: Any, tile: Any) -> Any:
    """The tile of columns of a tile of queries. Of our own each sequence begins at a multiple of `column_unit`.

    That is behind the rows of all sequences before it: each has a unit more than its rows need. With `cut` columns lie
    as queries do, and the tile is a row.
    """
    if const.cut:
        tile = place.sequence.offset_q + tile
    elif const.column_unit > 0:
        first = place.sequence.offset_q // const.column_unit + place.sequence.number
        tile = tile + first * (const.column_unit // const.tile_m)
    return tile


@ct.function
def load_lse(const: Any, lse: Any, index: Any) -> Any:
    """The lse of a tile's queries in the log2 domain, ``[tile_m]``; +inf, no weight, for one that sees no key."""
    values = load_column(const, lse, index)
    if const.own_columns:
        return values
    return ct.where(values == -math.inf, math.inf, values * LOG2_E)


@ct.function
def row_delta(const: Any, out: Any, dout: Any, dlse: Any, delta: Any, index: Any) -> Any:
    """Compute and store ``rowsum(dout * out) - dlse`` of a tile of queries: out as an array, dout as a tile."""
    value = wide.row_products(const.vo, wide.load(const, const.vo, out, index, const.tile_m, 2), dout)  # [tile_m]
    if const.has_dlse:
        value = value - load_column(const, dlse, index)
    # Without TMA: of a single row (B = Hq = 1) its store clips at 16 bytes, and so writes past the end.
    ct.store(delta, index, value.reshape((1, 1, const.tile_m)), allow_tma=False)
    return value


@ct.function
def add_keys(const: Any, place: Any, given: Any, mine: Any, acc: Any, block: Any, masked: ConstBool) -> Any:
    """Take one block of keys into a tile of dq."""
    none = ct.full((const.tile_m, const.tile_n), 0.0, dtype=ct.float32)
    index = (place.batch, place.head_kv, walk.inside(const, place, block, True))
    keys = wide.load(const, const.qk, given.k, index, const.tile_n, const.latency)
    values = wide.load(const, const.vo, given.v, index, const.tile_n, const.latency)
    s = wide.multiply(const.qk, mine.q, keys, none)  # [tile_m, tile_n]
    dp = wide.multiply(const.vo, mine.dout, values, none)
    s, slope = scores.modify_with_slope(const, place, s, given.score_factor, block, False)
    p = ct.exp2(s - mine.lse, flush_to_zero=True)
    if slope is not None:
        p = p * slope
    ds = p * (dp - mine.delta)
    seen = tiles.seen_keys(const, place, block, masked, const.banded or const.ragged)
    if seen is not None:  # by selection: of a key beyond the end, p may be inf
        ds = ct.where(seen, ds, 0.0)
    return wide.add(const.qk, ds.astype(given.k.dtype), keys, acc)


@ct.function
def query_grads_tile(const: Any, place: Any, given: Any) -> None:
    """A tile of dq and of delta."""
    rows = (place.batch, place.head, tiles.own_tile(const, place))
    queries = wide.load(const, const.qk, given.q, rows, const.tile_m, 2)
    douts = wide.load(const, const.vo, given.dout, rows, const.tile_m, 2)
    d = row_delta(const, given.out, douts, given.dlse, given.delta, rows)[:, None]
    mine = Queries(q=queries, dout=douts, delta=d, lse=load_lse(const, given.lse, rows)[:, None])
    acc = wide.zeros(const.qk, const.tile_m)
    blocks = walk.key_blocks(const, place)
    for number in range(blocks.full_begin, blocks.full_end):
        block = walk.full_block(const, place, number)
        acc = add_keys(const, place, given, mine, acc, block, False)
    if const.banded or const.ragged or const.blocks is not None:
        first, end = walk.masked_numbers(const, blocks)
        for number in range(first, end):
            block = walk.masked_block(const, place, blocks, number)
            acc = add_keys(const, place, given, mine, acc, block, True)
    store_query_grads(const, given.dq, rows, acc, given.grad_factor)


@ct.function
def store_query_grads(const: Any, dq: Any, rows: Any, acc: Any, grad_factor: Any) -> None:
    """Store a tile of dq, fp32 without its factor."""
    wide.store(const, const.qk, dq, rows, wide.rounded(const.qk, acc, grad_factor, dq), const.tile_m)


@ct.function
def of_sequence(const: Any, place: Any, given: Any) -> Any:
    """The arrays of a sequence of a packed batch, as far as the kernel has them. Columns of our own stay whole."""
    lse, delta = given.lse, given.delta
    if not const.own_columns:
        lse, delta = packed.queries_of(place, lse), packed.queries_of(place, delta)
    return replace(
        given,
        q=packed.queries_of(place, given.q),
        out=packed.queries_of(place, given.out),
        dout=packed.queries_of(place, given.dout),
        dq=packed.queries_of(place, given.dq),
        dq_sum=packed.queries_of(place, given.dq_sum),
        lse=lse,
        dlse=packed.queries_of(place, given.dlse),
        delta=delta,
        k=packed.keys_of(place, given.k),
        v=packed.keys_of(place, given.v),
        dk=packed.keys_of(place, given.dk),
        dv=packed.keys_of(place, given.dv),
    )


@ct.function
def find_key_tile(const: Any, q: Any, k: Any, reach: Any, order: Any, aux: Any) -> Any:
    """Where the tile of keys lives that a block takes. It has no head of queries of its own: `head` counts shares.

    `Order.together` heads (a divisor of the heads of k) advance together. Banded: the first tiles, which most queries
    see, go first.
    """
    heads = heads_of_keys(const, k)
    tiles = ct.cdiv(k.shape[2], const.tile_n)
    block = ct.bid(1) * ct.num_blocks(0) + ct.bid(0)
    section = block // (tiles * order.together)
    rest = block % (tiles * order.together)
    tile = rest // order.together
    batch_head = section * order.together + rest % order.together
    batch, head = batch_head // heads, batch_head % heads
    head_kv = head_of_share(const, head)
    return Place(
        batch=batch, head=head, head_kv=head_kv, tile=tile, seq_q=q.shape[2], seq_kv=k.shape[2], reach=reach, aux=aux
    )


@ct.function
def is_seen(const: Any, place: Any, key_tile: Any, masked: ConstBool) -> Any:
    """The queries of a tile that see each key, bool ``[tile_n, tile_m]``; None for all. `masked` as in `seen_keys`."""
    seen = None
    if const.blocks is None:
        if masked:
            seen = tiles.is_visible(const, place, key_tile).transpose()
    else:
        if masked:
            seen = tiles.is_visible_in_part(const, place, key_tile, True)
        if const.banded:
            seen = tiles.both(seen, tiles.is_visible(const, place, key_tile).transpose())
    if const.ragged_queries and (masked or const.blocks is not None):
        seen = tiles.both(seen, tiles.is_query(const, place))
    return seen


@ct.function
def slot_of(q: Any, place: Any, first: Any) -> Any:
    """Where the ds of the place's head is, in a launch that begins at some head."""
    return place.batch * q.shape[1] + place.head - first[1]


@ct.function
def add_queries(
    const: Any, place: Any, key_tile: Any, keys: Any, values: Any, given: Any, dq_sum: Any, sums: Any, masked: ConstBool
) -> Any:
    """Take one block of queries into a tile of dk and dv; keys and values are its rows.

    With `dq_sum`, an fp32 view of tiles of dq, also add the block's share of dq to it. With `Given.ds` leave ds there.
    """
    if given.ds is not None:
        slot = slot_of(given.q, place, given.ds_first)
    none = ct.full((const.tile_n, const.tile_m), 0.0, dtype=ct.float32)
    rows = (place.batch, place.head, walk.inside(const, place, place.tile, False))
    columns = (place.batch, place.head, column_tile(const, place, rows[2]))
    m = load_lse(const, given.lse, columns)[None, :]
    d = load_column(const, given.delta, columns)[None, :]
    if const.cut:  # others weigh nothing: those of the next block, and of the next sequence, whose columns follow
        is_own = tiles.is_query(const, place)
        m, d = ct.where(is_own, m, math.inf), ct.where(is_own, d, 0.0)
    queries = wide.load(const, const.qk, given.q, rows, const.tile_m, const.latency)
    douts = wide.load(const, const.vo, given.dout, rows, const.tile_m, const.latency)
    raw = wide.multiply(const.qk, keys, queries, none)  # [tile_n, tile_m]
    s, slope = scores.modify_with_slope(const, place, raw, given.score_factor, key_tile, True)
    if slope is not None:
        seen = is_seen(const, place, key_tile, masked)
        if seen is not None:  # of a key that is not seen it may be inf
            s, slope = ct.where(seen, s, -math.inf), ct.where(seen, slope, 0.0)
    p = ct.exp2(s - m, flush_to_zero=True)
    if slope is None:
        seen = is_seen(const, place, key_tile, masked)
        if seen is not None:
            p = ct.where(seen, p, 0.0)
    dv = wide.add(const.vo, p.astype(given.k.dtype), douts, sums.dv)
    wants_gradients = scores.wants_gradients(const)
    if slope is not None and not wants_gradients:
        p = p * slope  # now, so that the next product finds the registers of one of them free
    if const.delta_first:
        less = wide.multiply(const.vo, values, douts, none - d)  # [tile_n, tile_m]
        ds = p * less
    else:
        dp = wide.multiply(const.vo, values, douts, none)  # [tile_n, tile_m]
        ds = p * (dp - d)
    if wants_gradients:
        scores.add_gradients(const, place, raw, ds, key_tile, given.dcaptured)
        if slope is not None:
            ds = ds * slope
    if const.ragged and dq_sum is not None:  # a key beyond the end: its own rows are not stored, but dq sums over it
        ds = ct.where(tiles.is_key(const, place, key_tile), ds, 0.0)
    ds = ds.astype(given.k.dtype)
    if const.dq_transposed:  # before dk: tileiras keeps this order
        share = wide.add_turned(const, const.qk, ds, keys)
    if given.ds is not None:
        parts = given.ds.shape[3] // const.tile_m
        index = (slot, place.tile // parts, key_tile, place.tile % parts)
        ct.store(given.ds, index, ds.reshape((1, 1, const.tile_n, const.tile_m)))
    dk = wide.add(const.qk, ds, queries, sums.dk)
    if dq_sum is not None:
        if not const.dq_transposed:
            share = wide.add_turned(const, const.qk, ds, keys)
        wide.add_to(const, const.qk, dq_sum, rows, share)
    return KeyGradSums(dk=dk, dv=dv)


@ct.function
def add_seen(const: Any, mine: Any, group: Any, keys: Any, values: Any, given: Any, dq_sum: Any, sums: Any) -> Any:
    """Take the queries that see the tile of keys."""
    blocks = walk.query_blocks(const, mine)
    # The heads of the group and their blocks in one loop: one pipeline of loads, and no registers for a second counter.
    if const.banded or const.ragged_queries:
        first, end = blocks.begin, blocks.full_begin
        if walk.has_two_edges(const):
            first, end = walk.masked_numbers(const, blocks)
        masked = max(0, end - first)
        for step in range(0, group * masked):
            head = mine.head * group + step // masked
            place = replace(mine, head=head, tile=walk.masked_block(const, mine, blocks, first + step % masked))
            sums = add_queries(const, place, mine.tile, keys, values, given, dq_sum, sums, True)
    full = max(0, blocks.full_end - blocks.full_begin)
    for step in range(0, group * full):
        number = step
        if const.stagger > 0:
            number = step + mine.tile * const.stagger
        place = replace(mine, head=mine.head * group + step // full, tile=blocks.full_begin + number % full)
        sums = add_queries(const, place, mine.tile, keys, values, given, dq_sum, sums, False)
    return sums


@ct.function
def add_listed(const: Any, mine: Any, group: Any, keys: Any, values: Any, given: Any, dq_sum: Any, sums: Any) -> Any:
    """Take the queries that a block mask lists, head by head: each may have lists of its own."""
    for member in range(0, group):
        own = replace(mine, head=mine.head * group + member)
        blocks = walk.query_blocks(const, own)
        for number in range(blocks.full_begin, blocks.full_end):
            place = replace(own, tile=walk.full_block(const, own, number))
            sums = add_queries(const, place, mine.tile, keys, values, given, dq_sum, sums, False)
        first, end = walk.masked_numbers(const, blocks)
        for number in range(first, end):
            place = replace(own, tile=walk.masked_block(const, own, blocks, number))
            sums = add_queries(const, place, mine.tile, keys, values, given, dq_sum, sums, True)
    return sums


@ct.function
def dq_part(const: Any, dq_sum: Any, columns: ConstInt) -> Any:
    """A part of the sum of dq, in tiles."""
    return tiles.view_of(const, dq_sum, (1, 1, const.tile_m, columns), (1, 1, 1, columns))


@ct.function
def key_grads_tile(const: Any, mine: Any, given: Any) -> None:
    """A tile of dk and of dv, summed over the queries of the group's heads."""
    q, k, dk, dv = given.q, given.k, given.dk, given.dv
    dq_view = None
    if given.dq_sum is not None:
        dq_view = dq_part(const, given.dq_sum, const.qk.tile_d)
        if const.qk.tail_d > 0:
            dq_view = Parts(first=dq_view, tail=dq_part(const, given.dq_sum, const.qk.tail_d))
    index = (mine.batch, mine.head_kv, tiles.own_tile(const, mine))
    keys = wide.load_keys(const, const.qk, k, index, mine.seq_kv)
    values = wide.load_keys(const, const.vo, given.v, index, mine.seq_kv)
    group = q.shape[1] // tiles.heads_of_keys(const, k)
    sums = KeyGradSums(dk=wide.zeros(const.qk, const.tile_n), dv=wide.zeros(const.vo, const.tile_n))
    if const.blocks is not None:
        sums = add_listed(const, mine, group, keys, values, given, dq_view, sums)
    else:
        sums = add_seen(const, mine, group, keys, values, given, dq_view, sums)
    own = (mine.batch, mine.head, index[2])
    dk_rows = wide.rounded(const.qk, sums.dk, given.grad_factor, dk)
    dv_rows = wide.rounded(const.vo, sums.dv, None, dv)
    wide.store(const, const.qk, dk, own, dk_rows, const.tile_n)
    wide.store(const, const.vo, dv, own, dv_rows, const.tile_n)


@ct.function
def key_grads_block(const: Any, given: Any, reach: Any, order: Any, aux: Any, listed: Any) -> None:
    """One block: a tile of keys, of a packed batch one that a list names."""
    if const.packed:
        mine = packed.find_place(const, given.q, given.k, listed[0], const.tile_n, reach, order, aux, True)
        if mine.sequence.number >= 0:
            given = of_sequence(const, packed.own_part(const, mine, True), given)
            key_grads_tile(const, replace(mine, lists=listed[1:]), given)
    else:
        mine = replace(find_key_tile(const, given.q, given.k, reach, order, aux), lists=listed)
        key_grads_tile(const, mine, given)


@ct.function
def find_rows(const: Any, array: Any) -> Any:
    """(batch, head, tile) of a block that takes `tile_m` rows."""
    tiles = ct.cdiv(array.shape[2], const.tile_m)
    block = ct.bid(1) * ct.num_blocks(0) + ct.bid(0)
    batch_head = block // tiles
    return batch_head // array.shape[1], batch_head % array.shape[1], block % tiles


@ct.function
def copy_columns_tile(const: Any, place: Any, lse: Any, delta: Any, columns: Any, tile: Any) -> None:
    """Copy a tile of lse and delta to columns, with delta 0 and a finite lse beyond the end."""
    rows, own = (place.batch, place.head, place.tile), (place.batch, place.head, tile)
    ct.store(columns[0], own, load_lse(const, lse, rows).reshape((1, 1, const.tile_m)))
    ct.store(columns[1], own, load_column(const, delta, rows).reshape((1, 1, const.tile_m)))


@ct.function
def add_shares(const: Any, width: ConstInt, shares: Any, grads: Any, batch: Any, head: Any, tile: Any) -> None:
    """Add up the shares of a tile of gradients, and store it."""
    acc = ct.full((const.tile_m, width), 0.0, dtype=ct.float32)
    for share in range(0, const.shares):
        index = (batch, head * const.shares + share, tile, 0)
        acc = acc + tiles.load_part(const, shares, index, const.tile_m, width, 2)
    ct.store(grads, (batch, head, tile, 0), acc.astype(grads.dtype).reshape((1, 1, const.tile_m, width)))


# ---------------------------------------------------------------- kernels


def query_grads_kernel(const: QueryGradsConstants) -> Callable[..., None]:
    """First of two passes: dq and delta."""

    def query_grads(
        q: Array32, k: Array32, v: Array32, out: Array32, lse: Vectors32, dout: Array32, dlse: Vectors32,
        delta: Vectors32, dq: Array32, captured: Tuple32, listed: Tuple32, score_factor: float,
        grad_factor: float, reach: Reach, numbers: Numbers, derived: Derived,
    ) -> None:  # fmt: skip
        given = Given(
            q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse, delta=delta, dq=dq, score_factor=score_factor,
            grad_factor=grad_factor,
        )  # fmt: skip
        aux, order = derived + captured, tiles.order_of(numbers)
        if const.packed:
            place = packed.find_place(const, q, k, listed[0], const.tile_m, reach, order, aux, False)
            if place.sequence.number >= 0:
                given = of_sequence(const, packed.own_part(const, place, False), given)
                query_grads_tile(const, replace(place, lists=listed[1:]), given)
        else:
            query_grads_tile(const, replace(tiles.find_place(const, q, k, reach, order, aux), lists=listed), given)

    return query_grads


def key_grads_kernel(const: BackwardConstants) -> Callable[..., None]:
    """Second of two passes: dk and dv."""

    def key_grads(
        q: Array32, k: Array32, v: Array32, lse: Vectors32, dout: Array32, delta: Vectors32, dk: Array32, dv: Array32,
        captured: Tuple32, listed: Tuple32, dcaptured: Tuple32, score_factor: float, grad_factor: float, reach: Reach,
        numbers: Numbers, derived: Derived,
    ) -> None:  # fmt: skip
        given = Given(
            q=q, k=k, v=v, lse=lse, dout=dout, delta=delta, dk=dk, dv=dv, score_factor=score_factor,
            grad_factor=grad_factor, dcaptured=dcaptured,
        )  # fmt: skip
        key_grads_block(const, given, reach, tiles.order_of(numbers), derived + captured, listed)

    return key_grads


def all_grads_kernel(const: BackwardConstants) -> Callable[..., None]:
    """One pass: dk, dv, and dq added up in any order in `dq_sum`, fp32 like dq, without its factor."""

    def all_grads(
        q: Array32, k: Array32, v: Array32, lse: Vectors32, dout: Array32, delta: Vectors32, dq_sum: Array32,
        dk: Array32, dv: Array32, captured: Tuple32, listed: Tuple32, dcaptured: Tuple32,
        score_factor: float, grad_factor: float, reach: Reach, numbers: Numbers, derived: Derived,
    ) -> None:  # fmt: skip
        given = Given(
            q=q, k=k, v=v, lse=lse, dout=dout, delta=delta, dq_sum=dq_sum, dk=dk, dv=dv, score_factor=score_factor,
            grad_factor=grad_factor, dcaptured=dcaptured,
        )  # fmt: skip
        key_grads_block(const, given, reach, tiles.order_of(numbers), derived + captured, listed)

    return all_grads


def row_deltas_kernel(const: RowDeltaConstants) -> Callable[..., None]:
    """Before one pass: delta, and zeros in `dq_sum`."""

    def row_deltas(out: Array32, dout: Array32, dlse: Vectors32, delta: Vectors32, dq_sum: Array32) -> None:
        rows = find_rows(const, out)
        row_delta(const, out, wide.load(const, const.vo, dout, rows, const.tile_m, 2), dlse, delta, rows)
        ct.store(dq_sum, (*rows, 0), ct.full((1, 1, const.tile_m, const.qk.tile_d), 0.0, dtype=ct.float32))

    return row_deltas


def round_query_grads_kernel(const: RoundConstants) -> Callable[..., None]:
    """After one pass: dq of its sum."""

    def round_query_grads(dq_sum: Array32, dq: Array32, grad_factor: float) -> None:
        rows = find_rows(const, dq)
        grads = wide.load(const, const.qk, dq_sum, rows, const.tile_m, 2) * grad_factor
        ct.store(dq, (*rows, 0), grads.astype(dq.dtype).reshape((1, 1, const.tile_m, const.qk.tile_d)))

    return round_query_grads


def copy_columns_kernel(const: ColumnConstants) -> Callable[..., None]:
    """Before a kernel that owns keys: lse and delta in columns of our own, which TMA can load.

    Nobody reads those of a sequence without keys, and they would be another one's.
    """

    def copy_columns(
        q: Array32, k: Array32, lse: Vectors32, delta: Vectors32, lse_columns: Vectors32, delta_columns: Vectors32,
        listed: Tuple32, numbers: Numbers,
    ) -> None:  # fmt: skip
        if const.packed:
            place = packed.find_place(const, q, k, listed[0], const.tile_m, (), tiles.order_of(numbers), (), False)
            if place.sequence.number >= 0 and place.seq_kv > 0:
                tile = column_tile(const, place, place.tile)
                lse, delta = packed.queries_of(place, lse), packed.queries_of(place, delta)
                copy_columns_tile(const, place, lse, delta, (lse_columns, delta_columns), tile)
        else:
            batch, head, tile = find_rows(const, lse)
            place = Place(batch=batch, head=head, head_kv=0, tile=tile, seq_q=0, seq_kv=0, reach=(), aux=())
            copy_columns_tile(const, place, lse, delta, (lse_columns, delta_columns), tile)

    return copy_columns


def sum_shares_kernel(const: SumSharesConstants) -> Callable[..., None]:
    """After a kernel whose tiles are divided: dk and dv of their shares, in their order."""

    def sum_shares(dk_shares: Array32, dv_shares: Array32, dk: Array32, dv: Array32) -> None:
        batch, head, tile = find_rows(const, dk)
        add_shares(const, const.qk.tile_d, dk_shares, dk, batch, head, tile)
        add_shares(const, const.vo.tile_d, dv_shares, dv, batch, head, tile)

    return sum_shares
