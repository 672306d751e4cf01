"""Tiles of the forward kernel for Hopper as data: `WgmmaConfig`, what of it fits, and what a sweep tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from multiattn.cuda import configs
from multiattn.cuda.configs import padded, too_large, wrong_kind
from multiattn.cuda.tensor_maps import BOX_COLUMNS, OUT_ROWS, tensor_maps, why_not_mapped
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import COUNTER_BYTES, SCHEDULERS
from multiattn.plan.support import Reason
from multiattn.problem import Problem

WARPGROUP_THREADS = 128
PANEL_ROW_BYTES = 128  # of a panel: 64 columns of head_dim, what the swizzle of wgmma and TMA spans
BARRIER_BYTES = 512
_DEPTH = 16  # columns of Q that a wgmma multiplies: a fragment of 4 registers
_ROOM_WITH_Q = {(2, False): 196, (2, True): 192, (3, False): 128, (3, True): 128}
"""Registers up to which Q may fill them, by warpgroups and causal: where ptxas spills nothing in the loops."""
REGISTERS_MAX: Mapping[int, int] = {2: 208, 3: 144}
"""By consumer warpgroups, for what `registers_at_least` counts: setmaxnreg gives a thread 232, or 160 with three."""
_PLAIN_STORE_REGISTERS = 20
"""More that three warpgroups want under a causal mask to store from registers: with 128 in use ptxas 13 spills in the
loops; at D=128 with 112, which sweeps find out."""


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
    exp2_fma_fraction: float = 0.0
    """Share of the exponentials that are a polynomial on the FMA units: sixteenths from 0 to 0.5, rounded down to whole
    pairs of the `tile_n` / 8 that a thread has of a row. What comes to none is refused."""
    tma_store: bool = True
    """The output leaves through shared memory and TMA, or from registers."""

    @property
    def warpgroups(self) -> int:
        """That compute: consumers."""
        return self.tile_m // OUT_ROWS

    @property
    def threads(self) -> int:
        """Of a block: its consumers, and the producer's warpgroup."""
        return WARPGROUP_THREADS * (self.warpgroups + 1)

    @property
    def exp2_fma_sixteenths(self) -> int:
        """`exp2_fma_fraction` in the kernel's unit."""
        return int(16 * self.exp2_fma_fraction)

    @property
    def is_persistent(self) -> bool:
        """Whether a block takes one tile after another."""
        return self.scheduler != "one_tile"


def smem_bytes(config: WgmmaConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block: slots of Q, stages for K and V, barriers.

    Every kernel asserts at compile time that it needs just this.
    """
    panels = -(-problem.head_dim // BOX_COLUMNS)
    rows = config.q_slots * config.tile_m + config.stages * config.tile_n
    return rows * panels * PANEL_ROW_BYTES + BARRIER_BYTES


def query_tiles(config: WgmmaConfig, problem: Problem) -> int:
    """Tiles of queries of one head, with those that only make clusters whole."""
    return padded(configs.query_tiles(config, problem), config.cluster)


def grid_blocks(config: WgmmaConfig, problem: Problem) -> int:
    """Blocks of a launch that has one per tile of queries, head and batch entry."""
    return configs.blocks_of(query_tiles(config, problem), problem)


def registers_at_least(config: WgmmaConfig, problem: Problem) -> int:
    """32-bit registers a consumer's thread needs for output, scores, weights and kept Q; the rest comes on top."""
    is_crowded = config.warpgroups == 3 and problem.is_banded and not config.tma_store
    store = _PLAIN_STORE_REGISTERS if is_crowded else 0
    return _registers_without_q(config, problem) + 4 * kept_steps(config, problem) + store


def _registers_without_q(config: WgmmaConfig, problem: Problem) -> int:
    output, scores, weights = padded(problem.head_dim, 8) // 2, config.tile_n // 2, config.tile_n // 4
    return output + scores + weights


def kept_steps(config: WgmmaConfig, problem: Problem) -> int:
    """Of a wgmma's 16 columns of Q, from the first on: those whose fragments stay in registers."""
    if not config.q_in_registers:
        return 0
    room = _ROOM_WITH_Q[config.warpgroups, problem.is_banded] - _registers_without_q(config, problem)
    return min(max(room // 4, 0), padded(problem.head_dim) // _DEPTH)


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes of device memory beside the tensors: the tile counter of a dynamic scheduler, one for each stream."""
    return COUNTER_BYTES if isinstance(config, WgmmaConfig) and config.scheduler == "dynamic" else 0


def why_not(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    if not isinstance(config, WgmmaConfig):
        return (wrong_kind(config, WgmmaConfig),)
    if wrong := _wrong_shape(config):
        return wrong
    reasons = [reason for it in tensor_maps(problem, config).values() for reason in why_not_mapped(it)]
    registers, most = registers_at_least(config, problem), REGISTERS_MAX[config.warpgroups]
    if registers > most:
        got = f"{registers} registers for output, scores, weights, Q and stores ({config})"
        allowed = f"up to {most} with {config.warpgroups} warpgroups"
        reasons.append(Reason(code="config", got=got, allowed=allowed))
    if config.q_in_registers and not kept_steps(config, problem):
        got = f"q_in_registers with {_registers_without_q(config, problem)} registers for all else ({config})"
        allowed = f"up to {_ROOM_WITH_Q[config.warpgroups, problem.is_banded] - 4}"
        reasons.append(Reason(code="config", got=got, allowed=allowed))
    reasons += too_large(config, arch, smem_bytes(config, problem), grid_blocks(config, problem))
    return tuple(reasons)


def _wrong_shape(config: WgmmaConfig) -> tuple[Reason, ...]:
    """What of a config no kernel is made for."""
    sixteenths, pairs = 16 * config.exp2_fma_fraction, config.tile_n // 8
    checks = (
        (config.tile_m in (128, 192), f"tile_m={config.tile_m}", "128, 192"),
        (
            16 <= config.tile_n <= 256 and config.tile_n % 16 == 0,
            f"tile_n={config.tile_n}",
            "multiples of 16 from 16 to 256",
        ),
        (config.cluster in (1, 2), f"cluster={config.cluster}", "1, 2"),
        (
            config.cluster == 1 or config.scheduler != "dynamic",
            f"scheduler=dynamic with cluster={config.cluster}",
            "one_tile, static: blocks of a cluster take their tiles together",
        ),
        (3 <= config.stages <= 16, f"stages={config.stages}", "3 to 16"),
        (config.scheduler in SCHEDULERS, f"scheduler={config.scheduler}", ", ".join(SCHEDULERS)),
        (config.q_slots in (1, 2, 3), f"q_slots={config.q_slots}", "1, 2, 3"),
        (
            0 <= sixteenths <= 8 and sixteenths == int(sixteenths),
            f"exp2_fma_fraction={config.exp2_fma_fraction}",
            "sixteenths from 0 to 0.5",
        ),
        (
            sixteenths != int(sixteenths) or not 0 < sixteenths * pairs < 16,
            f"exp2_fma_fraction={config.exp2_fma_fraction} with tile_n={config.tile_n}, of {pairs} pairs none",
            f"0, or from {-(-16 // max(1, pairs))}/16 on",
        ),
    )
    return tuple(Reason(code="config", got=got, allowed=allowed) for holds, got, allowed in checks if not holds)


SHAPES: Mapping[int, tuple[tuple[int, int, int], ...]] = {
    64: ((192, 128, 3), (192, 64, 3), (192, 96, 3), (192, 128, 2), (192, 64, 2)),
    96: ((192, 96, 2), (192, 64, 2), (192, 80, 2), (192, 80, 1), (128, 128, 2)),
    128: ((192, 64, 2), (192, 80, 2), (192, 80, 1), (128, 128, 2), (128, 160, 2)),
    160: ((192, 64, 1), (192, 48, 1), (128, 96, 1), (128, 80, 2)),
    192: ((128, 96, 1), (128, 128, 1), (128, 80, 2), (128, 64, 2)),
    256: ((128, 64, 1), (128, 80, 1)),
}
"""(tile_m, tile_n, q_slots) by the widest head_dim of a class: one that has as many panels, and registers for as wide a
tile of keys. The first is tried in the most ways."""
_ALONE: tuple[Mapping[str, Any], ...] = (
    {"pingpong": False},
    {"tma_store": False},
    {"lazy_max": False},
    {"q_slots": 1},
    {"q_in_registers": True},
    {"exp2_fma_fraction": 2 / 16},
)
"""Tried with the first shape only: what a technique is worth, rather than what may win."""
_OPEN: tuple[Mapping[str, Any], ...] = (
    *({"pingpong": False, "tma_store": tma_store} for tma_store in (True, False)),
    *({"pingpong": True, "tma_store": tma_store} for tma_store in (True, False)),
    *({"q_in_registers": True, "tma_store": tma_store} for tma_store in (True, False)),
)
"""What has gone either way in sweeps, from head_dim 129 on; fewer of them are tried with each shape but the first."""
_STAGES_MAX = 16


def class_of(head_dim: int) -> int | None:
    """The widest head_dim of those that are tuned together with this one; None beyond all."""
    return next((widest for widest in SHAPES if head_dim <= widest), None)


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[WgmmaConfig]:
    """Configs worth timing, some twenty: shapes, each with ways to run it, then single changes of the first."""
    widest = class_of(problem.head_dim)
    shapes = SHAPES[widest] if widest else ()
    fits = partial(variant.fits, problem, arch)
    orders: list[dict[str, Any]] = [{"scheduler": "dynamic"}]
    alone = "one_tile" if problem.is_banded else "static"  # the third loses in each
    orders += ({"scheduler": alone, "cluster": cluster} for cluster in (1, 2))
    found: list[WgmmaConfig | None] = []
    for number, (tile_m, tile_n, q_slots) in enumerate(shapes):
        config = WgmmaConfig(tile_m=tile_m, tile_n=tile_n, q_slots=q_slots, pingpong=True, lazy_max=True)
        choices = _OPEN[: (6, 2, 1, 1)[number]] if problem.head_dim > 128 else ({},)
        tried = [{**choice, **order} for choice in choices for order in orders]
        found += (_deepest(fits, replace(config, **way)) for way in (*tried, *(_ALONE if number == 0 else ())))
    return tuple(dict.fromkeys(config for config in found if config is not None))


def _deepest(fits: Callable[[Config], tuple[Reason, ...]], config: WgmmaConfig) -> WgmmaConfig | None:
    """`config` with as many stages as fit; None where three are too many."""
    tried = (replace(config, stages=stages) for stages in range(_STAGES_MAX, 2, -1))
    return next((it for it in tried if not fits(it)), None)
