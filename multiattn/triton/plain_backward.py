"""The backward in plain Triton: one pass over the keys, or two passes, of which the first makes dq."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from multiattn.plan import limits
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.schedule import NARROWEST, key_tiles, query_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.triton.family import ASYNCHRONOUS, Areas, TritonFamily, TritonLaunch
from multiattn.triton.kernels.constants import TileConstants, widths
from multiattn.triton.plain import (
    TritonConfig,
    can_describe,
    checks_by_queries,
    constants_of,
    is_far,
    is_ragged_list,
    options_of,
    pads,
    table_of,
    tiles,
    why_not_read,
    within_blocks,
)
from multiattn.triton.table import ELEMENT_BYTES, INT32, SMALL, KernelTable

VARIANTS = ("two_pass", "atomic")
"""The better first; `atomic` is in one pass."""
_ROWS_BESIDE = 64
"""Rows of a program of the small kernels before and after one pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonBackwardConfig(TritonConfig):
    """Tiles of the pass over the queries, and those of the pass over the keys that comes first, if there is one.

    `descriptors` of the former is for both.
    """

    dq: TritonConfig | None = None


def within(config: TritonBackwardConfig, problem: Problem) -> TritonBackwardConfig:
    """The config with tiles that divide the blocks of a block mask, and leave registers for gradients.

    Where captured tensors have a gradient, the pass over the queries takes fewer of them at a time: beside scores,
    weights and their gradients a thread has the addresses of what it reads and adds to.
    """
    config = within_blocks(config, problem)
    if config.dq is not None:
        config = replace(config, dq=within_blocks(config.dq, problem))
    if problem.score is not None and problem.score.gradients:
        per_key = _REGISTERS_OF_GRADIENTS * 32 * config.warps // config.tile_n
        tile_m = config.tile_m
        while tile_m > NARROWEST and sum(pads(problem)) + 4 * tile_m > per_key:
            tile_m //= 2
        config = replace(config, tile_m=tile_m)
    return config


_REGISTERS_OF_GRADIENTS = 192
"""Registers of a thread for the sums of dk and dv, and for four tiles like the scores, where captured tensors have a
gradient. Compiled for sm90 with a bias of every score, instructions of the loops that spill: at D=64 none with 64 x 64
and 700 with 128 x 64, at D=128 21 with 32 x 64 and 234 with 64 x 64."""


# ---------------------------------------------------------------- what fits


def _smem_bytes(problem: Problem, arch: Arch, config: TritonConfig) -> int:
    """Shared memory that the pass over the queries takes at least: the blocks of q and dout in flight.

    Where the tensor cores read it in the background, also the tiles of k and v.
    """
    rows = config.tile_m * max(1, config.stages - 1)
    if arch.name in ASYNCHRONOUS:
        rows = config.tile_n + config.tile_m * config.stages
    return rows * sum(pads(problem)) * ELEMENT_BYTES


def why_not_fit(problem: Problem, arch: Arch, config: TritonBackwardConfig, *, one_pass: bool) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`: in two passes, or in one."""
    if one_pass != (config.dq is None):
        return limits.failed(((False, f"dq={config.dq}", "None" if one_pass else "a TritonConfig as dq"),))
    config = within(config, problem)
    programs, needed = key_tiles(problem, max(config.tile_n, 1)), _smem_bytes(problem, arch, config)
    checks = [*limits.limit_checks(config), *limits.size_checks(config, arch, needed, programs)]
    if config.dq is None:
        checks += limits.size_checks(config, arch, 0, query_tiles(problem, _ROWS_BESIDE))
    else:
        of_dout = config.dq.tile_m * pads(problem)[1] * ELEMENT_BYTES  # beside q
        checks += checks_by_queries(problem, arch, config.dq, of_dout if arch.name in ASYNCHRONOUS else 0)
    return (*limits.failed(checks), *why_not_read(problem, arch, config))


# ---------------------------------------------------------------- a launch


def _tiles(problem: Problem, config: TritonBackwardConfig) -> tuple[int, int]:
    config = within(config, problem)
    return 0 if config.dq is None else config.dq.tile_m, config.tile_n


def _areas(problem: Problem, config: TritonBackwardConfig) -> Areas:
    names = ("delta", "dq_sum") if config.dq is None else ("delta",)
    return {name: problem.layouts[name] for name in names}


def _tables(launch: TritonLaunch) -> tuple[KernelTable, ...]:
    problem, arch, config = launch.problem, launch.arch, within(launch.config, launch.problem)
    own: dict[str, Any] = {
        "one_pass": config.dq is None,
        "descriptor": config.descriptors,
        "register_operands": arch.is_gpu and arch.name not in ASYNCHRONOUS,
        "gradients": () if problem.score is None else problem.score.gradients,
    }
    # Keys beyond the end have to be hidden from dq alone: their own gradients are not stored.
    is_whole = problem.packing is None and problem.seq_kv % config.tile_n == 0
    has_end = problem.blocks is not None and own["one_pass"] and not is_whole
    keys = table_of(
        "gradients_of_keys", launch, constants_of(launch, config, ragged=has_end, **own), options_of(config)
    )
    if config.dq is not None:
        assumed = launch.assumed._replace(flag=is_far(problem, config.dq, is_backward=True))
        launch, own["gradients"] = replace(launch, assumed=assumed), ()
        constants = constants_of(launch, config.dq, ragged=is_ragged_list(problem), **own)
        return table_of("gradient_of_queries", launch, constants, options_of(config.dq)), keys
    beside = TileConstants(
        **widths(problem),
        tile_m=_ROWS_BESIDE,
        far_rows=problem.strides_out[2] * _ROWS_BESIDE >= INT32,
        one_pass=True,
    )
    return (table_of("prepare_rows", launch, beside, SMALL), keys, table_of("finish_dq", launch, beside, SMALL))


# ---------------------------------------------------------------- configs worth timing

_Shapes = tuple[tuple[int, int, int], ...]
_SHAPES: Mapping[int, _Shapes] = {
    64: ((64, 128, 8), (128, 128, 8), (64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 64, 8)),
    128: ((64, 128, 8), (64, 64, 4), (32, 128, 8), (64, 64, 8), (128, 64, 8), (32, 64, 4)),
    256: ((64, 64, 8), (32, 64, 8), (32, 128, 8), (64, 128, 8), (16, 64, 4), (16, 128, 8)),
    512: ((16, 32, 8), (32, 16, 8), (16, 16, 8)),
}
"""(tile_m, tile_n, warps) of the pass over the queries, by the largest padded head_dim to try them at."""
_DQ_SHAPES: Mapping[int, _Shapes] = {
    64: ((128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 64, 4)),
    128: ((64, 64, 4), (128, 64, 8), (128, 128, 8), (64, 32, 4)),
    256: ((64, 64, 8), (128, 64, 8), (64, 32, 4), (128, 32, 8)),
    512: ((32, 32, 8), (32, 16, 8)),
}
"""Shapes of the pass over the keys."""


def _candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[TritonBackwardConfig]:
    """With two passes each with a middling config of the other, as their times add up."""

    def ways(table: Mapping[int, _Shapes], *stages: int, described: bool) -> list[TritonConfig]:
        shapes = next(it for limit, it in table.items() if max(pads(problem)) <= limit)
        together = 8 if problem.is_banded else 1
        tried = itertools.product(shapes, stages)
        return [tiles(*shape, number, heads_together=together, descriptors=described) for shape, number in tried]

    described = can_describe(problem, arch)

    if variant.name == "atomic":
        yield from map(passes, ways(_SHAPES, 1, 2, 3, described=described))
        return
    of_keys, of_dq = ways(_SHAPES, 2, 1, described=described), ways(_DQ_SHAPES, 2, 1, 3, described=False)
    yield from (passes(keys, of_dq[0]) for keys in of_keys)
    yield from (passes(of_keys[0], dq) for dq in of_dq)


def passes(keys: TritonConfig, dq: TritonConfig | None = None) -> TritonBackwardConfig:
    """A config with `keys` for the pass over the queries, and `dq` for the one over the keys if there is one."""
    own = {it.name: getattr(keys, it.name) for it in fields(keys)}
    return TritonBackwardConfig(**own, dq=dq)


FAMILY = TritonFamily(
    config=TritonBackwardConfig,
    kernels=dict.fromkeys(("prepare_rows", "finish_dq", "gradient_of_queries", "gradients_of_keys"), "backward"),
    tables=_tables,
    tiles=_tiles,
    areas=_areas,
    fits=why_not_fit,
    candidates=_candidates,
    flag=lambda problem, config: is_far(problem, within(config, problem), is_backward=True),
)
