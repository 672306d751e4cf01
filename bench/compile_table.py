"""Every backend compiled for every target arch, really, with no GPU: ok and seconds, or the compiler's error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.pool import Outcome, run_isolated
from bench.results import read
from multiattn import backend as registry
from multiattn.arch import GPU_ARCHS, by_name
from multiattn.backend import BACKENDS, Compiled, make_plan
from multiattn.problem import Problem
from multiattn.support import Reason, Unsupported

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What to compile: a backend's best variant (or the named one) for an arch, at one head_dim, dtype and mask."""

    backend: str
    arch: str
    head_dim: int = 128
    dtype: str = "bf16"
    causal: bool = True
    variant: str | None = None

    @property
    def what(self) -> str:
        """Its problem in short."""
        return f"D={self.head_dim} {self.dtype} {'causal' if self.causal else 'full'}"

    @property
    def problem(self) -> Problem:
        """A large self-attention problem: lengths only matter where a rule asks for them."""
        return Problem.contiguous(
            batch=4, heads_q=16, seq_q=4096, head_dim=self.head_dim, dtype=self.dtype, causal=self.causal
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What came of one target: `ok`, or reasons, or an error. Sizes in bytes; None where the compiler tells none."""

    target: Target
    ok: bool
    plan: str = ""
    seconds: float = 0.0
    registers: int | None = None
    spill_bytes: int | None = None
    smem_bytes: int | None = None
    cubin_bytes: int | None = None
    reasons: tuple[Reason, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        if self.ok + bool(self.reasons) + bool(self.error) != 1:
            raise ValueError(f"an entry is ok, or carries reasons, or carries an error; got {self}")

    @property
    def text(self) -> str:
        """One line: seconds, or why there are none."""
        if self.ok:
            return f"ok, {self.seconds:.2f} s"
        return "; ".join(map(str, self.reasons)) or self.error.strip().splitlines()[0]


def targets(
    backends: Sequence[str] = BACKENDS,
    arches: Sequence[str] = GPU_ARCHS,
    *,
    head_dims: Sequence[int] = (128,),
    dtype: str = "bf16",
    causal: bool = True,
    variant: str | None = None,
) -> tuple[Target, ...]:
    """The product of what is given; `variant` ``all`` is each of a backend's."""
    return tuple(
        Target(backend=backend, arch=arch, head_dim=head_dim, dtype=dtype, causal=causal, variant=name)
        for backend in backends
        for name in (_all_variants(backend) if variant == "all" else (variant,))
        for head_dim in head_dims
        for arch in arches
    )


def compile_target(target: Target) -> Entry:
    """Compile one target here. The compiler's own exception passes through."""
    backend = registry.get(target.backend)
    reasons = list(backend.probe_compiler())
    try:
        plan = make_plan(backend, target.problem, by_name(target.arch), variant=target.variant, probe=False)
    except Unsupported as error:
        reasons += error.reasons
    if reasons:
        return Entry(target=target, ok=False, reasons=tuple(reasons))
    compiled: Compiled = backend.forward.compile(plan)
    return Entry(
        target=target,
        ok=True,
        plan=f"{plan.variant}: {plan.config or 'no config'}",
        seconds=compiled.seconds,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        smem_bytes=compiled.smem_bytes,
        cubin_bytes=len(compiled.cubin),
    )


def compile_all(
    wanted: Sequence[Target],
    *,
    jobs: int,
    timeout_s: float,
    function: Callable[[Target], Entry] = compile_target,
) -> Iterator[Entry]:
    """Compile in `jobs` processes and yield each entry as it ends: nothing hangs, and a crash is its own entry's."""
    for outcome in run_isolated(function, wanted, jobs=jobs, timeout_s=timeout_s):
        yield _entry(outcome)


def _entry(outcome: Outcome[Target, Entry]) -> Entry:
    if outcome.result is not None:
        return outcome.result
    return Entry(target=outcome.item, ok=False, seconds=outcome.seconds, error=outcome.error)


def _all_variants(backend: str) -> tuple[str, ...]:
    return tuple(variant.name for variant in registry.get(backend).forward.variants)


def table(entries: Sequence[Entry], *, form: str = "simple") -> str:
    """A row per entry, in the order of backends and archs; `form` is tabulate's (``simple``, ``github``).

    What all have in common, the problem, stands above them once.
    """
    problems = list(dict.fromkeys(entry.target.what for entry in ordered(entries)))
    rows = [
        (
            entry.target.backend,
            entry.target.arch,
            *([entry.target.what] if len(problems) > 1 else []),
            entry.plan or entry.target.variant or "best",
            entry.text,
            *(_or_dash(value) for value in (entry.registers, entry.spill_bytes, entry.smem_bytes)),
        )
        for entry in ordered(entries)
    ]
    middle = ("problem",) if len(problems) > 1 else ()
    headers = ("backend", "arch", *middle, "plan", "result", "regs", "spills [B]", "smem [B]")
    widths = [48 if header == "result" else None for header in headers]
    text = tabulate(rows, headers=headers, tablefmt=form, maxcolwidths=None if form == "github" else widths)
    return text if len(problems) != 1 else f"{problems[0]}\n\n{text}"


def idle_backends(entries: Sequence[Entry]) -> list[str]:
    """One line for each backend of which nothing was compiled."""
    lines = []
    for name in dict.fromkeys(entry.target.backend for entry in entries):
        mine = [entry for entry in entries if entry.target.backend == name]
        if not any(entry.ok for entry in mine):
            why = "; ".join(dict.fromkeys(entry.text for entry in mine))
            lines.append(f"{name} was asked for and nothing of it compiled: {why}")
    return lines


def ordered(entries: Sequence[Entry]) -> list[Entry]:
    """By backend, variant, head_dim and arch, whatever order they ended in."""

    def place(entry: Entry) -> tuple[Any, ...]:
        target = entry.target
        return BACKENDS.index(target.backend), target.variant or "", target.head_dim, GPU_ARCHS.index(target.arch)

    return sorted(entries, key=place)


def _or_dash(value: int | None) -> str:
    """The compiler did not say, or there was nothing to say it of."""
    return "-" if value is None else str(value)


def save(entries: Sequence[Entry], path: Path) -> None:
    """Write the entries as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"schema": SCHEMA, "entries": [asdict(entry) for entry in ordered(entries)]}
    path.write_text(json.dumps(data, indent=1) + "\n")


def load(path: Path) -> list[Entry]:
    """Entries that `save` wrote; InputError for another file."""

    def entries(data: dict[str, Any]) -> list[Entry]:
        return [_parse(entry) for entry in data["entries"]]

    return read(path, f"a compile table of schema {SCHEMA} that python -m bench compile wrote", SCHEMA, entries)


def _parse(entry: dict[str, Any]) -> Entry:
    reasons = tuple(Reason(**reason) for reason in entry["reasons"])
    return Entry(**{**entry, "target": Target(**entry["target"]), "reasons": reasons})
