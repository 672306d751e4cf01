"""Every family by its variants, and what generic code asks of a Plan: its tables, its workspace, its candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Direction, Plan, Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import most_multiprocessors
from multiattn.problem import Problem
from multiattn.triton import (
    decode,
    gluon_backward,
    gluon_forward,
    gluon_twin,
    gluon_two_pass,
    plain,
    plain_backward,
    stored_backward,
)
from multiattn.triton.family import Areas, TritonFamily, TritonLaunch, list_table
from multiattn.triton.ladder import STEPS
from multiattn.triton.table import Assumed, KernelTable

FAMILIES: Mapping[tuple[Direction, str], TritonFamily] = {
    ("forward", decode.VARIANT): decode.FAMILY,
    ("forward", gluon_forward.VARIANT): gluon_forward.FAMILY,
    ("forward", gluon_twin.VARIANT): gluon_twin.FAMILY,
    **{("forward", rung): plain.FAMILY for rung in STEPS},
    ("backward", gluon_backward.VARIANT): gluon_backward.FAMILY,
    ("backward", gluon_two_pass.VARIANT): gluon_two_pass.FAMILY,
    ("backward", stored_backward.VARIANT): stored_backward.FAMILY,
    **{("backward", name): plain_backward.FAMILY for name in plain_backward.VARIANTS},
}


def family_of(plan: Plan) -> TritonFamily:
    """The family of a Plan's variant."""
    return FAMILIES[plan.direction, plan.variant]


def areas_of(plan: Plan) -> Areas:
    """The areas of workspace of a launch, by their names."""
    return family_of(plan).all_areas(plan.problem, plan.config)


def assumed_of(plan: Plan) -> Assumed:
    """The fewest assumptions that code can make for the tensors of a Plan."""
    return Assumed(alignment=plan.problem.alignment, flag=family_of(plan).flag(plan.problem, plan.config))


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
    family = family_of(plan)
    launch = TritonLaunch(
        plan=plan,
        assumed=assumed or assumed_of(plan),
        multiprocessors=multiprocessors or most_multiprocessors(plan.arch),
        has_dlse=has_dlse,
    )
    if plan.problem.packing is None:
        return family.tables(launch)
    counts = plan.direction == "forward" and abi.WORKSPACE in family.areas(plan.problem, plan.config)
    tiles = family.tiles(plan.problem, plan.config)
    return (list_table(plan.problem, *tiles, counts=counts), *family.tables(launch))


def candidates(direction: Direction, variant: Variant, problem: Problem, arch: Arch) -> Sequence[Config]:
    """Configs worth timing for a problem on an arch; what cannot fit is left out."""
    if not arch.is_gpu:
        return ()
    found = FAMILIES[direction, variant.name].candidates(variant, problem, arch)
    return tuple(it for it in dict.fromkeys(found) if not variant.fits(problem, arch, it))
