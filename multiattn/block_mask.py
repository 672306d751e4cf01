"""FlexAttention's `BlockMask`: which blocks of keys each block of queries sees, whole or in part.

A *partial* block is seen where the mask's `mask_mod` says so, a *full* one whole, and any other not at all. The lists
of the mask are operands of a launch; a `BlockSpec` is what a kernel's code depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from multiattn.layout import Layout, Shape, row_major
from multiattn.score.named import PARTIAL, WHOLE
from multiattn.score.transforms import is_wrapped
from multiattn.validate import check_block_mask, check_lists

BLOCK = 128
"""Queries and keys in a block of the lists that are made of a mask of bools."""

LONG = 2048
"""The most queries or keys of a mask of bools that is read by the element. On an H200 (B1 H16 D128, 2026-11-28) a
causal one of 1024 takes 65 us for 57 by blocks, one of 2048 takes 244 for 124, and the host 160 to 220 more to make
lists. At 4096 it takes 465 for 280, and a step of training 2000 for 1160."""

KEYS_OF_QUERIES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
"""The lists of a block of queries: of partial blocks of keys how many and which, then of full ones."""
QUERIES_OF_KEYS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
"""The lists of a block of keys, which a backward walks over."""
LISTS = (*KEYS_OF_QUERIES, *QUERIES_OF_KEYS)

MaskMod = Callable[..., torch.Tensor]
"""FlexAttention's ``(b, h, q_idx, kv_idx) -> bool``."""


class BlockSpec(NamedTuple):
    """A block mask without its tensors: sizes of a block, and whether any list names full blocks."""

    queries: int
    keys: int
    has_full: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The lists that there are."""
        return tuple(name for name in LISTS if self.has_full or not name.startswith("full_"))

    def layouts(self, shapes: Sequence[Shape]) -> Mapping[str, Layout]:
        """The layouts of lists of these shapes, by their names."""
        return {name: Layout(it, row_major(it), torch.int32) for name, it in zip(self.names, shapes, strict=True)}


class ListArguments(NamedTuple):
    """The lists of one direction as a kernel takes them: names of operands, and where the lists of a row are.

    Those of batch entry b, head h and row r have the place ``p = b * stride_batch + h * stride_head + r``: there are
    ``counts[p]`` partial blocks, the first of which is ``indices[p * columns]``, and so of the full ones.
    """

    counts: str
    indices: str
    full_counts: str | None
    full_indices: str | None
    stride_batch: int
    stride_head: int
    columns: int


class BlockLists(NamedTuple):
    """A block mask as a call has it."""

    spec: BlockSpec
    tensors: tuple[torch.Tensor, ...]
    """By `BlockSpec.names`: counts int32 ``[B|1, H|1, rows]``, indices ``[B|1, H|1, rows, columns]``; entries from the
    count on mean nothing."""

    @classmethod
    def among(cls, indices: Mapping[str, torch.Tensor], spec: BlockSpec) -> BlockLists:
        """The lists that are among a call's `indices`, by name."""
        return cls(spec, tuple(indices[name] for name in spec.names))

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """The lists by name."""
        return dict(zip(self.spec.names, self.tensors, strict=True))


class BlockCounts(NamedTuple):
    """How many blocks a block mask has of each kind, in all of its lists."""

    full: int
    partial: int
    skipped: int

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> BlockCounts:
        """The counts of lists by name. It reads the counts: on a GPU that waits for the device.

        Of packed sequences what is skipped has the rows of all, some of which are several sequences'.
        """
        partial, full = (int(named[it].sum()) if it in named else 0 for it in KEYS_OF_QUERIES[::2])
        return cls(full, partial, named["kv_indices"].numel() - full - partial)

    def __str__(self) -> str:
        return f"{self.full} full, {self.partial} partial, {self.skipped} skipped, of {sum(self)}"


def read_block_mask(
    block_mask: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    has_gradient: bool = True,
    is_packed: bool = False,
    room: tuple[int, int] | None = None,
) -> tuple[BlockLists, MaskMod | None]:
    """The lists of a `BlockMask` for q ``[B, Hq, Sq, D]`` and k, and its `mask_mod`, None where that hides nothing.

    `is_packed`: q and k are a packed batch's. `room`: k is a cache, of so many sequences and so many keys of each.

    TypeError or ValueError for another object, and for a mask of other sizes. No value of a list is read here, and one
    that is int32 and contiguous is taken as it is: a CUDA graph sees what is written to it. Where the `QUERIES_OF_KEYS`
    are missing they are made on the device; without a gradient nothing reads them, and they are room without values.
    """
    from torch.nn.attention.flex_attention import noop_mask  # imports SymPy

    shape = (*q.shape[:3], k.shape[2]) if room is None else (room[0], q.shape[1], room[1], room[1])
    check_block_mask(block_mask, shape, is_packed=is_packed, is_cached=room is not None)
    queries, keys = block_mask.BLOCK_SIZE
    spec = BlockSpec(queries, keys, block_mask.full_kv_num_blocks is not None)
    is_one_way = block_mask.q_num_blocks is None
    given = [name for name in spec.names if not (is_one_way and name in QUERIES_OF_KEYS)]
    check_lists({name: getattr(block_mask, name) for name in given}, q)
    named = {name: getattr(block_mask, name).to(torch.int32).contiguous() for name in given}
    if is_one_way:
        make = _transposed if has_gradient else _room_for_transposed
        named |= zip(spec.names[len(named) :], make(named), strict=True)
    mask_mod = block_mask.mask_mod
    return BlockLists(spec, tuple(named.values())), None if mask_mod is noop_mask else mask_mod


def _transposed(named: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The lists of blocks of keys by those of blocks of queries."""
    its = list(named.values())
    return _listed(*(seen_in_lists(*its[at : at + 2]).mT for at in range(0, len(its), 2)))


def _room_for_transposed(named: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    *entries, rows, columns = named["kv_indices"].shape
    shapes = (*entries, columns), (*entries, columns, rows)
    return tuple(named["kv_indices"].new_empty(it) for it in shapes * (len(named) // 2))


def of_sequences(lists: BlockLists, starts: Sequence[torch.Tensor], *, has_gradient: bool = True) -> BlockLists:
    """The lists of a packed batch by sequence, of those over its packed axis; `starts` are cu_seqlens of q and of k.

    A sequence has rows of its own: those of a block of queries that several share follow one another, each with the
    blocks that have keys of its sequence. Row r of the packed axis is row ``r + b`` of sequence b. So none is shared,
    and none takes part in what another sees. No value is read here. `has_gradient`: as for `read_block_mask`. Blocks
    have up to `BLOCK` rows: of longer ones those parts alone are walked over that have rows of the sequence.
    """
    lists = _in_parts(lists)
    queries, keys = (_Side(it, size) for it, size in zip(starts, lists.spec[:2], strict=True))
    named: dict[str, torch.Tensor] = {}
    for names, own, other in ((KEYS_OF_QUERIES, queries, keys), (QUERIES_OF_KEYS, keys, queries)):
        make = _by_sequence if has_gradient or own is queries else _room_by_sequence
        present = [
            it for it in names if it in lists.spec.names
        ]  # of partial and of full blocks: as one, for few launches
        counts, indices = (torch.stack([lists.named[it] for it in present[at::2]]) for at in (0, 1))
        for at, made in enumerate(make(counts, indices, own, other)):
            named |= zip(present[at::2], made, strict=True)
    return BlockLists.among(named, lists.spec)


class _Side(NamedTuple):
    """The sequences of q, or of k, and the rows of a block."""

    starts: torch.Tensor
    size: int

    @property
    def sequences(self) -> int:
        return self.starts.shape[0] - 1

    @property
    def first_blocks(self) -> torch.Tensor:
        """The first block of each sequence, ``[B]``."""
        return self.starts[:-1].div(self.size, rounding_mode="floor")

    @property
    def last_blocks(self) -> torch.Tensor:
        """The last block of each sequence; of an empty one it may be that before its first."""
        return (self.starts[1:] - 1).div(self.size, rounding_mode="floor")


def _in_parts(lists: BlockLists) -> BlockLists:
    """Lists of the mask in blocks of up to `BLOCK` queries and keys."""
    queries, keys = (size if size <= BLOCK else math.gcd(size, BLOCK) for size in lists.spec[:2])
    parts = {"kv": (lists.spec.queries // queries, lists.spec.keys // keys)}
    if parts["kv"] == (1, 1):
        return lists
    parts["q"] = parts["kv"][::-1]

    def divided(name: str, tensor: torch.Tensor) -> torch.Tensor:
        rows, across = parts[name.removeprefix("full_").split("_")[0]]
        if name.endswith("num_blocks"):
            return (tensor * across).repeat_interleave(rows, dim=-1)
        numbers = tensor[..., None] * across + torch.arange(across, dtype=tensor.dtype, device=tensor.device)
        return numbers.flatten(-2).repeat_interleave(rows, dim=-2)

    tensors = tuple(divided(*it) for it in lists.named.items())
    return BlockLists(lists.spec._replace(queries=queries, keys=keys), tensors)


def _by_sequence(
    counts: torch.Tensor, indices: torch.Tensor, own: _Side, other: _Side
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of one direction, of any kinds, with rows of each sequence and its own blocks alone, in their order."""
    if not own.sequences:
        return counts, indices
    rows, columns = indices.shape[-2:]
    if not rows:  # nobody asks for one
        return _room_by_sequence(counts, indices, own, other)
    places = torch.arange(rows + own.sequences, device=counts.device)
    last_places = own.last_blocks + places[: own.sequences]
    sequence = torch.searchsorted(last_places, places).clamp(max=own.sequences - 1)
    row = places - sequence
    is_there = (row >= own.first_blocks[sequence]) & (places <= last_places[sequence])
    row = row.clamp(0, rows - 1)
    blocks, listed = indices[..., row, :], (counts[..., row] * is_there)[..., None]
    is_own = (blocks >= other.first_blocks[sequence, None]) & (blocks <= other.last_blocks[sequence, None])
    is_own &= torch.arange(columns, device=counts.device) < listed
    place = torch.where(is_own, is_own.cumsum(-1, dtype=torch.int32) - 1, columns).long()
    kept = blocks.new_zeros((*blocks.shape[:-1], columns + 1)).scatter(-1, place, blocks)
    return is_own.sum(-1, dtype=torch.int32), kept[..., :columns].contiguous()


def _room_by_sequence(
    counts: torch.Tensor, indices: torch.Tensor, own: _Side, other: _Side
) -> tuple[torch.Tensor, torch.Tensor]:
    *entries, rows, columns = indices.shape
    rows += own.sequences
    return counts.new_empty(*entries, rows), indices.new_empty(*entries, rows, columns)


def in_sequences(mask_mod: MaskMod | None, starts: Sequence[torch.Tensor]) -> MaskMod | None:
    """A `mask_mod` over the packed axis as one of a sequence and of positions in it."""
    if mask_mod is None:
        return None
    starts_q, starts_kv = starts

    def see(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return mask_mod(torch.zeros_like(b), h, starts_q[b] + i, starts_kv[b] + j)

    for name in ("__name__", "__qualname__"):  # errors tell of the caller's
        setattr(see, name, getattr(mask_mod, name, type(mask_mod).__name__))
    return see


def of_one_sequence(lists: BlockLists, number: int, queries: slice, keys: slice) -> BlockLists:
    """The lists of one sequence of `of_sequences`, in blocks of one score. For truth, not for speed."""
    (rows, columns), device = lists.spec[:2], lists.tensors[0].device
    own_rows = torch.arange(queries.start, queries.stop, device=device) // rows + number
    partial, full = seen_blocks(lists.named, own_rows, torch.arange(keys.start, keys.stop, device=device) // columns)
    return BlockLists(BlockSpec(1, 1, has_full=True), _listed_both_ways(partial, full))


def may_hide_blocks(visible: torch.Tensor) -> bool:
    """True for a bool mask ``[B|1, H|1, Sq|1, Skv|1]`` that is worth the lists of its blocks; a matter of its shape.

    One that is broadcast over queries or keys costs an element for each key or query. Making lists costs more than a
    short one saves (`LONG`), and the queries of a decode step should stay with the kernels that divide keys. In a graph
    a length that only a run knows counts as a long one, but not in one that is exported: its lists could not be made
    for one block and for more.
    """
    return all(_is_long(size) for size in visible.shape[2:])


def _is_long(size: int) -> bool:
    if is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value  # imports SymPy

        if not has_static_value(size):
            return not torch.compiler._is_exporting_flag  # Dynamo 2.11 takes is_exporting() for true in any graph
    return size > LONG


def lists_of(visible: torch.Tensor) -> tuple[BlockLists, MaskMod]:
    """The lists and the `mask_mod` of a bool mask ``[B|1, H|1, Sq, Skv]``; only blocks that hide a part read it.

    The mask is read once, on its device, and nothing waits for that. A block that the end of a sequence cuts counts as
    one that hides a part.
    """
    batch, heads = visible.shape[:2]
    counts = _seen_of_blocks(visible)
    full = counts == BLOCK * BLOCK
    partial = (counts > 0) ^ full
    tensors = _listed_both_ways(partial, full)

    def see(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return visible[b if batch != 1 else 0, h if heads != 1 else 0, i, j]

    return BlockLists(BlockSpec(BLOCK, BLOCK, has_full=True), tensors), see


def _seen_of_blocks(visible: torch.Tensor) -> torch.Tensor:
    """How many scores each block shows, int32 ``[B|1, H|1, rows, columns]``, of a mask ``[B|1, H|1, Sq, Skv]``."""
    rows, columns = ((size + BLOCK - 1) // BLOCK for size in visible.shape[2:])
    beyond = (0, columns * BLOCK - visible.shape[3], 0, rows * BLOCK - visible.shape[2])
    whole = torch.nn.functional.pad(visible, beyond) if is_compiling() or any(beyond) else visible  # which copies
    if is_compiling() or is_wrapped(whole):
        by_block: torch.Tensor = whole.unflatten(3, (columns, BLOCK)).unflatten(2, (rows, BLOCK))
        return by_block.sum((3, 5), dtype=torch.int32)
    # Elsewhere torch writes bools as int32 before it adds them. Eight of them are one word, and a byte holds BLOCK.
    if whole.stride(3) != 1 or any(it % 8 for it in (*whole.stride()[:3], whole.storage_offset())):
        whole = whole.contiguous()
    words: torch.Tensor = whole.view(torch.int64).unflatten(3, (columns, BLOCK // 8)).unflatten(2, (rows, BLOCK))
    return words.sum(3).view(torch.uint8).sum(4, dtype=torch.int32)


def _listed_both_ways(partial: torch.Tensor, full: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The `LISTS` of blocks that are seen in part and whole, bools ``[B|1, H|1, rows, columns]``."""
    of_queries, of_keys = (partial, full), (partial.mT, full.mT)
    if not is_compiling() and partial.shape == partial.mT.shape:  # one sort, and a third less for the host to do
        return _listed(*of_queries, *of_keys)
    return (*_listed(*of_queries), *_listed(*of_keys))


def listed_mask(
    partial: torch.Tensor, full: torch.Tensor, shape: Shape, sizes: tuple[int, int], mask_mod: MaskMod
) -> Any:
    """FlexAttention's `BlockMask` of scores ``[B, H, Sq, Skv]`` in blocks that are seen in part and whole."""
    from torch.nn.attention.flex_attention import BlockMask  # imports SymPy

    tensors = (it.expand(*shape[:2], *it.shape[2:]).contiguous() for it in _listed_both_ways(partial, full))
    lists = dict(zip(LISTS, tensors, strict=True))
    return BlockMask(seq_lengths=tuple(shape[2:]), **lists, BLOCK_SIZE=sizes, mask_mod=mask_mod)


def _listed(*seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Counts and numbers of the blocks of each of `seen`, bools ``[..., R, C]``; true ones come first."""
    stacked = torch.stack(seen)
    counts = stacked.sum(-1, dtype=torch.int32).unbind()
    numbers = stacked.argsort(dim=-1, descending=True, stable=True).to(torch.int32).unbind()
    return tuple(it for pair in zip(counts, numbers, strict=True) for it in pair)


def blocks_of(visible: torch.Tensor) -> Any:
    """FlexAttention's `BlockMask` of a bool mask ``[B|1, H|1, Sq, Skv]``, for a call that has a bias beside it."""
    from torch.nn.attention.flex_attention import BlockMask  # imports SymPy

    lists, see = lists_of(visible)
    return BlockMask(seq_lengths=tuple(visible.shape[2:]), **lists.named, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=see)


def list_arguments(shapes: Mapping[str, Shape], names: Sequence[str]) -> ListArguments:
    """The lists of one direction by their names, without those of full blocks where there are none."""
    counts, indices, *full = names
    full_counts, full_indices = full or (None, None)
    batch, heads, rows, columns = shapes[indices]
    return ListArguments(
        counts,
        indices,
        full_counts,
        full_indices,
        stride_batch=heads * rows if batch > 1 else 0,
        stride_head=rows if heads > 1 else 0,
        columns=columns,
    )


def seen_blocks(
    named: Mapping[str, torch.Tensor], rows: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of partial and of full blocks: two bools ``[B|1, H|1, Sq, Skv]``. For truth, not for speed.

    `rows` are those of the lists that queries have, ``[Sq]``, `columns` the blocks that keys are in, ``[Skv]``.
    """
    seen = (seen_in_lists(*(named[it] for it in names)) for names in _by_kind(named))
    partial, *full = (it[..., rows, :][..., columns] for it in seen)
    return partial, full[0] if full else torch.zeros_like(partial)


def kinds_of(lists: BlockLists) -> torch.Tensor:
    """The number of each block, int8 ``[B|1, H|1, rows, columns]``: `PARTIAL` or `WHOLE` if lists name it, else 0."""
    seen = [seen_in_lists(*(lists.named[it] for it in names)) for names in _by_kind(lists.named)]
    kinds = seen[0].to(torch.int8) * PARTIAL
    return kinds if len(seen) == 1 else torch.where(seen[1], WHOLE, kinds)


def _by_kind(named: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Names of the lists of partial blocks of keys, and of those of full ones where there are any."""
    return [names for names in (KEYS_OF_QUERIES[:2], KEYS_OF_QUERIES[2:]) if names[0] in named]


def seen_in_lists(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The blocks that lists name, bools ``[B|1, H|1, rows, columns]``."""
    columns = indices.shape[-1]
    is_counted = torch.arange(columns, device=indices.device) < counts[..., None]
    blocks = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    places = torch.where(is_counted, indices.clamp(0, max(columns - 1, 0)), columns).long()
    return blocks.scatter(-1, places, torch.ones_like(is_counted))[..., :columns]


def list_shapes(lists: Mapping[str, torch.Tensor], blocks: BlockSpec) -> tuple[Shape, ...]:
    """The shapes of a block mask's lists; ValueError where there are others."""
    if tuple(lists) != blocks.names or any(it.dtype != torch.int32 or not it.is_contiguous() for it in lists.values()):
        got = ", ".join(f"{name} {it.dtype} {list(it.shape)}" for name, it in lists.items())
        raise ValueError(f"indices: got {got or 'nothing'}; allowed {', '.join(blocks.names)}, contiguous int32")
    return tuple(tuple(it.shape) for it in lists.values())
