"""Compile plans in parallel processes, with no GPU: what the compilers made of each, or why there is nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multiattn.inspect.facts import Facts, read_plan
from multiattn.inspect.options import sizes_of
from multiattn.inspect.pool import run_isolated
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS, by_name
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, Plan, make_plan
from multiattn.plan.support import Reason, Unsupported
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A backend's best variant, or the named one, of a direction, to be compiled for a problem on an arch."""

    backend: str
    arch: str
    direction: Direction
    problem: Problem
    variant: str | None = None

    def plan(self) -> Plan:
        """The Plan, asking only data; Unsupported with every reason where there is none."""
        backend, arch = registry.get(self.backend), by_name(self.arch)
        return make_plan(backend, self.problem, arch, direction=self.direction, variant=self.variant, probe=False)

    @property
    def refused(self) -> tuple[Reason, ...]:
        """Every reason why it cannot be compiled here."""
        try:
            self.plan()
        except Unsupported as error:
            return error.reasons
        return registry.get(self.backend).probe_compiler()

    @property
    def place(self) -> tuple[Any, ...]:
        """Its place among others: by direction, backend, variant, head_dim, mask and arch."""
        which = DIRECTIONS.index(self.direction), BACKENDS.index(self.backend), self.variant or ""
        return (*which, self.problem.head_dim, self.problem.head_dim_v, self.problem.mask, GPU_ARCHS.index(self.arch))

    @property
    def what(self) -> str:
        """Its problem in short."""
        it = self.problem
        heads, length, head_dims = sizes_of(it)
        packed = "" if it.packing is None else f" packed sequences={it.packing.sequences}"
        return f"B={it.batch} H={heads} N={length} D={head_dims} {it.dtype} {it.mask}{it.features}{packed}"

    def __str__(self) -> str:
        variant = "" if self.variant is None else f"/{self.variant}"
        return f"{self.backend}{variant} {self.direction} {self.what} {self.arch}"


def requests(
    problems: Sequence[Problem],
    *,
    backends: Sequence[str] = BACKENDS,
    arches: Sequence[str] = GPU_ARCHS,
    directions: Sequence[Direction] = DIRECTIONS,
    variant: str | None = None,
) -> list[Request]:
    """The product of what is given, in the order of a table.

    `variant` None is a backend's best for the problem, ``offered`` all that a caller may get without naming one,
    ``all`` also those that must be named, and anything else a name: backends without it make no request.
    """
    found = [
        Request(backend=backend, arch=arch, direction=direction, problem=problem, variant=name)
        for direction in directions
        for backend in backends
        for name in _variants(backend, direction, variant)
        for problem in problems
        for arch in arches
    ]
    return sorted(dict.fromkeys(found), key=lambda request: request.place)


def _variants(backend: str, direction: Direction, asked: str | None) -> tuple[str | None, ...]:
    op = registry.get(backend).op(direction)
    if asked in ("all", "offered"):
        return tuple(variant.name for variant in (op.variants if asked == "all" else op.offered))
    return (asked,) if asked is None or any(variant.name == asked for variant in op.variants) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """The outcome of one request: kernels, or reasons, or an error."""

    request: Request
    variant: str = ""
    config: str = ""
    kernels: tuple[Facts, ...] = ()
    reasons: tuple[Reason, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        if bool(self.kernels) + bool(self.reasons) + bool(self.error) != 1:
            raise ValueError(f"an entry has kernels, or carries reasons, or carries an error; got {self}")

    @property
    def ok(self) -> bool:
        """True where all of it was compiled."""
        return bool(self.kernels)

    @property
    def main(self) -> Facts:
        """The kernel that most of the work is in: the one with the most tensor-core instructions in its hot loops."""
        return max(self.kernels, key=lambda kernel: (kernel.hot.tensor, kernel.code_bytes))

    @property
    def text(self) -> str:
        """One line: what each kernel uses, or why there is none."""
        if self.ok:
            return "; ".join(map(str, self.kernels))
        return "; ".join(map(str, self.reasons)) or self.error.strip().splitlines()[0]


def compile_request(request: Request) -> Compilation:
    """Compile one request here. The compiler's own exception passes through."""
    reasons = request.refused
    if not reasons and find_cuobjdump() is None:
        hint = "pip install 'multiattn[inspect]'"
        reasons = (Reason(code="cuobjdump", got="none", allowed="one that reads cubins", hint=hint),)
    if reasons:
        return Compilation(request=request, reasons=reasons)
    plan = request.plan()
    return Compilation(request=request, variant=plan.variant, config=str(plan.config), kernels=read_plan(plan))


def build(wanted: Sequence[Request], *, jobs: int, timeout_s: float) -> Iterator[Compilation]:
    """Compile in `jobs` processes, and yield what came of each request as it ends.

    Nothing hangs, and a crash costs no other request.
    """
    for outcome in run_isolated(compile_request, wanted, jobs=jobs, timeout_s=timeout_s):
        yield outcome.result or Compilation(request=outcome.item, error=outcome.error)


def ordered(entries: Sequence[Compilation]) -> list[Compilation]:
    """Sort entries by direction, backend, variant, head_dim, mask and arch."""
    return sorted(entries, key=lambda entry: entry.request.place)


def print_idle(wanted: Sequence[Request], made: Sequence[Request]) -> bool:
    """Print each backend and direction that was asked for and of which nothing was made; True if there is one."""
    pairs = dict.fromkeys((it.backend, it.direction) for it in wanted)
    idle = [pair for pair in pairs if not any((it.backend, it.direction) == pair for it in made)]
    for backend, direction in idle:
        print(f"{backend} was asked for and nothing of its {direction} compiled")
    return bool(idle)
