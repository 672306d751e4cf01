"""Rules for the package from what users measured on their GPUs, as ``multiattn tune --export`` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from bench.matrix import InputError
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name
from multiattn.plan.backend import Direction, Plan, find_variant, plan_variant
from multiattn.plan.config import length_of
from multiattn.plan.records import config_of
from multiattn.plan.tuning import NEAR_LENGTH, TimedWay, TunedBackend, TunedCell, Tuning, tuning_of
from multiattn.problem import Problem


def print_lines(path: Path) -> int:
    """Check a file and print a rule for each config that was better than the bundled one; 1 where none was.

    Raises InputError for a file that is none of `multiattn tune --export`.
    """
    try:
        tuning = tuning_of(json.loads(path.read_text()))
    except ValueError as error:
        raise InputError(f"--import: {path}: {error}") from None
    found = list(rules_of(tuning))
    rules = sum(it.is_rule for it in found)
    print(f"{tuning.gpu} ({tuning.arch}), multiattn {tuning.multiattn}: {len(tuning.cells)} cells, {rules} rules")
    for it in found:
        print(f"\n{it.place}\n{it.text}")
    return 0 if rules else 1


class Line(NamedTuple):
    """A rule and its place, or why a config is none."""

    place: str
    text: str
    is_rule: bool


def rules_of(tuning: Tuning) -> Iterator[Line]:
    """A line for each config that was better than the bundled choice: a rule, if it can be planned on the arch."""
    for cell in tuning.cells:
        problem = cell.sizes.problem
        for name, own in cell.backends.items():
            for way in own.ways[:1]:
                if way.config is None:
                    continue
                backend = registry.get(name)
                variant = find_variant(backend, way.variant, cell.direction)
                config = config_of(way.config, variant)
                plan = plan_variant(backend, variant, problem, by_name(tuning.arch), config, direction=cell.direction)
                if isinstance(plan, Plan):
                    rule = json.dumps(_rule(tuning, cell, name, way, own, problem))
                    yield Line(_place(name, way.variant, cell.direction), rule, is_rule=True)
                else:
                    told = f"no rule, {name}/{way.variant} {config} does not fit"
                    yield Line(told, "; ".join(map(str, plan)), is_rule=False)


def _place(backend: str, variant: str, direction: Direction) -> str:
    """The file that has the rules of a variant: tuned.json has those of some forward ones."""
    rows = json.loads(resources.files("multiattn.plan").joinpath("tuned.json").read_text())
    if direction == "forward" and any((row["backend"], row["variant"]) == (backend, variant) for row in rows):
        return "multiattn/plan/tuned.json:"
    return f"multiattn/{backend}/rules/, as a Rule of {variant} {direction}:"


def _rule(
    tuning: Tuning, cell: TunedCell, backend: str, way: TimedWay, own: TunedBackend, problem: Problem
) -> dict[str, Any]:
    length = length_of(problem)
    bundled = ", ".join(f"bundled {it.variant} {it.shown} {it.rate}" for it in own.bundled)
    tools = ", ".join(f"{name} {version}" for name, version in cell.versions.items() if name not in ("python", "torch"))
    width, width_v = problem.width, problem.head_dim_v
    return {
        "backend": backend,
        "variant": way.variant,
        "arches": [tuning.arch],
        "head_dim_min": width,
        "head_dim_max": width,
        **({"head_dim_v_max": width_v} if width_v < width else {}),
        "banded": problem.is_banded,
        "dtype": problem.dtype,
        "seq_min": round(length / NEAR_LENGTH),
        "seq_max": round(length * NEAR_LENGTH),
        "config": way.config,
        "why": f"{tuning.gpu}, {cell.date}, {tools}, {cell.sizes} {cell.direction}: {way.rate} TFLOPS"
        + (f", {bundled}" if bundled else ""),
    }
