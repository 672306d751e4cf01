"""``python -m bench compile-times``: how long each language's compiler takes, for bench/results/compiled/seconds.json.

The records of what compilers make (bench/expected) leave seconds out, as those differ from run to run. Here they are
of one run on one machine: what the processor spends on a compilation, the compiler's child processes included, which
hardly depends on what else the machine does. Of two compilations in one process the faster counts, so that nothing is
imported in it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.environment import environment, results_root
from bench.errors import InputError
from bench.languages import LANGUAGES
from bench.results import read
from bench.rule_table import compiler
from multiattn import backend as registry
from multiattn.backend import BACKENDS, DIRECTIONS, Direction, Plan
from multiattn.targets.cells import HEAD_DIMS, MASKS, Cell
from multiattn.targets.facts import read_kernel
from multiattn.targets.pool import run_isolated
from multiattn.toolchain import find_cuobjdump

SCHEMA = 2
ARCHES = ("sm80", "sm90", "sm100")
"""One of each generation of tensor cores: mma.sync, wgmma, tcgen05."""
ROUNDS = 2
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One launch as it was compiled: all of its kernels."""

    backend: str
    variant: str
    direction: Direction
    arch: str
    head_dim: int
    mask: str
    config: str
    seconds: float
    """Of the processor, for all kernels together, from source to cubin."""
    features: tuple[str, ...]
    """What the kernel with most of the work multiplies and moves data with: `Facts.features`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a file holds."""

    timed: tuple[Timed, ...]
    setup: str
    """Machine, compilers, commit and date."""


def record_path(results: Path) -> Path:
    """Where the record is, and is committed."""
    return results / "compiled" / "seconds.json"


def plans() -> Iterator[Plan]:
    """What each language would run of the usual cells on each of `ARCHES`, where it has something."""
    for language in LANGUAGES:
        for direction in DIRECTIONS:
            for arch in ARCHES:
                for head_dim in HEAD_DIMS:
                    for mask in MASKS:
                        cell = Cell(backend=language.backend, arch=arch, head_dim=head_dim, mask=mask)
                        plan = language.plan(cell.problem, arch, direction)
                        if plan is not None:
                            yield plan


def time_plan(plan: Plan) -> Timed:
    """Compile a plan here, afresh and more than once. The compiler's own exception passes through."""
    seconds = []
    for _ in range(ROUNDS):
        begin = processor_seconds()
        kernels = registry.get(plan.backend).op(plan.direction).export(plan, ())
        seconds.append(processor_seconds() - begin)
    facts = [read_kernel(kernel, plan) for kernel in kernels]
    main = max(facts, key=lambda it: (it.hot.tensor, it.code_bytes))
    return Timed(
        backend=plan.backend,
        variant=plan.variant,
        direction=plan.direction,
        arch=plan.arch.name,
        head_dim=plan.problem.head_dim,
        mask="causal" if plan.problem.causal else "full",
        config=str(plan.config),
        seconds=round(min(seconds), 2),
        features=main.features,
    )


def processor_seconds() -> float:
    """That this process and those of its children which have ended took so far."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def measure(wanted: Sequence[Plan], say: Callable[[str], None]) -> list[Timed]:
    """Compile them one after the other, and say each. InputError where one fails: half a record compares nothing."""
    timed = []
    for done, outcome in enumerate(run_isolated(time_plan, wanted, jobs=1, timeout_s=TIMEOUT_S), 1):
        if outcome.result is None:
            raise InputError(f"{outcome.item}: {outcome.error}")
        timed.append(outcome.result)
        say(f"[{done}/{len(wanted)}] {outcome.item}: {outcome.result.seconds:.2f} s")
    return timed


def record(_: Any) -> int:
    """Compile what each language runs, one after the other, and record how long it takes."""
    if find_cuobjdump() is None:
        raise InputError("there is no cuobjdump to read cubins with: pip install nvidia-cuda-cuobjdump")
    timed = measure(list(plans()), lambda text: print(text, flush=True))
    save(timed, record_path(results_root()))
    return 0


def save(timed: Sequence[Timed], path: Path) -> None:
    """Write a file, one line a launch."""
    head = {"schema": SCHEMA, "command": "python -m bench compile-times", "setup": setup()}
    lines = ",\n  ".join(json.dumps(asdict(it)) for it in timed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head, indent=1).removesuffix("\n}") + f',\n "timed": [\n  {lines}\n ]\n}}\n')


def setup() -> str:
    """The processor, and commit, date and compilers as `environment` has them."""
    here = environment()
    compilers = "; ".join(compiler(name) for name in BACKENDS)
    return f"{processor()}, {os.cpu_count()} cores, commit {here.commit}, {here.date}: {compilers}"


def processor() -> str:
    """What the system calls it."""
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def load(path: Path) -> Record:
    """What `save` wrote; InputError for another file."""

    def parse(data: dict[str, Any]) -> Record:
        timed = (Timed(**{**it, "features": tuple(it["features"])}) for it in data["timed"])
        return Record(timed=tuple(timed), setup=str(data["setup"]))

    return read(path, f"a table of schema {SCHEMA} that python -m bench compile-times wrote", SCHEMA, parse)
