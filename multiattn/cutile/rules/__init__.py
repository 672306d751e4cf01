"""Tiles and compiler hints, with what each is based on: a module per family of arches, both directions side by side."""

from __future__ import annotations

from collections.abc import Mapping

from multiattn.cutile.backward import OnePassConfig, StoredConfig, TwoPassConfig
from multiattn.cutile.forward import STEPS, CutileConfig
from multiattn.cutile.rules import ampere, blackwell, hopper
from multiattn.cutile.rules.decode import SPLIT_KEYS as SPLIT_KEYS
from multiattn.plan.config import Rule
from multiattn.plan.ladder import rung_rules

_INTERPRETED = "interpreted: small enough that a short sequence still has several blocks of keys and a ragged one"

OWN_RULES: Mapping[str, tuple[Rule[CutileConfig], ...]] = {
    "full": (
        Rule(arches=("cpu",), config=CutileConfig(tile_m=64, tile_n=64), why=_INTERPRETED),
        *(*hopper.FORWARD, *blackwell.FORWARD, *ampere.FORWARD),
    ),
    **hopper.RUNGS,
}
"""Rules made for a rung, by its name. Where it has none, it goes by those of the rung that it leads to."""

TWO_PASS_RULES: tuple[Rule[TwoPassConfig], ...] = (
    Rule(
        arches=("cpu",),
        config=TwoPassConfig(tile_m=32, tile_n=32, dq_tile_m=32, dq_tile_n=32),
        why=_INTERPRETED,
    ),
    *(*hopper.TWO_PASS, *blackwell.TWO_PASS, *ampere.TWO_PASS),
)

STORED_RULES: tuple[Rule[StoredConfig], ...] = (
    Rule(
        arches=("cpu",),
        config=StoredConfig(tile_m=32, tile_n=32, dq_tile_m=32, dq_tile_n=32),
        why=_INTERPRETED,
        only_named=True,
    ),
    *hopper.STORED,
)

ATOMIC_RULES: tuple[Rule[OnePassConfig], ...] = (
    Rule(arches=("cpu",), config=OnePassConfig(tile_m=32, tile_n=32), why=_INTERPRETED),
    *(*hopper.ATOMIC, *blackwell.ATOMIC, *ampere.ATOMIC),
)


def rules_of(name: str) -> tuple[Rule[CutileConfig], ...]:
    """The rules of a rung, by its name."""
    return rung_rules(OWN_RULES, name, STEPS[name].step, top="full")
