"""The configs that Hopper's own kernels take, those with wgmma; every rule with its evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from multiattn.cuda.backward_wgmma import WgmmaBackwardConfig
from multiattn.cuda.backward_wgmma_stored import StoredQueriesConfig, WgmmaStoredConfig
from multiattn.cuda.backward_wgmma_two_pass import TwoPassQueriesConfig, WgmmaTwoPassConfig
from multiattn.cuda.decode_mma import LONE_MAX
from multiattn.cuda.decode_wgmma import SplitWgmmaConfig
from multiattn.cuda.forward_wgmma import WgmmaConfig
from multiattn.plan.arch import ARCHS
from multiattn.plan.config import COMPILED, C, Rule
from multiattn.plan.schedule import most_multiprocessors
from multiattn.plan.tuned import tuned_rules

_EMULATED = Rule(
    arches=("cpu",),
    config=WgmmaConfig(tile_m=128, tile_n=32),
    why="emulated: two warpgroups, four stages and small tiles of keys; split_q builds and runs faster",
    only_named=True,
)
_EMULATED_APART = replace(
    _EMULATED,
    config=replace(_EMULATED.config, stages=3, v_stages=2),
    why="emulated: buffers of K and of V differ in size",
    head_dim_min=129,
    head_dim_v_max=128,
)

_192X64 = WgmmaConfig(tile_m=192, tile_n=64, stages=8, q_slots=2, pingpong=True)
_128X64 = WgmmaConfig(tile_m=128, tile_n=64, stages=5, q_slots=1, pingpong=True, tma_store=False)


def _rule(head_dims: tuple[int, int], config: C, why: str, **where: Any) -> Rule[C]:
    least, most = head_dims
    return Rule(arches=("sm90",), head_dim_min=least, head_dim_max=most, config=config, why=why, **where)


_scored = partial(_rule, scored=True)
_bias = partial(_rule, scored=True, reads_keys=True)
_SPILLS = COMPILED + "a bias has {} hot spills, with the tile for other expressions {}"
_PLAIN = COMPILED + "the tile of plain scores, with exact maxima; ALiBi and softcap have {} hot spills"
SCORED: tuple[Rule[WgmmaConfig], ...] = (
    _bias((1, 64), replace(_192X64, stages=16, q_slots=3), _SPILLS.format("no", "up to 190")),
    _bias((65, 96), _192X64, _SPILLS.format("no", "up to 108")),
    _bias((97, 128), replace(_192X64, tile_n=48, stages=10), _SPILLS.format("no", "up to 50")),
    _bias((129, 160), replace(_128X64, q_slots=2, tma_store=True), _SPILLS.format("no", "up to 56")),
    _scored((1, 64), replace(_192X64, tile_n=128, stages=9, q_slots=3), _PLAIN.format("no")),
    _scored((65, 96), replace(_192X64, tile_n=96, stages=5, q_in_registers=True), _PLAIN.format("no")),
    _scored((97, 128), replace(_192X64, q_in_registers=True), _PLAIN.format("no")),
    _scored((129, 160), replace(_192X64, stages=6, q_slots=1), _PLAIN.format("up to 2")),
    _scored((161, 192), replace(_128X64, q_slots=2, tma_store=True), _PLAIN.format("no")),
    _scored((193, 256), _128X64, _PLAIN.format("up to 2")),
)
"""An expression wants registers, of which three warpgroups have few, and maxima that are exact."""

_128X128 = WgmmaConfig(tile_m=128, tile_n=128, stages=5, q_slots=2, pingpong=True)
_64X64 = WgmmaConfig(tile_m=64, tile_n=64, stages=3, teams=3)
_LISTS = "H200 2026-11-30, 16 heads in bf16, "


def _listed(
    multiple: int, head_dims: tuple[int, int], config: WgmmaConfig, why: str, *, lazy_max: bool = True
) -> tuple[Rule[WgmmaConfig], ...]:
    """The rules of block masks whose blocks have such a multiple of queries."""
    plain = replace(config, lazy_max=lazy_max)
    return tuple(
        _rule(head_dims, its, why, block_multiple=multiple, scored=scored)
        for its, scored in ((config, True), (plain, False))
    )


_RANDOM = _LISTS + "N=40960, blocks left out at random, nine tenths / half: "
LISTED: tuple[Rule[WgmmaConfig], ...] = (
    *_listed(
        128,
        (1, 64),
        replace(_128X128, stages=11, q_slots=3),
        _LISTS + "N=32768 causal, 16 documents: 414 TFLOPS; 128x64 in two blocks an SM, with 16 hot spills, 354 to 364",
    ),
    *_listed(
        128,
        (65, 128),
        _128X128,
        _RANDOM
        + "685 / 671 TFLOPS; one buffer of Q, six of K and V 631 / 671; 64x64 in teams 555 / 566; Q in registers "
        "changes nothing; without turns, in another run, 532 for 645. Gluon has 739 for 659, perhaps as K waits here "
        "until its maxima are checked",
    ),
    *_listed(128, (129, 256), _128X64, COMPILED + "2 hot spills"),
    *_listed(64, (1, 64), replace(_64X64, stages=7, q_slots=2), COMPILED + "no hot spills"),
    *_listed(
        64,
        (65, 128),
        _64X64,
        _RANDOM + "557 / 527 TFLOPS; lazy maxima, which keep K, 515 / 532; tiles of 32 keys, in another run, 471 / 451 "
        "for 553 / 571",
        lazy_max=False,
    ),
    *_listed(64, (129, 256), replace(_64X64, tile_n=32, stages=5, teams=2), COMPILED + "no hot spills"),
    *(
        replace(
            _EMULATED,
            config=replace(_EMULATED.config, tile_m=tile_m, teams=teams),
            block_multiple=tile_m,
            head_dim_max=head_dim_max,
        )
        for tile_m, teams, head_dim_max in ((128, 1, 256), (64, 3, 128), (64, 2, 256))
    ),
)
"""Tiles that lie in one block, all of whose rows walk over the same list."""

WGMMA_RULES: tuple[Rule[WgmmaConfig], ...] = (
    *LISTED,
    *SCORED,
    *tuned_rules("cuda", "wgmma", WgmmaConfig),
    _EMULATED_APART,
    _EMULATED,
)
"""First match wins."""

_PLAIN_BACKWARD = WgmmaBackwardConfig(tile_m=64, tile_n=128, stream_k=most_multiprocessors(ARCHS["sm90"]))
_EARLY = replace(_PLAIN_BACKWARD, k_in_registers=True, early_scores=True, k_stages=2)
_BY_TMA = replace(_PLAIN_BACKWARD, dq_by_tma=True)
_HALVES = replace(_BY_TMA, half_dq=True, dout_stages=3)
_H100 = "H100 2026-11-26, N=4096, H*D=2048 in bf16, full / causal: "


def _emulated(head_dim_max: int, config: WgmmaBackwardConfig) -> Rule[WgmmaBackwardConfig]:
    config = replace(config, stream_k=0 if config.ordered else _EMULATED_SMS)
    return Rule(arches=("cpu",), head_dim_max=head_dim_max, config=config, why="emulated: as on sm90", only_named=True)


_EMULATED_SMS = 3  # so few that small problems are divided, too
_LONG = (
    "583 / 507 TFLOPS; two buffers of K and of Q 549 / 468. H200 2026-11-29, with dQ handed over late, two and three "
    "buffers of dO: N=4096 full 611 and 631, N=16384 causal 618 and 636; in another run 604 and 599, 620 and 622"
)

_EARLY_BANDED = replace(_EARLY, q_stages=4, dout_stages=3)
_H200_ONE = "H200 2026-11-29, N=16384, H*D=2048 in bf16, causal, softcap / ALiBi / bias: "
SCORED_BACKWARD: tuple[Rule[WgmmaBackwardConfig], ...] = (
    _scored(
        (1, 64),
        _EARLY,
        _H200_ONE + "456 / 510 / 297 TFLOPS; the buffers of plain scores 444 / 471 / 277; two passes 234 / 277 / 139",
        banded=True,
    ),
    _scored(
        (1, 64),
        replace(_EARLY, k_in_registers=False),
        "H200 2026-11-29, N=8192, full, softcap / ALiBi: 456 / 521 TFLOPS; K kept 455 / 507, two passes 236 / 277",
    ),
    _scored(
        (65, 96),
        _BY_TMA,
        COMPILED + "as plain scores have it; no hot spills but with a bias, 44: that goes to two passes",
        reads_keys=False,
    ),
    _scored(
        (97, 128),
        replace(_HALVES, dq_by_tma=False),
        _H200_ONE
        + "562 / 628 / - TFLOPS, one word of softcap spilled in a step; dQ by TMA, two buffers of dO 536 / 589; two "
        "passes 337 / 380. A bias has 318, with 124 hot spills, and goes to two passes, 228, which spill none",
        reads_keys=False,
    ),
)
"""One pass makes five products and an expression once, two passes seven and twice."""

WGMMA_BACKWARD_RULES: tuple[Rule[WgmmaBackwardConfig], ...] = (
    _rule(
        (1, 64),
        _EARLY_BANDED,
        _H100 + "- / 480 TFLOPS; at N=16384 540, where with fewer buffers of Q and dO 530",
        banded=True,
        scored=False,
    ),
    _rule(
        (1, 64),
        _EARLY,
        _H100 + "549 / 479 TFLOPS; scores not early, K and V in registers 508 / 470; dQ by TMA 500; more buffers "
        "535 / 480",
        scored=False,
    ),
    _rule(
        (65, 96),
        _BY_TMA,
        _H100 + "at D=96, N=2048 525 / 407 TFLOPS; dQ from registers 508 / 405, in halves 485 / 397",
        scored=False,
    ),
    _rule((97, 128), _HALVES, _H100 + _LONG, seq_min=1025, scored=False),
    _rule((97, 120), _HALVES, _H100 + _LONG, seq_min=513, scored=False),
    _rule(
        (97, 120),
        _HALVES,
        "H200 2026-11-29, at D=128, N=512, H*D=2048 in bf16, full: 382 TFLOPS, two passes 364",
        banded=False,
        seq_min=512,
        scored=False,
    ),
    _rule(
        (121, 128),
        _HALVES,
        "H200 2026-11-29, N=1024, H*D=2048 in bf16, full: 502 TFLOPS, with dS stored 488",
        banded=False,
        seq_min=513,
        scored=False,
    ),
    _rule(
        (97, 128),
        _HALVES,
        "H200 2026-11-29: others are faster where the kernels around this one weigh most: N=512 full 363 TFLOPS, with "
        "dS stored 384; causal 237, with dS stored 276, in two passes 246",
        only_named=True,
        scored=False,
    ),
    *SCORED_BACKWARD,
    _emulated(64, _EARLY),
    _emulated(96, _BY_TMA),
    _emulated(128, _HALVES),
)
"""First match wins."""

_ordered = partial(replace, ordered=True, stream_k=0, dq_by_tma=True)
_H200_ORDERED = "H200 2026-11-29, H*D=2048 in bf16, in order / in any order / two passes, the last of an earlier run: "
_H200_FEW = "H200 2026-11-29, few queries, in order / in any order / two passes: "
_in_order = partial(_rule, reads_keys=False)
_MANY: dict[str, Any] = {"queries_min": 26_000, "keys_min": 26_000}
_BANDED: dict[str, Any] = {**_MANY, "banded": True, "queries_min": 50_000}
"""As tiles of a head begin one after another, SMs wait where few heads run side by side, under a mask longer. And
nothing divides tiles of keys: there are to be 1.5 for each SM."""

WGMMA_ORDERED_RULES: tuple[Rule[WgmmaBackwardConfig], ...] = (
    _rule(
        (1, 64),
        _ordered(_EARLY_BANDED),
        _H200_ORDERED + "causal N=16384 483 / 553 / 320 TFLOPS, N=4096 444 / 496 / 305, N=1024 330 / 330 / 236",
        **_BANDED,
    ),
    _rule(
        (1, 64),
        _ordered(_EARLY),
        _H200_ORDERED + "full N=16384 572 / 601 / 310 TFLOPS, N=4096 544 / 574 / 307, N=1024 461 / 468 / 278",
        banded=False,
        **_MANY,
    ),
    _in_order(
        (65, 96),
        _ordered(_BY_TMA),
        _H200_ORDERED + "D=96 causal N=16384 499 / 540 / 390 TFLOPS, N=4096 451 / 482 / 360, N=1024 296 / 317 / 272",
        **_BANDED,
    ),
    _in_order(
        (65, 96),
        _ordered(_BY_TMA),
        _H200_ORDERED + "D=96 full N=16384 522 / 557 / 387 TFLOPS, N=4096 507 / 524 / 382, N=1024 414 / 424 / 340",
        banded=False,
        **_MANY,
    ),
    _in_order(
        (97, 128),
        _ordered(_HALVES),
        _H200_ORDERED + "causal N=16384 537 / 644 / 448 TFLOPS, N=4096 490 / 574 / 413, N=1024 345 / 364 / 329",
        seq_min=1025,
        **_BANDED,
    ),
    _in_order(
        (97, 128),
        _ordered(_HALVES),
        _H200_ORDERED + "full N=16384 583 / 661 / 445 TFLOPS, N=4096 566 / 643 / 443, N=1024 469 / 495 / 400",
        banded=False,
        seq_min=513,
        **_MANY,
    ),
    _in_order(
        (97, 128),
        _ordered(_HALVES),
        _H200_FEW + "2 heads, N=4096 full 186 / 404 / 313 TFLOPS, causal 144 / 263 / 163",
        only_named=True,
    ),
    _emulated(64, _ordered(_EARLY)),
    _emulated(96, _ordered(_BY_TMA)),
    _emulated(128, _ordered(_HALVES)),
)
"""First match wins. Callers who name it may have all others, too."""

_TWO_PASS = WgmmaTwoPassConfig(tile_m=64, tile_n=64)
_TWO_PASS_KEPT = replace(
    _TWO_PASS,
    q_stages=3,
    dout_stages=3,
    kv_in_registers=True,
    dq=TwoPassQueriesConfig(k_stages=3, v_stages=2),
)
_H200_SCORED = "H200 2026-11-26, N=4096, H*D=2048 in bf16, causal, softcap / ALiBi: "
TWO_PASS_SCORED: tuple[Rule[WgmmaTwoPassConfig], ...] = (
    _bias(
        (161, 192),
        replace(_TWO_PASS_KEPT, kv_in_registers=False),
        COMPILED + "a bias has no hot spills, with K and V in registers up to 17",
    ),
    _bias(
        (225, 256),
        replace(_TWO_PASS, dq=TwoPassQueriesConfig(dp_late=True)),
        COMPILED + "a bias spills one word in a loop, up to 2 instructions, with dP beside weights up to 22",
    ),
    _scored(
        (1, 192),
        _TWO_PASS_KEPT,
        _H200_SCORED + "at D=64 242 / 275 TFLOPS, the kernel for sm80 216 / 218, at D=128 365 / 390, that one "
        "271 / 273",
    ),
    _scored((193, 256), _TWO_PASS, _H200_SCORED + "at D=256 441 / 464 TFLOPS, the kernel for sm80 236 / 231"),
)
"""As plain scores have them, but where an element for each key wants more registers than there are."""

WGMMA_TWO_PASS_RULES: tuple[Rule[WgmmaTwoPassConfig], ...] = (
    _rule(
        (1, 192),
        _TWO_PASS_KEPT,
        _H100 + "at D=192 521 / 488 TFLOPS, D=160 490 / 429, D=128 465 / 458, D=64 322 / 317; K and V from shared "
        "memory 498 / 480 at D=192, 487 / - at D=160; scores ahead 525 / 484 at D=192",
        scored=False,
    ),
    _rule(
        (193, 256),
        _TWO_PASS,
        _H100 + "487 / 462 TFLOPS; scores ahead of gradients 412 / 419, of dq alone 437 / 427",
        scored=False,
    ),
    *TWO_PASS_SCORED,
    Rule(arches=("cpu",), head_dim_max=192, config=_TWO_PASS_KEPT, why="emulated: as on sm90", only_named=True),
    Rule(arches=("cpu",), config=_TWO_PASS, why="emulated: as on sm90", only_named=True),
)
"""First match wins."""

_STORED = WgmmaStoredConfig(tile_m=64, tile_n=64, kept_steps=4, dq=StoredQueriesConfig(cluster=2))
_STORED_KEPT = replace(
    _STORED, q_stages=3, dout_stages=3, kept_steps=0, kv_in_registers=True, dq=StoredQueriesConfig(stages=5, cluster=2)
)
_STORED_NARROW, _STORED_NARROW_256 = replace(_STORED_KEPT, q_stages=4), replace(_STORED, q_stages=3)
"""Where rows of v are narrower than those of q there is room for one more buffer of Q."""
_H200_NARROW = "H200 2026-11-30, 16 heads, bf16, "
_H200_STORED = "H200 2026-11-29, H*D=2048 in bf16, dS stored / two passes: "
_NO_BIAS = COMPILED + "a bias spills up to 16 words in a loop, and goes to two passes"
WGMMA_STORED_RULES: tuple[Rule[WgmmaStoredConfig], ...] = (
    _rule(
        (121, 128),
        _STORED_KEPT,
        _H200_STORED + "D=128 N=512 384 / 341 TFLOPS, causal 276 / 246. Beside tiles that add in order: N=4096 524 for "
        "509, causal 511 for 450, N=16384 540 for 535, causal 544 for 510",
        busy_min=0.9,
        scored=False,
    ),
    _rule(
        (129, 192),
        _STORED_NARROW,
        _H200_NARROW + "192/128, four and three buffers of Q / two passes: causal N=4096 515, 477 / 407 TFLOPS, "
        "N=16384 574, 517 / 452, N=32768 591, 534 / 431, 128 heads N=16384 562, 521 / 454; full N=4096 548, 550 / 446. "
        "Five, and two of dO, 499, 573 causal; K and V from shared memory 457, 490. A bias has no hot spills",
        head_dim_v_max=128,
        busy_min=0.85,
    ),
    _rule(
        (193, 256),
        _STORED_NARROW_256,
        _H200_NARROW + "256/128, three and two buffers of Q / two passes: causal N=4096 567, 483 / 400 TFLOPS, N=16384 "
        "633, 514 / 424, full N=4096 595, 501 / 405; three of dO as well 532, 601, 596. A bias has no hot spills",
        head_dim_v_max=128,
        busy_min=0.85,
    ),
    _rule(
        (129, 192),
        _STORED_KEPT,
        _H200_STORED
        + "N=4096 full, N=16384 causal, N=1024 causal: D=192 669 / 523, 615 / 478, 421 / 357 TFLOPS, D=160 "
        "533 / 502, 521 / 430, 372 / 324; ALiBi, softcap at D=160 N=4096 causal 494 / 409, 485 / 365",
        busy_min=0.9,
        reads_keys=False,
    ),
    _rule(
        (193, 256),
        _STORED,
        _H200_STORED + "D=256 N=16384 604 / 477, causal 583 / 454 TFLOPS, N=4096 578 / 474, N=512 437 / 366, causal "
        "291 / 243; no K and V in registers 594, 575, 574; N=4096 causal with ALiBi 563 / 408, softcap 569 / 391. "
        "2026-11-30, 8 heads, one at a time, N=32768 causal 574 / 458",
        busy_min=0.8,
        reads_keys=False,
    ),
    _rule(
        (1, 192),
        _STORED_KEPT,
        "H200 2026-11-29: one pass is faster, at D=64 N=1024 full 451 for 302 TFLOPS, at D=96 435 for 379",
        only_named=True,
    ),
    _bias((193, 256), replace(_STORED, kept_steps=0), _NO_BIAS, only_named=True),
    *(
        Rule(
            arches=("cpu",),
            config=config,
            why="emulated: as on sm90",
            head_dim_min=least,
            head_dim_max=most,
            head_dim_v_max=128,
            only_named=True,
        )
        for least, most, config in ((129, 192, _STORED_NARROW), (193, 256, _STORED_NARROW_256))
    ),
    Rule(arches=("cpu",), head_dim_max=192, config=_STORED_KEPT, why="emulated: as on sm90", only_named=True),
    Rule(arches=("cpu",), config=_STORED, why="emulated: as on sm90", only_named=True),
)
"""First match wins. `busy_min` is by these ratios, at shapes whose turns keep SMs busy: others were not timed."""

# ---------------------------------------------------------------- few queries

_H200 = "H200 2026-11-26: "
_GUESS = "a guess: as D=128 has it"


class _WgmmaRow(NamedTuple):
    rows_min: int
    rows_max: int | None
    head_dim_max: int
    page_multiple: int
    config: SplitWgmmaConfig
    why: str


def _one(tile_n: int, stages: int, *, gathers: bool = False) -> SplitWgmmaConfig:
    """One warpgroup multiplies."""
    return SplitWgmmaConfig(tile_m=64, tile_n=tile_n, stages=stages, lazy_max=True, gathers=gathers)


def _two(tile_n: int, stages: int, *, lazy_max: bool = True, gathers: bool = False) -> SplitWgmmaConfig:
    """Two warpgroups multiply, in turns."""
    return SplitWgmmaConfig(tile_m=128, tile_n=tile_n, stages=stages, pingpong=True, lazy_max=lazy_max, gathers=gathers)


_FEW = (
    _WgmmaRow(33, 64, 64, 16, _one(128, 12), _H200 + "B=8 64/8 8k, 8 queries, pages of 16: 41.6 us, gathered 42.2"),
    _WgmmaRow(33, 64, 64, 1, _one(128, 12, gathers=True), _GUESS),
    _WgmmaRow(33, 64, 128, 1, _one(128, 6, gathers=True), _H200 + "B=8 64/8 8k, 8 queries: 71.4 us, boxes 73.3"),
    _WgmmaRow(33, 64, 256, 1, _one(64, 6, gathers=True), _H200 + "B=8 64/8 4k, 8 queries: 73.3 us, boxes 75.1"),
    _WgmmaRow(65, 128, 64, 16, _two(128, 12), _H200 + "B=8 64/8 8k, 16 queries, pages of 16: 46.8 us, gathered 48.1"),
    _WgmmaRow(65, 128, 64, 1, _two(128, 12, gathers=True), _GUESS),
    _WgmmaRow(65, 128, 128, 1, _two(128, 6, gathers=True), _H200 + "B=8 64/8 8k, 16 queries: 74.8 us, boxes 76.1"),
)
"""For caches and for plain calls. Still fewer rows read keys as fast with mma.sync."""
_WIDE, _WIDE_GATHERED = (_two(64, 5, lazy_max=False, gathers=gathers) for gathers in (False, True))
_CACHES = (
    _WgmmaRow(65, 128, 256, 1, _WIDE_GATHERED, _H200 + "B=8 64/8 4k, 16 queries: 78 us, boxes 83"),
    _WgmmaRow(65, None, 64, 32, _two(128, 12), _H200 + "512 queries, 64k, 8/1, pages of 32: 147 us, gathered 156"),
    _WgmmaRow(65, None, 64, 1, _two(128, 12, gathers=True), _H200 + "the same with pages of 16: 154 us, boxes 162"),
    _WgmmaRow(65, None, 128, 32, _two(128, 6), _H200 + "512 queries, 64k, 8/1: 195 us, gathered 211"),
    _WgmmaRow(65, None, 128, 1, _two(128, 6, gathers=True), _H200 + "the same with pages of 16: 204 us, boxes 258"),
    _WgmmaRow(65, None, 256, 32, _WIDE, _H200 + "512 queries, 64k, 8/1, pages of 32: 403 us, gathered 408"),
    _WgmmaRow(65, None, 256, 1, _WIDE_GATHERED, _H200 + "the same with pages of 16: 372 us, boxes 513"),
)
"""For caches alone."""


def _decode_rule(row: _WgmmaRow, cached: bool | None) -> Rule[SplitWgmmaConfig]:
    """A rule of a row; not for an element of a bias a key, which wants more registers."""
    return Rule(
        arches=("sm90",),
        config=row.config,
        why=row.why,
        head_dim_max=row.head_dim_max,
        rows_min=row.rows_min,
        rows_max=row.rows_max,
        lone_max=None if cached else LONE_MAX,
        page_multiple=row.page_multiple,
        cached=cached,
        reads_keys=False,
    )


def _emulated_decode() -> Iterator[Rule[SplitWgmmaConfig]]:
    why = "emulated: small tiles of keys; split_keys builds and runs faster"
    small = SplitWgmmaConfig(tile_m=64, tile_n=32, stages=4, keys_min=64)
    for gathers, page_multiple in ((False, 8), (True, 1)):
        for rows_max, config in ((64, small), (None, replace(small, tile_m=128, pingpong=True))):
            its = replace(config, gathers=gathers)
            yield Rule(
                arches=("cpu",), config=its, why=why, rows_max=rows_max, page_multiple=page_multiple, only_named=True
            )


SPLIT_WGMMA_RULES: tuple[Rule[SplitWgmmaConfig], ...] = (
    *(_decode_rule(row, None) for row in _FEW),
    *(_decode_rule(row, True) for row in _CACHES),
    *_emulated_decode(),
)
"""First match wins."""
