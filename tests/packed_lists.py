"""The lists of tiles that kernels of packed batches should make, made without any of what the kernels do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import torch

_RANDOM = random.Random(0)
MANY = [_RANDOM.randrange(40) for _ in range(47)]
"""More lengths than a warp has lanes, 0 among them."""


def starts(lengths: Sequence[int]) -> torch.Tensor:
    """The cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def listed(
    own: Sequence[int], other: Sequence[int], rows: int, tile: int, *, of_keys: bool, last_first: bool
) -> list[list[int]]:
    """The first six of `multiattn.packed.LIST_FIELDS` of each entry, of tiles of queries or of keys.

    `own` are the lengths on the side of the tiles, which has so many `rows`, and `other` those on the other side.
    """
    offsets, other_offsets = accumulate(own, initial=0), accumulate(other, initial=0)
    sequences = [*zip(range(len(own)), offsets, own, other_offsets, other, strict=False)]
    sequences.append((len(own), sum(own), rows - sum(own), 0, 0))
    entries = []
    for number, offset, length, other_offset, other_length in sorted(sequences, key=lambda it: (-it[4], it[0])):
        sides = ((offset, length), (other_offset, other_length))
        fields = [*sides[of_keys], *sides[not of_keys]]
        tiles = [[number, first_row, *fields] for first_row in range(0, length, tile)]
        entries += reversed(tiles) if last_first and not of_keys else tiles
    return entries
