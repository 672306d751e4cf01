"""The languages of the kernels. Triton has two, `triton.language` and Gluon; only the variant tells them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.matrix import Cell
from bench.results import Row, load, one_run
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name
from multiattn.plan.backend import Direction, Plan, Variant, plan_variant
from multiattn.problem import Problem
from multiattn.triton.gluon_configs import VARIANT as GLUON


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """One way of writing a kernel: some of a backend's variants, which are every variant but for Triton's two."""

    title: str
    backend: str
    only: tuple[str, ...] = ()
    """The variants in it; empty: all but `others`."""
    others: tuple[str, ...] = ()

    def has(self, backend: str, variant: str) -> bool:
        """Whether a variant is written in it."""
        return backend == self.backend and variant not in self.others and (not self.only or variant in self.only)

    def offered(self, direction: Direction) -> list[Variant]:
        """Its variants that a caller may get unasked, best first."""
        variants = registry.get(self.backend).op(direction).offered
        return [variant for variant in variants if self.has(self.backend, variant.name)]

    def plan(self, problem: Problem, arch: str, direction: Direction) -> Plan | None:
        """What it would run, asking only data; None where it has nothing."""
        for variant in self.offered(direction):
            backend = registry.get(self.backend)
            plan = plan_variant(backend, variant, problem, by_name(arch), direction=direction, named=False)
            if isinstance(plan, Plan):
                return plan
        return None


CUTILE = Language(title="cuTile", backend="cutile")
TL = Language(title="plain Triton", backend="triton", others=(GLUON,))
GLUON_TRITON = Language(title="Gluon", backend="triton", only=(GLUON,))
CUDA = Language(title="CUDA C++", backend="cuda")
LANGUAGES = (CUTILE, TL, GLUON_TRITON, CUDA)
PEERS = ("sdpa-cudnn", "fa4")
"""The peers that ours are compared with: the fastest two."""
REGIME = "device"
"""The regime whose timings are compared."""


def language_of(backend: str, variant: str) -> Language | None:
    """Whose a variant is."""
    return next((it for it in LANGUAGES if it.has(backend, variant)), None)


def language_of_row(row: Row) -> Language | None:
    """That of the Plan which ran; where none came about, that of the contender, unless its backend has several."""
    backend, _, variant = row.contender.partition("/")
    plan: Mapping[str, Any] | None = row.plan
    if plan is not None or variant:
        return language_of(backend, plan["variant"] if plan is not None else variant)
    mine = [it for it in LANGUAGES if it.backend == backend]
    return mine[0] if len(mine) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """What took turns in one cell: of each language its fastest variant, by title, and the peers."""

    ours: Mapping[str, Row]
    peers: Mapping[str, Row]

    def ratio(self, title: str) -> float | None:
        """TFLOPS of a language over those of the fastest peer; None where one of them has none."""
        ours = self.ours.get(title)
        theirs = [row.measured.tflops for row in self.peers.values() if row.measured is not None]
        return ours.measured.tflops / max(theirs) if ours is not None and ours.measured is not None and theirs else None


NO_TURNS = Turns(ours={}, peers={})


def turns(path: Path, cells: Sequence[Cell]) -> dict[Cell, Turns]:
    """The cells of a suite that a results file has, each in one run."""
    wanted = set(cells)
    rows = [row for row in load(path) if row.regime == REGIME and row.cell in wanted] if path.exists() else []
    found: dict[Cell, Turns] = {}
    for cell, members in groupby(sorted(one_run(rows), key=lambda row: row.cell.key), lambda row: row.cell):
        ours: dict[str, Row] = {}
        peers: dict[str, Row] = {}
        for row in members:
            language = language_of_row(row)
            if row.contender in PEERS:
                peers[row.contender] = row
            elif language is not None and (language.title not in ours or rate(row) > rate(ours[language.title])):
                ours[language.title] = row
        found[cell] = Turns(ours=ours, peers=peers)
    return found


def rate(row: Row) -> float:
    """TFLOPS; 0 where nothing was timed."""
    return row.measured.tflops if row.measured is not None else 0.0
