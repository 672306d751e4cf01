"""Rules for the arches of mma.sync: sm80, and those that have 99 KiB of shared memory a block. None is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multiattn.plan.config import COMPILED, Rule
from multiattn.triton.rules.shorthand import backward, by_descriptors, forward

_LARGE = ("sm80",)  # 163 KiB of shared memory a block
_SMALL = ("sm86", "sm89", "sm120", "sm121")  # 99 KiB
_BOTH = (*_LARGE, *_SMALL)

_WITHIN_A_WARP = COMPILED + "from tile_m = D on a row of scores stays in a warp, without shared memory: "
_SHARED = COMPILED + "8 warps share the accumulators and spill at most 4 times, outside the loops"
_SPILLS = COMPILED + "64x64 spills, with 4 warps and with 8"
_LITTLE_MEMORY = COMPILED + "99 KiB of shared memory a block"

_FORWARD = (
    *forward(_SMALL, (1, 64), COMPILED + "no other tile promises more", (64, 64, 4, 2)),
    *forward(
        _SMALL, (65, 128), _WITHIN_A_WARP + "5 instructions an mma.sync, at 64x32 7 to 8; 128x64 takes one stage",
        (128, 32, 8, 3),
    ),
    *forward(
        _BOTH, (129, 256), COMPILED + "what fits 99 KiB; on sm80 128x32 spills four times as often", (64, 32, 4, 2)
    ),
    *forward(_SMALL, (257, 512), _LITTLE_MEMORY + "; 8 warps share the accumulator, no spills", (32, 32, 8, 2)),
)  # fmt: skip
_WIDE_ONE_PASS = backward(_BOTH, (129, 256), _LITTLE_MEMORY, (32, 32, 4, 1))
_WIDE_TWO_PASS = (
    *backward(_BOTH, (129, 256), _LITTLE_MEMORY, (32, 32, 4, 1), (32, 32, 4, 1)),
    *backward(_LARGE, (257, 512), COMPILED + "no spills", (16, 32, 8, 1), (32, 32, 8, 1)),
    *backward(_SMALL, (257, 512), _LITTLE_MEMORY, (16, 16, 8, 1), (32, 16, 8, 1)),
)

RULES: Mapping[str, tuple[Rule[Any], ...]] = {
    "full": (
        *by_descriptors(*_FORWARD),
        *forward(_LARGE, (1, 64), COMPILED + "FlashAttention-2's rows; 128x64 spills", (128, 32, 4, 3)),
        *forward(
            _LARGE, (65, 128), _WITHIN_A_WARP + "3.2 to 3.5 instructions an mma.sync, at 64x32 7.6; 4 warps spill",
            (128, 64, 8, 2),
        ),
        *forward(_LARGE, (257, 512), COMPILED + "one spill in a loop; with two stages 9", (64, 32, 8, 1)),
        *_FORWARD,
    ),
    "atomic": (
        *by_descriptors(
            *_WIDE_ONE_PASS,
            *backward(_SMALL, (1, 64), _SPILLS, (64, 32, 4, 2)),
            *backward(_SMALL, (65, 128), _SHARED + "; 64 queries are more than 99 KiB", (32, 64, 8, 2)),
        ),
        *_WIDE_ONE_PASS,
        *backward(_SMALL, (1, 64), COMPILED + "64x64 spills on sm120", (32, 64, 4, 2)),
        *backward(_BOTH, (1, 128), _SHARED, (64, 64, 8, 2)),
    ),
    "two_pass": (
        *by_descriptors(
            *_WIDE_TWO_PASS,
            *backward(_SMALL, (1, 64), _SPILLS, (64, 32, 4, 2), (64, 32, 4, 2)),
            *backward(_SMALL, (65, 128), _SHARED, (64, 64, 8, 2), (64, 32, 4, 2)),
        ),
        *_WIDE_TWO_PASS,
        *backward(_BOTH, (1, 128), _SHARED, (64, 64, 8, 2), (64, 32, 4, 2)),
    ),
}  # fmt: skip
