"""Which config the Gluon kernel takes; every rule with its evidence."""

from __future__ import annotations

from multiattn.plan.config import Rule
from multiattn.plan.tuned import tuned_rules
from multiattn.triton.gluon.configs import VARIANT, GluonConfig

RULES: tuple[Rule[GluonConfig], ...] = tuned_rules("triton", VARIANT, GluonConfig)
"""First match wins."""
