"""The cases of masks and sinks; `parity.cases` has them all."""

from __future__ import annotations

from collections.abc import Iterator

from multiattn.mask import Window
from parity.case import Case, DType, Memory


def windows() -> Iterator[Case]:
    """Bands of diagonals: every kind of window."""
    squares: tuple[tuple[str, Window, bool, str], ...] = (
        ("0_0", (0, 0), False, "each query sees its own key, and no other"),
        ("0_causal", (0, None), True, "the same by causal, with no left bound of its own on the right"),
        ("1_0", (1, 0), False, "two keys: blocks with one visible corner"),
        ("7_3", (7, 3), False, "odd, both sides, narrower than any tile: no block is full"),
        ("64_0", (64, 0), False, "the left edge at the end of a block of keys"),
        ("63_64", (63, 64), False, "one key to either side of whole blocks"),
        ("130_causal", (130, None), True, "full blocks between two masked ones"),
        ("left_only", (40, None), False, "no bound on the right: the last keys are seen by all"),
        ("right_only", (None, 40), False, "no bound on the left"),
        ("wide", (1000, 1000), False, "wider than the sequence: hides nothing"),
        ("wide_causal", (1000, 0), False, "wider than the sequence on the left: causal"),
    )
    for index, (name, window, causal, why) in enumerate(squares):
        dtype: DType = "fp16" if index % 3 == 1 else "bf16"
        yield Case(name=f"window_{name}", why=why, seq_q=257, seq_kv=257, window=window, causal=causal, dtype=dtype)
    lengths: tuple[tuple[int, int, Window, str], ...] = (
        (113, 203, (30, 0), "Sq < Skv: the first keys are seen by nobody, their gradients are zero"),
        (203, 113, (30, 2), "Sq > Skv: the first queries see nothing, then a few a part of the window"),
        (300, 3, (1, 1), "whole tiles of rows that see nothing"),
        (1, 300, (50, 0), "one query in the middle of the keys that it may see: tiles begin late"),
        (1, 300, (50, 7), "the same with keys after its own, of which there are none"),
        (129, 257, (0, 128), "only keys after its own, one past a block"),
    )
    for seq_q, seq_kv, window, why in lengths:
        left, right = window
        yield Case(name=f"window_{left}_{right}_{seq_q}x{seq_kv}", why=why, seq_q=seq_q, seq_kv=seq_kv, window=window)
    for head_dim, dtype_of, heads_kv, window in (
        (40, "fp16", 2, (20, 5)),
        (96, "bf16", 1, (100, 0)),
        (128, "bf16", 1, (100, 0)),
        (128, "fp16", 2, (33, 33)),
        (192, "bf16", 2, (70, 0)),
        (256, "bf16", 1, (33, 33)),
        (512, "bf16", 2, (70, 10)),
    ):
        yield Case(
            name=f"window_d{head_dim}_{dtype_of}",
            why="tiles of every head_dim, heads that share keys",
            heads_q=4 if heads_kv == 2 else 2,
            heads_kv=heads_kv,
            seq_q=150,
            seq_kv=170,
            head_dim=head_dim,
            dtype=dtype_of,  # type: ignore[arg-type]  # of the tuples above
            window=window,
            nightly=head_dim in (96, 192),
        )
    yield Case(name="window_scale_negative", why="the sign swaps max and min", scale=-0.3, window=(50, 20))
    yield Case(
        name="window_large", why="a row's maximum may be in any block of its window", values="large", window=(40, 0)
    )
    yield Case(name="window_ascending", why="the maximum moves in every block", values="ascending", window=(90, 5))
    yield Case(
        name="window_descending", why="the first key of each window is its largest", values="descending", window=(90, 5)
    )
    for name, window, sizes in (
        ("1023_0", (1023, 0), (4096, 4096)),
        ("511_256", (511, 256), (2100, 3333)),
        ("100_0_late", (100, 0), (777, 5001)),
        ("100_50_empty", (100, 50), (5001, 777)),
    ):
        for head_dim in (64, 128):
            yield Case(
                name=f"long_window_{name}_d{head_dim}",
                why="persistent blocks, rings and turns over tiles that begin and end anywhere",
                heads_q=4,
                seq_q=sizes[0],
                seq_kv=sizes[1],
                head_dim=head_dim,
                window=window,
                size="gpu",
            )


def sinks() -> Iterator[Case]:
    """Heads with a sink."""
    yield Case(name="sinks_full", why="one more column for each head", heads_q=4, sinks="normal")
    yield Case(
        name="sinks_causal_d128", why="the same with a mask", head_dim=128, causal=True, sinks="normal", dtype="fp16"
    )
    yield Case(name="sinks_large", why="above the scores: most of the weight has no value", sinks="large")
    yield Case(
        name="sinks_some",
        why="-inf is no sink: that head is as without",
        sinks="some",
        causal=True,
        seq_q=203,
        seq_kv=113,
    )
    yield Case(
        name="sinks_empty_rows",
        why="a row that sees no key: out = 0, lse = sink",
        seq_q=203,
        seq_kv=113,
        causal=True,
        sinks="normal",
    )
    yield Case(name="sinks_empty_keys", why="no keys at all: lse = sink everywhere", seq_kv=0, sinks="normal")
    yield Case(
        name="sinks_gpt_oss",
        why="what a layer of gpt-oss asks for: window, sinks, heads that share keys, D=64, transposed views",
        layout=Memory(order="bshd"),
        batch=2,
        heads_q=4,
        heads_kv=1,
        seq_q=150,
        seq_kv=150,
        window=(127, 0),
        sinks="normal",
    )
    yield Case(
        name="sinks_large_scores", why="scores of +-10^4: the sink weighs nothing", values="large", sinks="normal"
    )
    yield Case(name="sinks_d256", why="the widest tiles", head_dim=256, seq_q=70, sinks="normal", window=(40, 40))
    yield Case(name="sinks_negative_scale", why="a sink is not scaled", scale=-0.2, sinks="normal", head_dim=40)
    for head_dim in (64, 128):
        yield Case(
            name=f"long_sinks_window_d{head_dim}",
            why="sinks and windows at length",
            heads_q=4,
            heads_kv=1,
            seq_q=2048,
            seq_kv=2048,
            head_dim=head_dim,
            window=(300, 0),
            sinks="normal",
            size="gpu",
        )
