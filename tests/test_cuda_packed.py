"""Packed batches in the CUDA kernels: their lists of tiles, what they compute, and what is compiled for them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cuda_runs import on_cpu

from multiattn.cuda.cpu import host
from multiattn.cuda.instances import list_launch
from multiattn.cuda.params import ListParams
from multiattn.packed import LIST_FIELDS, TILE_LISTS, PackingSpec

NO_TILE = [-1, 0, 0, 0, 0, 0, 0, 0]


def starts(*lengths: int) -> list[int]:
    """The cu_seqlens of sequences of these lengths."""
    return [sum(lengths[:it]) for it in range(len(lengths) + 1)]


def tiles_by_hand(own: list[int], other: list[int], rows: int, tile: int, *, of_queries: bool) -> list[list[int]]:
    """A list of tiles, made without any of what the kernel does: `own` and `other` are cu_seqlens."""
    bounds = enumerate(zip(pairwise(own), pairwise(other), strict=True))
    sequences = [(end - first, last - start, first, start, number) for number, ((first, end), (start, last)) in bounds]
    sequences.append((rows - own[-1], 0, own[-1], 0, len(own) - 1))
    entries = []
    for length, cost, first, start, number in sorted(sequences, key=lambda it: (-it[1], it[4])):
        mine, others = [first, length], [start, cost]
        both = mine + others if of_queries else others + mine
        firsts = list(range(0, length, tile))
        entries += [[number, row, *both] for row in (reversed(firsts) if of_queries else firsts)]
    return [[*entry, len(entries), 0] for entry in entries]


@on_cpu
@pytest.mark.parametrize(
    ("lengths_q", "lengths_kv", "rows"),
    [
        pytest.param((5, 5, 5), (5, 5, 5), (15, 15), id="equal"),
        pytest.param((7, 0, 100, 33, 1), (40, 9, 0, 33, 64), (150, 150), id="empty"),
        pytest.param((), (), (3, 40), id="no_sequence"),
        pytest.param(tuple(range(60)), tuple(range(60, 0, -1)), (1770, 1830), id="many"),
    ],
)
def test_each_list_has_every_tile_once_and_longest_first(lengths_q, lengths_kv, rows):
    sequences, tile_q, tile_kv = len(lengths_q), 32, 16
    cu_q, cu_kv = starts(*lengths_q), starts(*lengths_kv)
    packing = PackingSpec(sequences)
    counts = packing.tiles_max(rows[0], tile_q), packing.tiles_max(rows[1], tile_kv)
    lists = [torch.full((count + 1, len(LIST_FIELDS)), 7, dtype=torch.int32) for count in counts]
    operands = [torch.tensor(it, dtype=torch.int32) for it in (cu_q, cu_kv)]
    counter = torch.full((1,), 9, dtype=torch.int32)
    fields = {
        **{f"cu_seqlens_{it}": tensor.data_ptr() for it, tensor in zip(("q", "kv"), operands, strict=True)},
        **{name: tensor.data_ptr() for name, tensor in zip(TILE_LISTS, lists, strict=True)},
        "next_tile": counter.data_ptr(),
        "sequences": sequences,
        **dict(zip(("rows_q", "rows_kv", "tiles_q", "tiles_kv"), (*rows, *counts), strict=True)),
        "tile_q": tile_q,
        "tile_kv": tile_kv,
    }
    launch = list_launch(packing)
    kernel, params = launch.kernel, host.aligned(bytes(ListParams(**fields)))
    library = host.load(host.build([kernel]))
    host.run(library, kernel.name, params, blocks=launch.blocks, threads=kernel.threads, smem_bytes=0)
    wanted = [
        tiles_by_hand(cu_q, cu_kv, rows[0], tile_q, of_queries=True),
        tiles_by_hand(cu_kv, cu_q, rows[1], tile_kv, of_queries=False),
    ]
    for made, hand, count in zip(lists, wanted, counts, strict=True):
        assert made[:count].tolist() == hand + [NO_TILE] * (count - len(hand))
        assert made[count].tolist() == [7] * 8
    assert counter.item() == 0
