"""The first screen: each backend beside the best peer, in each direction and on each GPU, and who passed parity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.comparison import AUTO, Ratio, mean_of, over_best_peer
from bench.page.sources import Evidence, Source, kind_of

SUITE_OF = {"forward": ("standard", "device"), "backward": ("backward", "device"), "decode": ("decode", "graph")}
"""The suite and regime that speak for a direction; `FLOORS` for this machine, and for a GPU that has nothing else."""
FLOORS = "floors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A backend, or ``auto``, over the best peer, cell by cell."""

    name: str
    ratios: Sequence[Ratio]

    @property
    def mean(self) -> str:
        """The geometric mean, as README writes it."""
        return f"{mean_of(self.ratios):.2f}"

    @property
    def least_ratio(self) -> Ratio:
        """Where it is slowest beside the best peer."""
        return min(self.ratios, key=lambda it: it.value)

    @property
    def least(self) -> str:
        """The least ratio; of three digits, as 0.998 is not ahead."""
        return f"{self.least_ratio.value:.3f}"

    @property
    def ahead(self) -> int:
        """The number of cells in which it is at least as fast as the best peer."""
        return sum(it.value >= 1 for it in self.ratios)

    def ticks(self, width: float, lowest: float, highest: float) -> dict[str, list[float]]:
        """Places of the ratios on a logarithmic axis, those below 1 and the others, each once.

        Beyond the ends they stand at the ends.
        """
        span = math.log(highest / lowest)
        found: dict[str, set[float]] = {"behind": set(), "ahead": set()}
        for ratio in (it.value for it in self.ratios):
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
    def shown(self) -> Standing:
        """The standing of what a call runs that names no backend, or of the best where that was not timed."""
        return max(self.standings, key=lambda it: (it.name == AUTO, float(it.mean)))


def board(source: Source, kind: str) -> Board | None:
    """The standings of a direction in a source, as README has them; None where none was measured beside a peer."""
    regime = SUITE_OF[kind][1]
    rows = [row for row in source.timed if kind_of(row.cell) == kind and row.regime == regime]
    found = over_best_peer(rows)
    standings = tuple(Standing(name=name, ratios=ratios) for name, ratios in found.items() if ratios)
    cells = len({it.cell for its in found.values() for it in its})
    return Board(kind=kind, gpu=source.label, suite=source.suite, cells=cells, standings=standings) if cells else None


def boards(evidence: Evidence) -> dict[str, list[Board]]:
    """The standings by direction, forward first."""
    found: dict[str, list[Board]] = {}
    for kind, (suite, _) in SUITE_OF.items():
        whole = {it.gpu for it in evidence.sources if it.suite == suite}
        floors = [it for it in evidence.sources if it.suite == FLOORS and (it.here or it.gpu not in whole)]
        named = [it for it in evidence.sources if it.suite == suite or it in floors]
        made = [it for it in (board(source, kind) for source in named) if it is not None]
        if made:
            found[kind] = made
    return found


def unmeasured(found: Mapping[str, Sequence[Board]]) -> dict[str, list[str]]:
    """The GPUs of other directions that a direction has no board of."""
    gpus = dict.fromkeys(it.gpu for its in found.values() for it in its)
    return {kind: [gpu for gpu in gpus if gpu not in {it.gpu for it in its}] for kind, its in found.items()}


def machine_line(evidence: Evidence) -> str:
    """The machine that the page is written on, and whose speeds it shows."""
    machine = evidence.machine
    recorded = list(dict.fromkeys(it.label for it in evidence.sources if it.timed and not it.here))
    where = f"recorded on {' and '.join(recorded)}" if recorded else "not measured yet"
    if machine.gpu == "none":
        return f"No GPU here: speeds below were {where}."
    others = ", timed below; other" if any(it.timed for it in evidence.sources if it.here) else ";"
    return f"{machine.gpu} ({machine.arch}){others} speeds below were {where}."


WORDS = {
    "cell": "One problem on one GPU: head dim, length, mask, heads, batch, dtype and direction.",
    "contender": "Whoever is timed in a cell: our backends and variants, and peers.",
    "peer": "Somebody else's attention, timed in turns with ours. The best peer is the fastest one of the cell.",
    "held out": "Cells that no tile size was tuned on. They show whether a choice holds for other shapes.",
    "auto": "What a call runs that names no backend.",
    "back to back": "Launches queued behind each other: the device never waits for the host.",
    "roofline": "The least time by the GPU's stated rates of tensor cores, exponentials and memory.",
    "stated bandwidth": "The memory's rate in the data sheet.",
    "a copy's rate": "That of a copy in the same turns. It is no bound: one that only reads can be faster.",
    "budget": "The error that a case allows, derived from that of plain attention in the same dtype.",
}
"""A glossary of the page."""


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
