"""Kinds of cases: all that a case shows of a kernel, and the cases that a CPU runs at night only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from parity.case import PLANTED, CacheCase, Case

OF_HEADS = (
    *("alibi", "learned_alibi", "head_temperature", "full_bias", "shared_bias", "composite", "periodic"),
    "relative_logits",
)
"""Callables that tell the query heads of a group apart; the first has no captured tensor, which some kernels refuse."""


SLOW = (
    *("blocks_per_head", "blocks_alibi", "score_mod_composite", "score_mod_periodic", "score_mod_relative_bias"),
    *("bias_gqa_d256", "alibi_gqa_d128", "window_d512_bf16", "window_d128_fp16", "window_64_0", "window_130_causal"),
    *("varlen_d192_v128", "varlen_of_one_row", "varlen_fused", "d8_v256_full", "d192_v128_bias", "bias_k"),
)
"""Cases that take longest, each with others that show what it shows."""


def is_slow(case: Case) -> bool:
    """True for the sweep over head_dims but for those that tiles are made for, too: most interpreters take seconds."""
    in_sweep = re.fullmatch(r"d\d+_(fp16|bf16)_(full|causal)", case.name) is not None
    return case.name in SLOW or (in_sweep and case.head_dim not in (8, 40, 64, 128))


def elements_of(case: Case) -> int:
    """The cost of interpreting a case, about."""
    batch, queries, keys = case.lengths
    return batch * case.heads_q * queries * keys * max(case.head_dim, case.width_v)


def kinds_of(case: Case) -> frozenset[str]:
    """All that a case shows of a kernel: each of its properties."""
    return frozenset({*code_kinds_of(case), *_properties(case)})


def code_kinds_of(case: Case) -> Iterator[str]:
    """The properties that a kernel has other code for, about."""
    yield _mask(case)
    if case.sinks != "none":
        yield "sinks"
    if case.bias is not None or case.alibi != "none" or case.softcap is not None or case.score_mod is not None:
        yield "scores"
        if case.heads_q > case.heads_kv and _knows_heads(case):
            yield "scores of shared heads"
    if case.packed is not None:
        yield "packed"
    if case.width_v != case.head_dim:
        yield "v wider than q" if case.width_v > case.head_dim else "v narrower than q"
    if case.head_dim & (case.head_dim - 1):
        yield "padded head_dim"
    if case.layout.offset % 8 or case.layout.row_pad % 8:
        yield "unaligned"
    if case.values in ("ascending", "descending"):
        yield f"values: {case.values}"
    elif case.values in PLANTED:
        yield "values of no number" if case.values.endswith("_v") else "scores of no number"
    if case.cache is not None:
        page, freed = case.cache.page, ", freed" if case.cache.freed else ""
        keys = "dense" if page is None else "by rows" if page % 8 else "by boxes" if page < 64 else "by tiles"
        yield f"cache {keys}{freed}"
        yield f"cache with packed queries{freed}" if case.cache.queries is not None else f"cache{freed}"
        if case.cache.tree != "none":
            yield "a tree of drafted tokens"
        if case.cache.stored is not None:
            yield f"stored {case.cache.stored}"
            yield from (f"scales of a {it}" for it in {*case.cache.scales} if it == "token")


def _knows_heads(case: Case) -> bool:
    return case.alibi != "none" or "h" in (case.bias or "") or case.score_mod in OF_HEADS


def _mask(case: Case) -> str:
    if case.mask_mod is not None:
        return "blocks"
    if case.window is not None:
        return "window"
    return "causal" if case.causal else "full"


def _properties(case: Case) -> Iterator[str]:
    whole = 1 << (case.head_dim - 1).bit_length()  # elements of a row of a tile
    yield f"D={whole}" if whole == case.head_dim else f"D<{whole}"
    yield case.dtype
    yield f"group of {case.heads_q // case.heads_kv}"
    yield "Sq < Skv" if case.seq_q < case.seq_kv else "Sq > Skv" if case.seq_q > case.seq_kv else "Sq = Skv"
    if case.seq_q <= 1 or case.seq_kv <= 1:
        yield "hardly any rows"
    yield f"layout {case.layout.order}, {case.layout.broadcast}"
    if case.layout.offset or case.layout.row_pad or case.layout.v_pad is not None or case.layout.stray_strides:
        yield f"memory {case.layout.offset % 8 != 0}, {case.layout.row_pad % 8 != 0}, {case.layout.v_pad}"
    if case.scale is not None:
        yield f"scale {'below' if case.scale < 0 else 'above' if case.scale else 'of'} zero"
    for name in ("values", "alibi", "bias", "sinks"):
        yield f"{name}: {getattr(case, name)}"
    for name in ("softcap", "wide_bias", "bias_hides", "score_mod", "deterministic", "has_dlse"):
        if getattr(case, name):
            yield name
    if case.packed is not None:
        yield "rows behind the last" if case.seq_q > sum(it[0] for it in case.packed) else "no row behind"
    if any(0 in pair for pair in case.pairs):
        yield "an empty sequence"
    if case.cache is not None:
        yield from _properties_of_cache(case.cache)


def _properties_of_cache(cache: CacheCase) -> Iterator[str]:
    yield f"cache {cache.order}, {cache.joint}"
    if cache.stored is not None:
        yield f"scales {', '.join(cache.scales)}"
    if cache.splits is not None:
        yield "a number of parts is asked for" if cache.splits > 1 else "one part is asked for"
    for name in ("offset", "row_pad", "shared", "slack", "room"):
        if getattr(cache, name):
            yield f"cache {name}"
