"""Kernels that 200 random problems of one head_dim and dtype take: few, so that a new length compiles nothing."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from multiattn.cutile.families import launches_of
from multiattn.cutile.launch import code_key
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Plan, get, make_plan
from multiattn.problem import Problem
from multiattn.triton.calls import Call, calls_of

SM90 = ARCHS["sm90"]
COUNT = 200


def random_problems(head_dim: int, causal: bool) -> Iterator[Problem]:
    """Batches of 1 to 8, 1 to 64 heads of which up to 8 share one of keys, lengths of 1 to 8192, half of them whole."""
    made = random.Random(f"{head_dim} {causal}")

    def length() -> int:
        number = made.choice((made.randint(1, 8192), int(2 ** made.uniform(0, 13))))
        return max(128, number // 128 * 128) if made.random() < 0.5 else number

    for _ in range(COUNT):
        heads_kv, group, seq_q = made.randint(1, 16), made.choice((1, 1, 2, 3, 4, 8)), length()
        yield Problem.contiguous(
            batch=made.randint(1, 8),
            heads_q=min(heads_kv * group, 64) // heads_kv * heads_kv,
            heads_kv=heads_kv,
            seq_q=seq_q,
            seq_kv=seq_q if made.random() < 0.5 else length(),
            head_dim=head_dim,
            causal=causal,
        )


@functools.cache
def binder(kernel):
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


def key_of_triton(call: Call) -> str:
    """The key by which Triton's JIT looks for compiled code."""
    _, specialization, options = binder(call.kernel)(*call.stubs(), **call.table.options)
    return f"{call.table.kernel} {specialization} {options}"


def kernels_of(plan: Plan) -> dict[str, object]:
    """The key of the code of each kernel of a launch."""
    if plan.backend == "cutile":
        return {launch.kernel: code_key(launch, plan.arch) for launch in launches_of(plan)}
    return {call.table.kernel: key_of_triton(call) for call in calls_of(plan)}


FULL_KEYS = 2
"""The last block of keys is full, or needs a mask."""
DIAGONAL = 2
"""Skv - Sq is a multiple of a tile of queries, so that its keys begin at the diagonal, or not."""
COLUMNS = 2
"""Sq is a multiple of `multiattn.cutile.backward.COLUMN_UNIT`, or not."""
GROUPED = 2
"""Query heads share keys, or do not."""
ONE_PART = 2
"""Keys are one part, or several."""
PARTS = 3
"""Powers of two that hold the number of parts, or more parts than are merged at once."""

GLUON = {"gradients": FULL_KEYS, "gradient_of_own_queries": FULL_KEYS, "gradients_of_own_keys": FULL_KEYS}
"""Kernels of Gluon's backwards, of which a mask of keys beyond the end is a part under a band, too."""

KINDS: Mapping[tuple[str, bool], Mapping[str, int]] = {
    ("cutile", False): {
        "forward": FULL_KEYS, "query_grads": FULL_KEYS * COLUMNS, "key_grads": COLUMNS,
        "all_grads": FULL_KEYS * COLUMNS, "stored_key_grads": COLUMNS,
    },
    ("cutile", True): {
        "forward": DIAGONAL, "query_grads": COLUMNS, "key_grads": COLUMNS, "all_grads": FULL_KEYS * COLUMNS,
        "stored_key_grads": COLUMNS,
    },
    ("triton", False): {
        "attention_forward": FULL_KEYS, "gradients_of_keys": GROUPED, "attention_of_parts": ONE_PART, **GLUON
    },
    ("triton", True): {"gradients_of_keys": GROUPED, "attention_of_parts": ONE_PART, **GLUON},
}  # fmt: skip
"""By backend and whether the mask is causal, the kernels of which a rule has several, and how many. docs/experiments.md
("Kernels for many lengths") has what one for all would cost."""


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["cutile", "triton"])
def test_problems_share_the_kernels_of_their_rules(backend, direction, head_dim, causal):
    found: dict[tuple[object, str], set[object]] = defaultdict(set)
    for problem in random_problems(head_dim, causal):
        plan = make_plan(get(backend), problem, SM90, direction=direction, probe=False)
        config = replace(plan.config, splits=1) if hasattr(plan.config, "splits") else plan.config
        for kernel, key in kernels_of(plan).items():
            found[config, kernel].add(key)
    kinds = {**KINDS[backend, causal], "merge_splits": PARTS}
    got = {name: len(keys) for (_, name), keys in found.items() if len(keys) > kinds.get(name, 1)}
    assert not got
