"""``MULTIATTN_LOG=plan``: one line on stderr for each launch, with the Plan that ran.

The variable is read when a launcher is prepared, once per Plan: set it before the first call. Off, a launch goes
through none of this. Lines go to stderr itself rather than through `logging`, whose default would drop them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TypeVar, cast

from multiattn.plan.backend import Plan, variant_of
from multiattn.plan.config import Config

VARIABLE = "MULTIATTN_LOG"
ALLOWED = ("plan",)

L = TypeVar("L", bound=Callable[..., None])


def logged(plan: Plan, launch: L) -> L:
    """`launch` itself, or one that first prints the plan's line, as `MULTIATTN_LOG` asks; ValueError for what it lacks.

    A launch that is captured into a CUDA graph prints when it is captured; replays are the graph's own.
    """
    value = os.environ.get(VARIABLE, "")
    if not value:
        return launch
    if value not in ALLOWED:
        raise ValueError(f"{VARIABLE}: got {value!r}; allowed {', '.join(ALLOWED)}, or unset for none")
    line = plan_line(plan) + "\n"

    def launch_with_log(*tensors: object) -> None:
        sys.stderr.write(line)
        launch(*tensors)

    return cast(L, launch_with_log)


def plan_line(plan: Plan) -> str:
    """A Plan on one line, as ``key=value`` words; the config's own words, and last the rule's evidence."""
    problem = plan.problem
    words = {
        "backend": plan.backend,
        "direction": plan.direction,
        "variant": plan.variant,
        "arch": plan.arch.name,
        "B": problem.batch,
        "Hq": problem.heads_q,
        "Hkv": problem.heads_kv,
        "Sq": problem.seq_q,
        "Skv": problem.seq_kv,
        "D": problem.head_dim,
        "Dv": problem.head_dim_v,
        "dtype": problem.dtype,
        "mask": problem.mask,
        "deterministic": "yes" if variant_of(plan).deterministic else "no",
        "workspace": plan.workspace_bytes,
    }
    listed = " ".join(f"{name}={value}" for name, value in words.items())
    config = " ".join(_config_words(plan.config))
    return f"multiattn launch: {listed} config[{config}] rule[{plan.why}]"


def _config_words(config: Config | None, prefix: str = "") -> Iterator[str]:
    """Every field that is set, those at their default too: a line must tell tiles and stages by itself."""
    for field in () if config is None else fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Config):
            yield from _config_words(value, f"{prefix}{field.name}_")
        elif value is not None:
            yield f"{prefix}{field.name}={value}"
