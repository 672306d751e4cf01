"""Configs worth timing, per arch and head_dim: what `bench tune` sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from multiattn.cutile import decode_configs
from multiattn.cutile.configs import TCGEN05, CutileConfig, OnePassConfig, StoredConfig, TwoPassConfig
from multiattn.cutile.ladder import STEPS
from multiattn.plan.arch import GPUS, Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import saving_widths, three_widths
from multiattn.problem import Problem

L2_BYTES = max(gpu.l2_mib or 0 for gpu in GPUS if gpu.arch == "sm90") << 20
"""The L2 of the largest Hopper product: the ways below are for that arch."""

_Hints = tuple[int, int, int, int | None]
"""tile_m, tile_n, occupancy and num_worker_warps."""


def _fields(hints: _Hints, prefix: str = "") -> dict[str, Any]:
    names = ("tile_m", "tile_n", "occupancy", "num_worker_warps")
    return {prefix + name: value for name, value in zip(names, hints, strict=True)}


def _lazy(tile_m: int, tile_n: int, occupancy: int, warps: int | None, *hows: str) -> tuple[CutileConfig, ...]:
    """A tile in several ways: a pipeline each, static where the name ends in a star."""
    tile = CutileConfig(**_fields((tile_m, tile_n, occupancy, warps)), lazy_max=True)
    return tuple(
        replace(tile, pipeline=how.rstrip("*"), scheduler="static" if how.endswith("*") else "one_tile") for how in hows
    )


# For D up to 64, up to 128 and beyond; so are the other tables of as many rows.
_LAZY: tuple[tuple[CutileConfig, ...], ...] = ((
    *_lazy(64, 64, 4, None, "plain", "plain*"), *_lazy(64, 64, 3, None, "pairs", "pairs*", "plain"),
    *_lazy(128, 64, 2, 8, "plain", "plain*"), *_lazy(64, 128, 2, None, "plain", "plain*", "ahead"),
    CutileConfig(tile_m=64, tile_n=64, occupancy=4),
), (
    *_lazy(64, 128, 2, None, "ahead", "plain*", "plain", "pilot*"),
    *_lazy(64, 64, 2, None, "plain", "plain*", "pairs", "pairs*", "apart", "apart*"),
    *_lazy(128, 64, 1, 8, "plain", "plain*", "pairs", "pairs*", "apart*"),
    *_lazy(128, 128, 1, 8, "plain", "pairs", "pilot", "pilot_pairs"),
    *(replace(way, q_in_registers=True) for way in _lazy(64, 64, 2, None, "plain*", "pairs*")),
    *(replace(way, q_in_registers=True) for way in _lazy(128, 128, 1, 8, "plain", "pilot")),
    CutileConfig(tile_m=64, tile_n=128, occupancy=2),
), (
    *_lazy(128, 64, 1, 8, "plain", "plain*", "pairs", "pairs*", "ahead", "apart", "apart*"),
    *_lazy(128, 64, 1, 8, "pilot_pairs", "pilot_pairs*"),
    *_lazy(128, 32, 1, 8, "plain*", "pairs*", "ahead"), *_lazy(64, 64, 1, None, "ahead", "pairs"),
    CutileConfig(tile_m=128, tile_n=128, occupancy=1, num_worker_warps=8),
    CutileConfig(tile_m=128, tile_n=64, occupancy=1, num_worker_warps=8),
))  # fmt: skip
_LAZY_96 = (
    *_lazy(64, 64, 3, None, "plain", "pilot"), *_lazy(128, 64, 2, 8, "plain"), *_lazy(128, 64, 2, None, "plain"),
    *_lazy(128, 128, 1, 8, "ahead"),
)  # fmt: skip
"""Two parts of 64 and 32 columns, or fewer, leave room for another block an SM; one of 128 columns does not."""
_LAZY_112 = _lazy(128, 64, 2, None, "plain", "pilot")
_LAZY_208 = (*_lazy(128, 64, 1, 8, "ahead"), *_lazy(128, 128, 1, 8, "plain", "pilot"))
"""In three parts, of up to 128 columns and beyond."""
_LAZY_192: tuple[CutileConfig, ...] = _lazy(128, 128, 1, 8, "plain", "plain*", "pairs", "pilot", "ahead")
"""Two parts of 128 and 64 columns, or fewer, leave these the registers; one of 256 columns does not."""
_BLACKWELL: tuple[_Hints, ...] = (
    (128, 128, 2, None), (128, 128, 1, None), (256, 128, 1, None), (256, 64, 1, None), (128, 64, 2, None),
    (64, 128, 2, None), (64, 64, 4, None), (256, 128, 1, 8), (128, 128, 1, 8),
)  # fmt: skip
_SMALL: tuple[_Hints, ...] = (
    (64, 64, 2, None), (64, 64, 1, None), (64, 32, 2, None), (64, 32, 1, None), (64, 64, 3, None), (128, 64, 1, None),
    (128, 32, 1, None), (128, 64, 1, 8), (32, 64, 2, None),
)  # fmt: skip


def _row(problem: Problem) -> int:
    return 0 if problem.head_dim <= 64 else 1 if problem.head_dim <= 128 else 2


def _lazy_candidates(problem: Problem) -> list[CutileConfig]:
    """Tiles in several ways, with several latencies; heads side by side where tiles are not of one length."""
    ways = _LAZY[_row(problem)]
    if saving_widths(problem.head_dim) is not None:
        more = _LAZY_192 if problem.head_dim > 128 else _LAZY_96
        split = [replace(way, split_head_dim=True) for way in (*ways, *more)]
        ways = (*ways[:3], *split)
    elif problem.head_dim > 128:
        ways = (*ways, *(replace(way, split_head_dim=True) for way in ways if way.pipeline == "ahead"))
    if three_widths(problem.head_dim) is not None:
        more = _LAZY_208 if problem.head_dim > 128 else _LAZY_112
        ways = (*ways, *(replace(way, split_head_dim=True, split_tail=True) for way in more))
    return [
        replace(way, k_latency=k_latency, v_latency=v_latency, heads_together=heads)
        for way in ways
        for heads in _heads_together(problem, way)
        for k_latency, v_latency in _latencies(way)
    ]


def _latencies(way: CutileConfig) -> tuple[tuple[int | None, int | None], ...]:
    """Latencies of k and v: the way's own, none, and the least where scores come ahead, or loads come in parts."""
    found = ((way.k_latency, way.v_latency), (None, None))
    return (*found, (1, 1)) if way.pipeline in ("ahead", "pairs") or way.split_head_dim else found


def _heads_together(problem: Problem, way: CutileConfig) -> dict[int, None]:
    """Distinct counts of heads. Small ones are left out of a banded grid with a block a tile, unless keys exceed L2.

    A static grid turns from head to head. Hopper's L2 has two halves, and what both need is in both: so the keys of
    four heads count twice.
    """
    few, several = (1, 2, 4), (4, 8, 16, 32, problem.heads_q)
    if not problem.is_banded:
        return dict.fromkeys((*few, 8) if way.scheduler == "static" else few)
    if way.scheduler == "static":
        return dict.fromkeys(few)
    keys = 2 * problem.torch_dtype.itemsize * problem.seq_kv * problem.head_dim
    return dict.fromkeys((*few, *several) if 8 * keys > L2_BYTES else several)


def forward_candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[Config]:
    """Configs worth timing: tiles with the occupancies and warps that may suit them.

    On sm90 in every way to run them, elsewhere with variations of the first.
    """
    if not arch.is_gpu:
        return ()
    if variant.name == decode_configs.NAME:
        return decode_configs.candidates(variant, problem, arch)
    if arch.name == "sm90":
        configs = _lazy_candidates(problem)
    else:
        tiles = _BLACKWELL if arch.name in TCGEN05 else _SMALL
        configs = [CutileConfig(**_fields(hints)) for hints in tiles]
        best = configs[0]
        configs += [replace(best, k_latency=k, v_latency=v) for k, v in ((1, 1), (4, 6))]
        configs += [replace(config, heads_together=4) for config in configs[:4]]
        configs += [replace(best, heads_together=heads) for heads in (problem.group, problem.heads_q)]
    limited = dict.fromkeys(map(STEPS[variant.name].step.limit, configs))
    return tuple(config for config in limited if not variant.fits(problem, arch, config))


# ---------------------------------------------------------------- backward


_Tiles = tuple[tuple[_Hints, ...], tuple[_Hints, ...]]
_HOPPER: tuple[_Tiles, ...] = (
    (((64, 128, 1, 8), (128, 128, 1, 8), (128, 64, 2, None), (64, 64, 2, None)),
     ((64, 64, 2, None), (64, 64, 3, None), (128, 64, 1, 8), (64, 128, 2, None))),
    (((64, 64, 2, None), (32, 128, 1, 8), (64, 128, 1, 8), (128, 64, 1, 8), (64, 64, 1, 8)),
     ((128, 64, 1, 8), (64, 64, 2, None), (128, 128, 1, 8))),
    (((64, 64, 1, 8), (32, 64, 1, 8)),
     ((64, 64, 1, 8), (64, 32, 1, None), (128, 32, 1, 8))),
)  # fmt: skip
"""Tiles of the kernel that owns keys, and of the one that owns queries."""
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


def backward_candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[OnePassConfig]:
    """Configs worth timing: tiles with the occupancies and warps that suit them, each with two orders of heads."""
    if not arch.is_gpu:
        return ()
    is_hopper = arch.name == "sm90"
    keys, queries = _HOPPER[_row(problem)] if is_hopper else _OF_TCGEN05 if arch.name in TCGEN05 else _OTHERS
    ways = [{**_fields(tile), "latency": it} for tile in keys for it in ((4, 2) if is_hopper else (4, 1))]
    if variant.config_type is StoredConfig:
        pairs = [(way, tile) for way in ways for tile in _OF_STORED]
        staggers = (0,) if problem.is_banded else (0, 7)
        configs: list[OnePassConfig] = [
            StoredConfig(**way, **_fields(tile, "dq_"), stagger=it) for way, tile in pairs for it in staggers
        ]
    elif variant.deterministic:  # two passes: each way to own keys with the first to own queries, then the others
        pairs = [(way, queries[0]) for way in ways] + [(ways[0], tile) for tile in queries[1:]]
        configs = [TwoPassConfig(**way, **_fields(tile, "dq_")) for way, tile in pairs]
    else:
        configs = [OnePassConfig(**way) for way in ways]
    configs += [_together(config, 4) for config in configs]
    return tuple(dict.fromkeys(config for config in configs if not variant.fits(problem, arch, config)))[:24]


def _together(config: OnePassConfig, heads: int) -> OnePassConfig:
    if isinstance(config, TwoPassConfig):
        return replace(config, heads_together=heads, dq_heads_together=heads)
    return replace(config, heads_together=heads)
