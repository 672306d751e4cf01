"""The matrix as data: a `Cell` is one problem to time, a suite is a named tuple of cells, a `Filter` narrows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from bench.errors import InputError
from multiattn.problem import DTYPES, Problem

TOKENS = 16384
"""Tokens (batch times length) of every cell of `standard`: the work of a layer stays, its shape changes."""

HIDDEN = 2048
"""Heads times head_dim of every cell of `standard`."""


Direction = Literal["fwd", "bwd", "fwdbwd"]
"""What of a training step is timed: the forward, the backward, or one after the other."""

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One self-attention problem: Sq = Skv = seq, as many key/value heads as query heads."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    dtype: str
    causal: bool
    layout: str
    """Order in memory: ``bshd`` (a projection's output, transposed without a copy) or ``bhsd`` (contiguous)."""
    direction: Direction = "fwd"

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction: got {self.direction!r}; allowed {', '.join(DIRECTIONS)}")

    @property
    def mask(self) -> str:
        """``causal`` or ``full``."""
        return "causal" if self.causal else "full"

    @property
    def key(self) -> str:
        """What names the cell in results and on the terminal; distinct for distinct cells."""
        sizes = f"B{self.batch} H{self.heads} N{self.seq} D{self.head_dim} {self.dtype} {self.mask} {self.layout}"
        return sizes if self.direction == "fwd" else f"{sizes} {self.direction}"

    @property
    def problem(self) -> Problem:
        """The Problem of `tensors`, made without them."""
        problem = Problem.contiguous(
            batch=self.batch,
            heads_q=self.heads,
            seq_q=self.seq,
            head_dim=self.head_dim,
            dtype=self.dtype,
            causal=self.causal,
        )
        if self.layout == "bhsd":
            return problem
        strides = (
            self.seq * self.heads * self.head_dim,
            self.head_dim if self.heads > 1 else self.seq * self.head_dim,
            self.heads * self.head_dim if self.seq > 1 else self.head_dim,
        )
        return replace(problem, strides_q=strides, strides_k=strides, strides_v=strides)

    def tensors(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v ``[B, H, S, D]``, normal values of a fixed seed, in memory as `layout` says."""
        generator = torch.Generator(device=device).manual_seed(self.seq * 1000 + self.head_dim)
        return self._draw(generator), self._draw(generator), self._draw(generator)

    def dout(self, device: torch.device | str) -> torch.Tensor:
        """The gradient of out that a backward is given, made like q; in memory like out, which has the strides of q."""
        return self._draw(torch.Generator(device=device).manual_seed(self.seq * 1000 + self.head_dim + 1))

    def _draw(self, generator: torch.Generator) -> torch.Tensor:
        shape = {
            "bhsd": (self.batch, self.heads, self.seq, self.head_dim),
            "bshd": (self.batch, self.seq, self.heads, self.head_dim),
        }[self.layout]
        values = torch.randn(shape, generator=generator, device=generator.device, dtype=DTYPES[self.dtype])
        return values.transpose(1, 2) if self.layout == "bshd" else values

    def as_dict(self) -> dict[str, Any]:
        """Fields by name, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return self.key


def _standard() -> tuple[Cell, ...]:
    return tuple(
        Cell(
            batch=TOKENS // seq,
            heads=HIDDEN // head_dim,
            seq=seq,
            head_dim=head_dim,
            dtype="bf16",
            causal=causal,
            layout="bshd",
        )
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seq in (512, 1024, 2048, 4096, 8192, 16384)
    )


def _seed() -> tuple[Cell, ...]:
    """The matrix of the cuTile FMHA scaling analysis (DGX Spark playbook)."""
    return tuple(
        Cell(batch=4, heads=32, seq=seq, head_dim=128, dtype="fp16", causal=True, layout="bhsd")
        for seq in (1024, 2048, 4096, 8192, 16384)
    )


def _backward() -> tuple[Cell, ...]:
    return tuple(replace(cell, direction="bwd") for cell in _standard() if cell.seq in (1024, 4096, 16384))


def _floors() -> tuple[Cell, ...]:
    everywhere = (*_standard(), *_backward())
    return tuple(cell for cell in everywhere if cell.head_dim == 128 and cell.seq == 4096)


def _smoke() -> tuple[Cell, ...]:
    return tuple(
        Cell(batch=1, heads=2, seq=256, head_dim=head_dim, dtype=dtype, causal=causal, layout="bshd")
        for head_dim, dtype in ((64, "bf16"), (128, "fp16"))
        for causal in (False, True)
    )


SUITES: Mapping[str, tuple[Cell, ...]] = MappingProxyType(
    {"standard": _standard(), "seed": _seed(), "backward": _backward(), "floors": _floors(), "smoke": _smoke()}
)
"""Every suite by name. `host`, the cost of a call, is no suite of cells: see bench.host."""


def find_suite(name: str) -> tuple[Cell, ...]:
    """The cells of the suite called `name`; ValueError for a name without one."""
    if name not in SUITES:
        raise InputError(f"--suite: got {name!r}; allowed {', '.join(SUITES)}")
    return SUITES[name]


def in_directions(cells: tuple[Cell, ...], directions: tuple[Direction, ...]) -> tuple[Cell, ...]:
    """The problems of `cells` in each of `directions`, one direction after the other; none is as the cells have it."""
    if not directions:
        return cells
    turned = (replace(cell, direction=direction) for direction in directions for cell in cells)
    return tuple(dict.fromkeys(turned))


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Which cells of a suite; an empty tuple or None narrows nothing."""

    head_dims: tuple[int, ...] = ()
    seqs: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    causal: bool | None = None

    def apply(self, cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
        """The cells that pass. ValueError, naming what there is, for a value that no cell has."""
        _check("--head-dim", self.head_dims, {cell.head_dim for cell in cells})
        _check("--seq", self.seqs, {cell.seq for cell in cells})
        _check("--dtype", self.dtypes, {cell.dtype for cell in cells})
        if self.causal is not None:
            _check("--causal/--full", (self.causal,), {cell.causal for cell in cells})
        return tuple(
            cell
            for cell in cells
            if (not self.head_dims or cell.head_dim in self.head_dims)
            and (not self.seqs or cell.seq in self.seqs)
            and (not self.dtypes or cell.dtype in self.dtypes)
            and self.causal in (None, cell.causal)
        )


def _check(option: str, got: tuple[Any, ...], allowed: set[Any]) -> None:
    wrong = [value for value in got if value not in allowed]
    if wrong:
        have = ", ".join(map(str, sorted(allowed)))
        raise InputError(f"{option}: got {', '.join(map(str, wrong))}; this suite has {have}")
