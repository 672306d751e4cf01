"""What a training user asks of results beside TFLOPS: the best peer, the cost of determinism, the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tabulate import tabulate

from bench.flops import rate_text
from bench.matrix import Cell
from bench.results import Measured, Row, is_ours, one_run
from parity.report import Table

ByName = dict[str, Row]
"""The measured rows of one cell, by contender."""


def table_text(table: Table, form: str) -> str:
    """A table as tabulate writes it: ``simple`` or ``github``."""
    return tabulate(table.rows, headers=table.header, tablefmt=form, disable_numparse=True)


def tables(rows: Sequence[Row]) -> tuple[Table, ...]:
    """Those that the measured backward rows (device regime) fill, of each GPU; none where there is no such row."""
    gpus: dict[str, dict[Cell, ByName]] = {}
    for row in one_run(rows):
        if row.measured is not None and row.regime == "device" and row.cell.direction != "fwd":
            gpus.setdefault(row.environment.gpu, {}).setdefault(row.cell, {})[row.contender] = row
    makers = ratio_table, determinism_table, memory_table
    made = ((gpu, make(cells)) for gpu, cells in gpus.items() for make in makers)
    return tuple(replace(table, title=f"{table.title}, {gpu}") for gpu, table in made if table.rows)


def best_peer(found: ByName) -> Row | None:
    """The fastest of the peers that ran, nothing host-bound; None where none did."""
    peers = [row for name, row in found.items() if not is_ours(name) and not _measured(row).host_bound]
    return min(peers, key=lambda row: _measured(row).time_ms, default=None)


def share(row: Row, peer: Row) -> float:
    """TFLOPS of a row over those of a peer in the same cell."""
    return _measured(peer).time_ms / _measured(row).time_ms


def ratio_table(cells: dict[Cell, ByName]) -> Table:
    """Ours over the fastest peer of each cell."""
    names = _names(cells, is_ours)
    rows = []
    for cell, found in cells.items():
        peer = best_peer(found)
        if peer is not None and any(name in found for name in names):
            best = f"{peer.contender} {rate_text(_measured(peer).tflops)}"
            ratios = (f"{share(found[name], peer):.2f}" if name in found else "-" for name in names)
            rows.append((*_place(cell), best, *ratios))
    return Table(
        title="Backward against the best peer",
        note="TFLOPS over those of the fastest peer in the same cell and run.",
        header=(*_PLACE, "best peer, TFLOPS", *names),
        rows=tuple(rows),
    )


def determinism_table(cells: dict[Cell, ByName]) -> Table:
    """Each backend's choice beside another variant of it, of which one is deterministic and one is not."""
    pairs = [(name.partition("/")[0], name) for name in _names(cells, lambda name: is_ours(name) and "/" in name)]
    pairs = [
        (best, other)
        for best, other in pairs
        if any(_cost(found.get(best), found.get(other)) != "-" for found in cells.values())
    ]
    rows = []
    for cell, found in cells.items():
        costs = [_cost(found.get(best), found.get(other)) for best, other in pairs]
        if any(cost != "-" for cost in costs):
            rows.append((*_place(cell), *costs))
    return Table(
        title="The cost of determinism: deterministic vs atomic",
        note="TFLOPS of the atomic variant, of the deterministic one, and the time that this one takes more; "
        "`the choice` where the backend itself chooses the deterministic one.",
        header=(*_PLACE, *(other for _, other in pairs)),
        rows=tuple(rows),
    )


def _is_steady(row: Row | None) -> bool:
    return row is not None and row.plan is not None and bool(row.plan.get("deterministic"))


def _cost(best: Row | None, other: Row | None) -> str:
    if best is None or other is None or not (_is_steady(best) or _is_steady(other)):
        return "-"
    if _is_steady(best) and _is_steady(other):
        return f"{rate_text(_measured(best).tflops)}, deterministic anyway"
    fast, steady = (other, best) if _is_steady(best) else (best, other)
    more = _measured(steady).time_ms / _measured(fast).time_ms - 1
    cost = f"{rate_text(_measured(fast).tflops)} > {rate_text(_measured(steady).tflops)} ({100 * more:+.0f} %)"
    return f"{cost}, the choice" if steady is best else cost


def memory_table(cells: dict[Cell, ByName]) -> Table:
    """Peak bytes that one launch takes beside inputs and outputs, and the workspace that our Plans tell beforehand."""

    def is_counted(name: str) -> bool:
        rows = (found[name] for found in cells.values() if name in found)
        return any(_measured(row).peak_extra_bytes is not None for row in rows)

    names = _names(cells, is_counted)
    rows = []
    for cell, found in cells.items():
        taken = [_taken(found.get(name)) for name in names]
        if any(it != "-" for it in taken):
            rows.append((*_place(cell), *taken))
    return Table(
        title="Memory of a backward",
        note="MiB at the peak of one launch beside inputs and outputs; in brackets the workspace that the Plan tells.",
        header=(*_PLACE, *names),
        rows=tuple(rows),
    )


def _taken(row: Row | None) -> str:
    if row is None or _measured(row).peak_extra_bytes is None:
        return "-"
    taken = mebibytes(_measured(row).peak_extra_bytes or 0)
    told = row.plan.get("workspace_bytes") if row.plan is not None else None
    return taken if told is None else f"{taken} ({mebibytes(told)})"


def memory_summary(rows: Sequence[Row]) -> str:
    """One line: for each of ours the largest share of SDPA flash's extra memory in any cell; empty if uncounted."""
    found = [row for row in one_run(rows) if row.regime == "device" and row.cell.direction == "bwd" and row.measured]
    taken = {(row.cell, row.contender): _measured(row).peak_extra_bytes for row in found}
    worst: dict[str, float] = {}
    for (cell, name), size in taken.items():
        bar = taken.get((cell, "sdpa-flash"))
        if is_ours(name) and size is not None and bar:
            worst[name] = max(size / bar, worst.get(name, 0.0))
    if not worst:
        return ""
    shares = ", ".join(f"{name} {ratio:.2f}" for name, ratio in worst.items())
    return f"Device memory of a backward beside inputs and outputs, over SDPA flash's, in the worst cell: {shares}."


def mebibytes(size: int) -> str:
    """MiB, to a tenth."""
    return f"{size / 2**20:.1f}"


_PLACE = ("direction", "D", "mask", "N")


def _place(cell: Cell) -> tuple[str, ...]:
    return cell.direction, str(cell.head_dim), cell.mask, str(cell.seq)


def _names(cells: dict[Cell, ByName], chosen: Callable[[str], bool]) -> list[str]:
    return [name for name in dict.fromkeys(name for found in cells.values() for name in found) if chosen(name)]


def _measured(row: Row) -> Measured:
    assert row.measured is not None
    return row.measured
