"""Which config a problem takes on an arch: a module for each family of arches. Of a variant's rules the first wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multiattn.plan.config import Rule
from multiattn.plan.ladder import rung_rules
from multiattn.triton.ladder import STEPS
from multiattn.triton.rules import ampere, blackwell, cpu, hopper

_FAMILIES = (cpu.RULES, hopper.RULES, blackwell.RULES, ampere.RULES)

OWN_RULES: Mapping[str, tuple[Rule[Any], ...]] = {
    name: tuple(rule for rules in _FAMILIES for rule in rules.get(name, ())) for name in hopper.RULES
}
"""Rules by the name of the variant that they are made for: sm90 has some for each of those."""


def rules_of(name: str) -> tuple[Rule[Any], ...]:
    """The rules of a variant: its own, and for a rung then those of the top of its ladder, as far as it goes."""
    if name not in STEPS:
        return OWN_RULES.get(name, ())
    step = STEPS[name].step
    return rung_rules(OWN_RULES, name, step, top="full" if step.descriptor else "pointer_full")
