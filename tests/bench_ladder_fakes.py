"""Ladders to climb without a kernel: a chain called cutile, a list called cuda, both of them the eager reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from bench.matrix import Cell
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Backend, Variant
from multiattn.plan.config import Config, Rule
from multiattn.plan.support import Capability, Reason
from multiattn.problem import Problem

ARCHES = ("cpu", "sm90")
CELL = Cell(batch=1, heads=2, seq=48, head_dim=16, dtype="fp16", causal=True, layout="bhsd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile(Config):
    """A config with a field that only some rungs have a use for."""

    stages: int = 1


def variant(name: str, parent: str | None = None, *, tile_m: int = 64, stages: int = 1, **more: Any) -> Variant:
    """A variant with one rule; `more` is of Variant."""
    rule = Rule(arches=ARCHES, config=Tile(tile_m=tile_m, tile_n=32, stages=stages), why="a guess", head_dim_max=1024)
    able = Capability(arches=ARCHES, head_dim_max=1024)
    return Variant(name=name, summary=f"the rung {name}", capability=able, rules=(rule,), parent=parent, **more)


def one_stage(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """Fits nothing that has more than one stage."""
    assert isinstance(config, Tile)
    return () if config.stages == 1 else (Reason(code="config", got=f"stages={config.stages}", allowed="stages=1"),)


ILLEGAL = Reason(code="variant", got="share_qkv with split_kv", allowed="share_qkv with split_q")


def never(problem: Problem, arch: Arch, config: Config) -> tuple[Reason, ...]:
    """An illegal point."""
    return (ILLEGAL,)


CHAIN = (
    variant("full", "math", tile_m=128, stages=2),
    variant("math", "basic", stages=2, only_named=True),
    variant("basic", only_named=True, fits=one_stage),
    variant("pointer"),
)

POINTS = (
    variant("split_q+swizzle_q", "split_q", flags=(("warps", "split_q"), ("swizzle", "q"))),
    variant("split_q", only_named=True, flags=(("warps", "split_q"), ("swizzle", ""))),
    variant("split_kv", only_named=True, flags=(("warps", "split_kv"), ("swizzle", "")), fits=never),
    variant(
        "split_kv+swizzle_q", "split_kv", only_named=True, flags=(("warps", "split_kv"), ("swizzle", "q")), fits=never
    ),
)


def backend(name: str, variants: tuple[Variant, ...]) -> Backend:
    """The reference under another name, with these forward variants."""
    eager = registry.get("reference")
    return replace(eager, name=name, forward=replace(eager.forward, variants=variants))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every name of a backend mean one of these."""
    found = {"cutile": backend("cutile", CHAIN), "triton": backend("triton", CHAIN), "cuda": backend("cuda", POINTS)}
    monkeypatch.setattr(registry, "get", lambda name: found[name])
