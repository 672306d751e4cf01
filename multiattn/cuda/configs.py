"""Tiles of the forward with mma.sync as data: `CudaConfig`, its shared memory and registers, and what fits a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multiattn.cuda.axes import Axes, why_illegal
from multiattn.packed import TILE_LISTS
from multiattn.plan.arch import WARP_THREADS, Arch
from multiattn.plan.config import Config
from multiattn.plan.limits import between, failed, field_checks, one_of, size_checks
from multiattn.plan.schedule import query_tiles
from multiattn.plan.support import Reason
from multiattn.problem import Problem

FRAGMENT_ROWS = 16  # of mma.m16n8k16: queries of one fragment, and what head_dim is padded to a multiple of
ELEMENT_BYTES = 2
FP32_BYTES = 4
FORWARD_LISTS = TILE_LISTS[:1]
"""The lists of a packed launch: a forward owns tiles of queries."""
REGISTERS_MAX = 224
"""The registers of a thread, of its 255, that `registers_at_least` may count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaConfig(Config):
    """Launch parameters of the forward kernel; `kernels/forward_traits.cuh` says what each does."""

    warps: int
    """Warps of a block; they split the tile's queries, whole fragments of 16 each."""
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
        """Threads of a block."""
        return self.warps * WARP_THREADS

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

    @property
    def rows_per_warp(self) -> int:
        """Queries of one warp."""
        return self.tile_m // self.row_warps


def cut(config: CudaConfig, problem: Problem) -> CudaConfig:
    """The config with tiles that lie in one block of the problem's block mask, and warps that have 16 rows and keys."""
    if problem.blocks is None:
        return config
    tile_m, tile_n = math.gcd(config.tile_m, problem.blocks.queries), math.gcd(config.tile_n, problem.blocks.keys)
    column_warps = min(config.column_warps, tile_n // FRAGMENT_ROWS)
    row_warps = min(config.warps // column_warps, tile_m // FRAGMENT_ROWS)
    return replace(
        config,
        tile_m=tile_m,
        tile_n=tile_n,
        warps=row_warps * column_warps,
        column_warps=column_warps,
        key_slice=math.gcd(config.key_slice, tile_n),
    )


def padded(head_dim: int, unit: int = FRAGMENT_ROWS) -> int:
    """The width of a row in shared memory, in elements."""
    return -(-head_dim // unit) * unit


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
    exchanged = config.tile_m * config.tile_n * ELEMENT_BYTES + config.column_warps * config.tile_m * FP32_BYTES
    return held * ELEMENT_BYTES + exchanged


def list_areas(problem: Problem, lists: Sequence[str]) -> dict[str, int]:
    """The areas of workspace for the lists of a packed batch, of these `TILE_LISTS`, and the bytes of each."""
    return {} if problem.packing is None else {name: problem.layouts[name].size_bytes for name in lists}


def workspace(problem: Problem, config: Config | None) -> int:
    """Bytes that a launch takes from the allocator."""
    return sum(list_areas(problem, FORWARD_LISTS).values())


def registers_at_least(axes: Axes, config: CudaConfig, problem: Problem) -> int:
    """32-bit registers a thread needs for scores, output and kept Q; addresses and read-ahead come on top."""
    rows, pieces = config.rows_per_warp, Pieces.of(axes, config, problem)
    kept_q = rows * pieces.q_width // (2 * WARP_THREADS) if config.q_in_registers else 0
    return rows * (config.tile_n + pieces.v_width) // config.column_warps // WARP_THREADS + kept_q


def why_not(axes: Axes, problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch` at a point of the axes."""
    if illegal := why_illegal(axes):
        return illegal  # whatever the config
    assert isinstance(config, CudaConfig)
    if wrong := _wrong_shape(axes, config):
        return wrong
    config = cut(config, problem)
    pieces, places = Pieces.of(axes, config, problem), _places_of_q(axes)
    registers = registers_at_least(axes, config, problem)
    needed, most = (
        f"{registers} registers for scores, output and Q ({config})",
        f"up to {REGISTERS_MAX} of a thread's 255",
    )
    has_one_v = axes.share == "none" and axes.tiling == "qk"
    checks = (
        (config.q_place in places, f"q: {config.q_place} with {axes.name}", " or ".join(places)),
        (registers <= REGISTERS_MAX, needed, most),
        (
            not has_one_v or config.stages - 1 <= pieces.k_pieces,
            f"stages={config.stages} with {pieces.k_pieces} slices of K, and one buffer of V",
            f"up to {pieces.k_pieces + 1}",
        ),
    )
    blocks = query_tiles(problem, config.tile_m)
    return failed((*checks, *size_checks(config, arch, smem_bytes(axes, config, problem), blocks)))


def _wrong_shape(axes: Axes, config: CudaConfig) -> tuple[Reason, ...]:
    """Reasons why a config has no meaning: sizes that are no whole fragments."""
    has_columns = config.column_warps != 1
    fields = {"warps": one_of(2, 4, 8, 16), "stages": between(1, 4), "dim_slice": one_of(64, 128, 256)}
    columns = (
        has_columns == (axes.warps == "split_kv") and config.warps % max(1, config.column_warps) == 0,
        f"column_warps={config.column_warps} of warps={config.warps} with {axes.warps}",
        "1 with split_q; with split_kv a divisor of warps from 2 on",
    )
    if wrong := failed((*field_checks(config, fields), columns)):
        return wrong
    rows, keys = FRAGMENT_ROWS * config.row_warps, FRAGMENT_ROWS * config.column_warps
    is_whole = (
        config.tile_m >= rows and config.tile_m % rows == 0 and config.tile_n >= keys and config.tile_n % keys == 0
    )
    is_slice = config.key_slice >= FRAGMENT_ROWS and config.key_slice % FRAGMENT_ROWS == 0
    divides = is_slice and config.tile_n % config.key_slice == 0
    per_warp = f"tile_m in multiples of {rows}, tile_n in multiples of {keys}: {FRAGMENT_ROWS} a warp"
    slices = f"multiples of {FRAGMENT_ROWS} that divide tile_n={config.tile_n}"
    checks = (
        (is_whole, str(config), per_warp),
        (axes.tiling != "qkv" or divides, f"key_slice={config.key_slice}", slices),
    )
    return failed(checks)


def _places_of_q(axes: Axes) -> tuple[str, ...]:
    if axes.tiling != "none":
        return "shared", "streamed"
    return ("registers",) if axes.share == "qkv" else ("shared", "registers")


def tiles(seq: int, tile: int) -> int:
    """Tiles that cover a sequence."""
    return -(-seq // tile)
