"""The cases of caches; `parity.cases` has them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from parity.case import CacheCase, Case, DType, Memory

_OF_CACHE = {it.name for it in fields(CacheCase)}

EDGES = (33, 0, 1, 16, 17, 48)
"""No key, one, a page of 16, a page and a key, whole pages, and some in between."""
MIXED = (40, 1, 0, 1, 7)
"""Queries: a chunk, single tokens, none, a short chunk."""
BEFORE = (90, 35, 20, 1, 7)
"""Keys of the same: a chunk of a long prompt, single tokens, none asked, the first token, a whole short prompt."""


def cached(
    name: str, why: str, lengths: Sequence[int], queries: int | Sequence[int] = 1, *, behind: int = 0, **more: Any
) -> Case:
    """A case of sequences with so many keys each, and so many queries; `behind` rows of packed ones are in none.

    There is room for a page or seven keys more than the longest has.
    """
    page = more.get("page")
    of_cache = {key: more.pop(key) for key in [*more] if key in _OF_CACHE}
    longest = max(lengths, default=0)
    room = longest + 7 if page is None else (-(-longest // page) + 1) * page
    sizes: dict[str, Any] = {"batch": len(lengths), "seq_q": queries}
    if not isinstance(queries, int):
        sizes = {"batch": 1, "seq_q": sum(queries) + behind, "layout": Memory(order="bshd")}
        of_cache["queries"] = tuple(queries)
    return Case(
        name=f"cache_{name}",
        why=why,
        cache=CacheCase(lengths=tuple(lengths), **of_cache),
        **{"seq_kv": room, "heads_q": 4, "heads_kv": 2, **sizes, **more},
    )


def caches() -> Iterator[Case]:
    """Caches: where keys are, how many queries there are, what goes with them, how keys are divided, long ones."""
    yield from _dense()
    yield from _pages()
    yield from _queries()
    yield from _with_others()
    yield from _freed()
    yield from _heads()
    yield from _splits()
    yield from _long()


def _dense() -> Iterator[Case]:
    yield cached("dense", "room beyond each length", EDGES)
    yield cached("dense_heads_first", "an entry [Hkv, S, D]", EDGES, order="hnd", dtype="fp16", nightly=True)
    yield cached("dense_rows_joint", "K and V of a token beside each other", EDGES, joint="rows", nightly=True)
    yield cached("dense_full", "no room is left", (48, 48), seq_kv=48, nightly=True)
    yield cached("no_key_at_all", "every length is 0, which the host does not know", (0, 0, 0))
    yield cached("no_capacity", "no row in any entry", (0, 0), seq_kv=0)
    yield cached("no_sequence", "a batch of none", (), seq_kv=16)
    yield cached("no_query", "nothing is asked", (20, 3), 0)
    yield cached("many", "more sequences than a warp has lanes", range(40), heads_q=2, heads_kv=1, nightly=True)


def _pages() -> Iterator[Case]:
    for page, why in (
        (1, "each key has a page of its own, as SGLang has it"),
        (16, "the page of vLLM and TensorRT-LLM"),
        (64, "a page that is a tile"),
        (128, "a page that is several tiles"),
        (5, "an odd page: tiles cross pages, and rows have no power of two"),
    ):
        yield cached(f"page_{page}", why, _around(page), page=page, slack=2)
    for page in (32, 256):
        yield cached(f"page_{page}", "a usual page", _around(page), page=page, slack=2, nightly=True)
    yield cached("page_16_heads_first", "pages [Hkv, page, D]", EDGES, page=16, order="hnd")
    yield cached("page_5_heads_first", "the same of an odd page", EDGES, page=5, order="hnd", nightly=True)
    yield cached("page_16_joint", "K and V of a page beside each other", EDGES, page=16, joint="entries", slack=1)
    yield cached("page_16_rows_joint", "K and V of a token in one row", EDGES, page=16, joint="rows", order="hnd")
    yield cached("page_1_joint", "the same of a page of one", (7, 20), page=1, joint="entries", nightly=True)
    yield cached("page_16_unaligned", "rows that start anywhere", EDGES, page=16, offset=1, row_pad=3, slack=1)
    yield cached("dense_unaligned", "the same of entries", EDGES, offset=3, row_pad=1, nightly=True)
    yield cached(
        "shared_page", "the second sequence ends in a page of the first", (40, 23, 9), page=16, shared=2, slack=1
    )
    yield cached("shared_prefix", "two continue one prompt", (70, 69), 3, page=16, shared=4, causal=True, nightly=True)


def _around(page: int) -> tuple[int, ...]:
    """Lengths at a page's boundaries."""
    return (page + 1, 0, 1, page, max(3 * page // 2, 2))


def _queries() -> Iterator[Case]:
    ends = (50, 3, 16, 33, 0)
    yield cached("decode_causal", "the last query sees every key", ends, 1, causal=True, page=16, nightly=True)
    for queries, page, nightly in ((2, 16, True), (4, None, False), (8, 16, True), (16, 5, True)):
        yield cached(
            f"speculative_{queries}", "a few last tokens; rows that see nothing", ends, queries, page=page, causal=True,
            nightly=nightly,
        )  # fmt: skip
    yield cached("few_full", "each of a few queries sees all", ends, 5, page=16, nightly=True)
    yield cached("mixed", "chunks and single tokens, and none", BEFORE, MIXED, page=16, causal=True, behind=9)
    yield cached("mixed_dense", "the same of entries", BEFORE, MIXED, causal=True, behind=3, dtype="fp16")
    yield cached("mixed_page_1", "the same of pages of one", BEFORE, MIXED, page=1, causal=True, nightly=True)
    yield cached("mixed_full", "the same, each query sees all", BEFORE, MIXED, page=16, behind=4, nightly=True)
    yield cached("tokens_packed", "one query of each sequence, packed", EDGES, (1,) * 6, page=16, causal=True)
    yield cached(
        "fewer_than_room", "max_seqlen_q is more than any has", (30, 9), (3, 1), page=16, causal=True, room=20, behind=7
    )
    yield cached("packed_no_query", "all rows are behind the last", (20, 3), (0, 0), page=16, behind=5)
    yield cached("packed_no_capacity", "no row in any entry", (0, 0), (3, 1), seq_kv=0, sinks="normal", behind=5)
    yield cached("more_queries_than_keys", "rows above the diagonal see nothing", (3, 0), (20, 5), page=16, causal=True)


def _with_others() -> Iterator[Case]:
    yield cached("window", "the last keys of each length", (90, 31, 0, 7), page=16, window=(30, 0))
    yield cached("window_few", "a band at each length", (90, 31, 5), 4, window=(20, None), causal=True, page=5)
    yield cached("softcap", "scores of a sequence's own", (60, 17, 0), 2, softcap=3.0, causal=True, page=16)
    yield cached("softcap_dense", "the same of entries", EDGES, softcap=3.0, dtype="fp16", nightly=True)
    yield cached("sinks", "of rows that see nothing else, too", (50, 0, 17), sinks="normal", page=16)
    yield cached(
        "sinks_mixed", "a sink is not one of each part", BEFORE, MIXED, sinks="some", causal=True, page=16, behind=5,
        splits=3,
    )  # fmt: skip
    yield cached("sinks_no_capacity", "nothing but sinks", (0, 0), sinks="normal", seq_kv=0, nightly=True)
    yield cached(
        "gpt_oss", "sinks, a window, eight heads of one", (90, 33, 1), sinks="normal", window=(31, None), causal=True,
        heads_q=8, heads_kv=1, page=16, nightly=True,
    )  # fmt: skip
    yield cached("scale_negative", "the least scores are the highest", EDGES, scale=-0.5, page=16)
    for values in ("ascending", "descending"):
        yield cached(
            values, "maxima move in every block, whichever is the first", (150, 33, 200), 8, values=values, page=16,
            causal=True,
        )  # fmt: skip
    yield cached("scale_zero", "each key counts alike", EDGES, scale=0.0, page=16, nightly=True)


def _freed() -> Iterator[Case]:
    """Windows that begin around the edges of pages and tiles, of one part and of several."""
    for page, left, right, queries, splits in (
        (None, 50, 0, 1, 1), (5, 10, None, 1, 3), (16, 71, 0, 1, 3), (16, 72, 2, 1, 1), (5, 135, 0, 1, 2),
        (16, 0, 0, 1, 1), (5, 31, 0, (40, 2, 3, 70), 3), (16, 50, 3, (40, 2, 3, 70), 1),
    ):  # fmt: skip
        yield cached(
            f"freed_{page or 'dense'}_{left}", "what lies before a window is never read", (200, 0, 7, 130), queries,
            page=page, window=(left, right), splits=splits, freed=True,
        )  # fmt: skip


def _heads() -> Iterator[Case]:
    for heads_q, heads_kv, what, nightly in (
        (3, 3, "mha", False),
        (8, 1, "gqa8", True),
        (12, 4, "gqa3", True),
        (20, 1, "mqa20", False),
    ):
        yield cached(
            f"{what}", "heads that share keys are rows of one tile", (35, 16), heads_q=heads_q, heads_kv=heads_kv,
            page=16, nightly=nightly,
        )  # fmt: skip
    yield cached(
        "gqa3_few", "a query's heads are in two tiles", (35, 6), 7, heads_q=6, heads_kv=2, page=16, causal=True,
        nightly=True,
    )  # fmt: skip
    widths: tuple[tuple[int, DType, int | None, bool], ...] = (
        (80, "fp16", 16, True),
        (128, "bf16", 16, False),
        (128, "fp16", None, True),
        (256, "bf16", 5, False),
        (8, "bf16", 16, True),
        (512, "bf16", 16, False),
        (512, "fp16", None, True),
    )
    for head_dim, dtype, page, nightly in widths:
        name = f"d{head_dim}_{dtype}_{'dense' if page is None else f'page_{page}'}"
        yield cached(
            name, "other head_dims", (35, 0, 16), 2, head_dim=head_dim, dtype=dtype, page=page, causal=True,
            nightly=nightly,
        )  # fmt: skip


def _splits() -> Iterator[Case]:
    lengths = (200, 0, 17, 64)
    for splits, why in (
        (1, "no parts: the same bits in any batch"),
        (3, "parts that are not alike"),
        (20, "some parts have no key"),
    ):
        yield cached(f"splits_{splits}", why, lengths, page=16, splits=splits)
    yield cached("splits_3_few", "parts of which some see nothing", (200, 3, 40), 4, splits=3, causal=True, page=16)
    yield cached("splits_7_mixed", "parts of each chunk", BEFORE, MIXED, splits=7, causal=True, page=5, behind=6)
    yield cached("splits_4_dense", "parts of entries", lengths, splits=4, dtype="fp16", nightly=True)
    yield cached("splits_256_d128", "the most parts", (40, 3), splits=256, head_dim=128, page=16, nightly=True)
    yield cached("splits_2_d512", "parts of wide heads", lengths, splits=2, head_dim=512, page=16, nightly=True)


def _long() -> Iterator[Case]:
    for head_dim in (64, 128, 256):
        yield cached(
            f"long_d{head_dim}", "128k keys of one sequence", (131_000,), head_dim=head_dim, heads_q=8, page=64,
            size="gpu",
        )  # fmt: skip
        yield cached(
            f"batch_32_d{head_dim}", "32 sequences up to 8k, of any lengths", [*range(1, 8193, 257)][:32],
            head_dim=head_dim, heads_q=16, page=16, causal=True, size="gpu",
        )  # fmt: skip
    yield cached("long_dense", "32k keys in an entry of 40k", (32_768, 1, 20_000), heads_q=8, seq_kv=40_960, size="gpu")
    yield cached("long_page_1", "8k pages of one key", (8192, 77), heads_q=8, page=1, size="gpu", dtype="fp16")
    yield cached(
        "long_odd_page", "pages that no tile divides", (9001, 77), 4, heads_q=8, page=48, causal=True, size="gpu"
    )
    yield cached(
        "long_chunk", "a chunk of a prompt of 64k, with eight heads of one", (65_536, 4000, 1), (512, 1, 1),
        heads_q=8, heads_kv=1, head_dim=128, page=16, causal=True, behind=30, size="gpu",
    )  # fmt: skip
    for queries in (4, 16):
        yield cached(
            f"long_speculative_{queries}", "a few tokens over 8k keys and fewer", (8192, 8000, 100, 5), queries,
            heads_q=32, heads_kv=8, head_dim=128, page=16, causal=True, size="gpu",
        )  # fmt: skip
    yield cached(
        "long_window", "a window over 32k keys", (32_768, 900), heads_q=8, window=(1023, 0), page=16, size="gpu"
    )
    yield cached("long_sinks", "sinks and parts", (32_768, 0), heads_q=8, sinks="large", page=16, size="gpu")
    yield cached("long_softcap", "softcap and parts", (16_384, 9), heads_q=8, softcap=20.0, page=16, size="gpu")
    yield cached("long_d512", "the widest heads", (8192, 1000), heads_q=8, head_dim=512, page=64, size="gpu")
    yield cached("long_one_part", "no parts of 16k keys", (16_384, 3), heads_q=8, splits=1, page=16, size="gpu")
    yield cached("long_256_parts", "the most parts", (65_536, 300), heads_q=8, splits=256, page=16, size="gpu")
