"""The Triton backward kernels against the formulas in fp64, all variants, on CPU tensors through the interpreter."""

import math
from dataclasses import replace

import gradient_checks
import pytest
import torch

from bench import expected
from bench.rule_table import compiler, is_older
from multiattn import Plan, Problem
from multiattn.plan.arch import ARCHS, by_name
from multiattn.plan.backend import make_plan, plan_variant
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Operands
from multiattn.triton import BACKEND
from multiattn.triton.candidates import candidates
from multiattn.triton.compile import compile_plan
from multiattn.triton.configs import BackwardConfig

VARIANTS = {variant.name: variant for variant in BACKEND.backward.variants}
POINTERS = ("pointer_atomic", "pointer_two_pass")
DQ_TILES = {"dq_tile_m": 32, "dq_tile_n": 16, "dq_num_warps": 4, "dq_num_stages": 1}


def make(*, batch=1, heads_q=2, heads_kv=2, seq_q=40, seq_kv=40, head_dim=64, dtype=torch.bfloat16, gain=1.0):
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads_q, seq_q, head_dim), *[(batch, heads_kv, seq_kv, head_dim)] * 2]
    q, k, v = ((torch.randn(shape, generator=generator) * gain).to(dtype) for shape in shapes)
    return q, k, v, torch.randn(shapes[0], generator=generator).to(dtype)


def small(variant):
    """A config of many tiles, whose heads take turns."""
    tiles = {} if dict(VARIANTS[variant].flags)["one_pass"] else DQ_TILES
    return BackwardConfig(tile_m=16, tile_n=32, num_warps=4, num_stages=1, heads_together=3, **tiles)


def plan_of(q, k, v, *, variant, config=None, **options):
    problem = Problem.of(q, k, v, **options)
    return make_plan(BACKEND, problem, by_name("cpu"), direction="backward", variant=variant, config=config)


def run(q, k, v, dout, *, dlse=None, **how):
    """dq, dk and dv of one variant."""
    return gradient_checks.run(plan_of(q, k, v, **how), q, k, v, dout, dlse)


def check(q, k, v, dout, *, dlse=None, naive_dtype=None, **how):
    """dq, dk and dv of one variant, which are as right as they must be."""
    return gradient_checks.check(plan_of(q, k, v, **how), q, k, v, dout, dlse, naive_dtype=naive_dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(8, torch.bfloat16), (40, torch.float16), (64, torch.bfloat16), (72, torch.bfloat16), (128, torch.float16)],
    ids=str,
)
def test_head_dims(variant, head_dim, dtype):
    check(*make(seq_q=33, seq_kv=70, head_dim=head_dim, dtype=dtype), variant=variant, causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("first", ["k", "v"])
def test_k_and_v_that_lie_apart(variant, first):
    """One of them is a transposed view: no stride of k, nor of dk, passes for one of v or dv."""
    q, k, v, dout = make(batch=2, heads_q=4, heads_kv=2, seq_q=20, seq_kv=37, head_dim=16)
    apart = (k if first == "k" else v).transpose(1, 2).contiguous().transpose(1, 2)
    k, v = (apart, v) if first == "k" else (k, apart)
    check(q, k, v, dout, variant=variant, config=small(variant), causal=True)


@pytest.mark.parametrize("variant", ["two_pass", "pointer_atomic"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(1, 1), (1, 70), (70, 1), (37, 61), (61, 37), (64, 64), (33, 31)])
def test_lengths(variant, causal, seq_q, seq_kv):
    """Among them rows that see no key: seq_q > seq_kv, causal."""
    check(*make(seq_q=seq_q, seq_kv=seq_kv, head_dim=16), variant=variant, config=small(variant), causal=causal)


@pytest.mark.parametrize("variant", ["atomic", "pointer_two_pass"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("heads_q", "heads_kv", "batch"), [(4, 2, 1), (3, 1, 1), (2, 2, 2)])
def test_heads_and_launch_order(variant, causal, heads_q, heads_kv, batch):
    tensors = make(batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=40, seq_kv=48, head_dim=16)
    check(*tensors, variant=variant, config=small(variant), causal=causal)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_of_lse(variant):
    dlse = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(1))
    check(*make(seq_q=50, seq_kv=33, head_dim=24), variant=variant, config=small(variant), dlse=dlse, causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_transposed_views(variant):
    tensors = (t.transpose(1, 2) for t in make(heads_q=6, heads_kv=6, seq_q=4, seq_kv=4, head_dim=16))
    q, k, v, dout = tensors
    check(q, k, v, dout, variant=variant, causal=True)
    assert [grad.stride() for grad in run(q, k, v, dout, variant=variant)] == [q.stride(), k.stride(), v.stride()]


@pytest.mark.parametrize("variant", POINTERS)
def test_any_stride_and_alignment_through_pointers(variant):
    q, _, v, dout = make(seq_q=40, seq_kv=40, head_dim=24)
    unaligned = torch.randn(1 + 2 * 40 * 25).bfloat16()[1:].as_strided((1, 2, 40, 24), (0, 40 * 25, 25, 1))
    broadcast = v[:, :1].expand(-1, 2, -1, -1)
    assert Problem.of(q, unaligned, broadcast).alignment == 2
    check(q, unaligned, broadcast, dout, variant=variant, config=small(variant), causal=True)
    check(unaligned, q, broadcast, dout, variant=variant, config=small(variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("far", ["q", "k"])
def test_offsets_beyond_32_bits(variant, far):
    """Forty rows, 2^26 elements apart: 5 GB of address space, of which next to nothing is touched."""
    q, k, v, dout = make(heads_q=1, heads_kv=1, head_dim=16)
    step = 1 << 26
    given = {"q": q, "k": k}
    memory = torch.empty(40 * step, dtype=torch.bfloat16).as_strided((1, 1, 40, 16), (0, 0, step, 1))
    given[far] = memory.copy_(given[far])
    check(given["q"], given["k"], v, dout, variant=variant, causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_memory_around_the_tensors_never_matters(variant, value):
    def surround(tensor):
        padded = torch.full([size + 16 for size in tensor.shape], value, dtype=tensor.dtype)
        inner = padded[8:-8, 8:-8, 8:-8, 8:-8]
        inner.copy_(tensor)
        return inner

    *tensors, dout = make(seq_q=40, seq_kv=45, head_dim=40)
    check(*map(surround, tensors), dout, variant=variant, config=small(variant), causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-42, 2.0])
def test_scales(variant, scale):
    check(*make(seq_q=33, seq_kv=50, head_dim=16), variant=variant, config=small(variant), causal=True, scale=scale)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gain", [1e-4, 40.0])
def test_magnitudes(variant, gain):
    tensors = make(seq_q=64, seq_kv=70, head_dim=64, gain=gain)
    check(*tensors, variant=variant, causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_masked_weight_that_would_be_infinite_is_zero(variant):
    """Row 0 sees key 0 only; the score of key 1 is 2^14 above its lse."""
    q, k, v, dout = make(heads_q=1, heads_kv=1, seq_q=20, seq_kv=20, head_dim=16)
    k[0, 0, 1:] = 32 * q[0, 0, :1]
    assert all(grad.isfinite().all() for grad in run(q, k, v, dout, variant=variant, causal=True, scale=64.0))
    k[0, 0, 0] = -1000.0 * q[0, 0, 0].sign()  # now lse is so low that the rows beyond the tensor would count, too
    assert all(grad.isfinite().all() for grad in run(q, k[:, :, :1], v[:, :, :1], dout, variant=variant, scale=64.0))


@pytest.mark.parametrize("names", [("two_pass", "pointer_two_pass"), ("two_pass", "two_pass")], ids="-".join)
def test_two_passes_agree_to_the_last_bit(names):
    tensors = make(heads_q=4, heads_kv=2, seq_q=40, seq_kv=50, head_dim=72)
    first, second = (run(*tensors, variant=name, config=small(name), causal=True) for name in names)
    assert all(map(torch.equal, first, second))
    other_order = replace(small(names[1]), heads_together=1)
    third = run(*tensors, variant=names[1], config=other_order, causal=True)
    assert all(map(torch.equal, first, third))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seq_q", [1, 70, 128])
def test_workspace_is_what_the_variant_says(variant, seq_q, monkeypatch):
    q, k, v, dout = make(seq_q=seq_q, head_dim=24)
    plan = plan_of(q, k, v, variant=variant, config=small(variant))
    taken, empty = [], torch.empty

    def spy(*args, **kwargs):
        made = empty(*args, **kwargs)
        taken.append(made.numel() * made.element_size())
        return made

    out, lse = gradient_checks.saved(plan.problem, q, k, v)
    launch = BACKEND.backward.prepare(plan)
    grads = map(torch.empty_like, (q, k, v))
    monkeypatch.setattr(torch, "empty", spy)
    launch(Operands(q, k, v, out, lse, dout, None, *grads))
    assert sum(taken) == plan.workspace_bytes > 0


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS.keys())
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 136, 256])
def test_every_head_dim_has_a_deterministic_plan_that_fits(arch, head_dim):
    for causal in (False, True):
        problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim, causal=causal)
        for name, variant in VARIANTS.items():
            if arch.name not in variant.capability.arches:
                continue
            plan = plan_variant(BACKEND, variant, problem, arch, direction="backward")
            assert isinstance(plan, Plan), (name, plan)
            assert variant.fits(problem, arch, plan.config) == ()
        plan = make_plan(BACKEND, problem, arch, direction="backward", deterministic=True, probe=False)
        assert plan.variant.endswith("two_pass")


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_candidates_fit_and_differ(variant, head_dim):
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=4096, head_dim=head_dim, causal=True)
    arch = by_name("sm90")
    found = candidates(variant, problem, arch)
    assert 6 <= len(found) == len(set(found)) <= 24
    assert not any(variant.fits(problem, arch, config) for config in found)
    assert candidates(variant, problem, by_name("cpu")) == ()


def test_a_config_that_does_not_fit_is_a_reason():
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=256)
    arch = by_name("sm90")
    large = BackwardConfig(tile_m=128, tile_n=128, num_warps=8, num_stages=3)
    for name in ("atomic", "two_pass"):
        assert any("shared memory" in reason.got for reason in VARIANTS[name].fits(problem, arch, large))
    assert any("dq_" in reason.allowed for reason in VARIANTS["two_pass"].fits(problem, arch, small("atomic")))
    assert any("dq_" in reason.allowed for reason in VARIANTS["atomic"].fits(problem, arch, small("two_pass")))


compiles = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()) or find_cuobjdump() is None, reason="cannot compile, or cannot see what was"
)


@compiles
@pytest.mark.parametrize(
    ("arch", "variant", "head_dim", "causal"),
    [
        ("sm80", "pointer_atomic", 128, True),
        ("sm90", "two_pass", 128, True),
    ],
)  # the others are on record, and `bench expected --check` compiles some each time
def test_rules_spill_nothing(arch, variant, head_dim, causal):
    problem = Problem.contiguous(batch=2, heads_q=8, heads_kv=8, seq_q=1000, head_dim=head_dim, causal=causal)
    plan = make_plan(BACKEND, problem, by_name(arch), direction="backward", variant=variant, probe=False)
    kernels = compile_plan(plan)
    assert len(kernels) == (3 if variant.endswith("atomic") else 2)
    assert all(kernel.smem_bytes <= by_name(arch).smem_per_block for kernel in kernels)
    spills = {kernel.kernel: kernel.spill_bytes for kernel in kernels if kernel.spill_bytes}
    recorded = expected.load(expected.record_folder() / f"{arch}.json").compilers["triton"]
    if spills and is_older(compiler("triton"), than=recorded):
        pytest.xfail(f"{compiler('triton')} spills, {recorded} does not: {spills}")
    assert not spills
