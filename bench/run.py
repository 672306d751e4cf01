"""Running cells: admit each contender (make it, check it), time the admitted in turns, store a row of each."""

from __future__ import annotations

import functools
import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from types import MappingProxyType

import torch
from tqdm import tqdm

from bench.contenders import Contender, Tensors, named, plan_data
from bench.environment import environment, gpu_arch
from bench.flops import cell_flops, peak_share, rate_text, tflops
from bench.matrix import Cell, Direction
from bench.memory import extra_bytes
from bench.prewarm import prewarm
from bench.providers import Provider
from bench.results import LOST_DEVICE, Environment, Measured, Row, Store
from bench.timing import Budget, Clock, Contestant, CudaClock, Timing, measure
from bench.truth import Truths, check, truth_of
from multiattn.plan.arch import Arch, find_gpu
from multiattn.plan.support import Reason, Unsupported

ERROR_CHARACTERS = 600

PREWARM_CELLS: Mapping[Direction, int] = MappingProxyType({"fwd": 8, "bwd": 1, "fwdbwd": 1})
"""From so many cells on, compiling ahead is worth the start of its processes: about 10 s, which is less than one
backward of each backend takes to compile (a guess from compiling for sm90 on a CPU)."""


class DeviceLostError(RuntimeError):
    """A contender left the device unusable for this process; its row is stored, the next run goes on without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What cells run on."""

    arch: Arch
    device: torch.device
    clock: Clock
    synchronize: Callable[[], None]
    extra_bytes: Callable[[Contestant, Cell], int] | None = None
    """See bench.memory; None where nobody counts what is allocated."""

    @classmethod
    def current(cls) -> Machine | None:
        """The current GPU, or None where there is none."""
        arch = gpu_arch()
        if arch is None:
            return None
        device = torch.device("cuda", torch.cuda.current_device())
        return cls(
            arch=arch,
            device=device,
            clock=CudaClock(),
            synchronize=torch.cuda.synchronize,
            extra_bytes=extra_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to run: cells, who competes, in which regimes, how long."""

    suite: str
    cells: tuple[Cell, ...]
    providers: tuple[Provider, ...]
    regimes: tuple[str, ...] = ("device",)
    budget: Budget = Budget()  # noqa: RUF009 - frozen, so one for all is safe
    fresh: bool = False
    jobs: int = 1
    """Processes that compile ahead of the run; 1 is none."""
    command: str = "python -m bench"
    """What makes this run again; every row stores it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """A contender that may be timed: what it computes is right, with this share of the budget used."""

    contender: Contender
    error_ratio: float
    peak_extra_bytes: int | None = None


def run(job: Job, machine: Machine | None, store: Store, *, quiet: bool = False) -> list[Row]:
    """Run every cell that is not finished and return the rows of all of them, old and new.

    Without a machine each row carries its reasons. Rows are stored after each cell.

    Raises:
        DeviceLostError: a contender broke the device. What is finished is stored.
    """
    setup = environment()
    names = [provider.name for provider in job.providers]
    work = [(cell, regime) for cell in job.cells for regime in job.regimes]

    def is_open(cell: Cell, regime: str) -> bool:
        return job.fresh or not store.finished(cell, names, regime, setup, job.budget)

    open_cells = [cell for cell, regime in work if is_open(cell, regime)]
    is_slow = any(len(open_cells) >= PREWARM_CELLS[cell.direction] for cell in open_cells)
    if machine is not None and job.jobs > 1 and is_slow:
        prewarm(job.providers, open_cells, jobs=job.jobs, say=_say)
    with tqdm(work, unit="cell", disable=True if quiet else None) as bar:  # None: silent where there is no terminal
        for cell, regime in bar:
            bar.set_postfix_str(cell.key)
            if is_open(cell, regime):
                rows = _run_cell(job, cell, regime, machine, store, setup)
                store.add(rows)
                if not quiet:
                    bar.clear()
                    _say(summary(cell, regime, rows))
    keys = [(cell.key, name, regime) for cell, regime in work for name in names]
    return [store.rows[key] for key in keys]


def _say(text: str) -> None:
    print(text, flush=True)


def summary(cell: Cell, regime: str, rows: Sequence[Row]) -> str:
    """One line of a cell: TFLOPS of each, and who has none."""
    parts = [
        f"{row.contender} {rate_text(row.measured.tflops)}"
        if row.measured
        else f"{row.contender} {'-' if row.reasons else '!'}"
        for row in rows
    ]
    return f"{cell.key} {regime}: " + "  ".join(parts)


def _run_cell(
    job: Job, cell: Cell, regime: str, machine: Machine | None, store: Store, setup: Environment
) -> list[Row]:
    if machine is None:
        return [_row(job, cell, provider, regime, setup, provider.why_not(cell, None)) for provider in job.providers]
    turns = f"{datetime.now(timezone.utc).isoformat(timespec='seconds')}-{secrets.token_hex(4)}"
    tensors, truth = tensors_and_truth(cell, machine.device)
    outcomes: dict[str, Row] = {}
    admitted: dict[str, Admitted] = {}
    for provider in job.providers:
        if store.lost_device(cell, provider.name, regime, setup) and not job.fresh:
            outcomes[provider.name] = store.rows[(cell.key, provider.name, regime)]
            continue
        outcome = admit(provider, cell, tensors, machine, truth, regime=regime)
        if isinstance(outcome, Admitted):
            admitted[provider.name] = outcome
        else:
            outcomes[provider.name] = _row(job, cell, provider, regime, setup, outcome, run=turns)
            _stop_if_lost(machine, store, outcomes[provider.name])
    contestants = {
        name: it.contender.call if regime == "call" else it.contender.launch for name, it in admitted.items()
    }
    timings = measure(contestants, machine.clock, regime=regime, budget=job.budget)
    providers = {provider.name: provider for provider in job.providers}
    for name, timing in timings.items():  # in the order in which they ended: the first error is the one that broke it
        outcomes[name] = _row(job, cell, providers[name], regime, setup, timing, admitted[name], run=turns)
        _stop_if_lost(machine, store, outcomes[name])
    return [outcomes[provider.name] for provider in job.providers]


@functools.lru_cache(maxsize=1)
def tensors_and_truth(cell: Cell, device: torch.device) -> tuple[Tensors, Truths]:
    """The inputs of a cell and what its results must be, kept while regimes and contenders take turns on it."""
    tensors = cell.tensors(device)
    return tensors, truth_of(cell, tensors)


def admit(
    provider: Provider, cell: Cell, tensors: Tensors, machine: Machine, truth: Truths, *, regime: str = "device"
) -> Admitted | tuple[Reason, ...] | Exception:
    """Make the contender and check the very launch that will be timed; in the regime `call` that call as well."""
    try:
        reasons = provider.why_not(cell, machine.arch)
        if reasons:
            return reasons
        contender = provider.prepare(cell, tensors, machine.arch)
        if not isinstance(contender, Contender):
            return contender
        ratio = check(contender.output(), truth, contender.plan, strict=provider.is_ours)
        timed = contender.call if regime == "call" else contender.launch
        if timed is not contender.launch:
            with timed.context():
                ratio = max(ratio, check(named(timed.call()), truth, contender.plan))
        extra = machine.extra_bytes(timed, cell) if machine.extra_bytes is not None else None
        machine.synchronize()
    except Unsupported as refusal:
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
    provider: Provider,
    regime: str,
    setup: Environment,
    outcome: Timing | tuple[Reason, ...] | Exception,
    admitted: Admitted | None = None,
    *,
    run: str = "",
) -> Row:
    contender = admitted.contender if admitted is not None else None
    plan = contender.plan if contender is not None else None
    return Row(
        cell=cell,
        contender=provider.name,
        regime=regime,
        environment=setup,
        command=job.command,
        run=run,
        plan=plan_data(plan) if plan is not None else None,
        detail=contender.detail if contender is not None else "",
        measured=_measured(cell, outcome, setup, job.budget, admitted) if isinstance(outcome, Timing) else None,
        reasons=outcome if isinstance(outcome, tuple) else (),
        error=_error_text(outcome) if isinstance(outcome, Exception) else "",
    )


def _measured(cell: Cell, timing: Timing, setup: Environment, budget: Budget, admitted: Admitted | None) -> Measured:
    assert admitted is not None
    rate = tflops(cell_flops(cell), timing.time_ms)
    return Measured(
        time_ms=timing.time_ms,
        low_ms=timing.low_ms,
        high_ms=timing.high_ms,
        rounds=timing.rounds,
        sample_ms=budget.sample_ms,
        launches=timing.launches,
        host_bound=timing.host_bound,
        tflops=rate,
        peak_share=peak_share(rate, find_gpu(setup.gpu)),
        error_ratio=admitted.error_ratio,
        peak_extra_bytes=admitted.peak_extra_bytes,
    )


def _error_text(error: Exception) -> str:
    """The compiler's or the runtime's own words, cut to what a results file can hold."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text if len(text) <= ERROR_CHARACTERS else text[: ERROR_CHARACTERS - 4] + " ..."
