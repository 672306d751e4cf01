"""Every family by its variants, and what generic code asks of a Plan: launches, workspace, candidates. No cuTile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from multiattn.cutile import backward, decode, forward
from multiattn.cutile.launches import Asked, Family, KernelLaunch
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Direction, Plan, Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import most_multiprocessors
from multiattn.problem import Problem

FAMILIES: Mapping[tuple[Direction, str], Family] = {
    ("forward", decode.NAME): decode.FAMILY,
    **{("forward", rung): forward.FAMILY for rung in forward.STEPS},
    ("backward", "atomic"): backward.ONE_PASS,
    ("backward", "stored"): backward.STORED,
    ("backward", "two_pass"): backward.TWO_PASS,
}


def family_of(plan: Plan) -> Family:
    """The family of a Plan's variant."""
    return FAMILIES[plan.direction, plan.variant]


def launches_of(
    plan: Plan, *, has_dlse: bool = False, multiprocessors: int | None = None, emitted: Mapping[str, str] | None = None
) -> tuple[KernelLaunch, ...]:
    """The launches of a plan, in order; ValueError where there is no grid of so many blocks.

    Args:
        plan: of either direction.
        has_dlse: whether a backward has a dlse.
        multiprocessors: of the device; None for the largest product of the arch.
        emitted: of a forward, what code that is there assumes; None for code that is made for the plan.
    """
    call = Asked(
        plan=plan,
        has_dlse=has_dlse,
        emitted=emitted or {},
        multiprocessors=multiprocessors or most_multiprocessors(plan.arch),
    )
    return family_of(plan).launches(call)


def candidates_of(direction: Direction) -> Callable[[Variant, Problem, Arch], Sequence[Config]]:
    """`Op.candidates` of a direction."""

    def candidates(variant: Variant, problem: Problem, arch: Arch) -> Sequence[Config]:
        if not arch.is_gpu:
            return ()
        family = FAMILIES[direction, variant.name]
        found = dict.fromkeys(family.candidates(variant, problem, arch))
        return tuple(config for config in found if not variant.fits(problem, arch, config))[: family.candidates_max]

    return candidates
