"""The parameters of every Triton kernel: one table each, from which all else follows. Pure Python: no Triton.

A table has a row for each parameter, by its name. The kernel's call, the interpreter's, the stand-ins that Triton
specialises on (`multiattn.triton.calls`), the driver's launch and an emitted kernel's (`.bind`) derive from it, and
what Triton made of a call is held against it (`.compiled`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from multiattn.plan.backend import Plan, variant_of
from multiattn.plan.schedule import heads_side_by_side, most_multiprocessors
from multiattn.problem import LOG2_E, VECTOR_BYTES, Problem, Strides
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
from multiattn.triton.kernels.constants import OUT_VECTOR, TileConstants
from multiattn.triton.kernels.gluon.constants import GluonConstants
from multiattn.triton.ladder import STEPS

WORKSPACE = {"delta": "delta", "dq_sum": "dq_sum", "counter": "workspace"}
"""Parameters that are areas of workspace, and the names of those."""
INT32 = 1 << 31
"""Offsets from here on need 64 bits."""


# ---------------------------------------------------------------- rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """The address of an operand or of an area of workspace."""

    of: str
    is_aligned: bool = True
    """Whether code may rely on a multiple of 16 bytes."""


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


Scalar = Tensor | Descriptor | Float | Integer | Constant
Parameter = Scalar | tuple[Integer, Integer, Integer]
"""One parameter; a tuple has the strides of a tensor."""
_DIMS = ("batch", "head", "row")


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """One kernel of a launch."""

    kernel: str
    """Its function's name."""
    grid: int
    options: Mapping[str, Any]
    """For Triton's compiler, beside the constants."""
    rows: Mapping[str, Parameter]
    """Each parameter, in order."""

    def leaves(self) -> Iterator[tuple[str, tuple[int, ...], Scalar]]:
        """Name, place and row of everything that is handed over by itself: of ``q_strides`` ``q_batch`` and so on."""
        for index, (name, row) in enumerate(self.rows.items()):
            if isinstance(row, tuple):
                yield from (
                    (name.replace("strides", dim), (index, place), each)
                    for place, (dim, each) in enumerate(zip(_DIMS, row, strict=True))
                )
            else:
                yield name, (index,), row


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
    return Assumed(alignment=problem.alignment, flag=_is_far(problem, config, plan.direction == "backward"))


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
        assumed: by code that is there; None for what the tensors ask for.
        multiprocessors: of the device; None for the largest product of the arch.
    """
    if plan.variant == GLUON:
        return (_gluon(plan, assumed or assumed_of(plan), multiprocessors or most_multiprocessors(plan.arch)),)
    if plan.direction == "forward":
        return (_forward(plan, assumed or assumed_of(plan)),)
    flags = dict(variant_of(plan).flags)
    keys = _gradients_of_keys(plan, **flags)
    if flags["one_pass"]:
        return _prepare_rows(plan.problem, has_dlse), keys, _finish_dq(plan.problem)
    return _gradient_of_queries(plan, has_dlse, flags["descriptor"]), keys


def area_names(tables: Iterable[KernelTable]) -> tuple[str, ...]:
    """The areas of workspace that a launch takes."""
    found = [row.of for table in tables for row in table.rows.values() if isinstance(row, Tensor | Descriptor)]
    return tuple(name for name in dict.fromkeys(WORKSPACE.values()) if name in found)


# ---------------------------------------------------------------- what tables have in common


def _strides(name: str, strides: Strides, unit: int) -> tuple[Integer, Integer, Integer]:
    """Strides of a tensor, in units of so many elements."""
    if any(stride % unit for stride in strides):
        raise ValueError(f"strides_{name}: got {strides}; allowed multiples of {unit} elements, as is assumed")
    batch, head, row = (Integer(value=stride // unit) for stride in strides)
    return batch, head, row


def _strides_of(problem: Problem, alignment: int, *names: str, unless: bool = False) -> dict[str, Parameter]:
    """The strides of tensors as kernels take them; none where descriptors have them (`unless`)."""
    units = dict.fromkeys(("q", "k", "v"), alignment // ELEMENT_BYTES)
    return {
        f"{name}_strides": Constant(value=None)
        if unless
        else _strides(name, layouts(problem)[name].strides[:3], units.get(name, OUT_VECTOR))
        for name in names
    }


def _inputs(alignment: int, *names: str) -> dict[str, Parameter]:
    """Pointers to tensors of the caller's, which may be less aligned than our own."""
    return {name: Tensor(of=name, is_aligned=alignment == VECTOR_BYTES) for name in names}


def _tensors(*names: str) -> dict[str, Parameter]:
    return {name: Tensor(of=WORKSPACE.get(name, name)) for name in names}


def _described(problem: Problem, rows: int, *names: str) -> dict[str, Parameter]:
    known, columns = layouts(problem), head_pad(problem.head_dim)
    return {name: Descriptor(of=name, layout=known[name], rows=rows, columns=columns) for name in names}


def _sizes(problem: Problem, heads: int) -> dict[str, Parameter]:
    """`heads` are those that a launch has programs for, of one entry of the batch."""
    return {
        **{name: Integer(value=getattr(problem, name), specialised=False) for name in ("seq_q", "seq_kv")},
        "heads_q": Integer(value=problem.heads_q),
        "group": Integer(value=problem.group),
        "batch_heads": Integer(value=problem.batch * heads),
    }


def _dlse(problem: Problem, has_dlse: bool) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """A dlse, or any pointer to no rows; and how many rows it has."""
    rows = Integer(value=problem.seq_q if has_dlse else 0, specialised=False)
    return {"dlse": Tensor(of="dlse" if has_dlse else "lse")}, {"dlse_rows": rows}


def _factors(problem: Problem) -> dict[str, Parameter]:
    return {"score_factor": Float(value=problem.score_factor), "grad_factor": Float(value=problem.grad_factor)}


def compiler_options(config: TritonConfig) -> dict[str, Any]:
    """For Triton's compiler, beside the constants."""
    # Without fusion a score costs a multiply and an add; the default of this option changes in Triton 3.10.
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    if config.registers is not None:
        options["maxnreg"] = config.registers
    return options


def _tiles(problem: Problem, config: TritonConfig, assumed: Assumed, **own: Any) -> dict[str, Parameter]:
    """The constants of a kernel that walks over tiles."""
    constants = TileConstants(
        head_dim=problem.head_dim,
        head_pad=head_pad(problem.head_dim),
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        stages=config.num_stages,
        heads_together=config.heads_together,
        vector=assumed.alignment // ELEMENT_BYTES,
        far_rows=assumed.flag,
        banded=problem.is_banded,
        **own,
    )
    return {"C": Constant(value=constants)}


# ---------------------------------------------------------------- forward


def _forward(plan: Plan, assumed: Assumed) -> KernelTable:
    problem, config, step = plan.problem, plan.config, STEPS[plan.variant].step
    assert isinstance(config, TritonConfig)
    pointers = _inputs(assumed.alignment, "q", "k", "v")
    rows: dict[str, Parameter] = {
        **(pointers | _described(problem, config.tile_n, "k", "v") if step.descriptor else pointers),
        **_tensors("out", "lse"),
        "scale": Float(value=problem.scale_log2 if step.exp2 else problem.scale_log2 / LOG2_E),
        **_sizes(problem, problem.heads_q),
        **_strides_of(problem, assumed.alignment, "q"),
        **_strides_of(problem, assumed.alignment, "k", "v", unless=step.descriptor),
        **_strides_of(problem, assumed.alignment, "out"),
        **_tiles(problem, config, assumed, descriptor=step.descriptor, scale_sign=problem.scale_sign, step=step),
    }
    grid = query_programs(problem, config.tile_m)
    return KernelTable(kernel="attention_forward", grid=grid, options=compiler_options(config), rows=rows)


def _gluon(plan: Plan, assumed: Assumed, multiprocessors: int) -> KernelTable:
    problem, config = plan.problem, plan.config
    assert isinstance(config, GluonConfig)
    known = layouts(problem)
    rows: dict[str, Parameter] = {}
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
    rows["C"] = Constant(value=GluonConstants.of(problem, config, ragged=assumed.flag))
    blocks = grid_blocks(config, problem)
    return KernelTable(
        kernel="attention_forward",
        grid=blocks if config.scheduler == "one_tile" else min(blocks, multiprocessors),
        # Four warps are the first consumer's; the compiler adds those of the other partitions.
        options={"num_warps": 4, "maxnreg": config.registers, "launch_pdl": True, "enable_fp_fusion": True},
        rows=rows,
    )


# ---------------------------------------------------------------- backward


def _beside(kernel: str, problem: Problem, tensors: dict[str, Parameter], strides_of: str) -> KernelTable:
    """A kernel before or after the one pass: a program for `ROWS_BESIDE` rows."""
    sizes = _sizes(problem, problem.heads_q)
    constants = TileConstants(
        head_dim=problem.head_dim,
        head_pad=head_pad(problem.head_dim),
        tile_m=ROWS_BESIDE,
        far_rows=problem.strides_out[2] * ROWS_BESIDE >= INT32,
    )
    rows: dict[str, Parameter] = {
        **tensors,
        **{name: sizes[name] for name in ("seq_q", "heads_q", "batch_heads")},
        **_strides_of(problem, problem.alignment, strides_of),
        "C": Constant(value=constants),
    }
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    return KernelTable(kernel=kernel, grid=query_programs(problem, ROWS_BESIDE), options=options, rows=rows)


def _prepare_rows(problem: Problem, has_dlse: bool) -> KernelTable:
    dlse, dlse_rows = _dlse(problem, has_dlse)
    tensors = {**_tensors("out", "dout"), **dlse, **_tensors("delta", "dq_sum"), **dlse_rows}
    return _beside("prepare_rows", problem, tensors, "out")


def _finish_dq(problem: Problem) -> KernelTable:
    tensors = {**_tensors("dq_sum", "dq"), "grad_factor": Float(value=problem.grad_factor)}
    return _beside("finish_dq", problem, tensors, "dq")


def _gradient_of_queries(plan: Plan, has_dlse: bool, descriptor: bool) -> KernelTable:
    problem = plan.problem
    assert isinstance(plan.config, BackwardConfig)
    config, (dlse, dlse_rows) = plan.config.of_dq, _dlse(problem, has_dlse)
    assumed = Assumed(alignment=problem.alignment, flag=_is_far(problem, config, True))
    pointers = _inputs(problem.alignment, "q", "k", "v")
    rows: dict[str, Parameter] = {
        **(pointers | _described(problem, config.tile_n, "k", "v") if descriptor else pointers),
        **_tensors("out", "lse", "dout"),
        **dlse,
        **_tensors("dq", "delta"),
        **_factors(problem),
        **dlse_rows,
        **_sizes(problem, problem.heads_q),
        **_strides_of(problem, problem.alignment, "q"),
        **_strides_of(problem, problem.alignment, "k", "v", unless=descriptor),
        **_strides_of(problem, problem.alignment, "out"),
        **_tiles(problem, config, assumed, descriptor=descriptor),
    }
    grid = query_programs(problem, config.tile_m)
    return KernelTable(kernel="gradient_of_queries", grid=grid, options=compiler_options(config), rows=rows)


def _gradients_of_keys(plan: Plan, *, one_pass: bool, descriptor: bool) -> KernelTable:
    problem, config = plan.problem, plan.config
    assert isinstance(config, BackwardConfig)
    alignment = problem.alignment
    streamed = {**_inputs(alignment, "q"), **_tensors("dout", "dq_sum")}
    if descriptor:
        streamed = _described(problem, config.tile_m, *streamed)
    rows: dict[str, Parameter] = {
        "q": streamed["q"],
        **_inputs(alignment, "k", "v"),
        **_tensors("lse"),
        "dout": streamed["dout"],
        **_tensors("delta"),
        "dq_sum": streamed["dq_sum"] if one_pass else Constant(value=None),
        **_tensors("dk", "dv"),
        **_factors(problem),
        **_sizes(problem, problem.heads_kv),
        **_strides_of(problem, alignment, "q", unless=descriptor),
        **_strides_of(problem, alignment, "k", "v"),
        **_strides_of(problem, alignment, "dout", unless=descriptor),
        **_strides_of(problem, alignment, "dk", "dv"),
        **_tiles(problem, config, assumed_of(plan), one_pass=one_pass, descriptor=descriptor),
    }
    grid = key_programs(problem, config.tile_n)
    return KernelTable(kernel="gradients_of_keys", grid=grid, options=compiler_options(config), rows=rows)
