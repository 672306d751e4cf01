"""Everything that a page is made of: results by GPU and suite, parity, compiled kernels, models, calls on the host."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import host, models, record
from bench.decode_cells import DecodeCell
from bench.matrix import SUITES, Cell
from bench.results import RESULTS, Environment, Row, environment, load, one_run, short_name
from multiattn.inspect.build import Compilation

SUITE_NAMES = (*SUITES, "decode")
"""Suites that the page has plots of; ladders have a page of their own, docs/ladder.md."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The rows of one suite on one GPU: one run of each cell."""

    gpu: str
    suite: str
    rows: tuple[Row, ...]
    here: bool = False
    """True if this machine made them just now."""

    @property
    def label(self) -> str:
        """The GPU's short name."""
        return short_name(self.gpu) + (", this machine" if self.here else "")

    @property
    def timed(self) -> list[Row]:
        """The rows that have a time."""
        return [row for row in self.rows if row.measured is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """One parity report, as its JSON has it; `name` says whose."""

    name: str
    data: Mapping[str, Any]
    here: bool = False

    @property
    def passed(self) -> bool:
        """True where nothing failed."""
        return not self.data.get("failures") and str(self.data.get("verdict", "")).startswith("Passed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All of it, and the machine that the page is written on."""

    machine: Environment
    sources: tuple[Source, ...]
    parities: tuple[Parity, ...] = ()
    compiled: Mapping[str, record.Record] = field(default_factory=dict)
    """The record of each arch."""
    compilations: tuple[Compilation, ...] = ()
    """The requests that this machine compiled just now."""
    hosts: tuple[host.HostTable, ...] = ()
    models: tuple[models.ModelRun, ...] = ()


def kind_of(cell: Cell) -> str:
    """The part of the page that a cell is in: ``forward``, ``backward`` or ``decode``."""
    if isinstance(cell, DecodeCell):
        return "decode"
    return "forward" if cell.direction == "fwd" else "backward"


def read_sources(paths: Iterable[Path], *, here: bool = False) -> list[Source]:
    """Results files by GPU and suite, the newest GPU first; files of one GPU and suite are taken together."""
    found: dict[tuple[str, str], list[Row]] = {}
    for path in paths:
        suite = f"{path.parent.name}/{path.stem}" if path.parent.name == "peers" else path.stem
        for row in load(path):
            found.setdefault((row.environment.gpu, suite), []).append(row)
    made = [Source(gpu=gpu, suite=suite, rows=tuple(one_run(its)), here=here) for (gpu, suite), its in found.items()]
    return sorted(made, key=_place)


def _place(source: Source) -> tuple[bool, str, int]:
    """GPUs by their names from the last, suites as they are listed, those beside more peers last."""
    names = [*SUITE_NAMES]
    at = names.index(source.suite) if source.suite in names else len(names)
    return not source.here, "".join(chr(0x10FFFF - ord(it)) for it in source.gpu), at


def recorded_files(results: Path = RESULTS) -> list[Path]:
    """Every file of a suite under bench/results."""
    found = [*results.glob("*/*.json"), *results.glob("*/peers/*.json")]
    return sorted(path for path in found if path.stem in SUITE_NAMES)


def read_parity(path: Path, name: str, *, here: bool = False) -> list[Parity]:
    """The reports of a parity.json: one, or several by name; none where there is no file."""
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    its = [data] if "verdict" in data else list(data.values())
    return [Parity(name=name, data=it, here=here) for it in its]


def recorded(results: Path = RESULTS) -> Evidence:
    """All that bench/results and bench/compiled have."""
    folders = sorted((path for path in results.glob("*") if path.is_dir()), reverse=True)
    return Evidence(
        machine=environment(),
        sources=tuple(read_sources(recorded_files(results))),
        parities=tuple(it for folder in folders for it in read_parity(folder / "parity.json", folder.name.upper())),
        compiled=record.load_all(),
        hosts=tuple(host.load(path) for folder in folders if (path := folder / "host.json").exists()),
        models=tuple(it for folder in folders if (path := folder / "models.json").exists() for it in models.load(path)),
    )


def with_this_machine(evidence: Evidence, floors: Path, parity: Path, compiled: Sequence[Compilation]) -> Evidence:
    """The findings of a demo on this machine, before all that is recorded."""
    return replace(
        evidence,
        sources=(*read_sources([floors], here=True), *evidence.sources),
        parities=(*read_parity(parity / "parity.json", "this machine", here=True), *evidence.parities),
        compilations=tuple(compiled),
    )


def of_files(paths: Sequence[Path]) -> Evidence:
    """Some results files, and nothing else."""
    return Evidence(machine=environment(), sources=tuple(read_sources(paths)))
