"""Which config the Gluon kernel takes; every rule with its evidence."""

from __future__ import annotations

from multiattn.config import Rule
from multiattn.triton.gluon.configs import VARIANT, GluonConfig
from multiattn.tuned import tuned_rules

RULES: tuple[Rule[GluonConfig], ...] = tuned_rules("triton", VARIANT, lambda given: GluonConfig(**given))
"""First match wins."""
