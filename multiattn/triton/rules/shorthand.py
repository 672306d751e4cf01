"""A rule in two lines: what the rules of all arches are written with. Every rule has its evidence."""

from __future__ import annotations

from typing import Any

from multiattn.plan.config import Rule
from multiattn.triton.configs import BackwardConfig, Tiles, TritonConfig

FULL, BANDED, BOTH = (False,), (True,), (False, True)
"""Masks that a rule is for: `Rule.banded`."""
HEADS_TOGETHER = 8
"""Heads that take turns under a mask, where tiles differ in length. Without one there is nothing to even out."""


def forward(
    arches: tuple[str, ...],
    head_dims: tuple[int, int],
    why: str,
    tiles: tuple[int, int, int, int],
    *,
    registers: int | None = None,
    masks: tuple[bool, ...] = BOTH,
    heads_together: int = HEADS_TOGETHER,
) -> tuple[Rule[TritonConfig], ...]:
    """A rule for each mask, which differ in the launch order only. `tiles` as `Tiles` has them."""
    return tuple(
        _rule(arches, head_dims, why, TritonConfig(**_named(tiles), heads_together=together, registers=registers), mask)
        for mask, together in _masks(masks, heads_together)
    )


def backward(
    arches: tuple[str, ...],
    head_dims: tuple[int, int],
    why: str,
    keys: tuple[int, int, int, int],
    dq: tuple[int, int, int, int] | None = None,
    *,
    masks: tuple[bool, ...] = BOTH,
) -> tuple[Rule[BackwardConfig], ...]:
    """The same of a backward: tiles of the pass over the queries, and of the pass over the keys if there is one."""
    return tuple(
        _rule(arches, head_dims, why, BackwardConfig.of(Tiles(*keys), dq and Tiles(*dq), together), mask)
        for mask, together in _masks(masks, HEADS_TOGETHER)
    )


def _masks(masks: tuple[bool, ...], heads_together: int) -> list[tuple[bool, int]]:
    return [(banded, heads_together if banded else 1) for banded in masks]


def _named(tiles: tuple[int, int, int, int]) -> dict[str, int]:
    return Tiles(*tiles)._asdict()


def _rule(arches: tuple[str, ...], head_dims: tuple[int, int], why: str, config: Any, banded: bool) -> Rule[Any]:
    low, high = head_dims
    return Rule(arches=arches, config=config, why=why, head_dim_min=low, head_dim_max=high, banded=banded)
