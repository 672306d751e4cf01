"""What Nsight Compute measured of kernels on record, beside what was compiled: rows for the pages of their targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.errors import InputError
from bench.expected import Record
from bench.target_views import NOT_MEASURED, Slot, percent
from multiattn.inspect.cells import Cell
from multiattn.inspect.facts import Facts
from multiattn.inspect.ncu import METRICS, Launch, Measured
from multiattn.plan.arch import GPU_ARCHS


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What one file of ncu measured."""

    name: str
    launches: tuple[Launch, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What ncu measures of a kernel, and what of it is known before a run."""

    title: str
    metric: str
    hint: str = ""
    compiled: Callable[[Facts], float] | None = None
    """In the unit of `Measured.base`; None for what only a run can tell."""

    def show(self, it: Measured | None) -> str:
        """A number, with its unit where `hint` does not have it."""
        if it is None:
            return NOT_MEASURED
        if it.unit == "%":
            return percent(it.value / 100)
        if self.hint == "µs":
            return _plain(it.base / 1e3)
        return _plain(it.base) if self.hint else f"{_plain(it.value)} {it.unit}".strip()

    def predict(self, kernel: Facts | None) -> str:
        """What is known before a run, where anything is."""
        if kernel is None or self.compiled is None:
            return NOT_TOLD
        value = self.compiled(kernel)
        return percent(value / 100) if self.metric == METRICS["occupancy"] else _plain(value)


def _plain(value: float) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".")


NOT_TOLD = "not told"
STATIC, DYNAMIC = METRICS["static smem"], METRICS["dynamic smem"]
COMPARED = (
    Figure(
        title="registers", metric=METRICS["registers"], hint="of a thread", compiled=lambda kernel: kernel.registers
    ),
    Figure(title="static shared memory", metric=STATIC, hint="bytes", compiled=lambda kernel: kernel.static_smem_bytes),
    Figure(
        title="dynamic shared memory", metric=DYNAMIC, hint="bytes", compiled=lambda kernel: kernel.dynamic_smem_bytes
    ),
    Figure(title="warps", metric=METRICS["occupancy"], hint="of an SM's", compiled=lambda kernel: 100 * kernel.share),
)
"""What the compiler said before, and a run should repeat."""
ONLY_MEASURED = tuple(
    Figure(title=name, metric=metric, hint="µs" if name == "duration" else "")
    for name, metric in METRICS.items()
    if metric not in {figure.metric for figure in COMPARED}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """One kernel of a file of ncu on the page of its arch."""

    file: str
    launch: Launch
    cell: Cell | None
    """That it is a kernel of; None where that cannot be told."""
    note: str
    """Why not; empty where it can."""
    kernel: Facts | None
    """What was compiled; None where nothing on record is like it, or more than one thing is."""

    def compared(self, figure: Figure) -> tuple[Slot, Slot]:
        """Compiled and measured; what differs is marked."""
        it = self.launch.metrics.get(figure.metric)
        expected = None if self.kernel is None or figure.compiled is None else figure.compiled(self.kernel)
        before = Slot(text=figure.predict(self.kernel), empty=expected is None)
        if it is None or expected is None or abs(it.base - expected) <= it.slack:
            return before, self.measured(figure)
        return before, replace(self.measured(figure), level=4, small="differs")

    def measured(self, figure: Figure) -> Slot:
        """What ncu says."""
        it = self.launch.metrics.get(figure.metric)
        return Slot(text=figure.show(it), empty=it is None)


def figures(found: Sequence[Profiled]) -> tuple[Figure, ...]:
    """What only a run can tell: what `ncu.METRICS` has, then what was asked for besides."""
    known = {figure.metric for figure in (*COMPARED, *ONLY_MEASURED)}
    asked = dict.fromkeys(name for it in found for name in it.launch.metrics if name not in known)
    return (*ONLY_MEASURED, *(Figure(title=name, metric=name) for name in asked))


def profiled(recorded: Mapping[str, Record], profiles: Sequence[Profile]) -> dict[str, list[Profiled]]:
    """The kernels of all files by arch, with their cells.

    A kernel is on the page of the GPU that it ran on; where the file does not say which, on those of all archs that
    it may be of. Of launches of one kernel the latest counts. InputError for what is of no page.
    """
    found: dict[str, list[Profiled]] = {arch: [] for arch in GPU_ARCHS}
    for profile in profiles:
        for launch in _latest(profile.launches):
            archs, it = _profiled(recorded, profile.name, launch)
            for arch in archs:
                found[arch].append(it)
    return found


def _latest(launches: Iterable[Launch]) -> list[Launch]:
    """Of launches of a name, those of different figures are different kernels."""
    metrics = [figure.metric for figure in COMPARED]
    return list({(it.arch, it.kernel, *map(it.metrics.get, metrics)): it for it in launches}.values())


def _profiled(recorded: Mapping[str, Record], file: str, launch: Launch) -> tuple[list[str], Profiled]:
    """The pages that a launch is on, and what it shows there."""
    if launch.arch and launch.arch not in GPU_ARCHS:
        raise InputError(f"--ncu: {file}: got {launch.kernel} on {launch.arch}; allowed {', '.join(GPU_ARCHS)}")
    named = [
        (entry.cell, kernel)
        for arch in ([launch.arch] if launch.arch else GPU_ARCHS)
        if arch in recorded
        for entry in recorded[arch].entries
        for kernel in entry.kernels
        if kernel.name == launch.kernel.partition("_Kt")[0]
    ]
    like = [(cell, kernel) for cell, kernel in named if len(named) == 1 or _is_like(kernel, launch)]
    archs = [launch.arch] if launch.arch else list(dict.fromkeys(cell.arch for cell, _ in like or named))
    if not archs:
        raise InputError(f"--ncu: {file}: got {launch.kernel} and no CC; allowed without CC: kernels on record")
    same = len({tuple(figure.predict(kernel) for figure in COMPARED) for _, kernel in like}) == 1
    return archs, Profiled(
        file=file,
        launch=launch,
        cell=like[0][0] if len(like) == 1 else None,
        note=_why_no_cell([cell for cell, _ in named], [cell for cell, _ in like]),
        kernel=like[0][1] if same else None,
    )


def _is_like(kernel: Facts, launch: Launch) -> bool:
    """Whether nothing that a launch says of registers and shared memory contradicts what was compiled."""
    registers, static, dynamic = (launch.metrics.get(name) for name in (METRICS["registers"], STATIC, DYNAMIC))
    if registers is not None and abs(registers.base - kernel.registers) > registers.slack:
        return False
    if static is None or dynamic is None:
        return True
    return abs(static.base + dynamic.base - kernel.smem_bytes) <= static.slack + dynamic.slack


def _why_no_cell(named: Sequence[Cell], like: Sequence[Cell]) -> str:
    if not named:
        return "no kernel of this name on record"
    if not like:
        return f"differs in registers or shared memory from all {len(named)} kernels of this name on record"
    return f"may be of: {', '.join(map(str, like))}" if len(like) > 1 else ""
