"""Packed batches: sequences one after another in one tensor, without padding, and where each of them starts.

``cu_seqlens`` is int32 ``[B + 1]``, as FlashAttention has it: sequence b has the rows from ``cu_seqlens[b]`` on, up to
``cu_seqlens[b + 1]``. It starts with 0 and never falls. It stays on the device: the host of a GPU does not read it.
Kernels find the sequence of a tile in a list of tiles that a small kernel makes before them.

Inside this package a packed tensor ``[T, H, D]`` is a view ``[1, H, T, D]``, a batch of one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from multiattn.layout import Layout, Shape, Strides, row_major
from multiattn.plain import plain
from multiattn.validate import not_a_tensor

LIST_FIELDS = ("sequence", "first_row", "offset_q", "len_q", "offset_kv", "len_kv", "tiles", "unused")
"""The numbers of one entry of a list of tiles, int32: 32 bytes, one sector of memory.

The tile has the rows from `first_row` on of its sequence, queries or keys. The sequence has the `len_q` queries from
row `offset_q` of q on, and the `len_kv` keys from row `offset_kv` of k on. `sequence` is -1 for an entry without a
tile. `tiles` is how many entries have one, so that a block that does one after another knows where to stop: CUDA's
lists alone have it. Entries of long sequences come first. Rows behind the last sequence are listed as one more of
them, and those before the first as another, with queries but no keys, or keys but no queries: so they get zeros.

Whatever cu_seqlens has, a list names rows that there are, no more of a sequence than its bound in `Packing`, and has no
entry beyond its room: where sequences overlap some tiles are left out. So no kernel touches memory outside its tensors.
"""

ROWS_MIN = 16
"""Rows of the smallest tile of any kernel: a list has room for tiles of these."""

TILE_LISTS = ("query_list", "key_list")
"""Areas of workspace: the tiles of queries, and those of keys."""

RAGGED_ROWS = 1 << 30
"""Rows of the tensor map of `ragged`: more than any tensor has."""
_COORDINATES = (1 << 31) - (1 << 16)
"""Extent of its first two dimensions: `RAGGED_ROWS`, and every row, is inside."""
_WRAPS = 1 << 34
"""Elements: `RAGGED_ROWS` times so many are 2^64, and more bytes than an address counts."""

USUAL_LENGTH = 4096
"""The length by which a packed batch's tiles and backend are chosen: the same for all, so that no batch asks for code
that another did not."""

SHOWN_STARTS = 16
"""The most values of a cu_seqlens that an error shows."""


CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv")
"""The tensors that say where sequences start, in q and in k."""


class Packing(NamedTuple):
    """A call's packing, beside its two cu_seqlens: bounds of the lengths, or 0 where nothing is checked by them."""

    max_q: int = 0
    max_kv: int = 0


class PackingSpec(NamedTuple):
    """The packing of a problem."""

    sequences: int
    max_q: int = 0
    """The most queries of a sequence, where a tensor that scores load from has room for so many; else 0."""
    max_kv: int = 0
    """The same of keys."""

    @property
    def bounds(self) -> Packing:
        """The same as a call has it."""
        return Packing(self.max_q, self.max_kv)

    def longest(self, rows_q: int, rows_kv: int) -> tuple[int, int]:
        """The most queries and keys of a sequence that kernels may take, where there are so many rows of each."""
        return self.max_q or rows_q, self.max_kv or rows_kv

    @property
    def layout(self) -> Layout:
        """A cu_seqlens."""
        return Layout((self.sequences + 1,), (1,), torch.int32)

    def list_layout(self, rows: int) -> Layout:
        """A list of tiles of so many rows in all, queries or keys."""
        shape = (self.tiles_max(rows, ROWS_MIN), len(LIST_FIELDS))
        return Layout(shape, row_major(shape), torch.int32)

    def tiles_max(self, rows: int, tile: int) -> int:
        """The most tiles that so many rows can have: each sequence, and what is around them, ends with a part."""
        return rows // tile + self.sequences + 2


def packing_of(cu_seqlens: Mapping[str, torch.Tensor], bounds: Packing) -> PackingSpec:
    """The packing of a call; ValueError where its cu_seqlens, by name, are not what a launch takes."""
    shapes = {tuple(it.shape) for it in cu_seqlens.values()}
    fit = all(it.dtype == torch.int32 and it.ndim == 1 for it in cu_seqlens.values())
    if tuple(cu_seqlens) != CU_SEQLENS or len(shapes) > 1 or not fit:
        got = ", ".join(f"{name} {it.dtype} {list(it.shape)}" for name, it in cu_seqlens.items())
        raise ValueError(f"indices: got {got or 'nothing'}; allowed {' and '.join(CU_SEQLENS)}, int32 [B + 1]")
    return PackingSpec(cu_seqlens["cu_seqlens_q"].shape[0] - 1, *bounds)


def ragged(layout: Layout) -> Layout:
    """A packed ``[1, H, T, D]`` for a tensor map whose rows end with a sequence: five dimensions, none of any length.

    Row r of the n rows from `offset` on is at ``(N, offset + n, head, N - n + r, column)``, with N = `RAGGED_ROWS`. N
    times the first stride are 2^64 elements, which wrap around to 0, less N rows; the fourth coordinate adds these
    again. It is outside where r is n or more: there a load gives zeros, and a store writes nothing. A negative r is
    inside. The idea is that of `triton.tools.ragged_tma`.
    """
    _, heads, _, head_dim = layout.shape
    _, head, row, column = layout.strides
    shape = (_COORDINATES, _COORDINATES, heads, RAGGED_ROWS, head_dim)
    return Layout(shape, (_WRAPS - row, row, head, row, column), layout.dtype)


def packed_strides(heads: int, head_dim: int) -> Strides:
    """Strides of (B, H, S) of a contiguous ``[T, H, D]``. That of the one batch entry means nothing.

    No stride depends on the number of rows, so that no code does.
    """
    return heads * head_dim, head_dim, heads * head_dim


def strides_of_packed(tensor: torch.Tensor) -> Strides:
    """Strides of (B, H, S) of a view ``[1, H, T, D]``; those of one-element dimensions as in `packed_strides`."""
    _, heads, rows, head_dim = tensor.shape
    entry, head, row = packed_strides(heads, head_dim)
    if rows > 1:
        row = tensor.stride(2)
    return entry, tensor.stride(1) if heads > 1 and tensor.numel() else head, row


def as_batch_of_one(tensor: torch.Tensor) -> torch.Tensor:
    """``[T, H, D]`` as ``[1, H, T, D]``, a view."""
    return tensor.transpose(0, 1).unsqueeze(0)


def check_packing(
    q: object,
    k: object,
    v: object,
    cu_seqlens_q: object,
    cu_seqlens_kv: object,
    max_seqlen_q: object,
    max_seqlen_kv: object,
) -> None:
    """TypeError or ValueError for what is no packed batch; no value of a tensor is read."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(name, tensor)
        if tensor.ndim != 3:
            got = f"rank {tensor.ndim} (shape {tuple(tensor.shape)})"
            hint = "a padded batch goes to fmha, or with a mask of its keys to integrations.padding.fmha_padded"
            raise ValueError(f"{name} must have rank 3, [T, H, D], in a packed batch; got {got}; {hint}")
    assert isinstance(q, torch.Tensor)
    shapes: dict[str, Shape] = {}
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if not isinstance(cu_seqlens, torch.Tensor):
            raise not_a_tensor(name, cu_seqlens)
        if cu_seqlens.dtype != torch.int32:
            raise TypeError(f"{name}.dtype: got {cu_seqlens.dtype}; allowed torch.int32; call .int() on it")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
            hint = "it is torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()"
            raise ValueError(f"{name}: got shape {tuple(cu_seqlens.shape)}; allowed [B + 1], for B sequences; {hint}")
        if cu_seqlens.device != q.device:
            got = f"{cu_seqlens.device}; move it by .to(q.device)"
            raise ValueError(f"{name} must be on the device of q, {q.device}; got {got}")
        shapes[name] = tuple(cu_seqlens.shape)
    if len(set(shapes.values())) > 1:
        hint = "a sequence without rows repeats its start"
        raise ValueError(f"cu_seqlens_q and cu_seqlens_kv must have one shape, [B + 1]; got {shapes}; {hint}")
    for name, length in (("max_seqlen_q", plain(max_seqlen_q)), ("max_seqlen_kv", plain(max_seqlen_kv))):
        if isinstance(length, bool) or not isinstance(length, int | torch.SymInt):
            is_tensor = isinstance(length, torch.Tensor)
            hint = f"{name}.item() is one" if is_tensor else "it is the length of the longest sequence"
            raise TypeError(f"{name} must be an int; got {type(length).__name__}; {hint}")
        if not isinstance(length, torch.SymInt) and length < 0:
            raise ValueError(f"{name}: got {length}; allowed 0 and more; it is the longest sequence's length")


def check_lengths(
    rows_q: int,
    rows_kv: int,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
) -> None:
    """ValueError for values of cu_seqlens that are no starts of sequences in so many rows of q, and of k and v.

    It reads them: on a GPU that waits for the device. A max_seqlen None is not checked.
    """
    check_starts("q", cu_seqlens_q.tolist(), rows_q, "q", max_seqlen_q)
    check_starts("kv", cu_seqlens_kv.tolist(), rows_kv, "k and v", max_seqlen_kv)


def check_starts(side: str, starts: Sequence[int], rows: int, of: str, longest: int | None) -> None:
    """ValueError for values of one cu_seqlens that are no starts of sequences, or of sequences over the `longest`."""
    lengths = list(map(operator.sub, starts[1:], starts))
    least, most = min(lengths, default=0), max(lengths, default=0)
    if starts[0] == 0 and least >= 0 and starts[-1] <= rows and (longest is None or most <= longest):
        return
    if starts[0] == 0 and least >= 0 and starts[-1] <= rows:
        sequence = f"sequence {lengths.index(most)} of cu_seqlens_{side} has {most} rows"
        raise ValueError(f"max_seqlen_{side}: got {longest}; allowed {most} and more, as {sequence}")
    if starts[0]:
        got = f"{starts[0]} first"
    elif least < 0:
        place = next(place for place, it in enumerate(lengths) if it < 0)
        got = f"{starts[place + 1]} at {place + 1}, behind {starts[place]}"
    else:
        got = f"{starts[-1]} last"
    shown = ", ".join(map(str, starts[:SHOWN_STARTS])) + (", ..." if len(starts) > SHOWN_STARTS else "")
    raise ValueError(
        f"cu_seqlens_{side}: got {got}, in [{shown}]; allowed 0 first, none below the one before it, and up to {rows}, "
        f"the rows of {of}, [T, H, D]: torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)) makes "
        "them of lengths"
    )
