"""The rules that are compiled for the record: each config of each rule, on every arch that the rule names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS, by_name
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, Plan, Variant, plan_variant
from multiattn.plan.config import Rule, has_whole_sectors, select
from multiattn.problem import DTYPES, Problem

HEAD_DIMS = (64, 128, 256)
SEQ, BATCH, HEADS = 4096, 4, 16
RULE_DTYPES = ("bf16", "fp16")  # the first unless a rule is for the other alone
RUNG_ARCHS = ("sm80", "sm90")
"""The arches that rules of ``only_named`` variants are compiled for: one with and one without wgmma and TMA."""

Key = tuple[str, ...]


def key_of(plan: Plan) -> Key:
    """A Plan's name in the record: backend, direction, variant, arch, head_dim, mask, config."""
    mask = "causal" if plan.problem.causal else "full"
    where = (plan.backend, plan.direction, plan.variant, plan.arch.name, str(plan.problem.head_dim), mask)
    return (*where, str(plan.config))


def cases(
    backends: Sequence[str] = BACKENDS,
    directions: Sequence[Direction] = DIRECTIONS,
    arches: Sequence[str] = GPU_ARCHS,
) -> list[Plan]:
    """A Plan for every rule, arch, head_dim and mask, with a problem for which the rule is the one chosen.

    Rules of one config share a Plan. Of variants that must be named only those that span the flags are walked, on
    `RUNG_ARCHS`: there may be a hundred.
    """
    found: dict[Key, Plan] = {}
    for name, direction in itertools.product(backends, directions):
        op = registry.get(name).op(direction)
        for variant in op.variants:
            if variant.only_named and op.spanning and variant.name not in op.spanning:
                continue
            walked = [arch for arch in arches if not variant.only_named or arch in RUNG_ARCHS]
            for rule in variant.rules:
                for plan in _plans_of(name, direction, variant, rule, walked):
                    found.setdefault(key_of(plan), plan)
    return list(found.values())


def dead_rules(backends: Sequence[str] = BACKENDS, directions: Sequence[Direction] = DIRECTIONS) -> list[str]:
    """One line for each rule that no problem chooses on an arch that the rule names; rules of named variants aside.

    Arches on which its variant does not run do not count.
    """
    return [
        f"{name} {direction} {variant.name} {arch}: nothing chooses the rule {rule}"
        for name, direction in itertools.product(backends, directions)
        for variant in registry.get(name).op(direction).offered
        for rule in variant.rules
        for arch in set(rule.arches) & set(GPU_ARCHS) & set(variant.capability.arches)
        if not any(_plans_of(name, direction, variant, rule, (arch,)))
    ]


def _plans_of(
    backend: str, direction: Direction, variant: Variant, rule: Rule[Any], arches: Sequence[str]
) -> Iterator[Plan]:
    head_dims = _head_dims(rule, variant.capability.head_dim_multiple)
    masks = (False, True) if rule.banded is None else (rule.banded,)
    for arch, head_dim, causal in itertools.product(arches, head_dims, masks):
        if arch in rule.arches:
            plan = _plan(backend, direction, variant, rule, arch, head_dim, causal)
            if plan is not None:
                yield plan


def _head_dims(rule: Rule[Any], multiple: int) -> list[int]:
    """The `HEAD_DIMS` of a rule; and its widest where there is none, or earlier rules may take all."""
    itemsize = DTYPES[RULE_DTYPES[0]].itemsize  # as of the other
    allowed = [
        it
        for it in range(rule.head_dim_min, rule.head_dim_max + 1)
        if it % multiple == 0 and rule.whole_sectors in (None, has_whole_sectors(it, itemsize))
    ]
    found = [it for it in HEAD_DIMS if it in allowed]
    return found if found and rule.head_dim_max <= HEAD_DIMS[-1] else [*found, *allowed[-1:]]


def _plan(
    backend: str, direction: Direction, variant: Variant, rule: Rule[Any], arch: str, head_dim: int, causal: bool
) -> Plan | None:
    """The Plan of the first problem for which `rule` is chosen, of lengths that it is for; None if there is none."""
    target = by_name(arch)
    for dtype, seq, batch in itertools.product(RULE_DTYPES, _lengths(variant.rules), _batches(variant.rules)):
        problem = Problem.contiguous(
            batch=batch, heads_q=HEADS, seq_q=seq, head_dim=head_dim, dtype=dtype, causal=causal
        )
        if select(variant.rules, problem, target)[0] is rule:
            plan = plan_variant(registry.get(backend), variant, problem, target, direction=direction)
            if isinstance(plan, Plan):
                return plan
    return None


def _lengths(rules: Sequence[Rule[Any]]) -> list[int]:
    """Lengths on either side of every limit of the rules, the usual one first."""
    edges = {rule.seq_min for rule in rules} | {rule.seq_max + 1 for rule in rules if rule.seq_max is not None}
    near = {length for edge in edges for length in (edge - 1, edge) if length > 0}
    return list(dict.fromkeys((SEQ, *sorted(near, reverse=True))))


def _batches(rules: Sequence[Rule[Any]]) -> list[int]:
    edges = {rule.batch_max for rule in rules if rule.batch_max is not None}
    return list(dict.fromkeys((BATCH, *sorted(batch for edge in edges for batch in (edge, edge + 1)))))
