"""Sweeps as data: what was tried for one variant in one cell, with its setup; a file of them takes new ones in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.contenders import config_data
from bench.environment import results_root
from bench.matrix import Cell
from bench.results import Environment, read
from bench.tune import Trial

SCHEMA = 1
PREFIX = "tune-"
"""Starts the name of a sweep's file in bench/results/<gpu>."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One candidate: TFLOPS, or why there are none."""

    name: str
    """As the ranking has it: backend, variant and what is not at its default."""
    config: Mapping[str, Any] | None
    is_rule: bool = False
    """Whether it is what the rules chose when it was swept."""
    tflops: float | None = None
    first_tflops: float | None = None
    """Where there were finals: its rate before them, in turns with all candidates."""
    spread: float = 0.0
    prepare_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The candidates of one variant in one cell, and the yardstick that ran in the same turns."""

    backend: str
    variant: str
    cell: Cell
    environment: Environment
    yardstick: str
    yardstick_tflops: float | None
    tried: tuple[Tried, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """What a later sweep replaces."""
        return self.environment.gpu, self.backend, self.variant, self.cell.key


def sweeps_of(backend: str, trials: Sequence[Trial], environment: Environment) -> list[Sweep]:
    """The trials of one cell by variant."""
    (yardstick,) = (trial for trial in trials if not trial.variant)
    return [
        Sweep(
            backend=backend,
            variant=variant,
            cell=yardstick.cell,
            environment=environment,
            yardstick=yardstick.name,
            yardstick_tflops=_short(yardstick.tflops),
            tried=tuple(_tried(trial) for trial in trials if trial.variant == variant),
        )
        for variant in sorted({trial.variant for trial in trials if trial.variant})
    ]


def _tried(trial: Trial) -> Tried:
    return Tried(
        name=trial.name.removesuffix("(rule)").strip(),
        config=config_data(trial.config),
        is_rule=trial.is_rule,
        tflops=_short(trial.tflops),
        first_tflops=_short(trial.first_tflops),
        spread=round(trial.spread, 4),
        prepare_s=round(trial.prepare_s, 1),
        failure=trial.failure.partition("\n")[0],
    )


def _short(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 1)


def recorded() -> list[Path]:
    """The files of sweeps that are committed, of every GPU."""
    return sorted(results_root().glob(f"*/{PREFIX}*.json"))


def merge(sweeps: Sequence[Sweep], path: Path) -> list[Sweep]:
    """Put sweeps into the file at `path`, in place of those of the same GPU, variant and cell; all that it now has."""
    known = {sweep.key: sweep for sweep in load(path)} if path.exists() else {}
    known |= {sweep.key: sweep for sweep in sweeps}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(dumps(list(known.values())))
    partial.replace(path)
    return list(known.values())


def dumps(sweeps: Sequence[Sweep]) -> str:
    """The JSON of a file: a candidate a line, the environments once each."""
    environments: list[Environment] = []
    parts = []
    for sweep in sorted(sweeps, key=_place):
        if sweep.environment not in environments:
            environments.append(sweep.environment)
        head = {
            "backend": sweep.backend,
            "variant": sweep.variant,
            "cell": sweep.cell.as_dict(),
            "environment": environments.index(sweep.environment),
            "yardstick": sweep.yardstick,
            "yardstick_tflops": sweep.yardstick_tflops,
        }
        lines = ",\n   ".join(json.dumps(asdict(tried)) for tried in sweep.tried)
        parts.append(json.dumps(head).removesuffix("}") + ', "tried": [\n   ' + lines + "\n  ]}")
    told = json.dumps({"schema": SCHEMA, "environments": [asdict(it) for it in environments]}, indent=1)
    return told.removesuffix("\n}") + ',\n "sweeps": [\n  ' + ",\n  ".join(parts) + "\n ]\n}\n"


def _place(sweep: Sweep) -> tuple[Any, ...]:
    cell = sweep.cell
    return (sweep.backend, sweep.variant, cell.direction, cell.head_dim, cell.causal, cell.seq, *sweep.key)


def load(path: Path) -> list[Sweep]:
    """The sweeps of a file that `merge` wrote; InputError, naming the file, for another one."""

    def sweeps(data: dict[str, Any]) -> list[Sweep]:
        environments = [Environment(**it) for it in data["environments"]]
        return [_sweep(it, environments) for it in data["sweeps"]]

    return read(path, f"a file of sweeps of schema {SCHEMA} that python -m bench tune wrote", SCHEMA, sweeps)


def _sweep(data: Mapping[str, Any], environments: Sequence[Environment]) -> Sweep:
    parts = {
        "cell": Cell(**data["cell"]),
        "environment": environments[data["environment"]],
        "tried": tuple(Tried(**it) for it in data["tried"]),
    }
    return Sweep(**{**data, **parts})
