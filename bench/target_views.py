"""What the pages of the targets show, as data: heat maps over all, the kernels of one, ceilings; no HTML."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.expected import Record, all_cells
from bench.flops import rate_text
from bench.target_docs import SEQS, describe_machinery, matrix_problem
from multiattn.inspect.build import Entry
from multiattn.inspect.cells import HEAD_DIMS, MASKS, Cell
from multiattn.inspect.facts import Facts
from multiattn.inspect.mix import CLASSES, Counts
from multiattn.inspect.roofline import Bounds, Measurement, best_measured, bounds
from multiattn.plan.arch import GPU_ARCHS, Gpu
from multiattn.plan.backend import BACKENDS, Direction

NOT_RECORDED = "not on record"
NOT_MEASURED = "not measured"
_LONGEST = 34
"""Characters of an error that fit a heat map's cell; the whole text is listed below it."""

Row = tuple[Cell, Mapping[str, Entry | None]]
"""A cell, whatever its arch, with what is on record of it for each target."""


def rows(recorded: Mapping[str, Record], direction: Direction) -> list[Row]:
    """Every cell of the table and of the record in one direction, in the order of a table."""
    known = {entry.cell: entry for record in recorded.values() for entry in record.entries}
    wanted = {replace(cell, arch=GPU_ARCHS[0]) for cell in (*all_cells(), *known) if cell.direction == direction}
    ordered = sorted(wanted, key=lambda cell: (cell.place, cell.what))
    return [(cell, {arch: known.get(replace(cell, arch=arch)) for arch in GPU_ARCHS}) for cell in ordered]


def label(cell: Cell) -> tuple[str, str]:
    """Whose cell it is, and of which problem; direction and arch stand elsewhere."""
    return cell.backend + (f"/{cell.variant}" if cell.variant else ""), cell.what


def anchor(cell: Cell) -> str:
    """The id of a cell on the page of its arch."""
    return re.sub(r"[^a-z0-9]+", "-", f"{cell.direction} {' '.join(label(cell))}".lower().replace("=", ""))


def page_of(arch: str) -> str:
    """The file of an arch's page."""
    return f"{arch}.html"


def why_empty(entry: Entry | None) -> str:
    """The whole reason or error of a cell without kernels."""
    if entry is None:
        return f"{NOT_RECORDED}: make expected compiles it"
    return f"error: {entry.error.strip()}" if entry.error else f"refused: {entry.text}"


def _short_why(entry: Entry | None) -> str:
    if entry is None:
        return NOT_RECORDED
    if entry.reasons:
        return f"refused: {', '.join(dict.fromkeys(reason.code for reason in entry.reasons))}"
    text = f"error: {entry.text}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1].rstrip() + "…"


def percent(share: float) -> str:
    """A share of 0 to 1 to a tenth of a percent, half up, which is left out where it is whole: 12.5 %, 25 %."""
    return f"{math.floor(1000 * share + 0.5) / 10:,.4g} %"


# ---------------------------------------------------------------- heat maps


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How good a number of a kernel is, from 0 to 4: the first of `limits` that it does not pass, lower is better."""

    limits: tuple[float, float, float, float]
    labels: tuple[str, str, str, str, str]
    value: Callable[[Facts], float]

    def level(self, kernel: Facts) -> int:
        """0 for the best."""
        return bisect_left(self.limits, self.value(kernel))


ELSEWHERE = 16
"""Spills outside the hot loops that a colour takes for one within."""

REGISTERS = Scale(
    limits=(128, 168, 208, 254),
    labels=("to 128", "to 168", "to 208", "to 254", "255, the limit"),
    value=lambda kernel: kernel.registers,
)
SPILLS = Scale(
    limits=(0, 16, 64, 256),
    labels=("none", "to 16", "to 64", "to 256", "more"),
    value=lambda kernel: kernel.hot_spills + kernel.other_spills / ELSEWHERE,
)
OCCUPANCY = Scale(
    limits=(-0.5, -0.33, -0.25, -0.12),
    labels=("half or more", "from 33 %", "from 25 %", "from 12 %", "less"),
    value=lambda kernel: -kernel.share,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One cell of a table: a number, or why there is none."""

    text: str
    small: str = ""
    level: int | None = None
    """Of a Scale; None for what has no good and bad."""
    href: str = ""
    title: str = ""
    empty: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Heat:
    """What one heat map shows of an entry that was compiled."""

    name: str
    title: str
    note: str
    show: Callable[[Entry], Slot]
    scale: Scale | None = None


def _registers(entry: Entry) -> Slot:
    return Slot(text=f"{entry.main.registers}", level=REGISTERS.level(entry.main), title=entry.text)


def _spills(entry: Entry) -> Slot:
    hot = sum(kernel.hot_spills for kernel in entry.kernels)
    other = sum(kernel.other_spills for kernel in entry.kernels)
    level = max(map(SPILLS.level, entry.kernels))
    return Slot(text=f"{hot}", small=f"+{other}" if other else "", level=level, title=entry.text)


def _occupancy(entry: Entry) -> Slot:
    kernel = entry.main
    title = f"{kernel.name}: {kernel.blocks} blocks of {kernel.threads} threads, limited by {kernel.limiter}"
    return Slot(text=percent(kernel.share), small=kernel.limiter, level=OCCUPANCY.level(kernel), title=title)


def _machinery(entry: Entry) -> Slot:
    kernel = entry.main
    generation = next((name for name in ("tcgen05", "wgmma", "mma.sync") if name in kernel.features), "no tensor core")
    return Slot(text=generation, small=loads(kernel), title=kernel.main_mma)


MAPS = (
    Heat(
        name="registers",
        title="Registers",
        note="Of a thread, in the kernel with most of the work. 255 is the most there can be: there a compiler begins "
        "to spill. As launched: warps with roles may hand registers to each other after that.",
        show=_registers,
        scale=REGISTERS,
    ),
    Heat(
        name="spills",
        title="Spills",
        note="Loads and stores of local memory in the hot loops of all kernels of a cell; small, after a plus, those "
        f"elsewhere, of which the colour takes {ELSEWHERE} for one. A kernel without a hot loop counts with all its "
        "code.",
        show=_spills,
        scale=SPILLS,
    ),
    Heat(
        name="occupancy",
        title="Occupancy",
        note="Share of the warps that an SM can hold, in the kernel with most of the work, and what keeps one more "
        "block out. A low share alone is no fault: wgmma and tcgen05 keep tensor cores busy with few warps.",
        show=_occupancy,
        scale=OCCUPANCY,
    ),
    Heat(
        name="machinery",
        title="Tensor cores and loads",
        note="Which generation of tensor-core instruction the kernel with most of the work uses, and how it loads.",
        show=_machinery,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A row of a heat map: its label, and a slot per target."""

    label: tuple[str, str]
    slots: tuple[Slot, ...]


def heat_lines(found: Iterable[Row], heat: Heat) -> list[Line]:
    """The rows of a heat map; each slot links to its cell on its arch's page."""
    return [
        Line(label=label(cell), slots=tuple(_slot(cell, arch, entry, heat) for arch, entry in entries.items()))
        for cell, entries in found
    ]


def _slot(cell: Cell, arch: str, entry: Entry | None, heat: Heat) -> Slot:
    href = f"{page_of(arch)}#{anchor(cell)}"
    if entry is not None and entry.ok:
        return replace(heat.show(entry), href=href)
    return Slot(text=_short_why(entry), href=href, title=why_empty(entry), empty=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Why cells are empty, once, and which."""

    text: str
    cells: tuple[Cell, ...]


def notes(found: Iterable[Row]) -> list[Note]:
    """Every distinct reason of an empty cell."""
    told: dict[str, list[Cell]] = {}
    for cell, entries in found:
        for arch, entry in entries.items():
            if entry is None or not entry.ok:
                told.setdefault(why_empty(entry), []).append(replace(cell, arch=arch))
    return [Note(text=text, cells=tuple(cells)) for text, cells in told.items()]


# ---------------------------------------------------------------- the kernels of one target


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of an arch's table of kernels."""

    title: str
    show: Callable[[Facts], str]
    hint: str = ""
    scale: Scale | None = None

    def slot(self, kernel: Facts) -> Slot:
        """Its cell of one kernel."""
        level = None if self.scale is None else self.scale.level(kernel)
        return Slot(text=self.show(kernel), level=level)


def loads(kernel: Facts) -> str:
    """How it loads: TMA load, cp.async, plain loads."""
    return describe_machinery(kernel).partition(", ")[2]


def _tensor(kernel: Facts) -> str:
    name = kernel.main_mma
    if not name:
        return "none"
    count = kernel.hot.tensor_names.get(name, 0)
    return f"{count} x {name}" if count else f"{name}, in no hot loop"


def _ratio(of: Callable[[Counts], float | None]) -> Callable[[Facts], str]:
    def show(kernel: Facts) -> str:
        value = of(kernel.hot)
        return "no MMA" if value is None else f"{value:.1f}"

    return show


COLUMNS = (
    Column(title="threads", show=lambda it: f"{it.threads}", hint="of a block"),
    Column(title="registers", show=lambda it: f"{it.registers}", hint="of a thread", scale=REGISTERS),
    Column(
        title="spills",
        show=lambda it: f"{it.hot_spills} + {it.other_spills}",
        hint="hot + elsewhere",
        scale=SPILLS,
    ),
    Column(title="stack", show=lambda it: f"{it.stack_bytes}", hint="bytes"),
    Column(
        title="shared memory",
        show=lambda it: f"{it.static_smem_bytes} + {it.dynamic_smem_bytes}",
        hint="static + dynamic",
    ),
    Column(title="blocks", show=lambda it: f"{it.blocks}, by {it.limiter}", hint="of an SM, by what"),
    Column(title="warps", show=lambda it: percent(it.share), hint="of an SM's", scale=OCCUPANCY),
    Column(title="code", show=lambda it: f"{it.code_bytes}", hint="bytes"),
    Column(title="tensor cores", show=_tensor, hint="in the hot loops"),
    Column(title="loads", show=loads),
    Column(title="others", show=_ratio(lambda it: it.others_per_tensor), hint="for each MMA"),
    Column(title="FP32 + INT", show=_ratio(lambda it: it.alu_per_tensor), hint="for each MMA"),
    Column(title="EX2", show=_ratio(lambda it: it.ex2_per_tensor), hint="for each MMA"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixed:
    """The instructions of one kernel by class."""

    headers: tuple[str, ...]
    lines: tuple[tuple[str, tuple[int, ...]], ...]
    names: tuple[tuple[str, tuple[int, ...]], ...]
    """Tensor-core instructions by name, and those that are in no class."""


def mixed(kernel: Facts) -> Mixed:
    """The whole mix: hot loops together, one by one where there are more, all of the code."""
    found = kernel.mix
    single = found.loops if len(found.loops) > 1 else ()
    counts = (found.hot, *single, found.code) if found.loops else (found.code,)
    headers = ("hot loops", *(f"loop {place}" for place, _ in enumerate(single, 1)), "all code")
    named = [{**it.tensor_names, **it.unknown} for it in counts]
    return Mixed(
        headers=headers if found.loops else ("all code",),
        lines=tuple((name, tuple(it[name] for it in counts)) for name in CLASSES if any(it[name] for it in counts)),
        names=tuple((name, tuple(it.get(name, 0) for it in named)) for name in named[-1]),
    )


# ---------------------------------------------------------------- ceilings


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """What a device could reach in one problem, and what ours reached."""

    head_dim: int
    mask: str
    seq: int
    roof: Bounds
    best: Measurement | None
    by_backend: Mapping[str, Measurement | None]

    @property
    def binds(self) -> str:
        """Which unit bounds the time; more than one where they are as busy."""
        return " = ".join(self.roof.busiest)

    def reached(self, found: Measurement | None) -> str:
        """A measurement with its share of the ceiling, or that there is none."""
        if found is None:
            return NOT_MEASURED
        return f"{rate_text(found.tflops)}, {100 * found.tflops / self.roof.tflops:.0f} %"


def ceilings(gpu: Gpu, direction: Direction, measurements: Sequence[Measurement]) -> list[Ceiling]:
    """By head_dim, mask and length, the length changing fastest."""
    mine = [it for it in measurements if it.gpu == gpu.name and it.direction == direction]
    return [
        _ceiling(gpu, direction, head_dim, mask, seq, mine) for head_dim in HEAD_DIMS for mask in MASKS for seq in SEQS
    ]


def _ceiling(
    gpu: Gpu, direction: Direction, head_dim: int, mask: str, seq: int, mine: Sequence[Measurement]
) -> Ceiling:
    problem = matrix_problem(head_dim, mask, seq)

    def best(backend: str) -> Measurement | None:
        its = [it for it in mine if it.contender.partition("/")[0] == backend]
        return best_measured(its, problem, gpu, direction)

    return Ceiling(
        head_dim=head_dim,
        mask=mask,
        seq=seq,
        roof=bounds(problem, gpu, direction),
        best=best_measured(mine, problem, gpu, direction),
        by_backend={backend: best(backend) for backend in BACKENDS},
    )
