"""A kernel family: its config, what fits, the memory and the kernels of a launch, and configs worth timing. No Triton.

Each family is a module. Generic code finds it by a Plan (`multiattn.triton.families`) and asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from multiattn.layout import Layout
from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import PlannedCall, Variant
from multiattn.plan.config import Config
from multiattn.plan.schedule import COUNTER_BYTES
from multiattn.plan.support import Reason
from multiattn.problem import Problem
from multiattn.sequences import CU_SEQLENS
from multiattn.triton.kernels.constants import ListConstants
from multiattn.triton.table import SMALL, Assumed, Constant, KernelTable, Parameter, Tensor, given, integers

KERNELS = "multiattn.triton.kernels"
ASYNCHRONOUS = ("sm90", "sm100", "sm103")
"""Arches whose tensor cores read shared memory in the background."""
Areas = Mapping[str, Layout]


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonLaunch(PlannedCall):
    """A launch with what its code assumes."""

    assumed: Assumed


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonFamily:
    """One room of the house."""

    config: type[Config]
    kernels: Mapping[str, str]
    """The module of each kernel by its name, below `KERNELS`."""
    tables: Callable[[TritonLaunch], tuple[KernelTable, ...]]
    """The kernels of a launch, in order, but for the one that lists tiles of a packed batch."""
    tiles: Callable[[Problem, Any], tuple[int, int]]
    """The rows of the tiles of queries and of keys that a packed launch is given lists of; 0 for those it is not."""
    areas: Callable[[Problem, Any], Areas] = lambda problem, config: {}
    """Memory that a launch takes beside its operands, by name, without those lists; a `COUNTER` is 0 at first."""
    fits: Callable[..., tuple[Reason, ...]]
    """`Variant.fits`, but for further arguments that a variant binds."""
    settle: Callable[[Problem, Arch, Any], Config] = lambda problem, arch, config: config
    candidates: Callable[[Variant, Problem, Arch], Iterable[Config]]
    """Configs worth timing; those that do not fit are left out by the caller."""
    flag: Callable[[Problem, Any], bool] = lambda problem, config: False
    """`Assumed.flag` of the tensors of a problem."""
    flag_name: str = "wide"
    """Its name among a Binding's constants."""
    is_gluon: bool = False
    is_emitted: bool = False
    """The loader of emitted kernels can launch it, where nothing is packed: it is one kernel."""

    def variant(self, name: str, **more: Any) -> Variant:
        """A variant of the family."""
        own: dict[str, Any] = {"workspace": self.workspace, "settle": self.settle, "fits": self.fits, **more}
        return Variant(name=name, config_type=self.config, **own)

    def all_areas(self, problem: Problem, config: Any) -> Areas:
        """The areas of a launch, with the lists of a packed batch."""
        found = dict(self.areas(problem, config))
        if problem.packing is not None:
            names = zip(("query_list", "key_list"), self.tiles(problem, config), strict=True)
            found |= {name: problem.layouts[name] for name, rows in names if rows}
        return found

    def workspace(self, problem: Problem, config: Config | None) -> int:
        """Bytes of device memory beside the tensors."""
        return sum(layout.size_bytes for layout in self.all_areas(problem, config).values())


COUNTER: Areas = {abi.WORKSPACE: Layout((COUNTER_BYTES // 4,), (1,), torch.int32)}
"""The area of a counter of tiles, of which kernels use one number."""

# ---------------------------------------------------------------- lists of tiles

LIST_TILES = "list_tiles"
"""The kernel's name, in launches of every family."""
_PARTS_MAX = 32
"""Programs that share the tiles of a group of sequences, at most."""
_GROUPS_SHARED = 128
"""Groups whose tiles are shared; of more each has a program by itself."""
_ENTRIES_OF_PART = 16
"""Entries for which one of them is worth it. A guess, not measured."""


def list_table(problem: Problem, query_tile: int, key_tile: int, *, counts: bool) -> KernelTable:
    """The kernel that goes first in a packed launch.

    Args:
        problem: a packed one.
        query_tile: rows of the tiles of queries that its kernels own, 0 where they own none.
        key_tile: the same of keys.
        counts: whether a kernel counts tiles, with nothing before it but this kernel: that sets the counter to 0.
    """
    packing = problem.packing
    assert packing is not None
    constants = ListConstants(
        query_tile=query_tile,
        key_tile=key_tile,
        last_first=problem.is_banded,
        cut=problem.blocks is not None,
    )
    query_entries = packing.tiles_max(problem.seq_q, query_tile) if query_tile else 0
    key_entries = packing.tiles_max(problem.seq_kv, key_tile) if key_tile else 0
    groups = (packing.sequences + 1) // constants.group + 1  # the rows on either side of all sequences are two more
    parts = min(_PARTS_MAX, -(-max(query_entries, key_entries) // _ENTRIES_OF_PART), max(1, _GROUPS_SHARED // groups))
    longest_q, longest_kv = packing.longest(problem.seq_q, problem.seq_kv)
    rows: dict[str, Parameter] = {
        **{name: Tensor(of=name, is_aligned=False) for name in CU_SEQLENS},
        "query_list": given(query_tile > 0, Tensor(of="query_list")),
        "key_list": given(key_tile > 0, Tensor(of="key_list")),
        "counter": given(counts, Tensor(of=abi.WORKSPACE)),
        **integers(
            sequences=packing.sequences,
            seq_q=problem.seq_q,
            seq_kv=problem.seq_kv,
            longest_q=longest_q,
            longest_kv=longest_kv,
            query_entries=query_entries,
            key_entries=key_entries,
            parts=parts,
        ),
        "C": Constant(value=constants),
    }
    grid = groups * parts * sum(map(bool, (query_tile, key_tile)))
    return KernelTable(kernel=LIST_TILES, grid=grid, options=SMALL, rows=rows)
