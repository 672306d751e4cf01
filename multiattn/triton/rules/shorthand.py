"""A rule in two lines: what the rules of all arches are written with. Every rule has its evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from multiattn.plan.config import Rule
from multiattn.triton.configs import TritonConfig, TritonTwoPassConfig, tiles
from multiattn.triton.decode_configs import TritonSplitConfig, split_tiles

Names = tuple[str, ...]
Range = tuple[int, int]
Numbers = tuple[int, int, int, int]

FULL, BANDED, BOTH = (False,), (True,), (False, True)
"""Masks that a rule is for: `Rule.banded`."""


def forward(
    arches: Names, head_dims: Range, why: str, shape: Numbers, *, masks: tuple[bool, ...] = BOTH, **more: Any
) -> tuple[Rule[Any], ...]:
    """A rule for each mask, with `tiles` of so many queries and keys, warps and stages."""
    return _rules(arches, head_dims, why, tiles(*shape), masks, **more)


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
    """The same of a backward: tiles of the pass over the queries, and of the pass over the keys if there is one."""
    config = tiles(*keys) if dq is None else TritonTwoPassConfig.of(tiles(*keys), tiles(*dq))
    return tuple(replace(rule, reads_keys=reads_keys) for rule in _rules(arches, head_dims, why, config, masks))


def decode(
    arches: Names,
    head_dims: Range,
    why: str,
    shape: Numbers,
    blocks_per_sm: int = 1,
    *,
    rows_max: int | None = None,
    page_multiple: int = 1,
    **more: Any,
) -> Rule[TritonSplitConfig]:
    """A rule for so many rows at most, with `split_tiles` of so many rows and keys, warps and stages.

    `more` is of its config.
    """
    low, high = head_dims
    return Rule(
        arches=arches,
        config=replace(split_tiles(*shape, blocks_per_sm), **more),
        why=why,
        head_dim_min=low,
        head_dim_max=high,
        rows_max=rows_max,
        page_multiple=page_multiple,
    )


def _rules(
    arches: Names, head_dims: Range, why: str, config: TritonConfig, masks: tuple[bool, ...], **more: Any
) -> tuple[Rule[Any], ...]:
    """Under a mask tiles differ in length, and heads take turns; without one there is nothing to even out."""
    low, high = head_dims
    return tuple(
        Rule(
            arches=arches,
            config=replace(config, **{"heads_together": 8 if banded else 1, **more}),
            why=why,
            head_dim_min=low,
            head_dim_max=high,
            banded=banded,
        )
        for banded in masks
    )
