"""Which rungs a ladder has, on which cells they run, and what their contenders are called.

Two kinds of ladder: a chain (`multiattn.plan.backend.ladder`: each rung adds one thing to the one before), and a list
of points on several axes, which is too wide to be one chain.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bench.errors import InputError
from bench.matrix import Cell
from bench.providers import PIN, Ours, pin_plan
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import BACKENDS, Backend, Plan, Variant, ladder, make_plan, plan_variant
from multiattn.plan.support import Reason, Unsupported


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a ladder is climbed on, unless somebody asks for other sizes: one cell per head_dim and length."""

    batch: int
    heads: int
    head_dims: tuple[int, ...]
    seqs: tuple[int, ...]
    dtype: str
    causal: bool

    def cells(self) -> tuple[Cell, ...]:
        """Contiguous ``[B, H, S, D]`` tensors, as both systems that the ladders answer to have them."""
        return tuple(
            Cell(
                batch=self.batch,
                heads=self.heads,
                seq=seq,
                head_dim=head_dim,
                dtype=self.dtype,
                causal=self.causal,
                layout="bhsd",
            )
            for head_dim in dict.fromkeys(self.head_dims)
            for seq in sorted(set(self.seqs))
        )


CHAIN = Shape(
    batch=4, heads=32, head_dims=(128,), seqs=(1024, 2048, 4096, 8192, 16384), dtype="fp16", causal=True
)  # fmt: skip
"""Of the cuTile FMHA scaling analysis (DGX Spark playbook)."""

POINTS = Shape(batch=1, heads=8, head_dims=(64,), seqs=(8192,), dtype="fp16", causal=False)
"""Of flash-attn-mma (LeetCUDA)."""

SHAPES: Mapping[str, Shape] = MappingProxyType({"triton": CHAIN, "cutile": CHAIN, "cuda": POINTS})
LISTED = ("cuda",)
"""Backends whose variants are a list of points; the others have chains."""

TILEGYM, CUDNN = "tilegym", "sdpa-cudnn"
_FLASH_UP_TO = 256


def baseline(head_dim: int) -> str:
    """The peer that speed-ups are over: SDPA's flash kernel where it takes the head_dim, else its efficient one."""
    return "sdpa-flash" if head_dim <= _FLASH_UP_TO else "sdpa-efficient"


def find_backend(name: str) -> Backend:
    """The backend called `name`; InputError for another word."""
    if name not in BACKENDS:
        raise InputError(f"--backend: got {name!r}; allowed {', '.join(BACKENDS)}")
    return registry.get(name)


# ---------------------------------------------------------------- names


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """A contender of a ladder by its parts: ``cutile/math``, or ``cutile/math@full`` where it is pinned."""

    backend: str
    variant: str
    pin: str = ""
    """The variant whose config it runs; empty where it runs that of its own rules."""

    @classmethod
    def parse(cls, contender: str) -> Rung | None:
        """The rung of that name; None for a peer, and for a backend's best, which is no rung by name."""
        backend, _, rung = contender.partition("/")
        variant, _, pin = rung.partition(PIN)
        return cls(backend=backend, variant=variant, pin=pin) if backend in BACKENDS and variant else None

    @property
    def provider(self) -> Ours:
        """What makes the contender."""
        return Ours(backend=self.backend, variant=self.variant, pinned_to=self.pin or None)

    def __str__(self) -> str:
        return self.provider.name


# ---------------------------------------------------------------- which


def top_of(backend: Backend, cell: Cell, arch: Arch, named: str | None = None) -> str:
    """The top of a chain: `named`, else the first offered variant that can run `cell` on `arch`.

    InputError for a name that nobody has, or where nothing offered can run it.
    """
    if named is not None:
        try:
            ladder(backend, named)
        except ValueError as error:
            raise InputError(f"--top: {error}") from None
        return named
    try:
        return make_plan(backend, cell.problem, arch, probe=False).variant
    except Unsupported as error:
        raise InputError(str(error)) from None


def chain_rungs(backend: Backend, top: str) -> tuple[Rung, ...]:
    """Every rung with the config of the top, then every rung with its own; the top itself, the same in both, once."""
    names = [variant.name for variant in ladder(backend, top)]
    pinned = (Rung(backend=backend.name, variant=name, pin=top) for name in names[:-1])
    return (*pinned, *(Rung(backend=backend.name, variant=name) for name in names))


def points_of(backend: Backend) -> tuple[Variant, ...]:
    """The variants that are points on the axes of a list; a kernel of its own has no flags, and is none."""
    return tuple(variant for variant in backend.forward.variants if variant.flags)


def listed_rungs(backend: Backend, patterns: Sequence[str] = ()) -> tuple[Rung, ...]:
    """Every point, or those that match one of the glob `patterns`; InputError for one that matches nothing."""
    points = points_of(backend)
    names = [variant.name for variant in points]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            shown = ", ".join(variant.name for variant in points if not variant.only_named)
            raise InputError(
                f"--variant: {pattern!r} matches none of the {len(names)} forward variants of {backend.name}; "
                f"offered are {shown}"
            )
    chosen = (name for name in names if not patterns or any(fnmatch.fnmatchcase(name, it) for it in patterns))
    return tuple(Rung(backend=backend.name, variant=name) for name in chosen)


def plan_rung(rung: Rung, cell: Cell, arch: Arch) -> Plan | tuple[Reason, ...]:
    """What a rung would launch in a cell, by the data alone; or every reason why it cannot."""
    backend = registry.get(rung.backend)
    variant = registry.find_variant(backend, rung.variant)
    if not rung.pin:
        return plan_variant(backend, variant, cell.problem, arch)
    top = plan_variant(backend, registry.find_variant(backend, rung.pin), cell.problem, arch)
    if not isinstance(top, Plan):
        return top
    return pin_plan(backend, variant, top)
