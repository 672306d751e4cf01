"""What a launch of an emitted Gluon kernel hands to the driver, by Triton's calling convention. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping

from multiattn import abi
from multiattn.backend import Plan
from multiattn.schedule import heads_side_by_side, most_multiprocessors
from multiattn.triton.bind import SCRATCH, describe, integer
from multiattn.triton.gluon.configs import GluonConfig, grid_blocks, pieces_of, query_tiles


def bind(plan: Plan, image: abi.Image, emitted: Mapping[str, str]) -> abi.Binding:
    """The Binding of a Plan of this variant; arguments as of `multiattn.triton.bind.bind`."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, GluonConfig)
    constants: dict[str, str] = {}
    abi.exactly(constants, dtype=problem.dtype, head_dim=problem.head_dim, causal=problem.causal)
    abi.exactly(constants, scale_sign=problem.scale_sign)
    abi.flag(constants, emitted, "ragged", problem.seq_kv % config.tile_n != 0)
    abi.multiple(constants, emitted, "alignment", problem.alignment, problem.alignment)
    strides = {"q": problem.strides_q, "k": problem.strides_k, "v": problem.strides_v, "out": problem.strides_out}
    pieces = sum(1 for columns in pieces_of(problem.head_dim) if columns)
    arguments: list[abi.Argument] = []
    for name, box in zip(list(strides) * pieces, image.boxes, strict=True):
        arguments += describe(problem, name, strides[name], box)
    arguments.append(abi.Pointer(tensor="lse"))
    if plan.workspace_bytes:
        arguments.append(abi.Pointer(tensor=abi.WORKSPACE))
    arguments.append(abi.Number(kind="f32", value=problem.scale_log2))
    sizes = {
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "heads_q": problem.heads_q,
        "group": problem.group,
        "tiles": query_tiles(config, problem),
        "heads": problem.batch * problem.heads_q,
        "together": heads_side_by_side(problem),
    }
    for name, value in sizes.items():
        arguments += integer(constants, emitted, name, value, specialised=False)
    arguments += [abi.Pointer(tensor=None)] * SCRATCH
    blocks = grid_blocks(config, problem)
    if config.scheduler != "one_tile":
        blocks = min(blocks, most_multiprocessors(plan.arch))
    return abi.Binding(
        arguments=tuple(arguments),
        grid=(blocks, 1, 1),
        image=image,
        constants=constants,
        workspace_bytes=plan.workspace_bytes,
    )
