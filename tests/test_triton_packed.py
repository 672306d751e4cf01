"""Packed batches in the Triton kernels: the lists of tiles, both directions interpreted, and what code depends on."""

import random
from itertools import accumulate

import pytest
import torch

from multiattn.packed import LIST_FIELDS, PackingSpec
from multiattn.triton.cpu import interpreter
from multiattn.triton.kernels.constants import ListConstants
from multiattn.triton.kernels.lists import list_tiles

# ---------------------------------------------------------------- lists of tiles

RANDOM = random.Random(0)
MANY = [RANDOM.randrange(40) for _ in range(47)]


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def listed(
    own: list[int], other: list[int], rows: int, tile: int, *, by_keys: bool, last_first: bool
) -> list[list[int]]:
    """The entries that a list should have: of queries, or of keys."""
    offsets, other_offsets = accumulate(own, initial=0), accumulate(other, initial=0)
    sequences = [*zip(range(len(own)), offsets, own, other_offsets, other, strict=False)]
    sequences.append((len(own), sum(own), rows - sum(own), 0, 0))
    entries: list[list[int]] = []
    for number, offset, length, other_offset, other_length in sorted(sequences, key=lambda it: (-it[4], it[0])):
        sides = ((offset, length), (other_offset, other_length))
        fields = [*sides[by_keys], *sides[not by_keys], 0, 0]
        tiles = [[number, first_row, *fields] for first_row in range(0, length, tile)]
        entries += reversed(tiles) if last_first and not by_keys else tiles
    return entries


@pytest.mark.parametrize(
    ("lengths_q", "lengths_kv", "behind", "tiles", "group", "parts"),
    [
        pytest.param([5, 0, 100, 33, 1], [5, 7, 0, 64, 200], 11, (16, 32), 128, 2, id="both"),
        pytest.param([5, 0, 100, 33, 1], [5, 7, 0, 64, 200], 0, (16, 0), 128, 1, id="queries"),
        pytest.param([5, 0, 100, 33, 1], [5, 7, 0, 64, 200], 11, (0, 64), 128, 1, id="keys"),
        pytest.param([], [], 50, (16, 16), 128, 2, id="no-sequence"),
        pytest.param(MANY, MANY[::-1], 3, (16, 32), 16, 3, id="groups"),
    ],
)
def test_lists_have_every_tile_the_costly_ones_first(
    lengths_q: list[int], lengths_kv: list[int], behind: int, tiles: tuple[int, int], group: int, parts: int
) -> None:
    packing = PackingSpec(len(lengths_q))
    rows = (sum(lengths_q) + behind, sum(lengths_kv) + behind)
    lists = [
        torch.full((packing.tiles_max(count, tile), len(LIST_FIELDS)), 7777, dtype=torch.int32) if tile else None
        for count, tile in zip(rows, tiles, strict=True)
    ]
    room = [0 if it is None else len(it) for it in lists]
    counter = torch.full((1,), 5, dtype=torch.int32)
    constants = ListConstants(query_tile=tiles[0], key_tile=tiles[1], last_first=True, group=group)
    grid = (len(lengths_q) // group + 1) * parts * sum(map(bool, tiles))
    sizes = (len(lengths_q), *rows, *room, parts)
    interpreter.run(list_tiles, grid, starts(lengths_q), starts(lengths_kv), *lists, counter, *sizes, constants)
    assert counter.item() == 0
    for it, own, other, by_keys in ((0, lengths_q, lengths_kv, False), (1, lengths_kv, lengths_q, True)):
        made = lists[it]
        if made is not None:
            wanted = listed(own, other, rows[it], tiles[it], by_keys=by_keys, last_first=True)
            assert made[: len(wanted)].tolist() == wanted
            assert made[len(wanted) :, 0].tolist() == [-1] * (len(made) - len(wanted))
