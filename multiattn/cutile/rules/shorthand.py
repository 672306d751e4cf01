"""Rules and configs in few words, for all arches: what a family's config is called is told here alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from multiattn.cutile.backward import OnePassConfig, PassConfig, StoredConfig, TwoPassConfig
from multiattn.cutile.forward import CutileConfig
from multiattn.plan.config import Rule


def rule(
    arches: tuple[str, ...], head_dims: tuple[int, int], banded: bool | None, config: Any, *, why: str, **more: Any
) -> Rule[Any]:
    """A rule for head_dims from one to another, with `more` conditions."""
    low, high = head_dims
    return Rule(arches=arches, head_dim_min=low, head_dim_max=high, banded=banded, config=config, why=why, **more)


def forward(tile_m: int, tile_n: int, **hints: Any) -> CutileConfig:
    """A config of the forward."""
    return CutileConfig(tile_m=tile_m, tile_n=tile_n, **hints)


def one_pass(tile_m: int, tile_n: int, **hints: Any) -> OnePassConfig:
    """A config of the backward in one pass."""
    return OnePassConfig(tile_m=tile_m, tile_n=tile_n, **hints)


def queries(tile_m: int, tile_n: int, **hints: Any) -> PassConfig:
    """A config of the kernel that owns queries."""
    return PassConfig(tile_m=tile_m, tile_n=tile_n, **hints)


def two_passes(keys: OnePassConfig, dq: PassConfig) -> TwoPassConfig:
    """A config of two passes, of that of the kernel that owns keys."""
    return TwoPassConfig(**asdict(keys), dq=dq)


def stored(keys: OnePassConfig, dq: PassConfig, *, stagger: int = 0) -> StoredConfig:
    """A config with ds stored, of that of the kernel that owns keys."""
    return StoredConfig(**asdict(keys), dq=dq, stagger=stagger)
