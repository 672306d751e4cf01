"""A launch of a cuTile kernel, described once, and what those of several families share. Pure Python: no cuTile.

A `KernelLaunch` has a kernel's arrays and numbers by the names of its parameters, in their order, what its code assumes
of them, and the constants that it is compiled for. The kernel, its signature and cuTile's own launch (`compile`), the
driver's arguments and an emitted kernel's Binding (`bind`) and the CPU's call (`launch`) derive from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multiattn.block_mask import KEYS_OF_QUERIES, QUERIES_OF_KEYS
from multiattn.cutile.arrays import ArrayArgument, Assumptions
from multiattn.cutile.kernels.constants import SMALLEST_TILE, BlockTiles, KernelConstants, ListTilesConstants, Widths
from multiattn.layout import Layout
from multiattn.mask import KINDS
from multiattn.operands import CAPTURED
from multiattn.packed import TILE_LISTS
from multiattn.plan import abi, limits
from multiattn.plan.arch import GPU_ARCHS, WARP_THREADS, Arch
from multiattn.plan.backend import Plan, PlannedCall, Variant
from multiattn.plan.config import Config, Rule
from multiattn.plan.schedule import NARROWEST, one_width, saving_widths, three_widths, two_widths
from multiattn.plan.support import Capability, Reason
from multiattn.problem import Problem
from multiattn.score import LoweredScore, lower
from multiattn.sequences import CU_SEQLENS, Indices

IMAGE = abi.Image(threads=1)
"""How every kernel is started. A block is one thread to the caller: the cubin holds host code (x86-64, run by the
driver) that knows how many threads it has and makes the tensor maps of TMA from the arguments. Its shared memory is
static, whatever the size, and needs no permission."""

Grid = tuple[int, int, int]

FORWARD = ("q", "k", "v", "out", "lse")
"""Arrays that every forward has."""

Scalar = float | tuple[int, ...] | tuple[float, ...]
"""A number, fp32, or a tuple of numbers, which are an argument each."""


TILE = limits.powers_of_two(SMALLEST_TILE)
BLOCKS = limits.between(1, 32, None)
WARPS: limits.FieldRule = (lambda it: it in (None, 4, 8), "None, 4 or 8 (others need tileiras 13.5)")
LATENCY = limits.between(1, 10, None)
"""Rules of fields that configs of several families have."""


EVERYWHERE = Capability(
    arches=("cpu", *GPU_ARCHS),
    masks=KINDS,
    sinks=True,
    row_max=True,
    scores=True,
    block_masks=SMALLEST_TILE,
    packed_blocks=SMALLEST_TILE,
    score_gradients=True,
    packing=True,
)
"""Most families take all but caches."""
HEAD_DIM_MAX = 576
"""Columns of the widest rows that a forward was compiled for, those of absorbed latent attention."""


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """One launch."""

    kernel: str
    """Its function's name, from which its symbol is made."""
    module: str
    """The module of `kernels` that makes it."""
    is_64bit: bool
    """Shapes, strides and offsets take 64 bits."""
    blocks_per_sm: int | None = None
    warps: int | None = None
    grid: Grid
    arrays: Mapping[str, ArrayArgument]
    """By parameter."""
    optional: Mapping[str, tuple[ArrayArgument, ...]] = field(default_factory=dict)
    """Those that a launch may not have, by parameter."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    """By parameter."""
    constants: KernelConstants
    overlaps: bool = False
    """It may begin while the kernel before it still runs, and waits for that itself."""
    assumed: Mapping[str, str]
    """By name, all that the code is specialised on beside variant and config (`abi.Binding.constants`)."""

    @property
    def given(self) -> tuple[ArrayArgument, ...]:
        """All arrays that there are, in the order of the parameters."""
        return (*self.arrays.values(), *itertools.chain.from_iterable(self.optional.values()))

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the operands and areas of workspace, by parameter."""
        return tuple(array.tensor for array in self.given)

    def arguments(self, get: Callable[[ArrayArgument], Any]) -> tuple[Any, ...]:
        """The arguments of the Python function, given a tensor for each array."""
        return (
            *map(get, self.arrays.values()),
            *(tuple(map(get, it)) for it in self.optional.values()),
            *self.scalars.values(),
        )

    @property
    def binding(self) -> abi.Binding:
        """The driver's arguments, by cuTile's convention ``cutile_python_v2``.

        An array is its address, its extents and its strides, all of them integers of one width, constant ones included.
        """
        kind: abi.Kind = "i64" if self.is_64bit else "i32"
        arguments: list[abi.Argument] = []
        for array in self.given:
            arguments.append(abi.Pointer(tensor=array.tensor))
            numbers = (*array.layout.shape, *array.layout.strides)
            arguments += [abi.Number(kind=kind, value=number) for number in numbers]
        for value in self.scalars.values():
            for number in value if isinstance(value, tuple) else (value,):
                arguments.append(abi.Number(kind="i32" if isinstance(number, int) else "f32", value=number))
        return abi.Binding(arguments=tuple(arguments), grid=self.grid, image=IMAGE, constants=self.assumed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked(PlannedCall):
    """A launch with the assumptions of a forward's code that is there; nothing where code is made for the plan."""

    emitted: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A room of kernels; `multiattn.plan.backend.Variant` says more of `settle` and `fits`."""

    summary: str = ""
    """The variant's, where there is but one."""
    config: type[Config]
    capability: Capability
    is_deterministic: bool = True
    launches: Callable[[Asked], tuple[KernelLaunch, ...]]
    """The kernels of a launch, in order; ValueError where there is no grid of so many blocks."""
    fits: Callable[[Problem, Arch, Any], tuple[Reason, ...]]
    candidates: Callable[[Variant, Problem, Arch], Iterable[Config]]
    """Configs worth timing on a GPU, whether they fit or not."""
    candidates_max: int | None = None
    """The most of those that fit."""
    settle: Callable[[Problem, Arch, Any], Config] = lambda problem, arch, config: config
    areas: tuple[str, ...] = ()
    """Workspace among `Problem.layouts`."""
    lists: tuple[str, ...] = ()
    """Workspace that a packed batch adds."""
    own_areas: Callable[[Problem, Any], Mapping[str, Layout]] = lambda problem, config: {}
    """Workspace whose size a config decides, by name."""
    is_emitted: bool = False
    """The loader of emitted kernels can launch it: it has no areas."""

    def variant(self, name: str, rules: tuple[Rule[Any], ...]) -> Variant:
        """The variant of a family that has one alone."""
        return Variant(
            name=name,
            summary=self.summary,
            capability=self.capability,
            config_type=self.config,
            rules=rules,
            deterministic=self.is_deterministic,
            workspace=self.workspace,
            settle=self.settle,
            fits=self.fits,
        )

    def all_areas(self, problem: Problem, config: Any) -> dict[str, Layout]:
        """The workspace of a launch, by name."""
        known = (*self.areas, *(self.lists if problem.packing is not None else ()))
        return {**{name: problem.layouts[name] for name in known}, **self.own_areas(problem, config)}

    def workspace(self, problem: Problem, config: Config | None) -> int:
        """As `Variant.workspace`."""
        return sum(layout.size_bytes for layout in self.all_areas(problem, config).values())


def needs_64bit(problem: Problem, *, backward: bool = False) -> bool:
    """True if an element of some tensor, or a step along a dimension, is 2^31 or more elements away from its first.

    The stride of a dimension of one element counts, too: it is an argument like any other.
    """
    known, read = problem.layouts, (*FORWARD, *Indices._fields)
    tensors = [it for name, it in known.items() if backward or name in read or name.startswith(CAPTURED)]
    lasts = [sum((size - 1) * step for size, step in zip(it.shape, it.strides, strict=True)) for it in tensors]
    return max(*lasts, *(step for it in tensors for step in it.strides)) > abi.INT32_MAX


def lowered_of(plan: Plan) -> LoweredScore | None:
    """The program of a plan's scores and its mask."""
    score = plan.problem.score
    if score is None:
        return None
    apart = score.scores is not None and plan.direction == "backward"
    return lower(score.program, approximate=plan.arch.is_gpu, apart=apart)


def aux_of(plan: Plan, assumed: Assumptions) -> tuple[tuple[ArrayArgument, ...], tuple[float, ...]]:
    """The arrays and the numbers that the program reads; enters what is assumed of them."""
    lowered, score = lowered_of(plan), plan.problem.score
    if lowered is None or score is None:
        return (), ()
    assumed.exactly(score=score.program.digest)
    given = score.arguments(lowered, plan.problem.scale).values()
    return assumed.all_captured(given), tuple(it for it in given if isinstance(it, float))


def has_positive_strides(problem: Problem) -> bool:
    """True if TMA can read q, k and v: it wants positive strides."""
    return 0 not in (*problem.strides_q, *problem.strides_k, *problem.strides_v)


def reach_of(problem: Problem) -> tuple[int, ...]:
    """The numbers of a two-sided mask; other kernels have none."""
    return problem.reach if problem.is_two_sided else ()


def order_of(problem: Problem, together: Together, heads: int | None = None) -> tuple[int, ...]:
    """The numbers of a kernel's `Order`. `heads`: those whose tiles it has, if they are not those of q."""
    heads = problem.heads_q if heads is None else heads
    of_entry = together.heads // together.entries
    numbers = (together.entries.bit_length() - 1, of_entry, heads // of_entry)
    divisors = itertools.chain.from_iterable(map(reciprocal, (heads, problem.group)))
    return (together.heads, *reciprocal(together.heads), *numbers, *divisors)


# ---------------------------------------------------------------- grids

MAX_GRID_X = 2**24 - 1  # cuda.tile's own limit for each dimension
MAX_GRID_Y = 2**16 - 1  # CUDA's
MAX_BLOCKS = 2**31 - 1
MAX_QUOTIENT = 2**29
"""More than any number that is divided by a `reciprocal`."""


def factor_grid(blocks: int) -> Grid | None:
    """A grid of exactly so many blocks, in x and y; None if there is none, or its blocks need more than 31 bits."""
    if blocks > MAX_BLOCKS:
        return None
    for y in range(max(1, -(-blocks // MAX_GRID_X)), MAX_GRID_Y + 1):
        if blocks % y == 0:
            return blocks // y, y, 1
    return None


def grid_check(what: str, blocks: int, problem: Problem) -> limits.Check:
    """A check that there is a grid of so many blocks."""
    allowed = "a grid within 2^24 x 2^16, and fewer than 2^31 blocks"
    return factor_grid(blocks) is not None, f"{what} for {problem}", allowed


def reciprocal(divisor: int) -> tuple[int, int]:
    """A factor of 31 bits, and a shift: ``n * factor >> shift`` is ``n // divisor`` for n below `MAX_QUOTIENT`.

    Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (1994), Theorem 4.2.
    """
    shift = 29 + divisor.bit_length()
    return -(-(1 << shift) // divisor), shift


def divisor_near(wanted: int, heads: int) -> int:
    """The number of heads that advance together: of those that divide `heads` the nearest by ratio, else the smaller.

    Of 11 heads it is 11, not 1, where 8 are wanted: one head at a time costs masked problems up to a tenth.
    """
    divisors = (it for low in range(1, math.isqrt(heads) + 1) if heads % low == 0 for it in (low, heads // low))
    return min(divisors, key=lambda count: (max(wanted / count, count / wanted), count))


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """How many heads advance together; `entries`: those of so many whole batch entries, a power of two."""

    heads: int
    entries: int = 1


# ---------------------------------------------------------------- lists of blocks and of tiles


def grid_of_list(tiles: int, heads: int, together: int) -> Grid:
    """A block for each of a packed batch's tiles: entries times heads that advance together in x, sections in y."""
    return tiles // heads * together, heads // together, 1


LIST_BLOCKS = 32
"""The most blocks that share the tiles of a group of sequences."""
ENTRIES_OF_BLOCK = 16
"""Entries for which one of them is worth it. A guess, not measured."""
LIST_GROUPS = 128
"""Groups of which only one block has each."""


def tile_lists(plan: Plan, *, query_tile: int = 0, key_tile: int = 0) -> tuple[KernelLaunch, ...]:
    """The launch that comes before those of a packed batch, with the rows of their tiles; none for another problem.

    Its grid is blocks that share a group's tiles, groups of sequences, and lists. Rows around all sequences are two
    sequences more.
    """
    problem, packing = plan.problem, plan.problem.packing
    if packing is None:
        return ()
    assumed = Assumptions(problem=problem, constants={"dtype": problem.dtype})
    constants = ListTilesConstants(
        query_tile=query_tile, key_tile=key_tile, last_first=problem.is_banded, cut=problem.blocks is not None
    )
    wanted = [name for name, tile in zip(TILE_LISTS, (query_tile, key_tile), strict=True) if tile]
    rows = (problem.seq_q, problem.seq_kv)
    room = [packing.tiles_max(it, tile) if tile else 0 for it, tile in zip(rows, (query_tile, key_tile), strict=True)]
    groups = (packing.sequences + 1) // constants.group + 1
    blocks = max(1, min(LIST_BLOCKS, -(-max(room) // ENTRIES_OF_BLOCK), LIST_GROUPS // groups))
    return (
        KernelLaunch(
            kernel="list_tiles",
            module="packed",
            is_64bit=False,
            warps=8,
            grid=(blocks, groups, len(wanted)),
            arrays={},
            optional={"starts": assumed.all_captured(CU_SEQLENS), "lists": assumed.all_captured(wanted)},
            scalars={"sizes": (*rows, *room, *packing.longest(*rows))},
            constants=constants,
            assumed=assumed.constants,
        ),
    )


def widths_of(problem: Problem, *, split: bool = False, tail: bool = False) -> dict[str, Widths]:
    """The tiles of rows, by names of constants: in two parts with `split`, in three where `tail` saves columns.

    The narrower of both widths is in parts only where that saves columns.
    """
    found = {}
    for name, width in (("qk", problem.head_dim), ("vo", problem.head_dim_v)):
        two = two_widths(width) if width == problem.width else saving_widths(width)
        three = three_widths(width) if tail else None
        first, *rest = (three or two if split else None) or (one_width(width),)
        more = dict(zip(("tail_d", "last_d"), rest, strict=False))
        found[name] = Widths(head_dim=width, tile_d=first, **more)
    return found


def split_check(problem: Problem, config: Any) -> limits.Check:
    """Tiles of two parts are of a head_dim that has two."""
    allowed = not config.split_head_dim or two_widths(problem.width) is not None
    return allowed, f"split_head_dim=True at {problem.widths}", f"more than {NARROWEST}"


def tiles_of_blocks(problem: Problem, names: Sequence[str], tile_m: int, tile_n: int) -> BlockTiles | None:
    """How tiles lie in the blocks of the lists `names`."""
    if (blocks := problem.blocks) is None:
        return None
    queries, keys = blocks.queries // tile_m, blocks.keys // tile_n
    own, walked = (queries, keys) if names == KEYS_OF_QUERIES else (keys, queries)
    return BlockTiles(own=own, walked=walked, has_full=blocks.has_full)


def within_blocks(problem: Problem, config: Any) -> Any:
    """The config, with a block mask cut to tiles each of which lies in one block: sizes are powers of two."""
    if (blocks := problem.blocks) is None:
        return config
    more = {"dq": within_blocks(problem, config.dq)} if hasattr(config, "dq") else {}
    tile_m, tile_n = math.gcd(config.tile_m, blocks.queries), math.gcd(config.tile_n, blocks.keys)
    return replace(config, tile_m=tile_m, tile_n=tile_n, **more)


SCORES_ADDED_BY_THREAD, USUAL_WARPS = 16, 4


def cut_of(problem: Problem, config: Any) -> Any:
    """The config of a backward, cut to the blocks of a block mask.

    Also cut where each score is added to an element of a 16-bit tensor's gradient: tileiras 13.4 ends in an error
    ("Invalid use-def chain in LoopSchedule") for more than 16 scores a thread.
    """
    if _adds_each_score(problem):
        most = SCORES_ADDED_BY_THREAD * WARP_THREADS * (config.warps or USUAL_WARPS)
        config = replace(config, tile_m=max(SMALLEST_TILE, min(config.tile_m, most // config.tile_n)))
    return within_blocks(problem, config)


def _adds_each_score(problem: Problem) -> bool:
    """True if the gradient of a captured tensor of 16 bits takes an atomic addition for each score."""
    if (score := problem.score) is None or not score.gradients:
        return False
    lowered = lower(score.program, apart=score.scores is not None)
    return any(
        not it.is_exclusive and not it.summed and score.program.tensors[it.load.value].dtype.itemsize == 2
        for it in lowered.gradients_of(score.gradients)
    )


def has_ragged_keys(problem: Problem, tile_n: int) -> bool:
    """True if the last block of keys needs a mask: with a block mask, if one that it may list does."""
    if problem.packing is not None:
        return True
    if problem.blocks is None:
        return problem.seq_kv % tile_n != 0
    return _rows_listed(problem, KEYS_OF_QUERIES, problem.blocks.keys) > problem.seq_kv


def has_ragged_queries(problem: Problem, tile_m: int) -> bool:
    """True if the last block of queries needs a mask, as that of keys."""
    if problem.packing is not None:
        return problem.has_score
    if problem.blocks is None:
        return problem.has_score and problem.seq_q % tile_m != 0
    return _rows_listed(problem, QUERIES_OF_KEYS, problem.blocks.queries) > problem.seq_q


def _rows_listed(problem: Problem, names: Sequence[str], size: int) -> int:
    """Rows that the lists can name, in blocks of a size: a block mask may be longer than its sequences."""
    return problem.lists_of(names).columns * size
