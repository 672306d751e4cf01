"""Why something cannot run, as data: `Reason`, `Capability`, `Unsupported`.

Three of the four "no"s of the contract meet here (not available, not supported, and the public error made of
them); what is wrong for everybody is a ValueError or TypeError of `problem`, and a bug passes through untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from multiattn.mask import Kind
from multiattn.plan import remedies
from multiattn.plan.arch import Arch
from multiattn.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One reason why not: the subject, what came, what is accepted, and what to do.

    `code` is a stable key: of a Problem (head_dim, dtype, seq, mask, sinks, row_max, cache, page, stored, strides,
    alignment), or one of arch, direction, variant, config, deterministic, module, driver, compiler, gpu, host.
    """

    code: str
    got: str
    allowed: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.code}: got {self.got}; allowed {self.allowed}{hint}"


Describe = Callable[[Problem], str | None]
"""How a problem uses a feature, or None where it does not."""

FEATURE = "feature"
"""The key of ``(code, Describe, allowed)`` among the metadata of a `Capability` field."""


def _has_code_for(code: str, describe: Describe, allowed: str = "none") -> Any:
    """A field that is True for variants with code for a feature; the others refuse it by name."""
    return field(default=False, metadata={FEATURE: (code, describe, allowed)})


def _program(problem: Problem) -> str:
    assert problem.score is not None
    return f"program {problem.score.program.digest[:8]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """Problems that a kernel variant accepts. Each field is a constraint; `why_not` checks a Problem against all."""

    arches: tuple[str, ...]
    """Empty: any, those without a row in `ARCHS` included."""
    arch_hint: str = ""
    """The hint for callers on another arch."""
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    head_dim_multiple: int = 8
    head_dim_max: int = 256
    seq_max: int = 2**31 - 1 - 256
    """Longest sequence: positions are 32-bit, and a block of keys that starts before the end must not wrap."""
    alignment: int = 2
    """Bytes that every base address and stride must be a multiple of."""
    masks: tuple[Kind, ...] = ("full", "causal")
    """Kinds of mask that it has code for."""
    block_masks: int = 0
    """A block mask may be given, in blocks of multiples of this; 0: none."""
    packed_blocks: int = 0
    """As `block_masks`, in a packed batch."""
    zero_strides: bool = True
    """A dimension may be broadcast (stride 0, as `expand` makes it)."""
    sinks: bool = _has_code_for("sinks", lambda it: "one for each head" if it.has_sinks else None)
    """Heads may have a sink."""
    row_max: bool = _has_code_for("row_max", lambda it: "the largest score of each row" if it.row_max else None)
    """The largest score of each row may be asked for."""
    scores: bool = _has_code_for("score", lambda it: _program(it) if it.has_score else None)
    """Scores may be modified by an expression."""
    score_gradients: bool = _has_code_for(
        "score_gradient", lambda it: _program(it) if it.score is not None and it.score.gradients else None
    )
    """Tensors that the expression loads from may want a gradient."""
    packing: bool = _has_code_for(
        "packing",
        lambda it: None if it.packing is None else f"a packed batch of {it.packing.sequences} sequences",
        "batches [B, H, S, D]",
    )
    """Sequences may be packed one after another."""
    caches: bool = _has_code_for(
        "cache",
        lambda it: None if it.cache is None else f"keys in a cache ({it.cache})",
        "k and v in no cache, as fmha has them",
    )
    """Keys and values may be in a cache, with lengths and pages that the device knows."""

    stored: bool = _has_code_for(
        "stored",
        lambda it: None if it.stored is None else f"a cache of {it.stored}",
        "k and v of the dtype of q",
    )
    """A cache may have 8-bit numbers, with scales."""

    @property
    def features(self) -> int:
        """How many features it has code for."""
        return len(self.masks) + sum(
            bool(getattr(self, it)) for it in (*_FEATURES, "block_masks", "packed_blocks", "zero_strides")
        )

    def why_not(self, problem: Problem, arch: Arch) -> tuple[Reason, ...]:
        """All reasons why this variant cannot run `problem` on `arch`; empty when it can."""
        reasons = []

        def refuse(code: str, got: str, allowed: str, hint: str) -> None:
            reasons.append(Reason(code=code, got=got, allowed=allowed, hint=hint))

        if self.arches and arch.name not in self.arches:
            refuse("arch", arch.name, ", ".join(self.arches), self.arch_hint or remedies.for_arch(arch))
        if problem.dtype not in self.dtypes:
            refuse("dtype", problem.dtype, ", ".join(self.dtypes), remedies.DTYPE)
        widths = (problem.head_dim, problem.head_dim_v)
        if any(width % self.head_dim_multiple or width > self.head_dim_max for width in widths):
            allowed = f"multiples of {self.head_dim_multiple} up to {self.head_dim_max}"
            hint = remedies.for_head_dim(problem, self.head_dim_multiple, self.head_dim_max)
            refuse("head_dim", problem.widths.removeprefix("D="), allowed, hint)
        if max(problem.seq_q, problem.seq_kv) > self.seq_max:
            got = f"Sq={problem.seq_q} Skv={problem.seq_kv}"
            refuse("seq", got, f"lengths up to {self.seq_max}", remedies.LENGTH)
        if problem.alignment % self.alignment:
            allowed = f"base addresses and strides that are multiples of {self.alignment} bytes"
            hint = remedies.for_alignment(problem, self.alignment)
            refuse("alignment", f"{problem.alignment} bytes", allowed, hint)
        if problem.band.kind not in self.masks:
            refuse("mask", problem.mask, ", ".join(self.masks), remedies.OTHERS)
        if problem.is_two_sided and problem.seq_q + problem.seq_kv > self.seq_max:
            got = f"Sq={problem.seq_q} Skv={problem.seq_kv} with {problem.mask}"
            refuse("seq", got, f"Sq + Skv up to {self.seq_max}", remedies.LENGTH)
        for name, (code, describe, instead) in _FEATURES.items():
            if not getattr(self, name) and (text := describe(problem)) is not None:
                refuse(code, text, instead, remedies.OTHERS)
        if problem.score is not None and problem.score.scores is not None:
            which = problem.score.program.why_not_apart(problem.score.gradients)
            if which is not None:
                allowed = "with deterministic gradients tensors that are loaded once, at positions or constants"
                refuse("score_gradient", which, allowed, "deterministic=False, or detach() that tensor")
        if (blocks := problem.blocks) is not None:
            step, where = (
                (self.block_masks, "") if problem.packing is None else (self.packed_blocks, " in a packed batch")
            )
            if not step or blocks.queries % step or blocks.keys % step:
                allowed = f"blocks of multiples of {step}{where}" if step else f"none{where}"
                refuse("block_mask", f"blocks of {blocks.queries} x {blocks.keys}", allowed, remedies.for_blocks(step))
        strides = (*problem.strides_q, *problem.strides_k, *problem.strides_v)
        if not self.zero_strides and 0 in strides:
            refuse("strides", "a broadcast dimension (stride 0)", "positive strides", remedies.STRIDES)
        return tuple(reasons)


_FEATURES: Mapping[str, tuple[str, Describe, str]] = {
    it.name: it.metadata[FEATURE] for it in fields(Capability) if FEATURE in it.metadata
}


class Unsupported(RuntimeError):  # noqa: N818 - the contract's name: `except multiattn.Unsupported` reads as it should
    """The requested backend cannot run this problem here. `reasons` has every reason why, as data."""

    def __init__(
        self,
        *,
        backend: str,
        arch: Arch,
        problem: Problem,
        reasons: Iterable[Reason],
        alternatives: Sequence[str] = (),
        direction: str = "forward",
    ) -> None:
        self.backend = backend
        self.arch = arch
        self.problem = problem
        self.direction = direction
        self.reasons = tuple(reasons)
        self.alternatives = tuple(alternatives)
        lines = [f"{backend} cannot run this problem on {arch.name}:"]
        lines += [f"  {reason}" for reason in _merged(self.reasons)]
        lines.append(f"Problem: {problem} {direction}")
        lines.append(f"Can run it: {', '.join(self.alternatives) or 'no other backend on this machine'}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle and copy keep all attributes, where an exception would be made anew from its `args`."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


def _merged(reasons: Iterable[Reason]) -> Iterator[Reason]:
    """The reasons as one line says them: where several kernels refuse the same, what each of them accepts."""
    allowed: dict[tuple[str, str, str], list[str]] = {}
    for reason in reasons:
        allowed.setdefault((reason.code, reason.got, reason.hint), []).append(reason.allowed)
    for (code, got, hint), each in allowed.items():
        yield Reason(code=code, got=got, allowed=" or, in another kernel, ".join(dict.fromkeys(each)), hint=hint)


class OutOfBoundsError(IndexError):
    """A kernel that runs on the CPU touched memory outside its tensors."""
