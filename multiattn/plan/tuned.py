"""Rules that came of sweeps on a GPU: `tuned.json` beside this file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from importlib import resources
from typing import Any, TypeVar

from multiattn.plan.arch import GPU_ARCHS
from multiattn.plan.backend import DIRECTIONS, Direction
from multiattn.plan.config import Config, Rule

C = TypeVar("C", bound=Config)

VARIANTS: tuple[tuple[str, Direction, str], ...] = (
    ("cuda", "forward", "wgmma"),
    ("triton", "forward", "warp_specialized"),
)
"""Backend, direction and name of those whose rules begin with what is tuned."""
HEAD_DIM_MAX = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """One rule as data; its fields are those of `multiattn.plan.config.Rule`. ValueError names each wrong one."""

    backend: str
    variant: str
    direction: Direction
    arches: tuple[str, ...]
    head_dim_min: int
    head_dim_max: int
    banded: bool | None
    seq_min: int
    seq_max: int | None
    config: Mapping[str, Any]
    why: str

    def __post_init__(self) -> None:
        backends = tuple(dict.fromkeys(backend for backend, _, _ in VARIANTS))
        variants = tuple(name for *of, name in VARIANTS if of == [self.backend, self.direction])
        known, longest = set(self.arches) <= set(GPU_ARCHS), self.seq_max
        checks = (
            ("direction", self.direction in DIRECTIONS, ", ".join(DIRECTIONS)),
            ("backend", self.backend in backends, ", ".join(backends)),
            (
                "variant",
                self.backend not in backends or self.variant in variants,
                f"for {self.direction}: {', '.join(variants) or 'none'}",
            ),
            ("arches", bool(self.arches) and known, f"some of {', '.join(GPU_ARCHS)}"),
            ("head_dim_min", _is_count(self.head_dim_min, 1, HEAD_DIM_MAX), f"1 to {HEAD_DIM_MAX}"),
            ("head_dim_max", _is_count(self.head_dim_max, self.head_dim_min, HEAD_DIM_MAX), "from head_dim_min to 256"),
            ("banded", self.banded in (True, False, None), "true, false, or null for both"),
            ("seq_min", _is_count(self.seq_min, 0), "a whole number from 0 on"),
            ("seq_max", longest is None or _is_count(longest, self.seq_min), "from seq_min on, or null for no limit"),
            ("config", isinstance(self.config, Mapping) and bool(self.config), "a config's fields by name"),
            ("why", isinstance(self.why, str) and bool(self.why), "what was measured"),
        )
        wrong = [f"{name}: got {getattr(self, name)!r}; allowed {what}" for name, holds, what in checks if not holds]
        if wrong:
            raise ValueError("; ".join(wrong))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tuned:
        """A rule of what `as_dict` gave, through JSON or not; ValueError for anything else."""
        check_fields(cls, data)
        return cls(**{**data, "arches": tuple(data["arches"])})

    def as_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        return asdict(self)


def _is_count(value: object, low: int, high: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_fields(made: type, data: Mapping[str, Any]) -> None:
    """ValueError unless `data` has only fields of the dataclass `made`, and those without a default all."""
    known = {field.name: field for field in fields(made)}
    if unknown := [name for name in data if name not in known]:
        raise ValueError(f"{made.__name__}: got {', '.join(unknown)}; its fields are {', '.join(known)}")
    needed = [name for name, it in known.items() if it.default is MISSING and it.default_factory is MISSING]
    if missing := [name for name in needed if name not in data]:
        raise ValueError(f"{made.__name__}: has no {', '.join(missing)}")


def parse(text: str) -> tuple[Tuned, ...]:
    """The rules of a JSON list; ValueError says which is wrong and how."""
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"tuned.json: not JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("tuned.json: not a list of rules")
    return tuple(_numbered(number, row) for number, row in enumerate(rows, start=1))


def _numbered(number: int, row: Mapping[str, Any]) -> Tuned:
    try:
        return Tuned.from_dict(row)
    except (ValueError, TypeError) as error:
        raise ValueError(f"tuned.json, rule {number}: {error}") from None


def dumps(rules: Sequence[Tuned]) -> str:
    """JSON text that `parse` reads: a rule a line."""
    return "[\n" + ",\n".join(json.dumps(rule.as_dict()) for rule in rules) + "\n]\n" if rules else "[]\n"


def tuned_rules(
    backend: str,
    variant: str,
    make: Callable[[dict[str, Any]], C],
    *,
    direction: Direction = "forward",
    text: str | None = None,
) -> tuple[Rule[C], ...]:
    """The tuned rules of one variant, of `text` or tuned.json, each with what `make` makes of its config's fields.

    ValueError where an entry is not a rule, or its fields make no config.
    """
    if text is None:
        text = resources.files(__package__).joinpath("tuned.json").read_text()
    wanted = (backend, direction, variant)
    return tuple(_rule(it, make) for it in parse(text) if (it.backend, it.direction, it.variant) == wanted)


def _rule(entry: Tuned, make: Callable[[dict[str, Any]], C]) -> Rule[C]:
    try:
        config = make(dict(entry.config))
    except (TypeError, ValueError) as error:
        raise ValueError(f"tuned.json, {entry.backend} {entry.variant} {entry.config}: {error}") from None
    return Rule(
        arches=entry.arches,
        config=config,
        why=entry.why,
        head_dim_min=entry.head_dim_min,
        head_dim_max=entry.head_dim_max,
        banded=entry.banded,
        seq_min=entry.seq_min,
        seq_max=entry.seq_max,
    )
