"""Rules that came of sweeps on a GPU: `tuned.json` beside this file, a rule a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeVar

from multiattn.plan.config import Config, Rule

C = TypeVar("C", bound=Config)


def tuned_rules(backend: str, variant: str, make: Callable[..., C]) -> tuple[Rule[C], ...]:
    """The tuned rules of one forward variant, best first; `make` makes a config of its fields.

    TypeError where a row has other fields than a `Rule`, or its config other fields than `make` takes.
    """
    rows = json.loads(resources.files(__package__).joinpath("tuned.json").read_text())
    return tuple(_rule(make, **row) for row in rows if (row.pop("backend"), row.pop("variant")) == (backend, variant))


def _rule(make: Callable[..., C], *, arches: list[str], config: dict[str, Any], **rest: Any) -> Rule[C]:
    return Rule(arches=tuple(arches), config=make(**config), **rest)
