"""Hopper's forwards for heads wider than 256: who gets them, configs, emulated features, and compiled with no GPU."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from cuda_runs import with_nvrtc

import multiattn
from bench.record import example_score
from multiattn import explain
from multiattn.cuda import BACKEND
from multiattn.cuda.axes import TILED
from multiattn.cuda.instances import launches_of
from multiattn.cuda.variants import SPLIT_KEYS, SPLIT_KEYS_TWIN, WGMMA, WGMMA_TWIN
from multiattn.inspect.sass import hot_loops, parse, parted_arrivals
from multiattn.plan.arch import ARCHS, CPU
from multiattn.plan.backend import make_plan
from multiattn.plan.toolchain import disassemble
from multiattn.problem import Problem
from multiattn.sequences import Batching

SM90 = ARCHS["sm90"]
LATENT = {"head_dim": 576, "head_dim_v": 512, "heads_q": 16, "heads_kv": 1, "v_in_k": True}


def problem_of(head_dim=512, **sizes):
    """Two sequences of four heads, two of keys; full, bf16, unless told otherwise."""
    given = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 300, "seq_kv": 500, "head_dim": head_dim, **sizes}
    return Problem.contiguous(**given)


def cached(page=64, **sizes):
    """Eight sequences of up to 8192 keys, one query of 64 heads on one; causal, bf16."""
    pages = -(-8192 // page) if page else 0
    given = {"batch": 8, "heads_q": 64, "heads_kv": 1, "seq_q": 1, "seq_kv": 8192, "causal": True, "head_dim": 512}
    return Problem.contiguous(batching=Batching.cached(8, 8 * pages or 8, page, pages), **{**given, **sizes})


@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        (problem_of(256), WGMMA),
        (problem_of(512), WGMMA_TWIN),
        (problem_of(264, causal=True), WGMMA_TWIN),
        (problem_of(584), TILED),
        (problem_of(heads_q=4, heads_kv=4, seq_q=8), SPLIT_KEYS),
        (problem_of(heads_q=4, heads_kv=1, seq_q=8), SPLIT_KEYS_TWIN),
        (cached(heads_q=16), SPLIT_KEYS),
        (cached(), SPLIT_KEYS_TWIN),
        (cached(**LATENT), SPLIT_KEYS_TWIN),
        (cached(1, **LATENT), SPLIT_KEYS_TWIN),
    ],
)
def test_wide_heads_get_them_on_hopper(problem, variant):
    """Neighbours have kernels of their own: heads up to 256, beyond 576, and few rows of a group."""
    assert explain(problem, backend="cuda", arch="sm90").variant == variant.name


@pytest.mark.parametrize("head_dim", range(264, 577, 8))
def test_every_head_dim_has_a_config_that_fits(head_dim):
    """The ring holds what is in use, and as much as a block may have is used."""
    widths = (it for it in (8, 72, 128, 256, 264, 320, 384, 448, 504, 512) if it <= head_dim)
    for head_dim_v, v_in_k in itertools.product(widths, (False, True)):
        sizes = {"head_dim": head_dim, "head_dim_v": head_dim_v, "v_in_k": v_in_k}
        for problem, variant in ((problem_of(**sizes), WGMMA_TWIN), (cached(**sizes), SPLIT_KEYS_TWIN)):
            plan = make_plan(BACKEND, problem, SM90, variant=variant.name, probe=False)
            config, piece = plan.config, plan.config.piece // 64 * 8192
            spare = SM90.smem_per_block - config.smem_bytes(problem)
            own = -(-config.pieces(head_dim_v) // 2) + 1  # of a twin, as none of its scores come late
            in_use = 2 * (config.pieces(head_dim) if v_in_k else own)
            assert config.slots >= in_use
            assert config.slots == (in_use if v_in_k else min(24, (config.slots + spare // piece) // 2 * 2))


def test_v_in_k_is_in_the_name_of_what_reads_k_alone():
    """Other layouts of the same widths have code of their own."""
    names = set()
    for v_in_k in (False, True):
        problem = problem_of(**{**LATENT, "v_in_k": v_in_k})
        (launch,) = launches_of(make_plan(BACKEND, problem, SM90, variant=WGMMA_TWIN.name, probe=False))
        names.add(launch.kernel.name)
        assert ("_v_in_k" in launch.kernel.name) == ("v_in_k = true" in launch.kernel.traits) == v_in_k
    assert len(names) == 2


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({}, {"before": 3}),
        ({}, {"slots": 6}),
        ({}, {"piece": 64, "slots": 10}),
        ({}, {"piece": 64, "before": 5}),
        ({"head_dim_v": 320}, {"piece": 192, "slots": 4}),
        (LATENT, {"before": 1}),
        (LATENT, {"before": 9}),
    ],
    ids=str,
)
def test_it_is_right_in_any_order_of_its_work(sizes, changes):
    """With the fewest slots, and scores begun before and behind the other twin's values."""
    problem = problem_of(
        **{"batch": 1, "heads_kv": 1, **sizes, "heads_q": 2, "seq_q": 70, "seq_kv": 300, "causal": True}
    )
    torch.manual_seed(0)
    q, k, v = (torch.randn(*it.shape, dtype=torch.bfloat16) for it in (problem.layouts[name] for name in "qkv"))
    v = k[..., : problem.head_dim_v] if problem.v_in_k else v
    plan = make_plan(BACKEND, problem, CPU, variant=WGMMA_TWIN.name)
    config = replace(plan.config, **{"slots": 0, "before": 0, **changes})
    plan = make_plan(BACKEND, problem, CPU, variant=WGMMA_TWIN.name, config=config)
    out, lse = torch.full_like(q, torch.nan)[..., : problem.head_dim_v].contiguous(), torch.full(q.shape[:3], torch.nan)
    multiattn.launch(plan, q, k, v, out, lse)
    asked = {"causal": True, "backend": "reference", "return_lse": True}
    expected, expected_lse = multiattn.fmha(q.double(), k.double(), v.double(), **asked)
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse.double(), atol=1e-5, rtol=1e-5)


@with_nvrtc
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(problem_of(), id="D=512"),
        pytest.param(problem_of(264, window=(1023, 0)), id="D=264", marks=pytest.mark.nightly),
        pytest.param(
            replace(problem_of(causal=True), score=example_score(reads_keys=True)), id="bias", marks=pytest.mark.nightly
        ),
        pytest.param(problem_of(batch=1, batching=Batching.packed(3)), id="packed", marks=pytest.mark.nightly),
        pytest.param(cached(**LATENT), id="latent"),
        pytest.param(cached(1, **LATENT), id="latent, gathered", marks=pytest.mark.nightly),
        pytest.param(cached(16, seq_q=512), id="pages of 16", marks=pytest.mark.nightly),
    ],
)
def test_it_compiles_without_a_gpu(problem):
    """With no spills in its loops, no warp that may part, and wgmmas that do not wait for one another."""
    variant = WGMMA_TWIN if problem.cache is None else SPLIT_KEYS_TWIN
    plan = make_plan(BACKEND, problem, SM90, variant=variant.name, probe=False)
    compiled = next(it for it in BACKEND.forward.export(plan, ()) if it.kernel.startswith("forward_twin"))
    assert compiled.dynamic_smem_bytes == plan.config.smem_bytes(problem)
    if (text := disassemble(compiled.cubin)) is None:
        return
    code = parse(text)
    assert not parted_arrivals(code)
    assert len(re.findall(r"\bHGMMA\b", text)) > 3 * len(re.findall(r"WARPGROUP\.ARRIVE", text))
    places = {place for loop in hot_loops(code) for place in loop.body}
    assert places
    assert not [code[place] for place in places if code[place].name.startswith(("LDL", "STL"))]
