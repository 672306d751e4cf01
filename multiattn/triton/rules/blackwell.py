"""Rules for sm100 and sm103: tcgen05, TMA. None is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multiattn.plan.config import COMPILED, Rule
from multiattn.triton.rules.shorthand import backward, by_descriptors, forward, stored
from multiattn.triton.stored_backward import VARIANT as STORED

_ARCHES = ("sm100", "sm103")
_FULL_ACCUMULATORS = COMPILED + "the accumulators take half of the tensor memory"
_NO_BETTER = COMPILED + "no other tile promises more"

_ONE_PASS = (
    *backward(_ARCHES, (1, 128), _NO_BETTER, (64, 64, 8, 2)),
    *backward(_ARCHES, (129, 256), _FULL_ACCUMULATORS, (32, 64, 8, 1)),
)
_TWO_PASS = (
    *backward(_ARCHES, (1, 128), _NO_BETTER, (64, 64, 8, 2), (128, 64, 8, 2)),
    *backward(_ARCHES, (129, 256), _FULL_ACCUMULATORS, (32, 64, 8, 1), (64, 32, 8, 1)),
    *backward(_ARCHES, (257, 512), COMPILED + "32 queries a step spill 76 times", (16, 32, 8, 1), (32, 32, 8, 1)),
)
_STORED = stored(_ARCHES, _NO_BETTER, (128, 128, 8, 4))
_WIDE = (
    *forward(
        _ARCHES, (65, 128), COMPILED + "one 128-row tile of tensor memory; 4 warps spill in the loop", (128, 64, 8, 3)
    ),
    *forward(_ARCHES, (129, 256), COMPILED + "8 warps share the accumulator", (128, 64, 8, 2)),
)

RULES: Mapping[str, tuple[Rule[Any], ...]] = {
    "full": (
        *by_descriptors(
            *forward(_ARCHES, (1, 64), COMPILED + "one 128-row tile of tensor memory", (128, 64, 4, 3)),
            *_WIDE,
            *forward(_ARCHES, (257, 512), COMPILED + "8 warps share the accumulator, no spills", (64, 32, 8, 2)),
        ),
        *forward(_ARCHES, (1, 64), COMPILED + "4 warps, which descriptors leave registers for, spill", (128, 64, 8, 3)),
        *_WIDE,
        *forward(_ARCHES, (257, 512), COMPILED + "8 warps share the accumulator, no spills", (32, 32, 8, 2)),
    ),
    STORED: (*by_descriptors(*_STORED), *_STORED),
    "atomic": (*by_descriptors(*_ONE_PASS), *_ONE_PASS),
    "two_pass": (*by_descriptors(*_TWO_PASS), *_TWO_PASS),
}
