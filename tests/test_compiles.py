"""Kernels that random problems of one head_dim and dtype take: few, so that a new length compiles nothing."""

import functools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from multiattn.cuda.instances import kernels_of as cuda_kernels_of
from multiattn.cuda.source import translation_unit
from multiattn.cutile.families import launches_of
from multiattn.cutile.launch import code_key
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Plan, get, make_plan
from multiattn.problem import Problem, problem_of
from multiattn.sequences import Batching
from multiattn.triton.calls import Call, calls_of
from multiattn.varlen import Lengths, pack, with_packing

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
    if plan.backend == "cuda":
        return {"all": translation_unit(cuda_kernels_of(plan))}
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


# ---------------------------------------------------------------- packed batches and caches


def packed_problem(made: random.Random, head_dim: int, *, has_scores: bool, window: tuple[int, int]) -> Problem:
    """A batch of any number of sequences, with rows behind the last; `has_scores` is with slopes and a bias."""
    sequences, rows = made.randrange(2, 300), [made.randrange(300, 1 << 15) for _ in range(2)]
    starts = torch.zeros(sequences + 1, dtype=torch.int32)
    lengths = Lengths(starts, starts, *(made.randrange(2, 900) for _ in range(2)))
    q, k = (torch.empty(it, heads, head_dim, dtype=torch.bfloat16) for it, heads in zip(rows, (4, 2), strict=True))
    slopes = torch.empty(sequences, 4, requires_grad=True) if has_scores else None
    bias = torch.empty(1, 1, lengths.max_seqlen_q, lengths.max_seqlen_kv, requires_grad=True) if has_scores else None
    given = pack(q, k, k, lengths), Options(*window, None), lengths
    return problem_of(*with_packing(*given, 20.0 if has_scores else None, slopes, bias, None))


PACKED = (
    ("forward", None, 64, (None, 0)),
    ("forward", None, 256, (None, 0)),
    ("forward", None, 128, (100, 0)),
    ("backward", "two_pass", 128, (None, 0)),
    ("backward", "atomic", 40, (100, 0)),
    ("backward", None, 128, (None, None)),
)


@pytest.mark.parametrize("has_scores", [False, True], ids=["plain", "scores"])
@pytest.mark.parametrize("backend", ["cuda", "cutile", "triton"])
@pytest.mark.parametrize(("direction", "variant", "head_dim", "window"), PACKED)
def test_packed_batches_of_any_lengths_run_the_same_code(backend, direction, variant, head_dim, window, has_scores):
    made, found = random.Random(0), set()
    for _ in range(10 if has_scores else 40):
        problem = packed_problem(made, head_dim, has_scores=has_scores, window=window)
        plan = make_plan(get(backend), problem, SM90, direction=direction, variant=variant, probe=False)
        found.add(tuple(kernels_of(plan).items()))
    assert len(found) == 1


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("page", [None, 1, 16, 256])
@pytest.mark.parametrize("backend", ["cuda", "cutile", "triton"])
def test_no_code_depends_on_lengths_capacities_or_parts(backend, page, is_packed):
    """But for a power of two of parts and one of heads, which cuTile merges at once."""
    made, found, fixed = random.Random(0), set(), {}
    for _ in range(20):
        batch, queries, rows, heads = *(made.randrange(2, most) for most in (40, 30, 5000)), made.choice((1, 2, 4, 8))
        more = {"splits": made.randrange(9, 17), "max_q": queries if is_packed else None}
        cache = Batching.cached(batch, batch, **more)
        if page:
            pages = -(-rows // page)
            cache, rows = Batching.cached(batch, batch * pages + 1, page, pages, **more), pages * page
            cache = cache._replace(table_stride=made.randrange(5000, 6000))
        sizes = {"batch": 1, "seq_q": batch * queries} if is_packed else {"batch": batch, "seq_q": queries}
        sizes |= {"heads_q": 4 * heads, "heads_kv": heads, "seq_kv": rows, "head_dim": 128}
        problem = Problem.contiguous(**sizes, causal=True, batching=cache)
        plan = make_plan(get(backend), problem, SM90, variant="split_keys", probe=False)
        config = replace(fixed.setdefault("config", plan.config), splits=plan.config.splits)
        found.add(tuple(kernels_of(replace(plan, config=config)).items()))
    assert len(found) == 1


# ---------------------------------------------------------------- what a call asks for


def asked(**options) -> Problem:
    """The problem of a call with these options."""
    q, k = (torch.empty(2, heads, 256, 64, dtype=torch.bfloat16) for heads in (4, 2))
    sinks = torch.empty(4) if options.pop("sinks", False) else None
    window = options.pop("window", (None, None))
    scores = dict.fromkeys(("softcap", "alibi_slopes", "bias", "score_mod", "block_mask")) | options
    return problem_of(*with_score(Operands(q, k, k, sinks=sinks), Options(*window, None), **scores))


def blocks(heads: int | None) -> BlockMask:
    return create_block_mask(lambda b, h, q, kv: q >= kv, None, heads, 256, 256, device="cpu")


BIAS = torch.empty(1, 4, 256, 256)
ASKED = {
    "nothing": {},
    "softcap": {"softcap": 30.0},
    "slopes": {"alibi_slopes": torch.empty(2, 4)},
    "slopes of heads": {"alibi_slopes": torch.empty(4)},
    "window": {"window": (100, 0)},
    "sinks": {"sinks": True},
    "blocks": {"block_mask": blocks(None)},
    "bias": {"bias": BIAS},
    "trained bias": {"bias": BIAS.clone().requires_grad_()},
}
SHARED = {"softcap": {"softcap": 50.0}, "window": {"window": (70, 30)}, "blocks": {"block_mask": blocks(4)}}
"""Calls that differ from those above in numbers and lists alone."""


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["cuda", "cutile", "triton"])
def test_what_a_call_asks_for_has_code_of_its_own_and_its_numbers_have_not(backend, direction):
    def code(options):
        plan = make_plan(get(backend), asked(**options), SM90, direction=direction, probe=False)
        return tuple(kernels_of(plan).items())

    others = {"trained bias"} if direction == "forward" else {"sinks"}  # what the other direction alone knows of
    found = {name: code(options) for name, options in ASKED.items() if name not in others}
    assert len(set(found.values())) == len(found)
    for name, options in SHARED.items():
        assert code(options) == found[name], name
