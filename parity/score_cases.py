"""The cases of modified scores; `parity.cases` has them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from parity.callables import CALLABLES
from parity.case import Case, DType, Memory


def scores() -> Iterator[Case]:
    """Modified scores: softcap, ALiBi, bias and FlexAttention's callables."""
    yield from _softcaps()
    yield from _slopes()
    yield from _biases()
    yield from _callables()


def _softcaps() -> Iterator[Case]:
    why = "each score through tanh, and its slope in backward"
    for head_dim, dtype, softcap, causal in (
        (64, "bf16", 30.0, True),
        (128, "fp16", 2.0, False),
        (40, "bf16", 0.5, True),
        (256, "bf16", 50.0, True),
    ):
        yield Case(
            name=f"softcap_d{head_dim}_{dtype}",
            why=why,
            head_dim=head_dim,
            dtype=dtype,  # type: ignore[arg-type]  # of the tuples above
            causal=causal,
            softcap=softcap,
        )
    yield Case(name="softcap_large", why="every score is at the cap", values="large", softcap=20.0)
    yield Case(name="softcap_scale_negative", why="the sign is in the expression", scale=-0.4, softcap=1.0, causal=True)
    yield Case(name="softcap_scale_zero", why="every score is 0", scale=0.0, softcap=1.0)
    yield Case(
        name="softcap_gemma2",
        why="what a layer of Gemma 2 asks for: window, softcap, heads that share keys, D=256",
        layout=Memory(order="bshd"),
        heads_q=4,
        heads_kv=2,
        seq_q=130,
        seq_kv=130,
        head_dim=256,
        window=(99, 0),
        softcap=50.0,
    )
    yield Case(
        name="softcap_sinks_empty_rows",
        why="rows that see nothing, by a mask that follows the expression",
        seq_q=203,
        seq_kv=113,
        causal=True,
        softcap=5.0,
        sinks="normal",
    )


def _slopes() -> Iterator[Case]:
    yield Case(name="alibi_causal", why="a slope for each head", heads_q=4, alibi="heads", causal=True)
    yield Case(
        name="alibi_batch",
        why="a slope for each batch entry and head, its gradient in a fixed order",
        batch=2,
        alibi="batch",
        dtype="fp16",
        deterministic=True,
    )
    yield Case(
        name="alibi_more_queries", why="distance is aligned at the bottom right", alibi="heads", seq_q=203, seq_kv=113
    )
    yield Case(
        name="alibi_gqa_d128",
        why="of query heads, which share keys",
        heads_q=4,
        heads_kv=1,
        head_dim=128,
        alibi="heads",
    )
    yield Case(
        name="alibi_gqa_d160",
        why="slopes without gradients, of the heads that a block of keys walks over, and a padded head_dim",
        heads_q=4,
        heads_kv=2,
        seq_q=70,
        seq_kv=90,
        head_dim=160,
        causal=True,
        score_mod="alibi",
    )
    yield Case(name="alibi_window", why="with a window", alibi="heads", window=(70, 10), seq_q=150, seq_kv=150)
    yield Case(name="alibi_softcap", why="the softcap goes first", alibi="heads", softcap=1.5, head_dim=80)


def _biases() -> Iterator[Case]:
    why = "a bias of every kind of broadcast, with strides of its own"
    dtypes: tuple[DType, ...] = ("bf16", "fp16")
    for index, present in enumerate(itertools.product((True, False), repeat=4)):
        dims = "".join(name for name, here in zip("bhqk", present, strict=True) if here)
        yield Case(
            name=f"bias_{dims or 'one'}",
            why=why,
            batch=2,
            seq_q=70,
            seq_kv=90,
            dtype=dtypes[index % 2],
            causal=index % 3 == 0,
            bias=dims,
            wide_bias=index % 4 == 1,
            bias_hides=index % 2 == 0 and "k" in dims,
            deterministic=index % 4 >= 2,
            nightly=dims not in ("bhqk", "hqk", "hk", "bq", "k"),
        )
    yield Case(name="bias_hides_d128", why="-inf hides keys, in any block", head_dim=128, bias="bhqk", bias_hides=True)
    yield Case(
        name="bias_hides_rows", why="-inf for all keys of a row: it is empty", bias="q", bias_hides=True, heads_q=4
    )
    yield Case(
        name="bias_hides_rows_sinks", why="and a sink is all that is left", bias="hq", bias_hides=True, sinks="normal"
    )
    yield Case(
        name="bias_gqa_d256",
        why="of query heads, which share keys",
        heads_q=4,
        heads_kv=1,
        head_dim=256,
        seq_q=70,
        bias="hqk",
    )
    yield Case(
        name="bias_alibi_softcap_window",
        why="all of it at once",
        bias="hqk",
        alibi="heads",
        softcap=2.0,
        window=(60, 3),
        sinks="some",
    )


DAILY = ("identity", "relative_bias", "full_bias", "learned_softcap", "periodic", "constant_scores", "composite")
"""Callables that a CPU runs each day: of each kind that kernels have other code for, one."""


def _callables() -> Iterator[Case]:
    dtypes: tuple[DType, ...] = ("bf16", "fp16")
    for index, found in enumerate(it for it in CALLABLES if it.score_mod is not None and it.mask_mod is None):
        yield Case(
            name=f"score_mod_{found.name}",
            why=found.why,
            batch=2,
            heads_q=4 if index % 3 == 0 else 2,
            seq_q=70,
            seq_kv=70 if index % 2 else 90,
            head_dim=(64, 40, 128)[index % 3],
            dtype=dtypes[index % 2],
            score_mod=found.name,
            nightly=found.name not in DAILY,
        )
    for head_dim in (64, 128):
        yield Case(
            name=f"long_softcap_alibi_d{head_dim}",
            why="expressions at length",
            heads_q=4,
            heads_kv=2,
            seq_q=2048,
            seq_kv=2048,
            head_dim=head_dim,
            causal=True,
            softcap=10.0,
            alibi="heads",
            size="gpu",
        )
        yield Case(
            name=f"long_bias_d{head_dim}",
            why="a bias at length",
            seq_q=1500,
            seq_kv=2100,
            head_dim=head_dim,
            bias="hqk",
            size="gpu",
        )
