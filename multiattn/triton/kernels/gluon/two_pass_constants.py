"""The constants of the two Gluon kernels of a backward in two passes, and the layouts that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multiattn.problem import Problem
from multiattn.score import LoweredScore
from multiattn.score.expression import ONE
from multiattn.triton.gluon_configs import pieces_of
from multiattn.triton.gluon_two_pass_configs import TILE_N, GluonTwoPassConfig
from multiattn.triton.kernels.gluon.constants import accumulator

_OF_CONFIG = ("q_stages", "dout_stages", "k_stages", "v_stages", "kv_in_registers")
"""Constants that a config has by the same name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoPassConstants:
    """Constants of one of the kernels; it gets them whole, as one constexpr."""

    by_keys: bool
    """Its blocks own keys, not queries."""
    banded: bool
    """The mask hides keys."""
    two_sided: bool
    """It has two bounds, which the kernel is given; a causal one is the diagonal."""
    ragged: bool
    """The last block of keys is not full."""
    head_dim: int
    wide: int
    """Columns of head_dim in the first of its pieces, a power of two."""
    narrow: int
    """In the second, which may reach beyond head_dim; 0 where there is none."""
    q_stages: int
    dout_stages: int
    k_stages: int
    v_stages: int
    kv_in_registers: bool
    tile_n: int = TILE_N
    is_persistent: bool = True
    is_dynamic: bool = True
    packed: bool = False
    """As in `GluonConstants`."""
    score: Any = None
    """As in `TileConstants`: of its functions `score_and_slope` is called."""
    has_slope: bool = False
    """The expression does more than to add."""

    @classmethod
    def of(
        cls,
        problem: Problem,
        config: GluonTwoPassConfig,
        *,
        ragged: bool,
        by_keys: bool,
        score: LoweredScore | None = None,
    ) -> TwoPassConstants:
        """The constants of a launch."""
        wide, narrow = pieces_of(problem.head_dim)
        return cls(
            by_keys=by_keys,
            banded=problem.is_banded,
            two_sided=problem.is_two_sided,
            ragged=ragged,
            head_dim=problem.head_dim,
            wide=wide,
            narrow=narrow,
            packed=problem.packing is not None,
            score=score,
            has_slope=score is not None and score.slope is not ONE,
            **{name: getattr(config, name) for name in _OF_CONFIG},
        )

    @property
    def tile_bytes(self) -> int:
        """A tile of 64 rows of head_dim in shared memory."""
        return 2 * 64 * (self.wide + self.narrow)

    @property
    def statistics(self) -> Any:
        """Layout of numbers of queries as they lie in memory, where the four that a thread wants of 16 are together."""
        from triton.experimental.gluon import language as gl

        lanes, warps = [[0, 4], [0, 8], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]]
        return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], [0, 32]], lanes, warps, [], [1, 64])

    @property
    def is_crowded(self) -> bool:
        """No register is left for what can be computed again."""
        return self.wide + self.narrow > 192

    @property
    def consumer_registers(self) -> int:
        """A thread's of the warpgroups that compute."""
        return 240 if self.is_crowded and not self.by_keys else 232

    @property
    def producer_registers(self) -> int:
        """A thread's of the warp that loads: the three have 504."""
        return 504 - 2 * self.consumer_registers

    @property
    def groups(self) -> int:
        """Asynchronous products that one product of tiles takes: one a piece of head_dim."""
        return 2 if self.narrow else 1

    @property
    def scores(self) -> Any:
        """Layout of scores, weights and their gradients, ``[64, 64]``."""
        return accumulator(64)

    @property
    def sums(self) -> Any:
        """Layout of the wide piece of a gradient, ``[64, wide]``."""
        return accumulator(self.wide)

    @property
    def sums_narrow(self) -> Any:
        """Layout of the narrow one."""
        return accumulator(self.narrow)

    @property
    def row(self) -> Any:
        """Layout of a number for each row of scores."""
        from triton.experimental.gluon import language as gl

        return gl.SliceLayout(1, self.scores)

    @property
    def column(self) -> Any:
        """Layout of a number for each column."""
        from triton.experimental.gluon import language as gl

        return gl.SliceLayout(0, self.scores)

    @property
    def stored(self) -> Any:
        """Layout of a gradient as it is stored: 16 bytes a thread, exchanged among the four that have a row."""
        return _stored(self.wide, 2)

    @property
    def stored_narrow(self) -> Any:
        """The same of the narrow piece."""
        return _stored(self.narrow, 2)

    @property
    def between(self) -> Any:
        """Half way there: converted in two steps, each is done by shuffles, in one it would take shared memory."""
        return _stored(self.wide, 1)

    @property
    def between_narrow(self) -> Any:
        """The same of the narrow piece."""
        return _stored(self.narrow, 1)


def _stored(columns: int, swaps: int) -> Any:
    """An accumulator's layout, where so many bits of a thread's place in its row were swapped with bits of a column."""
    from triton.experimental.gluon import language as gl

    in_row, in_column = [[0, 2], [0, 4]], [[0, bit] for bit in (8, 16, 32, 64, 128) if bit < columns]
    for bit in range(min(swaps, len(in_column))):
        in_row[bit], in_column[bit] = in_column[bit], in_row[bit]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *in_column, [8, 0]],
        lane_bases=[*in_row, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )
