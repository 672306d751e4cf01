"""Kernels that random problems take, few, so that a new length compiles nothing; and code of what no rule has."""

import functools
import random
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from multiattn.blocks import block_mask
from multiattn.cuda.instances import kernels_of as cuda_kernels_of
from multiattn.cuda.source import translation_unit
from multiattn.cutile.families import launches_of
from multiattn.cutile.launch import code_key
from multiattn.inspect.facts import read_plan
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem, problem_of
from multiattn.sequences import Batching
from multiattn.triton.calls import calls_of
from multiattn.triton.decode import smem_bytes
from multiattn.varlen import Lengths, pack, with_packing

SM90 = ARCHS["sm90"]
COUNT = 200


def random_problems(head_dim, causal):
    """Batches of 1 to 8, 1 to 64 heads of which up to 8 share one of keys, lengths of 1 to 8192, half of them whole."""
    made = random.Random(f"{head_dim} {causal}")

    def length():
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


def key_of_triton(call):
    """The key by which Triton's JIT looks for compiled code."""
    _, specialization, options = binder(call.kernel)(*call.stubs(), **call.table.options)
    return f"{call.table.kernel} {specialization} {options}"


def kernels_of(plan):
    """The key of the code of each kernel of a launch."""
    if plan.backend == "cuda":
        return {"all": translation_unit(cuda_kernels_of(plan))}
    if plan.backend == "cutile":
        return {launch.kernel: code_key(launch, plan.arch) for launch in launches_of(plan)}
    return {call.table.kernel: key_of_triton(call) for call in calls_of(plan)}


FULL_KEYS = 2  # the last block of keys is full, or needs a mask
DIAGONAL = 2  # Skv - Sq is a multiple of a tile of queries, so that its keys begin at the diagonal, or not
COLUMNS = 2  # Sq is a multiple of `multiattn.cutile.backward.COLUMN_UNIT`, or not
GROUPED = 2  # query heads share keys, or do not
ONE_PART = 2  # keys are one part, or several
PARTS = 3  # powers of two that hold the number of parts, or more parts than are merged at once

GLUON = {"gradients": FULL_KEYS, "gradient_of_own_queries": FULL_KEYS, "gradients_of_own_keys": FULL_KEYS}
"""Kernels of Gluon's backwards, of which a mask of keys beyond the end is a part under a band, too."""

KINDS = {
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
    found = defaultdict(set)
    for problem in random_problems(head_dim, causal):
        plan = make_plan(get(backend), problem, SM90, direction=direction, probe=False)
        config = replace(plan.config, splits=1) if hasattr(plan.config, "splits") else plan.config
        for kernel, key in kernels_of(plan).items():
            found[config, kernel].add(key)
    kinds = {**KINDS[backend, causal], "merge_splits": PARTS}
    got = {name: len(keys) for (_, name), keys in found.items() if len(keys) > kinds.get(name, 1)}
    assert not got


# ---------------------------------------------------------------- packed batches and caches


SCORE = ("softcap", "alibi_slopes", "bias", "score_mod", "block_mask")


def packed_problem(made, head_dim, *, has, window):
    """A batch of any number of sequences, with rows behind the last; it `has` scores of all kinds, or a block mask."""
    sequences, rows = made.randrange(2, 300), [made.randrange(300, 1 << 15) for _ in range(2)]
    starts = torch.zeros(sequences + 1, dtype=torch.int32)
    lengths = Lengths(starts, starts, *(made.randrange(2, 900) for _ in range(2)))
    q, k = (torch.empty(it, heads, head_dim, dtype=torch.bfloat16) for it, heads in zip(rows, (4, 2), strict=True))
    asked = dict.fromkeys(SCORE)
    if has == "scores":
        asked |= {"softcap": 20.0, "alibi_slopes": torch.empty(sequences, 4, requires_grad=True)}
        asked["bias"] = torch.empty(1, 1, lengths.max_seqlen_q, lengths.max_seqlen_kv, requires_grad=True)
    elif has == "blocks":
        asked["block_mask"] = block_mask(lambda b, h, i, j: i >= j, 1, made.choice((1, 4)), *rows, device="cpu")
    given = pack(q, k, k, lengths), Options(*window, None), lengths
    return problem_of(*with_packing(*given, *asked.values()))


OF_PACKED = (
    ("forward", None, 64, (None, 0)),
    ("forward", None, 256, (None, 0)),
    ("forward", None, 128, (100, 0)),
    ("backward", "two_pass", 128, (None, 0)),
    ("backward", "atomic", 40, (100, 0)),
    ("backward", None, 128, (None, None)),
)


@pytest.mark.parametrize("has", ["nothing", "scores", "blocks"])
@pytest.mark.parametrize("backend", ["cuda", "cutile", "triton"])
@pytest.mark.parametrize(("direction", "variant", "head_dim", "window"), OF_PACKED)
def test_packed_batches_of_any_lengths_run_the_same_code(backend, direction, variant, head_dim, window, has):
    if (has, variant, backend) == ("blocks", "atomic", "cuda"):
        variant = None  # it takes none
    made, found = random.Random(0), set()
    for _ in range(40 if has == "nothing" else 10):
        problem = packed_problem(made, head_dim, has=has, window=window)
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


def asked(batch=2, heads=(4, 2), head_dim=64, window=(None, None), sinks=None, **score):
    """The problem of a call with these options."""
    q, k = (torch.empty(batch, it, 256, head_dim, dtype=torch.bfloat16) for it in heads)
    options = dict.fromkeys(SCORE) | score
    return problem_of(*with_score(Operands(q, k, k, sinks=sinks), Options(*window, None), **options))


def blocks(batch):
    """Lists of each head: of those that many heads share CUDA makes bits, by a kernel more."""
    return create_block_mask(lambda b, h, q, kv: q >= kv, batch, 4, 256, 256, device="cpu")


FULL_BIAS = torch.empty(1, 4, 256, 256)
ASKED = {
    "nothing": {},
    "softcap": {"softcap": 30.0},
    "slopes": {"alibi_slopes": torch.empty(2, 4)},
    "slopes of heads": {"alibi_slopes": torch.empty(4)},
    "window": {"window": (100, 0)},
    "sinks": {"sinks": torch.empty(4)},
    "blocks": {"block_mask": blocks(None)},
    "bias": {"bias": FULL_BIAS},
    "trained bias": {"bias": FULL_BIAS.clone().requires_grad_()},
}
SAME_CODE = {"softcap": {"softcap": 50.0}, "window": {"window": (70, 30)}, "blocks": {"block_mask": blocks(2)}}
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
    for name, options in SAME_CODE.items():
        assert code(options) == found[name], name


# ---------------------------------------------------------------- machine code: bench/compiled has that of every rule


reads_code = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")

DOCUMENTS = (torch.arange(256) // 70).int()
WINDOW = {"window": (300, 5)}
CAUSAL = {"causal": True}
SOFTCAP = {"softcap": 30.0}
BIAS = {"bias": torch.empty(1, 8, 256, 256, dtype=torch.bfloat16)}
TRAINED = {"bias": torch.empty(1, 8, 256, 256, requires_grad=True)}
SLOPES = {"alibi_slopes": torch.empty(8)}
BLOCKS = {
    "block_mask": create_block_mask(
        lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv], None, None, 256, 256, device="cpu", BLOCK_SIZE=128
    )
}
ALL = CAUSAL | BIAS | SOFTCAP | SLOPES
PACKED = {"batching": Batching.packed(16), "batch": 1, "seq_q": 16384}
SHARED = {"batch": 4, "heads_q": 16, "heads_kv": 1, "seq_q": 4096}


def plan_of(backend, direction, variant, head_dim, options):
    """A plan for Hopper."""
    modified = {name: it for name, it in options.items() if name in SCORE}
    sizes = {name: it for name, it in options.items() if name not in SCORE}
    given = {"batch": 1, "heads_q": 8, "seq_q": 256 if modified else 1000, "head_dim": head_dim} | sizes
    problem = Problem.contiguous(**given)
    if modified:
        problem = replace(asked(1, (8, 8), head_dim, **modified), band=problem.band)
    return make_plan(get(backend), problem, SM90, direction=direction, variant=variant, probe=False)


def able(backend):
    """Skip where the compiler is missing."""
    if reasons := get(backend).probe_compiler():
        pytest.skip("; ".join(map(str, reasons)))


def rows(*found, at_night=False):
    """Parameters, each with a name that tells its options."""
    marks = pytest.mark.nightly if at_night else ()
    return [pytest.param(*it, marks=marks, id="-".join([*map(str, it[:4]), *it[4]])) for it in found]


@reads_code
@pytest.mark.parametrize(
    ("backend", "direction", "variant", "head_dim", "options"),
    [
        *rows(
            ("cuda", "forward", "split_q+swizzle_qkv", 64, SOFTCAP),
            ("cuda", "forward", "wgmma", 64, SOFTCAP),
            ("cuda", "backward", "two_pass", 64, SOFTCAP),
            ("cuda", "backward", "atomic", 64, TRAINED),
            ("cuda", "backward", "wgmma", 128, SHARED | CAUSAL | SLOPES),
            ("triton", "forward", "full", 128, WINDOW),
            ("triton", "forward", "warp_specialized", 64, BLOCKS),
        ),
        *rows(
            ("triton", "backward", "stored", 512, WINDOW),
            ("triton", "backward", "stored", 320, BIAS | SOFTCAP),
            ("cuda", "backward", "wgmma_two_pass", 192, SOFTCAP),
            ("triton", "backward", "two_pass", 64, WINDOW),
            ("triton", "forward", "warp_specialized", 128, WINDOW | {"has_sinks": True}),
            ("cuda", "backward", "wgmma_two_pass", 256, SOFTCAP),
            ("cuda", "backward", "wgmma", 96, SHARED | SOFTCAP),
            ("cuda", "backward", "wgmma", 64, SHARED | CAUSAL | {"heads_q": 32}),
            ("triton", "forward", "full", 128, BIAS | SOFTCAP),
            ("triton", "forward", "warp_specialized", 64, BIAS),
            ("triton", "forward", "warp_specialized", 128, PACKED | CAUSAL),
            ("triton", "forward", "full", 64, BIAS | SOFTCAP),
            ("triton", "forward", "warp_specialized", 64, WINDOW),
            ("triton", "forward", "warp_specialized", 128, ALL),
            ("triton", "forward", "warp_specialized", 256, CAUSAL | SOFTCAP),
            ("triton", "forward", "warp_specialized", 64, PACKED | CAUSAL),
            ("triton", "forward", "warp_specialized", 128, PACKED),
            ("triton", "forward", "warp_specialized_twin", 320, PACKED | CAUSAL),
            ("triton", "forward", "warp_specialized_twin", 512, BIAS),
            ("triton", "backward", "warp_specialized", 64, WINDOW),
            ("triton", "backward", "warp_specialized", 64, SOFTCAP),
            ("triton", "backward", "warp_specialized", 64, SLOPES),
            at_night=True,
        ),
    ],
)
def test_loops_spill_nothing_and_no_wgmma_waits_for_the_one_before(backend, direction, variant, head_dim, options):
    """ptxas serialises wgmmas whose sums other code may write, and only says so in a remark."""
    able(backend)
    check_loops(read_plan(plan_of(backend, direction, variant, head_dim, options)), backend)


def check_loops(kernels, backend):
    for facts in kernels:
        assert facts.hot_spills == 0, facts
        if facts.hot["HGMMA"]:
            assert 0 < facts.hot["WARPGROUP"] < facts.hot["HGMMA"], facts


@reads_code
@pytest.mark.parametrize(
    ("backend", "direction", "variant", "head_dim", "options"),
    [
        *rows(("triton", "forward", "full", 128, BLOCKS), ("triton", "forward", "full", 128, BIAS)),
        *rows(
            ("triton", "forward", "full", 64, BLOCKS),
            ("triton", "backward", "two_pass", 64, BLOCKS),
            ("triton", "backward", "two_pass", 128, BLOCKS),
            ("triton", "backward", "two_pass", 64, BIAS),
            at_night=True,
        ),
    ],
)
def test_as_many_tiles_are_in_flight_as_without(backend, direction, variant, head_dim, options):
    """Loads from lists, documents and a bias go through no shared memory."""
    able(backend)
    modified = plan_of(backend, direction, variant, head_dim, options)
    plain = replace(modified, problem=Problem.contiguous(batch=1, heads_q=8, seq_q=256, head_dim=head_dim))
    kernels = read_plan(modified)
    assert [it.smem_bytes for it in kernels] == smem_of(plain)
    assert max(it.hot_spills for it in kernels) <= 2
    if direction == "forward" and options is BLOCKS:
        check_loops(kernels, backend)


@functools.cache
def smem_of(plan):
    return [it.smem_bytes for it in read_plan(plan)]


@reads_code
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.nightly)])
def test_a_bias_has_registers_for_addresses(head_dim):
    """Triton 3.6.0 spills none at D=64 and 21 at D=128, 3.9.0 108 and 26; else it is 700 and 234, or more."""
    able("triton")
    trained = {"bias": TRAINED["bias"].detach().bfloat16().requires_grad_()}
    facts = read_plan(plan_of("triton", "backward", "two_pass", head_dim, trained))[1]
    assert facts.hot_spills <= 2 * facts.hot["RED/ATOM"]
    assert 0 < facts.hot["WARPGROUP"] < facts.hot["HGMMA"]


@reads_code
@pytest.mark.parametrize(("head_dim", "page", "queries"), [(64, None, 1), (128, 16, 1), (128, 64, 512)], ids=str)
def test_a_part_of_a_cache_is_one_loop_with_keys_in_flight(head_dim, page, queries):
    """Keys are copied in the background, as many tiles at a time as the config says: shared memory holds them."""
    able("triton")
    pages = 8192 // page if page else 0
    cache = Batching.cached(4, 4 * pages + 1 if page else 4, page, pages)
    sizes = {"batch": 4, "heads_q": 32, "heads_kv": 8, "seq_q": queries, "seq_kv": 8192, "batching": cache}
    plan = plan_of("triton", "forward", "split_keys", head_dim, sizes | CAUSAL)
    parts, *merge = read_plan(plan)
    assert (parts.hot_loops, parts.hot_spills, parts.other_spills) == (1, 0, 0)
    assert parts.hot["LDGSTS"] * parts.threads * 16 == 2 * plan.config.tile_n * head_dim * 2
    assert 0 <= parts.dynamic_smem_bytes - smem_bytes(plan.problem, plan.arch, plan.config) <= 4096
    assert not any(it.other_spills for it in merge)


@reads_code
@pytest.mark.parametrize("v_in_k", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_rows_that_are_keys_and_values_are_copied_once(v_in_k):
    able("triton")
    sizes = {"batch": 4, "heads_q": 16, "heads_kv": 1, "seq_q": 1, "seq_kv": 8192, "head_dim_v": 512, "v_in_k": v_in_k}
    cache = Batching.cached(4, 4 * 128, 64, 128)
    plan = plan_of("triton", "forward", "split_keys", 576, sizes | {"batching": cache})
    parts, *_merge = read_plan(plan)
    assert (parts.hot_loops, parts.hot_spills, parts.other_spills) == (1, 0, 0)
    assert parts.hot["LDGSTS"] * parts.threads * 16 == plan.config.tile_n * 2 * (576 if v_in_k else 576 + 512)
    assert 0 <= parts.dynamic_smem_bytes - smem_bytes(plan.problem, plan.arch, plan.config) <= 4096
