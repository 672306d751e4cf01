"""The constants of the Gluon kernel of all gradients, and the layouts that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multiattn.problem import Problem
from multiattn.score import LoweredScore
from multiattn.score.expression import ONE
from multiattn.triton.gluon_backward_configs import GluonBackwardConfig
from multiattn.triton.gluon_configs import pieces_of
from multiattn.triton.kernels.gluon.constants import accumulator

_OF_CONFIG = (
    "q_stages",
    "dout_stages",
    "k_stages",
    "k_in_registers",
    "early_scores",
    "half_dq",
    "dq_registers",
    "key_registers",
)
"""Constants that a config has by the same name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonBackwardConstants:
    """Constants of a kernel; it gets them whole, as one constexpr."""

    banded: bool
    """The mask hides keys."""
    two_sided: bool
    """It has two bounds, which the kernel is given; a causal one is the diagonal."""
    ragged: bool
    """The last tile of keys is not full."""
    head_dim: int
    wide: int
    """Columns of head_dim in the first of its pieces, a power of two."""
    narrow: int
    """In the second, which may reach beyond head_dim; 0 where there is none."""
    q_stages: int
    dout_stages: int
    k_stages: int
    k_in_registers: bool
    early_scores: bool
    half_dq: bool
    dq_registers: int
    key_registers: int
    descends: bool
    """Blocks of queries are counted from the last one on."""
    packed: bool = False
    """As in `GluonConstants`."""
    is_persistent: bool = True
    is_dynamic: bool = True
    score: Any = None
    """As in `TileConstants`: of its functions `score_and_slope` is called."""
    has_slope: bool = False
    """It does more than add: its slope differs from 1."""

    @classmethod
    def of(
        cls, problem: Problem, config: GluonBackwardConfig, *, ragged: bool, score: LoweredScore | None = None
    ) -> GluonBackwardConstants:
        """The constants of a launch."""
        wide, narrow = pieces_of(problem.head_dim)
        is_causal = problem.is_banded and not problem.is_two_sided
        return cls(
            banded=problem.is_banded,
            two_sided=problem.is_two_sided,
            ragged=ragged,
            head_dim=problem.head_dim,
            wide=wide,
            narrow=narrow,
            score=score,
            has_slope=score is not None and score.slope is not ONE,
            packed=problem.packing is not None,
            descends=config.descends and is_causal,
            **{name: getattr(config, name) for name in _OF_CONFIG},
        )

    @property
    def columns(self) -> int:
        """Columns of a tile, in all of its pieces."""
        return self.wide + self.narrow

    @property
    def pieces(self) -> int:
        """Products that are under way for one of head_dim's columns."""
        return 2 if self.narrow else 1

    @property
    def dq_columns(self) -> int:
        """Columns of the wide piece of dQ that are made at a time."""
        return min(self.wide, 64) if self.half_dq else self.wide

    @property
    def scores(self) -> Any:
        """Layout of scores, weights and dS, transposed: ``[64 keys, 64 queries]``."""
        return accumulator(64)

    @property
    def gradient(self) -> Any:
        """Layout of the wide piece of dK and dV, ``[64, wide]``."""
        return accumulator(self.wide)

    @property
    def gradient_narrow(self) -> Any:
        """Layout of the narrow one."""
        return accumulator(self.narrow)

    @property
    def dq(self) -> Any:
        """Layout of the columns of dQ that are made at a time, ``[64, dq_columns]``."""
        return accumulator(self.dq_columns)

    @property
    def query(self) -> Any:
        """Layout of a number for each query of scores."""
        from triton.experimental.gluon import language as gl

        return gl.SliceLayout(0, self.scores)

    @property
    def statistics(self) -> Any:
        """Layout of the same as they lie in memory, where the four that a thread wants of 16 queries are together."""
        from triton.experimental.gluon import language as gl

        registers, lanes = [[0, 1], [0, 2], [0, 16], [0, 32]], [[0, 4], [0, 8], [0, 0], [0, 0], [0, 0]]
        return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [1, 64])
