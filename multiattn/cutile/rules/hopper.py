"""Hopper (sm90): tiles and compiler hints of both directions, each with the best alternative on an H200.

Measured with tileiras 13.4 in bf16, with H*D=2048: forward 16k tokens in all, backward B=4 N=4096 where a rule says
nothing else. docs/experiments.md has the long story.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from multiattn.cutile.rules.shorthand import forward, one_pass, queries, rule, stored, two_passes
from multiattn.plan.config import COMPILED

FULL, BANDED = False, True

_21, _23, _24, _26, _29 = (f"H200 2026-11-{day}, " for day in (21, 23, 24, 26, 29))
_25 = "H100 2026-11-25, lengths from 64 to 8k: "

_64X64 = forward(64, 64, blocks_per_sm=2, lazy_max=True)
"""For short tiles, two to four blocks an SM, but for the order of tiles and blocks."""
_64X128 = forward(64, 128, blocks_per_sm=2, lazy_max=True)
"""For full problems of 128 columns, but for the order of tiles and blocks."""
_128X64 = forward(128, 64, blocks_per_sm=1, warps=8, lazy_max=True)
"""For the widest head_dims, and with two blocks an SM for D=40, 56 and, split, 72; but for the order of tiles and
blocks."""
_BY_4_WARPS = forward(128, 64, blocks_per_sm=2, lazy_max=True, split_head_dim=True)
"""For D=40, 88 and 104, but for the order of tiles: two blocks an SM, each of a warpgroup with the registers of two."""
_128X128 = forward(128, 128, blocks_per_sm=1, warps=8, lazy_max=True)
"""For long banded problems, D=104 and 120, and split for others between powers of two, but for the order of tiles."""
_ONLINE_128X128 = replace(_128X128, lazy_max=False)
_LEAST: dict[str, Any] = {"k_latency": 1, "v_latency": 1}
_NO_LATENCIES: dict[str, Any] = {"k_latency": None, "v_latency": None}
_AHEAD_256 = replace(_128X64, split_head_dim=True, pipeline="ahead", **_LEAST)
"""For short banded problems of D=193 to 256, but for the order of tiles."""
_AHEAD_128X128 = replace(_128X128, split_head_dim=True, pipeline="ahead", **_LEAST)
"""For D=88 and 129 to 192, but for the order of tiles."""


_ONLY_COMPILED = COMPILED + "loads have a warp of their own, which they have not with the rule of [B, H, S, D]"


_USUAL: dict[str, Any] = {"packed": False, "scored": False}
"""Conditions of rules that neither packed batches nor changed scores were timed for."""
_UNALIGNED: dict[str, Any] = {"whole_sectors": False, **_USUAL}
"""`_USUAL`, for rows that are no whole sectors."""
_OTHERS: tuple[dict[str, Any], ...] = ({"packed": True}, {"scored": True})
"""The problems that `_USUAL` leaves out."""


_rule = functools.partial(rule, ("sm90",))

_PACKED = tuple(
    replace(it, packed=True)
    for it in (
        _rule((1, 64), BANDED, replace(_64X64, blocks_per_sm=4, heads_together=8, pipeline="pilot"), dtype="bf16",
              seq_min=2049, why=_25 + "476 TFLOPS; 128x64 447, and 64x64 without a pilot 301"),
        _rule((1, 64), BANDED, replace(_128X64, blocks_per_sm=2, heads_together=8), seq_min=2049,
              why=_25 + "in bf16 447 TFLOPS; 64x64 without a pilot 301"),
        _rule((97, 128), FULL, replace(_128X64, heads_together=4), whole_sectors=True,
              why=_25 + "642 TFLOPS; 128x128 with a pilot 624, and 64x128 a block ahead 365"),
        _rule((97, 128), BANDED, replace(_128X64, heads_together=8), whole_sectors=True, seq_min=2049,
              why=_25 + "547 TFLOPS; 128x128 512"),
        _rule((161, 192), FULL, replace(_128X128, heads_together=4, split_head_dim=True, pipeline="pilot"),
              dtype="bf16", why=_25 + "D=192: 596 TFLOPS; 128x64 in pairs 590"),
        _rule((161, 192), FULL, replace(_ONLINE_128X128, heads_together=4, split_head_dim=True), why=_ONLY_COMPILED),
        _rule((161, 192), BANDED,
              replace(_128X64, heads_together=8, split_head_dim=True, pipeline="pairs", **_NO_LATENCIES),
              why=_25 + "D=192: 543 TFLOPS; 128x128 with a pilot 535, online 529"),
        _rule((193, 256), FULL, replace(_128X64, heads_together=4, split_head_dim=True, pipeline="ahead"),
              dtype="bf16", why=_25 + "D=256: 691 TFLOPS; online 128x128 638"),
        _rule((193, 256), FULL, replace(_ONLINE_128X128, heads_together=4), why=_25 + "D=256 in bf16 638 TFLOPS"),
    )
)  # fmt: skip
"""For packed batches where the rules below lose much. A kernel has more values to keep there, and tileiras gives fewer
of these kernels a warp that does the loads; without one the loop itself issues each and waits for it."""

FORWARD = (
    *_PACKED,
    _rule((33, 48), FULL, replace(_BY_4_WARPS, heads_together=4, **_LEAST), **_UNALIGNED,
          why=_26 + "D=40 N=4k: 328 TFLOPS; other latencies 311 to 319, 8 warps 318, one part 302, by 8 warps 319"),
    _rule((33, 48), BANDED, replace(_128X64, blocks_per_sm=2, heads_together=16, split_head_dim=True, **_LEAST),
          **_UNALIGNED, queries_max=101_000,
          why=_29 + "D=40 N=6000 H=16, 2.8 waves of blocks: 309 TFLOPS; 8 and 4 heads together 281, 274"),
    _rule((33, 48), BANDED, replace(_128X64, blocks_per_sm=2, heads_together=4, split_head_dim=True, **_LEAST),
          **_UNALIGNED, why=_26 + "D=40 fp16 N=4k: 300 TFLOPS; one part 289; bf16 N=3000 274, 268, N=4k 293, 294"),
    _rule((33, 64), None, replace(_128X64, blocks_per_sm=2, heads_together=4), **_UNALIGNED,
          why=_26 + "D=56 N=4k: 456 TFLOPS full; by 4 warps 424; 64x64, four blocks an SM, 326 for 470; with the mask "
          "432; 128x128 384; 64x64 305"),
    _rule((81, 96), FULL, replace(_AHEAD_128X128, heads_together=2), **_UNALIGNED, ragged=False, seq_min=2897,
          seq_max=11585, why=_26 + "D=88 N=4k: 468 TFLOPS; 128x64 by 4 warps 459; at N=4000, with a mask, 386 for 476"),
    _rule((81, 96), FULL, replace(_BY_4_WARPS, heads_together=2, **_NO_LATENCIES), **_UNALIGNED,
          why=_26 + "D=88 N=3000: 478 TFLOPS; latencies of 2 and 4 447, 128x128 a block ahead 379"),
    _rule((81, 96), BANDED, replace(_BY_4_WARPS, heads_together=8, **_NO_LATENCIES), whole_sectors=False,
          why=_26 + "D=88 N=4k: 479 TFLOPS; latencies of 2 and 4 460, and 128x128 by 8 warps 405 for 484"),
    _rule((97, 112), FULL, replace(_BY_4_WARPS, split_tail=True, heads_together=4), **_UNALIGNED, seq_max=1448,
          why=_26 + "D=104 N=1k: 448 TFLOPS; 128x128 in pairs with a pilot 433, one by one 382"),
    _rule((97, 112), BANDED, replace(_BY_4_WARPS, split_tail=True, heads_together=8), **_UNALIGNED, seq_max=5792,
          why=_26 + "D=104 N=4k: 471 TFLOPS; 128x128 in pairs 462, one by one 442, but at 16k 522 for 475"),
    _rule((97, 128), FULL, replace(_128X128, heads_together=2, **_NO_LATENCIES), **_UNALIGNED,
          why=_26 + "D=120 N=4k: 586 and fp16 569 TFLOPS; in pairs with a pilot 559, fp16 in pairs 529"),
    _rule((97, 128), FULL, replace(_128X128, heads_together=2, pipeline="pilot_pairs"), whole_sectors=False,
          packed=True, dtype="bf16", why=_26 + "not packed, D=120 N=4k: 604 TFLOPS; in pairs 563"),
    _rule((97, 128), FULL, replace(_128X128, heads_together=2), whole_sectors=False, scored=True,
          why=COMPILED + "no maxima stay where scores are changed, so that no latency was timed"),
    _rule((113, 128), BANDED, replace(_128X128, heads_together=8, **_NO_LATENCIES), **_UNALIGNED, seq_min=2897,
          seq_max=5792, why=_26 + "D=120 N=4k: 554 TFLOPS; in pairs with latencies of 2 and 4 540"),
    _rule((97, 112), FULL, replace(_128X128, heads_together=2, **_NO_LATENCIES), whole_sectors=True, **_USUAL,
          seq_min=725, why=_26 + "D=112 N=4k: 594 TFLOPS; with latencies of 2 and 4 517; fp16 555, 485; N=1k 491, 458"),
    _rule((97, 128), BANDED, replace(_128X128, heads_together=8, **_NO_LATENCIES), whole_sectors=True, **_USUAL,
          seq_min=1449, seq_max=4095,
          why=_26 + "D=112, 128 N=3000: 479, 571 TFLOPS; 64x64 in pairs 441, 545; at N=1k 346 for 347"),
    _rule((97, 112), BANDED, replace(_128X128, heads_together=8, **_NO_LATENCIES), whole_sectors=True, **_USUAL,
          seq_min=4096, seq_max=5792, why=_26 + "D=112 fp16 N=4k: 502 TFLOPS; q in registers 473; bf16 529, 528"),
    _rule((1, 64), FULL, replace(_64X64, blocks_per_sm=4, heads_together=8, scheduler="static"), seq_max=512,
          why=_23 + "N=512: 443 TFLOPS; 4 heads together 428"),
    _rule((1, 64), FULL, replace(_64X64, blocks_per_sm=4, heads_together=2), seq_min=2897, seq_max=5792,
          why=_26 + "N=4k: 1.018 of 4 heads together, and 1.076 on an H100; at 1k 0.981, at 16k 0.934 and 1.041"),
    _rule((1, 64), FULL, replace(_64X64, blocks_per_sm=4, heads_together=4),
          why=_23 + "N=4k: 501 TFLOPS; 128x64 with 8 warps 476"),
    _rule((1, 64), BANDED, replace(_64X64, blocks_per_sm=4, heads_together=8), seq_min=8192,
          why=_23 + "N=16k: 542 TFLOPS; 32 heads together 525"),
    _rule((1, 64), BANDED, replace(_64X64, blocks_per_sm=4, heads_together=32),
          why=_23 + "N=4k: 462 TFLOPS; 4 heads together 436"),
    _rule((65, 80), FULL, replace(_128X64, blocks_per_sm=2, heads_together=2, split_head_dim=True), whole_sectors=True,
          ragged=True, seq_max=2048, **_USUAL, why=_29 + "D=80 N=1111: 424 TFLOPS; 64x64 389, as a static grid 414"),
    _rule((81, 96), FULL,
          replace(_BY_4_WARPS, heads_together=4, scheduler="static"), whole_sectors=True, seq_min=2897, seq_max=5792,
          **_USUAL, why=_29 + "D=96 N=4k: 574 TFLOPS; a block a tile 555, 64x64 552"),
    _rule((65, 96), FULL, replace(_64X64, blocks_per_sm=3, heads_together=2, split_head_dim=True), whole_sectors=True,
          why=_23 + "D=80 N=4k: 520 TFLOPS; 128x64, two blocks an SM, 516"),
    _rule((65, 80), FULL, replace(_128X64, blocks_per_sm=2, heads_together=2, split_head_dim=True), whole_sectors=False,
          why=_23 + "D=72 N=8k: 483 TFLOPS; 128x128 396"),
    _rule((81, 96), FULL, replace(_AHEAD_128X128, heads_together=2), whole_sectors=False, packed=True,
          why=_23 + "not packed, D=88 N=8k: 485 TFLOPS; not a block ahead 449"),
    _rule((81, 96), FULL, replace(_AHEAD_128X128, heads_together=2), whole_sectors=False, scored=True,
          why=_23 + "scores as they are, D=88 N=8k: 485 TFLOPS; not a block ahead 449"),
    _rule((65, 96), BANDED, replace(_64X64, blocks_per_sm=3, heads_together=8, split_head_dim=True), whole_sectors=True,
          why=_23 + "D=80 N=16k: 523 TFLOPS; 128x64, two blocks an SM, 515"),
    _rule((65, 80), BANDED, replace(_128X64, blocks_per_sm=2, heads_together=8, split_head_dim=True),
          whole_sectors=False, why="a guess, as full problems of D=72"),
    _rule((97, 128), FULL, replace(_128X128, heads_together=2), whole_sectors=False, packed=True, dtype="fp16",
          why=COMPILED + "loads have a warp of their own, which they have not in pairs"),
    _rule((97, 128), BANDED, replace(_128X128, heads_together=8), whole_sectors=False, seq_max=4095,
          why=_23 + "D=104 N=2k: 381 TFLOPS; 64x64 in pairs 252"),
    _rule((97, 128), FULL, replace(_64X128, heads_together=4, scheduler="static", pipeline="pilot"), dtype="bf16",
          seq_max=256, why=_29 + "N=200, B*H=1024: 211 TFLOPS; without a pilot 201, 64x64 in pairs 195, 128x64 183"),
    _rule((97, 128), FULL, replace(_64X128, heads_together=4, scheduler="static"), seq_max=724,
          why=_26 + "N=512: 499 TFLOPS; with a pilot and 8 heads together 491, and on an H100 448 for 476"),
    _rule((97, 128), FULL, replace(_64X128, heads_together=4, scheduler="static", pipeline="pilot"), dtype="bf16",
          seq_max=1448, why=_23 + "N=1k: 566 TFLOPS; without a pilot 547"),
    _rule((97, 128), FULL, replace(_64X128, pipeline="ahead"), why=_23 + "N=4k: 625 TFLOPS; 128x128 with 8 warps 615"),
    _rule((97, 128), BANDED,
          replace(_64X64, heads_together=2, scheduler="static", pipeline="pairs", **_LEAST, q_in_registers=True),
          seq_max=724, why=_24 + "N=512: 1.077 of one by one, which had 324 TFLOPS; apart 0.99"),
    _rule((97, 128), BANDED, replace(_64X64, heads_together=8, pipeline="pairs", **_LEAST), seq_max=1448,
          why=_26 + "N=1k: 422 TFLOPS; 128x128 with q in registers 409"),
    _rule((97, 128), BANDED, replace(_128X128, heads_together=4, q_in_registers=True), seq_max=5792,
          why=_26 + "N=2k: 521 TFLOPS; 64x64 in pairs 520, on an H100 459 for 518; at 4k 1.040 of q in shared memory"),
    _rule((97, 128), BANDED,
          replace(_128X128, heads_together=8, pipeline="pilot", q_in_registers=True, **_NO_LATENCIES), dtype="bf16",
          why=_24 + "N=16k: 1.027 of q in shared memory"),
    _rule((97, 128), BANDED, replace(_128X128, heads_together=8, pipeline="pairs", **_NO_LATENCIES),
          why=_23 + "bf16 N=16k: 643 TFLOPS; one by one 618"),
    _rule((161, 192), FULL, replace(_AHEAD_128X128, heads_together=2, pipeline="pilot"), dtype="bf16", seq_max=724,
          why=_24 + "D=192 N=512: 1.080 of a block ahead, which with 8 heads has 1.049"),
    _rule((177, 192), FULL, replace(_128X128, heads_together=2, split_head_dim=True, **_LEAST), **_UNALIGNED,
          seq_min=725, why=_26 + "D=184 N=4k: 609 TFLOPS; latencies of 2 and 4 582; a block ahead, which spills, 594"),
    _rule((129, 192), FULL, replace(_AHEAD_128X128, heads_together=2),
          why=_23 + "D=144 N=8k: 636 TFLOPS; not a block ahead 606"),
    _rule((129, 192), BANDED, replace(_AHEAD_128X128, heads_together=8), dtype="bf16",
          why=_23 + "D=144 N=8k: 607 TFLOPS; not a block ahead 569"),
    _rule((161, 192), BANDED, replace(_AHEAD_128X128, heads_together=8), dtype="fp16", head_dim_v_max=128,
          why=COMPILED + "192/128: no spills a block ahead, which there are where values have 192 columns"),
    _rule((129, 192), BANDED, replace(_128X128, heads_together=8, split_head_dim=True),
          why=_23 + "bf16 D=144 N=16k: 594 TFLOPS, of 14 heads 2 together; a block ahead spills in fp16"),
    _rule((193, 256), FULL, replace(_128X64, heads_together=4, pipeline="pilot_pairs", scheduler="static"), **_USUAL,
          dtype="bf16", seq_min=363, seq_max=512, why=_26 + "N=512: 512 TFLOPS; online 128x128 501; N=256 360 for 363"),
    _rule((193, 256), FULL, replace(_ONLINE_128X128, heads_together=4), seq_max=512,
          why=_23 + "N=512: 470 TFLOPS; lazy 128x64 in pairs, static 453"),
    _rule((193, 256), FULL, replace(_128X64, heads_together=4, pipeline="pilot_pairs"), dtype="bf16",
          why=_23 + "N=4k: 724 TFLOPS; 128x128 699"),
    _rule((193, 256), FULL, replace(_128X64, heads_together=4, pipeline="pairs"),
          why=_23 + "N=4k: 676 TFLOPS; in a first pass 779, online 128x128 709"),
    _rule((193, 256), BANDED, replace(_AHEAD_256, heads_together=8), dtype="bf16", seq_max=2896,
          why=_23 + "N=2k: 584 TFLOPS; one tile, a pilot in pairs, 563; N=1k 459, 16 heads together 465; N=512 338, "
          "latencies of 2 and 4 331"),
    _rule((193, 256), BANDED, replace(_AHEAD_256, heads_together=16), dtype="bf16", **_USUAL, seq_min=2897,
          seq_max=5792, queries_max=52_000,
          why=_29 + "D=256 N=3333 12/4, 2.5 waves of blocks: 588 TFLOPS; 4 heads together 481"),
    _rule((193, 208), BANDED, replace(_AHEAD_256, heads_together=4, split_tail=True), dtype="bf16", packed=False,
          scored=False, seq_min=2897, seq_max=5792,
          why=_26 + "D=200 N=4k: 569 TFLOPS, D=208 597; in two parts 544, 583"),
    _rule((193, 256), BANDED, replace(_AHEAD_256, heads_together=4), dtype="bf16", seq_max=5792,
          why=_23 + "N=4k: 654 TFLOPS; one tile, a pilot in pairs, 647"),
    _rule((193, 256), BANDED, replace(_128X64, heads_together=2, pipeline="pairs", **_NO_LATENCIES), dtype="bf16",
          why=_24 + "N=16k: 1.030 of a pilot in pairs with 8 heads; a block ahead 1.019 at 8k"),
    _rule((193, 208), BANDED, replace(_AHEAD_256, heads_together=4, split_tail=True), dtype="fp16", **_USUAL,
          seq_min=725, why=_26 + "D=208 N=16k: 632 TFLOPS; 128x64 in pairs 607, online 128x128 526; N=4k 561, "
          "8 heads together 570, online 128x128 484"),
    _rule((193, 256), BANDED, replace(_128X64, heads_together=4, pipeline="pairs", **_NO_LATENCIES), dtype="fp16",
          **_USUAL, seq_min=725, why=_26 + "N=4k: 637 TFLOPS; online 128x128 568, a block ahead in two parts 626"),
    _rule((193, 256), BANDED, replace(_128X64, heads_together=8, **_NO_LATENCIES), seq_max=1448,
          why=_23 + "bf16 as fp16 does it, N=1k: 403 TFLOPS; a block ahead 402"),
    _rule((193, 256), BANDED, replace(_ONLINE_128X128, heads_together=8), scored=True, seq_max=2896,
          why=_23 + "scores as they are, bf16 as fp16 does it, N=2k: 489 TFLOPS; lazy 128x64 462"),
    _rule((257, 384), None, forward(64, 64, warps=8, heads_together=4, split_head_dim=True),
          why=COMPILED + "wgmma, a warp for loads and no spills, a warpgroup for half of the columns of out"),
    _rule((385, 512), None, forward(64, 64, warps=8, heads_together=4),
          why=COMPILED + "wgmma, a warp for loads and no spills, as 64x32 has; 128 rows of out do not fit"),
    _rule((513, 576), None, forward(64, 64, warps=8, heads_together=4, split_head_dim=True), head_dim_v_max=512,
          why=COMPILED + "576/512: wgmma, a warp for loads and no spills, in 220 of 227 KiB"),
    *(
        _rule((193, 256), BANDED, replace(_ONLINE_128X128, heads_together=4), **kind,
              why=_23 + "neither packed nor scored, bf16 as fp16 does it, N=8k 634, 16k 654 TFLOPS; cuDNN 544, 557")
        for kind in _OTHERS
    ),
)  # fmt: skip

_NO_HINTS = forward(128, 128, blocks_per_sm=None, warps=8, **_NO_LATENCIES)

RUNGS = {
    "memory": (
        _rule((65, 128), BANDED, forward(128, 64, blocks_per_sm=None, warps=8),
              why=_21 + "483 TFLOPS; 128x128 479"),
    ),
    "math": (_rule((65, 128), BANDED, _NO_HINTS, why=_21 + "481 TFLOPS; 128x64 472"),),
    "basic": (_rule((65, 128), BANDED, _NO_HINTS, why=_21 + "384 TFLOPS; 128x64 349"),),
}  # fmt: skip
"""Rules of rungs below full, swept for the cell that the ladder is climbed on: D=128 with the mask."""

# ---------------------------------------------------------------- backward


_by_8 = functools.partial(one_pass, warps=8)
_BY_2 = one_pass(64, 64, blocks_per_sm=2)
"""Two blocks an SM, each with one warpgroup that computes."""
_DQ_BY_8 = queries(128, 64, warps=8)
_DQ_OF_FOUR = replace(_DQ_BY_8, heads_together=4)

TWO_PASS = (
    _rule((1, 64), FULL, two_passes(_by_8(64, 128), queries(64, 64, blocks_per_sm=2)),
          why=_21 + "363 TFLOPS, 2.32 ms for the keys; in 128x64 2.18, but it spills"),
    _rule((1, 64), BANDED, two_passes(_by_8(64, 128), queries(64, 64, blocks_per_sm=3, heads_together=16)),
          seq_max=8191, why=_21 + "337 TFLOPS, 0.81 ms for the queries; in 128x64 0.84"),
    _rule((1, 64), BANDED, two_passes(_by_8(64, 128, heads_together=4), _DQ_OF_FOUR), seq_min=8192,
          why=_21 + "B=1 N=16k: 379 TFLOPS, 2.81 ms for the queries; in 64x64 2.98"),
    _rule((65, 128), None, two_passes(replace(_BY_2, heads_together=4), _DQ_OF_FOUR), scored=False, packed=True,
          why=_29 + "16k packed tokens: 353 to 422 TFLOPS, causal 264 to 420; in 32x128 by 8 warps 337 to 414, 240 to "
          "391, one pass 332 to 428, 231 to 402"),
    _rule((65, 128), FULL, two_passes(replace(_BY_2, heads_together=4), _DQ_BY_8), scored=False,
          why=_26 + "1.85 ms for the keys; in 32x128 by 8 warps 2.04"),
    _rule((65, 128), BANDED, two_passes(replace(_BY_2, heads_together=4), _DQ_OF_FOUR), scored=False,
          why=_26 + "0.97 ms for the keys; in 32x128 by 8 warps 1.12"),
    _rule((65, 128), FULL, two_passes(_by_8(32, 128), _DQ_BY_8), scored=True,
          why=_21 + "of plain scores, 430 TFLOPS; one pass 415"),
    _rule((65, 128), BANDED, two_passes(_by_8(32, 128, heads_together=4), _DQ_OF_FOUR), scored=True,
          why=_21 + "of plain scores, 402 TFLOPS, 1.08 and 0.63 ms; one head at a time 1.14 and 0.67"),
    _rule((129, 256), FULL, two_passes(_by_8(64, 64, latency=2), queries(64, 64, warps=8)),
          why=_21 + "392 TFLOPS, 1.86 ms for the keys; with a latency of 4 1.90"),
    _rule((129, 256), BANDED, two_passes(_by_8(64, 64), queries(64, 32, heads_together=4)),
          why=_21 + "350 TFLOPS, 0.90 ms for the queries; in 64x64 0.98"),
)  # fmt: skip

_SHARED: dict[str, Any] = {"heads_together": 4, "dq_transposed": True}
_ALONE: dict[str, Any] = {"heads_together": 1}

ATOMIC = (
    _rule((1, 64), FULL, _by_8(128, 128, delta_first=True, **_SHARED), packed=True, scored=False,
          why=_29 + "16k packed tokens: 290 to 422 TFLOPS; 64x128 265 to 361, two passes 231 to 312"),
    _rule((1, 64), BANDED, _by_8(128, 128, **_SHARED), packed=True, scored=False,
          why=_29 + "16k packed tokens: 388 TFLOPS with one long sequence, 333 of mixed lengths, 188 of short equal "
          "ones; two passes 331, 301, 197"),
    _rule((1, 64), FULL, _by_8(128, 128, delta_first=True, **(_SHARED | _ALONE)), seq_min=8192, **_USUAL,
          why=_29 + "N=8k 446, 16k 461 TFLOPS; 4 heads together 426 and 418"),
    _rule((1, 64), BANDED, _by_8(128, 128, latency=2, **(_SHARED | _ALONE)), seq_min=8192, **_USUAL,
          why=_29 + "N=16k 450 TFLOPS; 4 heads together 434, with a latency of 4 435; N=8k 419, 408, 420"),
    _rule((1, 64), FULL, _by_8(128, 128, delta_first=True, **_SHARED), seq_min=1024, **_USUAL,
          why=_26 + "413 TFLOPS, 402 at N=16k, 343 at N=1k; dq as it was 375, two passes 346, 340, 315"),
    _rule((1, 64), BANDED, _by_8(128, 128, **(_SHARED | {"heads_together": 8})), seq_min=2048, **_USUAL,
          why=_29 + "N=2k 317 TFLOPS, 4 heads together 314; earlier 380 at N=4k, two passes 335, 300 at 2k"),
    _rule((65, 128), FULL, _by_8(64, 128, delta_first=True, **_SHARED), seq_min=2048, **_USUAL,
          why=_26 + "428 TFLOPS, 429 at N=16k, 384 at N=2k; two passes 417, 389, 380"),
    _rule((65, 128), BANDED, _by_8(64, 128, delta_first=True, **_SHARED), seq_min=8192, **_USUAL,
          why=_26 + "N=16k: 432 TFLOPS; two passes 394"),
    _rule((1, 64), None, _by_8(128, 128, own_columns=True, **_SHARED), seq_min=2048, scored=True,
          why=_29 + "with a mask, B=1: ALiBi 346, softcap 312 TFLOPS; two passes 259, 258; else a guess. With dq as it "
          "was ALiBi 310"),
    _rule((65, 128), None, _by_8(64, 128, **_SHARED), seq_min=2048, scored=True,
          why=_29 + "with a mask, B=1: ALiBi 406, softcap 398 TFLOPS; two passes 337, 331; else a guess"),
    _rule((129, 256), FULL, _by_8(64, 64), seq_min=2048, why=_21 + "406 TFLOPS; two passes 392"),
    _rule((129, 256), BANDED, _by_8(64, 64, heads_together=4), seq_min=2048,
          why=_21 + "373 TFLOPS; one head at a time 359"),
    # From here on two passes, which give the same bits each time, are as fast or faster, or nobody has measured.
    _rule((1, 64), None, _by_8(128, 128, **_SHARED), only_named=True,
          why=_26 + "415 TFLOPS full, 385 with the mask; dq as it was 382 and 331; shorter ones were not timed"),
    _rule((65, 128), None, _by_8(64, 128, **_SHARED), only_named=True,
          why=_26 + "435 TFLOPS full, 406 with the mask; dq as it was 380 and 381; two passes 414 and 393"),
    _rule((129, 256), None, _by_8(64, 64, heads_together=4), only_named=True,
          why=_21 + "N=1024: two passes are faster full and as fast with the mask"),
)  # fmt: skip

_BY_2_FULL, _BY_2_BANDED = replace(_BY_2, heads_together=4, delta_first=True), replace(_BY_2, heads_together=4)
_IN_PARTS: dict[str, Any] = {"split_head_dim": True}
_KEPT: dict[str, Any] = {**_IN_PARTS, "keys_in_registers": True}

STORED = (
    _rule((65, 80), FULL, stored(replace(_BY_2_FULL, **_KEPT), _DQ_OF_FOUR, stagger=7), **_USUAL,
          why=_29 + "D=80 N=1111 308 TFLOPS; keys in shared memory 302, one tile 267"),
    _rule((65, 80), BANDED, stored(replace(_BY_2_BANDED, **_KEPT), _DQ_OF_FOUR), **_USUAL,
          why=_29 + "D=80 N=1111 246 TFLOPS; keys in shared memory 244, one tile 209"),
    _rule((81, 96), FULL, stored(replace(_BY_2_FULL, **_IN_PARTS), _DQ_OF_FOUR, stagger=7), **_USUAL,
          why=_29 + "D=96 N=4k 362 TFLOPS; one tile 325"),
    _rule((81, 96), BANDED, stored(replace(_BY_2_BANDED, **_IN_PARTS), _DQ_OF_FOUR), **_USUAL,
          why=_29 + "D=96 N=4k 357 TFLOPS; one tile 318"),
    _rule((97, 128), FULL, stored(replace(_BY_2_FULL, latency=1, **_ALONE, **_IN_PARTS), _DQ_BY_8, stagger=1), **_USUAL,
          seq_min=16384, why=_29 + "N=16k 480 TFLOPS; one tile 464, and 4 heads together, a latency of 4 450 for 467"),
    _rule((97, 128), FULL, stored(replace(_BY_2_FULL, latency=1, **_ALONE), _DQ_BY_8, stagger=1), **_USUAL,
          seq_min=8192, why=_29 + "N=8k 477 TFLOPS; 2 heads together 466, 4 of them and a latency of 4 456"),
    _rule((97, 128), BANDED, stored(replace(_BY_2_BANDED, latency=2, **_IN_PARTS), _DQ_OF_FOUR), **_USUAL,
          seq_min=8192, why=_29 + "N=8k 463, 16k 476 TFLOPS; one tile, a latency of 4 451 and 467"),
    _rule((161, 192), None, stored(_by_8(64, 64, heads_together=4, **_IN_PARTS), _DQ_OF_FOUR), **_USUAL,
          why=_29 + "D=192 N=4k 418 TFLOPS full, 400 with the mask; one tile 392, 380"),
    _rule((129, 256), None, stored(_by_8(64, 64, heads_together=4), _DQ_OF_FOUR),
          why=_26 + "513 TFLOPS, 519 at N=16k, 383 at N=512; one pass 361, 396, 264; with the mask 482, 530, 258; one "
          "pass 334, 360, 169, two there 205"),
    _rule((65, 128), FULL, stored(_BY_2_FULL, _DQ_OF_FOUR, stagger=7),
          why=_26 + "471 TFLOPS, 461 at N=16k, 357 at N=512; one pass 426, 427, two 318; H100 N=16k 420, one pass 433"),
    _rule((65, 128), BANDED, stored(_BY_2_BANDED, _DQ_OF_FOUR),
          why=_26 + "465 TFLOPS, 463 at N=16k, 252 at N=512; one pass 452 at N=16k; H100 N=16k 417, one pass 442"),
    _rule((1, 64), None, stored(_by_8(64, 128, heads_together=4), _DQ_OF_FOUR), only_named=True,
          why=_26 + "a prototype: 350 TFLOPS full, 342 with the mask; one pass 382, two passes 338 with the mask"),
)  # fmt: skip
