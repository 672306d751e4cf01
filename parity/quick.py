"""The cases that a CPU runs every time, and those that it runs at night only: `pytest -m nightly`.

Triton has three backwards there, and they take turns on the cases: each runs its share, and whatever shows it another
kind of case. On a GPU, at night and in the report (``python -m parity``) each of them runs them all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from multiattn.triton import GLUON_VARIANTS
from parity.case import Case
from parity.cases import CASES, CROSS_FED
from parity.results import Contender

TURNS: tuple[str | None, ...] = (None, *GLUON_VARIANTS)
"""Variants of Triton's backward that take turns; None stands for all but Gluon's, which have turns of their own."""


def waits_for_night(case: Case, who: Contender) -> bool:
    """True if a CPU runs the case on this contender at night only."""
    return takes_long(case, who) or (_takes_turns(who) and case.name not in quick_cases(who.variant))


def takes_long(case: Case, who: Contender) -> bool:
    """Cases that have a like by day, and the sweep over head_dims but for those that tiles are made for.

    The sweep takes up to 7 s a case but in cuTile and Gluon.
    """
    in_sweep = re.fullmatch(r"d\d+_(fp16|bf16)_(full|causal)", case.name) is not None
    is_slow = (
        who.backend != "cutile" and who.variant != GLUON_VARIANTS[0] and case.head_dim not in (8, 40, 64, 128, 256)
    )
    return case.nightly or (in_sweep and is_slow)


def _takes_turns(who: Contender) -> bool:
    return (who.backend, who.direction) == ("triton", "backward") and who.variant in TURNS


@functools.cache
def quick_cases(variant: str | None) -> frozenset[str]:
    """Cases that a backward of Triton runs by day: its turns, what all feed, and the smallest of other kinds."""
    who = Contender(backend="triton", variant=variant, direction="backward")
    left = [it for it in CASES if it.size == "any" and not it.no_backward and not takes_long(it, who)]
    turn = TURNS.index(variant)
    chosen: list[Case] = []
    seen: set[str] = set()
    for case in sorted(left, key=lambda it: (_turn(it) != turn, _elements(it))):
        if _turn(case) == turn or case.name in CROSS_FED or not kinds_of(case) <= seen:
            chosen.append(case)
            seen |= kinds_of(case)
    return frozenset(case.name for case in chosen)


def _turn(case: Case) -> int:
    """Bits of the seed that neither `Case.has_dlse` nor `Case.turn` hangs on."""
    return (case.seed >> 1) % len(TURNS)


def _elements(case: Case) -> int:
    """The cost of interpreting a case, about."""
    batch, queries, keys = case.lengths
    return batch * case.heads_q * queries * keys * case.head_dim


def kinds_of(case: Case) -> frozenset[str]:
    """All that a case shows of a backward: each property, and each one with its mask."""
    mask = _mask(case)
    alone = {mask, *_properties(case)}
    return frozenset(alone | {f"{mask}, {it}" for it in alone})


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
    for name in ("softcap", "wide_bias", "bias_hides", "score_mod", "deterministic", "packed", "has_dlse"):
        if getattr(case, name):
            yield name
