"""Tables of a chain: its rungs by length, and what they compile to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.flops import rate_text
from bench.ladder_facts import Record
from bench.ladder_rungs import CUDNN, TILEGYM, Rung, baseline, chain_rungs
from bench.matrix import Cell
from bench.report import figure
from bench.results import Measured, Row
from multiattn.plan import backend as registry
from multiattn.plan.backend import ladder
from parity.report import Table

PINNED, TUNED = "pinned", "tuned"
MODES = {
    PINNED: "every rung runs the config of the top rung, less what it cannot do, so what differs is the code alone",
    TUNED: "every rung runs the config of its own rule",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """Rows of one chain on one GPU, of cells that differ in length only."""

    backend: str
    top: str
    cells: tuple[Cell, ...]
    rows: dict[tuple[int, str], Row]
    """By length and contender."""
    gpu: str

    @property
    def steps(self) -> tuple[str, ...]:
        """Variants, first to last."""
        return tuple(variant.name for variant in ladder(registry.get(self.backend), self.top))

    @property
    def baseline(self) -> str:
        """The peer that speed-ups are over."""
        return baseline(self.cells[0].head_dim)

    @property
    def title(self) -> str:
        """What all cells share."""
        return f"{self.backend} up to {self.top}, {setting_text(self.cells[0])}, {self.gpu}"

    def contender(self, step: str, mode: str) -> str:
        """The row's name of a step; the top with its own config is the same in both modes."""
        pin = self.top if mode == PINNED and step != self.top else ""
        return str(Rung(backend=self.backend, variant=step, pin=pin))

    def row(self, seq: int, contender: str) -> Row | None:
        """The row of a contender at a length."""
        return self.rows.get((seq, contender))

    def measured(self, seq: int, contender: str) -> Measured | None:
        """Its time, where it has one."""
        row = self.row(seq, contender)
        return row.measured if row is not None else None

    def gain(self, seq: int, contender: str, over: str) -> float | None:
        """How many times as fast as another; None where one of the two has no time."""
        mine, other = self.measured(seq, contender), self.measured(seq, over)
        return other.time_ms / mine.time_ms if mine is not None and other is not None else None


def setting_text(cell: Cell) -> str:
    """A cell without its length."""
    return f"B={cell.batch} H={cell.heads} D={cell.head_dim} {cell.dtype} {cell.mask}"


def boards(rows: Iterable[Row], backend: str, top: str | None = None) -> list[Board]:
    """One for each GPU, setting and top that there are rows of; of each cell the newest run of that chain only.

    Without a `top` those count that rungs are pinned to.
    """
    given = [row for row in rows if row.regime == "device" and row.cell.direction == "fwd" and row.run]
    names = {variant.name for variant in registry.get(backend).forward.variants}
    newest: dict[tuple[str, str], dict[Cell, str]] = {}
    for row in given:
        rung = Rung.parse(row.contender)
        if rung is None or rung.backend != backend:
            continue
        climbed = (rung.pin or rung.variant) if top is not None else rung.pin
        if climbed in names and climbed == (top or climbed):
            runs = newest.setdefault((row.environment.gpu, climbed), {})
            runs[row.cell] = max(row.run, runs.get(row.cell, ""))
    return [
        _board(backend, climbed, gpu, [row for row in given if row.environment.gpu == gpu and is_in(runs, row)], cells)
        for (gpu, climbed), runs in newest.items()
        for cells in _by_setting(runs)
    ]


def is_in(runs: Mapping[Cell, str], row: Row) -> bool:
    """Whether a row is of the run that counts in its cell."""
    return runs.get(row.cell) == row.run


def _by_setting(cells: Iterable[Cell]) -> list[tuple[Cell, ...]]:
    """Cells that differ in length only, by length."""
    settings: dict[Cell, list[Cell]] = {}
    for cell in sorted(cells, key=lambda it: (it.head_dim, it.seq)):
        settings.setdefault(replace(cell, seq=1), []).append(cell)
    return [tuple(members) for members in settings.values()]


def _board(backend: str, top: str, gpu: str, rows: Iterable[Row], cells: tuple[Cell, ...]) -> Board:
    found = {(row.cell.seq, row.contender): row for row in rows if row.cell in cells}
    return Board(backend=backend, top=top, cells=cells, rows=found, gpu=gpu)


# ---------------------------------------------------------------- times


def board_tables(board: Board) -> list[Table]:
    """The rungs by length, in both modes."""
    return [summary_table(board, mode) for mode in MODES]


def _modes_text() -> str:
    return " ".join(f"{mode.capitalize()}: {what}." for mode, what in MODES.items())


def ratio(gain: float | None) -> str:
    """A speed-up for a table."""
    return "-" if gain is None else f"{gain:.2f}x"


def percent(gain: float | None) -> str:
    """What is gained over another, in % of that one's speed."""
    return "-" if gain is None else f"{100 * (gain - 1):+.1f} %"


def summary_table(board: Board, mode: str) -> Table:
    """TFLOPS over N, a column a step, beside the peers that ran; last the top's speed-up over SDPA."""
    peers = [name for name in (board.baseline, CUDNN, TILEGYM) if _ran(board, name)]
    names = [board.contender(step, mode) for step in board.steps]
    rows = [
        (
            str(cell.seq),
            *(figure(board.row(cell.seq, name)) for name in (*peers, *names)),
            ratio(board.gain(cell.seq, names[-1], board.baseline)),
            ratio(board.gain(cell.seq, names[-1], names[0])),
        )
        for cell in board.cells
    ]
    return Table(
        title=f"Summary, {mode}, TFLOPS: {board.title}",
        note=f"{mode.capitalize()}: {MODES[mode]}.",
        header=("N", *peers, *board.steps, f"{board.top} over SDPA", f"{board.top} over {board.steps[0]}"),
        rows=tuple(rows),
    )


def _ran(board: Board, name: str) -> bool:
    return any(board.measured(cell.seq, name) is not None for cell in board.cells)


# ---------------------------------------------------------------- compiled


def compiled_table(records: Sequence[Record]) -> Table:
    """Rungs of a chain as they compile for one arch: registers, spills, shared memory, occupancy, code size."""
    rows = [
        (
            record.rung.variant,
            PINNED if record.rung.pin else TUNED,
            ", ".join(map(str, record.seqs)),
            *(_kernel_cells(record) if record.kernel is not None else (record.text, *["-"] * 6)),
        )
        for record in records
    ]
    first = records[0]
    return Table(
        title=f"Compiled for {first.arch}: {first.rung.backend}, {setting_text(first.cell)}",
        note="Nothing here was timed. Spills in bytes a thread, shared memory and code in bytes; "
        f"warps is the share of those that an SM can hold. {_modes_text()} {first.compiler}".strip(),
        header=("step", "mode", "N", "config", "threads", "registers", "spills", "smem", "warps", "code"),
        rows=tuple(rows),
    )


def _kernel_cells(record: Record) -> tuple[str, ...]:
    kernel = record.kernel
    assert kernel is not None
    return (
        record.config,
        str(kernel.threads),
        str(kernel.registers),
        str(kernel.spill_bytes),
        str(kernel.smem_bytes),
        occupancy_text(record),
        str(kernel.cubin_bytes),
    )


def occupancy_text(record: Record) -> str:
    """``19 % (3 blocks, smem)``."""
    kernel = record.kernel
    return "-" if kernel is None else f"{100 * kernel.share:.0f} % ({kernel.blocks}, {kernel.limiter})"


def rate(measured: Measured | None) -> str:
    """TFLOPS, or a dash."""
    return "-" if measured is None else rate_text(measured.tflops)


def rungs_table(backend: str) -> Table:
    """Each offered chain of a backend, first rung to last, with what each adds; from the data, without any result."""
    found = registry.get(backend)
    rows: dict[str, tuple[str, ...]] = {}
    for variant in found.forward.offered:
        for rung in chain_rungs(found, variant.name):
            if not rung.pin:
                it = registry.find_variant(found, rung.variant)
                asked = "by name" if it.only_named else "offered"
                rows.setdefault(it.name, (it.name, it.parent or "-", asked, it.summary))
    return Table(
        title=f"Rungs of {backend}",
        note="",
        header=("rung", "parent", "given", "what it is"),
        rows=tuple(rows.values()),
    )
