"""Limits of configs: checks of their fields and of what a launch asks for, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field, fields
from typing import Any

from multiattn.plan import remedies
from multiattn.plan.arch import GRID_MAX, Arch
from multiattn.plan.support import Reason

Check = tuple[bool, str, str]
"""True if something holds of a config; what came; what is allowed."""


def failed(checks: Iterable[Check]) -> tuple[Reason, ...]:
    """A Reason for each check that does not hold."""
    return tuple(
        Reason(code="config", got=got, allowed=allowed, hint=remedies.OTHERS)
        for holds, got, allowed in checks
        if not holds
    )


FieldRule = tuple[Callable[[Any], bool], str]
"""True for the values of a field that are allowed; the same in words."""


def one_of(*values: object) -> FieldRule:
    """Allows certain values."""
    return lambda it: it in values, ", ".join(map(str, values))


def between(low: int, high: int, *others: object) -> FieldRule:
    """Allows the numbers from one to another, and other values."""
    return lambda it: it in others or low <= it <= high, f"{low} to {high}"


AT_LEAST_1: FieldRule = (lambda it: it >= 1, "1 or more")


def powers_of_two(low: int, high: int | None = None) -> FieldRule:
    """Allows 1, 2, 4 and so on, as far as they are between two of them."""
    text = f"powers of two from {low}" + (f" to {high}" if high else "")
    return lambda it: it >= low and it & (it - 1) == 0 and (high is None or it <= high), text


_LIMIT = "limit"


def limited(rule: FieldRule, **more: Any) -> Any:
    """A field of a config that says itself what is allowed; `more` is of `dataclasses.field`."""
    return field(metadata={_LIMIT: rule}, **more)


def limit_checks(config: Any) -> list[Check]:
    """A check for each field that is `limited`."""
    limits = {it.name: it.metadata[_LIMIT] for it in fields(config) if _LIMIT in it.metadata}
    values = ((name, getattr(config, name), *limit) for name, limit in limits.items())
    return [(holds(value), f"{name}={value}", allowed) for name, value, holds, allowed in values]


def size_checks(config: object, arch: Arch, smem_bytes: int, blocks: int) -> tuple[Check, Check]:
    """Checks that an arch has what a launch asks for: shared memory of a block, blocks of a grid."""
    most = arch.smem_per_block
    memory = f"{smem_bytes} bytes of shared memory or more ({config})", f"{most} bytes a block on {arch.name}"
    return (
        (not arch.is_gpu or smem_bytes <= most, *memory),
        (blocks <= GRID_MAX, f"{blocks} blocks", f"a grid of up to {GRID_MAX}"),
    )
