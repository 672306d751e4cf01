"""What a backend is (`Backend`, `Op`, `Variant`), which there are (`BACKENDS`), and how a `Plan` is made of one.

A backend is a folder of this package whose ``__init__`` names a `BACKEND`. That module must be light: it holds the
data (capabilities, rules) and imports its DSL only inside `probe`, `prepare` and `compile`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from multiattn.arch import Arch
from multiattn.config import Config, Rule, select
from multiattn.problem import Problem
from multiattn.support import Capability, Reason, Unsupported

BACKENDS: tuple[str, ...] = ("triton", "cutile", "cuda")
"""Every backend, by the name of its folder. To add one: a folder and an entry here."""

REFERENCE = "reference"
"""The eager implementation: what `auto` is on CPU tensors, and the truth; never an entry of BACKENDS."""


class Launcher(Protocol):
    """A kernel ready to launch on tensors of one metadata: no planning, no validation, no synchronisation.

    The first launch may compile, where the language compiles for the tensors themselves.

    q ``[B, Hq, Sq, D]``, k and v ``[B, Hkv, Skv, D]`` as described by the Plan's Problem; out like q, with the
    strides of `Problem.strides_out`; lse fp32 ``[B, Hq, Sq]`` contiguous; both at multiples of 16 bytes. Writes every
    element of out and lse, on the current stream. The tensors' device is the current one; there is at least one query
    and at least one key.
    """

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Launch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What the compiler said of one Plan, made for its arch with no GPU needed. Sizes in bytes, per block."""

    seconds: float
    cubin: bytes
    smem_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One rung: a point on the backend's named axes (`flags`), what it accepts and how its tiles are chosen."""

    name: str
    summary: str
    capability: Capability
    rules: tuple[Rule[Any], ...]
    flags: tuple[tuple[str, Any], ...] = ()
    fits: Callable[[Problem, Arch, Config], tuple[Reason, ...]] = lambda problem, arch, config: ()
    """Reasons why a config does not fit an arch (shared memory, an illegal combination)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The decision, frozen: what `explain` returns is what `fmha` launches, bench stores and parity prints."""

    problem: Problem
    arch: Arch
    backend: str
    variant: str
    config: Config | None
    why: str

    def because(self, why: str) -> Plan:
        """The same Plan, with the reason why this backend was picked in front."""
        return replace(self, why=f"{why}; {self.why}")

    def __str__(self) -> str:
        return f"{self.backend}/{self.variant} on {self.arch.name}: {self.config or 'no config'} [{self.problem}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One direction of a backend: its variants, best first, and what can be done with a Plan."""

    variants: tuple[Variant, ...]
    prepare: Callable[[Plan], Launcher]
    """Everything that can be done once per Plan, compilation included where the DSL allows it."""
    compile: Callable[[Plan], Compiled]
    """Compile for `plan.arch` with no GPU; the compiler's own error passes through."""
    candidates: Callable[[Variant, Problem, Arch], Sequence[Config]] = lambda variant, problem, arch: ()
    """Configs worth timing for a problem: what a tuning sweep walks through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One language: what it needs on this machine and what it can do."""

    name: str
    summary: str
    probe: Callable[[Arch], tuple[Reason, ...]]
    """What this machine lacks to run on `arch` (``cpu``: to run the kernel source on the CPU)."""
    probe_compiler: Callable[[], tuple[Reason, ...]]
    """What this machine lacks to compile for any arch, no GPU needed."""
    versions: Callable[[], Mapping[str, str | None]]
    """Versions of the packages and tools it stands on; None for one that is missing."""
    forward: Op


def get(name: str) -> Backend:
    """The backend called `name`; ValueError for a name that nobody has."""
    if name != REFERENCE and name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}; allowed auto, {REFERENCE}, {', '.join(BACKENDS)}")
    backend: Backend = importlib.import_module(f"multiattn.{name}").BACKEND
    return backend


def find_variant(backend: Backend, name: str) -> Variant:
    """The variant called `name`; ValueError for one that the backend does not have."""
    for variant in backend.forward.variants:
        if variant.name == name:
            return variant
    names = ", ".join(variant.name for variant in backend.forward.variants)
    raise ValueError(f"variant: got {name!r}; {backend.name} has {names}")


def plan_variant(
    backend: Backend, variant: Variant, problem: Problem, arch: Arch, config: Config | None = None
) -> Plan | tuple[Reason, ...]:
    """The Plan of one variant, or every reason why there is none. `config` overrides the rules (for tuning)."""
    reasons = variant.capability.why_not(problem, arch)
    if reasons:
        return reasons
    why = "given by the caller"
    if config is None and variant.rules:
        rule = select(variant.rules, problem, arch)
        if rule is None:
            allowed = "; ".join(sorted({str(rule.reject(problem, arch)) for rule in variant.rules}))
            return (Reason(code="config", got=f"no rule of {variant.name} for {arch.name}", allowed=allowed),)
        config, why = rule.config, rule.why
    if config is not None and (reasons := variant.fits(problem, arch, config)):
        return reasons
    return Plan(problem=problem, arch=arch, backend=backend.name, variant=variant.name, config=config, why=why)


def make_plan(
    backend: Backend,
    problem: Problem,
    arch: Arch,
    *,
    variant: str | None = None,
    config: Config | None = None,
    probe: bool = True,
) -> Plan:
    """The Plan of the first variant that can run `problem` on `arch`; `Unsupported`, with all reasons, if none can.

    With `probe=False` only the data is asked, not this machine: for explaining and compiling for another arch.
    """
    reasons = list(backend.probe(arch)) if probe else []
    variants = [find_variant(backend, variant)] if variant is not None else list(backend.forward.variants)
    plans = [plan_variant(backend, candidate, problem, arch, config) for candidate in variants]
    found = next((plan for plan in plans if isinstance(plan, Plan)), None)
    if found is not None and not reasons:
        return found
    if found is None:
        refusals = [plan for plan in plans if not isinstance(plan, Plan)]
        reasons += list(dict.fromkeys(reason for refusal in refusals for reason in refusal))
    raise Unsupported(backend=backend.name, arch=arch, problem=problem, reasons=reasons)
