"""Compiling ahead: each contender makes and runs cells in a process of its own, one of each kind or all.

This fills the disk caches of the compilers (ours, Triton's, cuTile's, Inductor's) with all cores, so that the run
itself, which must be one process, hardly waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.contenders import Contender
from bench.environment import device_works, gpu_arch
from bench.matrix import Cell
from bench.peers import PEERS, Provider
from bench.providers import PIN, Ours
from multiattn.inspect.pool import run_isolated

TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A contender by name, as a provider may hold what cannot be pickled, and a cell."""

    contender: str
    cell: Cell


def tasks(providers: Sequence[Provider], cells: Sequence[Cell]) -> list[Task]:
    """One task per provider and kind of cell: the shortest of those that differ in batch and length only.

    A provider that compiles for each batch and length has one per cell.
    """
    kinds: dict[tuple[object, ...], Cell] = {}
    for cell in sorted(cells, key=lambda it: it.seq):
        kinds.setdefault((cell.head_dim, cell.dtype, cell.causal, cell.layout, cell.direction), cell)
    wanted = [(it, cells if it.compiles_each_cell else kinds.values()) for it in providers]
    found = [Task(contender=provider.name, cell=cell) for provider, its in wanted for cell in its]
    return list(dict.fromkeys(found))


def provider_of(name: str) -> Provider:
    """The provider whose contender has this name."""
    backend, _, rung = name.partition("/")
    variant, _, pin = rung.partition(PIN)
    ours = Ours(backend=backend, variant=variant or None, pinned_to=pin or None)
    return next((peer for peer in PEERS if peer.name == name), ours)


def warm(task: Task) -> None:
    """Make and run a contender once, where there is anything to run."""
    arch, provider = gpu_arch(), provider_of(task.contender)
    if arch is None or provider.why_not(task.cell, arch):
        return
    contender = provider.prepare(task.cell, task.cell.tensors("cuda"), arch)
    if isinstance(contender, Contender):
        contender.output()
        torch.cuda.synchronize()


def prewarm(providers: Sequence[Provider], cells: Sequence[Cell], *, jobs: int) -> None:
    """Warm every kind; what fails here fails again in the run, where it is an error of its cell."""
    arch = gpu_arch()
    wanted = tasks([it for it in providers if any(not it.why_not(cell, arch) for cell in cells)], cells)
    for outcome in run_isolated(warm, wanted, jobs=jobs, timeout_s=TIMEOUT_S, keep=device_works):
        if outcome.error:
            text = outcome.error.splitlines()[0]
            print(f"compiling ahead: {outcome.item.contender}, {outcome.item.cell}: {text}", flush=True)
    print(f"compiled ahead: {len(wanted)} kinds of cells", flush=True)
