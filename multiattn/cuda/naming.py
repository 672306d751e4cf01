"""Names of kernels, and the C++ types of their constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multiattn.cuda.score import lowered_of, slots_of, text_of
from multiattn.cuda.source import Instance
from multiattn.layout import VECTOR_BYTES
from multiattn.plan.backend import Plan
from multiattn.problem import Problem
from multiattn.score import LoweredScore


def walking_kernel(
    plan: Plan,
    traits: str,
    constants: Sequence[int | bool | str],
    *,
    entry: str,
    sizes: str,
    rows: str | None = None,
    **more: Any,
) -> Instance:
    """A kernel that walks over scores. What changes them ends its name, and is the last of its constants.

    Args:
        plan: of the launch.
        traits: the C++ template of its constants, of which dtype is the first.
        constants: those behind it.
        entry: the function template, and how the kernel's name begins.
        sizes: how it goes on behind `what_of`.
        rows: the C++ type of what its rows are; None: queries of one head.
        more: further fields of the Instance.
    """
    problem, score, slots = plan.problem, lowered_of(plan), slots_of(plan)
    return Instance(
        name=f"{entry}_{what_of(problem)}_{sizes}{suffix_of(problem, score, slots)}",
        entry=entry,
        traits=traits_type(traits, problem, *constants, *score_traits(problem, score, slots, rows)),
        score=score,
        slots=slots,
        blocks=problem.blocks,
        packed=problem.packing is not None,
        **more,
    )


def what_of(problem: Problem) -> str:
    """Dtype, head_dim and mask, as the names of kernels have them."""
    return f"{problem.dtype}_d{problem.head_dim}_{problem.band.kind}"


def masked_traits(problem: Problem) -> tuple[int, str, bool]:
    """The first constants of a kernel that walks over scores: head_dim, its mask, whether rows are aligned."""
    return problem.head_dim, band_trait(problem), not unaligned_suffix(problem)


def band_trait(problem: Problem) -> str:
    """The C++ value of a mask."""
    kind = problem.band.kind
    return f"multiattn::Band::{'NONE' if kind == 'full' else kind.upper()}"


def score_traits(
    problem: Problem, score: LoweredScore | None, slots: tuple[int, ...], rows: str | None = None
) -> tuple[str, ...]:
    """The last constants: the expression that changes scores, then a block mask, a packed batch, or what rows are."""
    changed = "NoScore" if score is None else text_of(score, slots)[0]
    if (blocks := problem.blocks) is not None:
        return f"multiattn::{changed}", f"multiattn::BlockMask<{cpp_list(*blocks)}>"
    if problem.packing is not None:
        return f"multiattn::{changed}", "multiattn::Packed"
    if rows is not None:
        return f"multiattn::{changed}", rows
    return () if score is None else (f"multiattn::{changed}",)


def suffix_of(problem: Problem, score: LoweredScore | None, slots: tuple[int, ...] = ()) -> str:
    """The end of a kernel's name: its expression, and what lists its tiles."""
    blocks, name = problem.blocks, "" if score is None else f"_{text_of(score, slots)[0].lower()}"
    if problem.packing is not None:
        return f"{name}_packed"
    return name if blocks is None else f"{name}_blocks{blocks.queries}x{blocks.keys}{'_full' * blocks.has_full}"


def unaligned_suffix(problem: Problem) -> str:
    """The part of a kernel's name that says that rows start anywhere; empty where they are aligned."""
    return "_unaligned" if problem.alignment % VECTOR_BYTES else ""


def traits_type(template: str, problem: Problem, *arguments: int | bool | str) -> str:
    """The C++ type of a kernel's constants, of which the element is the first."""
    return f"multiattn::{template}<multiattn::{problem.dtype}, {cpp_list(*arguments)}>"


def cpp_value(template: str, **fields: int | bool | str) -> str:
    """An aggregate of C++ whose fields have names."""
    return f"multiattn::{template}{{{', '.join(f'.{name} = {cpp_list(it)}' for name, it in fields.items())}}}"


def cpp_list(*arguments: int | bool | str) -> str:
    """Template arguments: True is true in C++, a string what it says."""
    return ", ".join(str(it).lower() if isinstance(it, bool) else str(it) for it in arguments)
