"""The launches of every cuTile kernel, each described once. Pure Python: no cuTile.

A `KernelLaunch` has a kernel's arrays and numbers by the names of its parameters, in their order, what its code assumes
of them, and the constants that it is compiled for. The kernel, its signature and cuTile's own launch (`compile`), the
driver's arguments and an emitted kernel's Binding (`bind`) and the CPU's call (`launch`) derive from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multiattn.block_mask import KEYS_OF_QUERIES, QUERIES_OF_KEYS
from multiattn.cutile import configs
from multiattn.cutile.arrays import ArrayArgument, array_of, captured_of, gradients_of, lists_of
from multiattn.cutile.configs import CutileConfig, Grid, OnePassConfig, Together, TwoPassConfig
from multiattn.cutile.kernels.constants import (
    BackwardConstants,
    BlockTiles,
    ForwardConstants,
    KernelConstants,
    ListTilesConstants,
    QueryGradsConstants,
    RowConstants,
    RowDeltaConstants,
)
from multiattn.cutile.ladder import STEPS
from multiattn.operands import CAPTURED
from multiattn.packed import TILE_LISTS
from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.plan.schedule import key_tiles, most_multiprocessors, one_width, query_tiles
from multiattn.problem import Problem
from multiattn.score import LoweredScore, lower
from multiattn.validate import LOG2_E

AREAS: Mapping[str, tuple[str, ...]] = {
    "atomic": ("delta", "dq_sum"),
    "two_pass": ("delta",),
    **dict.fromkeys(STEPS, ()),
}
"""Arrays that are workspace, by variant."""
LISTS: Mapping[str, tuple[str, ...]] = {
    "atomic": TILE_LISTS[1:],
    "two_pass": TILE_LISTS,
    **dict.fromkeys(STEPS, TILE_LISTS[:1]),
}
"""Those that a packed batch adds."""

IMAGE = abi.Image(threads=1)
"""How every kernel is started. A block is one thread to the caller: the cubin holds host code (x86-64, run by the
driver) that knows how many threads it has and makes the tensor maps of TMA from the arguments. Its shared memory is
static, whatever the size, and needs no permission."""

_FORWARD = ("q", "k", "v", "out", "lse")
DIAGONAL = "seq_kv_less_seq_q"
"""Name of the difference of lengths, which a kernel that begins at the diagonal takes for a multiple of tile_m."""


Scalar = float | tuple[int, ...] | tuple[float, ...]
"""A number, fp32, or a tuple of numbers, which are an argument each."""


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """One launch."""

    kernel: str
    """Its function's name, from which its symbol is made."""
    is_64bit: bool
    """Shapes, strides and offsets take 64 bits."""
    occupancy: int | None = None
    num_worker_warps: int | None = None
    grid: Grid
    arrays: Mapping[str, ArrayArgument]
    """By parameter."""
    optional: Mapping[str, tuple[ArrayArgument, ...]] = field(default_factory=dict)
    """Those that a launch may not have, by parameter."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    """By parameter."""
    constants: KernelConstants
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


def areas_of(plan: Plan) -> tuple[str, ...]:
    """Arrays that are workspace of a plan's launch."""
    return (*AREAS[plan.variant], *(LISTS[plan.variant] if plan.problem.packing is not None else ()))


def launches_of(
    plan: Plan, *, has_dlse: bool = False, multiprocessors: int | None = None, emitted: Mapping[str, str] | None = None
) -> tuple[KernelLaunch, ...]:
    """The launches of a plan, in order; ValueError where there is no grid of so many blocks.

    Args:
        plan: of either direction.
        has_dlse: whether a backward has a dlse.
        multiprocessors: of the device; None for the largest product of the arch.
        emitted: of a forward, what code that is there assumes; None for code that is made for the plan.
    """
    if plan.direction == "forward":
        return _forward(plan, multiprocessors or most_multiprocessors(plan.arch), emitted or {})
    return _one_pass(plan, has_dlse) if "dq_sum" in AREAS[plan.variant] else _two_passes(plan, has_dlse)


def needs_64bit(problem: Problem, *, backward: bool = False) -> bool:
    """True if an element of some tensor, or a step along a dimension, is 2^31 or more elements away from its first.

    The stride of a dimension of one element counts, too: it is an argument like any other.
    """
    known = problem.layouts
    tensors = [it for name, it in known.items() if backward or name in _FORWARD or name.startswith(CAPTURED)]
    lasts = [sum((size - 1) * step for size, step in zip(it.shape, it.strides, strict=True)) for it in tensors]
    return max(*lasts, *(step for it in tensors for step in it.strides)) > abi.INT32_MAX


def _tile_lists(plan: Plan, *, query_tile: int = 0, key_tile: int = 0) -> tuple[KernelLaunch, ...]:
    """The launch that comes before those of a packed batch, with the rows of their tiles; none for another problem."""
    problem, packing = plan.problem, plan.problem.packing
    if packing is None:
        return ()
    assumed = {"dtype": problem.dtype}
    constants = ListTilesConstants(query_tile=query_tile, key_tile=key_tile, last_first=problem.is_banded)
    wanted = {name: it for name, it in zip(TILE_LISTS, (query_tile, key_tile), strict=True) if it}
    rows = (problem.seq_q, problem.seq_kv)
    room = [packing.tiles_max(it, tile) if tile else 0 for it, tile in zip(rows, (query_tile, key_tile), strict=True)]
    return (
        KernelLaunch(
            kernel="list_tiles",
            is_64bit=False,
            num_worker_warps=8,
            grid=configs.list_grid(packing.sequences, max(room), len(wanted), constants.group),
            arrays={},
            optional={
                "starts": tuple(captured_of(assumed, {}, problem.layouts[it], it) for it in problem.cu_seqlens),
                "lists": tuple(captured_of(assumed, {}, problem.layouts[it], it) for it in wanted),
            },
            scalars={"sizes": (*rows, *room)},
            constants=constants,
            assumed=assumed,
        ),
    )


def _lists(
    assumed: dict[str, str], emitted: Mapping[str, str], problem: Problem, names: Sequence[str], tiles: str
) -> tuple[ArrayArgument, ...]:
    """The lists `names` of a block mask, or `tiles` of a packed batch; there is never both."""
    if problem.packing is None:
        return lists_of(assumed, emitted, problem, names)
    return (captured_of(assumed, emitted, problem.layouts[tiles], tiles),)


def _lowered(plan: Plan) -> LoweredScore | None:
    """The program of a plan's scores and its mask."""
    score = plan.problem.score
    if score is None:
        return None
    apart = score.scores is not None and plan.direction == "backward"
    return lower(score.program, approximate=plan.arch.is_gpu, apart=apart)


def _aux(
    plan: Plan, assumed: dict[str, str], emitted: Mapping[str, str]
) -> tuple[tuple[ArrayArgument, ...], tuple[float, ...]]:
    """The arrays and the numbers that the program reads; enters what is assumed of them."""
    lowered, score = _lowered(plan), plan.problem.score
    if lowered is None or score is None:
        return (), ()
    abi.exactly(assumed, score=score.program.digest)
    given = score.arguments(lowered, plan.problem.scale).values()
    captured = tuple(captured_of(assumed, emitted, plan.problem.layouts[it], it) for it in given if isinstance(it, str))
    return captured, tuple(it for it in given if isinstance(it, float))


def has_positive_strides(problem: Problem) -> bool:
    """True if TMA can read q, k and v: it wants positive strides."""
    return 0 not in (*problem.strides_q, *problem.strides_k, *problem.strides_v)


def _reach(problem: Problem) -> tuple[int, ...]:
    """The numbers of a two-sided mask; other kernels have none."""
    return problem.reach if problem.is_two_sided else ()


# ---------------------------------------------------------------- forward


_OF_STEP = ("exp2", "flush_to_zero", "scale_after_max", "k_transposed", "approximate_division", "ln_base")
_OF_CONFIG = (
    "tile_m", "tile_n", "k_latency", "v_latency", "pipeline", "q_in_registers",
)  # fmt: skip
"""Constants of the kernel that a rung and a config have by the same name; a rung's others limit the config."""


def _forward(plan: Plan, multiprocessors: int, emitted: Mapping[str, str]) -> tuple[KernelLaunch, ...]:
    problem, config, step = plan.problem, plan.config, STEPS[plan.variant].step
    assert isinstance(config, CutileConfig)
    config = configs.of_packed(problem, configs.within_blocks(problem, config))
    assumed: dict[str, str] = {}
    abi.exactly(assumed, dtype=problem.dtype, head_dim=problem.head_dim, mask=problem.band.kind)
    abi.exactly(assumed, scale_sign=problem.scale_sign)
    if problem.has_sinks:
        abi.exactly(assumed, sinks="one a head")
    captured, derived = _aux(plan, assumed, emitted)
    masked = abi.flag(assumed, emitted, "masked", problem.is_banded or _has_ragged_keys(problem, config.tile_n))
    aligned_to = config.tile_m if configs.begins_at_diagonal(problem, config) else 1
    diagonal = abi.multiple(assumed, emitted, DIAGONAL, aligned_to, problem.seq_kv - problem.seq_q)
    lazy_max = configs.keeps_maxima(problem, config)
    if problem.is_two_sided:  # one code for every window: how wide it is may ask for another, but none is wrong
        lazy_max = abi.settle(assumed, emitted, "lazy_max", str(lazy_max), lambda there: True) == "True"
    together = _together(assumed, emitted, problem, configs.together_of(problem, config))
    grouped = abi.flag(assumed, emitted, "grouped", problem.heads_q != problem.heads_kv)
    tma = not abi.flag(assumed, emitted, "no_tma", not has_positive_strides(problem))
    linear = abi.flag(assumed, emitted, "linear_grid", configs.is_linear(problem, config, together))
    grid = configs.grid_of(problem, config, together, multiprocessors, linear=linear)
    if grid is None:
        raise ValueError(f"no grid for {plan}")
    tile_d, tail_d = configs.widths_of(problem, config)
    launch = KernelLaunch(
        kernel="forward",
        is_64bit=abi.flag(assumed, emitted, "int64", needs_64bit(problem)),
        occupancy=config.occupancy,
        num_worker_warps=config.num_worker_warps,
        grid=grid,
        arrays={name: array_of(assumed, emitted, problem, name) for name in _FORWARD},
        optional={
            "sinks": (array_of(assumed, emitted, problem, "sinks"),) if problem.has_sinks else (),
            "captured": captured,
            "listed": _lists(assumed, emitted, problem, KEYS_OF_QUERIES, "query_list"),
        },
        scalars={
            "scale": problem.scale_log2 if step.exp2 else problem.scale_log2 / LOG2_E,
            "reach": _reach(problem),
            "derived": derived,
        },
        constants=ForwardConstants(
            tile_d=tile_d,
            tail_d=tail_d,
            banded=problem.is_banded,
            two_sided=problem.is_two_sided,
            masked=masked,
            heads_together=together.heads,
            spanning=together.spanning,
            has_sinks=problem.has_sinks,
            grouped=grouped,
            linear_grid=linear,
            sign=problem.scale_sign,
            tma=tma,
            **{name: getattr(step, name) for name in _OF_STEP},
            **{name: getattr(config, name) for name in _OF_CONFIG},
            lazy_max=lazy_max,
            headroom=configs.HEADROOM[problem.dtype],
            diagonal_first=diagonal > 1,
            static_grid=config.scheduler == "static",
            score=_lowered(plan),
            blocks=_tiles_of_blocks(problem, KEYS_OF_QUERIES, config.tile_m, config.tile_n),
            packed=problem.packing is not None,
        ),
        assumed=assumed,
    )
    return (*_tile_lists(plan, query_tile=config.tile_m), launch)


def _tiles_of_blocks(problem: Problem, names: Sequence[str], tile_m: int, tile_n: int) -> BlockTiles | None:
    """How tiles lie in the blocks of the lists `names`."""
    if (blocks := problem.blocks) is None:
        return None
    queries, keys = blocks.queries // tile_m, blocks.keys // tile_n
    own, walked = (queries, keys) if names == KEYS_OF_QUERIES else (keys, queries)
    return BlockTiles(own=own, walked=walked, has_full=blocks.has_full)


def _has_ragged_keys(problem: Problem, tile_n: int) -> bool:
    """True if the last block of keys needs a mask: with a block mask, if one that it may list does."""
    if problem.packing is not None:
        return True
    if problem.blocks is None:
        return problem.seq_kv % tile_n != 0
    return _listed_rows(problem, KEYS_OF_QUERIES, problem.blocks.keys) > problem.seq_kv


def _has_ragged_queries(problem: Problem, tile_m: int) -> bool:
    """True if the last block of queries needs a mask, as that of keys."""
    if problem.packing is not None:
        return problem.has_score
    if problem.blocks is None:
        return problem.has_score and problem.seq_q % tile_m != 0
    return _listed_rows(problem, QUERIES_OF_KEYS, problem.blocks.queries) > problem.seq_q


def _listed_rows(problem: Problem, names: Sequence[str], size: int) -> int:
    """Rows that the lists can name, in blocks of a size: a block mask may be longer than its sequences."""
    return problem.lists_of(names).columns * size


def _together(assumed: dict[str, str], emitted: Mapping[str, str], problem: Problem, wanted: Together) -> Together:
    """As many heads together as the code has, whatever these tensors would ask for: both numbers must divide theirs."""
    heads, pairs = (1, wanted.heads) if wanted.spanning else (wanted.heads, 1)
    spanning = abi.settle(assumed, emitted, "spanning", str(wanted.spanning), lambda there: True) == "True"
    heads = abi.multiple(assumed, emitted, "heads_q", heads, problem.heads_q)
    pairs = abi.multiple(assumed, emitted, "batch_heads", pairs, problem.batch * problem.heads_q)
    return Together(heads=pairs if spanning else heads, spanning=spanning)


# ---------------------------------------------------------------- backward


_NAMES: Mapping[str, str] = {
    "query_grads": "q k v out lse dout dlse delta dq captured listed score_factor grad_factor reach derived",
    "key_grads": "q k v lse dout delta dk dv captured listed dcaptured score_factor grad_factor reach derived",
    "row_deltas": "out dout dlse delta dq_sum",
    "all_grads": "q k v lse dout delta dq_sum dk dv captured listed dcaptured score_factor grad_factor reach derived",
    "round_query_grads": "dq_sum dq grad_factor",
}
"""The parameters of each kernel, in order: arrays, a tuple of them, then numbers."""


def _two_passes(plan: Plan, has_dlse: bool) -> tuple[KernelLaunch, ...]:
    problem, config = plan.problem, plan.config
    assert isinstance(config, TwoPassConfig)
    config = configs.within_blocks(problem, config)
    constants = QueryGradsConstants(
        **_products(plan, KEYS_OF_QUERIES, config.dq_tile_m, config.dq_tile_n),
        heads_together=configs.divisor_near(config.dq_heads_together, problem.heads_q),
        latency=config.dq_latency,
        has_dlse=has_dlse,
    )
    tiles, hints = query_tiles(problem, config.dq_tile_m), (config.dq_occupancy, config.dq_num_worker_warps)
    return (
        *_tile_lists(plan, query_tile=config.dq_tile_m, key_tile=config.tile_n),
        _backward(plan, "query_grads", tiles, constants, *hints),
        _of_keys(plan, config, "key_grads"),
    )


def _one_pass(plan: Plan, has_dlse: bool) -> tuple[KernelLaunch, ...]:
    problem, config = plan.problem, plan.config
    assert isinstance(config, OnePassConfig)
    config = configs.within_blocks(problem, config)
    tile_d = one_width(problem.head_dim)
    tiles = -(-problem.seq_q // configs.ROW_TILE) * problem.heads_q * problem.batch  # also of a packed batch
    delta = RowDeltaConstants(tile_m=configs.ROW_TILE, tile_d=tile_d, has_dlse=has_dlse)
    rows = RowConstants(tile_m=configs.ROW_TILE, tile_d=tile_d)
    return (
        *_tile_lists(plan, key_tile=config.tile_n),
        _backward(plan, "row_deltas", tiles, delta, configs.ROW_OCCUPANCY),
        _of_keys(plan, config, "all_grads"),
        _backward(plan, "round_query_grads", tiles, rows),
    )


def _of_keys(plan: Plan, config: OnePassConfig, kernel: str) -> KernelLaunch:
    """The launch in which a block owns a tile of keys."""
    problem = plan.problem
    constants = BackwardConstants(
        **_products(plan, QUERIES_OF_KEYS, config.tile_m, config.tile_n),
        ragged_queries=_has_ragged_queries(problem, config.tile_m),
        gradients=problem.score.gradients if problem.score is not None else (),
        heads_together=configs.divisor_near(config.heads_together, problem.heads_kv),
        latency=config.latency,
    )
    tiles = key_tiles(problem, config.tile_n)
    return _backward(plan, kernel, tiles, constants, config.occupancy, config.num_worker_warps)


def _products(plan: Plan, names: Sequence[str], tile_m: int, tile_n: int) -> dict[str, Any]:
    """The constants of a kernel with products that follow from its tile; `names`: its lists of a block mask."""
    problem = plan.problem
    own_keys = problem.packing is not None or problem.seq_kv % tile_n != 0
    return {
        "tile_m": tile_m,
        "tile_n": tile_n,
        "tile_d": one_width(problem.head_dim),
        "banded": problem.is_banded,
        "two_sided": problem.is_two_sided,
        "ragged": _has_ragged_keys(problem, tile_n) if names == KEYS_OF_QUERIES else own_keys,
        "tma": has_positive_strides(problem),
        "tma_columns": problem.packing is None and problem.seq_q % 4 == 0,
        "score": _lowered(plan),
        "blocks": _tiles_of_blocks(problem, names, tile_m, tile_n),
        "packed": problem.packing is not None,
    }


def _backward(
    plan: Plan,
    kernel: str,
    tiles: int,
    constants: KernelConstants,
    occupancy: int | None = None,
    num_worker_warps: int | None = None,
) -> KernelLaunch:
    """One launch. Without a dlse a kernel is given lse in its place, and does not read it."""
    problem, names = plan.problem, _NAMES[kernel].split()
    grid = configs.factor_grid(tiles)
    if isinstance(constants, BackwardConstants) and constants.packed:
        heads = problem.heads_kv if "dcaptured" in names else problem.heads_q
        grid = configs.grid_of_list(tiles, heads, constants.heads_together)
    if grid is None:
        raise ValueError(f"no grid of {tiles} blocks")
    assumed = {"dtype": problem.dtype}
    captured, derived = _aux(plan, assumed, {}) if "captured" in names else ((), ())
    optional = {"captured": captured} if "captured" in names else {}
    if "listed" in names:
        of_keys = "dcaptured" in names
        own = (QUERIES_OF_KEYS, "key_list") if of_keys else (KEYS_OF_QUERIES, "query_list")
        optional["listed"] = _lists(assumed, {}, problem, *own)
        if of_keys:
            optional["dcaptured"] = gradients_of(assumed, {}, problem, _lowered(plan))
    scalars: dict[str, Scalar] = {
        "score_factor": problem.score_factor,
        "grad_factor": problem.grad_factor,
        "reach": _reach(problem),
        "derived": derived,
    }
    operands = {name: name for name in names if name in problem.layouts}
    if "dlse" in operands and not getattr(constants, "has_dlse", False):
        operands["dlse"] = "lse"
    return KernelLaunch(
        kernel=kernel,
        is_64bit=needs_64bit(problem, backward=True),
        occupancy=occupancy,
        num_worker_warps=num_worker_warps,
        grid=grid,
        arrays={name: array_of(assumed, {}, problem, operand) for name, operand in operands.items()},
        optional=optional,
        scalars={name: scalars[name] for name in names if name in scalars},
        constants=constants,
        assumed=assumed,
    )
