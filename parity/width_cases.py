"""The cases in which v is narrower or wider than q and k; `parity.cases` has them all."""

from __future__ import annotations

from collections.abc import Iterator

from parity.cache_cases import EDGES, cached
from parity.case import Case, DType, Memory
from parity.varlen_cases import UNEVEN, packed

PAIRS = ((192, 128), (128, 64), (64, 128), (40, 72), (72, 40), (256, 128), (8, 256))
"""Widths of q and k, and of v: those that models have, and neighbours that no tile is made for."""
WIDE_PAIRS = ((320, 256), (512, 256), (576, 512))
"""Pairs beyond what most kernels take: absorbed latent attention among them."""


def widths() -> Iterator[Case]:
    """Every pair in each dtype and under each mask; then what goes with them, in packed batches and in caches."""
    why = "v has a width of its own: neither its rows nor its columns pass for those of k"
    for index, (head_dim, head_dim_v) in enumerate(PAIRS):
        for turn, (dtype, causal) in enumerate((("fp16", False), ("bf16", True))):
            yield _case(
                head_dim, head_dim_v, "causal" if causal else "full", why, dtype=dtype, causal=causal,
                heads_q=4 if turn else 2, nightly=turn != index % 2 and index > 0,
            )  # fmt: skip
    for head_dim, head_dim_v in WIDE_PAIRS:
        rows = 45 if head_dim <= 512 else 16  # beyond, some backends take few rows alone
        yield _case(head_dim, head_dim_v, "causal", why, heads_kv=1, seq_q=rows, causal=True)
    yield _case(192, 128, "window_sinks", "a layer of MiMo", heads_q=4, window=(40, 0), sinks="normal", dtype="fp16")
    yield _case(64, 128, "sinks", "a sink has no value of any width", sinks="normal")
    yield _case(192, 128, "bias", "scores know nothing of the width of v", bias="hqk", causal=True, seq_q=60)
    yield _case(40, 72, "softcap_alibi", "the same in padded tiles", softcap=2.0, alibi="heads", seq_q=60, nightly=True)
    yield _case(128, 64, "bshd", "rows of q, k and v differ in memory", layout=Memory(order="bshd"), batch=2, heads_q=4)
    yield _case(72, 40, "odd_rows", "element loads", layout=Memory(row_pad=1), causal=True, seq_q=60)
    yield _case(
        64, 128, "v_transposed", "v alone is transposed", layout=Memory(v_pad=8), batch=2, heads_q=4, nightly=True
    )
    yield _case(64, 128, "inf_v", "inf in columns that k does not have", values="inf_v", seq_q=150, causal=True)
    yield _case(192, 128, "nan_k", "NaN in columns that v does not have", values="nan_k", seq_q=150, causal=True)
    yield _case(192, 128, "empty_keys", "out is as wide as v", seq_kv=0)
    yield _case(512, 256, "window_sinks", "a band of wide heads", window=(40, 10), sinks="normal", seq_q=90)
    yield _case(320, 256, "softcap_alibi", "scores of wide heads", softcap=2.0, alibi="heads", causal=True, seq_q=45)
    yield _case(576, 512, "bias", "the same", bias="hqk", heads_kv=1, seq_q=16, nightly=True)
    yield _case(264, 264, "bshd", "strides of wide heads", layout=Memory(order="bshd"), batch=2, seq_q=45, nightly=True)
    for head_dim, head_dim_v, causal, nightly in (
        (192, 128, True, False),
        (40, 72, False, True),
        (64, 128, True, True),
        (512, 256, True, True),
    ):
        yield packed(
            f"d{head_dim}_v{head_dim_v}", "rows of v are not as long as those of k", UNEVEN, head_dim=head_dim,
            head_dim_v=head_dim_v, causal=causal, heads_q=4, heads_kv=2, nightly=nightly,
        )  # fmt: skip
    yield from _wide_gradients()
    yield from _caches()
    yield from _long()


def _wide_gradients() -> Iterator[Case]:
    """Gradients that are too wide for one warp, with what changes scores or where they lie."""
    sizes = {"seq_q": 60, "seq_kv": 75}
    why = "warps share the rows of a gradient, and the scores otherwise"
    yield _case(264, 512, "window_sinks", why, heads_q=4, heads_kv=2, window=(20, 5), sinks="normal", **sizes)
    yield _case(384, 320, "bias", why, bias="hqk", causal=True, dtype="fp16", **sizes)
    yield _case(512, 384, "softcap_bias", "scores go to partners as they are", softcap=2.0, bias="hqk", **sizes)
    yield _case(328, 296, "odd_rows", why, layout=Memory(row_pad=1), heads_q=4, nightly=True, **sizes)
    yield _case(512, 264, "blocks", why, blocks=(64, 64), mask_mod="causal", nightly=True, **sizes)
    yield packed("d512_v384", why, UNEVEN, head_dim=512, head_dim_v=384, causal=True, heads_q=2, nightly=True)


def _caches() -> Iterator[Case]:
    of_kinds: tuple[tuple[int, int, DType, int | None, int, bool], ...] = (
        (192, 128, "bf16", 16, 1, False),
        (64, 128, "fp16", None, 3, True),
        (40, 72, "bf16", 5, 2, True),
        (320, 256, "bf16", 16, 1, True),
    )
    for head_dim, head_dim_v, dtype, page, queries, nightly in of_kinds:
        yield cached(
            f"d{head_dim}_v{head_dim_v}_{'dense' if page is None else f'page_{page}'}",
            "pages of k and v differ in size", EDGES, queries, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype,
            page=page, causal=True, nightly=nightly,
        )  # fmt: skip
    for page, queries in ((None, 1), (64, 2), (5, 1)):
        yield cached(
            f"latent_{'dense' if page is None else f'page_{page}'}", "v is the first columns of k: absorbed MLA",
            (70, 0, 33), queries, head_dim=576, head_dim_v=512, heads_q=16, heads_kv=1, page=page, joint="latent",
            causal=True, nightly=page == 5,
        )  # fmt: skip
    for head_dim, head_dim_v, page in ((64, 64, 16), (192, 128, None), (320, 256, 5)):
        yield cached(
            f"latent_d{head_dim}_v{head_dim_v}", "v is in k, where kernels may read it from either", (70, 0, 33), 2,
            head_dim=head_dim, head_dim_v=head_dim_v, heads_q=8, heads_kv=2, page=page, joint="latent", causal=True,
            nightly=page == 5,
        )  # fmt: skip


def _long() -> Iterator[Case]:
    for head_dim, head_dim_v in PAIRS:
        yield _case(
            head_dim, head_dim_v, "long", "many tiles in both directions", heads_q=4, heads_kv=2, seq_q=2100,
            seq_kv=3333, causal=head_dim > 40, size="gpu",
        )  # fmt: skip
    for page, queries in ((64, 1), (None, 2), (16, 4)):
        yield cached(
            f"latent_long_{'dense' if page is None else f'page_{page}'}", "absorbed MLA at length", (8192, 1000, 3),
            queries, head_dim=576, head_dim_v=512, heads_q=16, heads_kv=1, page=page, joint="latent", causal=True,
            size="gpu",
        )  # fmt: skip


def _case(head_dim: int, head_dim_v: int, name: str, why: str, **more: object) -> Case:
    return Case(name=f"d{head_dim}_v{head_dim_v}_{name}", why=why, head_dim=head_dim, head_dim_v=head_dim_v, **more)  # type: ignore[arg-type]  # fields of Case
