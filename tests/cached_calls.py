"""Small calls with a cache, for the tests of `fmha_kvcache`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

Call = tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], dict[str, Any]]
"""q and the two caches, and the other arguments."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, bf16."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def dense(
    lengths: Sequence[int] = (33, 0, 7),
    queries: int = 1,
    room: int = 40,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
) -> Call:
    """Sequences of these lengths, each in an entry with so much room."""
    q = drawn(len(lengths), heads[0], queries, head_dim, seed=1)
    k, v = (drawn(len(lengths), heads[1], room, head_dim, seed=seed) for seed in (2, 3))
    return (q, k, v), {"seqlens_kv": torch.tensor(lengths, dtype=torch.int32)}


def paged(
    lengths: Sequence[int] = (33, 7, 20),
    queries: Sequence[int] = (1, 3, 0),
    page: int = 16,
    behind: int = 0,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
) -> Call:
    """The call with pages in no order and packed queries, of which so many rows are behind the last sequence."""
    needed = [-(-length // page) for length in lengths]
    order = iter(torch.randperm(sum(needed), generator=torch.Generator().manual_seed(4)).tolist())
    table = torch.zeros(len(lengths), max(needed, default=0) + 1, dtype=torch.int32)
    for entry, number in enumerate(needed):
        table[entry, :number] = torch.tensor([*itertools.islice(order, number)], dtype=torch.int32)
    q = drawn(sum(queries) + behind, heads[0], head_dim, seed=1)
    k, v = (drawn(sum(needed), page, heads[1], head_dim, seed=seed).transpose(1, 2) for seed in (2, 3))
    rest = {
        "seqlens_kv": torch.tensor(lengths, dtype=torch.int32),
        "page_table": table,
        "cu_seqlens_q": torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32),
        "max_seqlen_q": max(queries, default=0),
    }
    return (q, k, v), rest


COMPILED = [
    (dense, {}),
    (dense, {"causal": True, "num_splits": 3, "return_lse": True, "scale": 0.3}),
    (paged, {"causal": True, "window": (9, 0), "return_lse": True}),
    (paged, {"causal": True, "backend": "cuda", "num_splits": 2}),
    (paged, {"causal": True, "softcap": 3.0, "sinks": torch.arange(4.0)}),
]
"""Calls that are compiled, and what of `fmha_kvcache` they ask for."""
