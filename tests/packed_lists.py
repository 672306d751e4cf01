"""The lists of tiles that kernels of packed batches should make, made without any of what the kernels do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch

Pair = tuple[int, int]

_RANDOM = random.Random(0)
MANY = [_RANDOM.randrange(40) for _ in range(47)]
"""More lengths than a warp has lanes, 0 among them."""
LISTS = [
    pytest.param([5, 0, 100, 33, 1], [5, 7, 0, 64, 200], 11, (16, 32), 2, id="both"),
    pytest.param([5, 0, 100, 33, 1], [5, 7, 0, 64, 200], 0, (16, 0), 1, id="queries"),
    pytest.param([5, 0, 100, 33, 1], [5, 7, 0, 64, 200], 11, (0, 64), 1, id="keys"),
    pytest.param([5, 5, 5], [5, 5, 5], 0, (32, 16), 1, id="equal"),
    pytest.param([], [], 50, (16, 16), 2, id="no-sequence"),
    pytest.param(MANY, MANY[::-1], 3, (16, 32), 3, id="groups"),
]
"""Lengths of both sides, rows behind them, tiles of both lists (0: not wanted), and the parts that share a group's."""
WRONG = {
    "no_leading_0": ([30, 60, 100], [20, 25, 130]),
    "a_later_0": ([0, 100, 0, 100, 0, 100, 0, 100], [0, 130, 0, 130, 0, 130, 0, 130]),
    "falling": ([0, 90, 40, 60, 20, 100], [130, 70, 100, 50, 60, 0]),
    "beyond": ([0, 50, 1000, 2**31 - 1], [0, 10, 131, 2**31 - 1]),
    "negative": ([-5, 50, -(2**31), 100], [-(2**31), -1, 40, 130]),
    "lengths": ([40, 30, 30], [65, 35, 30]),
}
"""Values of both cu_seqlens that no batch of 100 queries and 130 keys has."""
WRONG_ROWS = 100, 130


def starts(lengths: Sequence[int]) -> torch.Tensor:
    """The cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def ranges(cu_seqlens: Sequence[int], rows: int, longest: int = 2**31 - 1) -> list[tuple[int, int]]:
    """First row and length of each sequence, of the rows behind the last, and of those before the first."""
    places = [min(max(it, 0), rows) for it in cu_seqlens]
    found = [(place, min(max(end - place, 0), longest)) for place, end in pairwise(places)]
    return [*found, (places[-1], rows - places[-1]), (0, places[0])]


def listed(
    cu_seqlens: Sequence[Sequence[int]], rows: Pair, tile: int, longest: Pair, *, of_keys: bool, cut: bool = False
) -> list[list[int]]:
    """The first six of `LIST_FIELDS` of each entry, of tiles of queries or of keys, whose side comes first.

    `cut`: tiles end at multiples of their size of the packed axis, not of the sequence.
    """
    own, other = (ranges(*it) for it in zip(cu_seqlens, rows, longest, strict=True))
    sequences = [(number, *it) for number, it in enumerate(zip(own, [*other[:-2], (0, 0), (0, 0)], strict=True))]
    entries = []
    for number, *sides in sorted(sequences, key=lambda it: (-it[2][1], it[0])):
        fields = [*sides[of_keys], *sides[not of_keys]]
        offset, length = sides[0]
        starts = (max(row, 0) for row in range(-(offset % tile) if cut and length else 0, length, tile))
        tiles = [[number, first_row, *fields] for first_row in starts]
        entries += tiles if of_keys else reversed(tiles)
    return entries
