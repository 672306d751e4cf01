"""The matrix as data: a `Cell` is one problem to time, a suite is a named tuple of cells."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from multiattn.inspect.options import HIDDEN, TOKENS
from multiattn.layout import DTYPES
from multiattn.problem import Problem


class InputError(ValueError):
    """An argument or a file that was given is not what is accepted; the message names both."""


Direction = Literal["fwd", "bwd", "fwdbwd"]
"""The part of a training step that is timed: the forward, the backward, or one after the other."""

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One self-attention problem: Sq = Skv = seq."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    dtype: str
    causal: bool
    layout: str
    """Order in memory: ``bshd`` (a projection's output, transposed without a copy) or ``bhsd`` (contiguous)."""
    direction: Direction = "fwd"
    heads_kv: int | None = None
    """Key/value heads where they are fewer (GQA); None: as many as query heads."""

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction: got {self.direction!r}; allowed {', '.join(DIRECTIONS)}")
        if self.heads_kv is not None and not (0 < self.heads_kv < self.heads and self.heads % self.heads_kv == 0):
            allowed = f"None, or a divisor of heads={self.heads} below it"
            raise ValueError(f"heads_kv: got {self.heads_kv}; allowed {allowed}")

    @property
    def heads_text(self) -> str:
        """``16``, or ``16/2`` of 16 query heads on 2 key/value heads."""
        return f"{self.heads}" if self.heads_kv is None else f"{self.heads}/{self.heads_kv}"

    @property
    def mask(self) -> str:
        """``causal`` or ``full``."""
        return "causal" if self.causal else "full"

    @property
    def key(self) -> str:
        """The name of the cell in results and on the terminal; distinct for distinct cells."""
        sizes = f"B{self.batch} H{self.heads_text} N{self.seq} D{self.head_dim} {self.dtype} {self.mask} {self.layout}"
        return sizes if self.direction == "fwd" else f"{sizes} {self.direction}"

    @property
    def problem(self) -> Problem:
        """The Problem of `tensors`, made of memory that is reserved and not touched."""
        q, k, v = (self._shaped(torch.empty, heads, device="cpu") for heads in self._heads)
        return Problem.of(q, k, v, causal=self.causal)

    @property
    def _heads(self) -> tuple[int, int, int]:
        heads_kv = self.heads if self.heads_kv is None else self.heads_kv
        return self.heads, heads_kv, heads_kv

    def tensors(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q ``[B, H, S, D]``, k and v ``[B, Hkv, S, D]``, normal values of a fixed seed, in memory as `layout` says."""
        generator = torch.Generator(device=device).manual_seed(self.seq * 1000 + self.head_dim)
        draw = functools.partial(torch.randn, generator=generator)
        q, k, v = (self._shaped(draw, heads, device=device) for heads in self._heads)
        return q, k, v

    def dout(self, device: torch.device | str) -> torch.Tensor:
        """The gradient of out that a backward is given, made like q; in memory like out, which has the strides of q."""
        generator = torch.Generator(device=device).manual_seed(self.seq * 1000 + self.head_dim + 1)
        return self._shaped(functools.partial(torch.randn, generator=generator), self.heads, device=device)

    def _shaped(self, make: Callable[..., torch.Tensor], heads: int, device: torch.device | str) -> torch.Tensor:
        dtype = DTYPES[self.dtype]
        if self.layout == "bhsd":
            return make((self.batch, heads, self.seq, self.head_dim), dtype=dtype, device=device)
        return make((self.batch, self.seq, heads, self.head_dim), dtype=dtype, device=device).transpose(1, 2)

    def as_dict(self) -> dict[str, Any]:
        """Fields by name, for JSON; without heads_kv where it is None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return self.key


def _standard() -> tuple[Cell, ...]:
    plain = Cell(batch=1, heads=1, seq=1, head_dim=64, dtype="bf16", causal=False, layout="bshd")
    return tuple(
        replace(plain, batch=TOKENS // seq, heads=HIDDEN // head_dim, seq=seq, head_dim=head_dim, causal=causal)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seq in (512, 1024, 2048, 4096, 8192, 16384)
    )


def _backward() -> tuple[Cell, ...]:
    return tuple(replace(cell, direction="bwd") for cell in _standard() if cell.seq in (1024, 4096, 16384))


def _heldout() -> tuple[Cell, ...]:
    """Cells that no sweep of configs has seen: other head_dims and lengths, one sequence at a time, fp16, GQA."""
    plain = Cell(batch=1, heads=16, seq=4096, head_dim=128, dtype="bf16", causal=False, layout="bshd")

    def sized(head_dim: int, seq: int) -> Cell:
        return replace(plain, batch=TOKENS // seq or 1, heads=round(HIDDEN / head_dim), seq=seq, head_dim=head_dim)

    full = (
        *(sized(head_dim, seq) for head_dim in (96, 160, 192) for seq in (2048, 8192)),
        *(sized(head_dim, seq) for head_dim in (64, 128, 256) for seq in (3000, 32768)),
        plain,
        *(replace(sized(head_dim, 4096), dtype="fp16") for head_dim in (64, 128, 256)),
        *(replace(sized(128, seq), heads_kv=2) for seq in (2048, 8192)),
    )
    return tuple(replace(cell, causal=causal) for cell in full for causal in (False, True))


def _between() -> tuple[Cell, ...]:
    """Head_dims between those of the standard suite: sweeps at them speak for all that are like them."""
    return tuple(
        replace(cell, head_dim=head_dim, heads=round(HIDDEN / head_dim))
        for head_dim in (80, 144, 176)
        for cell in _standard()
        if cell.head_dim == 64 and cell.seq in (1024, 4096, 16384)
    )


SUITES: Mapping[str, tuple[Cell, ...]] = MappingProxyType(
    {
        "standard": _standard(),
        "between": _between(),
        "heldout": _heldout(),
        # Of the cuTile FMHA scaling analysis (DGX Spark playbook): what chains of rungs are climbed on.
        "seed": tuple(
            Cell(batch=4, heads=32, seq=seq, head_dim=128, dtype="fp16", causal=True, layout="bhsd")
            for seq in (1024, 2048, 4096, 8192, 16384)
        ),
        # Of flash-attn-mma (LeetCUDA): what the points of CUDA's axes are timed on.
        "points": tuple(
            Cell(batch=1, heads=heads, seq=8192, head_dim=head_dim, dtype="fp16", causal=False, layout="bhsd")
            for head_dim, heads in ((64, 8), (128, 8), (512, 48), (1024, 16))
        ),
        "backward": _backward(),
        "floors": tuple(it for it in (*_standard(), *_backward()) if it.head_dim == 128 and it.seq == 4096),
        "smoke": tuple(
            Cell(batch=1, heads=2, seq=256, head_dim=head_dim, dtype=dtype, causal=causal, layout="bshd")
            for head_dim, dtype in ((64, "bf16"), (128, "fp16"))
            for causal in (False, True)
        ),
    }
)
"""Every suite by name."""


def in_directions(cells: tuple[Cell, ...], directions: Sequence[Direction]) -> tuple[Cell, ...]:
    """The problems of `cells` in each direction, one direction after the other; without any, `cells` as they are."""
    turned = (replace(cell, direction=direction) for direction in directions for cell in cells)
    return tuple(dict.fromkeys(turned)) or cells


def narrowed(cells: tuple[Cell, ...], **wanted: Sequence[Any]) -> tuple[Cell, ...]:
    """The cells whose fields have one of the wanted values; a field for which none is given is not asked.

    InputError, naming what there is, for a value that no cell has.
    """
    for name, values in wanted.items():
        there = {getattr(cell, name) for cell in cells}
        if wrong := [value for value in values if value not in there]:
            have = ", ".join(map(str, sorted(there)))
            raise InputError(f"{name}: got {', '.join(map(str, wrong))}; this suite has {have}")
    return tuple(
        cell for cell in cells if all(not values or getattr(cell, name) in values for name, values in wanted.items())
    )


# ---------------------------------------------------------------- work


def forward_flops(problem: Problem) -> int:
    """FLOP of one forward: two products of ``2*D`` FLOP per visible (query, key) pair, of every query head.

    Masked pairs do not count, so a causal kernel gains nothing by computing them. Exponentials do not count.
    """
    return 4 * problem.batch * problem.heads_q * problem.visible_pairs * problem.head_dim


def cell_flops(cell: Cell) -> int:
    """FLOP of a cell in its direction. A backward has five products: scores again, dv, dp, dk and dq.

    A backward that computes scores and dp twice gets no credit for it, so that rates compare times (Dao,
    "FlashAttention-2", section 4.1).
    """
    return {"fwd": 2, "bwd": 5, "fwdbwd": 7}[cell.direction] * forward_flops(cell.problem) // 2


def tflops(flops: int, time_ms: float) -> float:
    """10^12 FLOP per second. ValueError for a time that no launch can take."""
    if time_ms <= 0:
        raise ValueError(f"time_ms: got {time_ms}; a measured time is positive")
    return flops / time_ms / 1e9


def rate_text(rate: float) -> str:
    """TFLOPS for a table: whole numbers, but two digits of a rate below ten, so that none reads as 0."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"
