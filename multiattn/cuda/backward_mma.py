"""The backward with mma.sync: dk and dv, with dq added up beside them or by a kernel of its own; `backward.cuh`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from multiattn.cuda.family import ELEMENT_BYTES, FP32_BYTES, FRAGMENT_ROWS, NO_FLAGS, FamilyConfig, padded, tiles_of
from multiattn.cuda.naming import aggregate, packed_tiles, traits_type, walking_kernel
from multiattn.cuda.score import sends_raw
from multiattn.cuda.source import BackwardParams, Instance, PlannedLaunch
from multiattn.packed import TILE_LISTS
from multiattn.plan import remedies
from multiattn.plan.arch import KIB, WARP_THREADS, Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.config import Config
from multiattn.plan.limits import failed, limit_checks, limited, one_of, size_checks
from multiattn.plan.schedule import heads_side_by_side, key_tiles, kv_heads_side_by_side, query_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem

ROW_TILE = 64
"""Queries of a block that makes delta or converts dq."""
ROW_THREADS = 256
WIDE_SINCE = (9, 0)
"""Vector additions to global memory came with this compute capability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductConfig(Config):
    """Fields of the kernels of dk and dv and of dq; warps split the rows that a block owns, or share them."""

    warps: int = limited(one_of(2, 4, 8, 16))
    stages: int = limited(one_of(1, 2))
    """Buffers of what the kernel walks over, K and V or Q and dO."""
    blocks_per_sm: int = 1
    """Blocks on an SM that the compiler must leave registers for."""
    column_warps: int = limited(one_of(1, 2, 4, 8), default=1)
    """Warps that share rows of a gradient and have columns of it each: where it is too wide for one."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP_THREADS


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryConfig(ProductConfig):
    """Launch parameters of the kernel of dq alone, `kernels/backward_q.cuh`."""

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, which the kernel asserts when compiled."""
        ds = self.tile_m * self.tile_n if self.column_warps > 1 else 0
        return ((self.tile_m + self.stages * self.tile_n) * _row_of_both(problem) + ds) * ELEMENT_BYTES

    def registers_at_least(self, problem: Problem) -> int:
        """32-bit registers a thread needs for its accumulators; operands, addresses and read-ahead come on top."""
        return self.tile_m * (2 * self.tile_n + padded(problem.head_dim)) // self.warps // WARP_THREADS

    def launch(self, plan: Plan) -> PlannedLaunch:
        """The kernel, with a block for each tile of queries."""
        kernel = _product(plan, self, "backward_queries", "backward_q.cuh", "QueryTraits")
        return PlannedLaunch(kernel=kernel, blocks=query_tiles(plan.problem, self.tile_m))


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig(FamilyConfig, ProductConfig):
    """Launch parameters of the kernel of dk and dv, `kernels/backward.cuh`; pairs of its warps split the keys."""

    wide: bool = False
    """dq is added up 16 bytes at a time instead of 4; sm90 and later."""
    dq: QueryConfig | None = None
    """The config of the kernel of dq; None where dq is added up beside dk and dv."""

    def settled(self, problem: Problem, arch: Arch) -> BackwardConfig:
        """The config with tiles that lie in one block of a block mask, and warps that have 16 rows each."""
        if (blocks := problem.blocks) is None:
            return self
        tile_m, tile_n = math.gcd(self.tile_m, blocks.queries), math.gcd(self.tile_n, blocks.keys)
        pairs = min(self.warps // 2, tile_n // FRAGMENT_ROWS * self.column_warps)
        if (dq := self.dq) is not None:
            rows, keys = math.gcd(dq.tile_m, blocks.queries), math.gcd(dq.tile_n, blocks.keys)
            warps = min(dq.warps, rows // FRAGMENT_ROWS * dq.column_warps)
            dq = replace(dq, tile_m=rows, tile_n=keys, warps=warps)
        return replace(self, tile_m=tile_m, tile_n=tile_n, warps=2 * pairs, dq=dq)

    def listed(self) -> Mapping[str, int]:
        """Tiles of queries of the kernel that owns them: of dq, or of rows."""
        queries, keys = TILE_LISTS
        return {queries: ROW_TILE if self.dq is None else self.dq.tile_m, keys: self.tile_n}

    def smem_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, which the kernel asserts when compiled."""
        row, scores = _row_of_both(problem) * ELEMENT_BYTES, self.tile_m * self.tile_n
        weights = scores * (FP32_BYTES if sends_raw(problem) else ELEMENT_BYTES)
        rounded = scores * ELEMENT_BYTES if self.dq is None or self.column_warps > 1 else 0  # dS, or P
        statistics = 2 * self.tile_m * FP32_BYTES
        return self.tile_n * row + weights + rounded + self.stages * (self.tile_m * row + statistics)

    def registers_at_least(self, problem: Problem) -> int:
        """32-bit registers a thread needs for its accumulators; operands, addresses and read-ahead come on top."""
        width = padded(problem.width)
        return self.tile_n * (self.tile_m + width) // (self.warps // 2) // WARP_THREADS

    def areas(self, problem: Problem) -> dict[str, int]:
        """With sinks delta is an operand."""
        delta = {} if problem.has_sinks else {"delta": problem.layouts["delta"].size_bytes}
        return {**delta, **({"dq_sum": dq_sum_bytes(problem)} if self.dq is None else {})}

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Reasons of the variant, which has a kernel of dq or not, or of either kernel."""
        adds_dq = flags["dq"] == "atomic"
        if adds_dq != (self.dq is None):
            allowed = "dq=None, as dq is added up beside dk and dv" if adds_dq else "a QueryConfig as dq"
            return (Reason(code="config", got=str(self), allowed=allowed, hint=remedies.CONFIG),)
        unit, pair = FRAGMENT_ROWS, FRAGMENT_ROWS * (self.warps // 2 // self.column_warps)
        needed = [self.smem_bytes(problem)]
        blocks = [key_tiles(problem, self.tile_n), query_tiles(problem, ROW_TILE)]
        has_wide = not arch.is_gpu or arch.capability >= WIDE_SINCE
        is_shared = self.warps // 2 % self.column_warps == 0
        keys_fit = is_shared and pair > 0 and self.tile_n % pair == 0 and self.tile_n > 0
        checks = [
            (self.tile_m % unit == 0 and self.tile_m > 0, str(self), f"tile_m in multiples of {unit}"),
            (keys_fit, str(self), f"tile_n in multiples of {unit} per pair of warps, or pairs that share keys"),
            (not self.wide or has_wide, f"wide on {arch.name}", "wide on sm90 and later"),
            *limit_checks(self),
        ]
        if (dq := self.dq) is not None:
            allowed = f"dq: tile_m in multiples of {unit} per warp, or warps that share rows, tile_n of {unit}"
            rows = max(dq.warps // dq.column_warps, 1)
            rows_fit = dq.warps % dq.column_warps == dq.tile_m % (unit * rows) == dq.tile_n % unit == 0
            checks.append((rows_fit, str(self), allowed))
            checks += limit_checks(dq)
            needed.append(dq.smem_bytes(problem))
            blocks.append(query_tiles(problem, dq.tile_m))
        return failed((*checks, *size_checks(self, arch, max(needed), max(blocks))))

    def launches(self, plan: Plan) -> tuple[PlannedLaunch, ...]:
        """Delta; then all gradients and dq from its sums, or dq, then dk and dv."""
        problem, adds_dq = plan.problem, self.dq is None
        dq, flags = ("_dqwide" if self.wide else "_dq") * adds_dq, {"adds_dq": adds_dq, "wide": self.wide}
        kernel = _product(plan, self, "backward_keys", "backward.cuh", "BackwardTraits", dq, **flags)
        keys = PlannedLaunch(kernel=kernel, blocks=key_tiles(problem, self.tile_n))
        prepare = rows_launch("prepare_rows", problem, adds_dq=adds_dq, wide=self.wide)
        if self.dq is None:
            return prepare, keys, rows_launch("convert_dq", problem, adds_dq=adds_dq, wide=self.wide)
        return prepare, self.dq.launch(plan), keys

    def numbers(self, plan: Plan) -> dict[str, Any]:
        """Tiles of all kernels."""
        own = None if self.dq is None else self.dq.tile_m
        return backward_numbers(plan.problem, self, ROW_TILE, own, kv_heads_side_by_side(plan.problem))

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterator[BackwardConfig]:
        """Configs that, by a lower bound, have the registers. Each kernel is swept with the other one held: their times
        add up."""
        adds_dq = dict(variant.flags)["dq"] == "atomic"
        wide = adds_dq and arch.is_gpu and arch.capability >= WIDE_SINCE
        columns, (key_shapes, query_shapes) = _shapes_of(problem.width)
        more: dict[str, Any] = {"column_warps": columns}
        own = {**more, "wide": wide}
        keys = [
            cls(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, blocks_per_sm=blocks_per_sm, **own)
            for (tile_m, tile_n, warps), stages, blocks_per_sm in itertools.product(key_shapes, (2, 1), (1, 2, 3))
        ]
        keys = [it for it in keys if _may_win(it, problem, arch)]
        if adds_dq:
            yield from keys
            return
        queries = [
            QueryConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, blocks_per_sm=blocks_per_sm, **more)
            for (tile_m, tile_n, warps), stages, blocks_per_sm in itertools.product(query_shapes, (1, 2), (1, 2, 3))
        ]
        queries = [it for it in queries if _may_win(it, problem, arch)]
        pairs = [(it, dq) for it in keys[:1] for dq in queries] + [(it, dq) for it in keys for dq in queries[:1]]
        yield from (replace(it, dq=dq) for it, dq in pairs)


def _product(
    plan: Plan,
    config: BackwardConfig | QueryConfig,
    entry: str,
    header: str,
    traits: str,
    options: str = "",
    **flags: bool | int,
) -> Instance:
    """A kernel that multiplies; `flags` are constants beside its sizes."""
    sizes = {name: getattr(config, name) for name in ("tile_m", "tile_n", "warps", "stages")}
    columns = f"c{config.column_warps}" if config.column_warps > 1 else ""
    flags |= {"column_warps": config.column_warps} if columns else {}
    tiles = f"{config.tile_m}x{config.tile_n}_w{config.warps}{columns}_s{config.stages}_o{config.blocks_per_sm}"
    return walking_kernel(
        plan,
        traits,
        aggregate("BackwardConfig", **sizes, **flags),
        entry=entry,
        sizes=f"{tiles}{options}",
        header=header,
        params=BackwardParams,
        threads=config.threads,
        blocks_per_sm=config.blocks_per_sm,
        smem_bytes=config.smem_bytes(plan.problem),
    )


def _row_of_both(problem: Problem) -> int:
    """Elements of a row of Q and one of dO in shared memory, or of K and V."""
    return padded(problem.head_dim) + padded(problem.head_dim_v)


# ---------------------------------------------------------------- of every backward


def dq_sum_bytes(problem: Problem) -> int:
    """Workspace in which dq is added up: fp32, in whole fragments of 16 queries and 16 columns.

    Each sequence of a packed batch has fragments of its own.
    """
    rows = tiles_of(problem, problem.seq_q, FRAGMENT_ROWS) * FRAGMENT_ROWS
    return problem.batch * problem.heads_q * rows * padded(problem.head_dim) * FP32_BYTES


def rows_launch(entry: str, problem: Problem, *, adds_dq: bool, wide: bool) -> PlannedLaunch:
    """The kernel before, or after, the products of a backward."""
    packed, overlaps = problem.packing is not None, entry == "convert_sums"
    lists = packed_tiles(problem, cuts=overlaps)
    is_cut = packed and overlaps and problem.blocks is not None
    order = ("_wide" if wide else "_narrow") if adds_dq else ""
    sizes = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
    sizes |= {"threads": ROW_THREADS, "tile_rows": ROW_TILE}
    config = aggregate("RowConfig", **sizes, has_dq_sum=adds_dq, wide=wide)
    kernel = Instance(
        name=f"{entry}_{problem.dtype}_{problem.widths_in_names}{order}{'_packed' * packed}{'_cut' * is_cut}",
        header="backward_wgmma_rows.cuh" if overlaps else "backward_rows.cuh",
        entry=entry,
        traits=traits_type("RowTraits", problem, config, *lists),
        packed=packed,
        params=BackwardParams,
        threads=ROW_THREADS,
        overlaps=overlaps,
    )
    return PlannedLaunch(kernel=kernel, blocks=query_tiles(problem, ROW_TILE))


def backward_numbers(
    problem: Problem, config: Config, row_tile: int, own_tile: int | None, sections_kv: int
) -> dict[str, Any]:
    """Numbers that kernels of a backward are told: tiles of rows, of the kernel of dk and dv, and of one of dq."""
    return {
        "heads_q_all": problem.batch * problem.heads_q,
        "heads_kv_all": problem.batch * problem.heads_kv,
        "tiles_rows": tiles_of(problem, problem.seq_q, row_tile),
        "tiles_q": tiles_of(problem, problem.seq_q, config.tile_m),
        "tiles_kv": tiles_of(problem, problem.seq_kv, config.tile_n),
        "tiles_q_own": 0 if own_tile is None else tiles_of(problem, problem.seq_q, own_tile),
        "sections_q": heads_side_by_side(problem),
        "sections_kv": sections_kv,
    }


# ---------------------------------------------------------------- what a sweep tries

Shapes = tuple[tuple[int, int, int], ...]
_KEY_SHAPES: Shapes = ((64, 128, 8), (64, 64, 4), (32, 64, 4), (32, 128, 8))  # tile_m, tile_n, warps
_QUERY_SHAPES: Shapes = ((64, 64, 4), (64, 32, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8))
_SHAPES_FROM_129 = ((64, 64, 8), (32, 64, 8), (32, 32, 4)), ((64, 32, 4), (64, 16, 4), (128, 64, 8))  # of head_dim
_SHAPES_FROM_257 = ((32, 32, 8), (16, 32, 8), (64, 32, 8)), ((64, 32, 8), (64, 16, 8), (32, 16, 4))
_REGISTERS_BESIDE = 40  # of a thread, for what `registers_at_least` leaves out


def _shapes_of(width: int) -> tuple[int, tuple[Shapes, Shapes]]:
    """Warps that share columns, and shapes of both kernels, by the wider of head_dim and head_dim_v."""
    if width <= 128:
        return 1, (_KEY_SHAPES, _QUERY_SHAPES)
    return (1, _SHAPES_FROM_129) if width <= 256 else (4, _SHAPES_FROM_257)


def _may_win(config: BackwardConfig | QueryConfig, problem: Problem, arch: Arch) -> bool:
    smem = config.smem_bytes(problem)
    if not arch.is_gpu or smem > arch.smem_per_block or config.blocks_per_sm * (smem + KIB) > arch.smem_per_sm:
        return False
    threads = config.blocks_per_sm * config.threads
    if config.blocks_per_sm > 1 and threads <= 256:
        return False  # 255 registers a thread leave room for 256 threads: what blocks_per_sm=1 gives, too
    if config.tile_m == 32 and config.stages == 1 and config.threads > 128:
        return False  # a barrier every 32 queries is for where nothing else fits
    has_room_for_two = arch.smem_per_block > 128 * KIB and problem.width <= 128
    if threads == config.threads == 128 and has_room_for_two and 2 * (smem + KIB) > arch.smem_per_sm:
        return False  # four warps alone on an SM starve it
    room = min(255, arch.registers_per_sm // threads)
    return config.registers_at_least(problem) + _REGISTERS_BESIDE <= room
