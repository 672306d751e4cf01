"""A rule in two lines: what the rules of all arches are written with. Every rule has its evidence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from multiattn.plan.config import Rule
from multiattn.triton.decode import TritonSplitConfig, split_tiles
from multiattn.triton.plain import TMA_ARCHS, TritonConfig, tiles
from multiattn.triton.plain_backward import TritonBackwardConfig, passes
from multiattn.triton.stored_backward import stored_tiles


def by_descriptors(*rules: Rule[Any]) -> tuple[Rule[Any], ...]:
    """The rules for tensors that TMA can walk, and by it, on arches that have it. Those for pointers come behind."""
    found = ((it, tuple(arch for arch in it.arches if arch in ("cpu", *TMA_ARCHS))) for it in rules)
    return tuple(
        replace(it, arches=arches, mapped=True, config=replace(it.config, descriptors=True))
        for it, arches in found
        if arches
    )


Names = tuple[str, ...]
Range = tuple[int, int]
Numbers = tuple[int, int, int, int]


def rule(arches: Names, head_dims: Range, why: str, config: Any, **conditions: Any) -> Rule[Any]:
    """A rule for head_dims from one to another."""
    low, high = head_dims
    return Rule(arches=arches, config=config, why=why, head_dim_min=low, head_dim_max=high, **conditions)


FULL, BANDED, BOTH = (False,), (True,), (False, True)
"""Masks that a rule is for: `Rule.banded`."""


def forward(
    arches: Names, head_dims: Range, why: str, shape: Numbers, *, masks: tuple[bool, ...] = BOTH, **more: Any
) -> tuple[Rule[Any], ...]:
    """A rule for each mask, with `tiles` of so many queries and keys, warps and stages."""
    return _rules(arches, head_dims, why, functools.partial(tiles, *shape), masks, **more)


def backward(
    arches: Names,
    head_dims: Range,
    why: str,
    keys: Numbers,
    dq: Numbers | None = None,
    *,
    masks: tuple[bool, ...] = BOTH,
    reads_keys: bool | None = None,
) -> tuple[Rule[Any], ...]:
    """Rules of a backward: tiles of the pass over the queries, and of the pass over the keys if there is one."""

    def make(**more: Any) -> TritonBackwardConfig:
        return passes(tiles(*keys, **more), None if dq is None else tiles(*dq, **more))

    return tuple(replace(it, reads_keys=reads_keys) for it in _rules(arches, head_dims, why, make, masks))


def stored(arches: Names, why: str, scores: Numbers, registers: int | None = None) -> tuple[Rule[Any], ...]:
    """Rules of a backward that stores P and dS, in `stored_tiles` of scores.

    Products have 128 columns where 256 would leave more of them empty. Heads of up to 256 columns are for callers that
    name it, and have all registers.
    """
    narrow = rule(arches, (1, 256), why, stored_tiles(scores, (128, 64, 128, 8, 3)), only_named=True)
    wide = ((257, 384), (128, 64, 128, 8, 3)), ((385, 512), (128, 64, 256, 8, 4))
    configs = ((widths, stored_tiles(scores, products, registers=registers)) for widths, products in wide)
    return (narrow, *(rule(arches, widths, why, config) for widths, config in configs))


def decode(
    arches: Names,
    head_dims: Range,
    why: str,
    shape: Numbers,
    blocks_per_sm: int = 1,
    *,
    rows_max: int | None = None,
    page_multiple: int = 1,
    v_max: int | None = None,
    **more: Any,
) -> Rule[TritonSplitConfig]:
    """A rule for so many rows at most, with `split_tiles` of so many rows and keys, warps and stages.

    `v_max` is its `head_dim_v_max`, and `more` of its config.
    """
    config = replace(split_tiles(*shape, blocks_per_sm), **more)
    return rule(arches, head_dims, why, config, rows_max=rows_max, page_multiple=page_multiple, head_dim_v_max=v_max)


def _rules(
    arches: Names, head_dims: Range, why: str, make: Callable[..., TritonConfig], masks: tuple[bool, ...], **more: Any
) -> tuple[Rule[Any], ...]:
    """Under a mask tiles differ in length, and heads take turns; without one there is nothing to even out."""
    configs = ((banded, make(**{"heads_together": 8 if banded else 1, **more})) for banded in masks)
    return tuple(rule(arches, head_dims, why, config, banded=banded) for banded, config in configs)
