"""Tiles of the forward kernel for Hopper as data: `WgmmaConfig`, its shared memory and registers, and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from multiattn.cuda.configs import FORWARD_LISTS, list_areas, padded, tiles
from multiattn.cuda.tensor_maps import BOX_COLUMNS, tensor_maps, why_not_mapped
from multiattn.packed import RAGGED_ROWS
from multiattn.plan.arch import Arch
from multiattn.plan.config import Config
from multiattn.plan.limits import FieldRule, between, failed, field_checks, one_of, size_checks
from multiattn.plan.schedule import COUNTER_BYTES, SCHEDULERS
from multiattn.plan.support import Reason
from multiattn.problem import Problem

WARPGROUP_THREADS, WARPGROUP_ROWS = 128, 64
PANEL_ROW_BYTES = 128  # of a panel: 64 columns of head_dim, what the swizzle of wgmma and TMA spans
BARRIER_BYTES = 512
_DEPTH = 16  # columns of Q that a wgmma multiplies: a fragment of 4 registers
_ROOM_WITH_Q = {(2, False): 196, (2, True): 192, (3, False): 128, (3, True): 128}
"""Registers up to which Q may fill them, by warpgroups and whether the mask is a band: ptxas then spills nothing."""
REGISTERS_MAX: Mapping[int, int] = {2: 208, 3: 144}
"""By consumer warpgroups, for what `registers_at_least` counts: setmaxnreg gives a thread 232, or 160 with three."""
_PLAIN_STORE_REGISTERS = 20
"""More that three warpgroups want under a mask to store from registers: with 128 in use ptxas 13 spills in the loops.

At D=128 it does with 112, which sweeps find out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WgmmaConfig(Config):
    """Launch parameters of the Hopper kernel: warpgroups of 64 queries each, and one that loads by TMA."""

    cluster: int = 1
    """Blocks on neighbouring SMs that load each tile of K and V together, a part each, for all of them."""
    stages: int = 4
    """Buffers that tiles of K and of V take turns in."""
    scheduler: str = "dynamic"
    """``one_tile``: a block per tile of queries. ``static``, ``dynamic``: a block per SM, which takes every n-th tile,
    or the next one that a counter in device memory gives it."""
    q_slots: int = 1
    """Buffers of Q; with two the next tile is begun before the output of one is stored, with three Q of two is loaded
    ahead."""
    q_in_registers: bool = False
    """As many of Q's fragments as there is room for are read into registers once a tile.

    The others, or all, are read by wgmma from shared memory for every block of keys.
    """
    pingpong: bool = False
    """Warpgroups take turns: one has the tensor cores while another has the softmax."""
    lazy_max: bool = False
    """Weights are made relative to the maxima of earlier blocks, and the output is rescaled only where one has outgrown
    them."""
    tma_store: bool = True
    """The output leaves through shared memory and TMA, or from registers."""

    @property
    def warpgroups(self) -> int:
        """That compute: consumers."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: its consumers, and the producer's warpgroup."""
        return WARPGROUP_THREADS * (self.warpgroups + 1)

    def box_rows(self, problem: Problem) -> dict[str, int]:
        """Rows of a box of each tensor that goes by TMA: of q in a packed batch those of a warpgroup."""
        q, kv = self.tile_m if problem.packing is None else WARPGROUP_ROWS, self.tile_n // self.cluster
        return {"q": q, "k": kv, "v": kv, **({"out": WARPGROUP_ROWS} if self.tma_store else {})}

    @property
    def is_persistent(self) -> bool:
        """True where a block takes one tile after another."""
        return self.scheduler != "one_tile"


def smem_bytes(config: WgmmaConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block: slots of Q, stages for K and V, barriers.

    Every kernel asserts at compile time that it needs just this.
    """
    panels = -(-problem.head_dim // BOX_COLUMNS)
    rows = config.q_slots * config.tile_m + config.stages * config.tile_n
    return rows * panels * PANEL_ROW_BYTES + BARRIER_BYTES


def query_tiles(config: WgmmaConfig, problem: Problem) -> int:
    """Tiles of queries of one head, with those that only make clusters whole; of a packed batch the most."""
    if problem.packing is not None:
        return problem.packing.tiles_max(problem.seq_q, config.tile_m)
    return padded(tiles(problem.seq_q, config.tile_m), config.cluster)


def grid_blocks(config: WgmmaConfig, problem: Problem) -> int:
    """Blocks of a launch that has one per tile of queries, head and batch entry."""
    return query_tiles(config, problem) * problem.heads_q * problem.batch


def registers_at_least(config: WgmmaConfig, problem: Problem) -> int:
    """32-bit registers a consumer's thread needs for output, scores, weights and kept Q; the rest comes on top."""
    is_crowded = config.warpgroups == 3 and problem.is_banded and not config.tma_store
    store = _PLAIN_STORE_REGISTERS if is_crowded else 0
    return _registers_without_q(config, problem) + 4 * kept_steps(config, problem) + store


def _registers_without_q(config: WgmmaConfig, problem: Problem) -> int:
    output, scores, weights = padded(problem.head_dim, 8) // 2, config.tile_n // 2, config.tile_n // 4
    return output + scores + weights


def kept_steps(config: WgmmaConfig, problem: Problem) -> int:
    """How many of Q's parts of 16 columns, from the first on, stay in registers."""
    if not config.q_in_registers:
        return 0
    room = _ROOM_WITH_Q[config.warpgroups, problem.is_banded] - _registers_without_q(config, problem)
    return min(max(room // 4, 0), padded(problem.head_dim) // _DEPTH)


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes of device memory beside the tensors: the tile counter of a dynamic scheduler, one for each stream.

    A packed batch has its list of tiles there, too.
    """
    counter = COUNTER_BYTES if isinstance(config, WgmmaConfig) and config.scheduler == "dynamic" else 0
    return counter + sum(list_areas(problem, FORWARD_LISTS).values())


def why_not(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    assert isinstance(config, WgmmaConfig)
    if wrong := _wrong_shape(config):
        return wrong
    reasons = [
        reason for it in tensor_maps(problem, config.box_rows(problem)).values() for reason in why_not_mapped(it)
    ]
    registers, most = registers_at_least(config, problem), REGISTERS_MAX[config.warpgroups]
    beside, room = _registers_without_q(config, problem), _ROOM_WITH_Q[config.warpgroups, problem.is_banded]
    needed = f"{registers} registers for output, scores, weights, Q and stores ({config})"
    kept, got = kept_steps(config, problem), f"q_in_registers with {beside} registers for all else ({config})"
    rows = max(problem.seq_q, problem.seq_kv)
    checks = (
        (registers <= most, needed, f"up to {most} with {config.warpgroups} warpgroups"),
        (not config.q_in_registers or kept > 0, got, f"up to {room - 4}"),
        (not config.lazy_max or not problem.has_score, "lazy_max with an expression for scores", "exact maxima"),
        (problem.packing is None or config.cluster == 1, f"a packed batch ({config})", "cluster=1"),
        (problem.packing is None or rows <= RAGGED_ROWS, f"a packed batch of {rows} rows", f"up to {RAGGED_ROWS}"),
    )
    sizes = size_checks(config, arch, smem_bytes(config, problem), grid_blocks(config, problem))
    return (*reasons, *failed((*checks, *sizes)))


def _wrong_shape(config: WgmmaConfig) -> tuple[Reason, ...]:
    """Reasons why no kernel is made for a config."""
    fields: dict[str, FieldRule] = {
        "tile_m": one_of(128, 192),
        "tile_n": (lambda it: it in range(16, 257, 16), "multiples of 16 from 16 to 256"),
        "cluster": one_of(1, 2),
        "stages": between(3, 16),
        "scheduler": one_of(*SCHEDULERS),
        "q_slots": one_of(1, 2, 3),
    }
    together = (
        config.cluster == 1 or config.scheduler != "dynamic",
        f"scheduler=dynamic with cluster={config.cluster}",
        "one_tile, static: blocks of a cluster take their tiles together",
    )
    return failed((*field_checks(config, fields), together))
