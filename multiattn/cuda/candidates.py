"""Configs that a sweep times: those that fit and, on paper, may win; some twenty for each variant and problem."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from multiattn.cuda import backward_configs as backward
from multiattn.cuda import configs as forward
from multiattn.cuda.axes import Axes
from multiattn.cuda.backward_configs import BackwardConfig, QueryConfig
from multiattn.cuda.configs import FRAGMENT_ROWS, CudaConfig, padded
from multiattn.cuda.split_configs import CudaSplitConfig
from multiattn.cuda.split_wgmma_configs import SplitWgmmaConfig
from multiattn.cuda.variants import axes_of
from multiattn.cuda.wgmma_backward_configs import WIDE_FROM, WgmmaBackwardConfig
from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.cuda.wgmma_two_pass_configs import WgmmaTwoPassConfig
from multiattn.plan.arch import KIB, Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import most_multiprocessors
from multiattn.plan.support import Reason
from multiattn.problem import Problem

# ---------------------------------------------------------------- the forward's points

_SHAPES = ((64, 4), (128, 4), (128, 8))  # (tile_m, warps)
_REGISTERS_MAX = 208  # of 255: the rest is addresses, read-ahead and the softmax state
_REGISTERS_OF_THREE = 128  # of 168, which three blocks of four warps on an SM leave a thread
_ROOM_FOR_Q = 176  # up to here Q in registers costs nothing
_ROWS = ((64, 4, 1), (128, 8, 1))  # (tile_m, warps, column_warps) of split_q with tiling
_COLUMNS = ((32, 8, 8), (32, 8, 4), (64, 8, 4), (64, 8, 2), (64, 4, 2))  # and of split_kv


def forward_candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[CudaConfig]:
    """Configs of a point of the axes that fit shared memory and, by a lower bound, the registers."""
    axes = axes_of(variant)
    if axes.tiling != "none" or axes.warps == "split_kv":
        return tuple(config for config in _of_rungs(axes, problem) if not variant.fits(problem, arch, config))
    tried = (
        CudaConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, q_in_registers=kept, occupancy=occupancy)
        for (tile_m, warps), tile_n, stages, kept, occupancy in itertools.product(
            _SHAPES, (32, 64, 128), (1, 2, 3), (True, False), (1, 3)
        )
    )
    return tuple(
        it for it in tried if not variant.fits(problem, arch, it) and _may_win_forward(axes, problem, arch, it)
    )


def _may_win_forward(axes: Axes, problem: Problem, arch: Arch, config: CudaConfig) -> bool:
    blocks = max(config.occupancy, 2 if config.warps == 4 else 1)  # four warps alone on an SM starve it
    registers_max = _REGISTERS_MAX if config.occupancy == 1 else _REGISTERS_OF_THREE
    if forward.registers_at_least(axes, config, problem) > registers_max:
        return False
    if blocks * (forward.smem_bytes(axes, config, problem) + KIB) > arch.smem_per_sm:
        return False
    if config.occupancy > 1 and (config.warps == 8 or config.tile_n == 32):
        return False
    if config.tile_n == 32 and (config.stages != 2 or problem.head_dim <= 64):
        return False  # a barrier every 32 keys is for where registers leave no choice
    if config.tile_n == 128 and config.stages == 3:
        return False  # 128 keys ahead are ahead enough
    with_q = forward.registers_at_least(axes, replace(config, q_in_registers=True), problem)
    return config.q_in_registers or with_q > _ROOM_FOR_Q


def _of_rungs(axes: Axes, problem: Problem) -> Iterator[CudaConfig]:
    """Configs of all points but split_q without tiling. Slices of K and V of one size share a ring best."""
    is_sliced = axes.tiling != "none"
    shapes = _COLUMNS if axes.warps == "split_kv" else _ROWS
    for (tile_m, warps, column_warps), tile_n, stages in itertools.product(shapes, (64, 128, 256), (1, 2)):
        for dim_slice, key_slice in _slices(axes, problem, tile_n) if is_sliced else ((64, 16),):
            config = CudaConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                warps=warps,
                column_warps=column_warps,
                stages=stages,
                dim_slice=dim_slice,
                key_slice=key_slice,
            )
            yield config
            yield replace(config, q_streamed=True) if is_sliced else replace(config, q_in_registers=True)


def _slices(axes: Axes, problem: Problem, tile_n: int) -> Iterator[tuple[int, int]]:
    for dim_slice in (64, 128):
        key_slice = tile_n * dim_slice // padded(problem.head_dim, dim_slice) // FRAGMENT_ROWS * FRAGMENT_ROWS
        yield dim_slice, min(max(key_slice, FRAGMENT_ROWS), tile_n) if axes.tiling == "qkv" else FRAGMENT_ROWS


# ---------------------------------------------------------------- few queries

_TEAMS = ((16, 1), (32, 1), (64, 2), (64, 4), (128, 8))  # (tile_m, row_warps)


def split_candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[Config]:
    """Configs of the forwards that divide keys, with tiles of as many rows as a sequence has, or of half as many."""
    rows = min(max(problem.rows, 1), 128)
    tried: Iterator[Config]
    if variant.config_type is SplitWgmmaConfig:
        tried = (
            SplitWgmmaConfig(
                tile_m=tile_m, tile_n=tile_n, stages=stages, pingpong=tile_m > 64, lazy_max=lazy_max, gathers=gathers
            )
            for tile_m, tile_n, stages, lazy_max, gathers in itertools.product(
                (64, 128), (64, 128), (4, 6, 12), (True, False), (False, True)
            )
        )
    else:
        tried = (
            CudaSplitConfig(
                tile_m=tile_m, tile_n=tile_n, warps=warps, row_warps=row_warps, stages=stages, occupancy=occupancy
            )
            for (tile_m, row_warps), tile_n, (warps, occupancy), stages in itertools.product(
                _TEAMS, (16, 32, 64), ((4, 1), (4, 2), (8, 1)), (2, 3, 4)
            )
            if rows <= 2 * tile_m <= max(4 * rows, 64)
        )
    settled = dict.fromkeys(variant.settle(problem, arch, it) for it in tried)
    return tuple(it for it in settled if not variant.fits(problem, arch, it))


# ---------------------------------------------------------------- the backward

_KEY_SHAPES = ((64, 128, 8), (64, 64, 4), (32, 64, 4), (32, 128, 8))  # tile_m, tile_n, warps
_QUERY_SHAPES = ((64, 64, 4), (64, 32, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8))
_KEY_SHAPES_FROM_129 = ((64, 64, 8), (32, 64, 8), (32, 32, 4))  # of head_dim
_QUERY_SHAPES_FROM_129 = ((64, 32, 4), (64, 16, 4), (128, 64, 8))
_REGISTERS_BESIDE = 40  # of a thread, for what `registers_at_least` leaves out


def backward_candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[BackwardConfig]:
    """Configs that fit shared memory and, by a lower bound, the registers."""
    adds_dq = dict(variant.flags)["dq"] == "atomic"
    wide = adds_dq and arch.is_gpu and arch.capability >= backward.WIDE_SINCE
    is_large = problem.head_dim > 128
    keys = [
        BackwardConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, occupancy=occupancy, wide=wide)
        for (tile_m, tile_n, warps), stages, occupancy in itertools.product(
            _KEY_SHAPES_FROM_129 if is_large else _KEY_SHAPES, (2, 1), (1, 2, 3)
        )
    ]
    queries = [
        QueryConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, occupancy=occupancy)
        for (tile_m, tile_n, warps), stages, occupancy in itertools.product(
            _QUERY_SHAPES_FROM_129 if is_large else _QUERY_SHAPES, (1, 2), (1, 2, 3)
        )
    ]
    keys = [it for it in keys if _may_win_backward(it, backward.smem_bytes(it, problem), problem, arch)]
    queries = [it for it in queries if _may_win_backward(it, backward.dq_smem_bytes(it, problem), problem, arch)]
    if adds_dq:
        return tuple(keys)
    # Each kernel is swept with the other one held: their times add up.
    pairs = [(it, dq) for it in keys[:1] for dq in queries] + [(it, dq) for it in keys for dq in queries[:1]]
    return tuple(dict.fromkeys(replace(it, dq=dq) for it, dq in pairs))


def _may_win_backward(config: BackwardConfig | QueryConfig, smem: int, problem: Problem, arch: Arch) -> bool:
    if not arch.is_gpu or smem > arch.smem_per_block or config.occupancy * (smem + KIB) > arch.smem_per_sm:
        return False
    threads = config.occupancy * config.threads
    if config.occupancy > 1 and threads <= 256:
        return False  # 255 registers a thread leave room for 256 threads: what occupancy=1 gives, too
    if config.tile_m == 32 and config.stages == 1 and config.threads > 128:
        return False  # a barrier every 32 queries is for where nothing else fits
    has_room_for_two = arch.smem_per_block > 128 * KIB and problem.head_dim <= 128
    if threads == config.threads == 128 and has_room_for_two and 2 * (smem + KIB) > arch.smem_per_sm:
        return False  # four warps alone on an SM starve it
    room = min(255, arch.registers_per_sm // threads)
    return backward.registers_at_least(config, problem) + _REGISTERS_BESIDE <= room


# ---------------------------------------------------------------- Hopper's forward

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
)
"""Tried with the first shape only: what a technique is worth, rather than what may win."""
_OPEN: tuple[Mapping[str, Any], ...] = (
    *({"pingpong": False, "tma_store": tma_store} for tma_store in (True, False)),
    *({"pingpong": True, "tma_store": tma_store} for tma_store in (True, False)),
    *({"q_in_registers": True, "tma_store": tma_store} for tma_store in (True, False)),
)
"""Choices that sweeps take either way, from head_dim 129 on; each shape but the first is tried with fewer of them."""


def wgmma_candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[WgmmaConfig]:
    """Shapes, each with ways to run it, then single changes of the first."""
    widest = next((it for it in SHAPES if problem.head_dim <= it), None)
    fits = partial(variant.fits, problem, arch)
    alone = "one_tile" if problem.is_banded else "static"  # the third loses in each
    orders: list[dict[str, Any]] = [{"scheduler": "dynamic"}]
    orders += [{"scheduler": alone, "cluster": cluster} for cluster in (1, 2)]
    lazy_max = not problem.has_score
    found: list[WgmmaConfig | None] = []
    for number, (tile_m, tile_n, q_slots) in enumerate(SHAPES[widest] if widest else ()):
        config = WgmmaConfig(tile_m=tile_m, tile_n=tile_n, q_slots=q_slots, pingpong=True, lazy_max=lazy_max)
        choices = _OPEN[: (6, 2, 1, 1)[number]] if problem.head_dim > 128 else ({},)
        tried = [{**choice, **order} for choice in choices for order in orders]
        found += (_deepest(fits, replace(config, **way)) for way in (*tried, *(_ALONE if number == 0 else ())))
    return tuple(dict.fromkeys(config for config in found if config is not None))


def _deepest(fits: Callable[[Config], tuple[Reason, ...]], config: WgmmaConfig) -> WgmmaConfig | None:
    """`config` with as many stages as fit; None where three are too many."""
    tried = (replace(config, stages=stages) for stages in range(16, 2, -1))
    return next((it for it in tried if not fits(it)), None)


# ---------------------------------------------------------------- Hopper's backward


_KEPT: tuple[Mapping[str, Any], ...] = (
    {},
    {"v_in_registers": True},
    {"k_in_registers": True, "v_in_registers": True},
    {"early_scores": True},
    {"early_scores": True, "k_in_registers": True},
)
_BUFFERS = ((2, 2), (3, 2), (3, 3), (4, 3))  # of Q and of dO


def wgmma_backward_candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[WgmmaBackwardConfig]:
    """Configs that fit, of all that can be kept in registers and buffered; as many columns of dQ as have room."""
    if not arch.is_gpu:
        return ()
    plain = WgmmaBackwardConfig(
        tile_m=64, tile_n=128, half_dq=problem.head_dim >= WIDE_FROM, stream_k=most_multiprocessors(arch)
    )
    tried = (
        replace(plain, k_stages=k_stages, q_stages=q_stages, dout_stages=dout_stages, dq_by_tma=by_tma, **kept)
        for kept, by_tma, k_stages, (q_stages, dout_stages) in itertools.product(_KEPT, (False, True), (1, 2), _BUFFERS)
    )
    return tuple(it for it in tried if not variant.fits(problem, arch, it))


_KEY_BUFFERS = ((2, 2), (3, 2), (3, 3), (4, 3))  # of Q and of dO, in the kernel of dk and dv
_QUERY_BUFFERS = ((2, 1), (2, 2), (3, 1), (3, 2))  # of K and of V, in that of dq


def two_pass_candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[WgmmaTwoPassConfig]:
    """Configs that fit. Each kernel is swept with the other one held: their times add up."""
    if not arch.is_gpu:
        return ()
    plain = WgmmaTwoPassConfig(tile_m=64, tile_n=64)
    ways: list[Mapping[str, Any]] = [
        {"q_stages": q_stages, "dout_stages": dout_stages, "kv_in_registers": kept, "ahead": ahead}
        for (q_stages, dout_stages), kept, ahead in itertools.product(_KEY_BUFFERS, (False, True), (False, True))
    ]
    ways += [
        {"k_stages": k_stages, "v_stages": v_stages, "dq_ahead": ahead}
        for (k_stages, v_stages), ahead in itertools.product(_QUERY_BUFFERS, (False, True))
    ]
    if problem.reads_keys:
        ways += [{"k_stages": k_stages, "v_stages": v_stages, "dp_late": True} for k_stages, v_stages in _QUERY_BUFFERS]
    tried = (replace(plain, **way) for way in ways)
    return tuple(dict.fromkeys(it for it in tried if not variant.fits(problem, arch, it)))
