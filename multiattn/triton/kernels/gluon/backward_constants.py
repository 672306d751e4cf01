"""The constants of the Gluon kernel of all gradients, and the layouts that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multiattn.triton.kernels.gluon.constants import accumulator
from multiattn.triton.kernels.gluon.gradient_constants import GradientConstants


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonBackwardConstants(GradientConstants):
    """With those of the kernel in one pass. Scores are transposed: ``[64 keys, 64 queries]``."""

    k_in_registers: bool
    early_scores: bool
    half_dq: bool
    dq_registers: int
    key_registers: int
    descends: bool
    """Blocks of queries are counted from the last one on."""

    @property
    def dq_columns(self) -> int:
        """Columns of the wide piece of dQ that are made at a time."""
        return min(self.wide, 64) if self.half_dq else self.wide

    @property
    def dq(self) -> Any:
        """Layout of the columns of dQ that are made at a time, ``[64, dq_columns]``."""
        return accumulator(self.dq_columns)
