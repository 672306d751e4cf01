"""Which kernels a table is of: a cell is a backend's plan of one direction, head_dim and mask for one target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiattn.inspect.roofline import HIDDEN, TOKENS
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS, by_name
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, Plan, make_plan
from multiattn.plan.support import Unsupported
from multiattn.problem import Problem

HEAD_DIMS = (64, 128, 256)
MASKS = ("full", "causal")

SEQ = 4096
"""Length of a cell that says no more: of `TOKENS` in all, heads * head_dim = `HIDDEN`, as the matrix times them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What to compile: a backend's best variant (or the named one) of a direction for an arch, at one problem."""

    backend: str
    arch: str
    direction: Direction = "forward"
    head_dim: int = 128
    mask: str = "causal"
    dtype: str = "bf16"
    variant: str | None = None
    shape: tuple[int, int, int] | None = None
    """Batch, heads and length of q, where they are not the usual ones."""
    kv_heads: int | None = None
    """Where they are not those of q; so is `kv_len`."""
    kv_len: int | None = None

    @property
    def problem(self) -> Problem:
        """The problem that is planned for. Lengths only matter where a rule asks for them."""
        batch, heads, seq = self.shape or (TOKENS // SEQ, max(1, HIDDEN // self.head_dim), SEQ)
        return Problem.contiguous(
            batch=batch,
            heads_q=heads,
            heads_kv=self.kv_heads,
            seq_q=seq,
            seq_kv=self.kv_len,
            head_dim=self.head_dim,
            dtype=self.dtype,
            causal=self.mask == "causal",
        )

    def plan(self) -> Plan:
        """The Plan, asking only data; Unsupported with every reason where there is none."""
        return make_plan(
            registry.get(self.backend),
            self.problem,
            by_name(self.arch),
            direction=self.direction,
            variant=self.variant,
            probe=False,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cell:
        """A cell of what `dataclasses.asdict` gave, through JSON or not."""
        shape = data["shape"]
        return cls(**{**data, "shape": None if shape is None else tuple(shape)})

    @property
    def place(self) -> tuple[Any, ...]:
        """Where it stands among others: by direction, backend, variant, head_dim, mask and arch."""
        which = DIRECTIONS.index(self.direction), BACKENDS.index(self.backend), self.variant or ""
        return (*which, self.head_dim, MASKS.index(self.mask), GPU_ARCHS.index(self.arch))

    @property
    def what(self) -> str:
        """Its problem in short."""
        shape = "" if self.shape is None else " B={} H={} N={}".format(*self.shape)
        return f"D={self.head_dim} {self.mask}{'' if self.dtype == 'bf16' else ' ' + self.dtype}{shape}"

    def __str__(self) -> str:
        variant = "" if self.variant is None else f"/{self.variant}"
        return f"{self.backend}{variant} {self.direction} {self.what} {self.arch}"


def cells(
    backends: Sequence[str] = BACKENDS,
    arches: Sequence[str] = GPU_ARCHS,
    *,
    directions: Sequence[Direction] = DIRECTIONS,
    head_dims: Sequence[int] = HEAD_DIMS,
    masks: Sequence[str] = MASKS,
    variants: Sequence[str | None] = (None,),
    **rest: Any,
) -> list[Cell]:
    """The product of what is given, in the order of a table; `rest` is what all cells share.

    Of `variants`, None is a backend's best for the problem, ``offered`` all that a caller may get unasked, ``all`` also
    those that must be named, and else it is a name: backends without it have no such cell.
    """
    found = [
        Cell(
            backend=backend,
            arch=arch,
            direction=direction,
            head_dim=head_dim,
            mask=mask,
            variant=name,
            **rest,
        )
        for direction in directions
        for backend in backends
        for name in dict.fromkeys(_named(backend, direction, variants))
        for head_dim in head_dims
        for mask in masks
        for arch in arches
    ]
    return sorted(dict.fromkeys(found), key=lambda cell: cell.place)


def _named(backend: str, direction: Direction, variants: Sequence[str | None]) -> Iterator[str | None]:
    op = registry.get(backend).op(direction)
    for asked in variants:
        if asked in ("all", "offered"):
            yield from (variant.name for variant in (op.variants if asked == "all" else op.offered))
        elif asked is None or any(variant.name == asked for variant in op.variants):
            yield asked


def find_plan(cell: Cell) -> Plan | Unsupported:
    """The Plan of a cell, or what refuses it."""
    try:
        return cell.plan()
    except Unsupported as error:
        return error
