"""What a ladder's rungs are, compiled: registers, spills, shared memory, occupancy, bank conflicts; no GPU needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.environment import results_root
from bench.ladder_rungs import Rung, plan_rung
from bench.matrix import Cell
from bench.results import read
from bench.rule_table import compiler
from multiattn.inspect.pool import run_isolated
from multiattn.plan import backend as registry
from multiattn.plan.arch import CPU, GPU_ARCHS, Arch, by_name, occupancy
from multiattn.plan.backend import BACKENDS, Compiled, Plan, plan_variant
from multiattn.plan.support import Reason
from multiattn.plan.toolchain import resource_usage
from multiattn.problem import DTYPES, Problem

SCHEMA = 1
TIMEOUT_S = 300.0
"""Of one rung: a start of a process, a compilation, a build for the CPU and a run of that."""

NOT_ASKED = "left out: --no-emulation"
_EMULATED = ("cuda",)
"""Backends whose kernels count their own bank conflicts when they run on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One rung to compile for an arch, at the shortest of the lengths at which it runs one config."""

    rung: Rung
    arch: str
    cell: Cell
    seqs: tuple[int, ...]
    emulate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """What the compiler made of a rung. Registers and spills are a thread's, the rest a block's or an SM's."""

    name: str
    threads: int
    registers: int
    spill_bytes: int
    smem_bytes: int
    cubin_bytes: int
    blocks: int
    """That an SM holds at one time."""
    share: float
    """Of the warps that an SM can hold."""
    limiter: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflicts:
    """Bank conflicts of a kernel's ldmatrix, as one source counts them: `count` extra wavefronts, or `why` not."""

    count: int | None = None
    ldmatrix: int | None = None
    """Warp instructions that the count is of; None where nobody counted."""
    why: str = ""
    """Why there is no count; of one that there is, what it was counted on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One rung as it compiles for one arch: `kernels`, or `reasons`, or an `error`."""

    rung: Rung
    arch: str
    cell: Cell
    seqs: tuple[int, ...]
    """The lengths at which the rung runs this very config."""
    parent: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    kernels: tuple[Kernel, ...] = ()
    emulated: Conflicts = Conflicts()
    """Of one head, one tile of queries and two blocks of keys, run on the CPU."""
    profiled: Conflicts = Conflicts()
    """Of the cell, as ncu reads it on a GPU."""
    compiler: str = ""
    reasons: tuple[Reason, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        if bool(self.kernels) + bool(self.reasons) + bool(self.error) != 1:
            raise ValueError(f"a record has kernels, or carries reasons, or carries an error; got {self}")

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later record of the same rung, arch and cell replaces."""
        return str(self.rung), self.arch, self.cell.key

    @property
    def kernel(self) -> Kernel | None:
        """The kernel of a forward: there is one."""
        return self.kernels[0] if self.kernels else None

    @property
    def text(self) -> str:
        """Why there is no kernel, in one line; empty where there is one."""
        return "; ".join(map(str, self.reasons)) or (self.error.strip().splitlines() or [""])[0]


# ---------------------------------------------------------------- which


def tasks(rungs: Sequence[Rung], cells: Sequence[Cell], arch: Arch, *, emulate: bool = False) -> list[Task]:
    """One per rung and distinct config of the cells, which differ in head_dim and length; refusals are one each."""
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for rung in rungs:
        for cell in cells:
            plan = plan_rung(rung, cell, arch)
            what = plan.config if isinstance(plan, Plan) else plan
            found.setdefault((rung, cell.head_dim, what), []).append(cell)
    return [
        Task(
            rung=rung,
            arch=arch.name,
            cell=members[0],
            seqs=tuple(cell.seq for cell in members),
            emulate=emulate and rung.backend in _EMULATED,
        )
        for (rung, _, _), members in found.items()
    ]


# ---------------------------------------------------------------- compiled


def inspect(task: Task) -> Record:
    """Compile one rung here, and run it on the CPU where that counts conflicts. The compiler's error passes through."""
    arch, backend = by_name(task.arch), registry.get(task.rung.backend)
    variant = registry.find_variant(backend, task.rung.variant)
    common: dict[str, Any] = {
        "rung": task.rung,
        "arch": task.arch,
        "cell": task.cell,
        "seqs": task.seqs,
        "parent": variant.parent,
        "flags": dict(variant.flags),
        "compiler": compiler(backend.name),
    }
    plan = plan_rung(task.rung, task.cell, arch)
    reasons = plan if isinstance(plan, tuple) else backend.probe_compiler()
    if not isinstance(plan, Plan) or reasons:
        return Record(**common, reasons=reasons)
    kernels = tuple(_kernel(made, arch) for made in compiled(plan))
    emulated = emulate(plan) if task.emulate else Conflicts(why=_why_not_emulated(task.rung.backend))
    return Record(**common, config=str(plan.config or ""), kernels=kernels, emulated=emulated)


def _why_not_emulated(backend: str) -> str:
    return NOT_ASKED if backend in _EMULATED else f"{backend} has no ldmatrix of its own to count"


def compiled(plan: Plan) -> tuple[Compiled, ...]:
    """A Plan's kernels; those of CUDA from the disk cache where they are, which a run that follows then finds there."""
    if plan.backend != "cuda":
        return registry.get(plan.backend).forward.compile(plan)
    from multiattn.cuda.compile import cubin_path
    from multiattn.cuda.instances import launches_of

    made = []
    for kernel in (launch.kernel for launch in launches_of(plan)):
        cubin = cubin_path(kernel, plan.arch).read_bytes()
        made.append(
            Compiled(kernel=kernel.name, threads=kernel.threads, seconds=0.0, cubin=cubin, smem_bytes=kernel.smem_bytes)
        )
    return tuple(made)


def _kernel(made: Compiled, arch: Arch) -> Kernel:
    usage = resource_usage(made.cubin)
    if usage is None:
        raise RuntimeError(
            "no cuobjdump can read this cubin: pip install nvidia-cuda-cuobjdump, as new as the compiler"
        )
    threads = made.threads or usage.threads
    if threads is None:
        raise RuntimeError(f"{made.kernel}: neither its backend nor its cubin says how many threads a block has")
    smem_bytes = made.smem_bytes if made.smem_bytes is not None else usage.smem_bytes
    fits = occupancy(arch, threads, usage.registers, smem_bytes)
    return Kernel(
        name=made.kernel,
        threads=threads,
        registers=usage.registers,
        spill_bytes=usage.stack_bytes,
        smem_bytes=smem_bytes,
        cubin_bytes=len(made.cubin),
        blocks=fits.blocks,
        share=round(fits.share, 4),
        limiter=fits.limiter,
    )


def small_problem(plan: Plan) -> Problem:
    """One head, one tile of queries, two blocks of keys: every address of the loop, as a mask changes none of them."""
    assert plan.config is not None
    return Problem.contiguous(
        batch=1,
        heads_q=1,
        seq_q=plan.config.tile_m,
        seq_kv=2 * plan.config.tile_n,
        head_dim=plan.problem.head_dim,
        dtype=plan.problem.dtype,
    )


def emulate(plan: Plan) -> Conflicts:
    """Build the kernel of a CUDA Plan for the CPU, run it with the same config, and read its counters."""
    backend = registry.get(plan.backend)
    small = plan_variant(backend, registry.variant_of(plan), small_problem(plan), CPU, plan.config)
    reasons = (*backend.probe(CPU), *(small if isinstance(small, tuple) else ()))
    if not isinstance(small, Plan) or reasons:
        return Conflicts(why="; ".join(map(str, reasons)))
    from multiattn.cuda.cpu import host
    from multiattn.cuda.instances import launches_of
    from multiattn.cuda.params import struct_of
    from multiattn.plan.abi import pack

    (launch,) = launches_of(small)
    library = host.load(host.build([launch.kernel]))
    tensors = _small_tensors(small.problem)
    addresses = {name: it.data_ptr() for name, it in zip(("q", "k", "v", "out", "lse"), tensors, strict=True)}
    params = host.aligned(pack(struct_of(small), addresses, host.encode_map))
    counters = host.run(
        library,
        launch.kernel.name,
        params,
        blocks=launch.blocks,
        threads=launch.kernel.threads,
        smem_bytes=launch.kernel.smem_bytes,
    )
    return Conflicts(count=counters.bank_conflicts, ldmatrix=counters.ldmatrix, why="CPU emulation")


def _small_tensors(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v, out ``[1, 1, S, D]`` and lse ``[1, 1, Sq]``."""
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[problem.dtype]
    q, k, v = (
        torch.randn((1, 1, seq, problem.head_dim), generator=generator, dtype=dtype)
        for seq in (problem.seq_q, problem.seq_kv, problem.seq_kv)
    )
    return q, k, v, torch.empty_like(q), torch.empty((1, 1, problem.seq_q), dtype=torch.float32)


def inspect_all(
    wanted: Sequence[Task],
    *,
    jobs: int,
    say: Callable[[str], None],
    timeout_s: float = TIMEOUT_S,
    function: Callable[[Task], Record] = inspect,
) -> list[Record]:
    """A record of each task, in their order, made in `jobs` processes: nothing hangs, a crash is its own record's."""
    made: dict[Task, Record] = {}
    for done, outcome in enumerate(run_isolated(function, wanted, jobs=jobs, timeout_s=timeout_s), 1):
        task = outcome.item
        record = outcome.result
        if record is None:
            record = Record(rung=task.rung, arch=task.arch, cell=task.cell, seqs=task.seqs, error=outcome.error)
        made[task] = record
        if record.error or done % 20 == 0 or done == len(wanted):
            told = f": {task.rung}: {record.text}" if record.error else ""
            say(f"[{done}/{len(wanted)}] compiled{told}")
    return [made[task] for task in wanted]


# ---------------------------------------------------------------- kept


def record_path(backend: str) -> Path:
    """Where the record of a backend's rungs is, and is committed."""
    return results_root() / "compiled" / f"ladder_{backend}.json"


def merge(old: Iterable[Record], new: Sequence[Record]) -> list[Record]:
    """New records in place of older ones of the same rung, arch and cells; what ncu counted of the same kernel stays.

    Records of variants that their backend has no more go.
    """
    kept = [record for record in old if record.rung.variant in _names(record.rung.backend)]
    profiles = {record.key: record for record in kept if record.profiled.count is not None}
    told = {(record.rung, record.arch, seq, replace(record.cell, seq=1)) for record in new for seq in record.seqs}
    merged = [
        record
        for record in kept
        if not any((record.rung, record.arch, seq, replace(record.cell, seq=1)) in told for seq in record.seqs)
    ]
    for record in new:
        before = profiles.get(record.key)
        is_same = before is not None and before.kernels == record.kernels and record.profiled.count is None
        merged.append(replace(record, profiled=before.profiled) if is_same and before is not None else record)
    return sorted(merged, key=_place)


def _names(backend: str) -> list[str]:
    return [variant.name for variant in registry.get(backend).forward.variants]


def _place(record: Record) -> tuple[Any, ...]:
    """By backend, arch and cell; rungs in the order of their backend, those with a config of their own first."""
    cell, rung = record.cell, record.rung
    where = (BACKENDS.index(rung.backend), GPU_ARCHS.index(record.arch), cell.head_dim, cell.seq, cell.key)
    return (*where, rung.pin, _names(rung.backend).index(rung.variant))


def save(records: Sequence[Record], path: Path) -> None:
    """Write records as JSON, one line each, the cells and compilers once each."""
    cells: list[Any] = []
    compilers: list[Any] = []
    lines = []
    for record in records:
        data = asdict(record)
        for name, known in (("cell", cells), ("compiler", compilers)):
            value = data[name]
            if value not in known:
                known.append(value)
            data[name] = known.index(value)
        lines.append(json.dumps(data))
    head = json.dumps({"schema": SCHEMA, "cells": cells, "compilers": compilers}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.removesuffix("\n}") + ',\n "records": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


def load(path: Path) -> list[Record]:
    """Records that `save` wrote; InputError for another file."""

    def records(data: dict[str, Any]) -> list[Record]:
        return [_parse(item, data["cells"], data["compilers"]) for item in data["records"]]

    return read(path, f"a ladder's record of schema {SCHEMA} that python -m bench ladder wrote", SCHEMA, records)


def _parse(item: dict[str, Any], cells: Sequence[dict[str, Any]], compilers: Sequence[str]) -> Record:
    given = {
        "rung": Rung(**item["rung"]),
        "cell": Cell(**cells[item["cell"]]),
        "compiler": compilers[item["compiler"]],
        "seqs": tuple(item["seqs"]),
        "kernels": tuple(Kernel(**it) for it in item["kernels"]),
        "emulated": Conflicts(**item["emulated"]),
        "profiled": Conflicts(**item["profiled"]),
        "reasons": tuple(Reason(**it) for it in item["reasons"]),
    }
    return Record(**{**item, **given})
