"""The parameters of the kernels that divide keys into parts, one table each, as `multiattn.triton.parameters` has them.

No code depends on a stride of theirs, as it may be the capacity of a cache.
"""

from __future__ import annotations

from multiattn.layout import VECTOR_BYTES
from multiattn.plan.backend import Plan
from multiattn.plan.schedule import one_width, row_tiles
from multiattn.problem import Problem
from multiattn.triton.configs import ELEMENT_BYTES
from multiattn.triton.decode_configs import MERGED_COLUMNS, TritonSplitConfig, merge_programs, merged
from multiattn.triton.kernels.constants import OUT_VECTOR, MergeConstants, SplitConstants
from multiattn.triton.score import lowered_score
from multiattn.triton.table import (
    INT32,
    Constant,
    Integer,
    KernelTable,
    Parameter,
    Tensor,
    aux_row,
    factor_row,
    reach_rows,
    sinks_row,
    stride_rows,
)

PARTS, MERGE = "attention_of_parts", "merge_splits"
"""The names of the kernels."""
_RESULTS = ("out", "lse", "partial_out", "partial_lse")
"""All that the kernel of the parts may write."""


def split_tables(plan: Plan) -> tuple[KernelTable, ...]:
    """The kernels of a launch, in order: that of the parts and, if there is more than one, that which merges them."""
    config = plan.config
    assert isinstance(config, TritonSplitConfig)
    parts = _parts(plan, config)
    return (parts,) if config.splits == 1 else (parts, _merge(plan, config))


def _parts(plan: Plan, config: TritonSplitConfig) -> KernelTable:
    problem = plan.problem
    known, cache = problem.layouts, problem.cache
    constants = _constants(plan, config)
    is_aligned = problem.alignment == VECTOR_BYTES
    written = _RESULTS[:2] if constants.whole else _RESULTS[2:]

    def number(value: int) -> Integer:
        return Integer(value=value)

    paging: dict[str, Parameter] = dict.fromkeys(("page_keys", "table_stride"), Constant(value=None))
    if cache is not None and cache.page is not None:
        paging = {"page_keys": number(cache.page), "table_stride": number(cache.table_stride)}
    unit = constants.vector
    rows: dict[str, Parameter] = {
        **{name: Tensor(of=name, is_aligned=is_aligned) for name in ("q", "k", "v")},
        **{name: Tensor(of=name) if name in written else Constant(value=None) for name in _RESULTS},
        "scale": factor_row(problem, problem.scale_log2),
        "seq_q": number(problem.seq_q),
        "seq_kv": number(problem.seq_kv),
        "sequences": number(problem.lengths[0]),
        "heads": {"heads_q": Integer(value=problem.heads_q), "group": Integer(value=problem.group)},
        "tiles": number(-(-problem.rows // config.tile_m)),
        "splits": number(config.splits),
        **{f"{name}_strides": stride_rows(name, known[name].strides[:3], unit) for name in ("q", "k", "v")},
        "out_strides": _out_strides(problem),
        **paging,
        **reach_rows(problem),
        "sinks": sinks_row(problem) if constants.whole else Constant(value=None),
        "aux": aux_row(problem, constants.score),
        **{name: _index(problem, name) for name in ("seqlens_kv", "page_table", "cu_seqlens_q")},
        "C": Constant(value=constants),
    }
    return KernelTable(
        kernel=PARTS,
        grid=row_tiles(problem, config.tile_m) * config.splits,
        options={"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True},
        rows=rows,
    )


def _constants(plan: Plan, config: TritonSplitConfig) -> SplitConstants:
    problem, cache = plan.problem, plan.problem.cache
    page = None if cache is None else cache.page
    return SplitConstants(
        head_dim=problem.head_dim,
        head_pad=one_width(problem.head_dim),
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        stages=config.stages,
        far_rows=max(problem.strides_k[2], problem.strides_v[2]) * config.tile_n >= INT32,
        vector=problem.alignment // ELEMENT_BYTES,
        banded=problem.is_banded,
        two_sided=problem.is_two_sided,
        scale_sign=problem.scale_sign,
        score=lowered_score(problem, plan.arch),
        has_score=problem.has_score,
        compiled=plan.arch.is_gpu,
        cached=cache is not None,
        paged=page is not None,
        page=0 if page is None or page % config.tile_n == 0 else page,
        packed_queries=problem.has_packed_queries,
        whole=config.splits == 1,
        overlaps=config.splits > 1 and _overlaps(plan),
    )


def _merge(plan: Plan, config: TritonSplitConfig) -> KernelTable:
    problem = plan.problem
    parts, lines = merged(config.splits)
    constants = MergeConstants(
        head_dim=problem.head_dim,
        parts=parts,
        lines=lines,
        columns=MERGED_COLUMNS,
        packed_queries=problem.has_packed_queries,
        overlaps=_overlaps(plan),
    )
    sizes = {
        "seq_q": problem.seq_q,
        "sequences": problem.lengths[0],
        "heads_q": problem.heads_q,
        "splits": config.splits,
    }
    rows: dict[str, Parameter] = {
        **{name: Tensor(of=name) for name in ("partial_out", "partial_lse", "out", "lse")},
        **{name: Integer(value=value) for name, value in sizes.items()},
        "out_strides": _out_strides(problem),
        "sinks": sinks_row(problem),
        "cu_seqlens_q": _index(problem, "cu_seqlens_q"),
        "C": Constant(value=constants),
    }
    options = {"num_warps": 8 if parts * lines > 64 else 4, "num_stages": 1, "enable_fp_fusion": True}
    options |= {"launch_pdl": True} if constants.overlaps else {}
    return KernelTable(kernel=MERGE, grid=merge_programs(problem, config.splits), options=options, rows=rows)


def _overlaps(plan: Plan) -> bool:
    """True on arches where a kernel may begin before the one in front of it ends."""
    return plan.arch.is_gpu and plan.arch.capability >= (9, 0)


def _index(problem: Problem, name: str) -> Parameter:
    """A tensor that says where keys or queries are, at any multiple of 4 bytes; None where a problem has none."""
    return Tensor(of=name, is_aligned=False) if name in problem.cache_tensors else Constant(value=None)


def _out_strides(problem: Problem) -> Parameter:
    """The strides of out. That of a dimension with one element may be anything in a caller's own out."""
    layout = problem.layouts["out"]
    pairs = zip(layout.shape[:3], layout.strides[:3], strict=True)
    strides = tuple(0 if size == 1 else stride for size, stride in pairs)
    return stride_rows("out", strides, OUT_VECTOR)
