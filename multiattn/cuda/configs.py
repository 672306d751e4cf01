"""Tiles of the CUDA backend as data: `CudaConfig`, what of it fits a GPU, the rules, and what a sweep tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from multiattn.cuda.axes import Axes, why_illegal
from multiattn.plan.arch import KIB, WARP_THREADS, Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.support import Reason
from multiattn.problem import Problem

FRAGMENT_ROWS = 16  # of mma.m16n8k16: queries of one fragment, and what head_dim is padded to a multiple of
ELEMENT_BYTES = 2
STATISTIC_BYTES = 4  # fp32
REGISTERS_MAX = 224
"""Of a thread's 255, for what `registers_at_least` counts."""
GRID_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaConfig(Config):
    """Launch parameters of the forward kernel; `kernels/forward_traits.cuh` says what each does."""

    warps: int
    """Of a block; they split the tile's queries, whole fragments of 16 each."""
    stages: int
    """Buffers of K and of V, or of both where they share. One: loaded in turns. More: `stages - 1` ahead."""
    q_in_registers: bool = False
    """Q's fragments stay in registers, or are read from shared memory for every block of keys."""
    q_streamed: bool = False
    """With tiling: Q's slices are loaded again with those of K, for every block of keys. Else Q is whole in smem."""
    column_warps: int = 1
    """Warps that share a row, with split_kv: of the keys for its scores, of head_dim for its output."""
    dim_slice: int = 64
    """Elements of head_dim of a slice of K, with tiling."""
    key_slice: int = 16
    """Keys of a slice of V, with tiling qkv."""
    occupancy: int = 1
    """Blocks on an SM that the compiler must leave registers for."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.warps * WARP_THREADS

    @property
    def row_warps(self) -> int:
        """Groups of warps that have rows of their own."""
        return self.warps // self.column_warps

    @property
    def rows_per_warp(self) -> int:
        """Queries of one warp."""
        return self.tile_m // self.row_warps


def padded(head_dim: int, unit: int = FRAGMENT_ROWS) -> int:
    """The width of a row in shared memory, in elements."""
    return -(-head_dim // unit) * unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """What of Q, K and V lies in shared memory at a time: rows and widths in elements, counts of a block of keys."""

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
            v_width=padded(problem.head_dim, FRAGMENT_ROWS * config.column_warps),
        )


def smem_bytes(axes: Axes, config: CudaConfig, problem: Problem) -> int:
    """Dynamic shared memory of a block: Q, the buffers of K and V, what warps exchange.

    Every kernel asserts at compile time that it needs just this.
    """
    pieces = Pieces.of(axes, config, problem)
    q = config.tile_m * pieces.q_width
    k = config.tile_n * pieces.k_width + (config.tile_m * pieces.k_width if config.q_streamed else 0)
    v = pieces.v_rows * pieces.v_width
    if axes.share == "none":
        ring = config.stages * k + (1 if axes.tiling == "qk" else config.stages) * v
    else:
        ring = config.stages * max(k, v)
    held = max(q, ring) if axes.share == "qkv" else ring + (0 if config.q_streamed else q)
    if axes.warps == "split_q":
        return held * ELEMENT_BYTES
    exchanged = config.tile_m * config.tile_n * ELEMENT_BYTES + config.column_warps * config.tile_m * STATISTIC_BYTES
    return held * ELEMENT_BYTES + exchanged


def registers_at_least(axes: Axes, config: CudaConfig, problem: Problem) -> int:
    """32-bit registers a thread needs for scores, output and kept Q; addresses and read-ahead come on top."""
    rows, pieces = config.rows_per_warp, Pieces.of(axes, config, problem)
    kept_q = rows * pieces.q_width // (2 * WARP_THREADS) if config.q_in_registers else 0
    return rows * (config.tile_n + pieces.v_width) // config.column_warps // WARP_THREADS + kept_q


def why_not(axes: Axes, problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch` at a point of the axes."""
    if illegal := why_illegal(axes):
        return illegal  # whatever the config
    if not isinstance(config, CudaConfig):
        return (wrong_kind(config, CudaConfig),)
    if wrong := _wrong_shape(axes, config):
        return tuple(wrong)
    reasons = _wrong_place(axes, config)
    pieces = Pieces.of(axes, config, problem)
    if axes.share == "none" and axes.tiling == "qk" and config.stages - 1 > pieces.k_pieces:
        got = f"stages={config.stages} with {pieces.k_pieces} slices of K"
        reasons.append(Reason(code="config", got=got, allowed=f"up to {pieces.k_pieces + 1}", hint="V has one buffer"))
    registers = registers_at_least(axes, config, problem)
    if registers > REGISTERS_MAX:
        got = f"{registers} registers for scores, output and Q ({config})"
        reasons.append(Reason(code="config", got=got, allowed=f"up to {REGISTERS_MAX} of a thread's 255"))
    reasons += too_large(config, arch, smem_bytes(axes, config, problem), grid_blocks(config, problem))
    return tuple(reasons)


def too_large(config: Config, arch: Arch, smem_bytes: int, blocks: int) -> list[Reason]:
    """What of a launch is more than an arch has: shared memory of a block, blocks of a grid."""
    reasons = []
    if arch.is_gpu and smem_bytes > arch.smem_per_block:
        got = f"{smem_bytes} bytes of shared memory ({config})"
        reasons.append(Reason(code="config", got=got, allowed=f"{arch.smem_per_block} bytes a block on {arch.name}"))
    if blocks > GRID_MAX:
        reasons.append(Reason(code="config", got=f"{blocks} blocks", allowed=f"a grid of up to {GRID_MAX}"))
    return reasons


def wrong_kind(config: Config, kind: type[Config]) -> Reason:
    """Why a config of another kernel will not do."""
    return Reason(code="config", got=f"a {type(config).__name__}", allowed=f"a {kind.__name__}")


def _wrong_shape(axes: Axes, config: CudaConfig) -> list[Reason]:
    """What of a config has no meaning: sizes that are no whole fragments."""
    has_columns = config.column_warps != 1
    checks = (
        (config.warps in (2, 4, 8, 16), f"warps={config.warps}", "2, 4, 8, 16"),
        (
            has_columns == (axes.warps == "split_kv") and config.warps % max(1, config.column_warps) == 0,
            f"column_warps={config.column_warps} of warps={config.warps} with {axes.warps}",
            "1 with split_q; with split_kv a divisor of warps from 2 on",
        ),
        (1 <= config.stages <= 4, f"stages={config.stages}", "1 to 4"),
        (config.dim_slice in (64, 128, 256), f"dim_slice={config.dim_slice}", "64, 128, 256"),
    )
    wrong = [Reason(code="config", got=got, allowed=allowed) for holds, got, allowed in checks if not holds]
    if wrong:
        return wrong
    rows, keys = FRAGMENT_ROWS * config.row_warps, FRAGMENT_ROWS * config.column_warps
    if config.tile_m < rows or config.tile_m % rows or config.tile_n < keys or config.tile_n % keys:
        allowed = f"tile_m in multiples of {rows}, tile_n in multiples of {keys}: {FRAGMENT_ROWS} a warp"
        return [Reason(code="config", got=str(config), allowed=allowed)]
    is_slice = config.key_slice >= FRAGMENT_ROWS and config.key_slice % FRAGMENT_ROWS == 0
    if axes.tiling == "qkv" and not (is_slice and config.tile_n % config.key_slice == 0):
        allowed = f"multiples of {FRAGMENT_ROWS} that divide tile_n={config.tile_n}"
        return [Reason(code="config", got=f"key_slice={config.key_slice}", allowed=allowed)]
    return []


def _wrong_place(axes: Axes, config: CudaConfig) -> list[Reason]:
    """Whether Q is where the point leaves room for it."""
    both = config.q_in_registers and config.q_streamed
    place = "both" if both else "registers" if config.q_in_registers else "streamed" if config.q_streamed else "shared"
    allowed = ("registers",) if axes.share == "qkv" else ("shared", "registers")
    if axes.tiling != "none":
        allowed = ("shared", "streamed")
    if place in allowed:
        return []
    return [Reason(code="config", got=f"q: {place} with {axes.name}", allowed=" or ".join(allowed))]


def query_tiles(config: Config, problem: Problem) -> int:
    """Tiles of queries of one head."""
    return -(-problem.seq_q // config.tile_m)


def grid_blocks(config: Config, problem: Problem) -> int:
    """Blocks of a launch that has one per tile of queries, head and batch entry."""
    return blocks_of(query_tiles(config, problem), problem)


def blocks_of(tiles: int, problem: Problem) -> int:
    """Blocks of a launch with one for each of a head's `tiles`, in each head and batch entry."""
    return tiles * problem.heads_q * problem.batch


_SHAPES = ((64, 4), (128, 4), (128, 8))  # (tile_m, warps)
_REGISTERS_MAX = 208  # of 255: the rest is addresses, read-ahead and the softmax state
_REGISTERS_OF_THREE = 128  # of 168, which three blocks of four warps on an SM leave a thread
_ROOM_FOR_Q = 176  # up to here Q in registers costs nothing


_ROWS = ((64, 4, 1), (128, 8, 1))  # (tile_m, warps, column_warps) of split_q with tiling
_COLUMNS = ((32, 8, 8), (32, 8, 4), (64, 8, 4), (64, 8, 2), (64, 4, 2))  # and of split_kv


def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[CudaConfig]:
    """Configs worth timing: those that fit shared memory and, by a lower bound, the registers."""
    axes = Axes.of(dict(variant.flags))
    if axes.tiling != "none" or axes.warps == "split_kv":
        return tuple(config for config in _rung_candidates(axes, problem) if not variant.fits(problem, arch, config))
    tried = (
        CudaConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            warps=warps,
            stages=stages,
            q_in_registers=q_in_registers,
            occupancy=occupancy,
        )
        for tile_m, warps in _SHAPES
        for tile_n in (32, 64, 128)
        for stages in (1, 2, 3)
        for q_in_registers in (True, False)
        for occupancy in (1, 3)
    )
    return tuple(config for config in tried if _is_worth_timing(variant, problem, arch, config))


def _is_worth_timing(variant: Variant, problem: Problem, arch: Arch, config: CudaConfig) -> bool:
    """Whether nothing else beats `config` on paper: a sweep is some twenty configs, not a hundred."""
    axes = Axes.of(dict(variant.flags))
    registers = registers_at_least(axes, config, problem)
    blocks = max(config.occupancy, 2 if config.warps == 4 else 1)  # four warps alone on an SM starve it
    registers_max = _REGISTERS_MAX if config.occupancy == 1 else _REGISTERS_OF_THREE
    if variant.fits(problem, arch, config) or registers > registers_max:
        return False
    if blocks * (smem_bytes(axes, config, problem) + KIB) > arch.smem_per_sm:
        return False
    if config.occupancy > 1 and (config.warps == 8 or config.tile_n == 32):
        return False
    if config.tile_n == 32 and (config.stages != 2 or problem.head_dim <= 64):
        return False  # a barrier every 32 keys is for where registers leave no choice
    if config.tile_n == 128 and config.stages == 3:
        return False  # 128 keys ahead are ahead enough
    with_q = registers_at_least(axes, replace(config, q_in_registers=True), problem)
    return config.q_in_registers or with_q > _ROOM_FOR_Q


def _rung_candidates(axes: Axes, problem: Problem) -> Iterator[CudaConfig]:
    """Of points that are not split_q without tiling. Slices of K and of V that are of one size share a ring best."""
    is_sliced = axes.tiling != "none"
    for tile_m, warps, column_warps in _COLUMNS if axes.warps == "split_kv" else _ROWS:
        for tile_n, stages in itertools.product((64, 128, 256), (1, 2)):
            for dim_slice, key_slice in _slices(axes, problem, tile_n) if is_sliced else ((64, 16),):
                for other_place in (False, True):
                    yield CudaConfig(
                        tile_m=tile_m,
                        tile_n=tile_n,
                        warps=warps,
                        column_warps=column_warps,
                        stages=stages,
                        q_in_registers=other_place and not is_sliced,
                        q_streamed=other_place and is_sliced,
                        dim_slice=dim_slice,
                        key_slice=key_slice,
                    )


def _slices(axes: Axes, problem: Problem, tile_n: int) -> Iterator[tuple[int, int]]:
    for dim_slice in (64, 128):
        key_slice = tile_n * dim_slice // padded(problem.head_dim, dim_slice) // FRAGMENT_ROWS * FRAGMENT_ROWS
        yield dim_slice, min(max(key_slice, FRAGMENT_ROWS), tile_n) if axes.tiling == "qkv" else FRAGMENT_ROWS
