"""The config of a problem on an arch: a module for each family of arches. Of a variant's rules the first wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multiattn.plan.config import Config, Rule
from multiattn.plan.ladder import rung_rules
from multiattn.triton.decode import VARIANT as SPLIT_KEYS
from multiattn.triton.gluon_backward import RULES as GLUON_BACKWARD
from multiattn.triton.gluon_backward import GluonBackwardConfig
from multiattn.triton.gluon_forward import VARIANT as GLUON
from multiattn.triton.gluon_forward import GluonConfig
from multiattn.triton.gluon_twin import VARIANT as GLUON_TWIN
from multiattn.triton.gluon_twin import GluonTwinConfig
from multiattn.triton.gluon_two_pass import VARIANT as GLUON_TWO_PASS
from multiattn.triton.gluon_two_pass import GluonTwoPassConfig
from multiattn.triton.ladder import STEPS
from multiattn.triton.rules import ampere, blackwell, decode, hopper
from multiattn.triton.rules.shorthand import backward, by_descriptors, forward, rule
from multiattn.triton.stored_backward import VARIANT as STORED
from multiattn.triton.stored_backward import stored_tiles

_INTERPRETED = "interpreted, 2 cores, 2026-11: few and large tiles take the fewest operations"
_TILES = (64, 64, 4, 1)
_STORED_TILES = stored_tiles((128, 64, 4, 1), (64, 32, 64, 4, 1), part=64)
_ALL_THERE_IS = "interpreted: all that rules of sm90 switch on is run; the fastest config was not looked for"


def _interpreted(head_dims: tuple[int, int], config: Config, **conditions: Any) -> Rule[Any]:
    """A rule of a Gluon kernel, for callers that name it."""
    return rule(("cpu",), head_dims, _ALL_THERE_IS, config, only_named=True, **conditions)


def _both(rules: tuple[Rule[Any], ...]) -> tuple[Rule[Any], ...]:
    return (*by_descriptors(*rules), *rules)


_CPU: Mapping[str, tuple[Rule[Any], ...]] = {
    GLUON: tuple(
        _interpreted(
            head_dims,
            GluonConfig(tile_m=tile_m, tile_n=64, stages=4, q_slots=2, pingpong=tile_m > 64, lazy_max=True),
            block_multiple=multiple,
        )
        for head_dims, tile_m, multiple in (
            ((1, 256), 128, 128),
            ((1, 256), 64, 64),
            ((1, 128), 192, None),
            ((129, 256), 128, None),
        )
    ),
    GLUON_TWIN: (_interpreted((257, 512), GluonTwinConfig(tile_m=64, tile_n=64, piece=128)),),
    GLUON_BACKWARD: (
        _interpreted(
            (1, 64),
            GluonBackwardConfig(tile_m=64, tile_n=128, q_stages=4, dout_stages=3, early_scores=True),
            scored=True,
        ),
        _interpreted(
            (1, 64),
            GluonBackwardConfig(
                tile_m=64, tile_n=128, q_stages=4, dout_stages=3, k_in_registers=True, early_scores=True
            ),
        ),
        _interpreted((65, 128), GluonBackwardConfig(tile_m=64, tile_n=128, dout_stages=3, half_dq=True, descends=True)),
    ),
    GLUON_TWO_PASS: (
        _interpreted((1, 192), GluonTwoPassConfig(tile_m=64, tile_n=64, kv_in_registers=True)),
        _interpreted((193, 256), GluonTwoPassConfig(tile_m=64, tile_n=64)),
    ),
    "full": _both(forward(("cpu",), (1, 512), _INTERPRETED, _TILES, heads_together=2)),
    "atomic": _both(backward(("cpu",), (1, 256), _INTERPRETED, _TILES)),
    "two_pass": _both(backward(("cpu",), (1, 512), _INTERPRETED, _TILES, _TILES)),
    STORED: _both((rule(("cpu",), (1, 512), _ALL_THERE_IS, _STORED_TILES, only_named=True),)),
}
_FAMILIES = (_CPU, hopper.RULES, blackwell.RULES, ampere.RULES)

OWN_RULES: Mapping[str, tuple[Rule[Any], ...]] = {
    name: tuple(it for rules in _FAMILIES for it in rules.get(name, ())) for name in hopper.RULES
}
"""Rules by the name of the variant that they are made for: sm90 has some for each of those."""


def rules_of(name: str) -> tuple[Rule[Any], ...]:
    """The rules of a variant: its own, and for a rung then those of the top of its ladder, as far as it goes."""
    if name == SPLIT_KEYS:
        return decode.RULES
    if name not in STEPS:
        return OWN_RULES.get(name, ())
    step, own = STEPS[name].step, OWN_RULES
    if not step.descriptor:
        own = {**own, "full": tuple(it for it in own["full"] if not it.mapped)}
    return rung_rules(own, name, step, top="full")
