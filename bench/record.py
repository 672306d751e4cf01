"""``python -m bench record``: one file per arch that says what the compilers make of every rule, and what changed."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bench.arguments import add_jobs
from bench.environment import workplace
from bench.errors import InputError
from bench.record_cases import Case, cases, dead_rules
from bench.record_kernels import Job, Kernel, compile_job, promised_without_spills
from bench.results import read
from multiattn.inspect.mix import GENERATIONS
from multiattn.inspect.pool import run_isolated
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS
from multiattn.plan.backend import BACKENDS, Plan
from multiattn.plan.toolchain import find_cuobjdump

SCHEMA = 1
TIMEOUT_S = 900.0
_TOOLS = ("triton", "cuda-tile", "tileiras", "nvidia-cuda-nvrtc")
_TOOL = re.compile(r"([\w-]+) (\d+(?:\.\d+)*)")

Kernels = tuple[Kernel, ...]
Key = tuple[str, ...]
Age = Literal["same", "newer", "older"]
"""The compiler here beside the one on record; a different one that is not older counts as newer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The record of one arch: its compilers by backend, and the kernels of each case."""

    compilers: Mapping[str, str]
    rows: Mapping[Key, Kernels]

    def kernels_of(self, plan: Plan) -> Kernels:
        """The kernels of a Plan; none where the record has no such rule."""
        return self.rows.get(Case(direction=plan.direction, plan=plan).key, ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One difference from the record: ``regression``, ``changed``, ``missing``, ``failed``, or only a ``note``."""

    kind: str
    case: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.case}: {self.text}"


# ---------------------------------------------------------------- compilers


def compiler(backend: str) -> str:
    """The versions of the tools that decide a backend's machine code."""
    versions = registry.get(backend).versions()
    return ", ".join(f"{name} {it}" for name, it in versions.items() if name in _TOOLS)


def is_older(versions: str, than: str) -> bool:
    """Whether one answer of `compiler` names an older release of a tool than another answer does."""
    ours, theirs = ({name: _numbers(release) for name, release in _TOOL.findall(text)} for text in (versions, than))
    return any(release < theirs[name] for name, release in ours.items() if name in theirs)


def _numbers(release: str) -> list[int]:
    """``3.9`` and ``3.9.0`` are the same release."""
    return [int(part) for part in re.sub(r"(\.0+)+$", "", release).split(".")]


def age_of(backend: str, recorded: str) -> Age:
    """The age of a backend's compiler here beside the one on record."""
    here = compiler(backend)
    return "same" if here == recorded else "older" if is_older(here, than=recorded) else "newer"


# ---------------------------------------------------------------- compared


def compare(case: str, before: Kernels, now: Kernels, age: Age) -> list[Finding]:
    """The differences of one case, what is worse first.

    With an older compiler what is worse is a note; with any other compiler a change is.
    """
    if not before:
        return [Finding(kind="missing", case=case, text="not on record")]
    if [it.digest for it in before] == [it.digest for it in now]:
        return []
    names = [it.name for it in before], [it.name for it in now]
    texts = [f"kernels {', '.join(names[0])} -> {', '.join(names[1])}"] if len(before) != len(now) else []
    pairs = list(zip(before, now, strict=False))
    worse = [f"{new.name}: {text}" for old, new in pairs for text in _worse(old, new)]
    texts += [f"{new.name}: {_difference(old, new)}" for old, new in pairs if old.digest != new.digest]
    lost, other = "note" if age == "older" else "regression", "changed" if age == "same" else "note"
    found = [Finding(kind=lost, case=case, text=text) for text in worse]
    return [*found, Finding(kind=other, case=case, text="; ".join(texts))]


def _worse(before: Kernel, now: Kernel) -> list[str]:
    counted = (
        ("spills in its hot loops", before.hot_spills, now.hot_spills),
        ("spills outside its hot loops", before.other_spills, now.other_spills),
        ("bytes of stack", before.stack_bytes, now.stack_bytes),
    )
    registers = f" ({before.registers} -> {now.registers} registers)"
    lines = [f"{old} -> {new} {what}{registers}" for what, old, new in counted if new > old]
    if now.blocks < before.blocks or now.share < before.share:
        was, becomes = (f"{it.blocks} blocks, {100 * it.share:g} % of the warps" for it in (before, now))
        lines.append(f"occupancy {was} -> {becomes}, limited by {now.limiter}")
    if before.hot_loops and not now.hot_loops:
        lines.append("no loop on tensor cores is left")
    newest = [max((place for place, it in GENERATIONS.items() if it in kernel.features), default=-1)
              for kernel in (before, now)]  # fmt: skip
    lost = [it for it in before.features if it not in now.features and it not in GENERATIONS.values()]
    lost += [GENERATIONS[newest[0]]] if newest[1] < newest[0] else []
    lost += [it for it in before.chosen if it not in now.chosen]
    return lines + [f"{it} is lost" for it in lost]


def _difference(before: Kernel, now: Kernel) -> str:
    """The fields that differ, in a few words."""
    old, new = asdict(before), asdict(now)
    names = [name for name in old if old[name] != new[name] and name not in ("key", "digest")]
    return ", ".join(f"{name} {old[name]} -> {new[name]}" for name in names) or "other code of the same counts"


def promises(rows: Mapping[Key, Kernels]) -> list[str]:
    """A line for each kernel on record that breaks a promise: no room on an SM, or spills where none may be."""
    lines = []
    for key, kernels in rows.items():
        allowed = promised_without_spills(key)
        for it in kernels:
            where = f"{' '.join(key)}, kernel {it.name}"
            if it.blocks == 0:
                lines.append(f"not one block fits an SM ({it.limiter}): {where}")
            if allowed is not None and it.hot_spills > allowed:
                lines.append(f"{it.hot_spills} spills in its hot loops: {where}")
    return lines


# ---------------------------------------------------------------- which


def sample(wanted: Iterable[Case]) -> list[Case]:
    """One case per backend and arch, the same ones every time: directions take turns, hashes choose."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in sorted(wanted, key=lambda it: it.key):
        groups.setdefault((case.plan.backend, case.plan.arch.name), []).append(case)
    chosen = []
    for place, (name, members) in enumerate(sorted(groups.items())):
        mine = [it for it in members if it.direction == ("forward", "backward")[place % 2]] or members
        chosen.append(mine[int(hashlib.sha256(repr(name).encode()).hexdigest(), 16) % len(mine)])
    return chosen


# ---------------------------------------------------------------- kept


def folder() -> Path:
    """The folder of the record, committed: a file per arch."""
    return workplace() / "bench" / "compiled"


def load(path: Path) -> Record:
    """The record of one arch that `save` wrote; InputError for another file."""

    def record(data: dict[str, Any]) -> Record:
        rows: dict[Key, Kernels] = {}
        for row in data["rows"]:
            backend, direction, variant, head_dim, mask = row["rule"].split()
            key = (backend, direction, variant, data["arch"], head_dim.removeprefix("D="), mask, row["config"])
            rows[key] = tuple(map(Kernel.from_dict, row["kernels"]))
        return Record(compilers=data["compilers"], rows=rows)

    return read(path, f"a record of schema {SCHEMA} that python -m bench record wrote", SCHEMA, record)


def load_all(where: Path | None = None) -> dict[str, Record]:
    """The record of every arch that has one, by name."""
    found = {arch: (where or folder()) / f"{arch}.json" for arch in GPU_ARCHS}
    return {arch: load(path) for arch, path in found.items() if path.exists()}


def save(record: Record, arch: str, where: Path) -> None:
    """Write the record of one arch: a line per rule, head_dim and mask."""
    lines = []
    for key in sorted(record.rows, key=_place):
        backend, direction, variant, _, head_dim, mask, config = key
        rule = f"{backend} {direction} {variant} D={head_dim} {mask}"
        kernels = [it.as_dict() for it in record.rows[key]]
        lines.append(json.dumps({"rule": rule, "config": config, "kernels": kernels}))
    head = json.dumps({"schema": SCHEMA, "arch": arch, "compilers": dict(record.compilers)}, indent=1)
    where.mkdir(parents=True, exist_ok=True)
    draft = where / f"{arch}.json.new"
    draft.write_text(head.removesuffix("\n}") + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")
    draft.replace(where / f"{arch}.json")


def _place(key: Key) -> tuple[Any, ...]:
    backend, direction, variant, _, head_dim, mask, config = key
    return BACKENDS.index(backend), direction != "forward", variant, int(head_dim), mask != "full", config


# ---------------------------------------------------------------- the command


def run(options: argparse.Namespace) -> int:
    """Compile every rule and write what changed; with --check write nothing, and fail where the record is not right."""
    if find_cuobjdump() is None:
        raise InputError("there is no cuobjdump to read cubins with: pip install nvidia-cuda-cuobjdump")
    if options.sample and not options.check:
        raise InputError("--sample: got it without --check; allowed with it")
    recorded = load_all()
    everything = cases()
    wanted = [case for case in everything if _asked(case.key, options)]
    chosen = sample(wanted) if options.sample else wanted
    findings, made = _compile(chosen, recorded, jobs=options.jobs, read_all=not options.check)
    alive = {case.key for case in everything}
    gone = [key for record in recorded.values() for key in record.rows if key not in alive]
    print("".join(f"{it}\n" for it in findings), end="")
    failed = [it for it in findings if it.kind == "failed"]
    if options.check:
        lines = [f"no rule has it any more: {' '.join(key)}" for key in gone if _asked(key, options)]
        lines += [line for record in recorded.values() for line in promises(record.rows)] + dead_rules()
        print("".join(f"{line}\n" for line in lines), end="")
        wrong = len(lines) + sum(it.kind != "note" for it in findings)
        print(f"{len(chosen)} rules compiled, {wrong} failures" + ("; run python -m bench record" if wrong else ""))
        return int(bool(wrong))
    write(made, recorded, alive)
    print(f"Written: {folder().relative_to(workplace())}: {len(made)} rules, {len(findings)} findings")
    return int(bool(failed))


def _asked(key: Key, options: argparse.Namespace) -> bool:
    return key[0] in (options.backend or BACKENDS) and key[3] in (options.arch or GPU_ARCHS)


def write(made: Mapping[Key, Kernels], recorded: Mapping[str, Record], alive: set[Key]) -> None:
    """Write the arches of `made` anew: what was not made again stays, unless no rule has it any more."""
    for arch in dict.fromkeys(key[3] for key in made):
        before = recorded.get(arch, Record(compilers={}, rows={}))
        mine = {key: kernels for key, kernels in made.items() if key[3] == arch}
        told = {key[0]: compiler(key[0]) for key in mine}
        rows = {key: kernels for key, kernels in before.rows.items() if key in alive} | mine
        save(Record(compilers={**before.compilers, **told}, rows=rows), arch, folder())


def _compile(
    chosen: Sequence[Case], recorded: Mapping[str, Record], *, jobs: int, read_all: bool
) -> tuple[list[Finding], dict[Key, Kernels]]:
    none = Record(compilers={}, rows={})
    before = {case.key: recorded.get(case.plan.arch.name, none).rows.get(case.key, ()) for case in chosen}
    work = [
        Job(direction=case.direction, plan=case.plan, known=() if read_all else before[case.key]) for case in chosen
    ]
    findings: list[Finding] = []
    made: dict[Key, Kernels] = {}
    for done, outcome in enumerate(run_isolated(compile_job, work, jobs=jobs, timeout_s=TIMEOUT_S), 1):
        case = Case(direction=outcome.item.direction, plan=outcome.item.plan)
        if outcome.result is None:
            findings.append(Finding(kind="failed", case=str(case), text=outcome.error))
            continue
        made[case.key] = outcome.result
        told = recorded.get(case.plan.arch.name, none).compilers.get(case.plan.backend, "")
        findings += compare(str(case), before[case.key], outcome.result, age_of(case.plan.backend, told))
        if done % 50 == 0:
            print(f"[{done}/{len(work)}]", flush=True)
    return findings, made


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    command.add_argument("--check", action="store_true", help="write nothing; exit 1 where the record is not right")
    command.add_argument("--sample", action="store_true", help="with --check: one rule per backend and arch")
    command.add_argument("--backend", action="append", choices=BACKENDS, help="may be given again; default all")
    command.add_argument("--arch", action="append", choices=GPU_ARCHS, help="may be given again; default all")
    add_jobs(command)
