"""What a launch of an emitted forward kernel hands to the driver, by cuTile's calling convention. Pure Python.

``cutile_python_v2``: an array is its address, its extents and its strides, each of them an integer of one width, those
that are constants included; a number is itself; a constant is nothing. A block is one thread to the caller: the cubin
holds host code (x86-64, run by the driver) that knows how many threads it has and that makes the tensor maps of TMA
from the arguments. Its shared memory is static, whatever the size, and needs no permission. Clusters: none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from multiattn.cutile.configs import CutileConfig, Together, begins_at_diagonal, grid_of, is_linear, together_of
from multiattn.cutile.table import Step, has_positive_strides, steps_of
from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.plan.schedule import most_multiprocessors
from multiattn.problem import Problem
from multiattn.run.arguments import Layout, layouts

IMAGE = abi.Image(threads=1)
"""How every kernel is started."""

ALIGNMENT = 16
"""What a compiler is told, or not: strides and addresses that are multiples of 16 bytes, extents of 16."""

GIVEN = ("q", "k", "v")
"""Arrays of the caller's, which may be less aligned than our own."""
EXTENTS = ("batch", "heads", "seq")
STRIDES = ("batch_stride", "head_stride", "row_stride")
"""Names of what a compiler may know multiples of, behind the array's."""
DIAGONAL = "seq_kv_less_seq_q"
"""Name of the difference of lengths, which a kernel that begins at the diagonal takes for a multiple of tile_m."""


def bind(plan: Plan, image: abi.Image, emitted: Mapping[str, str] | None = None) -> abi.Binding:
    """The Binding of a forward Plan.

    Args:
        plan: for the tensors at hand, with variant and config of the kernel.
        image: of the kernel: `IMAGE`.
        emitted: what the kernel's code is specialised on; None while it is being emitted.
    """
    emitted = emitted or {}
    problem, config = plan.problem, plan.config
    assert isinstance(config, CutileConfig)
    constants = _constants(plan, config, emitted)
    together = told_together(constants)  # as the code has it, not as heads allow
    linear = abi.flag(constants, emitted, "linear_grid", is_linear(problem, config, together))
    grid = grid_of(problem, config, together, most_multiprocessors(plan.arch), linear=linear)
    if grid is None:
        raise ValueError(f"no grid for {plan}")
    (step,) = steps_of(plan)
    is_64bit = abi.flag(constants, emitted, "int64", step.is_64bit)
    arguments = arguments_of(problem, step, constants, emitted, is_64bit=is_64bit)
    return abi.Binding(arguments=arguments, grid=grid, image=image, constants=constants)


def bind_backward(plan: Plan, step: Step) -> abi.Binding:
    """The Binding of one launch of a backward Plan, for the tensors at hand."""
    constants = {"dtype": plan.problem.dtype}
    arguments = arguments_of(plan.problem, step, constants, {}, is_64bit=step.is_64bit)
    return abi.Binding(arguments=arguments, grid=step.grid, image=IMAGE, constants=constants)


def arguments_of(
    problem: Problem, step: Step, constants: dict[str, str], emitted: Mapping[str, str], *, is_64bit: bool
) -> tuple[abi.Argument, ...]:
    """The arguments of a step; enters what a compiler may know of each into `constants`."""
    known = layouts(problem)
    kind: abi.Kind = "i64" if is_64bit else "i32"
    arguments: list[abi.Argument] = []
    for name in step.arrays.values():
        alignment = problem.alignment if name in GIVEN else ALIGNMENT
        arguments += _array(constants, emitted, name, known[name], alignment, kind)
    return (*arguments, *(abi.Number(kind="f32", value=value) for value in step.scalars.values()))


def for_most_heads(plan: Plan) -> Plan:
    """A forward Plan whose code is to be emitted, with no more heads together than divide both.

    Else code for 6 heads would serve multiples of 6 only, or only certain batches, and not all even numbers of heads.
    """
    config = plan.config
    assert isinstance(config, CutileConfig)
    heads_together = math.gcd(config.heads_together, plan.problem.heads_q)
    return replace(plan, config=replace(config, heads_together=heads_together))


def told_together(constants: Mapping[str, str]) -> Together:
    """How many heads advance together, as constants have it."""
    spanning = constants["spanning"] == "True"
    return Together(heads=abi.divisor(constants["batch_heads" if spanning else "heads_q"]), spanning=spanning)


def _constants(plan: Plan, config: CutileConfig, emitted: Mapping[str, str]) -> dict[str, str]:
    """Those of the whole kernel; what variant and config come to is not among them."""
    problem = plan.problem
    constants: dict[str, str] = {}
    abi.exactly(constants, dtype=problem.dtype, head_dim=problem.head_dim, causal=problem.causal)
    abi.exactly(constants, scale_sign=problem.scale_sign)
    abi.flag(constants, emitted, "masked", problem.causal or problem.seq_kv % config.tile_n != 0)
    divisor = config.tile_m if begins_at_diagonal(problem, config) else 1
    abi.multiple(constants, emitted, DIAGONAL, divisor, problem.seq_kv - problem.seq_q)
    together = together_of(problem, config)
    heads, pairs = (1, together.heads) if together.spanning else (together.heads, 1)
    # Code does either, whatever these tensors would ask for.
    abi.settle(constants, emitted, "spanning", str(together.spanning), lambda there: True)
    abi.multiple(constants, emitted, "heads_q", heads, problem.heads_q)
    abi.multiple(constants, emitted, "batch_heads", pairs, problem.batch * problem.heads_q)
    abi.flag(constants, emitted, "grouped", problem.heads_q != problem.heads_kv)
    abi.flag(constants, emitted, "no_tma", not has_positive_strides(problem))
    return constants


def _array(
    constants: dict[str, str], emitted: Mapping[str, str], name: str, layout: Layout, alignment: int, kind: abi.Kind
) -> list[abi.Argument]:
    """An array ``[B, H, S, D]`` or ``[B, H, S]``: address, extents, strides in elements."""
    shape, strides = layout.shape, layout.strides
    abi.multiple(constants, emitted, f"{name}_alignment", alignment, alignment)
    for dim, extent in zip(EXTENTS, shape, strict=False):
        abi.multiple(constants, emitted, f"{name}_{dim}", _divisor(extent, ALIGNMENT), extent)
    for dim, stride in zip(STRIDES, strides[:-1], strict=False):
        abi.multiple(constants, emitted, f"{name}_{dim}", _divisor(stride, ALIGNMENT // layout.dtype.itemsize), stride)
    abi.flag(constants, emitted, f"{name}_overlaps", 0 in strides)
    numbers = (abi.Number(kind=kind, value=value) for value in (*shape, *strides))
    return [abi.Pointer(tensor=name), *numbers]


def _divisor(value: int, unit: int) -> int:
    """What the compiler is told to divide `value`: the unit or nothing."""
    return unit if value % unit == 0 else 1
