"""The instances of the kernels' templates that a Plan launches, in order, and the blocks of each."""

from __future__ import annotations

from multiattn.cuda.family import config_of
from multiattn.cuda.naming import aggregate
from multiattn.cuda.source import Instance, ListParams, PlannedLaunch
from multiattn.packed import TILE_LISTS
from multiattn.plan.arch import WARP_THREADS
from multiattn.plan.backend import Plan
from multiattn.sequences import Batching

_LIST_THREADS = 256


def launches_of(plan: Plan) -> tuple[PlannedLaunch, ...]:
    """The launches of `plan`, in order. Each kernel takes one argument, `params.argument_of`."""
    packing, launches = plan.problem.packing, config_of(plan).launches(plan)
    if packing is None:
        return launches
    return list_launch(packing, overlaps=launches[0].kernel.overlaps, cut=plan.problem.blocks is not None), *launches


def kernels_of(plan: Plan) -> tuple[Instance, ...]:
    """The kernels that `plan` launches, once each."""
    return tuple(dict.fromkeys(launch.kernel for launch in launches_of(plan)))


def list_launch(packing: Batching, *, overlaps: bool = False, cut: bool = False) -> PlannedLaunch:
    """The kernel that lists the tiles of a packed batch; there is one for all problems.

    With `overlaps` it is for a kernel that does so itself: there is one more for these. With `cut` sequences cut the
    tiles of the packed axis, as they do where a block mask is.
    """
    config: dict[str, int | bool] = {"threads": _LIST_THREADS, "overlaps": overlaps}
    config |= {"cut": True} if cut else {}
    kernel = Instance(
        name=f"list_tiles{'_overlapping' * overlaps}{'_cut' * cut}",
        header="list_tiles.cuh",
        entry="list_tiles",
        traits=f"multiattn::ListTraits<{aggregate('ListConfig', **config)}>",
        params=ListParams,
        threads=_LIST_THREADS,
        overlaps=overlaps,
    )
    warps = len(TILE_LISTS) * (packing.sequences + 3)  # rows on either side of them, and entries without a tile
    return PlannedLaunch(kernel=kernel, blocks=-(-warps * WARP_THREADS // _LIST_THREADS))
