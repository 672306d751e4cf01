"""Rules for sm90: wgmma, TMA, and the only arch of the Gluon kernel.

Two passes of a backward beat one at D=64 and 128, though they do 7 GEMMs to its 5: no fp32 sums go through memory, and
a block of four warps, of which two share an SM, holds its accumulators. Addresses that pointers need leave no registers
for the tiles of descriptors. Measured with Triton 3.6.0, bf16, B=4 N=4096 H*D=2048, beside the candidates of a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multiattn.plan.config import COMPILED, Rule
from multiattn.plan.tuned import tuned_rules
from multiattn.triton.gluon_backward import RULES as GLUON_BACKWARD
from multiattn.triton.gluon_backward import GluonBackwardConfig
from multiattn.triton.gluon_forward import VARIANT, GluonConfig
from multiattn.triton.gluon_twin import VARIANT as GLUON_TWIN
from multiattn.triton.gluon_twin import GluonTwinConfig
from multiattn.triton.gluon_two_pass import VARIANT as GLUON_TWO_PASS
from multiattn.triton.gluon_two_pass import GluonTwoPassConfig
from multiattn.triton.rules.shorthand import BANDED, FULL, backward, by_descriptors, forward, rule, stored
from multiattn.triton.stored_backward import VARIANT as STORED

_SM90 = ("sm90",)
_H200 = "H200 2026-11-21: "

_ONE_PASS = (
    *backward(_SM90, (1, 64), _H200 + "287 TFLOPS full, 272 causal; 64x128, 8 warps 255 and 233", (64, 64, 4, 2)),
    *backward(_SM90, (65, 128), _H200 + "271 TFLOPS full, 255 causal; 64x128 spills, 306 and 294", (32, 128, 8, 3)),
    *backward(_SM90, (129, 256), COMPILED + "two passes were measured, and come first", (64, 64, 8, 1)),
)
_WIDE_TWO_PASS = backward(
    _SM90, (129, 256), _H200 + "243 TFLOPS full, 233 causal; 32x64 199 and 203", (64, 64, 8, 2), (128, 32, 8, 3)
)

_WIDEST_TWO_PASS = backward(
    _SM90, (257, 512), COMPILED + "3 spills in a loop; 32 queries a step 76", (16, 32, 8, 1), (32, 32, 8, 1)
)

_STORED_WHY = (
    "H200 2026-11-30, D=512 N=4096 full, kernels of scores: 1163 us, tiles of 128x256 1244, one block an SM 1369, four "
    "warps 1141; products of 128 columns 1204 us, this 1135. 548 TFLOPS, two passes 46; causal N=16384 475"
)
_STORED = (
    *by_descriptors(*stored(_SM90, _STORED_WHY, (128, 128, 8, 3), 128)),
    *stored(_SM90, COMPILED + "no spills", (128, 128, 8, 4)),
)


def _one_pass(
    low: int,
    high: int,
    why: str,
    *,
    scored: bool | None = None,
    lengths: tuple[int, int | None] = (0, None),
    listed: bool = False,
    **more: Any,
) -> Rule[GluonBackwardConfig]:
    """For lengths from one to another; where there is a last one, for callers that name it: two passes are faster.

    `listed`: for block masks alone.
    """
    (seq_min, seq_max), config = lengths, GluonBackwardConfig(tile_m=64, tile_n=128, **more)
    conditions = {"scored": scored, "only_named": seq_max is not None, "seq_min": seq_min, "seq_max": seq_max}
    conditions["block_multiple"] = config.tile_m if listed else 0
    return rule(_SM90, (low, high), why, config, **conditions)


_GRADIENTS = "H200 2026-11-26, N=4096: "
_NARROW = (
    "466 TFLOPS full, 454 causal; 3 buffers of Q and 2 of dO 340 and 346; K in shared memory, in another run, 457, 448"
)
_WIDE = "550 TFLOPS full, 525 causal; walks that ascend 550 and 522; 2 buffers of dO, in another run, 541 beside 548"
_BY_LISTS = (
    "H200 2026-12-01, D=128: N=40960 H16, nine tenths of the blocks left out at random 590 TFLOPS, 16 documents at "
    "N=32768 392, a video 112; two passes 378, 294, 79; CUDA 580, 462, 154"
)
_GLUON_BACKWARD = (
    _one_pass(1, 64, _BY_LISTS, scored=True, listed=True, early_scores=True, q_stages=4, dout_stages=3),
    _one_pass(1, 64, _BY_LISTS, listed=True, k_in_registers=True, early_scores=True, q_stages=4, dout_stages=3),
    _one_pass(65, 128, _BY_LISTS, listed=True, half_dq=True, dout_stages=3),
    _one_pass(
        1, 64, COMPILED + "K in registers would spill", scored=True, early_scores=True, q_stages=4, dout_stages=3
    ),
    _one_pass(1, 64, _GRADIENTS + _NARROW, k_in_registers=True, early_scores=True, q_stages=4, dout_stages=3),
    _one_pass(
        97, 128, "H200 2026-11-26, N=512: 336 TFLOPS full, 212 causal; two passes 363 and 249",
        lengths=(0, 724), half_dq=True, dout_stages=3, descends=True,
    ),
    _one_pass(97, 128, _GRADIENTS + _WIDE, lengths=(725, None), half_dq=True, dout_stages=3, descends=True),
    _one_pass(65, 96, "a guess, as D=128", half_dq=True, dout_stages=3, descends=True),
)  # fmt: skip


_SECOND = "H200 2026-11-26: "


def _two_pass(
    low: int,
    high: int,
    stages: tuple[int, int, int, int],
    why: str,
    only_named: bool = False,
    v_max: int | None = None,
    **more: bool,
) -> Rule[GluonTwoPassConfig]:
    """With so many buffers of Q, dO, K and V; `v_max` is the rule's `head_dim_v_max`."""
    q, dout, k, v = stages
    config = GluonTwoPassConfig(tile_m=64, tile_n=64, q_stages=q, dout_stages=dout, k_stages=k, v_stages=v, **more)
    return rule(_SM90, (low, high), why, config, only_named=only_named, head_dim_v_max=v_max)


_GLUON_TWO_PASS = (
    _two_pass(1, 64, (4, 4, 6, 6), _SECOND + "340 TFLOPS full; `two_pass` 400", only_named=True),
    _two_pass(65, 96, (4, 4, 4, 4), COMPILED + "no spills"),
    _two_pass(
        97, 128, (3, 3, 4, 3), _SECOND + "421 TFLOPS full; K and V in registers: dK and dV in 2.02 ms, else 1.99"
    ),
    _two_pass(
        129, 160, (3, 2, 3, 2), _SECOND + "K and V in registers: dK and dV in 1.70 ms, else 1.87", kv_in_registers=True
    ),
    _two_pass(
        161, 192, (3, 3, 3, 3), "a guess, as D=192, with the buffers that a narrower v leaves room for",
        v_max=128, kv_in_registers=True,
    ),
    _two_pass(
        161, 192, (2, 2, 2, 2), _SECOND + "K and V in registers: dK and dV in 1.61 ms, else 1.73", kv_in_registers=True
    ),
    _two_pass(193, 256, (2, 2, 2, 1), _SECOND + "446 TFLOPS full, 433 causal; cuDNN in turns 354 and 329"),
)  # fmt: skip


_TWIN = GluonTwinConfig(tile_m=64, tile_n=64)
_TWIN_WHY = (
    "H200 2026-11-30, D=512, causal N=16384, 4 heads, 16 on one: 479, 550 TFLOPS, pieces of 128 columns 451, 539, of "
    "64 433, 509; plain tiles of 32 keys 190, 193. By graphs N=4096 full 661, 649, plain 182, causal 559, 552, 173"
)
_TWIN_320 = "H200 2026-11-30, D=320 N=2048 causal: 493 TFLOPS, one buffer of V 482, of 128 columns 328, plain 119"
_TWIN_384 = "H200 2026-11-30, D=384 N=4096 full: 602 TFLOPS, two buffers of K 589, pieces of 64 columns 564, plain 143"
_GLUON_TWIN = (
    rule(_SM90, (257, 320), _TWIN_320, replace(_TWIN, piece=64, k_stages=2, v_stages=2)),
    rule(_SM90, (321, 384), _TWIN_384, _TWIN),
    rule(_SM90, (385, 512), COMPILED + "a twin has a piece of v", _TWIN, head_dim_v_max=256),
    rule(_SM90, (385, 512), _TWIN_WHY, replace(_TWIN, piece=256)),
)


def _listed(low: int, high: int, queries: int, tile_n: int, stages: int, why: str, **more: Any) -> Rule[GluonConfig]:
    """For block masks, with tiles of so many queries and keys; blocks have as many queries as the longer side."""
    config = GluonConfig(tile_m=queries, tile_n=tile_n, stages=stages, lazy_max=True, **more)
    return rule(_SM90, (low, high), why, config, block_multiple=max(queries, tile_n))


_LISTED = (
    _listed(
        1, 64, 64, 128, 5,
        "H200 2026-12-01, H16 causal, 16 documents, N=32768 / 65536: 361 / 456 TFLOPS, 128x128 338 / 437, in turns at "
        "the tensor cores 345 / 444, 128x64 327 / 411; CUDA 363 / 422",
        blocks_per_sm=2,
    ),
    _listed(
        65, 128, 128, 128, 5,
        "H200 2026-11-30, N=40960 H16, blocks left out at random, nine tenths / half: 712 / 773 TFLOPS, CUDA 635 / "
        "663, cuDNN's open kernels 547 / 599; in turns at the tensor cores, in another run, 711 for 718",
        q_slots=2,
    ),
    _listed(129, 192, 128, 64, 5, COMPILED + "no spills"),
    _listed(193, 256, 128, 64, 5, COMPILED + "no spills"),
    _listed(1, 64, 64, 64, 8, COMPILED + "no spills", q_slots=2, blocks_per_sm=2),
    _listed(
        65, 128, 64, 64, 4, "H200 2026-11-30, as above: 581 / 594 TFLOPS, CUDA 515 / 532, cuDNN's 487 / 491",
        q_slots=2, blocks_per_sm=2,
    ),
    _listed(129, 256, 64, 64, 5, COMPILED + "no spills"),
)  # fmt: skip

RULES: Mapping[str, tuple[Rule[Any], ...]] = {
    VARIANT: (*_LISTED, *tuned_rules("triton", VARIANT, GluonConfig)),
    GLUON_TWIN: _GLUON_TWIN,
    "full": (
        *by_descriptors(
            *forward(_SM90, (1, 64), _H200 + "469 TFLOPS; 64x64, 3 stages 435", (64, 128, 4, 2), masks=FULL),
            *forward(
                _SM90, (1, 64), _H200 + "409 TFLOPS; 64x128, 3 stages 406", (64, 64, 4, 3), registers=128, masks=BANDED
            ),
            *forward(_SM90, (65, 128), _H200 + "565 TFLOPS; 128x64, 2 stages 528", (64, 128, 4, 1), masks=FULL),
            *forward(_SM90, (65, 128), _H200 + "503 TFLOPS; 128x64, 2 stages 471", (64, 64, 4, 3), masks=BANDED),
            *forward(
                _SM90, (129, 256), _H200 + "653 TFLOPS full, 529 causal; 128x64, 8 warps 520 and 496", (64, 128, 4, 1)
            ),
            *forward(_SM90, (257, 512), COMPILED + "8 warps share the accumulator, no spill in a loop", (64, 32, 8, 2)),
        ),
        *forward(_SM90, (1, 128), COMPILED + "at 64x128 pointers spill 56 bytes", (64, 64, 4, 2)),
        *forward(_SM90, (129, 256), COMPILED + "8 warps share the accumulator and hardly spill", (128, 64, 8, 2)),
        *forward(_SM90, (257, 512), COMPILED + "of 64 rows pointers spill 65 times in a loop", (32, 32, 8, 2)),
    ),
    "math": forward(
        _SM90, (65, 128), _H200 + "310 TFLOPS; 128x64 299", (64, 128, 4, 1), masks=BANDED, heads_together=1
    ),
    "basic": forward(
        _SM90, (65, 128), _H200 + "239 TFLOPS; 128x128, 8 warps 223", (64, 128, 4, 1), masks=BANDED, heads_together=1
    ),
    GLUON_BACKWARD: _GLUON_BACKWARD,
    GLUON_TWO_PASS: _GLUON_TWO_PASS,
    STORED: _STORED,
    "atomic": (*by_descriptors(*_ONE_PASS), *_ONE_PASS),
    "two_pass": (
        *by_descriptors(
            *backward(
                _SM90, (1, 64), COMPILED + "at 128x64 a bias spills 190 times in a loop",
                (64, 64, 4, 2), (128, 64, 4, 3), reads_keys=True,
            ),
            *backward(
                _SM90, (65, 128), COMPILED + "at 64x64 with 4 warps a bias spills 145 times in a loop",
                (32, 128, 8, 2), (128, 64, 8, 3), reads_keys=True,
            ),
            *backward(
                _SM90, (1, 64), _H200 + "400 TFLOPS; one pass 287, 64x64 275",
                (128, 64, 4, 2), (128, 64, 4, 3), masks=FULL,
            ),
            *backward(
                _SM90, (1, 64), _H200 + "335 TFLOPS; one pass 272, 64x64 257",
                (128, 64, 4, 2), (128, 64, 4, 2), masks=BANDED,
            ),
            *backward(
                _SM90, (65, 128), _H200 + "373 TFLOPS full, 354 causal; one pass 306 and 294",
                (64, 64, 4, 2), (128, 64, 8, 3),
            ),
            *_WIDE_TWO_PASS,
            *_WIDEST_TWO_PASS,
        ),
        *backward(
            _SM90, (1, 128), COMPILED + "at 64x64 with 4 warps pointers spill 112 bytes",
            (32, 64, 8, 2), (128, 64, 8, 3),
        ),
        *_WIDE_TWO_PASS,
        *_WIDEST_TWO_PASS,
    ),
}  # fmt: skip
