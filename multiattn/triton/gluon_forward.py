"""The Gluon kernel of the forward for Hopper: a warp that loads by TMA, warpgroups that compute by wgmma."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from multiattn.packed import ragged
from multiattn.plan import abi, limits
from multiattn.plan.arch import ARCHS, Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import (
    NARROWEST,
    SCHEDULERS,
    heads_side_by_side,
    key_tiles,
    kv_heads_of_section,
    one_width,
    query_tiles,
    saving_widths,
)
from multiattn.plan.support import Reason
from multiattn.plan.waves import Walk
from multiattn.problem import Problem
from multiattn.score import LoweredScore
from multiattn.score.expression import ONE
from multiattn.triton.family import COUNTER, TritonFamily, TritonLaunch
from multiattn.triton.kernels.gluon.constants import WARPGROUP_ROWS, GluonConstants, HopperConstants
from multiattn.triton.plain import is_ragged_list, list_rows
from multiattn.triton.score import lowered_of_pairs
from multiattn.triton.staged import follows_distance, under_diagonal
from multiattn.triton.table import (
    ELEMENT_BYTES,
    NONE,
    Constant,
    Descriptor,
    Integer,
    KernelTable,
    Parameter,
    Scalar,
    Tensor,
    aux_row,
    factor_row,
    filled,
    given,
    integers,
    reach_rows,
    sinks_row,
    tops_row,
)

VARIANT = "warp_specialized"
ARCHES = ("sm90",)

BOOKKEEPING_BYTES = 1536
"""Shared memory beside the tiles: barriers, words, what the compiler keeps for partitions and reductions. An upper
bound; a test holds compiled kernels against it."""
REGISTERS_MAX = {1: 200, 2: 208, 3: 128}
"""By consumer warpgroups, of what `registers_at_least` counts: a thread has 232, 240, or 160 with three."""
STAGES_MAX = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class GluonConfig(Config):
    """Launch parameters: `tile_m` is 64 queries for each of up to three warpgroups; another one warp loads by TMA."""

    tile_m: int = limits.limited(limits.one_of(64, 128, 192))
    tile_n: int = limits.limited(limits.one_of(16, 32, 64, 128, 256))
    stages: int = limits.limited(limits.between(2, STAGES_MAX), default=4)
    """Buffers that tiles of K and of V take turns in."""
    scheduler: str = limits.limited(limits.one_of(*SCHEDULERS), default="dynamic")
    """See `multiattn.plan.schedule.SCHEDULERS`."""
    q_slots: int = limits.limited(limits.one_of(1, 2, 3), default=1)
    """Buffers of Q; with two the next tile is begun before the output of one is stored."""
    pingpong: bool = False
    """Warpgroups take turns: one has the tensor cores while another has the softmax."""
    lazy_max: bool = False
    """Weights are made relative to the maxima of a tile's first blocks; where those are outgrown it is done again."""
    blocks_per_sm: int = limits.limited(limits.one_of(1, 2), default=1)
    """Blocks that share an SM: two where each has one warpgroup that computes. Three would have too few registers."""

    @property
    def warpgroups(self) -> int:
        """How many compute: the consumers."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def is_persistent(self) -> bool:
        """True if a block takes one tile after another."""
        return self.scheduler != "one_tile"

    @property
    def is_dynamic(self) -> bool:
        """True if a counter in device memory gives out tiles."""
        return self.scheduler == "dynamic"

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The one kernel."""
        return (self.walk("q", *product_pieces(problem)),)

    @property
    def registers(self) -> int:
        """Per thread at launch. Of these the producer gives most to the consumers."""
        return {1: 128 if self.blocks_per_sm > 1 else 168, 2: 168, 3: 128}[self.warpgroups]


# ---------------------------------------------------------------- what fits


@functools.lru_cache(maxsize=1024)
def pieces_of(head_dim: int, head_dim_v: int | None = None) -> tuple[int, int]:
    """Columns of the one or two pieces that rows are computed in, powers of two; the second is 0 where one does.

    Rows of q and k, and of v and out, have the same pieces, or the first alone: then they share buffers. They are the
    fewest columns of both, and of the wider no more than if it were alone.
    """
    wider = max(head_dim, head_dim_v or head_dim)
    alone = saving_widths(wider) or (one_width(wider), 0)
    if head_dim_v in (None, head_dim):
        return alone
    powers = [1 << bit for bit in range(NARROWEST.bit_length() - 1, one_width(wider).bit_length())]
    pairs = ((wide, narrow) for wide in powers for narrow in (0, *powers) if wider <= wide + narrow <= sum(alone))
    return min(pairs, key=lambda it: (sum(columns_of(width, it) for width in (head_dim, head_dim_v)), it[1]))


def product_pieces(problem: Problem) -> tuple[float, ...]:
    """Columns of products, in pieces; where v has a width of its own the mean of both, in one."""
    if problem.head_dim == problem.head_dim_v:
        return pieces_of(problem.head_dim)
    return (sum(both_columns(problem)) / 2,)


def columns_of(width: int, pieces: tuple[int, int]) -> int:
    """Columns of a tile whose rows have so many elements."""
    return pieces[0] if width <= pieces[0] else sum(pieces)


def both_columns(problem: Problem) -> tuple[int, int]:
    """Columns of tiles of q and k, and of v and out."""
    pieces = pieces_of(problem.head_dim, problem.head_dim_v)
    return columns_of(problem.head_dim, pieces), columns_of(problem.head_dim_v, pieces)


def smem_bytes(config: GluonConfig, problem: Problem) -> int:
    """Shared memory of a block: slots of Q, stages of K and V, and no more than `BOOKKEEPING_BYTES` beside them."""
    rows = config.q_slots * config.tile_m + config.stages * config.tile_n
    return rows * max(both_columns(problem)) * ELEMENT_BYTES + BOOKKEEPING_BYTES


def registers_at_least(config: GluonConfig, problem: Problem) -> int:
    """32-bit registers a consumer's thread needs for output, scores and weights; the rest comes on top."""
    return both_columns(problem)[1] // 2 + config.tile_n // 2 + config.tile_n // 4


def why_not_fit(problem: Problem, arch: Arch, config: GluonConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; dtype, head_dim and alignment are the capability's."""
    if wrong := limits.failed(limits.limit_checks(config)):
        return wrong
    registers, most = registers_at_least(config, problem), REGISTERS_MAX[config.warpgroups]
    got = f"{registers} registers for output, scores and weights ({config})"
    allowed = f"up to {most} with {config.warpgroups} warpgroups"
    sizes = limits.size_checks(config, arch, smem_bytes(config, problem), query_tiles(problem, config.tile_m))
    return limits.failed(((registers <= most, got, allowed), *sizes, *block_checks(problem, config)))


def block_checks(problem: Problem, config: Config) -> list[limits.Check]:
    """A check that tiles divide the blocks of a block mask, if there is one."""
    if (blocks := problem.blocks) is None:
        return []
    divide = blocks.queries % config.tile_m == 0 and blocks.keys % config.tile_n == 0
    got, allowed = f"tiles of {config.tile_m} x {config.tile_n}", f"what divides {blocks.queries} x {blocks.keys}"
    return [(divide, got, allowed)]


def _settled(problem: Problem, arch: Arch, config: GluonConfig) -> GluonConfig:
    """The config with tiles of keys that divide the blocks of a block mask, and as many keys in buffers."""
    if problem.blocks is None or not config.tile_n:
        return config
    tile_n = math.gcd(config.tile_n, problem.blocks.keys)
    return replace(config, tile_n=tile_n, stages=min(config.stages * config.tile_n // tile_n, STAGES_MAX))


# ---------------------------------------------------------------- a launch


def problem_constants(problem: Problem, ragged: bool, score: LoweredScore | None) -> dict[str, Any]:
    """Constants of every Gluon kernel that follow from a problem, beside those that it has by the same name."""
    wide, narrow = pieces_of(problem.head_dim, problem.head_dim_v)
    return {
        "ragged": ragged,
        "wide": wide,
        "narrow": narrow,
        "packed": problem.packing is not None,
        "score": score,
        "has_score": score is not None and score.score is not None,
        "has_mask": score is not None and score.mask is not None,
        "has_slope": score is not None and score.slope is not ONE,
    }


def constants_of(
    problem: Problem, config: GluonConfig, *, ragged: bool, score: LoweredScore | None = None
) -> GluonConstants:
    """The constants of the kernel."""
    if score is not None and problem.is_banded and not problem.is_two_sided:
        score = under_diagonal(score)
    spare = REGISTERS_MAX[config.warpgroups] - registers_at_least(config, problem)
    return filled(
        GluonConstants,
        problem,
        config,
        **problem_constants(problem, ragged, score),
        lazy_max=config.lazy_max and (score is None or follows_distance(score)),
        loads_early=score is not None and spare >= config.tile_n // 2,
    )


def descriptors(problem: Problem, rows_of: Mapping[str, int], piece: int | None = None) -> dict[str, Parameter]:
    """Tensor maps of tensors by their names, of so many rows of one head, then those of the narrow piece, or None.

    Where all pieces have `piece` columns, they are the first ones alone.
    """
    found: dict[str, Parameter] = {}
    wide, narrow = pieces_of(problem.head_dim, problem.head_dim_v)
    pieces = (("map", wide, 0), ("narrow", narrow, wide)) if piece is None else (("map", piece, 0),)
    for kind, columns, begin in pieces:
        for name, rows in rows_of.items():
            layout = problem.layouts[name]
            is_there = layout.shape[-1] > begin
            layout = layout if problem.packing is None else ragged(layout)
            described = Descriptor(of=name, layout=layout, rows=rows, columns=columns)
            found[f"{name}_{kind}"] = given(is_there, described)
    return found


def tiles_of_queries(problem: Problem) -> int:
    """Tiles of 64 queries of a head. Of a packed batch the most that there can be, and one that is of none."""
    if problem.packing is not None:
        return problem.packing.tiles_max(problem.seq_q, WARPGROUP_ROWS) + 1
    return -(-problem.seq_q // WARPGROUP_ROWS)


def has_end(problem: Problem, config: Config) -> bool:
    """True where the last block of keys may not be full."""
    return problem.packing is not None or problem.seq_kv % config.tile_n != 0


def _has_end(problem: Problem, config: Config) -> bool:
    """`has_end`, or lists that may name keys beyond the end."""
    return has_end(problem, config) if problem.blocks is None else is_ragged_list(problem)


def walking_table(
    launch: TritonLaunch,
    kernel: str,
    constants: HopperConstants,
    *,
    maps: Mapping[str, int],
    own: Mapping[str, Parameter],
    factors: Mapping[str, Parameter],
    tile: tuple[str, int, int],
    registers: int,
    piece: int | None = None,
) -> KernelTable:
    """The table of a kernel whose blocks walk over tiles.

    Args:
        launch: its launch.
        kernel: its name.
        constants: its constants, with a lowered score.
        maps: tensors that TMA loads or stores, with the rows of a box.
        own: rows between the tensor maps and the list of tiles.
        factors: rows before the sizes.
        tile: "q" or "kv", whose rows blocks own, and how many of them: in a tile, and in one that a list has.
        registers: of a thread at launch.
        piece: columns of every piece of a row, where they have as many.
    """
    problem, packing, (side, rows, listed) = launch.problem, launch.problem.packing, tile
    length, heads, name = problem.seq_q, problem.heads_q, "query_list"
    if side == "kv":
        length, heads, name = problem.seq_kv, problem.heads_kv, "key_list"
    tiles = -(-length // rows) if packing is None else packing.tiles_max(length, listed)
    blocks = (key_tiles if side == "kv" else query_tiles)(problem, rows)
    together = heads_side_by_side(problem)
    if side == "kv":
        together = kv_heads_of_section(problem, launch.arch, tiles_of_head=tiles)
    sizes: dict[str, Scalar] = {
        **integers(
            seq_q=problem.seq_q,
            seq_kv=problem.seq_kv,
            heads_q=problem.heads_q,
            group=problem.group,
            tiles=tiles,
            heads=problem.batch * heads,
            together=together,
        ),
        **reach_rows(problem),
        "tiles_q": NONE if launch.plan.direction == "forward" else Integer(value=tiles_of_queries(problem)),
    }
    parameters: dict[str, Parameter] = {
        **descriptors(problem, maps, piece),
        **own,
        name: given(packing is not None, Tensor(of=name)),
        "counter": given(constants.is_dynamic, Tensor(of=abi.WORKSPACE)),
        "aux": aux_row(problem, constants.score),
        **factors,
        "sizes": sizes,
        "C": Constant(value=constants),
    }
    # Four warps are the first partition's; the compiler adds those of the others.
    options = {"num_warps": 4, "maxnreg": registers, "launch_pdl": True, "enable_fp_fusion": True}
    places = launch.multiprocessors * getattr(launch.config, "blocks_per_sm", 1)
    grid = min(blocks, places) if constants.is_persistent else blocks
    return KernelTable(kernel=kernel, grid=grid, options=options, rows=parameters)


def _tables(launch: TritonLaunch) -> tuple[KernelTable, ...]:
    problem, config = launch.problem, launch.config
    # As on its GPUs, also where it is interpreted: with their tanh.
    lowered = lowered_of_pairs(problem, ARCHS[ARCHES[0]])
    table = walking_table(
        launch,
        "attention_forward",
        constants_of(problem, config, ragged=launch.assumed.flag, score=lowered),
        maps={"q": 64, "k": config.tile_n, "v": config.tile_n, "out": 64},
        own={
            "lse": Tensor(of="lse"),
            "tops": tops_row(problem),
            "sinks": sinks_row(problem),
            "lists": list_rows(problem, by_keys=False),
        },
        factors={"scale": factor_row(problem, problem.scale_log2)},
        tile=("q", config.tile_m, config.tile_m),
        registers=config.registers,
    )
    return (table,)


# ---------------------------------------------------------------- configs worth timing

_TILES: Mapping[int, tuple[tuple[int, int, int], ...]] = {
    64: ((192, 128, 2), (192, 64, 2), (192, 64, 3), (128, 128, 2)),
    96: ((192, 64, 2), (128, 128, 2), (128, 64, 2)),
    128: ((192, 64, 2), (128, 128, 2), (128, 64, 2)),
    192: ((128, 64, 2), (128, 64, 1), (128, 128, 1)),
    256: ((128, 64, 1), (128, 32, 2)),
}
"""(tile_m, tile_n, q_slots) by the widest head_dim of a class: one that has as many columns, and registers for as many
keys."""


def class_of(head_dim: int) -> int | None:
    """The widest head_dim of those that are tuned together with this one; None beyond all."""
    return next((widest for widest in _TILES if head_dim <= widest), None)


def _candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[GluonConfig]:
    """Tiles with and without turns, then single changes of the first.

    They have as many stages as the widest head_dim of the class has room for: a rule is for all of it.
    """
    widest = class_of(problem.width)
    if widest is None:
        return
    if problem.head_dim == problem.head_dim_v:
        problem = replace(problem, head_dim=widest, head_dim_v=widest)
    found: list[GluonConfig | None] = []
    for (tile_m, tile_n, q_slots), pingpong in itertools.product(_TILES[widest], (False, True)):
        config = GluonConfig(tile_m=tile_m, tile_n=tile_n, q_slots=q_slots, pingpong=pingpong, lazy_max=True)
        found.append(_deepest(config, problem, arch))
    if (first := found[0]) is not None:
        found += (replace(first, scheduler=scheduler) for scheduler in SCHEDULERS if scheduler != first.scheduler)
        found.append(replace(first, lazy_max=False))
    yield from (it for it in found if it is not None and not why_not_fit(problem, arch, it))


def _deepest(config: GluonConfig, problem: Problem, arch: Arch) -> GluonConfig | None:
    """`config` with as many stages as fit; None where two are too many."""
    tried = (replace(config, stages=stages) for stages in range(STAGES_MAX, 1, -1))
    return next((it for it in tried if not why_not_fit(problem, arch, it)), None)


FAMILY = TritonFamily(
    config=GluonConfig,
    kernels={"attention_forward": "gluon.forward"},
    tables=_tables,
    tiles=lambda problem, config: (config.tile_m, 0),
    areas=lambda problem, config: COUNTER if config.is_dynamic else {},
    fits=why_not_fit,
    settle=_settled,
    candidates=_candidates,
    flag=lambda problem, config: _has_end(problem, config) and not problem.is_banded,
    flag_name="ragged",
    is_gluon=True,
    is_emitted=True,
)
