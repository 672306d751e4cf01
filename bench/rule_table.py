"""Every rule of every backend compiled, with no GPU, for every arch that it names: registers, spills, occupancy."""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.environment import ROOT, results_root
from bench.errors import InputError
from bench.results import read
from multiattn.inspect import store
from multiattn.inspect.facts import Facts, read_kernel
from multiattn.inspect.pool import run_isolated
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS, by_name
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, Plan, Variant, plan_variant
from multiattn.plan.config import Rule, has_whole_sectors, select
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import DTYPES, Problem

SCHEMA = 1
HEAD_DIMS = (64, 128, 256)
NO_SPILLS_UP_TO = 128
"""The head_dim up to which no rule may spill in a loop that every block runs."""
KNOWN_SPILLS: Mapping[tuple[str, str], int] = {("triton", "warp_specialized"): 34}
"""By backend and variant, as many spills in hot loops as pass all the same: where the compiler on record makes worse
code than the one that the rules were measured with (docs/gluon.md, "Newer Tritons")."""
SEQ, BATCH, HEADS = 4096, 4, 16
RULE_DTYPES = ("bf16", "fp16")  # the first unless a rule is for the other alone
TIMEOUT_S = 300.0
RUNG_ARCHS = ("sm80", "sm90")
"""What rules of variants that must be named are compiled for: with and without wgmma and TMA."""

_SOURCES = {".py", ".cuh", ".h"}
_CPU = ("cpu", "emulation")
_DATA = ("config", "rules", "variants", "__init__")
_OF_FORWARD = ("steps", "axes")
"""Modules of the forward's ladder that shared modules import, though no backward is made of them."""
_ROOTS = ("compile.py", "nvrtc.py", "launches.py")
_TOOL = re.compile(r"([\w-]+) (\d+(?:\.\d+)*)")
_INCLUDED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A rule on one arch, at a head_dim and mask of its range, with a problem for which it is the one chosen."""

    direction: Direction
    plan: Plan

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from other cases; two rules of one config are one case."""
        plan = self.plan
        mask = "causal" if plan.problem.causal else "full"
        where = (plan.backend, self.direction, plan.variant, plan.arch.name, str(plan.problem.head_dim), mask)
        return (*where, str(plan.config))

    @property
    def digest(self) -> str:
        """Twelve hex digits over what its cubins are made from, the compiler aside."""
        plan = self.plan
        flags = repr(registry.variant_of(plan).flags)
        parts = (*self.key, repr(plan.config), flags, str(plan.problem), sources(plan.backend, self.direction))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return " ".join(self.key[:4]) + f" D={self.key[4]} {self.key[5]} [{self.key[6]}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One kernel of a case as it was compiled. Registers and stack are a thread's, the rest a block's or an SM's."""

    backend: str
    direction: str
    variant: str
    arch: str
    head_dim: int
    mask: str
    config: str
    kernel: str
    threads: int
    registers: int
    smem_bytes: int
    stack_bytes: int
    hot_loops: int
    hot_spills: int
    """Loads and stores of local memory in loops that every block runs."""
    other_spills: int
    blocks: int
    """That an SM holds at one time."""
    share: float
    """Of the warps that an SM can hold."""
    limiter: str
    compiler: str
    digest: str

    @property
    def key(self) -> tuple[str, ...]:
        """That of its case."""
        where = (self.backend, self.direction, self.variant, self.arch, str(self.head_dim), self.mask)
        return (*where, self.config)

    def __str__(self) -> str:
        where = " ".join(self.key[:4]) + f" D={self.head_dim} {self.mask} [{self.config}]"
        return f"{where}, kernel {self.kernel}"


# ---------------------------------------------------------------- which


def cases(
    backends: Sequence[str] = BACKENDS,
    directions: Sequence[Direction] = DIRECTIONS,
    arches: Sequence[str] = GPU_ARCHS,
) -> list[Case]:
    """Every case of every rule of what a caller gets unasked; one per config, where rules share one.

    Of variants that must be named only those that span the flags, on `RUNG_ARCHS`: there may be a hundred of them.
    """
    found: dict[tuple[str, ...], Case] = {}
    for name in backends:
        for direction in directions:
            for variant, its_arches in _walked(name, direction, arches):
                for rule in variant.rules:
                    for case in _cases_of(name, direction, variant, rule, its_arches):
                        found.setdefault(case.key, case)
    return list(found.values())


def _walked(backend: str, direction: Direction, arches: Sequence[str]) -> Iterator[tuple[Variant, Sequence[str]]]:
    """The variants whose rules are compiled, and for which of `arches` each."""
    op = registry.get(backend).op(direction)
    for variant in op.variants:
        if not variant.only_named:
            yield variant, arches
        elif not op.spanning or variant.name in op.spanning:
            yield variant, [arch for arch in arches if arch in RUNG_ARCHS]


def dead_rules(backends: Sequence[str] = BACKENDS, directions: Sequence[Direction] = DIRECTIONS) -> list[str]:
    """One line for each rule, of what a caller gets unasked, that nothing chooses on an arch that it names.

    Arches on which its variant does not run do not count.
    """
    lines = []
    for name in backends:
        for direction in directions:
            for variant in registry.get(name).op(direction).offered:
                for rule in variant.rules:
                    for arch in rule.arches:
                        if arch not in GPU_ARCHS or arch not in variant.capability.arches:
                            continue
                        if not any(_cases_of(name, direction, variant, rule, (arch,))):
                            lines.append(f"{name} {direction} {variant.name} {arch}: nothing chooses the rule {rule}")
    return lines


def _cases_of(
    backend: str, direction: Direction, variant: Variant, rule: Rule[Any], arches: Sequence[str]
) -> Iterator[Case]:
    for arch in (name for name in arches if name in rule.arches):
        for head_dim in _head_dims(rule, variant.capability.head_dim_multiple):
            for causal in (False, True) if rule.banded is None else (rule.banded,):
                plan = _plan(backend, direction, variant, rule, arch, head_dim, causal)
                if plan is not None:
                    yield Case(direction=direction, plan=plan)


def _head_dims(rule: Rule[Any], multiple: int) -> list[int]:
    """Those of `HEAD_DIMS` that a rule is for; and its widest where there is none, or earlier rules may take all."""
    itemsize = DTYPES[RULE_DTYPES[0]].itemsize  # as of the other
    allowed = [
        it
        for it in range(rule.head_dim_min, rule.head_dim_max + 1)
        if it % multiple == 0 and rule.whole_sectors in (None, has_whole_sectors(it, itemsize))
    ]
    found = [it for it in HEAD_DIMS if it in allowed]
    return found if found and rule.head_dim_max <= HEAD_DIMS[-1] else [*found, *allowed[-1:]]


def _plan(
    backend: str, direction: Direction, variant: Variant, rule: Rule[Any], arch: str, head_dim: int, causal: bool
) -> Plan | None:
    """The Plan of the first problem for which `rule` is chosen, so of lengths that it is for; None if there is none."""
    target = by_name(arch)
    for dtype, seq, batch in itertools.product(RULE_DTYPES, _lengths(variant.rules), _batches(variant.rules)):
        problem = Problem.contiguous(
            batch=batch, heads_q=HEADS, seq_q=seq, head_dim=head_dim, dtype=dtype, causal=causal
        )
        if select(variant.rules, problem, target)[0] is not rule:
            continue
        plan = plan_variant(registry.get(backend), variant, problem, target, direction=direction)
        if isinstance(plan, Plan):
            return plan
    return None


def _lengths(rules: Sequence[Rule[Any]]) -> list[int]:
    """Lengths on either side of every limit of the rules, the usual one first."""
    edges = {rule.seq_min for rule in rules} | {rule.seq_max + 1 for rule in rules if rule.seq_max is not None}
    near = {length for edge in edges for length in (edge - 1, edge) if length > 0}
    return list(dict.fromkeys((SEQ, *sorted(near, reverse=True))))


def _batches(rules: Sequence[Rule[Any]]) -> list[int]:
    edges = {rule.batch_max for rule in rules if rule.batch_max is not None}
    near = {batch for edge in edges for batch in (edge, edge + 1)}
    return list(dict.fromkeys((BATCH, *sorted(near))))


def sources(backend: str, direction: Direction) -> str:
    """A digest of the files that the kernels of a direction are made from.

    They are what the compiling modules and the kernels of that direction reach by ``import`` and ``#include``. Left out
    are rules (their configs are digested by value), the CPU's side and the kernels of the other direction.
    """
    folder = ROOT / "multiattn" / backend
    digest = hashlib.sha256()
    for path in sorted(_reached(folder, direction)):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _reached(folder: Path, direction: Direction) -> set[Path]:
    files = [path for path in folder.rglob("*") if _is_source(path.relative_to(folder), direction)]
    waiting = [path for path in files if path.name in _ROOTS or path.name.startswith(direction)]
    reached: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            names = _names_reached(path.read_text(), path.suffix)
            waiting += [it for it in files if it.name in names]
    return reached


@functools.lru_cache(maxsize=256)
def _names_reached(text: str, suffix: str) -> frozenset[str]:
    """Names of the files that a source imports from its package, or includes; of each only the last part."""
    if suffix != ".py":
        return frozenset(Path(it).name for it in _INCLUDED.findall(text))
    imports = [it for it in ast.walk(ast.parse(text)) if isinstance(it, ast.ImportFrom)]
    modules = [
        part for it in imports for part in ((it.module or "").split(".")[-1], *(alias.name for alias in it.names))
    ]
    return frozenset(f"{module}.py" for module in modules)


def _is_source(name: Path, direction: Direction) -> bool:
    """Whether a file of a backend's folder may be what a cubin of the direction is made of."""
    other = "backward" if direction == "forward" else "forward"
    is_data = name.suffix == ".py" and any(word in name.as_posix() for word in _DATA)
    is_cpu = any(part.removesuffix(".py") in _CPU for part in name.parts)
    is_other = other in name.as_posix() or (direction == "backward" and name.stem in _OF_FORWARD)
    return name.suffix in _SOURCES and not is_data and not is_cpu and not is_other


def compiler(backend: str) -> str:
    """The versions that decide what a backend's cubins look like."""
    kept = {"triton", "cuda-tile", "tileiras", "nvidia-cuda-nvrtc"}
    return ", ".join(f"{name} {it}" for name, it in registry.get(backend).versions().items() if name in kept)


def is_older(versions: str, than: str) -> bool:
    """Whether `compiler`'s answer names a tool in an older release than another answer does, by their numbers alone."""
    ours, theirs = ({name: _numbers(release) for name, release in _TOOL.findall(text)} for text in (versions, than))
    return any(release < theirs[name] for name, release in ours.items() if name in theirs)


def _numbers(release: str) -> list[int]:
    """``3.9`` and ``3.9.0`` are the same release."""
    return [int(part) for part in re.sub(r"(\.0+)+$", "", release).split(".")]


# ---------------------------------------------------------------- compiled


def compile_case(case: Case) -> list[Row]:
    """Compile every kernel of a case here, unless the cache has them. The compiler's own exception passes through."""
    return [_row(case, read_kernel(kernel, case.plan)) for kernel in store.compiled(case.plan)]


def _row(case: Case, kernel: Facts) -> Row:
    backend, direction, variant, arch, head_dim, mask, config = case.key
    return Row(
        backend=backend,
        direction=direction,
        variant=variant,
        arch=arch,
        head_dim=int(head_dim),
        mask=mask,
        config=config,
        kernel=kernel.name,
        threads=kernel.threads,
        registers=kernel.registers,
        smem_bytes=kernel.smem_bytes,
        stack_bytes=kernel.stack_bytes,
        hot_loops=kernel.hot_loops,
        hot_spills=kernel.hot_spills,
        other_spills=kernel.other_spills,
        blocks=kernel.blocks,
        share=kernel.share,
        limiter=kernel.limiter,
        compiler=compiler(case.plan.backend),
        digest=case.digest,
    )


def outdated(wanted: Sequence[Case], recorded: Sequence[Row], *, same_compiler: bool = True) -> list[Case]:
    """The cases that have no rows, or rows of other sources or, with `same_compiler`, of another compiler."""
    compilers = {name: compiler(name) for name in {case.plan.backend for case in wanted}} if same_compiler else {}
    known = _by_key(recorded)

    def is_current(case: Case) -> bool:
        rows = known.get(case.key, [])
        wanted_compiler = compilers.get(case.plan.backend)
        return bool(rows) and all(row.digest == case.digest and wanted_compiler in (None, row.compiler) for row in rows)

    return [case for case in wanted if not is_current(case)]


def update(
    wanted: Sequence[Case],
    path: Path,
    *,
    jobs: int,
    say: Callable[[str], None],
    function: Callable[[Case], list[Row]] = compile_case,
) -> list[str]:
    """Compile what is not on record at `path`, record it as it comes, and return the errors, a line each.

    Rows of cases that no rule has any more go.
    """
    if find_cuobjdump() is None:
        raise InputError("there is no cuobjdump to read registers and spills with: pip install nvidia-cuda-cuobjdump")
    recorded = load(path) if path.exists() else []
    known = _by_key(_without_gone(recorded))
    todo = outdated(wanted, recorded)
    digests = {
        case.key: case.digest for case in todo
    }  # from before anything is read: who edits meanwhile is not missed
    say(f"{len(wanted)} cases, {len(todo)} to compile")
    errors = []
    save(known, path)
    for done, outcome in enumerate(run_isolated(function, todo, jobs=jobs, timeout_s=TIMEOUT_S), 1):
        case, rows = outcome.item, outcome.result
        if rows is None:
            known.pop(case.key, None)
            errors.append(f"{case}: {outcome.error}")
            say(f"[{done}/{len(todo)}] {errors[-1]}")
            continue
        known[case.key] = [replace(row, digest=digests[case.key]) for row in rows]
        save(known, path)
        told = "; ".join(f"{row.kernel} {row.registers} registers, {row.hot_spills} hot spills" for row in rows)
        say(f"[{done}/{len(todo)}] {case}: {told}, {outcome.seconds:.1f} s")
    return errors


def _without_gone(recorded: Sequence[Row]) -> list[Row]:
    alive = {case.key for case in cases()}
    return [row for row in recorded if row.key in alive]


def _by_key(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    known: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        known.setdefault(row.key, []).append(row)
    return known


# ---------------------------------------------------------------- checked


def check(recorded: Sequence[Row], wanted: Sequence[Case]) -> list[str]:
    """What is wrong with a record, a line each: rules without a current row, rows without a rule, spills, no room."""
    lines = [f"not on record, or of other sources: {case}" for case in outdated(wanted, recorded, same_compiler=False)]
    alive = {case.key for case in wanted}
    lines += [f"on record, but no rule has it: {row}" for row in recorded if row.key not in alive]
    lines += [f"{row.hot_spills} spills in its hot loops: {row}" for row in recorded if spills_where_forbidden(row)]
    lines += [f"not one block fits an SM ({row.limiter}): {row}" for row in recorded if row.blocks == 0]
    return lines


def spills_where_forbidden(row: Row) -> bool:
    """Whether a row breaks the promise that no rule up to `NO_SPILLS_UP_TO` spills in its hot loops.

    It is made to who names no variant: a rung may be there to show what spills cost. Of `KNOWN_SPILLS` it is less.
    """
    known = KNOWN_SPILLS.get((row.backend, row.variant), 0)
    return row.head_dim <= NO_SPILLS_UP_TO and row.hot_spills > known and not _must_be_named(row)


def _must_be_named(row: Row) -> bool:
    variants = registry.get(row.backend).op("forward" if row.direction == "forward" else "backward").variants
    return any(variant.name == row.variant and variant.only_named for variant in variants)


# ---------------------------------------------------------------- kept


def record_path() -> Path:
    """Where the record is, and is committed."""
    return results_root() / "compiled" / "rules.json"


def save(known: Mapping[tuple[str, ...], Sequence[Row]], path: Path) -> None:
    """Write rows as JSON, one short line per kernel, in the order of backends, directions and archs."""
    ordered = sorted((row for rows in known.values() for row in rows), key=place)
    compilers = list(dict.fromkeys(row.compiler for row in ordered))
    names = [field.name for field in fields(Row)]
    lines = []
    for row in ordered:
        values = dict(zip(names, astuple(row), strict=True))
        lines.append(json.dumps([*({**values, "compiler": compilers.index(row.compiler)}).values()]))
    head = json.dumps({"schema": SCHEMA, "compilers": compilers, "columns": names}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.removesuffix("\n}") + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


def place(row: Row) -> tuple[Any, ...]:
    """By backend, direction, variant, head_dim, arch, mask; kernels stay in the order of their launch."""
    return (
        BACKENDS.index(row.backend),
        DIRECTIONS.index(row.direction),
        row.variant,
        row.head_dim,
        GPU_ARCHS.index(row.arch),
        row.mask != "full",
        row.config,
    )


def load(path: Path) -> list[Row]:
    """Rows that `save` wrote; InputError for another file."""

    def rows(data: dict[str, Any]) -> list[Row]:
        named = [dict(zip(data["columns"], values, strict=True)) for values in data["rows"]]
        return [Row(**{**it, "compiler": data["compilers"][it["compiler"]]}) for it in named]

    return read(path, f"a rule table of schema {SCHEMA} that python -m bench rules wrote", SCHEMA, rows)
