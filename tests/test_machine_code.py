"""Machine code of what no rule on record has: windows, blocks, modified scores, packed batches, caches, divided tiles.

bench/compiled has the spills, loops and features of every rule; what is here is made as its problem asks for it.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from multiattn.inspect.facts import read_plan
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem, problem_of
from multiattn.sequences import Batching
from multiattn.triton.decode import smem_bytes

pytestmark = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")

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
    names = ("softcap", "alibi_slopes", "bias", "score_mod", "block_mask")
    modified = {name: options[name] for name in names if name in options}
    sizes = {name: it for name, it in options.items() if name not in names}
    given = {"batch": 1, "heads_q": 8, "seq_q": 256 if modified else 1000, "head_dim": head_dim} | sizes
    problem = Problem.contiguous(**given)
    if modified:
        q = torch.empty(1, 8, 256, head_dim, dtype=torch.bfloat16)
        of_scores = problem_of(*with_score(Operands(q, q, q), Options(), **dict.fromkeys(names) | modified))
        problem = replace(of_scores, band=problem.band)
    return make_plan(get(backend), problem, ARCHS["sm90"], direction=direction, variant=variant, probe=False)


def able(backend):
    """Skip where the compiler is missing."""
    if reasons := get(backend).probe_compiler():
        pytest.skip("; ".join(map(str, reasons)))


def rows(*found, at_night=False):
    """Parameters, each with a name that tells its options."""
    marks = pytest.mark.nightly if at_night else ()
    return [pytest.param(*it, marks=marks, id="-".join([*map(str, it[:4]), *it[4]])) for it in found]


@pytest.mark.parametrize(
    ("backend", "direction", "variant", "head_dim", "options"),
    [
        *rows(
            ("cuda", "forward", "split_q+swizzle_qkv", 64, SOFTCAP),
            ("cuda", "forward", "wgmma", 64, SOFTCAP),
            ("cuda", "backward", "two_pass", 64, SOFTCAP),
            ("cuda", "backward", "atomic", 64, TRAINED),
            ("cuda", "backward", "wgmma_two_pass", 256, SOFTCAP),
            ("cuda", "backward", "wgmma", 128, SHARED | CAUSAL),
            ("triton", "forward", "full", 128, WINDOW),
            ("triton", "backward", "two_pass", 64, WINDOW),
            ("triton", "forward", "warp_specialized", 128, WINDOW | {"has_sinks": True}),
        ),
        *rows(
            ("cuda", "backward", "wgmma_two_pass", 192, SOFTCAP),
            ("cuda", "backward", "wgmma", 96, SHARED | CAUSAL),
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
        if backend == "triton" and facts.hot["HGMMA"]:
            assert 0 < facts.hot["WARPGROUP"] < facts.hot["HGMMA"], facts


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


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.nightly)])
def test_a_bias_has_registers_for_addresses(head_dim):
    """Triton 3.6.0 spills none at D=64 and 21 at D=128, 3.9.0 108 and 26; else it is 700 and 234, or more."""
    able("triton")
    trained = {"bias": TRAINED["bias"].detach().bfloat16().requires_grad_()}
    facts = read_plan(plan_of("triton", "backward", "two_pass", head_dim, trained))[1]
    assert facts.hot_spills <= 2 * facts.hot["RED/ATOM"]
    assert 0 < facts.hot["WARPGROUP"] < facts.hot["HGMMA"]


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
