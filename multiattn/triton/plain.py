"""The forward in plain Triton, one kernel for every rung of the ladder, and what the backward shares with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from multiattn.block_mask import KEYS_OF_QUERIES, QUERIES_OF_KEYS
from multiattn.layout import VECTOR_BYTES
from multiattn.mask import KINDS
from multiattn.plan import limits
from multiattn.plan.arch import ARCHS, GPU_ARCHS, Arch
from multiattn.plan.backend import Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import key_tiles, one_width, query_tiles
from multiattn.plan.support import Capability, Reason
from multiattn.problem import Problem
from multiattn.score.expression import ONE
from multiattn.triton.family import ASYNCHRONOUS, TritonFamily, TritonLaunch
from multiattn.triton.kernels.constants import OUT_VECTOR, TileConstants, widths
from multiattn.triton.ladder import STEPS
from multiattn.triton.score import lowered_score
from multiattn.triton.table import (
    ELEMENT_BYTES,
    INT32,
    NONE,
    Constant,
    Descriptor,
    Integer,
    KernelTable,
    Parameter,
    Tensor,
    aux_row,
    factor_row,
    factor_rows,
    filled,
    given,
    integers,
    item_row,
    reach_rows,
    sinks_row,
    stride_rows,
    tops_row,
)
from multiattn.validate import LOG2_E


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonConfig(Config):
    """Tiles of one kernel and what Triton's compiler is told."""

    tile_m: int = limits.limited(limits.powers_of_two(16, 256))
    tile_n: int = limits.limited(limits.powers_of_two(16, 256))
    warps: int = limits.limited(limits.powers_of_two(1))
    stages: int = limits.limited(limits.AT_LEAST_1)
    """Blocks of keys in flight; 1 switches the pipeline off."""
    heads_together: int = limits.limited(limits.AT_LEAST_1, default=1)
    """Heads whose tiles alternate in launch order: 1 walks one head after the other, more suits a mask."""
    registers: int | None = None
    """Most registers per thread; None leaves it to the compiler."""
    descriptors: bool = False
    """Tensors that a program walks over come through TMA descriptors, not pointers: any stride, any alignment."""


def tiles(tile_m: int, tile_n: int, warps: int, stages: int, **more: Any) -> TritonConfig:
    """A config in short."""
    return TritonConfig(tile_m=tile_m, tile_n=tile_n, warps=warps, stages=stages, **more)


C = TypeVar("C", bound=TritonConfig)


def within_blocks(config: C, problem: Problem) -> C:
    """The config with tiles that divide the blocks of a block mask."""
    if (blocks := problem.blocks) is None:
        return config
    return replace(config, tile_m=math.gcd(config.tile_m, blocks.queries), tile_n=math.gcd(config.tile_n, blocks.keys))


# ---------------------------------------------------------------- what fits


def pads(problem: Problem) -> tuple[int, int]:
    """Columns of tiles of q and k, and of v and out."""
    return one_width(problem.head_dim), one_width(problem.head_dim_v)


def smem_bytes(problem: Problem, arch: Arch, config: TritonConfig) -> int:
    """Shared memory that the tiles of q, k and v take; the compiler adds barriers and scratch of a few KiB.

    One more block of keys is held where the tensor cores read it in the background.
    """
    of_k, of_v = pads(problem)
    in_flight = config.stages if arch.name in ASYNCHRONOUS else config.stages - 1
    streamed = in_flight * (of_k + of_v) if config.stages > 1 else max(of_k, of_v)  # or V takes the place of K
    return (config.tile_m * of_k + config.tile_n * streamed) * ELEMENT_BYTES


TMA_ARCHS = tuple(name for name in GPU_ARCHS if ARCHS[name].capability >= (9, 0))
"""Arches with a Tensor Memory Accelerator."""


CAPABILITY = Capability(
    arches=("cpu", *GPU_ARCHS),
    masks=KINDS,
    sinks=True,
    row_max=True,
    scores=True,
    block_masks=16,
    packed_blocks=16,
    score_gradients=True,
    packing=True,
)
"""Problems that the plain kernels accept."""
WIDE_CAPABILITY = replace(CAPABILITY, head_dim_max=512)
"""Problems that the forward accepts, and two passes of gradients."""
# cuTensorMapEncodeTiled: address and strides are multiples of 16 bytes, and no stride is zero. A Problem has one
# alignment for all tensors, so this also holds for those that are read through pointers. A map knows one length: a tile
# at the end of a packed sequence would have rows of the next one.
THROUGH_DESCRIPTORS = replace(
    CAPABILITY, arches=("cpu", *TMA_ARCHS), alignment=VECTOR_BYTES, zero_strides=False, packing=False
)


def can_describe(problem: Problem, arch: Arch) -> bool:
    """True if TMA descriptors can be had of the tensors of a problem."""
    return not _why_not_described(problem, arch)


def why_not_read(problem: Problem, arch: Arch, config: TritonConfig) -> tuple[Reason, ...]:
    """Every reason why descriptors cannot read the tensors, if the config has any."""
    return _why_not_described(problem, arch) if config.descriptors else ()


def _why_not_described(problem: Problem, arch: Arch) -> tuple[Reason, ...]:
    """Every reason why descriptors cannot read a problem's tensors, of any width that kernels take."""
    return replace(THROUGH_DESCRIPTORS, head_dim_max=WIDE_CAPABILITY.head_dim_max).why_not(problem, arch)


def checks_by_queries(problem: Problem, arch: Arch, config: TritonConfig, more_bytes: int = 0) -> list[limits.Check]:
    """Checks of a kernel whose programs own queries, and that needs so many bytes more than `smem_bytes`."""
    programs, needed = query_tiles(problem, max(config.tile_m, 1)), smem_bytes(problem, arch, config) + more_bytes
    return [*limits.limit_checks(config), *limits.size_checks(config, arch, needed, programs)]


# ---------------------------------------------------------------- a kernel of a launch

_NAMES: Mapping[str, str] = {
    "attention_forward": "q k v out lse scale sizes strides reach sinks tops aux lists entries tiles C",
    "prepare_rows": "out dout dlse delta dq_sum dlse_rows seq_q heads_q batch_heads out_strides C",
    "finish_dq": "dq_sum dq grad_factor seq_q heads_q batch_heads dq_strides C",
    "gradient_of_queries": """
        q k v out lse dout dlse dq delta factors sizes strides reach aux lists entries tiles C""",
    "gradients_of_keys": """
        q k v lse dout delta dq_sum dk dv factors sizes strides reach aux daux lists entries tiles C""",
}
"""The parameters of each kernel, in order."""
_STRIDES: Mapping[str, str] = {
    "attention_forward": "q k v out",
    "gradient_of_queries": "q k v out dq",
    "gradients_of_keys": "q k v dout dk dv",
}
"""The tensors whose strides are those of a kernel."""
_OF_KEYS, _OF_QUERIES = ("k", "v"), ("q", "dout", "dq_sum")
"""The tensors that a program walks over if it owns queries, or keys: by descriptors where the variant has them."""
_OF_VALUES = ("v", "dout")
"""Tensors as wide as v."""
_GIVEN = ("q", "k", "v")
"""Tensors of the caller's, which may be less aligned than our own."""


def table_of(kernel: str, launch: TritonLaunch, constants: TileConstants, options: Mapping[str, Any]) -> KernelTable:
    """The table of a kernel. Without a dlse it is given any pointer, to no rows."""
    problem, has_dlse = launch.problem, launch.has_dlse
    known, by_keys = problem.layouts, kernel == "gradients_of_keys"
    described = (_OF_QUERIES if by_keys else _OF_KEYS) if constants.descriptor else ()
    alignment = constants.vector * ELEMENT_BYTES
    # The small kernels take rows as they come, whatever sequence they are of.
    tiled = problem if constants.packed else replace(problem, batching=None)
    are_alike = problem.head_dim == problem.head_dim_v  # then strides of dq are those of out
    grid = key_tiles(tiled, constants.tile_n) if by_keys else query_tiles(tiled, constants.tile_m)
    batch_heads = problem.batch * (problem.heads_kv if by_keys else problem.heads_q)
    numbers = integers(
        dlse_rows=problem.seq_q if has_dlse else 0,
        seq_q=problem.seq_q,
        seq_kv=problem.seq_kv,
        heads_q=problem.heads_q,
        # Around the loop over queries a loop over the heads of a group would spill 44 times in it (sm90, D=128).
        group=Integer(value=problem.group, specialised=by_keys and problem.group == 1),
        batch_heads=batch_heads,
    )

    def stride_row(of: str) -> Parameter:
        unit = constants.vector if of in _GIVEN else OUT_VECTOR
        is_known = of in described or (kernel == "gradient_of_queries" and of == "dq" and are_alike)
        return NONE if is_known else stride_rows(of, known[of].strides[:3], unit)

    fixed: dict[str, Parameter] = {
        **numbers,
        "sizes": {name: it for name, it in numbers.items() if name != "dlse_rows" or kernel == "gradient_of_queries"},
        "strides": {name: stride_row(name) for name in _STRIDES.get(kernel, "").split()},
        "scale": factor_row(problem, problem.scale_log2 if constants.step.exp2 else problem.scale_log2 / LOG2_E),
        "factors": factor_rows(problem),
        "grad_factor": problem.grad_factor,
        "dlse": Tensor(of="dlse" if has_dlse else "lse"),
        "reach": reach_rows(problem),
        "sinks": sinks_row(problem),
        "tops": tops_row(problem),
        "aux": aux_row(problem, constants.score),
        "daux": _daux(problem, constants),
        "lists": list_rows(problem, by_keys),
        "entries": given(constants.packed, Tensor(of="key_list" if by_keys else "query_list")),
        "tiles": Integer(value=grid // batch_heads) if constants.packed else NONE,
        "C": Constant(value=constants),
    }
    if not constants.one_pass:
        fixed["dq_sum"] = NONE

    def row(name: str) -> Parameter:
        if name in fixed:
            return fixed[name]
        if name.endswith("_strides"):
            return stride_row(name.removesuffix("_strides"))
        if name in described:
            rows = constants.tile_n if name in _OF_KEYS else constants.tile_m
            width = constants.width_v if name in _OF_VALUES else constants.width
            return Descriptor(of=name, layout=known[name], rows=rows, columns=width.pad)
        return Tensor(of=name, is_aligned=name not in _GIVEN or alignment == VECTOR_BYTES)

    rows = {name: row(name) for name in _NAMES[kernel].split()}
    return KernelTable(kernel=kernel, grid=grid, options=options, rows=rows)


def _daux(problem: Problem, constants: TileConstants) -> Parameter:
    """The sums of gradients of captured tensors."""
    if problem.score is None or not constants.gradients:
        return NONE
    sums = problem.score.gradient_arguments(constants.score)
    return {name: Tensor(of=it) if isinstance(it, str) else item_row(it, problem) for name, it in sums.items()}


def list_rows(problem: Problem, by_keys: bool) -> Parameter:
    """The lists of a block mask, by rows of keys or of queries. Nothing is known of their alignment."""
    if problem.blocks is None:
        return NONE
    it = problem.lists_of(QUERIES_OF_KEYS if by_keys else KEYS_OF_QUERIES)
    lists = {"counts": it.counts, "indices": it.indices, "full_counts": it.full_counts, "full_indices": it.full_indices}
    return {
        **integers(list_batch=it.stride_batch, list_head=it.stride_head, list_columns=it.columns),
        **{name: Tensor(of=of, is_aligned=False) for name, of in lists.items() if of is not None},
    }


def is_ragged_list(problem: Problem) -> bool:
    """True if the lists of queries may name keys beyond the end, or of another sequence."""
    if problem.blocks is None or problem.packing is not None:
        return problem.blocks is not None
    return problem.lists_of(KEYS_OF_QUERIES).columns * problem.blocks.keys > problem.seq_kv


def is_far(problem: Problem, config: TritonConfig, *, is_backward: bool) -> bool:
    """True if offsets inside a tile may pass 2^31 elements."""
    strides = [problem.strides_q, problem.strides_k, problem.strides_v, problem.strides_out]
    strides += [problem.strides_dq, problem.strides_dk, problem.strides_dv] if is_backward else []
    return max(of_tensor[2] for of_tensor in strides) * max(config.tile_m, config.tile_n) >= INT32


def constants_of(launch: TritonLaunch, config: TritonConfig, **own: Any) -> TileConstants:
    """The constants of a kernel that walks over tiles."""
    problem, arch = launch.problem, launch.arch
    lowered = lowered_score(problem, arch, with_gradients=bool(own.get("gradients")))
    of_kernel: dict[str, Any] = {
        **widths(problem),
        "heads_in_turn": config.heads_together,
        "vector": launch.assumed.alignment // ELEMENT_BYTES,
        "far_rows": launch.assumed.flag,
        "descriptor": config.descriptors,
        "compiled": arch.is_gpu,
        "score": lowered,
        "has_slope": lowered is not None and lowered.slope is not ONE,
        "packed": problem.packing is not None,
        "has_mask": lowered is not None and lowered.mask is not None,
        "scale_sign": 1,
    }
    return filled(TileConstants, problem, config, **of_kernel | own)


def options_of(config: TritonConfig) -> dict[str, Any]:
    """For Triton's compiler, beside the constants."""
    # Without fusion a score costs a multiply and an add; the default of this option changes in Triton 3.10.
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    return options if config.registers is None else {**options, "maxnreg": config.registers}


# ---------------------------------------------------------------- the forward


def why_not_fit(problem: Problem, arch: Arch, config: TritonConfig) -> tuple[Reason, ...]:
    """Every reason why `config` cannot run `problem` on `arch`."""
    checks = checks_by_queries(problem, arch, within_blocks(config, problem))
    return (*limits.failed(checks), *why_not_read(problem, arch, config))


def _tables(launch: TritonLaunch) -> tuple[KernelTable, ...]:
    problem, step = launch.problem, STEPS[launch.plan.variant].step
    config = within_blocks(launch.config, problem)
    own = {"scale_sign": problem.scale_sign, "step": replace(step, descriptor=config.descriptors)}
    constants = constants_of(launch, config, ragged=is_ragged_list(problem), **own)
    return (table_of("attention_forward", launch, constants, options_of(config)),)


_SHAPES = ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8))
"""(tile_m, tile_n, warps) that are worth a try up to 256 columns, whatever the head_dim."""
_WIDE_SHAPES = ((64, 32, 8), (32, 32, 8), (32, 16, 8), (64, 16, 8))
"""Shapes for more columns."""


def _candidates(variant: Variant, problem: Problem, arch: Arch) -> Iterator[TritonConfig]:
    """In turn with one, two and three blocks of keys in flight."""
    tried = _SHAPES if max(pads(problem)) <= 256 else _WIDE_SHAPES
    shapes: list[tuple[tuple[int, int, int], int | None]] = [(shape, None) for shape in tried]
    if max(pads(problem)) <= 128:
        shapes.append(((128, 64, 4), None))
    if max(pads(problem)) <= 64:
        shapes.append(((64, 64, 4), 128))  # 128 registers: four blocks of four warps share an SM
    together, described = 8 if problem.is_banded else 1, can_describe(problem, arch)
    step = STEPS[variant.name].step
    for (shape, registers), stages in itertools.product(shapes, (1, 2, 3)):
        config = tiles(*shape, stages, registers=registers, heads_together=together, descriptors=described)
        yield step.limit(config)


FAMILY = TritonFamily(
    config=TritonConfig,
    kernels={"attention_forward": "forward"},
    tables=_tables,
    tiles=lambda problem, config: (within_blocks(config, problem).tile_m, 0),
    fits=why_not_fit,
    candidates=_candidates,
    flag=lambda problem, config: is_far(problem, within_blocks(config, problem), is_backward=False),
    is_emitted=True,
)
