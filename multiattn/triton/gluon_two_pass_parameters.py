"""The parameters of the Gluon kernels that make gradients in two passes. Pure Python: no Triton."""

from __future__ import annotations

from dataclasses import replace

from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan
from multiattn.plan.schedule import heads_side_by_side, key_tiles, kv_heads_of_section, query_tiles
from multiattn.problem import Problem
from multiattn.triton.gluon_backward_configs import areas_of
from multiattn.triton.gluon_backward_parameters import descriptors, statistics_table, walk_rows
from multiattn.triton.gluon_two_pass_configs import BLOCK_QUERIES, LAUNCH_REGISTERS, TILE_N, GluonTwoPassConfig
from multiattn.triton.kernels.constants import OUT_VECTOR
from multiattn.triton.kernels.gluon.two_pass_constants import TwoPassConstants
from multiattn.triton.score import lowered_of_pairs
from multiattn.triton.table import (
    Assumed,
    Constant,
    Descriptor,
    KernelTable,
    Parameter,
    Tensor,
    aux_row,
    stride_rows,
)


def two_pass_tables(plan: Plan, assumed: Assumed, multiprocessors: int, *, has_dlse: bool) -> tuple[KernelTable, ...]:
    """The kernels of a launch in two passes: statistics of queries, gradients of queries, gradients of keys."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, GluonTwoPassConfig)
    lowered = lowered_of_pairs(problem, plan.arch)
    constants = TwoPassConstants.of(problem, config, ragged=assumed.flag, by_keys=False, score=lowered)
    before = statistics_table(problem, has_dlse=has_dlse, has_sums=False)
    return (
        before,
        _table(problem, plan.arch, constants, multiprocessors, by_keys=False),
        _table(problem, plan.arch, replace(constants, by_keys=True), multiprocessors, by_keys=True),
    )


def _table(
    problem: Problem, arch: Arch, constants: TwoPassConstants, multiprocessors: int, *, by_keys: bool
) -> KernelTable:
    """The kernel whose blocks own keys, or queries."""
    owned = ("dk", "dv") if by_keys else ("dq",)
    strides = {"dq": problem.strides_out, "dk": problem.strides_dk, "dv": problem.strides_dv}
    length, rows_of_tile, tile_list = problem.seq_q, BLOCK_QUERIES, "query_list"
    if by_keys:
        length, rows_of_tile, tile_list = problem.seq_kv, TILE_N, "key_list"
    packing, tiles = problem.packing, -(-length // rows_of_tile)
    if packing is not None:  # both lists have tiles of 64
        tiles = packing.tiles_max(length, TILE_N)
    together = heads_side_by_side(problem)
    if by_keys:
        together = kv_heads_of_section(problem, arch, tiles_of_head=tiles)
    heads = problem.batch * (problem.heads_kv if by_keys else problem.heads_q)
    lines = areas_of(problem)["statistics"]
    rows: dict[str, Parameter] = {
        **descriptors(problem, {name: name for name in ("q", "dout", "k", "v")}, 64),
        "statistics": Descriptor(of="statistics", layout=lines, rows=1, columns=64)
        if by_keys
        else Tensor(of="statistics"),
        **{name: Tensor(of=name) for name in owned},
        tile_list: Constant(value=None) if packing is None else Tensor(of=tile_list),
        "counter": Tensor(of=abi.WORKSPACE),
        "aux": aux_row(problem, constants.score),
        **{f"{name}_strides": stride_rows(name, strides[name], OUT_VECTOR) for name in owned},
        **walk_rows(problem, tiles=tiles, heads=heads, together=together),
        "C": Constant(value=constants),
    }
    blocks = key_tiles(problem, TILE_N) if by_keys else query_tiles(problem, BLOCK_QUERIES)
    return KernelTable(
        kernel="gradients_of_own_keys" if by_keys else "gradient_of_own_queries",
        grid=min(blocks, multiprocessors),
        # Four warps are the first consumer's; the compiler adds those of the other partitions.
        options={"num_warps": 4, "maxnreg": LAUNCH_REGISTERS, "launch_pdl": True, "enable_fp_fusion": True},
        rows=rows,
    )
