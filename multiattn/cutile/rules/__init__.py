"""Tiles and compiler hints, with what each is based on: a module per family of arches, both directions side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multiattn.cutile.decode import NAME as SPLIT_KEYS
from multiattn.cutile.forward import STEPS
from multiattn.cutile.launches import HEAD_DIM_MAX
from multiattn.cutile.rules import ampere, blackwell, decode, hopper
from multiattn.cutile.rules.shorthand import forward, one_pass, queries, rule, stored, two_passes
from multiattn.plan.config import Rule
from multiattn.plan.ladder import rung_rules

_INTERPRETED = "interpreted: small enough that a short sequence still has several blocks of keys and a ragged one"
_KEYS, _QUERIES = one_pass(32, 32), queries(32, 32)


def _interpreted(config: Any, widest: int = 256, **more: Any) -> tuple[Rule[Any], ...]:
    return (rule(("cpu",), (1, widest), None, config, why=_INTERPRETED, **more),)


OWN_RULES: Mapping[str, tuple[Rule[Any], ...]] = {
    SPLIT_KEYS: decode.SPLIT_KEYS,
    "full": (*_interpreted(forward(64, 64), HEAD_DIM_MAX), *hopper.FORWARD, *blackwell.FORWARD, *ampere.FORWARD),
    **hopper.RUNGS,
    "two_pass": (
        *_interpreted(two_passes(_KEYS, _QUERIES)),
        *(*hopper.TWO_PASS, *blackwell.TWO_PASS, *ampere.TWO_PASS),
    ),
    "stored": (*_interpreted(stored(_KEYS, _QUERIES), only_named=True), *hopper.STORED),
    "atomic": (*_interpreted(_KEYS), *hopper.ATOMIC, *blackwell.ATOMIC, *ampere.ATOMIC),
}
"""Rules by the name of the variant that they are made for."""


def rules_of(name: str) -> tuple[Rule[Any], ...]:
    """The rules of a variant: its own, and for a rung then those of the one that it leads to, as far as it goes."""
    return rung_rules(OWN_RULES, name, STEPS[name].step, top="full") if name in STEPS else OWN_RULES[name]
