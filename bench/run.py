"""Running cells: admit each contender (make it, check it), time the admitted in turns, store a row of each."""

from __future__ import annotations

import contextlib
import functools
import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

import torch

from bench.contenders import Contender, Ours, RefusedError, Truths, check, named, plan_data, truth_of
from bench.decode_cells import DecodeCell
from bench.matrix import Cell, Direction, Tensors, cell_flops, tflops
from bench.peers import PEERS, Provider
from bench.results import LOST_DEVICE, NO_GPU, Environment, Measured, Row, Store, environment, gpu_arch
from multiattn.bars import Bar
from multiattn.inspect.pool import run_isolated
from multiattn.plan.arch import Arch
from multiattn.plan.support import Reason, Unsupported
from multiattn.tune.check import device_works
from multiattn.tune.timing import Budget, Call, Contestant, CudaClock, Timing, measure

ERROR_CHARACTERS = 600

PREWARM_CELLS: Mapping[Direction, int] = {"fwd": 8, "bwd": 1, "fwdbwd": 1}
"""From so many cells on, compiling ahead is worth the start of its processes: about 10 s, which is less than one
backward of each backend takes to compile (a guess from compiling for sm90 on a CPU)."""

COPY, PLAIN = "a copy", "{} without scores"
"""Name the copy, and the launch without scores of a contender, among those that take turns."""

Outcome = Timing | tuple[Reason, ...] | Exception


class DeviceLostError(RuntimeError):
    """A contender left the device unusable for this process; its row is stored, the next run goes on without it."""


class NothingToTimeOnError(RuntimeError):
    """A command that times needs a GPU, and there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The device that cells run on."""

    arch: Arch
    device: torch.device
    clock: CudaClock
    synchronize: Callable[[], None]
    extra_bytes: Callable[[Contestant, Cell], int] | None = None
    """The function below; None where memory is not counted."""

    @classmethod
    def current(cls) -> Machine | None:
        """The current GPU, or None where there is none."""
        arch = gpu_arch()
        if arch is None:
            return None
        device = torch.device("cuda", torch.cuda.current_device())
        sync = torch.cuda.synchronize
        return cls(arch=arch, device=device, clock=CudaClock(), synchronize=sync, extra_bytes=extra_bytes)

    @classmethod
    def needed(cls, instead: str = "") -> Machine:
        """The current GPU; NothingToTimeOnError where there is none, with a word on what to do `instead`."""
        machine = cls.current()
        if machine is None:
            raise NothingToTimeOnError(f"Nothing to time on: {NO_GPU}. {instead}".removesuffix(". "))
        return machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A copy within the device's memory: the call, and the bytes that it reads and writes."""

    call: Call
    moved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The cells to run, who competes, in which regime, how long."""

    suite: str
    cells: tuple[Cell, ...]
    providers: tuple[Provider, ...]
    regime: str = "device"
    budget: Budget = Budget()  # noqa: RUF009 - frozen, so one for all is safe
    fresh: bool = False
    jobs: int = 1
    """Processes that compile ahead of the run; 1 is none."""
    command: str = "python -m bench"
    """Makes this run again; every row stores it."""
    truth_of: Callable[[Cell, Tensors], Truths] = truth_of
    copy: Copy | None = None
    """Takes turns with the contenders, so that their rates have a share of its rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """A contender that may be timed: what it computes is right, with this share of the budget used."""

    contender: Contender
    error_ratio: float
    peak_extra_bytes: int | None = None


def run(
    job: Job,
    machine: Machine | None,
    store: Store,
    *,
    quiet: bool = False,
    skips: Callable[[Cell], bool] = lambda cell: False,
    tell: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Run every cell that is not finished and return the rows of all of them, old and new.

    Without a machine each row carries its reasons. Rows are stored after each cell, and `tell` gets them. Cells that
    `skips` names when it is their turn have no rows.

    Raises:
        DeviceLostError: a contender broke the device. What is finished is stored.
    """
    setup, rows = environment(), list[Row]()
    names = [provider.name for provider in job.providers]
    waiting = [it for it in job.cells if job.fresh or not store.finished(it, names, job.regime, setup, job.budget)]
    if machine is not None and job.jobs > 1 and any(len(waiting) >= PREWARM_CELLS[it.direction] for it in waiting):
        prewarm(job.providers, waiting, jobs=job.jobs)
    with Bar(job.cells, unit="cell", disable=True if quiet else None) as bar:  # None: silent where there is no terminal
        for cell in bar:
            if skips(cell):
                continue
            bar.set_postfix_str(cell.key)
            if cell in waiting:
                store.add(found := _run_cell(job, cell, machine, store, setup))
                if not quiet:
                    bar.clear()
                    told = (f"{row.contender} {row.figure}" for row in found)
                    print(f"{cell.key} {job.regime}: {'  '.join(told)}", flush=True)
            rows += (found := [store.rows[cell.key, name, job.regime] for name in names])
            tell(found)
    return rows


def _run_cell(job: Job, cell: Cell, machine: Machine | None, store: Store, setup: Environment) -> list[Row]:
    row_of = functools.partial(_row, job, cell, setup)
    if machine is None:
        return [row_of(provider.name, provider.why_not(cell, None)) for provider in job.providers]
    turns = f"{datetime.now(timezone.utc).isoformat(timespec='seconds')}-{secrets.token_hex(4)}"
    tensors, truth = tensors_and_truth(cell, machine.device, job.truth_of)
    admitted: dict[str, Admitted] = {}
    rows: dict[str, Row] = {}
    for provider in job.providers:
        before = store.kept(cell, provider.name, job.regime, setup)
        if before is not None and before.error.startswith(LOST_DEVICE) and not job.fresh:
            rows[provider.name] = before
            continue
        outcome = admit(provider, cell, tensors, machine, truth, regime=job.regime)
        if isinstance(outcome, Admitted):
            admitted[provider.name] = outcome
        else:
            rows[provider.name] = row_of(provider.name, outcome, run=turns)
            _stop_if_lost(machine, store, rows[provider.name])
    contestants = {
        name: it.contender.call if job.regime == "call" else it.contender.launch for name, it in admitted.items()
    }
    of_plain = {PLAIN.format(name): it.contender.plain for name, it in admitted.items()}
    contestants |= {name: it for name, it in of_plain.items() if it is not None}
    if job.copy is not None and contestants:
        contestants[COPY] = Contestant(call=job.copy.call)
    timings = measure(contestants, machine.clock, regime=job.regime, budget=job.budget)
    copied = timings.pop(COPY, None)
    without = {name: timings.pop(PLAIN.format(name), None) for name in admitted}
    for name, timing in timings.items():  # in the order in which they ended: the first error is the one that broke it
        plain = without[name]
        timing = plain if isinstance(plain, Exception) else timing  # one that fails has no ratio
        rows[name] = row_of(name, timing, admitted[name], run=turns, copied=copied, plain=plain)
        _stop_if_lost(machine, store, rows[name])
    return [rows[provider.name] for provider in job.providers]


@functools.lru_cache(maxsize=1)
def tensors_and_truth(
    cell: Cell, device: torch.device, truth_of: Callable[[Cell, Tensors], Truths] = truth_of
) -> tuple[Tensors, Truths]:
    """The inputs of a cell and its true results, kept while regimes and contenders take turns on it."""
    tensors = cell.tensors(device)
    return tensors, truth_of(cell, tensors)


def admit(
    provider: Provider, cell: Cell, tensors: Tensors, machine: Machine, truth: Truths, *, regime: str = "device"
) -> Admitted | tuple[Reason, ...] | Exception:
    """Make the contender and check the very launch that will be timed; in the regime `call` that call as well."""
    try:
        contender = provider.prepare(cell, tensors, machine.arch)
        ratio = check(contender.output(), truth, contender.plan, strict=provider.is_ours)
        timed = contender.call if regime == "call" else contender.launch
        if timed is not contender.launch:
            with timed.context():
                ratio = max(ratio, check(named(timed.call()), truth, contender.plan))
        extra = machine.extra_bytes(timed, cell) if machine.extra_bytes is not None else None
        machine.synchronize()
    except (Unsupported, RefusedError) as refusal:
        return refusal.reasons
    except Exception as error:  # broad: a contender is anybody's code; its error is its row
        return error
    return Admitted(contender=contender, error_ratio=ratio, peak_extra_bytes=extra)


def _stop_if_lost(machine: Machine, store: Store, row: Row) -> None:
    """After an error: a device that cannot even synchronise any more would fail everybody else."""
    if not row.error:
        return
    try:
        machine.synchronize()
    except RuntimeError as error:
        store.add([replace(row, error=LOST_DEVICE + row.error, run="")])
        raise DeviceLostError(f"{row.contender} in {row.cell}: {error}") from None


def _row(
    job: Job,
    cell: Cell,
    setup: Environment,
    name: str,
    outcome: Outcome,
    admitted: Admitted | None = None,
    run: str = "",
    copied: Timing | Exception | None = None,
    plain: Outcome | None = None,
) -> Row:
    plan = admitted.contender.plan if admitted is not None else None
    measured = None
    if isinstance(outcome, Timing):
        assert admitted is not None
        rate = tflops(cell_flops(cell), outcome.time_ms)
        told: dict[str, Any] = {"tflops": rate, "peak_share": setup.peak_tflops and rate / setup.peak_tflops}
        told |= {"error_ratio": admitted.error_ratio, "peak_extra_bytes": admitted.peak_extra_bytes}
        if isinstance(cell, DecodeCell):
            told["tb_per_s"] = cell.moved_bytes / outcome.time_ms / 1e9
        if job.copy is not None and isinstance(copied, Timing):
            told["copy_tb_per_s"] = job.copy.moved_bytes / copied.time_ms / 1e9
        if isinstance(plain, Timing):
            told["plain_ms"] = plain.time_ms
        measured = Measured(**asdict(outcome), sample_ms=job.budget.sample_ms, **told)
    error = "".join(traceback.format_exception_only(outcome)) if isinstance(outcome, Exception) else ""
    return Row(
        cell=cell,
        contender=name,
        regime=job.regime,
        environment=setup,
        command=job.command,
        run=run,
        plan=plan_data(plan) if plan is not None else None,
        detail=admitted.contender.detail if admitted is not None else "",
        measured=measured,
        reasons=outcome if isinstance(outcome, tuple) else (),
        error=error.strip()[:ERROR_CHARACTERS],
    )


# ---------------------------------------------------------------- memory


def output_bytes(cell: Cell) -> int:
    """Bytes of what a cell's direction computes: out and lse, or dq, dk and dv, or all of them."""
    problem = cell.problem
    rows, rows_kv = (cell.batch * heads * cell.seq for heads in (problem.heads_q, problem.heads_kv))
    row, row_v = (width * problem.torch_dtype.itemsize for width in cell.widths)
    forward, backward = rows * (row_v + 4), (rows + rows_kv) * row + rows_kv * row_v
    return {"fwd": forward, "bwd": backward, "fwdbwd": forward + backward}[cell.direction]


def extra_bytes(contestant: Contestant, cell: Cell) -> int:
    """The peak of what one launch asks the allocator for, without the outputs where it allocates these itself.

    What it is given may be up to 1 MiB more a tensor, by which free block is at hand: no figure to compare by. It has
    run before, so that nothing is counted that is made once. Synchronises.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    with contestant.context():
        returned = contestant.call()
    torch.cuda.synchronize()
    taken: int = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return max(0, taken - (output_bytes(cell) if returned is not None else 0))


# ---------------------------------------------------------------- compiling ahead


def provider_of(name: str) -> Provider:
    """The provider whose contender has this name."""
    backend, _, variant = name.partition("/")
    return next((peer for peer in PEERS if peer.name == name), Ours(backend=backend, variant=variant or None))


def warm(task: tuple[str, Cell]) -> None:
    """Make and run a contender once. Providers go by name, as one may hold what cannot be pickled."""
    (name, cell), arch = task, gpu_arch()
    if arch is not None:
        with contextlib.suppress(RefusedError):
            provider_of(name).prepare(cell, cell.tensors("cuda"), arch).output()
            torch.cuda.synchronize()


def prewarm(providers: Sequence[Provider], cells: Sequence[Cell], *, jobs: int) -> None:
    """Make each contender run each cell in processes of their own.

    This fills the disk caches of the compilers (ours, Triton's, cuTile's, Inductor's) with all cores, so that the run
    itself, which must be one process, hardly waits for a compiler. What fails here fails again there.
    """
    arch = gpu_arch()
    wanted = [(it.name, cell) for it in providers for cell in cells if not it.why_not(cell, arch)]
    made = run_isolated(warm, wanted, jobs=jobs, timeout_s=120.0, keep=device_works)
    for outcome in Bar(made, total=len(wanted), desc="compiling ahead", unit="kernel", disable=None):
        if outcome.error:
            Bar.write(f"compiling ahead: {', '.join(map(str, outcome.item))}: {outcome.error.splitlines()[0]}")
