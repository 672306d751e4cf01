"""The cases of block masks; `parity.cases` has them all."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from parity.case import Case


def block_masks() -> Iterator[Case]:
    """Block masks: each kind of mask, sizes of blocks, and what goes with them."""
    yield from _masks()
    yield from _sizes()
    yield from _with_others()
    yield from _whole()
    yield from _lists()
    yield from _long()


def _masks() -> Iterator[Case]:
    for index, (name, why) in enumerate(
        (
            ("noop", "every block is full, the ragged ones partial"),
            ("causal", "full and partial blocks, and those that nobody sees"),
            ("document", "a captured tensor in the mask, and nothing in the scores"),
            ("causal_document", "the same with 64-bit integers"),
            ("prefix_lm", "lists of each batch entry"),
            ("sliding_window", "no block is full"),
            ("document_window", "an index that is itself loaded"),
            ("natten_2d", "quotients and remainders; rows past its plane see nothing"),
            ("block_diagonal", "Sq > Skv: the last rows see nothing, whole blocks of them"),
        )
    ):
        yield Case(
            name=f"blocks_{name}",
            why=why,
            batch=2,
            heads_q=1,
            heads_kv=1,
            seq_q=200 if name == "block_diagonal" else 150,
            seq_kv=110 if name == "block_diagonal" else 150,
            blocks=(64, 128) if index in (0, 2, 4, 6) else (64, 64),
            dtype="fp16" if index % 2 else "bf16",
            mask_mod=name,
            nightly=name not in ("causal", "causal_document", "prefix_lm", "block_diagonal"),
        )


def _sizes() -> Iterator[Case]:
    for blocks, head_dim in (
        ((64, 64), 64),
        ((32, 32), 128),
        ((128, 64), 128),
        ((64, 128), 256),
        ((256, 256), 40),
        ((192, 96), 96),
        ((128, 128), 256),
    ):
        yield Case(
            name=f"blocks_of_{blocks[0]}x{blocks[1]}_d{head_dim}",
            why="tiles that divide blocks, at every head_dim",
            heads_q=1,
            heads_kv=1,
            seq_q=140,
            seq_kv=260,
            head_dim=head_dim,
            mask_mod="causal_document",
            blocks=blocks,
            nightly=blocks not in ((64, 64), (32, 32), (192, 96)),
        )
    yield Case(
        name="blocks_fewer_queries", why="one block of queries, several of keys", seq_q=40, seq_kv=400, mask_mod="noop"
    )
    yield Case(
        name="blocks_broadcast",
        why="one list for all heads and entries",
        batch=2,
        mask_mod="causal",
        seq_q=203,
        lists="",
    )
    yield Case(
        name="blocks_per_head",
        why="lists by query head, of heads that share keys",
        heads_q=4,
        heads_kv=1,
        seq_q=203,
        mask_mod="causal",
        lists="h",
    )


def _with_others() -> Iterator[Case]:
    square = functools.partial(Case, seq_q=203, seq_kv=203, blocks=(64, 128))
    yield square(name="blocks_softcap", why="scores and mask of one program", mask_mod="document", softcap=3.0)
    yield square(
        name="blocks_bias",
        why="and a bias with a gradient, of pairs that are seen",
        mask_mod="causal_document",
        bias="hqk",
    )
    yield square(
        name="blocks_bias_deterministic",
        why="the same, added up in a fixed order: elements of blocks that are skipped stay zero",
        mask_mod="causal_document",
        bias="qk",
        deterministic=True,
    )
    yield square(name="blocks_alibi", why="and ALiBi", mask_mod="document", alibi="heads", heads_q=4)
    yield square(
        name="blocks_sinks",
        why="and a sink, also of rows that see nothing else",
        mask_mod="natten_2d",
        sinks="normal",
        heads_q=4,
    )
    yield square(name="blocks_window", why="a window cuts what is listed", mask_mod="noop", window=(70, 5))
    yield Case(
        name="blocks_bottom_right",
        why="so does causal, where Sq < Skv",
        mask_mod="document",
        causal=True,
        seq_q=150,
        seq_kv=203,
    )


def _whole() -> Iterator[Case]:
    """Lists by head with full blocks, none, and a last one that the end cuts, of heads that share keys."""
    scattered = functools.partial(Case, heads_q=2, heads_kv=1, seq_q=300, seq_kv=300, mask_mod="scattered", lists="h")
    yield scattered(name="blocks_whole", why="full blocks come first, and sinks of rows with none", sinks="normal")
    yield scattered(
        name="blocks_whole_64_causal",
        why="a diagonal that leaves some of a full block's tiles whole, cuts one, and hides others",
        blocks=(64, 64),
        head_dim=128,
        causal=True,
    )
    yield scattered(
        name="blocks_whole_window",
        why="the same with two bounds, and tiles that are half a block",
        seq_q=200,
        window=(200, 40),
        softcap=3.0,
        nightly=True,
    )


def _lists() -> Iterator[Case]:
    """Blocks of 64 and of 128: Hopper's kernels have other warpgroups, or other stages, for each."""
    for size in (64, 128):
        loose = functools.partial(Case, blocks=(size, size), loose_lists=True)
        yield loose(
            name=f"blocks_of_{size}_by_head",
            why="lists of each head and entry, of heads that share keys; behind the counts is no block",
            batch=2,
            heads_q=4 if size == 64 else 2,
            heads_kv=2 if size == 64 else 1,
            seq_q=138,
            seq_kv=3 * size - 20,
            head_dim=40 if size == 64 else 128,
            mask_mod="own_prefix",
        )
        yield loose(
            name=f"blocks_of_{size}_full_cut",
            why="full blocks that both ends cut, and a band that cuts others; one list for heads that share keys",
            lists="",
            causal=size == 64,
            window=None if size == 64 else (150, 60),
            seq_q=size + 70,
            seq_kv=2 * size + 10,
            heads_q=2,
            heads_kv=1,
            mask_mod="noop",
        )
        yield loose(
            name=f"blocks_of_{size}_unseen_keys",
            why="whole blocks of keys that nobody sees: their gradients are zero; a slope beside the mask",
            batch=2,
            head_dim=72,
            softcap=3.0,
            seq_q=size - 20,
            seq_kv=4 * size - 10,
            heads_q=1,
            heads_kv=1,
            mask_mod="causal",
        )
    for name, why, mask_mod in (
        ("far", "a tile beyond the last query has zeros, whose weight by the lse of others would overflow", "padding"),
        ("full", "and so has a full last block beyond the last key", "noop"),
    ):
        yield Case(
            name=f"blocks_of_128_{name}_below",
            why=why,
            batch=2,
            heads_q=1,
            heads_kv=1,
            seq_q=140,
            seq_kv=260,
            values="ascending",
            mask_mod=mask_mod,
            loose_lists=mask_mod == "noop",
        )
    yield Case(
        name="blocks_of_128_empty_rows",
        why="Sq > Skv: whole blocks of queries that see nothing",
        seq_q=270,
        seq_kv=110,
        heads_q=2,
        heads_kv=1,
        mask_mod="block_diagonal",
        nightly=True,
    )


def _long() -> Iterator[Case]:
    for head_dim in (64, 128):
        yield Case(
            name=f"long_blocks_d{head_dim}",
            why="documents at length: long lists of full blocks",
            heads_q=4,
            heads_kv=2,
            seq_q=2048,
            seq_kv=2048,
            head_dim=head_dim,
            mask_mod="document",
            size="gpu",
        )
