"""The cases of caches with scores, masks and trees, and of caches of 8-bit numbers; `parity.cases` has them all."""

from __future__ import annotations

from collections.abc import Iterator

from parity.cache_cases import BEFORE, EDGES, MIXED, cached
from parity.case import Case, DType, Scales, Stored

DRAFTED = (90, 16, 33, 70)
"""Keys of sequences with a tree of 16 nodes each: one has nothing else."""
NODES, BEFORE_NODES = (16, 1, 0, 5), (90, 1, 20, 33)
"""Trees of other sizes beside single tokens and none, and the keys of the same."""


def caches_with_scores() -> Iterator[Case]:
    """Caches: positions of scores in a sequence, biases, trees of drafted tokens, block masks."""
    yield from _score_mods()
    yield from _biases()
    yield from _trees()
    yield from _block_masks()
    yield from _long_scores()


def _score_mods() -> Iterator[Case]:
    name = "relative_logits"
    yield cached(
        name, "a query is the last of its sequence, wherever that ends", (150, 0, 1, 70), score_mod=name, page=16
    )
    yield cached(
        f"{name}_few", "a few last queries, in parts that none of the logits reaches", (200, 3, 90), 4, score_mod=name,
        page=64, causal=True, splits=3, dtype="fp16", heads_q=8,
    )  # fmt: skip
    yield cached(
        f"{name}_mixed", "each sequence has another number of queries", BEFORE, MIXED, score_mod=name, page=16,
        causal=True, behind=5,
    )  # fmt: skip
    yield cached(
        f"{name}_dense", "the same of entries", BEFORE, MIXED, score_mod=name, causal=True, dtype="fp16", nightly=True
    )
    yield cached(
        "relative_bias", "a table by distance, over pages of one key", (60, 9, 0), 3, score_mod="relative_bias", page=1,
        causal=True,
    )  # fmt: skip
    yield cached(
        "score_mod_freed", "positions are those in the sequence, where pages before a window are gone",
        (200, 7, 130), 2, score_mod="learned_alibi", page=16, window=(50, 0), splits=3, freed=True,
    )  # fmt: skip
    yield cached(
        "score_mod_early", "queries before the first key have positions below 0", (3, 0, 20), 9,
        score_mod="relative_position", page=16, nightly=True,
    )  # fmt: skip
    yield cached(
        "composite", "all at once, with parts", (70, 33), 2, score_mod="composite", causal=True, splits=2, sinks="some",
        nightly=True,
    )  # fmt: skip


def _biases() -> Iterator[Case]:
    yield cached("alibi", "a slope for each head, from the end of each sequence", EDGES, alibi="heads", dtype="fp16")
    yield cached(
        "alibi_mixed", "slopes of each sequence, which packed queries share", BEFORE, MIXED, alibi="batch", page=16,
        causal=True, splits=3, behind=4,
    )  # fmt: skip
    yield cached(
        "bias_of_room", "every key that there is room for has numbers of its own", (35, 0, 48, 17), 3, bias="bhqk",
        bias_hides=True, page=16, causal=True,
    )  # fmt: skip
    yield cached(
        "bias_of_keys", "one number a key, fp32, as padding is told", (60, 9, 33), bias="bk", wide_bias=True,
        bias_hides=True, page=1, splits=2,
    )  # fmt: skip
    yield cached(
        "bias_of_rows", "no number of a key's own, over entries", (35, 6), 4, bias="hq", causal=True, nightly=True
    )


def _trees() -> Iterator[Case]:
    why = "drafted tokens: each sees the cache and its ancestors"
    yield cached("tree_16", why, DRAFTED, 16, tree="bool", page=16, heads_q=8, heads_kv=1)
    yield cached(
        "tree_64", "more nodes than a tile has rows, over parts that have none of them", (200, 64, 131), 64,
        tree="bool", page=64, splits=3, head_dim=128,
    )  # fmt: skip
    yield cached("tree_16_scores", "-inf hides, and what is seen has a score", DRAFTED, 16, tree="scores", page=1)
    yield cached(
        "tree_64_scores", "fp32 beside fp16, over entries", (150, 64), 64, tree="scores", wide_bias=True, dtype="fp16",
        heads_q=2, heads_kv=1, nightly=True,
    )  # fmt: skip
    yield cached(
        "tree_mixed", "trees of other sizes in one call: columns before a tree are of the cache, or of no key",
        BEFORE_NODES, NODES, tree="bool", page=16, behind=3, splits=2,
    )  # fmt: skip
    yield cached(
        "tree_dense_mixed", "the same of entries", BEFORE_NODES, NODES, tree="scores", dtype="fp16", behind=2,
        nightly=True,
    )  # fmt: skip
    yield cached(
        "tree_relative_logits", "a tree of a model with scores of its own, sinks and a cap", DRAFTED, 16, tree="bool",
        page=16, score_mod="relative_logits", sinks="normal", softcap=5.0,
    )  # fmt: skip
    yield cached(
        "tree_window", "a window hides keys before the tree, and nodes", DRAFTED, 16, tree="bool", page=5,
        window=(40, 0), nightly=True,
    )  # fmt: skip


def _block_masks() -> Iterator[Case]:
    yield cached(
        "image_prefix", "a chunk that ends inside an image, one behind it, and single tokens", (40, 90, 20, 70, 7),
        (30, 40, 1, 3, 7), mask_mod="image_prefix", page=16, blocks=(32, 32), lists="b", behind=5,
    )  # fmt: skip
    yield cached(
        "image_prefix_dense", "an image is all of it in one call, over entries", (33, 60), 33, mask_mod="image_prefix",
        blocks=(16, 16), lists="b", dtype="fp16", nightly=True,
    )  # fmt: skip
    yield cached(
        "transfusion", "images anywhere, over parts", (70, 40, 0), 20, mask_mod="transfusion", page=64, lists="b",
        splits=2, blocks=(64, 64),
    )  # fmt: skip
    yield cached(
        "own_prefix", "a chunk with lists of each head, and whole blocks", (44, 100, 64), 40, mask_mod="own_prefix",
        page=16, blocks=(16, 16), dtype="fp16",
    )  # fmt: skip
    yield cached(
        "blocks_scored", "a mask, scores and sinks, over pages of one", (60, 21), 3, mask_mod="causal_document",
        score_mod="learned_alibi", sinks="normal", page=1, blocks=(64, 64), lists="",
    )  # fmt: skip
    yield cached(
        "blocks_loose", "lists in any order, and no mask in a block", (100, 37), 2, mask_mod="noop", page=16,
        blocks=(32, 32), loose_lists=True, nightly=True,
    )  # fmt: skip


def _long_scores() -> Iterator[Case]:
    for head_dim in (64, 128):
        yield cached(
            f"long_relative_logits_d{head_dim}", "32k keys, of which the last 64 have logits", (32_768, 900),
            heads_q=8, head_dim=head_dim, score_mod="relative_logits", page=16, size="gpu",
        )  # fmt: skip
        yield cached(
            f"long_tree_64_d{head_dim}", "a tree over 32k keys", (32_768, 900, 64), 64, heads_q=8, head_dim=head_dim,
            tree="bool", page=64, size="gpu",
        )  # fmt: skip
    yield cached(
        "long_alibi", "distances of 64k", (65_536, 100), 4, heads_q=8, alibi="heads", page=16, causal=True, size="gpu"
    )
    yield cached(
        "long_image_prefix", "images of thousands of tokens, in a chunk", (4096, 3000, 90), (1024, 1, 90), heads_q=8,
        mask_mod="image_prefix", page=16, lists="b", behind=9, size="gpu",
    )  # fmt: skip


# ---------------------------------------------------------------- 8-bit numbers


def stored_caches() -> Iterator[Case]:
    """Caches of 8-bit numbers: each granularity of their scales, what goes with them, long ones."""
    yield from _scales()
    yield from _stored_with_others()
    yield from _long_stored()


def _scales() -> Iterator[Case]:
    token: Scales = "token"
    kinds: tuple[tuple[Stored, Scales, Scales, int | None, DType, bool], ...] = (
        ("e4m3", "head", "head", 16, "bf16", False),
        ("e4m3", "number", "number", None, "fp16", True),
        ("e4m3", "batch", "batch", 64, "bf16", True),
        ("e4m3", token, token, 16, "fp16", False),
        ("e4m3", token, "head", 1, "bf16", False),
        ("int8", "number", "number", 16, "bf16", True),
        ("int8", "batch", "batch", None, "fp16", False),
        ("int8", token, token, None, "bf16", False),
        ("int8", "head", token, 64, "bf16", False),
        ("int8", token, token, 1, "fp16", True),
    )
    for stored, of_k, of_v, page, dtype, nightly in kinds:
        where = "dense" if page is None else f"page_{page}"
        scales = of_k if of_k == of_v else f"{of_k}_{of_v}"
        yield cached(
            f"{stored}_{scales}_{where}", "scales of keys and of values, none of them alike", EDGES, stored=stored,
            scales=(of_k, of_v), page=page, dtype=dtype, nightly=nightly,
        )  # fmt: skip


def _stored_with_others() -> Iterator[Case]:
    yield cached(
        "e4m3_few", "a few queries, over parts", (200, 3, 40), 4, stored="e4m3", scales=("batch", "head"), splits=3,
        causal=True, page=16, head_dim=128, heads_q=8,
    )  # fmt: skip
    yield cached(
        "int8_mixed", "chunks and single tokens", BEFORE, MIXED, stored="int8", scales=("token", "token"), page=16,
        causal=True, behind=4, order="hnd",
    )  # fmt: skip
    yield cached(
        "e4m3_freed", "scales before a window are never read", (200, 0, 7, 130), stored="e4m3",
        scales=("token", "token"), page=5, window=(50, 0), splits=3, freed=True,
    )  # fmt: skip
    yield cached(
        "e4m3_rows_joint", "K and V of a token in one row", EDGES, stored="e4m3", scales=("number", "number"), page=16,
        joint="rows", order="hnd", nightly=True,
    )  # fmt: skip
    yield cached(
        "int8_unaligned", "rows that start anywhere", EDGES, stored="int8", scales=("head", "token"), page=16, offset=2,
        row_pad=6, slack=1, nightly=True,
    )  # fmt: skip
    yield cached(
        "e4m3_tree", "a tree, and scores of positions, over 8-bit numbers", DRAFTED, 16, stored="e4m3",
        scales=("token", "head"), tree="bool", score_mod="relative_logits", page=16,
    )  # fmt: skip
    yield cached(
        "int8_sinks", "a sink and a cap do not have a key's scale", (50, 0, 17), 2, stored="int8",
        scales=("head", "head"), sinks="normal", softcap=3.0, alibi="heads", page=16, causal=True,
    )  # fmt: skip
    yield cached(
        "int8_image_prefix", "a block mask", (40, 90, 7), (30, 40, 7), stored="int8", scales=("batch", "batch"),
        mask_mod="image_prefix", page=64, blocks=(64, 64), lists="b", nightly=True,
    )  # fmt: skip
    yield cached(
        "int8_wide", "a group of eight on one head of keys, wide heads", (35, 16), stored="int8",
        scales=("token", "token"), heads_q=8, heads_kv=1, head_dim=256, page=64, nightly=True,
    )  # fmt: skip
    yield cached(
        "e4m3_d192_v128", "V has a width of its own", (35, 0, 40), 2, stored="e4m3", scales=("head", "token"),
        head_dim=192, head_dim_v=128, page=16, causal=True, nightly=True,
    )  # fmt: skip


def _long_stored() -> Iterator[Case]:
    for head_dim in (64, 128, 256):
        for stored, granularity in (("e4m3", "head"), ("int8", "token")):
            yield cached(
                f"long_{stored}_d{head_dim}", "64k keys of one sequence, and fewer", (65_536, 900), heads_q=8,
                head_dim=head_dim, stored=stored, scales=(granularity, granularity), page=16, size="gpu",
            )  # fmt: skip
    yield cached(
        "long_e4m3_chunk", "a chunk of a prompt of 16k", (16_384, 4000, 1), (512, 1, 1), heads_q=8, heads_kv=1,
        head_dim=128, stored="e4m3", scales=("batch", "batch"), page=64, causal=True, behind=30, size="gpu",
    )  # fmt: skip
    yield cached(
        "long_e4m3_tree_64", "a tree over 8k keys", (8192, 900), 64, heads_q=8, head_dim=128, stored="e4m3",
        scales=("token", "token"), tree="bool", page=64, size="gpu",
    )  # fmt: skip
