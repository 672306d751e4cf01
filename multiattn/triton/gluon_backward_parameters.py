"""The parameters of the Gluon kernels of gradients, and of the small ones before and after them. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping

from multiattn.packed import ragged
from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan
from multiattn.plan.schedule import key_tiles, kv_heads_of_section, one_width
from multiattn.problem import Problem
from multiattn.triton.gluon_backward_configs import GluonBackwardConfig, areas_of, tiles_of_queries
from multiattn.triton.gluon_configs import pieces_of
from multiattn.triton.kernels.constants import OUT_VECTOR, StatisticsConstants
from multiattn.triton.kernels.gluon.backward_constants import GluonBackwardConstants
from multiattn.triton.score import lowered_of_pairs
from multiattn.triton.table import (
    Assumed,
    Constant,
    Descriptor,
    Integer,
    KernelTable,
    Parameter,
    Tensor,
    aux_row,
    factor_row,
    reach_rows,
    stride_rows,
)

_KERNELS = "multiattn.triton.kernels"
GLUON_BACKWARD_KERNELS: Mapping[str, str] = {
    "prepare_statistics": f"{_KERNELS}.backward_rows",
    "round_dq": f"{_KERNELS}.backward_rows",
    "gradients": f"{_KERNELS}.gluon.backward",
    "gradient_of_own_queries": f"{_KERNELS}.gluon.backward_two_pass_queries",
    "gradients_of_own_keys": f"{_KERNELS}.gluon.backward_two_pass_keys",
}
"""The module of each kernel of these launches, by its name."""
_OVERLAPPING = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True, "launch_pdl": True}


def gluon_backward_tables(
    plan: Plan, assumed: Assumed, multiprocessors: int, *, has_dlse: bool
) -> tuple[KernelTable, ...]:
    """The kernels of a launch in one pass: statistics of queries, gradients, dq from its sums."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, GluonBackwardConfig)
    before = statistics_table(problem, has_dlse=has_dlse, has_sums=True)
    return before, _gradients(problem, plan.arch, config, assumed, multiprocessors), _round_dq(problem)


def descriptors(problem: Problem, tensors: Mapping[str, str], rows: int) -> dict[str, Parameter]:
    """Tensor maps by their names, then those of the narrow piece, or None: of so many rows of one head."""
    found: dict[str, Parameter] = {}
    for piece, columns in zip(("map", "narrow"), pieces_of(problem.head_dim), strict=True):
        for name, of in tensors.items():
            layout = problem.layouts[of] if problem.packing is None else ragged(problem.layouts[of])
            described = Descriptor(of=of, layout=layout, rows=rows, columns=columns)
            found[f"{name}_{piece}"] = described if columns else Constant(value=None)
    return found


def _row_constants(problem: Problem, has_sums: bool) -> Constant:
    wide, narrow = pieces_of(problem.head_dim) if has_sums else (0, 0)
    return Constant(
        value=StatisticsConstants(
            head_dim=problem.head_dim,
            head_pad=one_width(problem.head_dim),
            wide=wide,
            narrow=narrow,
            packed=problem.packing is not None,
            overlaps=True,
        )
    )


def statistics_table(problem: Problem, *, has_dlse: bool, has_sums: bool) -> KernelTable:
    """The kernel that goes first: `has_sums` where dq is summed up in the workspace, and a counter is there."""
    tiles = tiles_of_queries(problem)
    none = Constant(value=None)
    sizes = {
        "dlse_rows": problem.seq_q if has_dlse else 0,
        "seq_q": problem.seq_q,
        "heads_q": problem.heads_q,
        "tiles": tiles,
    }
    rows: dict[str, Parameter] = {
        "out": Tensor(of="out"),
        "dout": Tensor(of="dout"),
        "lse": Tensor(of="lse"),
        "dlse": Tensor(of="dlse" if has_dlse else "lse"),
        "delta": Tensor(of="delta") if problem.has_sinks else none,
        "statistics": Tensor(of="statistics"),
        "dq_fragments": Tensor(of="dq_fragments") if has_sums else none,
        "counter": Tensor(of=abi.WORKSPACE),
        **_tile_list(problem),
        **{name: Integer(value=value, specialised=False) for name, value in sizes.items()},
        "out_strides": stride_rows("out", problem.strides_out, OUT_VECTOR),
        "C": _row_constants(problem, has_sums),
    }
    grid = tiles * problem.heads_q * problem.batch
    return KernelTable(kernel="prepare_statistics", grid=grid, options=_OVERLAPPING, rows=rows)


def _tile_list(problem: Problem) -> dict[str, Parameter]:
    """The tiles of queries of a packed batch, of so many sequences."""
    if problem.packing is None:
        return dict.fromkeys(("query_list", "sequences"), Constant(value=None))
    sequences = Integer(value=problem.packing.sequences, specialised=False)
    return {"query_list": Tensor(of="query_list"), "sequences": sequences}


def walk_rows(problem: Problem, *, tiles: int, heads: int, together: int) -> dict[str, Parameter]:
    """Factors and sizes of a kernel of gradients: of so many tiles a head that blocks own, of `heads` in all."""
    sizes = {
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "heads_q": problem.heads_q,
        "group": problem.group,
        "tiles": tiles,
        "heads": heads,
        "together": together,
    }
    return {
        "score_factor": factor_row(problem, problem.score_factor),
        "grad_factor": problem.grad_factor,
        **{name: Integer(value=value, specialised=False) for name, value in sizes.items()},
        **reach_rows(problem),
        "tiles_q": Integer(value=tiles_of_queries(problem), specialised=False),
    }


def _round_dq(problem: Problem) -> KernelTable:
    tiles = tiles_of_queries(problem)
    sizes = {"seq_q": problem.seq_q, "heads_q": problem.heads_q, "tiles": tiles}
    rows: dict[str, Parameter] = {
        "dq_fragments": Tensor(of="dq_fragments"),
        "dq": Tensor(of="dq"),
        **_tile_list(problem),
        "grad_factor": problem.grad_factor,
        **{name: Integer(value=value, specialised=False) for name, value in sizes.items()},
        "dq_strides": stride_rows("dq", problem.strides_out, OUT_VECTOR),
        "C": _row_constants(problem, True),
    }
    grid = tiles * problem.heads_q * problem.batch
    return KernelTable(kernel="round_dq", grid=grid, options=_OVERLAPPING, rows=rows)


def _gradients(
    problem: Problem, arch: Arch, config: GluonBackwardConfig, assumed: Assumed, multiprocessors: int
) -> KernelTable:
    names = {name: name for name in ("q", "k", "v", "dout", "dk", "dv")}
    packing, tiles = problem.packing, -(-problem.seq_kv // config.tile_n)
    if packing is not None:
        tiles = packing.tiles_max(problem.seq_kv, config.tile_n)
    lowered = lowered_of_pairs(problem, arch)
    lines = areas_of(problem)["statistics"]
    together = kv_heads_of_section(problem, arch, tiles_of_head=tiles)
    rows: dict[str, Parameter] = {
        **descriptors(problem, names, 64),
        "statistics": Descriptor(of="statistics", layout=lines, rows=1, columns=64),
        "dq_fragments": Tensor(of="dq_fragments"),
        "key_list": Constant(value=None) if packing is None else Tensor(of="key_list"),
        "counter": Tensor(of=abi.WORKSPACE),
        "aux": aux_row(problem, lowered),
        **walk_rows(problem, tiles=tiles, heads=problem.batch * problem.heads_kv, together=together),
        "C": Constant(value=GluonBackwardConstants.of(problem, config, ragged=assumed.flag, score=lowered)),
    }
    return KernelTable(
        kernel="gradients",
        grid=min(key_tiles(problem, config.tile_n), multiprocessors),
        # Four warps make dQ; the compiler adds those of the other partitions: 512 threads of 128 registers.
        options={"num_warps": 4, "maxnreg": 128, "launch_pdl": True, "enable_fp_fusion": True},
        rows=rows,
    )
