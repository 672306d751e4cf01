"""The arguments of every Triton kernel: one table each, from which all else follows. Pure Python: no Triton.

A table has a row for each parameter, by its name. The kernel's call, what the JIT specialises on, the interpreter's
call, the driver's launch and an emitted kernel's Binding derive from it (`multiattn.triton.launch`, `.signature`,
`.bind`), and each checks that the names are the kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from multiattn.plan.backend import Plan, variant_of
from multiattn.plan.schedule import heads_side_by_side, most_multiprocessors
from multiattn.problem import LOG2_E, Problem, Strides
from multiattn.run.arguments import Layout, layouts
from multiattn.triton.configs import (
    ELEMENT_BYTES,
    ROWS_BESIDE,
    BackwardConfig,
    TritonConfig,
    head_pad,
    key_programs,
    query_programs,
)
from multiattn.triton.gluon_configs import VARIANT as GLUON
from multiattn.triton.gluon_configs import GluonConfig, grid_blocks, pieces_of, query_tiles
from multiattn.triton.ladder import STEPS

OUT_VECTOR = 8
"""As `multiattn.triton.kernels.tiles` has it."""
WORKSPACE = {"delta": "delta", "dq_sum": "dq_sum", "counter": "workspace"}
"""Parameters that are areas of workspace, and the names of those."""
INT32 = 1 << 31
"""Offsets from here on need 64 bits."""


# ---------------------------------------------------------------- rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """The address of an operand or of an area of workspace."""

    of: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Descriptor:
    """A TensorDescriptor of an operand or an area ``[B, H, S, D]``, with blocks of `rows` of one head."""

    of: str
    layout: Layout
    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Float:
    """An fp32 number."""

    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Integer:
    """An integer, in 32 bits where they hold it. `specialised`: whether code may depend on its value."""

    value: int
    specialised: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A constexpr, or None for what a kernel is not given."""

    value: Any


Row = Tensor | Descriptor | Float | Integer | Constant


@dataclass(frozen=True, kw_only=True)
class Table:
    """One kernel of a launch."""

    kernel: str
    """Its function's name."""
    grid: int
    options: Mapping[str, Any]
    """For Triton's compiler, beside the constexprs."""
    rows: Mapping[str, Row]
    """Of each parameter, in order."""


class Assumed(NamedTuple):
    """What code assumes of tensors beyond their Problem's own constants."""

    alignment: int
    """Bytes that divide every address and stride of q, k and v."""
    flag: bool
    """Whether offsets inside a tile may pass 2^31 elements; for Gluon, whether the last block of keys is not full."""


FLAGS = {False: "wide", True: "ragged"}
"""The name of `Assumed.flag` among a Binding's constants, of a plain kernel and of Gluon's."""


def assumed_of(plan: Plan) -> Assumed:
    """What code must assume for the tensors of a Plan, and no less."""
    problem, config = plan.problem, plan.config
    if isinstance(config, GluonConfig):
        return Assumed(alignment=problem.alignment, flag=problem.seq_kv % config.tile_n != 0)
    assert isinstance(config, TritonConfig)
    return Assumed(alignment=problem.alignment, flag=_is_wide(problem, config, plan.direction == "backward"))


def _is_wide(problem: Problem, config: TritonConfig, is_backward: bool) -> bool:
    strides = [problem.strides_q, problem.strides_k, problem.strides_v, problem.strides_out]
    strides += [problem.strides_dk, problem.strides_dv] if is_backward else []
    return max(of_tensor[2] for of_tensor in strides) * max(config.tile_m, config.tile_n) >= INT32


def tables_of(
    plan: Plan, *, has_dlse: bool = False, assumed: Assumed | None = None, multiprocessors: int | None = None
) -> tuple[Table, ...]:
    """The kernels of a launch, in order.

    Args:
        plan: of either direction.
        has_dlse: whether a backward has a dlse.
        assumed: by code that is there; None for what the tensors ask for.
        multiprocessors: of the device; None for the largest product of the arch.
    """
    assumed = assumed or assumed_of(plan)
    if plan.direction == "backward":
        return _backward(plan, has_dlse)
    if plan.variant == GLUON:
        return (_gluon(plan, multiprocessors or most_multiprocessors(plan.arch)),)
    return (_forward(plan, assumed),)


def area_names(tables: tuple[Table, ...]) -> tuple[str, ...]:
    """The areas of workspace that a launch takes."""
    found = [row.of for table in tables for row in table.rows.values() if isinstance(row, Tensor | Descriptor)]
    return tuple(name for name in dict.fromkeys(WORKSPACE.values()) if name in found)


# ---------------------------------------------------------------- what tables have in common


def _strides(
    name: str, strides: Strides | None, unit: int = 1, *, specialised: bool = True
) -> Iterator[tuple[str, Row]]:
    """Strides of a tensor in units of so many elements; none where a descriptor has them."""
    for index, dim in enumerate(("batch", "head", "row")):
        if strides is None:
            yield f"{name}_{dim}", Constant(value=None)
            continue
        if strides[index] % unit:
            raise ValueError(f"strides_{name}: got {strides}; allowed multiples of {unit} elements, as is assumed")
        yield f"{name}_{dim}", Integer(value=strides[index] // unit, specialised=specialised)


def _lengths(problem: Problem, *names: str) -> Iterator[tuple[str, Row]]:
    for name in names:
        yield name, Integer(value=getattr(problem, name), specialised=False)


def _tensors(*names: str) -> dict[str, Row]:
    return {name: Tensor(of=WORKSPACE.get(name, name)) for name in names}


def _constants(**values: Any) -> dict[str, Row]:
    return {name: Constant(value=value) for name, value in values.items()}


def _described(problem: Problem, rows: int, *names: str) -> dict[str, Row]:
    known, columns = layouts(problem), head_pad(problem.head_dim)
    return {name: Descriptor(of=name, layout=known[name], rows=rows, columns=columns) for name in names}


def compiler_options(config: TritonConfig) -> dict[str, Any]:
    """For Triton's compiler, beside the constexprs."""
    # Without fusion a score costs a multiply and an add; the default of this option changes in Triton 3.10.
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    if config.registers is not None:
        options["maxnreg"] = config.registers
    return options


def _tiles(problem: Problem, config: TritonConfig, assumed: Assumed) -> dict[str, Row]:
    """The last constexprs of the kernels that walk over tiles."""
    return _constants(
        HEAD_DIM=problem.head_dim,
        HEAD_PAD=head_pad(problem.head_dim),
        TILE_M=config.tile_m,
        TILE_N=config.tile_n,
        STAGES=config.num_stages,
        HEADS_TOGETHER=config.heads_together,
        VECTOR=assumed.alignment // ELEMENT_BYTES,
        WIDE=assumed.flag,
    )


# ---------------------------------------------------------------- forward


def _forward(plan: Plan, assumed: Assumed) -> Table:
    problem, config, step = plan.problem, plan.config, STEPS[plan.variant].step
    assert isinstance(config, TritonConfig)
    vector = assumed.alignment // ELEMENT_BYTES
    kv = _described(problem, config.tile_n, "k", "v") if step.descriptor else _tensors("k", "v")
    rows: dict[str, Row] = {
        **_tensors("q"),
        **kv,
        **_tensors("out", "lse"),
        "scale": Float(value=problem.scale_log2 if step.exp2 else problem.scale_log2 / LOG2_E),
        **dict(_lengths(problem, "seq_q", "seq_kv")),
        "heads_q": Integer(value=problem.heads_q),
        "group": Integer(value=problem.group),
        "batch_heads": Integer(value=problem.batch * problem.heads_q),
        **dict(_strides("q", problem.strides_q, vector)),
        **dict(_strides("k", None if step.descriptor else problem.strides_k, vector)),
        **dict(_strides("v", None if step.descriptor else problem.strides_v, vector)),
        **dict(_strides("out", problem.strides_out, OUT_VECTOR)),
        **_constants(CAUSAL=problem.causal, SCALE_SIGN=problem.scale_sign, STEP=step),
        **_tiles(problem, config, assumed),
    }
    grid = query_programs(problem, config.tile_m)
    return Table(kernel="attention_forward", grid=grid, options=compiler_options(config), rows=rows)


def _gluon(plan: Plan, multiprocessors: int) -> Table:
    """The constants of the kernel are made by `multiattn.triton.kernels.gluon.call`, which takes Triton."""
    problem, config = plan.problem, plan.config
    assert isinstance(config, GluonConfig)
    known = layouts(problem)
    rows: dict[str, Row] = {}
    for piece, columns in zip(("map", "narrow"), pieces_of(problem.head_dim), strict=True):
        for name in ("q", "k", "v", "out"):
            tile = config.tile_n if name in ("k", "v") else 64
            described = Descriptor(of=name, layout=known[name], rows=tile, columns=columns)
            rows[f"{name}_{piece}"] = described if columns else Constant(value=None)
    rows |= _tensors("lse", "counter")
    if not plan.workspace_bytes:
        rows["counter"] = Constant(value=None)
    rows["scale"] = Float(value=problem.scale_log2)
    sizes = {
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "heads_q": problem.heads_q,
        "group": problem.group,
        "tiles": query_tiles(config, problem),
        "heads": problem.batch * problem.heads_q,
        "together": heads_side_by_side(problem),
    }
    rows |= {name: Integer(value=value, specialised=False) for name, value in sizes.items()}
    rows |= _constants(C=None)
    blocks = grid_blocks(config, problem)
    return Table(
        kernel="attention_forward",
        grid=blocks if config.scheduler == "one_tile" else min(blocks, multiprocessors),
        # Four warps are the first consumer's; the compiler adds those of the other partitions.
        options={"num_warps": 4, "maxnreg": config.registers, "launch_pdl": True, "enable_fp_fusion": True},
        rows=rows,
    )


# ---------------------------------------------------------------- backward

_BESIDE_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


def _backward(plan: Plan, has_dlse: bool) -> tuple[Table, ...]:
    flags = dict(variant_of(plan).flags)
    keys = _gradients_of_keys(plan, one_pass=flags["one_pass"], descriptor=flags["descriptor"])
    if flags["one_pass"]:
        return _prepare_rows(plan.problem, has_dlse), keys, _finish_dq(plan.problem)
    return _gradient_of_queries(plan, has_dlse, descriptor=flags["descriptor"]), keys


def _dlse(problem: Problem, has_dlse: bool) -> dict[str, Row]:
    """A dlse, or any pointer to no rows."""
    return {
        "dlse": Tensor(of="dlse" if has_dlse else "lse"),
        "dlse_rows": Integer(value=problem.seq_q if has_dlse else 0, specialised=False),
    }


def _beside(kernel: str, problem: Problem, tensors: dict[str, Row], strides_of: str) -> Table:
    """A kernel before or after the one pass: a program for `ROWS_BESIDE` rows."""
    rows: dict[str, Row] = {
        **tensors,
        **dict(_lengths(problem, "seq_q")),
        "heads_q": Integer(value=problem.heads_q),
        "batch_heads": Integer(value=problem.batch * problem.heads_q),
        **dict(_strides(strides_of, problem.strides_out, OUT_VECTOR)),
        **_constants(
            HEAD_DIM=problem.head_dim,
            HEAD_PAD=head_pad(problem.head_dim),
            TILE_M=ROWS_BESIDE,
            WIDE=problem.strides_out[2] * ROWS_BESIDE >= INT32,
        ),
    }
    return Table(kernel=kernel, grid=query_programs(problem, ROWS_BESIDE), options=_BESIDE_OPTIONS, rows=rows)


def _prepare_rows(problem: Problem, has_dlse: bool) -> Table:
    dlse = _dlse(problem, has_dlse)
    tensors = {
        **_tensors("out", "dout"),
        "dlse": dlse["dlse"],
        **_tensors("delta", "dq_sum"),
        "dlse_rows": dlse["dlse_rows"],
    }
    return _beside("prepare_rows", problem, tensors, "out")


def _finish_dq(problem: Problem) -> Table:
    tensors = {**_tensors("dq_sum", "dq"), "grad_factor": Float(value=problem.grad_factor)}
    return _beside("finish_dq", problem, tensors, "dq")


def _gradient_of_queries(plan: Plan, has_dlse: bool, *, descriptor: bool) -> Table:
    problem = plan.problem
    assert isinstance(plan.config, BackwardConfig)
    config, dlse = plan.config.of_dq, _dlse(problem, has_dlse)
    assumed = Assumed(alignment=problem.alignment, flag=_is_wide(problem, config, True))
    vector = assumed.alignment // ELEMENT_BYTES
    kv = _described(problem, config.tile_n, "k", "v") if descriptor else _tensors("k", "v")
    rows: dict[str, Row] = {
        **_tensors("q"),
        **kv,
        **_tensors("out", "lse", "dout"),
        "dlse": dlse["dlse"],
        **_tensors("dq", "delta"),
        "score_factor": Float(value=problem.score_factor),
        "grad_factor": Float(value=problem.grad_factor),
        "dlse_rows": dlse["dlse_rows"],
        **dict(_lengths(problem, "seq_q", "seq_kv")),
        "heads_q": Integer(value=problem.heads_q),
        "group": Integer(value=problem.group),
        "batch_heads": Integer(value=problem.batch * problem.heads_q),
        **dict(_strides("q", problem.strides_q, vector)),
        **dict(_strides("k", None if descriptor else problem.strides_k, vector)),
        **dict(_strides("v", None if descriptor else problem.strides_v, vector)),
        **dict(_strides("out", problem.strides_out, OUT_VECTOR)),
        **_constants(CAUSAL=problem.causal, DESCRIPTOR=descriptor),
        **_tiles(problem, config, assumed),
    }
    grid = query_programs(problem, config.tile_m)
    return Table(kernel="gradient_of_queries", grid=grid, options=compiler_options(config), rows=rows)


def _gradients_of_keys(plan: Plan, *, one_pass: bool, descriptor: bool) -> Table:
    problem, config = plan.problem, plan.config
    assert isinstance(config, BackwardConfig)
    assumed = assumed_of(plan)
    vector = assumed.alignment // ELEMENT_BYTES
    streamed = (
        _described(problem, config.tile_m, "q", "dout", "dq_sum") if descriptor else _tensors("q", "dout", "dq_sum")
    )
    rows: dict[str, Row] = {
        "q": streamed["q"],
        **_tensors("k", "v", "lse"),
        "dout": streamed["dout"],
        **_tensors("delta"),
        "dq_sum": streamed["dq_sum"] if one_pass else Constant(value=None),
        **_tensors("dk", "dv"),
        "score_factor": Float(value=problem.score_factor),
        "grad_factor": Float(value=problem.grad_factor),
        **dict(_lengths(problem, "seq_q", "seq_kv")),
        "heads_q": Integer(value=problem.heads_q),
        "group": Integer(value=problem.group),
        "batch_heads": Integer(value=problem.batch * problem.heads_kv),
        **dict(_strides("q", None if descriptor else problem.strides_q, vector)),
        **dict(_strides("k", problem.strides_k, vector)),
        **dict(_strides("v", problem.strides_v, vector)),
        **dict(_strides("dout", None if descriptor else problem.strides_out, OUT_VECTOR)),
        **dict(_strides("dk", problem.strides_dk, OUT_VECTOR)),
        **dict(_strides("dv", problem.strides_dv, OUT_VECTOR)),
        **_constants(ONE_PASS=one_pass, CAUSAL=problem.causal, DESCRIPTOR=descriptor),
        **_tiles(problem, config, assumed),
    }
    grid = key_programs(problem, config.tile_n)
    return Table(kernel="gradients_of_keys", grid=grid, options=compiler_options(config), rows=rows)
