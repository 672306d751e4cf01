"""Backends as data (`Backend`, `Op`, `Variant`), their names (`BACKENDS`), and how one makes a `Plan`.

A backend is a folder of this package whose ``__init__`` names a `BACKEND`. That module must be light: it holds the
data (capabilities, rules) and imports its language only inside `probe`, `prepare` and `export`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from multiattn.block_mask import BlockCounts
from multiattn.operands import Operands
from multiattn.plan import remedies
from multiattn.plan.arch import Arch
from multiattn.plan.config import Config, Rule, select
from multiattn.plan.support import Capability, Reason, Unsupported
from multiattn.problem import Problem

if TYPE_CHECKING:
    from multiattn.plan.abi import Binding

Language = Literal["triton", "cutile", "cuda"]
BACKENDS: tuple[Language, ...] = get_args(Language)
"""Every backend, by the name of its folder. To add one: a folder and an entry of `Language`."""

REFERENCE: Literal["reference"] = "reference"
"""The eager implementation: what `auto` is on CPU tensors, and the truth; never an entry of BACKENDS."""

BackendName = Literal["auto", "reference", Language]
"""The values of ``backend``. A variant is any string: each backend has its own, which `find_variant` knows."""

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Launcher(Protocol):
    """Kernels of one direction, ready to launch on tensors of one metadata: no planning, no validation, no waiting.

    q ``[B, Hq, Sq, D]``, k ``[B, Hkv, Skv, D]`` and v ``[B, Hkv, Skv, Dv]`` as the Plan's Problem describes them; out
    ``[B, Hq, Sq, Dv]``, with its `strides_out`; lse fp32 ``[B, Hq, Sq]`` contiguous; both at multiples of 16 bytes. The
    tensors' device is the current one; there is at least one query and at least one key. Launches go to the current
    stream.

    A forward writes every element of out and lse. A backward reads them, of any backend; dout is like out, with its
    strides and alignment; dlse like lse and finite, or None where nothing depends on it. It writes every element of dq
    (strides of `Problem.strides_dq`), dk and dv (`Problem.strides_dk`, `Problem.strides_dv`), in the dtype of q, each
    at a multiple of 16 bytes. Workspace is the launcher's own: from PyTorch's allocator, as many bytes as its Variant's
    `workspace` says.
    """

    def __call__(self, operands: Operands, /) -> None:
        """Launch. The first launch may compile, where the language compiles for the tensors themselves."""


class Exported(NamedTuple):
    """One kernel of a launch, compiled to run elsewhere, with what its compiler wrote on the way."""

    kernel: str
    """Its symbol in the cubin."""
    seconds: float
    cubin: bytes
    threads: int | None = None
    """Threads of a block; None where only the cubin says."""
    dynamic_smem_bytes: int = 0
    """Shared memory that a launch asks for, beside the static part that the cubin has."""
    texts: Mapping[str, bytes] = MappingProxyType({})
    """Intermediate code that was asked for, by kind: ``ptx``, ``ttgir``, ``tileir``."""
    remarks: str = ""
    """Remarks of cuTile's compiler on its choices, in YAML."""
    binding: Binding | None = None
    """The arguments, grid and shared memory of a launch; None where the loader cannot run the kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One rung: a point on the backend's named axes (`flags`), what it accepts and how its tiles are chosen."""

    name: str
    summary: str
    capability: Capability
    rules: tuple[Rule[Any], ...]
    config_type: type[Config] | None = None
    """The class of its configs, which `fits` is given; None where `fits` looks at it."""
    flags: tuple[tuple[str, Any], ...] = ()
    parent: str | None = None
    """The rung below: the variant whose flags differ from these in one group; None for the first of a ladder."""
    only_named: bool = False
    """Selected only by name: a rung of a ladder, to learn from or to compare with."""
    deterministic: bool = True
    """Two runs give the same bits, whatever the order in which blocks run."""
    workspace: Callable[[Problem, Any], int] = lambda problem, config: 0
    """Bytes of device memory that a launch takes beside its arguments."""
    settle: Callable[[Problem, Arch, Any], Config] = lambda problem, arch, config: config
    """The config with what a rule leaves open (a number of splits) decided for a problem."""
    fits: Callable[[Problem, Arch, Any], tuple[Reason, ...]] = lambda problem, arch, config: ()
    """Reasons why a config does not fit an arch (shared memory, an illegal combination)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A frozen decision: `explain` returns it, `fmha` launches it, bench stores it and parity prints it."""

    problem: Problem
    arch: Arch
    backend: str
    variant: str
    config: Config | None
    why: str
    direction: Direction = "forward"
    workspace_bytes: int = 0
    """Device memory that a launch takes beside its arguments."""
    rejected: tuple[str, ...] = field(default=(), compare=False)
    """Variants and rules that were passed over, each with the reason."""
    blocks: BlockCounts | None = field(default=None, compare=False)
    """Blocks of the block mask that `explain` was given, where its lists could be read."""

    def describe(self, *, rejected: bool = True) -> str:
        """The decision in lines: the chosen rule and the reason for it, its costs, and, with `rejected`, the rules that
        were passed over, with theirs.
        """
        variant = variant_of(self)
        lines = [
            f"{self.backend} {self.direction}, variant {self.variant}: {variant.summary}",
            f"  config: {self.config or 'none'}",
            f"  why: {self.why}",
            f"  deterministic: {'yes' if variant.deterministic else 'no: two runs may differ in their last bits'}",
            f"  workspace: {self.workspace_bytes} bytes",
            *([] if self.blocks is None else [f"  blocks: {self.blocks}"]),
            *(f"  rejected: {passed_over}" for passed_over in self.rejected * rejected),
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        what = f"{self.problem} {self.direction}"
        return f"{self.backend}/{self.variant} on {self.arch.name}: {self.config or 'no config'} [{what}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCall:
    """A launch of a Plan that kernels are to be listed for."""

    plan: Plan
    has_dlse: bool = False
    multiprocessors: int
    """The device's: so many blocks a persistent kernel has."""

    @property
    def problem(self) -> Problem:
        """The plan's."""
        return self.plan.problem

    @property
    def arch(self) -> Arch:
        """The plan's."""
        return self.plan.arch

    @property
    def config(self) -> Any:
        """The plan's, of its family's type."""
        return self.plan.config


class TunedChoice(NamedTuple):
    """A variant that was measured on the user's own GPU, near a problem, with its best config there."""

    variant: str
    config: Config | None
    """None: that of the variant's rule."""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One direction of a backend: its variants, best first, and what can be done with a Plan."""

    variants: tuple[Variant, ...]
    spanning: tuple[str, ...] = ()
    """Variants to run where all would take too long: together they have every value of each flag. Empty: all."""
    prepare: Callable[[Plan], Launcher]
    """Do all that is needed once per Plan, compilation included where the language allows it."""
    compile_ahead: Callable[[Plan], None] | None = None
    """Compile all that the usual launch of a Plan will want, into caches that `prepare` looks into, with no GPU."""
    export: Callable[[Plan, Sequence[str]], tuple[Exported, ...]] = lambda plan, kinds: ()
    """Compile every kernel of a launch for `plan.arch` with no GPU, to be read or run elsewhere.

    With intermediate code of the kinds that are asked for and that the language has. The compiler's own error passes
    through.
    """
    candidates: Callable[[Variant, Problem, Arch], Sequence[Config]] = lambda variant, problem, arch: ()
    """Configs worth timing for a problem: what a tuning sweep walks through."""

    @property
    def offered(self) -> tuple[Variant, ...]:
        """The variants that a caller may get without naming one."""
        return tuple(variant for variant in self.variants if not variant.only_named)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One language: what it needs on this machine and what it can do."""

    name: str
    summary: str
    probe: Callable[[Arch], tuple[Reason, ...]]
    """Reasons why this machine cannot run on `arch` (``cpu``: run the kernel source on the CPU)."""
    probe_compiler: Callable[[], tuple[Reason, ...]]
    """Reasons why this machine cannot compile for any arch, which needs no GPU."""
    versions: Callable[[], Mapping[str, str | None]]
    """Versions of the packages and tools it stands on; None for one that is missing."""
    forward: Op
    backward: Op

    def op(self, direction: Direction) -> Op:
        """The Op of a direction."""
        return self.forward if direction == "forward" else self.backward


def get(name: str) -> Backend:
    """The backend called `name`; ValueError for an unknown name."""
    if name != REFERENCE and name not in BACKENDS:
        near = difflib.get_close_matches(name.lower(), (*BACKENDS, REFERENCE, "auto"), n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend: got {name!r}; allowed auto, {REFERENCE}, {', '.join(BACKENDS)}{hint}")
    backend: Backend = importlib.import_module(f"multiattn.{name}").BACKEND
    return backend


def find_variant(backend: Backend, name: str, direction: Direction = "forward") -> Variant:
    """The variant called `name`; ValueError for one that the backend does not have."""
    variants = backend.op(direction).variants
    for variant in variants:
        if variant.name == name:
            return variant
    has = f"{_name_some(variants, name)} for {direction}"
    raise ValueError(f"variant: got {name!r}; {backend.name} has {has}; None is the best that can run the problem")


def later(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that imports a kernel language: imported by its first call."""
    return lambda *arguments: getattr(importlib.import_module(module), name)(*arguments)


_NAMED_AT_MOST = 12  # in an error; a backend may have a hundred rungs


def _name_some(variants: Sequence[Variant], wanted: str) -> str:
    """The names of all variants, or of those most like `wanted` where there are too many to read."""
    names = [variant.name for variant in variants]
    if len(names) > _NAMED_AT_MOST:
        near = difflib.get_close_matches(wanted, names, n=_NAMED_AT_MOST // 2, cutoff=0.0)
        offered = [variant.name for variant in variants if not variant.only_named]
        shown = list(dict.fromkeys((*offered, *near)))[:_NAMED_AT_MOST]
        return f"{', '.join(shown)} and {len(names) - len(shown)} more"
    return ", ".join(names)


def ladder(backend: Backend, top: str) -> tuple[Variant, ...]:
    """The rungs up to the variant called `top`, first to last; ValueError for an unknown variant."""
    rungs = [find_variant(backend, top)]
    while (parent := rungs[-1].parent) is not None:
        rungs.append(find_variant(backend, parent))
    return tuple(reversed(rungs))


def variant_of(plan: Plan) -> Variant:
    """The Variant that a Plan is of."""
    return find_variant(get(plan.backend), plan.variant, plan.direction)


def plan_variant(
    backend: Backend,
    variant: Variant,
    problem: Problem,
    arch: Arch,
    config: Config | None = None,
    *,
    direction: Direction = "forward",
    named: bool = True,
) -> Plan | tuple[Reason, ...]:
    """The Plan of one variant, or every reason why there is none. `config` overrides the rules (for tuning).

    `named`: the caller asked for this variant by name.
    """
    if direction == "backward" and problem.row_max:  # which a forward alone writes
        problem = replace(problem, row_max=False)
    reasons = variant.capability.why_not(problem, arch)
    if reasons:
        return reasons
    why = "given by the caller" if config is not None else "the variant has no tiles to choose"
    rejected: tuple[str, ...] = ()
    if config is None and variant.rules:
        rule, rejected = select(variant.rules, problem, arch, named=named)
        if rule is None:
            near = [rule for rule in variant.rules if arch.name in rule.arches] or variant.rules
            allowed = "; ".join(sorted({str(rule.reject(problem, arch, named=named)) for rule in near}))
            got = f"no rule of {variant.name} for {arch.name}"
            return (Reason(code="config", got=got, allowed=allowed, hint=remedies.OTHERS),)
        config, why = rule.config, rule.why
    if config is not None:
        if (kind := variant.config_type) not in (None, type(config)):
            return (Reason(code="config", got=type(config).__name__, allowed=kind.__name__, hint=remedies.CONFIG),)
        config = variant.settle(problem, arch, config)
        if reasons := variant.fits(problem, arch, config):
            return reasons
    return Plan(
        problem=problem,
        arch=arch,
        backend=backend.name,
        variant=variant.name,
        config=config,
        why=why,
        direction=direction,
        workspace_bytes=variant.workspace(problem, config),
        rejected=rejected,
    )


def plan_tuned(
    backend: Backend,
    variant: Variant,
    problem: Problem,
    arch: Arch,
    tuned: Sequence[TunedChoice],
    *,
    direction: Direction = "forward",
    named: bool = True,
) -> Plan | tuple[Reason, ...]:
    """The Plan of a variant as `tuned` has it, if it does; by the variant's rules where a config does not fit."""
    choice = next((it for it in tuned if it.variant == variant.name), None)
    if choice is None:
        return plan_variant(backend, variant, problem, arch, direction=direction, named=named)
    found = plan_variant(backend, variant, problem, arch, choice.config, direction=direction)
    if isinstance(found, Plan):
        return replace(found, why=choice.why if choice.config is not None else f"{choice.why}; {found.why}")
    plan = plan_variant(backend, variant, problem, arch, direction=direction, named=named)
    if isinstance(plan, Plan):
        passed_over = (f"{choice.config} ({choice.why}): {reason}" for reason in found)
        plan = replace(plan, rejected=(*passed_over, *plan.rejected))
    return plan


def make_plan(
    backend: Backend,
    problem: Problem,
    arch: Arch,
    *,
    direction: Direction = "forward",
    variant: str | None = None,
    config: Config | None = None,
    deterministic: bool = False,
    probe: bool = True,
    tuned: Sequence[TunedChoice] = (),
) -> Plan:
    """The Plan of the first variant that can run `problem` on `arch`; `Unsupported`, with the reasons, if none can.

    Those are of the variant that came nearest: see `_nearest`.

    With `deterministic` only variants that give the same bits each time are asked. With `probe=False` only the data is
    asked, not this machine: for explaining and compiling for another arch. Variants in `tuned` come first, in its
    order and with its configs.
    """
    reasons = list(backend.probe(arch)) if probe else []
    if not backend.op(direction).variants:
        allowed, hint = f"what {backend.name} has kernels for", 'name another backend, or "auto"'
        reasons.append(Reason(code="direction", got=direction, allowed=allowed, hint=hint))
    named = variant is not None
    asked = backend.op(direction).offered if variant is None else (find_variant(backend, variant, direction),)
    places = {it.variant: place for place, it in enumerate(tuned)}
    asked = tuple(sorted(asked, key=lambda it: places.get(it.name, len(places))))
    refusals: dict[str, tuple[Reason, ...]] = {}
    found = None
    for candidate in asked:
        if config is None:
            plan = plan_tuned(backend, candidate, problem, arch, tuned, direction=direction, named=named)
        else:
            plan = plan_variant(backend, candidate, problem, arch, config, direction=direction, named=named)
        if deterministic and not candidate.deterministic:
            got = f"variant {candidate.name}, which adds in any order"
            allowed, hint = "variants that give the same bits each time", "deterministic=False, or leave variant out"
            other = () if isinstance(plan, Plan) else plan
            plan = (*other, Reason(code="deterministic", got=got, allowed=allowed, hint=hint))
        if isinstance(plan, Plan):
            found = plan
            break
        refusals[candidate.name] = plan
    if found is not None and not reasons:
        passed_over = (f"variant {name}: {reason}" for name, why in refusals.items() for reason in why)
        return replace(found, rejected=(*passed_over, *found.rejected))
    if found is None:
        reasons += _nearest(asked, refusals, arch)
    raise Unsupported(backend=backend.name, arch=arch, problem=problem, reasons=reasons, direction=direction)


def _nearest(variants: Sequence[Variant], refusals: Mapping[str, tuple[Reason, ...]], arch: Arch) -> tuple[Reason, ...]:
    """The reasons of the variant with the fewest; then of the one that allows most of what is refused.

    The reasons of variants for other arches do not help, unless every variant is for another arch.
    """

    def distance(variant: Variant) -> tuple[int, ...]:
        refused, can = {reason.code for reason in refusals[variant.name]}, variant.capability
        widest = can.head_dim_max if "head_dim" in refused else 0
        finest = can.block_masks or sys.maxsize if "block_mask" in refused else 0
        most = len(can.arches) if "arch" in refused else 0
        return len(refusals[variant.name]), -widest, finest, -most, -can.features

    here = [it for it in variants if arch.name in it.capability.arches] or variants
    return refusals[min(here, key=distance).name] if here else ()
