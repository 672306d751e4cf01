"""The parameters of every Triton kernel: one table each, from which all else follows. Pure Python: no Triton.

A table has a row for each parameter, by its name. The kernel's call, the interpreter's, the stand-ins that Triton
specialises on (`multiattn.triton.calls`), the driver's launch and an emitted kernel's (`.bind`) derive from it, and
what Triton made of a call is held against it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from multiattn.block_mask import KEYS_OF_QUERIES, QUERIES_OF_KEYS
from multiattn.layout import VECTOR_BYTES
from multiattn.packed import CU_SEQLENS, TILE_LISTS, ragged
from multiattn.plan import abi
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Plan, variant_of
from multiattn.plan.schedule import heads_side_by_side, key_tiles, most_multiprocessors, one_width, query_tiles
from multiattn.problem import Problem
from multiattn.score.expression import ONE
from multiattn.triton.configs import (
    ASYNCHRONOUS,
    ELEMENT_BYTES,
    ROWS_BESIDE,
    TritonConfig,
    TritonTwoPassConfig,
    cut,
)
from multiattn.triton.decode_configs import VARIANT as SPLIT_KEYS
from multiattn.triton.decode_parameters import split_tables
from multiattn.triton.gluon_backward_configs import GluonBackwardConfig
from multiattn.triton.gluon_backward_parameters import gluon_backward_tables
from multiattn.triton.gluon_configs import ARCHES as GLUON_ARCHES
from multiattn.triton.gluon_configs import VARIANT as GLUON
from multiattn.triton.gluon_configs import GluonConfig, pieces_of
from multiattn.triton.gluon_two_pass_configs import GluonTwoPassConfig
from multiattn.triton.gluon_two_pass_parameters import two_pass_tables
from multiattn.triton.kernels.constants import OUT_VECTOR, ListConstants, TileConstants
from multiattn.triton.kernels.gluon.constants import GluonConstants
from multiattn.triton.ladder import STEPS
from multiattn.triton.score import lowered_of_pairs, lowered_score
from multiattn.triton.table import (
    INT32,
    Assumed,
    Constant,
    Descriptor,
    Integer,
    KernelTable,
    Parameter,
    Tensor,
    aux_row,
    factor_row,
    item_row,
    reach_rows,
    sinks_row,
    stride_rows,
)
from multiattn.validate import LOG2_E

_AREAS = ("delta", "dq_sum", *TILE_LISTS, abi.WORKSPACE)
"""Areas of workspace that a launch may take."""
_GIVEN = ("q", "k", "v")
"""Tensors of the caller's, which may be less aligned than our own."""


FLAGS = {False: "wide", True: "ragged"}
"""The name of `Assumed.flag` among a Binding's constants, of a plain kernel and of Gluon's."""


def assumed_of(plan: Plan) -> Assumed:
    """The fewest assumptions that code can make for the tensors of a Plan."""
    problem, config = plan.problem, plan.config
    if isinstance(config, GluonConfig):
        has_end = problem.packing is not None or problem.seq_kv % config.tile_n != 0
        return Assumed(alignment=problem.alignment, flag=has_end and not problem.is_banded)
    if isinstance(config, GluonBackwardConfig | GluonTwoPassConfig):
        has_end = problem.packing is not None or problem.seq_kv % config.tile_n != 0
        return Assumed(alignment=problem.alignment, flag=has_end)
    return Assumed(alignment=problem.alignment, flag=_is_far(problem, _config_of(plan), plan.direction == "backward"))


def _config_of(plan: Plan) -> TritonConfig:
    """The config of a plain kernel, cut to its problem."""
    assert isinstance(plan.config, TritonConfig)
    return cut(plan.config, plan.problem, is_backward=plan.direction == "backward")


def _is_far(problem: Problem, config: TritonConfig, is_backward: bool) -> bool:
    strides = [problem.strides_q, problem.strides_k, problem.strides_v, problem.strides_out]
    strides += [problem.strides_dk, problem.strides_dv] if is_backward else []
    return max(of_tensor[2] for of_tensor in strides) * max(config.tile_m, config.tile_n) >= INT32


def tables_of(
    plan: Plan, *, has_dlse: bool = False, assumed: Assumed | None = None, multiprocessors: int | None = None
) -> tuple[KernelTable, ...]:
    """The kernels of a launch, in order.

    Args:
        plan: of either direction.
        has_dlse: whether a backward has a dlse.
        assumed: what existing code assumes; None for what the tensors need.
        multiprocessors: of the device; None for the largest product of the arch.
    """
    if plan.variant == SPLIT_KEYS:
        return split_tables(plan)
    assumed = assumed or assumed_of(plan)
    if isinstance(plan.config, GluonBackwardConfig):
        lists = _tile_lists(plan, query_tile=plan.config.tile_m, key_tile=plan.config.tile_n)
        return (
            *lists,
            *gluon_backward_tables(
                plan, assumed, multiprocessors or most_multiprocessors(plan.arch), has_dlse=has_dlse
            ),
        )
    if isinstance(plan.config, GluonTwoPassConfig):
        lists = _tile_lists(plan, query_tile=plan.config.tile_m, key_tile=plan.config.tile_n)
        tables = two_pass_tables(plan, assumed, multiprocessors or most_multiprocessors(plan.arch), has_dlse=has_dlse)
        return (*lists, *tables)
    if plan.variant == GLUON:
        table = _gluon(plan, assumed, multiprocessors or most_multiprocessors(plan.arch))
        assert isinstance(plan.config, GluonConfig)
        return (*_tile_lists(plan, query_tile=plan.config.tile_m, counts=plan.config.counts), table)
    return _forward(plan, assumed) if plan.direction == "forward" else _backward(plan, assumed, has_dlse)


def area_names(tables: Iterable[KernelTable]) -> tuple[str, ...]:
    """The areas of workspace that a launch takes."""
    found = [row.of for table in tables for row in table.rows.values() if isinstance(row, Tensor | Descriptor)]
    return tuple(name for name in _AREAS if name in found)


# ---------------------------------------------------------------- lists of tiles

LIST_TILES = "list_tiles"
"""The kernel's name, in launches of every variant."""
_PARTS_MAX = 32
"""Programs that share the tiles of a group of sequences, at most."""
_GROUPS_SHARED = 128
"""Groups whose tiles are shared; of more each has a program by itself."""
_ENTRIES_OF_PART = 16
"""Entries for which one of them is worth it. A guess, not measured."""


def _tile_lists(plan: Plan, *, query_tile: int = 0, key_tile: int = 0, counts: bool = False) -> tuple[KernelTable, ...]:
    """The kernel that goes first in a packed launch; none in others.

    Args:
        plan: of the launch.
        query_tile: rows of the tiles of queries that its kernels own, 0 where they own none.
        key_tile: the same of keys.
        counts: whether a kernel counts tiles in the workspace: then this one sets the counter to 0.
    """
    problem, packing = plan.problem, plan.problem.packing
    if packing is None:
        return ()
    constants = ListConstants(query_tile=query_tile, key_tile=key_tile, last_first=problem.is_banded)
    entries = {
        "query": packing.tiles_max(problem.seq_q, query_tile) if query_tile else 0,
        "key": packing.tiles_max(problem.seq_kv, key_tile) if key_tile else 0,
    }
    groups = (packing.sequences + 1) // constants.group + 1  # the rows on either side of all sequences are two more
    parts = min(_PARTS_MAX, -(-max(entries.values()) // _ENTRIES_OF_PART), max(1, _GROUPS_SHARED // groups))
    longest_q, longest_kv = packing.longest(problem.seq_q, problem.seq_kv)
    sizes = {
        "sequences": packing.sequences,
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "longest_q": longest_q,
        "longest_kv": longest_kv,
        **{f"{name}_entries": number for name, number in entries.items()},
        "parts": parts,
    }
    rows: dict[str, Parameter] = {
        **{name: Tensor(of=name, is_aligned=False) for name in CU_SEQLENS},
        "query_list": Tensor(of="query_list") if query_tile else Constant(value=None),
        "key_list": Tensor(of="key_list") if key_tile else Constant(value=None),
        "counter": Tensor(of=abi.WORKSPACE) if counts else Constant(value=None),
        **{name: Integer(value=value) for name, value in sizes.items()},
        "C": Constant(value=constants),
    }
    grid = groups * parts * sum(map(bool, (query_tile, key_tile)))
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    return (KernelTable(kernel=LIST_TILES, grid=grid, options=options, rows=rows),)


# ---------------------------------------------------------------- plain kernels


_NAMES: Mapping[str, str] = {
    "attention_forward": """
        q k v out lse scale seq_q seq_kv heads
        q_strides k_strides v_strides out_strides left right sinks aux lists entries tiles C""",
    "prepare_rows": "out dout dlse delta dq_sum dlse_rows seq_q heads_q batch_heads out_strides C",
    "finish_dq": "dq_sum dq grad_factor seq_q heads_q batch_heads dq_strides C",
    "gradient_of_queries": """
        q k v out lse dout dlse dq delta score_factor grad_factor dlse_rows seq_q seq_kv heads
        q_strides k_strides v_strides out_strides left right aux lists entries tiles C""",
    "gradients_of_keys": """
        q k v lse dout delta dq_sum dk dv score_factor grad_factor seq_q seq_kv heads
        q_strides k_strides v_strides dout_strides dk_strides dv_strides left right aux daux lists entries tiles C""",
}
"""The parameters of each plain kernel, in order."""
_OF_KEYS, _OF_QUERIES = ("k", "v"), ("q", "dout", "dq_sum")
"""The tensors that a program walks over if it owns queries, or keys: by descriptors where the variant has them."""


def _table(
    kernel: str, problem: Problem, constants: TileConstants, options: Mapping[str, Any], *, has_dlse: bool = False
) -> KernelTable:
    """The table of a plain kernel. Without a dlse it is given any pointer, to no rows."""
    known, by_keys = problem.layouts, kernel == "gradients_of_keys"
    described = (_OF_QUERIES if by_keys else _OF_KEYS) if constants.descriptor else ()
    alignment = constants.vector * ELEMENT_BYTES
    # The small kernels take rows as they come, whatever sequence they are of.
    tiled = problem if constants.packed else replace(problem, packing=None)
    grid = key_tiles(tiled, constants.tile_n) if by_keys else query_tiles(tiled, constants.tile_m)
    heads = {
        "heads_q": Integer(value=problem.heads_q),
        # Around the loop over queries a loop over the heads of a group would spill 44 times in it (sm90, D=128).
        "group": Integer(value=problem.group, specialised=by_keys and problem.group == 1),
        "batch_heads": Integer(value=problem.batch * (problem.heads_kv if by_keys else problem.heads_q)),
    }
    fixed: dict[str, Parameter] = {
        **heads,
        "heads": heads,
        "seq_q": Integer(value=problem.seq_q),
        "seq_kv": Integer(value=problem.seq_kv),
        "scale": factor_row(problem, problem.scale_log2 if constants.step.exp2 else problem.scale_log2 / LOG2_E),
        "score_factor": factor_row(problem, problem.score_factor),
        "grad_factor": problem.grad_factor,
        "dlse": Tensor(of="dlse" if has_dlse else "lse"),
        "dlse_rows": Integer(value=problem.seq_q if has_dlse else 0),
        **reach_rows(problem),
        "sinks": sinks_row(problem),
        "aux": aux_row(problem, constants.score),
        "daux": _daux(problem, constants),
        "lists": _lists(problem, by_keys),
        **dict.fromkeys(("entries", "tiles"), Constant(value=None)),
        "C": Constant(value=constants),
    }
    if constants.packed:
        fixed["entries"] = Tensor(of="key_list" if by_keys else "query_list")
        fixed["tiles"] = Integer(value=grid // heads["batch_heads"].value)
    if not constants.one_pass:
        fixed["dq_sum"] = Constant(value=None)

    def row(name: str) -> Parameter:
        of = name.removesuffix("_strides")
        if name in fixed:
            return fixed[name]
        if of != name:
            unit = constants.vector if of in _GIVEN else OUT_VECTOR
            return Constant(value=None) if of in described else stride_rows(of, known[of].strides[:3], unit)
        if name in described:
            rows = constants.tile_n if name in _OF_KEYS else constants.tile_m
            return Descriptor(of=name, layout=known[name], rows=rows, columns=constants.head_pad)
        return Tensor(of=name, is_aligned=name not in _GIVEN or alignment == VECTOR_BYTES)

    rows = {name: row(name) for name in _NAMES[kernel].split()}
    return KernelTable(kernel=kernel, grid=grid, options=options, rows=rows)


def _daux(problem: Problem, constants: TileConstants) -> Parameter:
    """The sums of gradients of captured tensors."""
    if problem.score is None or not constants.gradients:
        return Constant(value=None)
    given = problem.score.gradient_arguments(constants.score)
    return {name: Tensor(of=it) if isinstance(it, str) else item_row(it, problem) for name, it in given.items()}


def _lists(problem: Problem, by_keys: bool) -> Parameter:
    """The lists of a block mask, by rows of keys or of queries. Nothing is known of their alignment."""
    if problem.blocks is None:
        return Constant(value=None)
    it = problem.lists_of(QUERIES_OF_KEYS if by_keys else KEYS_OF_QUERIES)
    sizes = {"list_batch": it.stride_batch, "list_head": it.stride_head, "list_columns": it.columns}
    lists = {"counts": it.counts, "indices": it.indices, "full_counts": it.full_counts, "full_indices": it.full_indices}
    return {
        **{name: Integer(value=value) for name, value in sizes.items()},
        **{name: Tensor(of=of, is_aligned=False) for name, of in lists.items() if of is not None},
    }


def is_ragged_list(problem: Problem) -> bool:
    """True if the lists of queries may name keys beyond the end."""
    if problem.blocks is None:
        return False
    return problem.lists_of(KEYS_OF_QUERIES).columns * problem.blocks.keys > problem.seq_kv


def _constants(plan: Plan, config: TritonConfig, assumed: Assumed, **own: Any) -> TileConstants:
    """The constants of a kernel that walks over tiles."""
    problem = plan.problem
    lowered = lowered_score(problem, plan.arch, with_gradients=bool(own.get("gradients")))
    return TileConstants(
        head_dim=problem.head_dim,
        head_pad=one_width(problem.head_dim),
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        stages=config.num_stages,
        heads_in_turn=config.heads_together,
        vector=assumed.alignment // ELEMENT_BYTES,
        far_rows=assumed.flag,
        banded=problem.is_banded,
        two_sided=problem.is_two_sided,
        compiled=plan.arch.is_gpu,
        score=lowered,
        has_score=problem.has_score,
        has_slope=lowered is not None and lowered.slope is not ONE,
        blocks=problem.blocks,
        packed=problem.packing is not None,
        has_mask=lowered is not None and lowered.mask is not None,
        **own,
    )


def _options(config: TritonConfig) -> dict[str, Any]:
    """For Triton's compiler, beside the constants."""
    # Without fusion a score costs a multiply and an add; the default of this option changes in Triton 3.10.
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    return options if config.registers is None else {**options, "maxnreg": config.registers}


def _forward(plan: Plan, assumed: Assumed) -> tuple[KernelTable, ...]:
    problem, config, step = plan.problem, _config_of(plan), STEPS[plan.variant].step
    own = {"descriptor": step.descriptor, "scale_sign": problem.scale_sign, "step": step}
    constants = _constants(plan, config, assumed, ragged=is_ragged_list(problem), **own)
    table = _table("attention_forward", problem, constants, _options(config))
    return (*_tile_lists(plan, query_tile=config.tile_m), table)


def _backward(plan: Plan, assumed: Assumed, has_dlse: bool) -> tuple[KernelTable, ...]:
    problem, config, flags = plan.problem, _config_of(plan), dict(variant_of(plan).flags)
    flags["register_operands"] = plan.arch.is_gpu and plan.arch.name not in ASYNCHRONOUS
    # Keys beyond the end have to be hidden from dq alone: their own gradients are not stored.
    has_end = problem.blocks is not None and flags["one_pass"] and problem.seq_kv % config.tile_n != 0
    slots = () if problem.score is None else problem.score.gradients
    constants = _constants(plan, config, assumed, ragged=has_end, gradients=slots, **flags)
    keys = _table("gradients_of_keys", problem, constants, _options(config))
    if isinstance(config, TritonTwoPassConfig):
        of_dq = config.of_dq
        assumed = assumed._replace(flag=_is_far(problem, of_dq, True))
        constants = _constants(plan, of_dq, assumed, ragged=is_ragged_list(problem), **flags)
        queries = _table("gradient_of_queries", problem, constants, _options(of_dq), has_dlse=has_dlse)
        return (*_tile_lists(plan, query_tile=of_dq.tile_m, key_tile=config.tile_n), queries, keys)
    beside = TileConstants(
        head_dim=problem.head_dim,
        head_pad=one_width(problem.head_dim),
        tile_m=ROWS_BESIDE,
        far_rows=problem.strides_out[2] * ROWS_BESIDE >= INT32,
        one_pass=True,
    )
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    before = _table("prepare_rows", problem, beside, options, has_dlse=has_dlse)
    after = _table("finish_dq", problem, beside, options)
    return (*_tile_lists(plan, key_tile=config.tile_n), before, keys, after)


# ---------------------------------------------------------------- Gluon


def _gluon(plan: Plan, assumed: Assumed, multiprocessors: int) -> KernelTable:
    problem, config = plan.problem, plan.config
    assert isinstance(config, GluonConfig)
    packing, tiles = problem.packing, -(-problem.seq_q // config.tile_m)
    if packing is not None:
        tiles = packing.tiles_max(problem.seq_q, config.tile_m)
    rows: dict[str, Parameter] = {}
    for piece, columns in zip(("map", "narrow"), pieces_of(problem.head_dim), strict=True):
        for name in ("q", "k", "v", "out"):
            tile = config.tile_n if name in ("k", "v") else 64
            layout = problem.layouts[name] if packing is None else ragged(problem.layouts[name])
            described = Descriptor(of=name, layout=layout, rows=tile, columns=columns)
            rows[f"{name}_{piece}"] = described if columns else Constant(value=None)
    rows["lse"] = Tensor(of="lse")
    rows["sinks"] = sinks_row(problem)
    rows["query_list"] = Constant(value=None) if packing is None else Tensor(of="query_list")
    rows["counter"] = Tensor(of=abi.WORKSPACE) if config.counts else Constant(value=None)
    # As on its GPUs, also where it is interpreted: with their tanh.
    lowered = lowered_of_pairs(problem, ARCHS[GLUON_ARCHES[0]])
    rows["aux"] = aux_row(problem, lowered)
    rows["scale"] = factor_row(problem, problem.scale_log2)
    sizes = {
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "heads_q": problem.heads_q,
        "group": problem.group,
        "tiles": tiles,
        "heads": problem.batch * problem.heads_q,
        "together": heads_side_by_side(problem),
    }
    rows |= {name: Integer(value=value) for name, value in sizes.items()}
    rows |= reach_rows(problem)
    rows["C"] = Constant(value=GluonConstants.of(problem, config, ragged=assumed.flag, score=lowered))
    blocks = query_tiles(problem, config.tile_m)
    return KernelTable(
        kernel="attention_forward",
        grid=blocks if config.scheduler == "one_tile" else min(blocks, multiprocessors),
        # Four warps are the first consumer's; the compiler adds those of the other partitions.
        options={"num_warps": 4, "maxnreg": config.registers, "launch_pdl": True, "enable_fp_fusion": True},
        rows=rows,
    )
