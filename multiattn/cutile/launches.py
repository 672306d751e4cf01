"""A launch of a cuTile kernel, described once, and what several of them share. Pure Python: no cuTile.

A `KernelLaunch` has a kernel's arrays and numbers by the names of its parameters, in their order, what its code assumes
of them, and the constants that it is compiled for. The kernel, its signature and cuTile's own launch (`compile`), the
driver's arguments and an emitted kernel's Binding (`bind`) and the CPU's call (`launch`) derive from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multiattn.cutile.arrays import ArrayArgument, captured_of
from multiattn.cutile.configs import Grid, Together, reciprocal
from multiattn.cutile.kernels.constants import KernelConstants
from multiattn.operands import CAPTURED
from multiattn.plan import abi
from multiattn.plan.backend import Plan
from multiattn.problem import Problem
from multiattn.score import LoweredScore, lower
from multiattn.sequences import Indices

IMAGE = abi.Image(threads=1)
"""How every kernel is started. A block is one thread to the caller: the cubin holds host code (x86-64, run by the
driver) that knows how many threads it has and makes the tensor maps of TMA from the arguments. Its shared memory is
static, whatever the size, and needs no permission."""

FORWARD = ("q", "k", "v", "out", "lse")
"""Arrays that every forward has."""

Scalar = float | tuple[int, ...] | tuple[float, ...]
"""A number, fp32, or a tuple of numbers, which are an argument each."""


@dataclass(frozen=True, kw_only=True)
class KernelLaunch:
    """One launch."""

    kernel: str
    """Its function's name, from which its symbol is made."""
    is_64bit: bool
    """Shapes, strides and offsets take 64 bits."""
    occupancy: int | None = None
    num_worker_warps: int | None = None
    grid: Grid
    arrays: Mapping[str, ArrayArgument]
    """By parameter."""
    optional: Mapping[str, tuple[ArrayArgument, ...]] = field(default_factory=dict)
    """Those that a launch may not have, by parameter."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    """By parameter."""
    constants: KernelConstants
    overlaps: bool = False
    """It may begin while the kernel before it still runs, and waits for that itself."""
    assumed: Mapping[str, str]
    """By name, all that the code is specialised on beside variant and config (`abi.Binding.constants`)."""

    @property
    def given(self) -> tuple[ArrayArgument, ...]:
        """All arrays that there are, in the order of the parameters."""
        return (*self.arrays.values(), *itertools.chain.from_iterable(self.optional.values()))

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the operands and areas of workspace, by parameter."""
        return tuple(array.tensor for array in self.given)

    def arguments(self, get: Callable[[ArrayArgument], Any]) -> tuple[Any, ...]:
        """The arguments of the Python function, given a tensor for each array."""
        return (
            *map(get, self.arrays.values()),
            *(tuple(map(get, it)) for it in self.optional.values()),
            *self.scalars.values(),
        )

    @property
    def binding(self) -> abi.Binding:
        """The driver's arguments, by cuTile's convention ``cutile_python_v2``.

        An array is its address, its extents and its strides, all of them integers of one width, constant ones included.
        """
        kind: abi.Kind = "i64" if self.is_64bit else "i32"
        arguments: list[abi.Argument] = []
        for array in self.given:
            arguments.append(abi.Pointer(tensor=array.tensor))
            numbers = (*array.layout.shape, *array.layout.strides)
            arguments += [abi.Number(kind=kind, value=number) for number in numbers]
        for value in self.scalars.values():
            for number in value if isinstance(value, tuple) else (value,):
                arguments.append(abi.Number(kind="i32" if isinstance(number, int) else "f32", value=number))
        return abi.Binding(arguments=tuple(arguments), grid=self.grid, image=IMAGE, constants=self.assumed)


def needs_64bit(problem: Problem, *, backward: bool = False) -> bool:
    """True if an element of some tensor, or a step along a dimension, is 2^31 or more elements away from its first.

    The stride of a dimension of one element counts, too: it is an argument like any other.
    """
    known, read = problem.layouts, (*FORWARD, *Indices._fields)
    tensors = [it for name, it in known.items() if backward or name in read or name.startswith(CAPTURED)]
    lasts = [sum((size - 1) * step for size, step in zip(it.shape, it.strides, strict=True)) for it in tensors]
    return max(*lasts, *(step for it in tensors for step in it.strides)) > abi.INT32_MAX


def lowered_of(plan: Plan) -> LoweredScore | None:
    """The program of a plan's scores and its mask."""
    score = plan.problem.score
    if score is None:
        return None
    apart = score.scores is not None and plan.direction == "backward"
    return lower(score.program, approximate=plan.arch.is_gpu, apart=apart)


def aux_of(
    plan: Plan, assumed: dict[str, str], emitted: Mapping[str, str]
) -> tuple[tuple[ArrayArgument, ...], tuple[float, ...]]:
    """The arrays and the numbers that the program reads; enters what is assumed of them."""
    lowered, score = lowered_of(plan), plan.problem.score
    if lowered is None or score is None:
        return (), ()
    abi.exactly(assumed, score=score.program.digest)
    given = score.arguments(lowered, plan.problem.scale).values()
    captured = tuple(captured_of(assumed, emitted, plan.problem.layouts[it], it) for it in given if isinstance(it, str))
    return captured, tuple(it for it in given if isinstance(it, float))


def reach_of(problem: Problem) -> tuple[int, ...]:
    """The numbers of a two-sided mask; other kernels have none."""
    return problem.reach if problem.is_two_sided else ()


def order_of(problem: Problem, together: Together, heads: int | None = None) -> tuple[int, ...]:
    """The numbers of a kernel's `Order`. `heads`: those whose tiles it has, if they are not those of q."""
    heads = problem.heads_q if heads is None else heads
    of_entry = together.heads // together.entries
    numbers = (together.entries.bit_length() - 1, of_entry, heads // of_entry)
    divisors = itertools.chain.from_iterable(map(reciprocal, (heads, problem.group)))
    return (together.heads, *reciprocal(together.heads), *numbers, *divisors)
