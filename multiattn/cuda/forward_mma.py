"""The forward with mma.sync, one template for every point of the axes; `kernels/forward.cuh` is the kernel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from multiattn.cuda.axes import Axes, why_illegal
from multiattn.cuda.family import ELEMENT_BYTES, FP32_BYTES, FRAGMENT_ROWS, NO_FLAGS, FamilyConfig, padded, tiles_of
from multiattn.cuda.naming import aggregate, aggregate_of, enumerator, walking_kernel
from multiattn.cuda.source import ForwardParams, PlannedLaunch
from multiattn.packed import TILE_LISTS
from multiattn.plan.arch import KIB, WARP_THREADS, Arch
from multiattn.plan.backend import Plan, Variant, variant_of
from multiattn.plan.limits import between, failed, limit_checks, limited, one_of, size_checks
from multiattn.plan.schedule import heads_side_by_side, query_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem

REGISTERS_MAX = 224
"""The registers of a thread, of its 255, that `registers_at_least` may count."""

_SHAPES = ((64, 4), (128, 4), (128, 8))  # (tile_m, warps) that a sweep tries
_ROWS = ((64, 4, 1), (128, 8, 1))  # (tile_m, warps, column_warps) of split_q with tiling
_COLUMNS = ((32, 8, 8), (32, 8, 4), (64, 8, 4), (64, 8, 2), (64, 4, 2))  # and of split_kv
_SWEPT_REGISTERS = 208  # of 255: the rest is addresses, read-ahead and the softmax state
_REGISTERS_OF_THREE = 128  # of 168, which three blocks of four warps on an SM leave a thread
_ROOM_FOR_Q = 176  # up to here Q in registers costs nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaConfig(FamilyConfig):
    """Launch parameters of the forward kernel; `kernels/forward_traits.cuh` says what each does."""

    warps: int = limited(one_of(2, 4, 8, 16))
    """Warps of a block; they split the tile's queries, whole fragments of 16 each."""
    stages: int = limited(between(1, 4))
    """Buffers of K and of V, or of both where they share. One: loaded in turns. More: `stages - 1` ahead."""
    q_in_registers: bool = False
    """Q's fragments stay in registers, or are read from shared memory for every block of keys."""
    q_streamed: bool = False
    """With tiling: Q's slices are loaded again with those of K, for every block of keys. Else Q is whole in smem."""
    column_warps: int = 1
    """Warps that share a row, with split_kv: of the keys for its scores, of head_dim for its output."""
    dim_slice: int = limited(one_of(64, 128, 256), default=64)
    """Elements of head_dim of a slice of K, with tiling."""
    key_slice: int = 16
    """Keys of a slice of V, with tiling qkv."""
    blocks_per_sm: int = 1
    """Blocks on an SM that the compiler must leave registers for."""

    @property
    def q_place(self) -> str:
        """``registers``, ``streamed``, ``shared``; ``both`` is nowhere."""
        if self.q_in_registers and self.q_streamed:
            return "both"
        return "registers" if self.q_in_registers else "streamed" if self.q_streamed else "shared"

    @property
    def row_warps(self) -> int:
        """Groups of warps that have rows of their own."""
        return self.warps // self.column_warps

    def settled(self, problem: Problem, arch: Arch) -> CudaConfig:
        """The config with tiles that lie in one block of a block mask, and warps that have 16 rows and keys."""
        if (blocks := problem.blocks) is None or min(self.tile_m, self.tile_n, self.warps, self.column_warps) < 1:
            return self
        tile_m, tile_n = math.gcd(self.tile_m, blocks.queries), math.gcd(self.tile_n, blocks.keys)
        columns = max(min(self.column_warps, tile_n // FRAGMENT_ROWS), 1)
        warps = min(self.warps // columns, tile_m // FRAGMENT_ROWS) * columns
        key_slice = math.gcd(self.key_slice, tile_n)
        return replace(self, tile_m=tile_m, tile_n=tile_n, warps=warps, column_warps=columns, key_slice=key_slice)

    def listed(self) -> Mapping[str, int]:
        """A forward owns tiles of queries."""
        return {TILE_LISTS[0]: self.tile_m}

    def smem_bytes(self, problem: Problem, axes: Axes) -> int:
        """Dynamic shared memory of a block, which its kernel asserts: Q, buffers of K and V, what warps exchange."""
        pieces = Pieces.of(axes, self, problem)
        q = self.tile_m * pieces.q_width
        k = self.tile_n * pieces.k_width + (self.tile_m * pieces.k_width if self.q_streamed else 0)
        v = pieces.v_rows * pieces.v_width
        if axes.share == "none":
            ring = self.stages * k + (1 if axes.tiling == "qk" else self.stages) * v
        else:
            ring = self.stages * max(k, v)
        held = max(q, ring) if axes.share == "qkv" else ring + (0 if self.q_streamed else q)
        if axes.warps == "split_q":
            return held * ELEMENT_BYTES
        exchanged = self.tile_m * self.tile_n * ELEMENT_BYTES + self.column_warps * self.tile_m * FP32_BYTES
        return held * ELEMENT_BYTES + exchanged

    def registers_at_least(self, problem: Problem, axes: Axes) -> int:
        """32-bit registers a thread needs for scores, output and kept Q; addresses and read-ahead come on top."""
        rows, pieces = self.tile_m // self.row_warps, Pieces.of(axes, self, problem)
        kept_q = rows * pieces.q_width // (2 * WARP_THREADS) if self.q_in_registers else 0
        return rows * (self.tile_n + pieces.v_width) // self.column_warps // WARP_THREADS + kept_q

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Reasons of the point, which hold for every config, or of the config."""
        axes = Axes(**flags)
        if wrong := why_illegal(axes) or self._wrong_shape(axes):
            return wrong
        pieces, places = Pieces.of(axes, self, problem), _places_of_q(axes)
        registers = self.registers_at_least(problem, axes)
        needed, most = (
            f"{registers} registers for scores, output and Q ({self})",
            f"up to {REGISTERS_MAX} of a thread's 255",
        )
        has_one_v = axes.share == "none" and axes.tiling == "qk"
        checks = (
            (self.q_place in places, f"q: {self.q_place} with {axes.name}", " or ".join(places)),
            (registers <= REGISTERS_MAX, needed, most),
            (
                not has_one_v or self.stages - 1 <= pieces.k_pieces,
                f"stages={self.stages} with {pieces.k_pieces} slices of K, and one buffer of V",
                f"up to {pieces.k_pieces + 1}",
            ),
        )
        blocks = query_tiles(problem, self.tile_m)
        return failed((*checks, *size_checks(self, arch, self.smem_bytes(problem, axes), blocks)))

    def _wrong_shape(self, axes: Axes) -> tuple[Reason, ...]:
        """Reasons why a config has no meaning: sizes that are no whole fragments."""
        has_columns = self.column_warps != 1
        columns = (
            has_columns == (axes.warps == "split_kv") and self.warps % max(1, self.column_warps) == 0,
            f"column_warps={self.column_warps} of warps={self.warps} with {axes.warps}",
            "1 with split_q; with split_kv a divisor of warps from 2 on",
        )
        if wrong := failed((*limit_checks(self), columns)):
            return wrong
        rows, keys = FRAGMENT_ROWS * self.row_warps, FRAGMENT_ROWS * self.column_warps
        is_whole = self.tile_m >= rows and self.tile_m % rows == 0 and self.tile_n >= keys and self.tile_n % keys == 0
        is_slice = self.key_slice >= FRAGMENT_ROWS and self.key_slice % FRAGMENT_ROWS == 0
        divides = is_slice and self.tile_n % self.key_slice == 0
        per_warp = f"tile_m in multiples of {rows}, tile_n in multiples of {keys}: {FRAGMENT_ROWS} a warp"
        slices = f"multiples of {FRAGMENT_ROWS} that divide tile_n={self.tile_n}"
        checks = (
            (is_whole, str(self), per_warp),
            (axes.tiling != "qkv" or divides, f"key_slice={self.key_slice}", slices),
        )
        return failed(checks)

    def constants(self, axes: Axes) -> tuple[str, str]:
        """The constants of the kernel, legal or not, behind the features of the problem."""
        point = aggregate(
            "Axes",
            warps=enumerator("Warps", axes.warps),
            share=enumerator("Share", axes.share),
            tiling=enumerator("Tiling", axes.tiling),
            **{f"swizzle_{tensor}": tensor in axes.swizzle for tensor in "qkv"},
            halves=axes.accumulator == "fp16",
        )
        names = ("tile_m", "tile_n", "warps", "column_warps", "stages", "dim_slice", "key_slice")
        return point, aggregate_of(self, *names, q_place=enumerator("QPlace", self.q_place))

    def launches(self, plan: Plan) -> tuple[PlannedLaunch, ...]:
        """One kernel, with a block for each tile of queries."""
        problem, axes = plan.problem, axes_of(plan)
        columns = f"c{self.column_warps}" if self.column_warps > 1 else ""
        slices = f"_{self.dim_slice}d{self.key_slice}k" if axes.tiling != "none" else ""
        tiles = f"{self.tile_m}x{self.tile_n}_w{self.warps}{columns}_s{self.stages}_q{self.q_place}"
        kernel = walking_kernel(
            plan,
            "ForwardTraits",
            *self.constants(axes),
            entry="forward",
            sizes=f"{axes.name.replace('+', '_')}_{tiles}{slices}_o{self.blocks_per_sm}",
            header="forward.cuh",
            params=ForwardParams,
            threads=self.warps * WARP_THREADS,
            blocks_per_sm=self.blocks_per_sm,
            smem_bytes=self.smem_bytes(problem, axes),
        )
        return (PlannedLaunch(kernel=kernel, blocks=query_tiles(problem, self.tile_m)),)

    def numbers(self, plan: Plan) -> dict[str, Any]:
        """Tiles and heads, and their order."""
        return forward_numbers(plan.problem, tiles_of(plan.problem, plan.problem.seq_q, self.tile_m))

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterator[CudaConfig]:
        """Configs that, by a lower bound, have the registers."""
        axes = axes_of(variant)
        if axes.tiling != "none" or axes.warps == "split_kv":
            yield from _of_rungs(axes, problem)
            return
        for (tile_m, warps), tile_n, stages, kept, blocks_per_sm in itertools.product(
            _SHAPES, (32, 64, 128), (1, 2, 3), (True, False), (1, 3)
        ):
            sizes: dict[str, Any] = {"tile_m": tile_m, "tile_n": tile_n, "warps": warps, "stages": stages}
            config = cls(**sizes, blocks_per_sm=blocks_per_sm, q_in_registers=kept)
            if _may_win(axes, problem, arch, config):
                yield config


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """The parts of Q, K and V in shared memory at one time: rows and widths in elements, counts per block of keys."""

    q_width: int
    k_width: int
    k_pieces: int
    v_rows: int
    v_width: int

    @classmethod
    def of(cls, axes: Axes, config: CudaConfig, problem: Problem) -> Pieces:
        """The pieces of a point with a config, as `ForwardTraits` has them."""
        is_sliced = axes.tiling != "none"
        q_width = padded(problem.head_dim, config.dim_slice if is_sliced else FRAGMENT_ROWS)
        k_width = config.dim_slice if is_sliced else q_width
        return cls(
            q_width=q_width,
            k_width=k_width,
            k_pieces=q_width // k_width,
            v_rows=config.key_slice if axes.tiling == "qkv" else config.tile_n,
            v_width=padded(problem.head_dim_v, FRAGMENT_ROWS * config.column_warps),
        )


def axes_of(made: Plan | Variant) -> Axes:
    """The point of a Plan or Variant of this family."""
    return Axes(**dict((variant_of(made) if isinstance(made, Plan) else made).flags))


def _places_of_q(axes: Axes) -> tuple[str, ...]:
    if axes.tiling != "none":
        return "shared", "streamed"
    return ("registers",) if axes.share == "qkv" else ("shared", "registers")


def forward_numbers(problem: Problem, tiles: int) -> dict[str, Any]:
    """Numbers that forwards that own queries are told, of so many tiles of a head."""
    heads, section = problem.batch * problem.heads_q, heads_side_by_side(problem)
    return {"tiles": tiles, "heads": heads, "heads_per_section": section}


# ---------------------------------------------------------------- what a sweep tries


def _may_win(axes: Axes, problem: Problem, arch: Arch, config: CudaConfig) -> bool:
    blocks = max(config.blocks_per_sm, 2 if config.warps == 4 else 1)  # four warps alone on an SM starve it
    registers_max = _SWEPT_REGISTERS if config.blocks_per_sm == 1 else _REGISTERS_OF_THREE
    if config.registers_at_least(problem, axes) > registers_max:
        return False
    if blocks * (config.smem_bytes(problem, axes) + KIB) > arch.smem_per_sm:
        return False
    if config.blocks_per_sm > 1 and (config.warps == 8 or config.tile_n == 32):
        return False
    if config.tile_n == 32 and (config.stages != 2 or problem.width <= 64):
        return False  # a barrier every 32 keys is for where registers leave no choice
    if config.tile_n == 128 and config.stages == 3:
        return False  # 128 keys ahead are ahead enough
    with_q = replace(config, q_in_registers=True).registers_at_least(problem, axes)
    return config.q_in_registers or with_q > _ROOM_FOR_Q


def _of_rungs(axes: Axes, problem: Problem) -> Iterator[CudaConfig]:
    """Configs of all points but split_q without tiling. Slices of K and V of one size share a ring best."""
    is_sliced = axes.tiling != "none"
    shapes = _COLUMNS if axes.warps == "split_kv" else _ROWS
    for (tile_m, warps, columns), tile_n, stages in itertools.product(shapes, (64, 128, 256), (1, 2)):
        for dim_slice, key_slice in _slices(axes, problem, tile_n) if is_sliced else ((64, 16),):
            sizes: dict[str, Any] = {"tile_m": tile_m, "tile_n": tile_n, "warps": warps, "column_warps": columns}
            config = CudaConfig(**sizes, stages=stages, dim_slice=dim_slice, key_slice=key_slice)
            yield config
            yield replace(config, q_streamed=True) if is_sliced else replace(config, q_in_registers=True)


def _slices(axes: Axes, problem: Problem, tile_n: int) -> Iterator[tuple[int, int]]:
    for dim_slice in (64, 128):
        key_slice = tile_n * dim_slice // padded(problem.head_dim_v, dim_slice) // FRAGMENT_ROWS * FRAGMENT_ROWS
        yield dim_slice, min(max(key_slice, FRAGMENT_ROWS), tile_n) if axes.tiling == "qkv" else FRAGMENT_ROWS
