"""The backward as three families of kernels: their configs, what fits, their launches, and configs worth timing.

``atomic``, ``two_pass`` and ``stored`` share the kernel that owns keys, and its config. Imports no cuTile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from multiattn.block_mask import KEYS_OF_QUERIES, QUERIES_OF_KEYS
from multiattn.cutile import launches
from multiattn.cutile.arrays import ArrayArgument, Assumptions
from multiattn.cutile.forward import TCGEN05
from multiattn.cutile.kernels.constants import (
    BackwardConstants,
    ColumnConstants,
    KernelConstants,
    QueryGradsConstants,
    RoundConstants,
    RowDeltaConstants,
    SumSharesConstants,
    Widths,
)
from multiattn.cutile.launches import Asked, Family, KernelLaunch
from multiattn.layout import Layout, row_major
from multiattn.packed import TILE_LISTS
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.config import Config
from multiattn.plan.limits import AT_LEAST_1, Check, failed, limit_checks, limited
from multiattn.plan.schedule import (
    STORED_BYTES,
    key_tiles,
    most_multiprocessors,
    one_width,
    query_tiles,
)
from multiattn.plan.support import Capability, Reason
from multiattn.plan.waves import Side, Walk
from multiattn.problem import Problem
from multiattn.sequences import Batching

COLUMN_UNIT = 4
"""Rows of fp32 numbers, of a multiple of which TMA reads parts. A kernel that owns keys reads lse and delta of other
lengths, and of packed batches, from copies (`column_unit`): element by element a step waits for 32 to 64 loads, and the
backward of D=64 N=7777 took about twice as long."""

ROW_TILE = 16
"""Rows a block takes in the kernels that have rows only, those before and after the one pass. H200, 2026-11-21, 64 Mi
elements: 0.11 ms with `ROW_BLOCKS` an SM before, where 64 rows take 0.16 and no hint 0.35; after it all take 0.05."""
ROW_BLOCKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PassConfig(Config):
    """Tiles of a kernel that owns queries, or keys, and walks over the others; and hints.

    At most `heads_together` of the heads that it owns rows of advance together.
    """

    tile_m: int = limited(launches.TILE)
    tile_n: int = limited(launches.TILE)
    blocks_per_sm: int = limited(launches.BLOCKS, default=1)
    warps: int | None = limited(launches.WARPS, default=None)
    latency: int = limited(launches.LATENCY, default=4)
    heads_together: int = limited(AT_LEAST_1, default=1)

    def widths(self, problem: Problem) -> dict[str, Widths]:
        """The tiles of rows, by names of constants."""
        return launches.widths_of(problem)

    def with_products(self, problem: Problem, owns: Side, qk: int, vo: int, parts: int = 1) -> Walk:
        """The kernel with these tiles, so many products a step with rows of either width, and blocks for a tile."""
        more = {"products": qk + vo, "begin": 4, "blocks_per_sm": self.blocks_per_sm, "parts": parts}
        of_qk, of_vo = (it.columns for it in self.widths(problem).values())
        columns = ((qk * it + vo * other) / (qk + vo) for it, other in zip(of_qk, of_vo, strict=True))
        return self.walk(owns, *columns, **more)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnePassConfig(PassConfig):
    """The kernel that owns keys."""

    dq_transposed: bool = False
    """A block's share of dq is made as ``k^T ds^T``, from shared memory, and turned around as it is handed over."""
    delta_first: bool = False
    """The product dp begins with -delta, not with zeros."""
    split_head_dim: bool = False
    """Tiles of two parts in place of one as wide as head_dim (`two_widths`). A product over head_dim is then two, of
    which warps do not wait for the first."""
    keys_in_registers: bool = False
    """The first two products take k and v from registers, in tiles of 64 rows a warpgroup head_dim / 2 of each thread,
    and read only q and dout from shared memory."""
    own_columns: bool = False
    """Lse and delta are copied before, lse as the kernel takes it. So they are always where TMA cannot load them."""
    shares: int = limited((lambda it: it >= 0, "0 and more"), default=0)
    """Blocks that share the query heads of a tile of keys; another kernel adds up their dk and dv. 0, as in rules, is
    one block, or as many as `settled` chooses."""

    @property
    def parts(self) -> int:
        """The blocks of a tile of keys."""
        return max(self.shares, 1)

    def widths(self, problem: Problem) -> dict[str, Widths]:
        """As they are, in parts where the config says so."""
        return launches.widths_of(problem, split=self.split_head_dim)

    @property
    def listed_rows(self) -> int:
        """Rows of the tiles that a packed batch's list of queries has."""
        return self.tile_m

    def of_one_launch(self, problem: Problem) -> Problem:
        """The problem with as many heads as a launch has."""
        return problem

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """The one kernel with products."""
        return (self.with_products(problem, "kv", 3, 2, self.parts),)


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoPassConfig(OnePassConfig):
    """With the kernel that comes first, and owns queries."""

    dq: PassConfig

    @property
    def listed_rows(self) -> int:
        """Rows of the tiles of the kernel that owns queries."""
        return self.dq.tile_m

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """Both kernels."""
        return self.with_products(problem, "kv", 2, 2, self.parts), self.dq.with_products(problem, "q", 2, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredConfig(TwoPassConfig):
    """With ds stored by the kernel that owns keys, which comes first; `dq.tile_m` is a multiple of `tile_m`."""

    stagger: int = limited((lambda it: it >= 0, "0 and more"), default=0)
    """Without a mask: a tile of keys begins this many blocks of queries further than the tile before it, and comes back
    to the first. With 0 tiles of a head are at the same queries at all times, and so at the same part of ds."""

    def of_one_launch(self, problem: Problem) -> Problem:
        """With the heads that there is memory for; all, where it has none."""
        heads = heads_at_a_time(problem, self)
        return replace(problem, batch=1, heads_q=heads * problem.group, heads_kv=heads) if heads else problem

    def walks(self, problem: Problem) -> tuple[Walk, ...]:
        """Both kernels, of which that of dq has one product."""
        return self.with_products(problem, "kv", 2, 2, self.parts), self.dq.with_products(problem, "q", 1, 0)


# ---------------------------------------------------------------- shares of a tile of keys

SHARES_GAIN, SHARE_COST = 1.05, 0.02
"""Shares must promise so much by waves. Each one more costs so much beside: its dk and dv are written and read in fp32.
H200, 2026-11-29, no mask, D=128 N=4096 64/8, where a share gains nothing: 2, 4 and 8 took 1.6, 10 and 22 % longer."""
LEAST_WAVES = 1.9
"""Blocks to those that run at a time, under the diagonal. By `settled`'s figures; between 1.9 and 2.3 a guess."""
WALK_MIN = 8
"""The fewest blocks of queries that a share walks over. A guess, not measured."""


def settled(problem: Problem, arch: Arch, config: OnePassConfig) -> OnePassConfig:
    """The config with shares where heads of keys are too few for all SMs to be busy to the end.

    Without a mask blocks come in waves, and the model of waves decides. H200, 2026-11-29: 5 shares at D=64 N=7777 25/5,
    2.3 waves, 1.207 of one. Under the diagonal blocks must be nearly twice those that run at a time, as the longest
    walk decides. 2 shares at D=128 N=4096 64/8, 1.9 times as many, 1.59 of one (4 1.60, 8 1.48); 5 shares at D=64
    N=7777 25/5, 2.3 times, 1.002. Between these it is a guess. Where ds is stored the blocks of one launch count:
    D=128 N=8192 64/8 has one head of keys at a time: 1, 2, 4 shares 328, 489, 474 TFLOPS, causal 181, 298, 467, 8 478.
    Other arches, packed batches and block masks were not timed.
    """
    divisors = [it for it in range(2, problem.group + 1) if problem.group % it == 0]
    steps = -(-problem.seq_q // config.tile_m)
    divisors = [it for it in divisors if problem.group // it * steps >= WALK_MIN]
    if (
        config.shares
        or not divisors
        or arch.name != "sm90"
        or problem.packing is not None
        or problem.blocks is not None
    ):
        return config
    sms = most_multiprocessors(arch)
    problem = config.of_one_launch(problem)
    if problem.is_banded and not problem.is_two_sided:
        tiles, least = key_tiles(problem, config.tile_n), LEAST_WAVES * sms * config.blocks_per_sm
        shares = next((it for it in (1, *divisors) if tiles * it >= least), divisors[-1])
        return replace(config, shares=shares) if shares > 1 else config
    walk, *_ = config.walks(problem)
    times = {it: walk._replace(parts=it).time(problem, sms) * (1 + SHARE_COST * (it - 1)) for it in (1, *divisors)}
    best = min(divisors, key=lambda it: times[it])
    return replace(config, shares=best) if times[1] > SHARES_GAIN * times[best] else config


# ---------------------------------------------------------------- memory


def stored_areas(problem: Problem, config: StoredConfig) -> Mapping[str, Layout]:
    """The ds of the heads of one launch: ``[heads, tiles of dq, Skv, dq.tile_m]``."""
    heads = heads_at_a_time(problem, config) * problem.group
    shape = (heads, -(-problem.seq_q // config.dq.tile_m), problem.seq_kv, config.dq.tile_m)
    return {"ds": Layout(shape, row_major(shape), problem.torch_dtype)}


def heads_at_a_time(problem: Problem, config: StoredConfig) -> int:
    """Heads of keys of one launch: a divisor of those of a batch entry, or those of several; 0 if memory holds none."""
    tiles = -(-problem.seq_q // config.dq.tile_m)
    of_head = problem.group * tiles * config.dq.tile_m * max(problem.seq_kv, 1) * problem.torch_dtype.itemsize
    most = min(STORED_BYTES // max(of_head, 1), problem.batch * problem.heads_kv)
    if most >= problem.heads_kv:
        return most // problem.heads_kv * problem.heads_kv
    return max((it for it in range(1, most + 1) if problem.heads_kv % it == 0), default=0)


def divided_areas(problem: Problem, config: OnePassConfig) -> Mapping[str, Layout]:
    """The areas of columns and of shares, as far as there are any."""
    found: dict[str, Layout] = {}
    unit = column_unit(problem, launches.cut_of(problem, config))
    if unit:
        rows = -(-problem.seq_q // unit) * unit
        if (packing := packing_by_units(problem)) is not None:
            rows = (problem.seq_q // unit + 1 + packing.sequences) * unit
        shape: tuple[int, ...] = (problem.batch, problem.heads_q, rows)
        found |= dict.fromkeys(COLUMNS, Layout(shape, row_major(shape), torch.float32))
    if config.parts > 1:
        for name, width in zip(SHARES, (problem.head_dim, problem.head_dim_v), strict=True):
            shape = (problem.batch, problem.heads_kv * config.parts, problem.seq_kv, width)
            found[name] = Layout(shape, row_major(shape), torch.float32)
    return found


COLUMN_TILE = 128
COLUMNS, SHARES = ("lse_columns", "delta_columns"), ("dk_shares", "dv_shares")


def packing_by_units(problem: Problem) -> Batching | None:
    """The packing of a problem whose sequences each have columns from a multiple of the unit on.

    With a block mask there is none: kernels then load columns from any row on, and these lie as queries do.
    """
    return problem.packing if problem.blocks is None else None


def column_unit(problem: Problem, config: OnePassConfig) -> int:
    """Rows of a tile of the kernel that copies columns; 0 where those of the problem do.

    Where each sequence's begin at a multiple of it a tile of dq must have all the rows of a tile of queries.
    """
    if packing_by_units(problem) is not None:
        return config.listed_rows if config.listed_rows >= config.tile_m else 0
    has_own = config.own_columns or problem.packing is not None or problem.seq_q % COLUMN_UNIT
    return COLUMN_TILE if has_own else 0


# ---------------------------------------------------------------- what fits


def why_not_one_pass(problem: Problem, arch: Arch, config: OnePassConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot be compiled or launched for `problem` in one pass."""
    return failed(_checks(problem, config))


def why_not_two_pass(problem: Problem, arch: Arch, config: TwoPassConfig) -> tuple[Reason, ...]:
    """Every reason why not in two passes."""
    only_one = config.dq_transposed or config.delta_first
    return failed([*_checks(problem, config), *_checks_of_dq(problem, config, only_one)])


def why_not_stored(problem: Problem, arch: Arch, config: StoredConfig) -> tuple[Reason, ...]:
    """Every reason why not with ds stored."""
    checks = [
        *_checks(problem, config),
        *_checks_of_dq(problem, config, config.dq_transposed),
        (config.dq.tile_m >= config.tile_m, f"dq.tile_m={config.dq.tile_m}", f"tile_m={config.tile_m} and more"),
        (heads_at_a_time(problem, config) > 0, f"ds of a head of {problem}", f"{STORED_BYTES >> 20} MiB"),
    ]
    return failed(checks)


def _checks(problem: Problem, config: OnePassConfig) -> list[Check]:
    tiles = key_tiles(problem, config.tile_n) * config.parts
    return [
        *limit_checks(config),
        launches.split_check(problem, config),
        (problem.group % config.parts == 0, f"shares={config.shares}", f"a divisor of {problem.group} heads"),
        launches.grid_check(f"tile_n={config.tile_n}", tiles, problem),
        launches.grid_check(f"rows in tiles of {ROW_TILE}", query_tiles(problem, ROW_TILE), problem),
    ]


def _checks_of_dq(problem: Problem, config: TwoPassConfig, only_one: bool) -> list[Check]:
    tile_m = config.dq.tile_m
    return [
        *limit_checks(config.dq),
        (not only_one, "dq_transposed or delta_first in two kernels", "False"),
        launches.grid_check(f"dq.tile_m={tile_m}", query_tiles(problem, tile_m), problem),
    ]


# ---------------------------------------------------------------- launches

_NAMES: Mapping[str, str] = {
    "query_grads": "q k v out lse dout dlse delta dq captured listed score_factor grad_factor reach numbers derived",
    "key_grads": "q k v lse dout delta dk dv captured listed dcaptured score_factor grad_factor reach numbers derived",
    "row_deltas": "out dout dlse delta dq_sum",
    "copy_columns": "q k lse delta lse_columns delta_columns listed numbers",
    "sum_shares": "dk_shares dv_shares dk dv",
    "all_grads": """
        q k v lse dout delta dq_sum dk dv captured listed dcaptured score_factor grad_factor reach numbers derived""",
    "round_query_grads": "dq_sum dq grad_factor",
    "deltas": "out dout dlse delta",
    "stored_key_grads": "q k v lse dout delta ds dk dv score_factor grad_factor numbers first",
    "stored_query_grads": "k ds dq grad_factor numbers first",
}
"""The parameters of each kernel, in order: arrays, a tuple of them, then numbers."""
NO_AREAS: Mapping[str, Layout] = MappingProxyType({})
OF_KEYS = ("key_grads", "all_grads", "stored_key_grads")
_STORED = ("deltas", "stored_key_grads", "stored_query_grads")


def two_passes(call: Asked) -> tuple[KernelLaunch, ...]:
    """The kernel that owns queries, then that which owns keys."""
    plan, problem = call.plan, call.problem
    config: TwoPassConfig = launches.cut_of(problem, call.config)
    areas = divided_areas(problem, config)
    constants = QueryGradsConstants(
        **_products(plan, KEYS_OF_QUERIES, config.dq),
        ragged=not problem.is_banded and launches.has_ragged_keys(problem, config.dq.tile_n),
        has_dlse=call.has_dlse,
    )
    return (
        *launches.tile_lists(plan, query_tile=config.dq.tile_m, key_tile=config.tile_n),
        _launch(plan, "query_grads", query_tiles(problem, config.dq.tile_m), constants, config.dq),
        *_of_columns(plan, config, areas),
        *_of_keys(plan, "key_grads", config, areas),
    )


def one_pass(call: Asked) -> tuple[KernelLaunch, ...]:
    """The kernel that owns keys, with those of rows before and after it."""
    plan, problem = call.plan, call.problem
    config: OnePassConfig = launches.cut_of(problem, call.config)
    rows = RoundConstants(tile_m=ROW_TILE, qk=launches.widths_of(problem)["qk"])
    areas = divided_areas(problem, config)
    query_tile = 0 if packing_by_units(problem) is None else column_unit(problem, config)
    return (
        *launches.tile_lists(plan, query_tile=query_tile, key_tile=config.tile_n),
        _of_rows(call, "row_deltas"),
        *_of_columns(plan, config, areas),
        *_of_keys(plan, "all_grads", config, areas),
        _launch(plan, "round_query_grads", _row_tiles(problem), rows),
    )


def stored(call: Asked) -> tuple[KernelLaunch, ...]:
    """Delta, then dk and dv and after them dq, of as many heads at a time as there is memory for the ds of."""
    plan, problem = call.plan, call.problem
    config: StoredConfig = call.config
    key_constants = _constants_of_keys(plan, "stored_key_grads", config)
    areas = {**stored_areas(problem, config), **divided_areas(problem, config)}
    of_queries = {**_products(plan, KEYS_OF_QUERIES, config.dq), "tma_columns": False}
    query_constants = BackwardConstants(**of_queries, ragged=False)
    at_a_time, group = heads_at_a_time(problem, config), problem.group
    heads, in_entry = problem.batch * problem.heads_kv, min(at_a_time, problem.heads_kv)
    key_blocks, query_blocks = -(-problem.seq_kv // config.tile_n), -(-problem.seq_q // config.dq.tile_m)
    found = [_of_rows(call, "deltas"), *_of_columns(plan, config, areas)]
    for begin in range(0, heads, max(at_a_time, 1)):
        for kernel, constants, own, tiles, members in (
            ("stored_key_grads", key_constants, config, key_blocks * config.parts, in_entry * config.parts),
            ("stored_query_grads", query_constants, config.dq, query_blocks * group, in_entry * group),
        ):
            own = replace(own, heads_together=launches.divisor_near(own.heads_together, members))
            number = tiles * min(at_a_time, heads - begin)
            launch = _launch(plan, kernel, number, constants, own, areas=areas)
            first = (begin * tiles, begin * group)
            found.append(replace(launch, scalars={**launch.scalars, "first": first}))
    return (*found, *_sums(plan, config, areas))


def _row_tiles(problem: Problem, rows: int = ROW_TILE) -> int:
    """Tiles of the kernels that have rows only, also of a packed batch."""
    return -(-problem.seq_q // rows) * problem.heads_q * problem.batch


def _of_rows(call: Asked, kernel: str) -> KernelLaunch:
    """The launch that leaves delta."""
    constants = RowDeltaConstants(tile_m=ROW_TILE, **launches.widths_of(call.problem), has_dlse=call.has_dlse)
    hints = PassConfig(tile_m=ROW_TILE, tile_n=ROW_TILE, blocks_per_sm=ROW_BLOCKS)
    return _launch(call.plan, kernel, _row_tiles(call.problem), constants, hints)


def _of_columns(plan: Plan, config: OnePassConfig, areas: Mapping[str, Layout]) -> list[KernelLaunch]:
    """The launch that copies columns; none where the problem's do."""
    problem = plan.problem
    if COLUMNS[0] not in areas:
        return []
    unit = column_unit(problem, config)
    by_sequence = packing_by_units(problem) is not None
    tiles = query_tiles(problem, unit) if by_sequence else _row_tiles(problem, unit)
    return [_launch(plan, "copy_columns", tiles, ColumnConstants(tile_m=unit, packed=by_sequence), areas=areas)]


def _of_keys(plan: Plan, kernel: str, config: OnePassConfig, areas: Mapping[str, Layout]) -> list[KernelLaunch]:
    """The launch in which a block owns a tile of keys, or a share of one, and that which adds shares up."""
    tiles = key_tiles(plan.problem, config.tile_n) * config.parts
    constants = _constants_of_keys(plan, kernel, config)
    return [_launch(plan, kernel, tiles, constants, config, areas=areas), *_sums(plan, config, areas)]


def _sums(plan: Plan, config: OnePassConfig, areas: Mapping[str, Layout]) -> list[KernelLaunch]:
    """The launch that adds up shares; none without any."""
    problem = plan.problem
    if SHARES[0] not in areas:
        return []
    constants = SumSharesConstants(tile_m=ROW_TILE, **launches.widths_of(problem), shares=config.parts)
    tiles = -(-problem.seq_kv // ROW_TILE) * problem.heads_kv * problem.batch
    hints = PassConfig(tile_m=ROW_TILE, tile_n=ROW_TILE, blocks_per_sm=ROW_BLOCKS)
    return [_launch(plan, "sum_shares", tiles, constants, hints, areas=areas)]


def _constants_of_keys(plan: Plan, kernel: str, config: OnePassConfig) -> BackwardConstants:
    problem = plan.problem
    unit = column_unit(problem, config)
    return BackwardConstants(
        **{**_products(plan, QUERIES_OF_KEYS, config), "tma_columns": unit > 0 or problem.seq_q % COLUMN_UNIT == 0},
        ragged=kernel == "all_grads" and (problem.packing is not None or problem.seq_kv % config.tile_n != 0),
        ragged_queries=launches.has_ragged_queries(problem, config.tile_m),
        gradients=problem.score.gradients if problem.score is not None else (),
        dq_transposed=config.dq_transposed,
        delta_first=config.delta_first,
        keys_in_registers=config.keys_in_registers,
        stagger=getattr(config, "stagger", 0) * (not problem.is_banded),
        shares=config.parts,
        own_columns=unit > 0,
        column_unit=0 if packing_by_units(problem) is None else unit,
    )


def _products(plan: Plan, names: Sequence[str], config: PassConfig) -> dict[str, Any]:
    """The constants of a kernel with products that follow from its tile; `names`: its lists of a block mask."""
    problem = plan.problem
    return {
        **config.widths(problem),
        "tile_m": config.tile_m,
        "tile_n": config.tile_n,
        "banded": problem.is_banded,
        "two_sided": problem.is_two_sided,
        "tma": launches.has_positive_strides(problem),
        "tma_columns": problem.packing is None and problem.seq_q % COLUMN_UNIT == 0,
        "score": launches.lowered_of(plan),
        "blocks": launches.tiles_of_blocks(problem, names, config.tile_m, config.tile_n),
        "latency": config.latency,
        "packed": problem.packing is not None,
    }


def _launch(
    plan: Plan,
    kernel: str,
    tiles: int,
    constants: KernelConstants,
    hints: PassConfig | None = None,
    *,
    areas: Mapping[str, Layout] = NO_AREAS,
) -> KernelLaunch:
    """One launch; `areas` are those that no problem has.

    Without a dlse a kernel is given lse in its place, and does not read it.
    """
    problem, names = plan.problem, _NAMES[kernel].split()
    grid = launches.factor_grid(tiles)
    heads = problem.heads_kv * getattr(constants, "shares", 1) if "dk" in names else problem.heads_q
    together = launches.divisor_near(1 if hints is None else hints.heads_together, heads)
    if getattr(constants, "packed", False):
        grid = launches.grid_of_list(tiles, heads, together)
    if grid is None:
        raise ValueError(f"no grid of {tiles} blocks")
    assumed = Assumptions(problem=problem, constants={"dtype": problem.dtype})
    captured, derived = launches.aux_of(plan, assumed) if "captured" in names else ((), ())
    optional = {"captured": captured} if "captured" in names else {}
    if "listed" in names:
        of_keys, (query_list, key_list) = "dcaptured" in names, TILE_LISTS
        own = (QUERIES_OF_KEYS, key_list) if of_keys else (KEYS_OF_QUERIES, query_list)
        optional["listed"] = assumed.lists(*own)
        if of_keys:
            lowered, score = launches.lowered_of(plan), problem.score
            given = {} if lowered is None or score is None else score.gradient_arguments(lowered)
            optional["dcaptured"] = assumed.all_captured(given.values())
    scalars: dict[str, launches.Scalar] = {
        "score_factor": problem.score_factor,
        "grad_factor": problem.grad_factor,
        "reach": launches.reach_of(problem),
        "numbers": launches.order_of(problem, launches.Together(heads=together), heads),
        "derived": derived,
    }
    unit = COLUMN_UNIT if getattr(constants, "tma_columns", False) else 1
    operands = {name: name for name in names if name in problem.layouts}
    if "dlse" in operands and not getattr(constants, "has_dlse", False):
        operands["dlse"] = "lse"
    inner = {}
    if kernel in OF_KEYS:
        inner = {name: f"{name}_columns" for name in ("lse", "delta") if COLUMNS[0] in areas}
        inner |= {name: f"{name}_shares" for name in ("dk", "dv") if SHARES[0] in areas}
    inner |= {name: name for name in names if name in areas}

    def array_of(name: str) -> ArrayArgument:
        if name in inner:
            return assumed.sized(inner[name], areas[inner[name]], vector_unit=COLUMN_UNIT)
        return assumed.array(operands[name], vector_unit=unit)

    return KernelLaunch(
        kernel=kernel,
        module="stored" if kernel in _STORED else "backward",
        is_64bit=launches.needs_64bit(problem, backward=True),
        blocks_per_sm=None if hints is None else hints.blocks_per_sm,
        warps=None if hints is None else hints.warps,
        grid=grid,
        arrays={name: array_of(name) for name in names if name in inner or name in operands},
        optional=optional,
        scalars={name: scalars[name] for name in names if name in scalars},
        constants=constants,
        assumed=assumed.constants,
    )


# ---------------------------------------------------------------- candidates

_Hints = tuple[int, int, int, int | None]
_Tiles = tuple[tuple[_Hints, ...], tuple[_Hints, ...]]
_HOPPER: Mapping[int, _Tiles] = {
    64: (((64, 128, 1, 8), (128, 128, 1, 8), (128, 64, 2, None), (64, 64, 2, None)),
         ((64, 64, 2, None), (64, 64, 3, None), (128, 64, 1, 8), (64, 128, 2, None))),
    128: (((64, 64, 2, None), (32, 128, 1, 8), (64, 128, 1, 8), (128, 64, 1, 8), (64, 64, 1, 8)),
          ((128, 64, 1, 8), (64, 64, 2, None), (128, 128, 1, 8))),
    256: (((64, 64, 1, 8), (32, 64, 1, 8)),
          ((64, 64, 1, 8), (64, 32, 1, None), (128, 32, 1, 8))),
}  # fmt: skip
"""By head_dim: tiles of the kernel that owns keys, and of the one that owns queries, with blocks an SM and warps."""
_OF_TCGEN05: _Tiles = (
    ((64, 128, 1, 8), (128, 128, 1, 8), (64, 64, 1, None), (64, 64, 1, 8)),
    ((128, 64, 1, 8), (128, 128, 1, 8), (64, 64, 1, None)),
)
_OTHERS: _Tiles = (
    ((64, 32, 1, 8), (32, 32, 1, 8), (32, 64, 1, 8), (16, 32, 1, 8)),
    ((64, 32, 1, 8), (32, 32, 1, None), (64, 64, 1, None)),
)
_OF_STORED: tuple[_Hints, ...] = ((128, 64, 1, 8), (64, 64, 1, None))
"""Tiles of the kernel that owns queries, where ds is stored."""


def _fields(hints: _Hints, **more: Any) -> dict[str, Any]:
    return {**dict(zip(("tile_m", "tile_n", "blocks_per_sm", "warps"), hints, strict=True)), **more}


def _ways(problem: Problem, arch: Arch) -> tuple[list[dict[str, Any]], list[PassConfig]]:
    """Fields of the kernel that owns keys, each tile with two latencies; configs of the one that owns queries."""
    hopper = _HOPPER[max(64, one_width(problem.width))]
    keys, queries = hopper if arch.name == "sm90" else _OF_TCGEN05 if arch.name in TCGEN05 else _OTHERS
    latencies = (4, 2) if arch.name == "sm90" else (4, 1)
    ways = [_fields(tile, latency=it) for tile in keys for it in latencies]
    return ways, [PassConfig(**_fields(it)) for it in queries]


def _candidates_of_one(variant: Variant, problem: Problem, arch: Arch) -> Iterator[OnePassConfig]:
    """Tiles with the hints that suit them, then with heads side by side."""
    for together in (1, 4):
        for way in _ways(problem, arch)[0]:
            yield OnePassConfig(**way, heads_together=together)


def _candidates_of_two(variant: Variant, problem: Problem, arch: Arch) -> Iterator[TwoPassConfig]:
    """Each way to own keys with the first to own queries, then the others, all in two orders of heads."""
    ways, queries = _ways(problem, arch)
    pairs = [(way, queries[0]) for way in ways] + [(ways[0], tile) for tile in queries[1:]]
    for together, (way, dq) in itertools.product((1, 4), pairs):
        yield TwoPassConfig(**way, heads_together=together, dq=replace(dq, heads_together=together))


def _candidates_of_stored(variant: Variant, problem: Problem, arch: Arch) -> Iterator[StoredConfig]:
    """Each way to own keys with each to own queries, all in two orders of heads."""
    ways, staggers = _ways(problem, arch)[0], (0,) if problem.is_banded else (0, 7)
    for together, way, tile, stagger in itertools.product((1, 4), ways, _OF_STORED, staggers):
        dq = PassConfig(**_fields(tile, heads_together=together))
        yield StoredConfig(**way, heads_together=together, dq=dq, stagger=stagger)


_family = partial(Family, settle=settled, candidates_max=24)
_EVERYWHERE: dict[str, Any] = {"capability": launches.EVERYWHERE, "lists": TILE_LISTS, "own_areas": divided_areas}
ONE_PASS = _family(
    summary="one pass over the keys, dq added up in fp32 by atomics (TMA reductions where there are)",
    config=OnePassConfig,
    is_deterministic=False,
    launches=one_pass,
    fits=why_not_one_pass,
    candidates=_candidates_of_one,
    areas=("delta", "dq_sum"),
    **_EVERYWHERE,
)
TWO_PASS = _family(
    summary="a pass over the queries for dq, one over the keys for dk and dv",
    config=TwoPassConfig,
    launches=two_passes,
    fits=why_not_two_pass,
    candidates=_candidates_of_two,
    areas=("delta",),
    **_EVERYWHERE,
)
STORED = _family(
    summary="a pass over the keys for dk and dv that stores ds, for some heads at a time, and dq of that",
    config=StoredConfig,
    capability=Capability(arches=("cpu", "sm90")),
    launches=stored,
    fits=why_not_stored,
    candidates=_candidates_of_stored,
    areas=("delta",),
    own_areas=lambda problem, config: {**stored_areas(problem, config), **divided_areas(problem, config)},
)
