"""A kernel family as generic code sees it: a config that answers for its limits, memory, launches and candidates.

Each family is a module: `forward_mma`, `forward_wgmma`, `forward_twin`, `decode_mma`, `decode_wgmma`, `decode_twin`,
`backward_mma`, `backward_wgmma`, `backward_wgmma_two_pass`, `backward_wgmma_stored`, `backward_wgmma_wide`. Code that
is for all of them asks the config of a Plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from multiattn.cuda.source import PlannedLaunch
from multiattn.plan.abi import WORKSPACE
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Plan, Variant
from multiattn.plan.config import Config
from multiattn.plan.support import Reason
from multiattn.problem import Problem

FRAGMENT_ROWS = 16  # of mma.m16n8k16: queries of one fragment, and what head_dim is padded to a multiple of
ELEMENT_BYTES = 2
FP32_BYTES = 4
NO_FLAGS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyConfig(Config):
    """Launch parameters of a family of kernels, which answer what generic code asks of the family."""

    def settled(self, problem: Problem, arch: Arch) -> FamilyConfig:
        """The config with what a rule leaves open, or a block mask wants, decided for a problem."""
        return self

    def why_not(self, problem: Problem, arch: Arch, flags: Mapping[str, Any] = NO_FLAGS) -> tuple[Reason, ...]:
        """Every reason why the config cannot run `problem` on `arch` in the variant with these flags.

        Dtype, head_dim and alignment are the capability's.
        """
        raise NotImplementedError

    def areas(self, problem: Problem) -> dict[str, int]:
        """The areas of workspace that are the family's own, and the bytes of each."""
        return {}

    def workspace(self, problem: Problem) -> dict[str, int]:
        """All areas of a launch's workspace: the lists of a packed batch among them."""
        lists = {} if problem.packing is None else {it: problem.layouts[it].size_bytes for it in self.listed()}
        return {**self.areas(problem), **lists}

    def listed(self) -> Mapping[str, int]:
        """The lists of a packed launch, of `TILE_LISTS`, and the rows of the tiles that each of them names."""
        return {}

    def box_rows(self, problem: Problem) -> Mapping[str, int]:
        """Rows of a box of each tensor that goes by TMA."""
        return {}

    def launches(self, plan: Plan) -> tuple[PlannedLaunch, ...]:
        """The launches of a Plan with this config, in order; that of lists of tiles comes before them."""
        raise NotImplementedError

    def numbers(self, plan: Plan) -> dict[str, Any]:
        """The numbers that its kernels alone are told, by the names of their fields."""
        raise NotImplementedError

    @classmethod
    def candidates(cls, variant: Variant, problem: Problem, arch: Arch) -> Iterable[FamilyConfig]:
        """Configs that, on paper, may win, be they too large or not: what a sweep looks through."""
        raise NotImplementedError


def config_of(plan: Plan) -> FamilyConfig:
    """The config of a Plan of this backend."""
    assert isinstance(plan.config, FamilyConfig)
    return plan.config


def areas_of(plan: Plan) -> dict[str, int]:
    """The areas of a launch's workspace, and the bytes of each."""
    return config_of(plan).workspace(plan.problem)


def has_counter(plan: Plan) -> bool:
    """True if all of a launch's workspace is a counter that it finds at zero and leaves so."""
    return plan.direction == "forward" and set(areas_of(plan)) == {WORKSPACE}


def padded(head_dim: int, unit: int = FRAGMENT_ROWS) -> int:
    """The width of a row in shared memory, in elements."""
    return -(-head_dim // unit) * unit


def tiles_of(problem: Problem, rows: int, tile: int) -> int:
    """Tiles of a head that cover so many rows; of a packed batch the most that there can be."""
    return -(-rows // tile) if problem.packing is None else problem.packing.tiles_max(rows, tile)
