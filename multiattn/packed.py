"""Packed batches as kernels take them: sequences one after another in one tensor, without padding.

``cu_seqlens``, int32 ``[B + 1]`` as FlashAttention has it, says where each of them starts (`multiattn.sequences`).
Kernels find the sequence of a tile in a list of tiles that a small kernel makes before them.

Inside this package a packed tensor ``[T, H, D]`` is a view ``[1, H, T, D]``, a batch of one.
"""

from __future__ import annotations

import torch

from multiattn.layout import Layout, Strides

LIST_FIELDS = ("sequence", "first_row", "offset_q", "len_q", "offset_kv", "len_kv", "tiles", "unused")
"""The numbers of one entry of a list of tiles, int32: 32 bytes, one sector of memory.

The tile has the rows from `first_row` on of its sequence, queries or keys. The sequence has the `len_q` queries from
row `offset_q` of q on, and the `len_kv` keys from row `offset_kv` of k on. `sequence` is -1 for an entry without a
tile. `tiles` is how many entries have one, so that a block that does one after another knows where to stop: CUDA's
lists alone have it. Entries of long sequences come first. Rows behind the last sequence are listed as one more of
them, and those before the first as another, with queries but no keys, or keys but no queries: so they get zeros.

Whatever cu_seqlens has, a list names rows that there are, no more of a sequence than its bound (`Batching.max_q`), and
has no entry beyond its room: where sequences overlap some tiles are left out. So no kernel touches memory outside its
tensors.
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


def of_batch_of_one(tensor: torch.Tensor) -> torch.Tensor:
    """``[1, H, T, D]`` as ``[T, H, D]``. Autograd takes it back as a view; what it makes of ``tensor[0]`` is a copy."""
    return tensor.squeeze(0).transpose(0, 1)
