"""Every backend compiled for every target arch, really, with no GPU: ok and seconds, or the compiler's error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tabulate import tabulate

from bench.pool import Outcome, run_isolated
from bench.results import read
from multiattn import backend as registry
from multiattn.arch import GPU_ARCHS, by_name
from multiattn.backend import BACKENDS, DIRECTIONS, Direction, make_plan
from multiattn.problem import Problem
from multiattn.support import Reason, Unsupported

SCHEMA = 2

KERNELS_OF: Mapping[str, tuple[Direction, ...]] = MappingProxyType(
    {"fwd": ("forward",), "bwd": ("backward",), "fwdbwd": DIRECTIONS}
)
"""Whose kernels a direction that bench times is made of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What to compile: a backend's best variant (or the named one) of a direction for an arch, at one problem."""

    backend: str
    arch: str
    head_dim: int = 128
    dtype: str = "bf16"
    causal: bool = True
    variant: str | None = None
    direction: Direction = "forward"

    @property
    def what(self) -> str:
        """Its problem in short."""
        return f"D={self.head_dim} {self.dtype} {'causal' if self.causal else 'full'} {self.direction}"

    @property
    def problem(self) -> Problem:
        """A large self-attention problem: lengths only matter where a rule asks for them."""
        return Problem.contiguous(
            batch=4, heads_q=16, seq_q=4096, head_dim=self.head_dim, dtype=self.dtype, causal=self.causal
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What came of one target: `ok`, or reasons, or an error. Sizes in bytes; None where the compiler tells none.

    Of a launch of several kernels the time and the cubins are summed; registers, spills and shared memory are the most
    that one of them has.
    """

    target: Target
    ok: bool
    plan: str = ""
    kernels: tuple[str, ...] = ()
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
    directions: Sequence[Direction] = ("forward",),
) -> tuple[Target, ...]:
    """The product of what is given; `variant` ``all`` is each that a backend has for a direction."""
    return tuple(
        Target(
            backend=backend,
            arch=arch,
            head_dim=head_dim,
            dtype=dtype,
            causal=causal,
            variant=name,
            direction=direction,
        )
        for direction in directions
        for backend in backends
        for name in (_offered(backend, direction) if variant == "all" else (variant,))
        for head_dim in head_dims
        for arch in arches
    )


def kernel_directions(timed: Iterable[str]) -> tuple[Direction, ...]:
    """The directions of kernels behind those that bench times (``fwd``, ``bwd``, ``fwdbwd``), each once."""
    asked = {direction for name in timed for direction in KERNELS_OF[name]}
    return tuple(direction for direction in DIRECTIONS if direction in asked)


def compile_target(target: Target) -> Entry:
    """Compile one target here. The compiler's own exception passes through."""
    backend = registry.get(target.backend)
    reasons = list(backend.probe_compiler())
    try:
        plan = make_plan(
            backend,
            target.problem,
            by_name(target.arch),
            direction=target.direction,
            variant=target.variant,
            probe=False,
        )
    except Unsupported as error:
        reasons += error.reasons
    if reasons:
        return Entry(target=target, ok=False, reasons=tuple(reasons))
    kernels = backend.op(target.direction).compile(plan)
    return Entry(
        target=target,
        ok=True,
        plan=f"{plan.variant}: {plan.config or 'no config'}",
        kernels=tuple(it.kernel for it in kernels),
        seconds=sum(it.seconds for it in kernels),
        registers=_most(it.registers for it in kernels),
        spill_bytes=_most(it.spill_bytes for it in kernels),
        smem_bytes=_most(it.smem_bytes for it in kernels),
        cubin_bytes=sum(len(it.cubin) for it in kernels),
    )


def _most(sizes: Iterable[int | None]) -> int | None:
    """The largest; None where the compiler tells none."""
    return max((size for size in sizes if size is not None), default=None)


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


def _offered(backend: str, direction: Direction) -> tuple[str, ...]:
    return tuple(variant.name for variant in registry.get(backend).op(direction).offered)


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
    """One line for each backend, in each direction, of which nothing was compiled."""
    lines = []
    for name, direction in dict.fromkeys((entry.target.backend, entry.target.direction) for entry in entries):
        mine = [entry for entry in entries if (entry.target.backend, entry.target.direction) == (name, direction)]
        if not any(entry.ok for entry in mine):
            why = "; ".join(dict.fromkeys(entry.text for entry in mine))
            lines.append(f"{name} was asked for and nothing of its {direction} compiled: {why}")
    return lines


def ordered(entries: Sequence[Entry]) -> list[Entry]:
    """By direction, backend, variant, head_dim and arch, whatever order they ended in."""

    def place(entry: Entry) -> tuple[Any, ...]:
        target = entry.target
        which = DIRECTIONS.index(target.direction), BACKENDS.index(target.backend), target.variant or ""
        return (*which, target.head_dim, GPU_ARCHS.index(target.arch))

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
    given = {"target": Target(**entry["target"]), "kernels": tuple(entry["kernels"]), "reasons": reasons}
    return Entry(**{**entry, **given})
