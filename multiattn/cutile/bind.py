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

from multiattn import abi
from multiattn.backend import Plan
from multiattn.cutile.configs import CutileConfig, Together, begins_at_diagonal, grid_of, is_linear, together_of
from multiattn.cutile.offsets import needs_64bit
from multiattn.cutile.steps import STEPS
from multiattn.problem import LOG2_E, Problem
from multiattn.schedule import most_multiprocessors

IMAGE = abi.Image(threads=1)
"""How every kernel is started."""

ALIGNMENT = 16
"""What a compiler is told, or not: strides and addresses that are multiples of 16 bytes, extents of 16."""

ARRAYS = ("q", "k", "v", "out", "lse")
EXTENTS = ("batch", "heads", "seq")
STRIDES = ("batch_stride", "head_stride", "row_stride")
"""Names of what a compiler may know multiples of, behind the array's."""
DIAGONAL = "seq_kv_less_seq_q"
"""Name of the difference of lengths, which a kernel that begins at the diagonal takes for a multiple of tile_m."""

_FP32_BYTES = 4


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
    kind: abi.Kind = "i64" if abi.flag(constants, emitted, "int64", needs_64bit(problem)) else "i32"
    arguments: list[abi.Argument] = []
    for name in ARRAYS:
        arguments += _array(constants, emitted, problem, name, kind)
    scale = problem.scale_log2 if STEPS[plan.variant].step.exp2 else problem.scale_log2 / LOG2_E
    arguments.append(abi.Number(kind="f32", value=scale))
    return abi.Binding(arguments=tuple(arguments), grid=grid, image=image, constants=constants)


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
    strides = (*problem.strides_q, *problem.strides_k, *problem.strides_v)
    abi.flag(constants, emitted, "no_tma", 0 in strides)  # TMA wants positive strides
    return constants


def _array(
    constants: dict[str, str], emitted: Mapping[str, str], problem: Problem, name: str, kind: abi.Kind
) -> list[abi.Argument]:
    """An array ``[B, H, S, D]`` or, for lse, ``[B, H, S]``: address, extents, strides in elements."""
    shape, strides, itemsize = _layout(problem, name)
    of_caller = name in ("q", "k", "v")  # what is ours is aligned
    alignment = problem.alignment if of_caller else ALIGNMENT
    abi.multiple(constants, emitted, f"{name}_alignment", alignment, alignment)
    for dim, extent in zip(EXTENTS, shape, strict=False):
        abi.multiple(constants, emitted, f"{name}_{dim}", _divisor(extent, ALIGNMENT), extent)
    for dim, stride in zip(STRIDES, strides[:-1], strict=False):
        abi.multiple(constants, emitted, f"{name}_{dim}", _divisor(stride, ALIGNMENT // itemsize), stride)
    abi.flag(constants, emitted, f"{name}_overlaps", 0 in strides)
    numbers = (abi.Number(kind=kind, value=value) for value in (*shape, *strides))
    return [abi.Pointer(tensor=name), *numbers]


def _divisor(value: int, unit: int) -> int:
    """What the compiler is told to divide `value`: the unit or nothing."""
    return unit if value % unit == 0 else 1


def _layout(problem: Problem, name: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Extents, strides in elements, and bytes of an element."""
    rows = (problem.batch, problem.heads_q, problem.seq_q)
    if name == "lse":
        return rows, (problem.heads_q * problem.seq_q, problem.seq_q, 1), _FP32_BYTES
    if name in ("k", "v"):
        rows = (problem.batch, problem.heads_kv, problem.seq_kv)
    strides = {"q": problem.strides_q, "k": problem.strides_k, "v": problem.strides_v, "out": problem.strides_out}
    return (*rows, problem.head_dim), (*strides[name], 1), problem.torch_dtype.itemsize
