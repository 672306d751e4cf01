"""The cases of packed batches; `parity.cases` has them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from parity.case import Case, Memory

Pairs = Sequence[tuple[int, int]]

UNEVEN: Pairs = ((50, 50), (0, 0), (1, 1), (150, 150), (17, 17))
"""Within one tile and beyond, none, one row, and the shortest last."""
APART: Pairs = ((40, 90), (0, 30), (120, 33), (7, 0), (1, 150))
"""Tq != Tkv: more keys, no query, more queries, no key, one query."""


def packed(name: str, why: str, lengths: Pairs, *, behind: tuple[int, int] = (0, 0), **more: Any) -> Case:
    """A case of sequences of these lengths, with so many rows of q and k behind the last."""
    queries, keys = (sum(each) for each in zip(*lengths, strict=True))
    more.setdefault("layout", Memory(order="bshd"))
    return Case(
        name=f"varlen_{name}",
        why=why,
        packed=tuple(lengths),
        seq_q=queries + behind[0],
        seq_kv=keys + behind[1],
        **more,
    )


def packed_batches() -> Iterator[Case]:
    """Packed batches: lengths, what goes with them, what must not be seen, and long ones."""
    yield from _lengths()
    yield from _layouts()
    yield from _with_others()
    yield from _apart()
    yield from _with_blocks()
    yield from _long()


def _lengths() -> Iterator[Case]:
    for head_dim, dtype, causal in ((64, "bf16", False), (64, "fp16", True), (128, "bf16", True), (128, "fp16", False)):
        mask = "causal" if causal else "full"
        yield packed(
            f"uneven_d{head_dim}_{mask}", "lengths that fit no tile", UNEVEN, head_dim=head_dim, dtype=dtype,
            causal=causal, nightly=head_dim == 128 or not causal,
        )  # fmt: skip
        yield packed(
            f"apart_d{head_dim}_{mask}", "a diagonal of each sequence's own", APART, head_dim=head_dim, dtype=dtype,
            causal=causal, heads_q=4, heads_kv=2, nightly=head_dim == 128 or not causal,
        )  # fmt: skip
    yield packed("one", "one sequence is a batch of one", ((130, 130),), causal=True, nightly=True)
    yield packed("whole_tiles", "lengths that are tiles: nothing is ragged", ((128, 128), (256, 256)), nightly=True)
    yield packed("of_one_row", "more sequences than a warp has lanes", ((1, 1),) * 40, causal=True)
    yield packed("thousand_to_one", "lengths that differ by 1000", ((2, 2), (1, 1100), (1, 1)), heads_q=1, heads_kv=1)
    yield packed("no_sequence", "all rows are behind the last", ((0, 0),), behind=(20, 30))
    for head_dim in (40, 96, 256):
        yield packed(
            f"d{head_dim}", "other head_dims", UNEVEN[2:], head_dim=head_dim, causal=True, heads_q=1, heads_kv=1,
            nightly=True,
        )  # fmt: skip


def _layouts() -> Iterator[Case]:
    yield packed("heads_first", "packed [H, T, D], transposed", UNEVEN, layout=Memory(), causal=True, nightly=True)
    yield packed("fused", "one tensor of q, k and v", UNEVEN, layout=Memory(order="packed"), heads_q=4, causal=True)
    yield packed(
        "unaligned", "an address and rows of 2 bytes", UNEVEN, layout=Memory(order="bshd", offset=1, row_pad=1)
    )


def _with_others() -> Iterator[Case]:
    yield packed("window", "each sequence has its own band", APART, window=(30, 4))
    yield packed(
        "window_causal", "and its own diagonal", UNEVEN, window=(25, None), causal=True, head_dim=128, nightly=True
    )
    yield packed("softcap", "scores of own positions", UNEVEN, softcap=3.0, causal=True, nightly=True)
    yield packed("alibi", "slopes by sequence", APART, alibi="batch", causal=True, nightly=True)
    yield packed("bias", "a bias by sequence, with a gradient", APART, bias="bhqk", head_dim=32)
    yield packed("bias_of_keys", "one for all sequences", UNEVEN, bias="hk", nightly=True)
    yield packed(
        "bias_deterministic", "added up in a fixed order", UNEVEN, bias="bhqk", deterministic=True, nightly=True
    )
    yield packed(
        "score_mod", "what depends on sequence, head and positions", APART, score_mod="composite", nightly=True
    )
    yield packed("sinks", "also of rows that see nothing else", APART, behind=(9, 5), sinks="normal", causal=True)
    yield packed(
        "gpt_oss", "sinks and windows", UNEVEN, sinks="normal", window=(31, None), causal=True, heads_q=4, heads_kv=1,
        nightly=True,
    )  # fmt: skip
    yield packed("scale_negative", "the least scores are the highest", UNEVEN, scale=-0.5, causal=True, nightly=True)


def _apart() -> Iterator[Case]:
    """Nothing of a neighbour, nor of what is behind the last, reaches a sequence."""
    lengths = ((33, 40), (70, 81), (5, 9), (129, 130), (20, 20))
    for head_dim, causal in ((64, False), (128, True)):
        yield packed(
            f"nan_neighbours_d{head_dim}", "every second sequence is NaN, and what is behind", lengths, behind=(6, 3),
            values="nan_neighbours", head_dim=head_dim, causal=causal, nightly=head_dim > 64,
        )  # fmt: skip
    yield packed("behind", "rows behind the last get zeros", UNEVEN, behind=(77, 150), causal=True)


def _with_blocks() -> Iterator[Case]:
    """Block masks over the packed axis, whose blocks no sequence begins or ends with."""
    yield packed(
        "blocks_uneven", "blocks of several sequences, and sequences of several blocks", UNEVEN, blocks=(64, 64),
        mask_mod="causal_document", heads_q=4, heads_kv=2,
    )  # fmt: skip
    yield packed(
        "blocks_apart", "full blocks of all, in loose lists: a band cuts them, and no sequence sees another", APART,
        behind=(9, 5), blocks=(128, 128), mask_mod="noop", loose_lists=True, causal=True, head_dim=128, sinks="normal",
    )  # fmt: skip
    yield packed(
        "blocks_nan_neighbours", "blocks by head, some of them whole, beside NaN; scores of positions in a sequence",
        [(it, it) for it in (33, 170, 5, 129, 20)], behind=(6, 6), values="nan_neighbours", blocks=(64, 64),
        mask_mod="causal", lists="h", alibi="batch", heads_kv=1,
    )  # fmt: skip
    yield packed(
        "blocks_window", "a window of each sequence over blocks of several tiles", APART, blocks=(256, 128),
        mask_mod="prefix_lm", window=(60, 20), softcap=3.0, head_dim=40,
    )  # fmt: skip
    yield packed(
        "blocks_checkered", "rows of blocks that see other blocks, of a sequence that begins within one",
        ((90, 90), (200, 200), (0, 20), (20, 0)), behind=(3, 70), blocks=(128, 128), mask_mod="scattered", lists="h",
    )  # fmt: skip


def _long() -> Iterator[Case]:
    mixed = [(2**size, 2**size) for size in range(6, 13)] * 2
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        mask = "causal" if causal else "full"
        yield packed(
            f"long_d{head_dim}_{mask}", "powers of two to 4k, twice", mixed, head_dim=head_dim, causal=causal,
            heads_q=4, heads_kv=2, size="gpu",
        )  # fmt: skip
    yield packed(
        "one_long_d128", "6k and 60 short ones, NaN beside", [(2, 2), (6000, 6000), *[(n, n) for n in range(3, 63)]],
        behind=(100, 100), values="nan_neighbours", head_dim=128, causal=True, heads_q=2, size="gpu",
    )  # fmt: skip
    yield packed(
        "window_long", "a window over long sequences", mixed, window=(1023, None), causal=True, head_dim=128,
        size="gpu",
    )  # fmt: skip
    yield packed("sinks_long", "sinks over long sequences", mixed, sinks="normal", causal=True, size="gpu")
