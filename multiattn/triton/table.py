"""Tables of kernels' parameters: the rows that they are made of, and those that several kernels have. No Triton.

A table has a row for each parameter, by its name. The kernel's call, the interpreter's, the stand-ins that Triton
specialises on (`multiattn.triton.calls`), the driver's launch and an emitted kernel's (`.bind`) derive from it, and
what Triton made of a call is held against it there. Each family has the tables of its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias, TypeVar

from multiattn.layout import Layout
from multiattn.problem import Problem
from multiattn.score import LoweredScore

T = TypeVar("T")

INT32 = 1 << 31
"""Offsets from here on need 64 bits."""
ELEMENT_BYTES = 2  # fp16 and bf16
SMALL: Mapping[str, Any] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
"""Options of the small kernels around those that do the work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """The address of an operand or of an area of workspace."""

    of: str
    is_aligned: bool = True
    """Code may rely on a multiple of 16 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Descriptor:
    """A TensorDescriptor of an operand or an area ``[B, H, S, D]``, with blocks of `rows` of one head.

    Or of one that is `ragged`.
    """

    of: str
    layout: Layout
    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Integer:
    """An integer, in 32 bits where they hold it. `specialised`: whether code may depend on its value.

    Code of lengths, batches and numbers of heads does not, nor of strides, which are their products: all share it.
    """

    value: int
    specialised: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """A constexpr, or None for what a kernel is not given."""

    value: Any


NONE = Constant(value=None)


Scalar = Tensor | Descriptor | Integer | Constant | float
"""A parameter that is handed over by itself; a float is an fp32 number."""
Parameter: TypeAlias = "Scalar | Mapping[str, Parameter]"
"""One parameter; those that travel as a tuple by their names."""


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
        """Name, place and row of everything that is handed over by itself: of a tuple each item."""
        return _leaves(self.rows, ())


def _leaves(rows: Mapping[str, Parameter], above: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], Scalar]]:
    for index, (name, row) in enumerate(rows.items()):
        if isinstance(row, Mapping):
            yield from _leaves(row, (*above, index))
        else:
            yield name, (*above, index), row


class Assumed(NamedTuple):
    """The assumptions of code about tensors, beyond their Problem's own constants."""

    alignment: int
    """Bytes that divide every address and stride of q, k and v."""
    flag: bool
    """Offsets inside a tile may pass 2^31 elements; for Gluon, the last block of keys is not full, and in
    the forward no band masks it."""


def filled(kind: type[T], *sources: object, **own: Any) -> T:
    """Constants of a kernel: its own, and by name those that a problem or a config has."""
    names = [it.name for it in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: getattr(it, name) for it in sources for name in names if hasattr(it, name)} | own)


# ---------------------------------------------------------------- rows that several kernels have


def given(is_given: bool, row: Parameter) -> Parameter:
    """A row, or None where a kernel is not given it."""
    return row if is_given else NONE


def integers(**sizes: int | Integer) -> dict[str, Integer]:
    """Integers by their names; no code depends on those that are plain numbers."""
    return {name: it if isinstance(it, Integer) else Integer(value=it) for name, it in sizes.items()}


def reach_rows(problem: Problem) -> Mapping[str, Scalar]:
    """`left` and `right` of a two-sided mask: numbers that no code depends on."""
    if not problem.is_two_sided:
        return dict.fromkeys(("left", "right"), NONE)
    left, right = problem.reach
    return integers(left=left, right=right)


def sinks_row(problem: Problem) -> Parameter:
    """The caller's, at any multiple of 4 bytes."""
    return given(problem.has_sinks, Tensor(of="sinks", is_aligned=False))


def tops_row(problem: Problem) -> Parameter:
    """The largest score of each row, where a forward writes it."""
    return given(problem.row_max, Tensor(of="row_max"))


def factor_row(problem: Problem, value: float) -> float | Integer:
    """A factor of scores. That after an expression is 1, as code may know."""
    return Integer(value=1, specialised=True) if problem.has_score and value == 1.0 else value


def factor_rows(problem: Problem) -> Mapping[str, Scalar]:
    """The factors of a backward: of scores in the log2 domain, and of gradients."""
    return {"score": factor_row(problem, problem.score_factor), "grad": problem.grad_factor}


def aux_row(problem: Problem, lowered: LoweredScore | None) -> Parameter:
    """The values that the functions of an expression read. Nothing is known of how captured tensors are aligned."""
    if problem.score is None or lowered is None:
        return NONE
    values = problem.score.arguments(lowered, problem.scale)
    return {name: item_row(value, problem) for name, value in values.items()}


def item_row(value: float | int | str, problem: Problem) -> Scalar:
    """An item of `aux`. Code may depend on a stride of 1, whose elements are side by side, and on no other.

    Others may be lengths or numbers of heads, as may every stride of a packed batch.
    """
    if isinstance(value, str):
        return Tensor(of=value, is_aligned=False)
    if isinstance(value, float):
        return value
    return Integer(value=value, specialised=value == 1 and problem.packing is None)


def stride_rows(name: str, strides: tuple[int, ...], unit: int) -> dict[str, Integer]:
    """Strides of a tensor, in units of so many elements: no code depends on more of them than that unit."""
    if any(stride % unit for stride in strides):
        raise ValueError(f"strides_{name}: got {strides}; allowed multiples of {unit} elements, as is assumed")
    pairs = zip(("batch", "head", "row"), strides, strict=True)
    return {f"{name}_{dim}": Integer(value=stride // unit) for dim, stride in pairs}
