"""Tiles of the CUDA backward as data: its configs, what of them fits a GPU, the rules, and what a sweep tries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from multiattn.cuda.configs import ELEMENT_BYTES, FRAGMENT_ROWS, padded, too_large
from multiattn.plan.arch import KIB, WARP_THREADS, Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import COMPILED, Config, Rule
from multiattn.plan.support import Reason
from multiattn.problem import Problem

FP32_BYTES = 4
ROW_TILE = 64
"""Queries of a block that makes delta or converts dq."""
ROW_THREADS = 256
_WIDE_SINCE = (9, 0)
"""Vector additions to global memory came with this compute capability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryConfig(Config):
    """Launch parameters of the kernel of dq alone, `kernels/backward_q.cuh`; its warps split the queries."""

    warps: int
    stages: int
    """Buffers of K and of V: 1 or 2."""
    occupancy: int = 1
    """Blocks on an SM that the compiler must leave registers for."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.warps * WARP_THREADS


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig(Config):
    """Launch parameters of the kernel of dk and dv, `kernels/backward.cuh`; pairs of its warps split the keys."""

    warps: int
    stages: int
    """Buffers of Q and of dO: 1 or 2."""
    occupancy: int = 1
    """Blocks on an SM that the compiler must leave registers for."""
    wide: bool = False
    """dq is added up 16 bytes at a time instead of 4; sm90 and later."""
    dq: QueryConfig | None = None
    """Of the kernel of dq; None where dq is added up beside dk and dv."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.warps * WARP_THREADS


def smem_bytes(config: BackwardConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block of the dk and dv kernel, which asserts when compiled that it needs just this."""
    row = padded(problem.head_dim) * ELEMENT_BYTES
    weights = config.tile_m * config.tile_n * ELEMENT_BYTES
    ds = weights if config.dq is None else 0
    statistics = 2 * config.tile_m * FP32_BYTES
    return 2 * config.tile_n * row + weights + ds + config.stages * (2 * config.tile_m * row + statistics)


def dq_smem_bytes(config: QueryConfig, problem: Problem) -> int:
    """The same for the kernel of dq."""
    return 2 * (config.tile_m + config.stages * config.tile_n) * padded(problem.head_dim) * ELEMENT_BYTES


def tiles(seq: int, tile: int) -> int:
    """Tiles that cover a sequence."""
    return -(-seq // tile)


def dq_sum_bytes(problem: Problem) -> int:
    """Workspace in which dq is added up: fp32, in whole fragments of 16 queries and 16 columns."""
    rows = tiles(problem.seq_q, FRAGMENT_ROWS) * FRAGMENT_ROWS
    return problem.batch * problem.heads_q * rows * padded(problem.head_dim) * FP32_BYTES


def delta_bytes(problem: Problem) -> int:
    """Workspace of one fp32 per query, in whole units of 16 bytes, so that what follows it is aligned."""
    return -(-problem.batch * problem.heads_q * problem.seq_q * FP32_BYTES // 16) * 16


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes that a launch takes from the allocator."""
    assert isinstance(config, BackwardConfig)
    return delta_bytes(problem) + (dq_sum_bytes(problem) if config.dq is None else 0)


def why_not(adds_dq: bool, problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`; `adds_dq`: dq is added up beside dk and dv."""
    assert isinstance(config, BackwardConfig)
    if adds_dq != (config.dq is None):
        allowed = "dq=None, as dq is added up beside dk and dv" if adds_dq else "a QueryConfig as dq"
        return (Reason(code="config", got=str(config), allowed=allowed),)
    reasons = []
    if config.tile_m % FRAGMENT_ROWS or config.tile_m < 1:
        allowed = f"tile_m in multiples of {FRAGMENT_ROWS}"
        reasons.append(Reason(code="config", got=str(config), allowed=allowed))
    if config.tile_n % (FRAGMENT_ROWS * (config.warps // 2)) or config.tile_n < 1:
        allowed = f"tile_n in multiples of {FRAGMENT_ROWS} per pair of warps"
        reasons.append(Reason(code="config", got=str(config), allowed=allowed))
    if config.wide and arch.is_gpu and arch.capability < _WIDE_SINCE:
        reasons.append(Reason(code="config", got=f"wide on {arch.name}", allowed="wide on sm90 and later"))
    needed = [smem_bytes(config, problem)]
    blocks = [
        tiles(problem.seq_kv, config.tile_n) * problem.heads_kv * problem.batch,
        tiles(problem.seq_q, ROW_TILE) * problem.heads_q * problem.batch,
    ]
    if config.dq is not None:
        if config.dq.tile_m % (FRAGMENT_ROWS * config.dq.warps) or config.dq.tile_n % FRAGMENT_ROWS:
            allowed = f"dq: tile_m in multiples of {FRAGMENT_ROWS} per warp, tile_n in multiples of {FRAGMENT_ROWS}"
            reasons.append(Reason(code="config", got=str(config), allowed=allowed))
        needed.append(dq_smem_bytes(config.dq, problem))
        blocks.append(tiles(problem.seq_q, config.dq.tile_m) * problem.heads_q * problem.batch)
    kernels: tuple[BackwardConfig | QueryConfig, ...] = (config,) if config.dq is None else (config, config.dq)
    for what in kernels:
        if what.warps not in (2, 4, 8, 16):
            reasons.append(Reason(code="config", got=f"warps={what.warps}", allowed="2, 4, 8, 16"))
        if what.stages not in (1, 2):
            reasons.append(Reason(code="config", got=f"stages={what.stages}", allowed="1, 2"))
    return (*reasons, *too_large(config, arch, max(needed), max(blocks)))


_BIG_SMEM = ("sm80", "sm100", "sm103")  # 163 KiB a block and more
_SMALL_SMEM = ("sm86", "sm89", "sm120", "sm121")  # 99 KiB
_WIDE = ("sm90", "sm100", "sm103", "sm120", "sm121")
_H200 = "H200, 2026-11-21, NVRTC 13.0, B4 N=4096 H*D=2048 bf16, best of the candidates: "


def _keys(tile_m: int, tile_n: int, warps: int, stages: int, occupancy: int = 1) -> BackwardConfig:
    return BackwardConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, occupancy=occupancy)


def _atomic_rules() -> Iterator[Rule[BackwardConfig]]:
    yield Rule(
        arches=("cpu",),
        config=_keys(32, 32, 4, 2),
        why="emulated: small tiles build and run fast, yet have two pairs of warps and two stages",
    )
    yield Rule(
        arches=("sm90",),
        head_dim_max=64,
        config=replace(_keys(64, 64, 4, 2), wide=True),
        why=_H200 + "279 TFLOPS full, 262 causal (SDPA flash 280, 246); 1 stage 257 and 242; 64x128 244 and 232",
    )
    yield Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        banded=False,
        config=replace(_keys(64, 128, 8, 2), wide=True),
        why=_H200 + "312 TFLOPS (SDPA flash 304); 1 stage 305; 32x64 with 4 warps 300",
    )
    yield Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        banded=True,
        config=replace(_keys(64, 128, 8, 1), wide=True),
        why=_H200 + "288 TFLOPS (SDPA flash 276); 2 stages 297, but they spill; 64x64 with 4 warps 279",
    )
    yield Rule(
        arches=("sm90",),
        head_dim_min=129,
        config=replace(_keys(64, 64, 8, 2), wide=True),
        why=_H200 + "244 TFLOPS full, 241 causal (SDPA flash 255, 232); 1 stage 239 and 231; 32x64 216 and 204",
    )
    for arches, wide in ((_BIG_SMEM, True), (_SMALL_SMEM, True), (_BIG_SMEM, False), (_SMALL_SMEM, False)):
        chosen = tuple(name for name in arches if (name in _WIDE) == wide)
        small = arches == _SMALL_SMEM
        yield Rule(
            arches=chosen,
            head_dim_max=64,
            config=replace(_keys(64, 64, 4, 1 if small else 2), wide=wide),
            why=COMPILED + "what is best on H200; two blocks an SM where it has 128 KiB",
        )
        yield Rule(
            arches=chosen,
            head_dim_min=65,
            head_dim_max=128,
            config=replace(_keys(32, 64, 4, 2) if small else _keys(64, 128, 8, 1), wide=wide),
            why=COMPILED + ("what fits 99 KiB with two stages" if small else "what is best on H200 and spills nothing"),
        )
        yield Rule(
            arches=chosen,
            head_dim_min=129,
            config=replace(_keys(32, 32, 4, 1) if small else _keys(64, 64, 8, 1), wide=wide),
            why=COMPILED + ("what fits 99 KiB" if small else "what is best on H200 of what fits 163 KiB"),
        )


def _two_pass_rules() -> Iterator[Rule[BackwardConfig]]:
    def both(keys: BackwardConfig, *dq: int) -> BackwardConfig:
        tile_m, tile_n, warps, stages = dq
        return replace(keys, dq=QueryConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages))

    yield Rule(
        arches=("cpu",),
        config=both(_keys(32, 32, 4, 2), 32, 32, 2, 2),
        why="emulated: small tiles build and run fast, yet have several warps and two stages",
    )
    yield Rule(
        arches=("sm90",),
        head_dim_max=64,
        config=both(_keys(64, 128, 8, 2), 128, 64, 4, 2),
        why=_H200 + "218 TFLOPS full, 212 causal (atomic 279, 262); dq with 128x32 215 and 205",
    )
    yield Rule(
        arches=("sm90",),
        head_dim_min=65,
        head_dim_max=128,
        config=both(_keys(64, 128, 8, 2), 128, 32, 4, 2),
        why=_H200 + "255 TFLOPS full, 247 causal (atomic 312, 288); dq with 1 stage 249, 235; with 64x64 242, 232",
    )
    yield Rule(
        arches=("sm90",),
        head_dim_min=129,
        config=both(_keys(64, 64, 8, 2), 128, 64, 8, 1),
        why=_H200 + "205 TFLOPS full, 201 causal (atomic 244, 241); dq with 64x32 and 4 warps 202 and 197",
    )
    for arches in (_BIG_SMEM, _SMALL_SMEM):
        small = arches == _SMALL_SMEM
        yield Rule(
            arches=arches,
            head_dim_max=64,
            config=both(_keys(64, 64, 4, 2), 64, 64, 4, 2),
            why=COMPILED + "close to what is best on H200, with fewer registers",
        )
        yield Rule(
            arches=arches,
            head_dim_min=65,
            head_dim_max=128,
            config=both(_keys(32, 64, 4, 2) if small else _keys(64, 128, 8, 1), 64, 64, 4, 1),
            why=COMPILED + "what fits and spills nothing",
        )
        yield Rule(
            arches=arches,
            head_dim_min=129,
            config=both(_keys(32, 32, 4, 1), 64, 16, 4, 1) if small else both(_keys(64, 64, 8, 1), 64, 32, 4, 1),
            why=COMPILED + "what fits",
        )


ATOMIC_RULES: tuple[Rule[BackwardConfig], ...] = tuple(_atomic_rules())
TWO_PASS_RULES: tuple[Rule[BackwardConfig], ...] = tuple(_two_pass_rules())
"""Of the variants of these names; first match wins."""


def registers_at_least(config: BackwardConfig | QueryConfig, problem: Problem) -> int:
    """32-bit registers a thread needs for its accumulators; operands, addresses and read-ahead come on top."""
    if isinstance(config, QueryConfig):
        return config.tile_m // config.warps * (2 * config.tile_n + padded(problem.head_dim)) // WARP_THREADS
    return config.tile_n // (config.warps // 2) * (config.tile_m + padded(problem.head_dim)) // WARP_THREADS


_SHAPES = ((64, 128, 8), (64, 64, 4), (32, 64, 4), (32, 128, 8))  # tile_m, tile_n, warps
_DQ_SHAPES = ((64, 64, 4), (64, 32, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8))
_WIDE_HEAD_SHAPES = ((64, 64, 8), (32, 64, 8), (32, 32, 4))  # beyond D=128
_WIDE_HEAD_DQ_SHAPES = ((64, 32, 4), (64, 16, 4), (128, 64, 8))
_REGISTERS_BESIDE = 40  # of a thread, for what `registers_at_least` leaves out


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[BackwardConfig]:
    """Configs worth timing: those that fit shared memory and, by a lower bound, the registers."""
    adds_dq = dict(variant.flags)["dq"] == "atomic"
    wide = adds_dq and arch.is_gpu and arch.capability >= _WIDE_SINCE
    is_wide_head = problem.head_dim > 128
    keys = [
        BackwardConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, occupancy=occupancy, wide=wide)
        for tile_m, tile_n, warps in (_WIDE_HEAD_SHAPES if is_wide_head else _SHAPES)
        for stages in (2, 1)
        for occupancy in (1, 2, 3)
    ]
    queries = [
        QueryConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, occupancy=occupancy)
        for tile_m, tile_n, warps in (_WIDE_HEAD_DQ_SHAPES if is_wide_head else _DQ_SHAPES)
        for stages in (1, 2)
        for occupancy in (1, 2, 3)
    ]
    keys = [config for config in keys if _is_worth_timing(config, smem_bytes(config, problem), problem, arch)]
    queries = [config for config in queries if _is_worth_timing(config, dq_smem_bytes(config, problem), problem, arch)]
    if adds_dq:
        return tuple(keys)
    # Each kernel is swept with the other one held: their times add up.
    first, other = keys[:1], queries[:1]
    pairs = [(config, dq) for config in first for dq in queries] + [(config, dq) for config in keys for dq in other]
    return tuple(dict.fromkeys(replace(config, dq=dq) for config, dq in pairs))


def _is_worth_timing(config: BackwardConfig | QueryConfig, smem: int, problem: Problem, arch: Arch) -> bool:
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
    return registers_at_least(config, problem) + _REGISTERS_BESIDE <= room
