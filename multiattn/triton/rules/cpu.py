"""Rules for the interpreter: time goes by the number of operations, so tiles are few and large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multiattn.plan.config import Rule
from multiattn.triton.configs import TritonConfig
from multiattn.triton.rules.shorthand import backward

_WHY = "interpreted, 2 cores, 2026-11: few and large tiles take the fewest operations"
_TILES = (64, 64, 4, 1)
_FORWARD = Rule(
    arches=("cpu",),
    config=TritonConfig(tile_m=64, tile_n=64, num_warps=4, num_stages=1, heads_together=2),
    why=_WHY,
)

RULES: Mapping[str, tuple[Rule[Any], ...]] = {
    "full": (_FORWARD,),
    "pointer_full": (_FORWARD,),
    **dict.fromkeys(("atomic", "pointer_atomic"), backward(("cpu",), (1, 256), _WHY, _TILES)),
    **dict.fromkeys(("two_pass", "pointer_two_pass"), backward(("cpu",), (1, 256), _WHY, _TILES, _TILES)),
}
