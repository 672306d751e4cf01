"""Caches with windows: what lies before the first key that any query sees is never read, in any backend."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cuda_runs import on_cpu

from multiattn import fmha_kvcache

NOBODY = (-1, 10**9)
"""Entries of a table that no page has."""
WGMMA = "split_keys_wgmma"


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def freed(
    lengths: tuple[int, ...], queries: tuple[int, ...], page: int | None, left: int, *, packed: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calls of one meaning: of a cache without poison, and of one with NaN in all that no query of a sequence sees.

    Entries of the table are no pages there, or pages that hold NaN.
    """
    heads_kv, head_dim = 2, 16
    first = [max(length - count - left, 0) for length, count in zip(lengths, queries, strict=True)]
    size = page or max(lengths) + 3
    used = [-(-length // size) if page else 1 for length in lengths]
    k, v = (drawn(sum(used) + 1, heads_kv, size, head_dim, seed=seed) for seed in (1, 2))
    order = iter((torch.randperm(sum(used), generator=torch.Generator().manual_seed(3)) + 1).tolist())
    if page is None:
        k, v, order = k[1:], v[1:], iter(range(sum(used)))
    table = torch.zeros(len(lengths), max(used) + 1, dtype=torch.int32)
    spoilt = (k.clone(), v.clone(), table.clone())
    if page:
        for tensor in spoilt[:2]:
            tensor[0] = torch.nan
    nobody = itertools.cycle((*NOBODY, 0))
    for entry, count in enumerate(used):
        for place in range(count):
            number = next(order)
            table[entry, place] = spoilt[2][entry, place] = number
            keys = place * size + torch.arange(size)
            for tensor in spoilt[:2]:
                tensor[number][:, (keys < first[entry]) | (keys >= lengths[entry])] = torch.nan
            if keys[-1] < first[entry]:
                spoilt[2][entry, place] = next(nobody)
        spoilt[2][entry, count:] = next(nobody)
    if packed:
        shared: dict[str, Any] = {"q": drawn(sum(queries), 4, head_dim, seed=4)}
        shared["cu_seqlens_q"] = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
        shared["max_seqlen_q"] = max(queries)
    else:
        shared = {"q": drawn(len(lengths), 4, queries[0], head_dim, seed=4)}
    shared |= {"seqlens_kv": torch.tensor(lengths, dtype=torch.int32), "return_lse": True}
    calls = []
    for its_k, its_v, its_table in ((k, v, table), spoilt):
        calls.append({**shared, "k_cache": its_k, "v_cache": its_v, **({"page_table": its_table} if page else {})})
    return calls[0], calls[1]


BACKENDS = [
    pytest.param({"backend": "reference"}, id="reference"),
    pytest.param({"backend": "triton"}, id="triton"),
    pytest.param({"backend": "cutile"}, id="cutile"),
    pytest.param({"backend": "cuda"}, id="cuda", marks=on_cpu),
    pytest.param({"backend": "cuda", "variant": WGMMA}, id="wgmma", marks=on_cpu),
]
LENGTHS = (200, 0, 7, 130)


def nightly(page: int | None) -> Any:
    """A page for the nightly tests."""
    return pytest.param(page, marks=pytest.mark.nightly)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [None, nightly(1), 5, 16, nightly(64)], ids=["dense", "1", "5", "16", "64"])
def test_what_lies_before_a_window_is_never_read(page, backend):
    """Windows around the edges of pages and tiles, with and without a right side, of one part and of several."""
    for left, right, splits in ((50, 0, 1), (10, None, 3), (71, 0, 3), (72, 2, 1), (135, 0, 2), (0, 0, 1)):
        clean, spoilt = freed(LENGTHS, (1,) * 4, page, left)
        options = {"window": (left, right), "num_splits": splits}
        truth = fmha_kvcache(**clean, **options, backend="reference")
        found = fmha_kvcache(**spoilt, **options, **backend)
        for got, wanted in zip(found, truth, strict=True):
            torch.testing.assert_close(got.float(), wanted.float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [nightly(None), 5, 16, nightly(64)], ids=["dense", "5", "16", "64"])
def test_several_queries_read_from_the_window_of_the_first_on(page, backend):
    """Packed, each sequence with queries of its own, of which some are more than a tile."""
    queries = (40, 2, 3, 70)
    for left, splits in ((50, 1), (31, 3)):
        clean, spoilt = freed(LENGTHS, queries, page, left, packed=True)
        options = {"causal": True, "window": (left, None), "num_splits": splits}
        truth = fmha_kvcache(**clean, **options, backend="reference")
        found = fmha_kvcache(**spoilt, **options, **backend)
        for got, wanted in zip(found, truth, strict=True):
            torch.testing.assert_close(got.float(), wanted.float(), atol=1e-2, rtol=1e-2)


def test_an_entry_that_is_before_no_window_must_be_a_page():
    _, spoilt = freed((200,), (1,), 16, 50)
    for window in ((80, 0), None):  # key 119 is in page 7, which was freed
        with pytest.raises(ValueError, match=r"page_table: got .* of sequence 0 at .*; allowed 0 to 13,"):
            fmha_kvcache(**spoilt, window=window, causal=True, backend="triton")
