"""The backward in plain Triton for heads wider than 256: P and dS are stored, and gradients are plain products of them.

As CUDA's `wgmma_wide`. Kernels take turns: each turn has as many heads of keys as `STORED_BYTES` have P and dS of.
Where one head of keys has more, a turn has some of its queries, and sums of dk and dv wait in fp32 for the next turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from multiattn.layout import Layout, row_major
from multiattn.plan import limits
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import STORED_BYTES, Turn, query_tiles, stored_turns
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.triton.family import ASYNCHRONOUS, Areas, TritonFamily, TritonLaunch
from multiattn.triton.kernels.constants import OUT_VECTOR, StoredConstants, TileConstants, Width, widths
from multiattn.triton.plain import (
    WIDE_CAPABILITY,
    TritonConfig,
    can_describe,
    constants_of,
    is_far,
    options_of,
    table_of,
    why_not_read,
)
from multiattn.triton.table import (
    ELEMENT_BYTES,
    INT32,
    NONE,
    SMALL,
    Constant,
    Descriptor,
    Integer,
    KernelTable,
    Parameter,
    Tensor,
    aux_row,
    factor_rows,
    filled,
    given,
    integers,
    reach_rows,
    stride_rows,
)

VARIANT = "stored"
CAPABILITY = replace(
    WIDE_CAPABILITY, arches=("cpu", *ASYNCHRONOUS), score_gradients=False, block_masks=0, packed_blocks=0, packing=False
)
_IMAGES, _SUMS = ("weights", "ds"), ("dk_sums", "dv_sums")
"""Areas: P and dS; dk and dv of one head of keys, where it has several turns."""
_DELTA_ROWS = 16
"""Rows of a program that makes delta: of 512 columns a thread has 64 elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonProductConfig(Config):
    """Tiles of the products: a program has `tile_m` rows of a gradient, and walks `tile_n` rows at a time."""

    tile_m: int = limits.limited(limits.powers_of_two(16, 256))
    tile_n: int = limits.limited(limits.powers_of_two(16, 256))
    columns: int = limits.limited(limits.powers_of_two(16, 256))
    """Columns of the gradient that a program has."""
    warps: int = limits.limited(limits.powers_of_two(1))
    stages: int = limits.limited(limits.AT_LEAST_1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonStoredConfig(TritonConfig):
    """Tiles of scores, and those of the products. `descriptors` is for all kernels."""

    part: int = limits.limited(limits.powers_of_two(16, 256), default=64)
    """Columns of q, k, dout and v at a time."""
    tiles_together: int = limits.limited(limits.AT_LEAST_1, default=8)
    """Tiles of queries that come before the next tile of keys."""
    products: TritonProductConfig

    def tile_bytes(self, problem: Problem) -> int:
        """Bytes of P and dS of a tile of queries of all heads that share keys."""
        return len(_IMAGES) * self.tile_m * _padded(problem.seq_kv, self.tile_n) * ELEMENT_BYTES * problem.group

    def turns(self, problem: Problem) -> list[Turn]:
        """The turns of a launch; none where memory has no tile."""
        return stored_turns(problem, self.tile_m, self.tile_bytes(problem), _sums_bytes(problem))


def _padded(rows: int, unit: int) -> int:
    return -(-max(rows, 1) // unit) * unit


def _sums_bytes(problem: Problem) -> int:
    """Sums of dk and dv of one head of keys."""
    return problem.seq_kv * (problem.head_dim + problem.head_dim_v) * torch.float32.itemsize


# ---------------------------------------------------------------- what fits


def _score_bytes(config: TritonStoredConfig, arch: Arch) -> int:
    in_flight = config.stages if arch.name in ASYNCHRONOUS else max(1, config.stages - 1)
    return in_flight * (config.tile_m + config.tile_n) * config.part * ELEMENT_BYTES


def _product_bytes(config: TritonProductConfig, arch: Arch) -> int:
    in_flight = config.stages if arch.name in ASYNCHRONOUS else max(1, config.stages - 1)
    return in_flight * config.tile_n * (config.tile_m + config.columns) * ELEMENT_BYTES


def why_not_fit(problem: Problem, arch: Arch, config: TritonStoredConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`."""
    products = config.products
    if wrong := limits.failed([*limits.limit_checks(config), *limits.limit_checks(products)]):
        return wrong
    divides = all(
        tile % own == 0 for tile in (config.tile_m, config.tile_n) for own in (products.tile_m, products.tile_n)
    )
    turns = config.turns(problem)
    blocks = max((max(_grids(problem, config, it)) for it in turns), default=0)
    blocks = max(blocks, query_tiles(problem, _DELTA_ROWS))
    memory = max(_score_bytes(config, arch), _product_bytes(products, arch))
    needed = f"{least_bytes(problem, config) >> 20} MiB for P and dS of {config.tile_m} queries, and sums of dk and dv"
    checks = (
        (divides, f"{products} beside {config.tile_m}x{config.tile_n} scores", "divisors of tiles of scores"),
        (bool(turns) or problem.batch * problem.heads_kv == 0, needed, f"up to {STORED_BYTES >> 20} MiB"),
        *limits.size_checks(config, arch, memory, blocks),
    )
    return (*limits.failed(checks), *why_not_read(problem, arch, config))


def least_bytes(problem: Problem, config: TritonStoredConfig) -> int:
    """The least memory of a turn that has a part of a head."""
    return config.tile_bytes(problem) + _sums_bytes(problem)


def _grids(problem: Problem, config: TritonStoredConfig, turn: Turn) -> tuple[int, int, int, int]:
    """Programs of scores, of dk, of dv and of dq of a turn."""
    products = config.products
    of_queries, tiles_kv = turn.heads * turn.tiles * problem.group, -(-problem.seq_kv // config.tile_n)
    of_keys = turn.heads * -(-problem.seq_kv // products.tile_m)
    parts, parts_v = (-(-width // products.columns) for width in (problem.head_dim, problem.head_dim_v))
    return (
        of_queries * tiles_kv,
        of_keys * parts,
        of_keys * parts_v,
        of_queries * (config.tile_m // products.tile_m) * parts,
    )


# ---------------------------------------------------------------- a launch


def _areas(problem: Problem, config: TritonStoredConfig) -> Areas:
    turns = config.turns(problem)
    rows = max((it.heads * it.tiles for it in turns), default=1) * problem.group * config.tile_m
    shape = (1, 1, max(rows, 1), _padded(problem.seq_kv, config.tile_n))
    areas = dict.fromkeys(_IMAGES, Layout(shape, row_major(shape), problem.torch_dtype))
    if any(it.turns > 1 for it in turns):
        for name, width in zip(_SUMS, (problem.head_dim, problem.head_dim_v), strict=True):
            shape = (1, 1, problem.seq_kv, width)
            areas[name] = Layout(shape, row_major(shape), torch.float32)
    return {"delta": problem.layouts["delta"], **areas}


def _tables(launch: TritonLaunch) -> tuple[KernelTable, ...]:
    """Delta, then for some heads and queries at a time scores, and the three products."""
    made = _Tables(launch)
    rows = TileConstants(
        **widths(launch.problem), tile_m=_DELTA_ROWS, far_rows=launch.problem.strides_out[2] * _DELTA_ROWS >= INT32
    )
    of_turns = itertools.chain.from_iterable(map(made.of_turn, launch.config.turns(launch.problem)))
    return (table_of("prepare_rows", launch, rows, SMALL), *of_turns)


class _Tables:
    """The tables of the kernels of each turn."""

    def __init__(self, launch: TritonLaunch) -> None:
        self.problem, self.config = problem, config = launch.problem, launch.config
        self.known = {**problem.layouts, **_areas(problem, config)}
        self.has_turns = _SUMS[0] in self.known
        more = {"score_m": config.tile_m, "score_n": config.tile_n, "tiles_together": config.tiles_together}
        self.scores = filled(StoredConstants, constants_of(launch, config), part=Width(config.part), **more)
        alone = replace(config, registers=None)  # that is for scores
        own = {"num_warps": config.products.warps, "num_stages": config.products.stages}
        self.options = {**options_of(alone), **own}

    def of_turn(self, turn: Turn) -> Iterator[KernelTable]:
        """Scores, then dk, dv and dq."""
        problem, (of_scores, *of_products) = self.problem, _grids(self.problem, self.config, turn)
        rows, step = self.config.products.tile_m, self.config.products.tile_n
        numbers = {
            **integers(seq_q=problem.seq_q, seq_kv=problem.seq_kv, heads_q=problem.heads_q),
            # Around the loop over queries a loop over the heads of a group takes registers.
            "group": Integer(value=problem.group, specialised=problem.group == 1),
            **reach_rows(problem),
            **integers(**{name: it for name, it in turn._asdict().items() if name != "heads"}),
        }
        yield self._of_scores(of_scores, {**numbers, "factor": factor_rows(problem)["score"]})
        grad, of_k, of_v = problem.grad_factor, problem.head_dim, problem.head_dim_v
        of_keys = (("dk", "q", "ds", _SUMS[0], of_k, grad), ("dv", "dout", "weights", _SUMS[1], of_v, 1.0))
        for (gradient, source, image, sums, width, factor), grid in zip(of_keys, of_products[:2], strict=True):
            constants = self._of_product(width, source, step, rows)
            yield self._table("product_of_keys", grid, constants, {
                "source": self._tensor(source, constants),
                "image": self._image(image, constants),
                "gradient": Tensor(of=gradient),
                "sums": given(self.has_turns, Tensor(of=sums)),
                "numbers": {**numbers, "factor": factor},
                "strides": self._strides(constants, source=source, gradient=gradient),
            })  # fmt: skip
        constants = self._of_product(problem.head_dim, "k", rows, step)
        yield self._table("product_of_queries", of_products[2], constants, {
            "k": self._tensor("k", constants),
            "ds": self._image("ds", constants),
            "dq": Tensor(of="dq"),
            "numbers": {**numbers, "factor": grad},
            "strides": self._strides(constants, k="k", dq="dq"),
        })  # fmt: skip

    def _of_scores(self, grid: int, numbers: Parameter) -> KernelTable:
        constants, operands = self.scores, ("q", "k", "v", "dout")
        rows: dict[str, Parameter] = {
            **{name: self._tensor(name, constants) for name in operands},
            "statistics": {name: Tensor(of=name) for name in ("lse", "delta")},
            **{name: self._image(name, constants) for name in _IMAGES},
            "numbers": numbers,
            "strides": self._strides(constants, **{name: name for name in operands}),
            "aux": aux_row(self.problem, constants.score),
            "C": Constant(value=constants),
        }
        return KernelTable(kernel="stored_scores", grid=grid, options=options_of(self.config), rows=rows)

    def _of_product(self, width: int, source: str, tile_m: int, tile_n: int) -> StoredConstants:
        """The constants of a product, which sees no scores: one of gradients as wide has the same code."""
        products = self.config.products
        return replace(
            self.scores,
            score=None,
            has_score=False,
            has_slope=False,
            has_mask=False,
            width=Width(width),
            width_v=Width(width),
            tile_m=tile_m,
            tile_n=tile_n,
            stages=products.stages,
            part=Width(products.columns),
            parts=-(-width // products.columns),
            vector=self.scores.vector if source in _GIVEN else OUT_VECTOR,
            has_turns=self.has_turns and source != "k",
        )

    def _table(self, kernel: str, grid: int, constants: StoredConstants, rows: Mapping[str, Parameter]) -> KernelTable:
        return KernelTable(
            kernel=kernel, grid=grid, options=self.options, rows={**rows, "C": Constant(value=constants)}
        )

    def _tensor(self, name: str, constants: StoredConstants) -> Parameter:
        """An operand, `part` columns of which are read at a time."""
        if not constants.descriptor:
            return Tensor(of=name, is_aligned=name not in _GIVEN or constants.vector == OUT_VECTOR)
        rows = constants.tile_n if name in ("k", "v") else constants.tile_m
        return Descriptor(of=name, layout=self.known[name], rows=rows, columns=constants.part)

    def _image(self, name: str, constants: StoredConstants) -> Parameter:
        if not constants.descriptor:
            return Tensor(of=name)
        return Descriptor(of=name, layout=self.known[name], rows=constants.tile_m, columns=constants.tile_n)

    def _strides(self, constants: StoredConstants, **tensors: str) -> Parameter:
        """Strides of tensors by the names of their rows."""

        def row(of: str) -> Parameter:
            if constants.descriptor and of in (*_GIVEN, "dout"):
                return NONE
            return stride_rows(of, self.known[of].strides[:3], self.scores.vector if of in _GIVEN else OUT_VECTOR)

        return {name: row(of) for name, of in tensors.items()}


_GIVEN = ("q", "k", "v")
"""Tensors of the caller's, which may be less aligned than our own."""


# ---------------------------------------------------------------- configs worth timing

_TWO_BLOCKS = 128
"""Registers of a thread with which an SM has two blocks of eight warps: one multiplies while one makes weights."""
_SCORES = (
    ((128, 128, 8, 3), _TWO_BLOCKS),
    ((128, 128, 8, 4), None),
    ((128, 256, 8, 4), None),
    ((128, 256, 8, 3), None),
    ((128, 128, 4, 3), None),
)
"""(tile_m, tile_n, warps, stages) of scores, and registers."""
_PRODUCTS = ((128, 64, 256, 8, 4), (128, 64, 256, 8, 3), (128, 64, 128, 8, 3), (128, 64, 128, 4, 3))
"""(tile_m, tile_n, columns, warps, stages) of products."""


def stored_tiles(
    scores: tuple[int, int, int, int], products: tuple[int, int, int, int, int], **more: Any
) -> TritonStoredConfig:
    """A config in short: tiles of scores, and of products, as `_SCORES` and `_PRODUCTS` have them."""
    tile_m, tile_n, warps, stages = scores
    names = ("tile_m", "tile_n", "columns", "warps", "stages")
    own = TritonProductConfig(**dict(zip(names, products, strict=True)))
    return TritonStoredConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, products=own, **more)


def _candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[TritonStoredConfig]:
    """Tiles of scores with the first of the products, then the other products."""
    described = can_describe(problem, arch)
    for scores, registers in _SCORES:
        yield stored_tiles(scores, _PRODUCTS[0], registers=registers, descriptors=described)
    for products in _PRODUCTS[1:]:
        yield stored_tiles(_SCORES[0][0], products, registers=_SCORES[0][1], descriptors=described)


_KERNELS: Mapping[str, str] = {
    "prepare_rows": "backward",
    **dict.fromkeys(("stored_scores", "product_of_queries", "product_of_keys"), "stored"),
}
FAMILY = TritonFamily(
    config=TritonStoredConfig,
    kernels=_KERNELS,
    tables=_tables,
    tiles=lambda problem, config: (0, 0),
    areas=_areas,
    fits=why_not_fit,
    candidates=_candidates,
    flag=lambda problem, config: is_far(problem, config, is_backward=True),
)
