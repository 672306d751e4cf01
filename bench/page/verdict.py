"""The first screen: each backend beside the best peer, in each direction and on each GPU, and who passed parity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.decode_cells import DecodeCell
from bench.docs import geometric_mean
from bench.matrix import Cell
from bench.page.sources import Evidence, Source, kind_of
from bench.results import Row, is_ours
from multiattn.plan.backend import BACKENDS

SUITE_OF = {"forward": ("standard", "device"), "backward": ("backward", "device"), "decode": ("decode", "graph")}
"""The suite and regime that speak for a direction; on a machine that ran less, `FLOORS`."""
FLOORS = "floors"
BEST = "best of ours"
Place = tuple[Cell, str]


def best_peers(rows: Iterable[Row]) -> dict[Place, Row]:
    """The fastest of all peers in each cell and regime."""
    found: dict[Place, Row] = {}
    for row in rows:
        place = row.cell, row.regime
        if row.measured is not None and not is_ours(row.contender):
            found[place] = max(found.get(place, row), row, key=lambda it: it.tflops)
    return found


def over_best_peer(rows: Sequence[Row], name_of: Callable[[Row], str]) -> dict[str, dict[Cell, float]]:
    """By name and cell of one regime, TFLOPS of the best row of a name over those of the best peer."""
    peers = best_peers(rows)
    best: dict[str, dict[Cell, float]] = {}
    for row in rows:
        if row.measured is not None and is_ours(row.contender) and (peer := peers.get((row.cell, row.regime))):
            rates = best.setdefault(name_of(row), {})
            rates[row.cell] = max(row.tflops / peer.tflops, rates.get(row.cell, 0.0))
    return best


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A backend over the best peer, cell by cell."""

    name: str
    ratios: Mapping[Cell, float]

    @property
    def mean(self) -> str:
        """The geometric mean, as README writes it."""
        return geometric_mean(list(self.ratios.values()), 2)

    @property
    def least_cell(self) -> Cell:
        """Where it is slowest beside the best peer."""
        return min(self.ratios, key=lambda cell: self.ratios[cell])

    @property
    def least(self) -> str:
        """The least ratio."""
        return f"{self.ratios[self.least_cell]:.2f}"

    @property
    def ahead(self) -> int:
        """The number of cells in which it is at least as fast as the best peer."""
        return sum(it >= 1 for it in self.ratios.values())

    def ticks(self, width: float, lowest: float, highest: float) -> dict[str, list[float]]:
        """Places of the ratios on a logarithmic axis, those below 1 and the others, each once.

        Beyond the ends they stand at the ends.
        """
        span = math.log(highest / lowest)
        found: dict[str, set[float]] = {"behind": set(), "ahead": set()}
        for ratio in self.ratios.values():
            place = math.log(min(max(ratio, lowest), highest) / lowest) / span
            found["behind" if ratio < 1 else "ahead"].add(round(width * place, 1))
        return {side: sorted(places) for side, places in found.items() if places}


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """The standings of one direction on one GPU."""

    kind: str
    gpu: str
    suite: str
    cells: int
    standings: tuple[Standing, ...]

    @property
    def best(self) -> Standing:
        """The fastest of ours in each cell."""
        return self.standings[0]


def board(source: Source, kind: str) -> Board | None:
    """The standings of a direction in a source; None where nothing of it was measured beside a peer."""
    regime = SUITE_OF[kind][1]
    rows = [row for row in source.timed if kind_of(row.cell) == kind and row.regime == regime and _counts(row.cell)]
    backends = over_best_peer(rows, lambda row: row.contender)
    best = over_best_peer(rows, lambda _: BEST)
    found = {**best, **{name: backends[name] for name in BACKENDS if name in backends}}
    if not found:
        return None
    standings = tuple(Standing(name=name, ratios=ratios) for name, ratios in found.items())
    return Board(kind=kind, gpu=source.label, suite=source.suite, cells=len(best[BEST]), standings=standings)


def _counts(cell: Cell) -> bool:
    """Tell whether a cell counts: in decode those of one query a sequence, as in docs/decode.md."""
    return not isinstance(cell, DecodeCell) or cell.queries == 1


def boards(evidence: Evidence) -> dict[str, list[Board]]:
    """The standings by direction, forward first."""
    found: dict[str, list[Board]] = {}
    for kind, (suite, _) in SUITE_OF.items():
        named = [it for it in evidence.sources if it.suite in ((suite, FLOORS) if it.here else (suite,))]
        made = [it for it in (board(source, kind) for source in named) if it is not None]
        if made:
            found[kind] = made
    return found


def machine_line(evidence: Evidence) -> str:
    """The machine that the page is written on, and whose speeds it shows."""
    machine = evidence.machine
    recorded = list(dict.fromkeys(it.label for it in evidence.sources if it.timed and not it.here))
    timed_here = any(it.timed for it in evidence.sources if it.here)
    where = f"recorded on {_listed(recorded)}" if recorded else "not measured yet"
    if machine.gpu == "none":
        return f"No GPU here: speeds below were {where}."
    if timed_here:
        return f"{machine.gpu} ({machine.arch}), timed below; other speeds were {where}."
    return f"{machine.gpu} ({machine.arch}); speeds below were {where}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def parity_lines(evidence: Evidence) -> list[tuple[bool, str]]:
    """Did it pass, and where and how much of it; of this machine first."""
    found = []
    for it in sorted(evidence.parities, key=lambda it: not it.here):
        _, _, told = str(it.data.get("verdict", "")).partition(": ")
        found.append((it.passed, f"Parity {'passed' if it.passed else 'FAILED'} on {it.name}: {told}"))
    return found


def text(evidence: Evidence) -> str:
    """The verdict for a terminal."""
    lines = [machine_line(evidence), *(told for _, told in parity_lines(evidence))]
    for kind, its in boards(evidence).items():
        for it in its:
            told = ", ".join(f"{of.name} {of.mean} (least {of.least})" for of in it.standings)
            lines.append(f"{kind.capitalize()}, {it.gpu}, {it.cells} cells, times the best peer: {told}")
    return "\n".join(lines)
