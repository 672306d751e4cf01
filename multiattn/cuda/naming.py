"""Names of kernels, and the C++ types of their constants."""

from __future__ import annotations

from typing import Any

from multiattn.cuda.mask_bits import MaskBits
from multiattn.cuda.score import lowered_of, slots_of, text_of
from multiattn.cuda.source import BitLists, Instance
from multiattn.plan.backend import Direction, Plan
from multiattn.plan.config import Config
from multiattn.plan.features import Features
from multiattn.problem import Problem
from multiattn.score import LoweredScore


def walking_kernel(
    plan: Plan,
    traits: str,
    *config: str,
    entry: str,
    sizes: str,
    rows: str | None = None,
    exponents: bool = False,
    reads_v_in_k: bool = False,
    bits: MaskBits | None = None,
    **more: Any,
) -> Instance:
    """A kernel that walks over scores. What changes them ends its name, and is the last of its constants.

    Args:
        plan: of the launch.
        traits: the C++ template of its constants, of which dtype and `features_of` are the first.
        config: those behind them.
        entry: the function template, and how the kernel's name begins.
        sizes: how it goes on behind dtype, head_dim and mask.
        rows: the C++ type of what its rows are, or how its tiles are divided; None: queries of one head, whole tiles.
        exponents: it has those of an expression's scores; see `LoweredScore`.
        reads_v_in_k: it reads k alone where v is in k: then that is in its name and constants, too.
        bits: where a block mask's expression says in memory what partial blocks hide; None: the kernel asks it.
        more: further fields of the Instance.
    """
    problem, score, slots = plan.problem, lowered_of(plan, exponents=exponents), slots_of(plan)
    last, widths = _score_types(problem, score, slots, rows, bits), problem.widths_in_names
    in_k = reads_v_in_k and problem.v_in_k
    suffix = f"{'_v_in_k' * in_k}{_suffix_of(plan, score, slots)}{'' if bits is None else bits.suffix}"
    more = more if bits is None else {**more, "lists": BitLists}
    return Instance(
        name=f"{entry}_{problem.dtype}_{widths}_{problem.band.kind}_{sizes}{suffix}",
        entry=entry,
        traits=traits_type(traits, problem, features_of(problem, plan.direction, v_in_k=in_k), *config, *last),
        score=score,
        slots=slots,
        blocks=problem.blocks,
        row_max=problem.row_max,
        packed=problem.packing is not None,
        **more,
    )


def packed_tiles(problem: Problem, *, cuts: bool) -> tuple[str, ...]:
    """The C++ type of what lists the tiles of a packed batch, for a kernel that knows of no block mask; none else.

    With `cuts` those of a kernel that does know of it are cut where the packed axis' are.
    """
    if problem.packing is None:
        return ()
    return ("multiattn::CutTiles" if cuts and problem.blocks is not None else "multiattn::Packed",)


def features_of(problem: Problem, direction: Direction, *, v_in_k: bool = False) -> str:
    """The C++ value of a problem's features. A backward's kernels know of no sinks, and most of no v in k."""
    its = Features.of(problem)
    return aggregate(
        "Features",
        head_dim=its.head_dim,
        head_dim_v=its.head_dim_v,
        band=enumerator("Band", its.mask),
        sinks=its.sinks and direction == "forward",
        aligned=its.aligned,
        **({"v_in_k": True} if v_in_k else {}),
        **({"row_max": True} if its.row_max else {}),
    )


def _score_types(
    problem: Problem, score: LoweredScore | None, slots: tuple[int, ...], rows: str | None, bits: MaskBits | None
) -> tuple[str, ...]:
    """The last constants: the expression that changes scores, then a block mask, a packed batch, or what rows are."""
    changed = f"multiattn::{'NoScore' if score is None else text_of(score, slots)[0]}"
    if (blocks := problem.blocks) is not None:
        more = {} if problem.packing is None else {"packed": True}
        spec = aggregate("BlockSpec", **blocks._asdict(), **({} if bits is None else bits.spec), **more)
        return changed, f"multiattn::BlockMask<{spec}>"
    if problem.packing is not None:
        return changed, "multiattn::Packed"
    if rows is not None:
        return changed, rows
    return () if score is None else (changed,)


def _suffix_of(plan: Plan, score: LoweredScore | None, slots: tuple[int, ...]) -> str:
    """The end of a kernel's name: rows that start anywhere, sinks, row maxima, its expression, its lists."""
    its = Features.of(plan.problem)
    name = f"{'' if its.aligned else '_unaligned'}{'_sinks' * (its.sinks and plan.direction == 'forward')}"
    name += "_max" * its.row_max
    name += "" if score is None else f"_{text_of(score, slots)[0].lower()}"
    name += "" if plan.problem.packing is None else "_packed"
    blocks = its.blocks
    return name if blocks is None else f"{name}_blocks{blocks.queries}x{blocks.keys}{'_full' * blocks.has_full}"


def traits_type(template: str, problem: Problem, *arguments: str) -> str:
    """The C++ type of a kernel's constants, of which the element is the first."""
    return f"multiattn::{template}<{', '.join((f'multiattn::{problem.dtype}', *arguments))}>"


def aggregate(name: str, **fields: int | bool | str) -> str:
    """A C++ value whose fields have names: True is true there, a string what it says."""
    values = {field: str(it).lower() if isinstance(it, bool) else it for field, it in fields.items()}
    return f"multiattn::{name}{{{', '.join(f'.{field} = {it}' for field, it in values.items())}}}"


def aggregate_of(config: Config, *names: str, **more: int | bool | str) -> str:
    """The aggregate of a config's class, of those of its fields that code depends on, and more."""
    return aggregate(type(config).__name__, **{name: getattr(config, name) for name in names}, **more)


def enumerator(kind: str, name: str) -> str:
    """The C++ value of one of a few words."""
    return f"multiattn::{kind}::{name.upper()}"
