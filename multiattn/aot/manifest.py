"""The manifest of a folder of kernels: one process writes it at a time, and readers check what they take from it.

Each entry carries a digest of its cubin, and one of the launches that multiattn makes of it (`multiattn.aot.binding`).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import filelock

from multiattn.layout import Shape
from multiattn.operands import ScoreSpec
from multiattn.plan import abi
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name
from multiattn.plan.backend import Plan, find_variant, plan_variant
from multiattn.plan.records import config_of, record_of, value_of
from multiattn.problem import Problem
from multiattn.score.serial import dumps, loads

SCHEMA = 5
"""Another number is another format."""

MANIFEST = "manifest.json"

_LOCK = "manifest.lock"


# ---------------------------------------------------------------- the file


def read(folder: Path) -> list[dict[str, Any]]:
    """Read the entries; ValueError for a manifest that is not there, is no JSON or has another schema."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; allowed a folder that `python -m multiattn compile` wrote") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({error})") from None
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(f"{path}: schema: got {schema!r}; allowed {SCHEMA}: emit into a new folder")
    entries = manifest.get("kernels")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries
    ):
        raise ValueError(f"{path}: kernels: got {type(entries).__name__}; allowed a list of records with names")
    return entries


def update(folder: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    """Put entries into a folder's manifest, over those of the same names, and return its path.

    Threads and processes take turns, and a reader sees all of an update or nothing. ValueError for a manifest that
    cannot be read.
    """
    path = folder / MANIFEST
    draft = folder / f"{MANIFEST}.{os.getpid()}.{threading.get_ident()}.new"
    names = {entry["name"] for entry in entries}
    with filelock.FileLock(folder / _LOCK):
        others = [entry for entry in read(folder) if entry["name"] not in names] if path.exists() else []
        try:
            draft.write_text(json.dumps({"schema": SCHEMA, "kernels": [*others, *entries]}, indent=2) + "\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return path


# ---------------------------------------------------------------- what an entry says


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a kernel is started, and what its code is specialised on."""

    image: abi.Image
    constants: Mapping[str, str]
    sha256: str
    """The digest of its launches (`binding.launches_digest`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The modification of scores that a kernel's code is of; what its tensors look like may differ in a call."""

    program: str
    """As `multiattn.score.serial` writes it."""
    sha256: str
    """`ScoreProgram.digest`."""
    scalars: tuple[float, ...]
    shapes: tuple[Shape, ...]
    strides: tuple[Shape, ...]

    @classmethod
    def of(cls, spec: ScoreSpec) -> Score:
        """The record of a forward's: it knows no gradients."""
        program = spec.program
        return cls(
            program=dumps(program),
            sha256=program.digest,
            scalars=spec.scalars,
            shapes=spec.shapes,
            strides=spec.strides,
        )

    @property
    def spec(self) -> ScoreSpec:
        """The modification that `of` was given; ValueError for another program than was written."""
        program = loads(self.program)
        if program.digest != self.sha256:
            raise ValueError(f"problem: score: sha256: got {program.digest}; allowed {self.sha256}")
        return ScoreSpec(program, self.scalars, self.shapes, self.strides)


def problem_record(problem: Problem) -> dict[str, Any]:
    """A Problem as an entry has it."""
    score = None if problem.score is None else asdict(Score.of(problem.score))
    return asdict(replace(problem, score=None)) | {"score": score}


def _problem_of(value: Any) -> Problem:
    score = value.get("score") if isinstance(value, dict) else None
    if score is None:
        return record_of(Problem, value, "problem")
    plain = record_of(Problem, value | {"score": None}, "problem")
    return replace(plain, score=record_of(Score, score, "problem: score").spec)


def plan_of(entry: Mapping[str, Any]) -> Plan:
    """The Plan that a forward kernel was compiled for; ValueError for one that cannot be."""
    if entry["backend"] not in registry.BACKENDS:
        raise ValueError(f"backend: got {entry['backend']!r}; allowed {', '.join(registry.BACKENDS)}")
    arch = by_name(value_of(str, entry["arch"], "arch"))
    if not arch.is_gpu:
        raise ValueError(f"arch: got {arch.name}; allowed a GPU's")
    variant = find_variant(registry.get(entry["backend"]), value_of(str, entry["variant"], "variant"))
    problem = _problem_of(entry["problem"])
    plan = plan_variant(registry.get(entry["backend"]), variant, problem, arch, config_of(entry["config"], variant))
    if not isinstance(plan, Plan):
        raise ValueError("; ".join(map(str, plan)))
    return plan
