"""Compiling ahead: each contender makes and runs cells in a process of its own, one of each kind or all.

So the disk caches of the compilers (ours, Triton's, cuTile's, Inductor's) are filled by all cores, and the run itself,
which must be one process, hardly waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.contenders import Contender
from bench.environment import device_works, gpu_arch
from bench.matrix import Cell
from bench.peers import PEERS, find_peers
from bench.providers import Ours, Provider
from multiattn.inspect.pool import run_isolated


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A contender by name, as a provider may hold what cannot travel, and a cell."""

    contender: str
    cell: Cell


def tasks(providers: Sequence[Provider], cells: Sequence[Cell]) -> list[Task]:
    """One task per provider and kind of cell: the shortest of those that differ in batch and length only.

    Of a provider that compiles for each of these, one per cell.
    """
    kinds: dict[tuple[object, ...], Cell] = {}
    for cell in sorted(cells, key=lambda it: it.seq):
        kinds.setdefault((cell.head_dim, cell.dtype, cell.causal, cell.layout, cell.direction), cell)
    each = [provider for provider in providers if provider.compiles_each_cell]
    once = [provider for provider in providers if not provider.compiles_each_cell]
    found = [Task(contender=provider.name, cell=cell) for cell in cells for provider in each]
    return found + [Task(contender=provider.name, cell=cell) for cell in kinds.values() for provider in once]


def provider_of(name: str) -> Provider:
    """The provider that a run calls so."""
    if name in {peer.name for peer in PEERS}:
        return find_peers((name,))[0]
    backend, _, variant = name.partition("/")
    return Ours(backend=backend, variant=variant or None)


def warm(task: Task) -> bool:
    """Make and run a contender once; whether there was anything to run."""
    arch = gpu_arch()
    provider = provider_of(task.contender)
    if arch is None or provider.why_not(task.cell, arch):
        return False
    contender = provider.prepare(task.cell, task.cell.tensors("cuda"), arch)
    if not isinstance(contender, Contender):
        return False
    contender.output()
    torch.cuda.synchronize()
    return True


def prewarm(
    providers: Sequence[Provider],
    cells: Sequence[Cell],
    *,
    jobs: int,
    timeout_s: float = 120.0,
    say: Callable[[str], None],
) -> None:
    """Warm every kind; what fails here fails again in the run, where it is an error of its cell."""
    known = [provider for provider in providers if any(not provider.why_not(cell, gpu_arch()) for cell in cells)]
    wanted = tasks(known, cells)
    failed = 0
    for outcome in run_isolated(warm, wanted, jobs=jobs, timeout_s=timeout_s, keep=device_works):
        if outcome.error:
            failed += 1
            say(f"compiling ahead: {outcome.item.contender}, {outcome.item.cell}: {outcome.error.splitlines()[0]}")
    say(f"compiled ahead: {len(wanted) - failed} of {len(wanted)} kinds of {len(known)} contenders")
