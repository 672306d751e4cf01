"""The launches of every cuTile kernel, each described once (`launches`). Pure Python: no cuTile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from multiattn.block_mask import KEYS_OF_QUERIES, QUERIES_OF_KEYS
from multiattn.cutile import configs, decode_configs, decode_table
from multiattn.cutile.arrays import ArrayArgument, any_size_of, array_of, captured_of, gradients_of, lists_of
from multiattn.cutile.configs import CutileConfig, OnePassConfig, StoredConfig, Together, TwoPassConfig
from multiattn.cutile.decode_configs import SplitKeysConfig
from multiattn.cutile.kernels.constants import (
    BackwardConstants,
    BlockTiles,
    ForwardConstants,
    KernelConstants,
    ListTilesConstants,
    QueryGradsConstants,
    RowConstants,
    RowDeltaConstants,
    StaggeredConstants,
)
from multiattn.cutile.ladder import STEPS
from multiattn.cutile.launches import (
    FORWARD,
    KernelLaunch,
    Scalar,
    aux_of,
    lowered_of,
    needs_64bit,
    order_of,
    reach_of,
)
from multiattn.layout import Layout
from multiattn.packed import TILE_LISTS
from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.plan.schedule import key_tiles, most_multiprocessors, one_width, query_tiles
from multiattn.problem import Problem
from multiattn.sequences import CU_SEQLENS
from multiattn.validate import LOG2_E

AREAS: Mapping[str, tuple[str, ...]] = {
    "atomic": ("delta", "dq_sum"),
    "stored": ("delta",),
    "two_pass": ("delta",),
    **dict.fromkeys((*STEPS, decode_configs.NAME), ()),
}
"""Arrays that are workspace, by variant."""
LISTS: Mapping[str, tuple[str, ...]] = {
    "atomic": TILE_LISTS[1:],
    "two_pass": TILE_LISTS,
    **dict.fromkeys(STEPS, TILE_LISTS[:1]),
}
"""Those that a packed batch adds."""

COLUMN_UNIT = 4
"""Rows of fp32 numbers, of a multiple of which TMA reads parts. Without it a backward takes 3 to 13 % longer (H200
2026-11-26, N=4096, D=64 to 256), so that other lengths of queries have code of their own."""
DIAGONAL = "seq_kv_less_seq_q"
"""Name of the difference of lengths, which a kernel that begins at the diagonal takes for a multiple of tile_m."""


def areas_of(plan: Plan) -> tuple[str, ...]:
    """Arrays that are workspace of a plan's launch."""
    return (*AREAS[plan.variant], *(LISTS[plan.variant] if plan.problem.packing is not None else ()))


def own_areas_of(plan: Plan) -> Mapping[str, Layout]:
    """Those whose sizes a config decides, with their layouts."""
    config = plan.config
    if isinstance(config, StoredConfig):
        return {"ds": configs.stored_layout(plan.problem, config)}
    return decode_configs.areas_of(plan.problem, config.splits) if isinstance(config, SplitKeysConfig) else {}


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
    if plan.variant == decode_configs.NAME:
        return decode_table.launches_of(plan, emitted or {})
    if plan.direction == "forward":
        return _forward(plan, multiprocessors or most_multiprocessors(plan.arch), emitted or {})
    if isinstance(plan.config, StoredConfig):
        return _stored(plan, plan.config, has_dlse)
    return _one_pass(plan, has_dlse) if "dq_sum" in AREAS[plan.variant] else _two_passes(plan, has_dlse)


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
                "starts": tuple(captured_of(assumed, {}, problem.layouts[it], it) for it in CU_SEQLENS),
                "lists": tuple(captured_of(assumed, {}, problem.layouts[it], it) for it in wanted),
            },
            scalars={"sizes": (*rows, *room, *packing.longest(*rows))},
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
    captured, derived = aux_of(plan, assumed, emitted)
    masked = abi.flag(assumed, emitted, "masked", problem.is_banded or _has_ragged_keys(problem, config.tile_n))
    aligned_to = config.tile_m if configs.begins_at_diagonal(problem, config) else 1
    diagonal = abi.multiple(assumed, emitted, DIAGONAL, aligned_to, problem.seq_kv - problem.seq_q)
    lazy_max = configs.keeps_maxima(problem, config)
    if problem.is_two_sided:  # one code for every window: how wide it is may ask for another, but none is wrong
        lazy_max = abi.settle(assumed, emitted, "lazy_max", str(lazy_max), lambda there: True) == "True"
    together = configs.together_of(problem, config)
    tma = not abi.flag(assumed, emitted, "no_tma", not configs.has_positive_strides(problem))
    linear = abi.flag(assumed, emitted, "linear_grid", configs.is_linear(problem, config, together))
    grid = configs.grid_of(problem, config, together, multiprocessors, linear=linear)
    if grid is None:
        raise ValueError(f"no grid for {plan}")
    tile_d, tail_d, last_d = configs.widths_of(problem, config)
    launch = KernelLaunch(
        kernel="forward",
        is_64bit=abi.flag(assumed, emitted, "int64", needs_64bit(problem)),
        occupancy=config.occupancy,
        num_worker_warps=config.num_worker_warps,
        grid=grid,
        arrays={name: array_of(assumed, emitted, problem, name) for name in FORWARD},
        optional={
            "sinks": (array_of(assumed, emitted, problem, "sinks"),) if problem.has_sinks else (),
            "captured": captured,
            "listed": _lists(assumed, emitted, problem, KEYS_OF_QUERIES, "query_list"),
        },
        scalars={
            "scale": problem.scale_log2 if step.exp2 else problem.scale_log2 / LOG2_E,
            "reach": reach_of(problem),
            "numbers": order_of(problem, together),
            "derived": derived,
        },
        constants=ForwardConstants(
            tile_d=tile_d,
            tail_d=tail_d,
            last_d=last_d,
            banded=problem.is_banded,
            two_sided=problem.is_two_sided,
            masked=masked,
            has_sinks=problem.has_sinks,
            linear_grid=linear,
            sign=problem.scale_sign,
            tma=tma,
            **{name: getattr(step, name) for name in _OF_STEP},
            **{name: getattr(config, name) for name in _OF_CONFIG},
            lazy_max=lazy_max,
            headroom=configs.HEADROOM[problem.dtype],
            diagonal_first=diagonal > 1,
            static_grid=config.scheduler == "static",
            score=lowered_of(plan),
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


# ---------------------------------------------------------------- backward


_NAMES: Mapping[str, str] = {
    "query_grads": "q k v out lse dout dlse delta dq captured listed score_factor grad_factor reach numbers derived",
    "key_grads": "q k v lse dout delta dk dv captured listed dcaptured score_factor grad_factor reach numbers derived",
    "row_deltas": "out dout dlse delta dq_sum",
    "all_grads": """
        q k v lse dout delta dq_sum dk dv captured listed dcaptured score_factor grad_factor reach numbers derived""",
    "round_query_grads": "dq_sum dq grad_factor",
    "deltas": "out dout dlse delta",
    "stored_key_grads": "q k v lse dout delta ds dk dv score_factor grad_factor numbers first",
    "stored_query_grads": "k ds dq grad_factor numbers first",
}
"""The parameters of each kernel, in order: arrays, a tuple of them, then numbers."""


def _two_passes(plan: Plan, has_dlse: bool) -> tuple[KernelLaunch, ...]:
    problem, config = plan.problem, plan.config
    assert isinstance(config, TwoPassConfig)
    config = configs.within_blocks(problem, config)
    constants = QueryGradsConstants(
        **_products(plan, KEYS_OF_QUERIES, config.dq_tile_m, config.dq_tile_n),
        ragged=not problem.is_banded and _has_ragged_keys(problem, config.dq_tile_n),
        latency=config.dq_latency,
        has_dlse=has_dlse,
    )
    tiles, hints = query_tiles(problem, config.dq_tile_m), (config.dq_occupancy, config.dq_num_worker_warps)
    return (
        *_tile_lists(plan, query_tile=config.dq_tile_m, key_tile=config.tile_n),
        _backward(plan, "query_grads", tiles, constants, *hints, heads_together=config.dq_heads_together),
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


def _stored(plan: Plan, config: StoredConfig, has_dlse: bool) -> tuple[KernelLaunch, ...]:
    """Delta, then dk and dv and after them dq, of as many heads at a time as there is memory for the ds of."""
    problem, tile_d = plan.problem, one_width(plan.problem.head_dim)
    rows = -(-problem.seq_q // configs.ROW_TILE) * problem.heads_q * problem.batch
    delta = RowDeltaConstants(tile_m=configs.ROW_TILE, tile_d=tile_d, has_dlse=has_dlse)
    launches = [_backward(plan, "deltas", rows, delta, configs.ROW_OCCUPANCY)]
    at_a_time, group = configs.heads_at_a_time(problem, config), problem.group
    of_keys, of_queries = -(-problem.seq_kv // config.tile_n), -(-problem.seq_q // config.dq_tile_m)
    in_entry = min(at_a_time, problem.heads_kv)
    key_constants = BackwardConstants(
        **_products(plan, QUERIES_OF_KEYS, config.tile_m, config.tile_n),
        ragged=False,
        latency=config.latency,
        delta_first=config.delta_first,
    )
    if config.stagger and not problem.is_banded:
        key_constants = StaggeredConstants(**vars(key_constants), stagger=config.stagger)
    query_constants = BackwardConstants(
        **{**_products(plan, KEYS_OF_QUERIES, config.dq_tile_m, config.dq_tile_n), "tma_columns": False},
        ragged=False,
        latency=config.dq_latency,
    )
    together = configs.divisor_near(config.heads_together, in_entry)
    dq_together = configs.divisor_near(config.dq_heads_together, in_entry * group)
    hints, dq_hints = (config.occupancy, config.num_worker_warps), (config.dq_occupancy, config.dq_num_worker_warps)
    heads = problem.batch * problem.heads_kv
    for begin in range(0, heads, max(at_a_time, 1)):
        count = min(at_a_time, heads - begin)
        first = (begin * of_keys, begin * group)
        number = of_keys * count
        of_all = _backward(plan, "stored_key_grads", number, key_constants, *hints, heads_together=together)
        launches.append(replace(of_all, scalars={**of_all.scalars, "first": first}))
        first = (begin * group * of_queries, begin * group)
        number = of_queries * count * group
        of_all = _backward(plan, "stored_query_grads", number, query_constants, *dq_hints, heads_together=dq_together)
        launches.append(replace(of_all, scalars={**of_all.scalars, "first": first}))
    return tuple(launches)


def _of_keys(plan: Plan, config: OnePassConfig, kernel: str) -> KernelLaunch:
    """The launch in which a block owns a tile of keys."""
    problem = plan.problem
    constants = BackwardConstants(
        **_products(plan, QUERIES_OF_KEYS, config.tile_m, config.tile_n),
        ragged=kernel == "all_grads" and (problem.packing is not None or problem.seq_kv % config.tile_n != 0),
        ragged_queries=_has_ragged_queries(problem, config.tile_m),
        gradients=problem.score.gradients if problem.score is not None else (),
        latency=config.latency,
        dq_transposed=config.dq_transposed,
        delta_first=config.delta_first,
    )
    tiles = key_tiles(problem, config.tile_n)
    hints = (config.occupancy, config.num_worker_warps)
    return _backward(plan, kernel, tiles, constants, *hints, heads_together=config.heads_together)


def _products(plan: Plan, names: Sequence[str], tile_m: int, tile_n: int) -> dict[str, Any]:
    """The constants of a kernel with products that follow from its tile; `names`: its lists of a block mask."""
    problem = plan.problem
    return {
        "tile_m": tile_m,
        "tile_n": tile_n,
        "tile_d": one_width(problem.head_dim),
        "banded": problem.is_banded,
        "two_sided": problem.is_two_sided,
        "tma": configs.has_positive_strides(problem),
        "tma_columns": problem.packing is None and problem.seq_q % COLUMN_UNIT == 0,
        "score": lowered_of(plan),
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
    *,
    heads_together: int = 1,
) -> KernelLaunch:
    """One launch. Without a dlse a kernel is given lse in its place, and does not read it."""
    problem, names = plan.problem, _NAMES[kernel].split()
    grid = configs.factor_grid(tiles)
    heads = problem.heads_kv if "dk" in names else problem.heads_q
    together = configs.divisor_near(heads_together, heads)
    if isinstance(constants, BackwardConstants) and constants.packed:
        grid = configs.grid_of_list(tiles, heads, together)
    if grid is None:
        raise ValueError(f"no grid of {tiles} blocks")
    assumed = {"dtype": problem.dtype}
    captured, derived = aux_of(plan, assumed, {}) if "captured" in names else ((), ())
    optional = {"captured": captured} if "captured" in names else {}
    if "listed" in names:
        of_keys = "dcaptured" in names
        own = (QUERIES_OF_KEYS, "key_list") if of_keys else (KEYS_OF_QUERIES, "query_list")
        optional["listed"] = _lists(assumed, {}, problem, *own)
        if of_keys:
            optional["dcaptured"] = gradients_of(assumed, {}, problem, lowered_of(plan))
    scalars: dict[str, Scalar] = {
        "score_factor": problem.score_factor,
        "grad_factor": problem.grad_factor,
        "reach": reach_of(problem),
        "numbers": order_of(problem, Together(heads=together), heads),
        "derived": derived,
    }
    columns = getattr(constants, "tma_columns", False)
    operands = {name: name for name in names if name in problem.layouts}
    areas = own_areas_of(plan) if isinstance(plan.config, StoredConfig) else {}
    if "dlse" in operands and not getattr(constants, "has_dlse", False):
        operands["dlse"] = "lse"
    return KernelLaunch(
        kernel=kernel,
        is_64bit=needs_64bit(problem, backward=True),
        occupancy=occupancy,
        num_worker_warps=num_worker_warps,
        grid=grid,
        arrays={
            name: any_size_of(assumed, {}, problem, name, areas[name])
            if name in areas
            else array_of(assumed, {}, problem, operands[name], vector_unit=COLUMN_UNIT if columns else 1)
            for name in names
            if name in areas or name in operands
        },
        optional=optional,
        scalars={name: scalars[name] for name in names if name in scalars},
        constants=constants,
        assumed=assumed,
    )
