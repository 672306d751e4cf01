"""The Triton kernel against the reference, both tops of its ladder, on CPU tensors through the interpreter."""

import math

import pytest
import torch

from multiattn import Plan, Problem, explain, fmha, launch, reference
from multiattn.plan import backend
from multiattn.plan.arch import ARCHS, Arch, by_name
from multiattn.plan.backend import find_variant, make_plan
from multiattn.triton import BACKEND
from multiattn.triton.configs import GRID_MAX, TritonConfig, head_pad, smem_bytes, why_not_fit

VARIANTS = ("full", "pointer_full")
SMALL = TritonConfig(tile_m=32, tile_n=16, num_warps=4, num_stages=1, heads_together=3)  # many tiles, soon done


def make(*, batch=1, heads_q=2, heads_kv=2, seq_q=40, seq_kv=40, head_dim=64, dtype=torch.bfloat16, gain=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, heads_q, seq_q, head_dim), *[(batch, heads_kv, seq_kv, head_dim)] * 2
    return [(torch.randn(shape, generator=generator) * gain).to(dtype) for shape in shapes]


def run(q, k, v, *, variant, config=None, **options):
    """out and lse of one variant, into poisoned outputs, with a config of the test's choice."""
    problem = Problem.of(q, k, v, **options)
    plan = make_plan(BACKEND, problem, by_name("cpu"), variant=variant, config=config)
    out = torch.full(q.shape, math.nan, dtype=q.dtype).as_strided(q.shape, (*problem.strides_out, 1))
    lse = torch.full(q.shape[:3], math.nan)
    launch(plan, q, k, v, out, lse)
    return out, lse


def check(q, k, v, *, variant, config=None, naive_dtype=None, **options):
    """Error at most twice that of naive attention in the same dtype, plus a rounding; nan and inf as the reference."""
    before = [tensor.clone() for tensor in (q, k, v)]
    out, lse = run(q, k, v, variant=variant, config=config, **options)
    for tensor, kept in zip((q, k, v), before, strict=True):
        torch.testing.assert_close(tensor, kept, rtol=0, atol=0, equal_nan=True)
    truth, truth_lse = reference(q, k, v, compute_dtype=torch.float64, **options)
    naive, _ = reference(q, k, v, compute_dtype=naive_dtype or q.dtype, **options)
    assert torch.equal(out.isnan(), truth.isnan())
    assert torch.equal(torch.where(out.isinf(), out, 0), torch.where(truth.isinf(), truth, 0).to(out.dtype))
    finite = truth.isfinite()
    numbers = torch.finfo(q.dtype)
    rounding = numbers.eps * max(truth[finite].abs().max().item(), numbers.tiny)
    # Of naive what is finite: torch's bf16 product on the CPU lets a NaN of one row reach its neighbour.
    allowed = 2 * error(naive, truth, finite & naive.isfinite()) + rounding
    assert error(out, truth, finite) <= allowed < math.inf
    assert torch.equal(lse.isnan(), truth_lse.isnan())
    torch.testing.assert_close(lse.double(), truth_lse, atol=1e-4, rtol=1e-5, equal_nan=True)


def error(got, truth, where):
    assert where.any()
    return (got.double() - truth)[where].abs().max().item()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 96, 128, 160, 192, 256])
def test_head_dims(variant, dtype, head_dim):
    check(*make(seq_q=33, seq_kv=70, head_dim=head_dim, dtype=dtype), variant=variant, causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seq_q", "seq_kv"), [(1, 1), (1, 113), (113, 1), (113, 203), (203, 113), (64, 64), (65, 63), (128, 32)]
)
def test_lengths(variant, causal, seq_q, seq_kv):
    check(*make(seq_q=seq_q, seq_kv=seq_kv, head_dim=16), variant=variant, causal=causal)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("heads_q", "heads_kv", "batch"), [(4, 2, 2), (6, 1, 1), (5, 5, 2)])
def test_heads_and_launch_order(variant, causal, heads_q, heads_kv, batch):
    """Ten or so (batch, head) in groups of three: the last group is smaller."""
    tensors = make(batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=40, seq_kv=48, head_dim=16)
    check(*tensors, variant=variant, config=SMALL, causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "config",
    [
        TritonConfig(tile_m=16, tile_n=64, num_warps=4, num_stages=2),
        TritonConfig(tile_m=64, tile_n=16, num_warps=4, num_stages=3),
        TritonConfig(tile_m=128, tile_n=128, num_warps=8, num_stages=1, heads_together=8),
    ],
    ids=str,
)
def test_configs_agree(config, causal):
    check(*make(seq_q=100, seq_kv=90, head_dim=24), variant="full", config=config, causal=causal)


@pytest.mark.parametrize("variant", VARIANTS)
def test_transposed_views(variant):
    q, k, v = (tensor.transpose(1, 2) for tensor in make(heads_q=40, heads_kv=40, seq_q=4, seq_kv=4, head_dim=16))
    check(q, k, v, variant=variant, causal=True)
    out, _ = run(q, k, v, variant=variant)
    assert out.stride() == q.stride()


def test_any_stride_and_alignment_through_pointers():
    q, _, v = make(seq_q=40, seq_kv=40, head_dim=24)
    unaligned = torch.randn(1 + 2 * 40 * 25).bfloat16()[1:].as_strided((1, 2, 40, 24), (0, 40 * 25, 25, 1))
    broadcast = v[:, :1].expand(-1, 2, -1, -1)
    problem = Problem.of(q, unaligned, broadcast)
    assert problem.alignment == 2
    assert {reason.code for reason in explain(problem, backend="triton", variant="full", arch="sm90")} == {
        "alignment",
        "strides",
    }
    check(q, unaligned, broadcast, variant="pointer_full", causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_offsets_beyond_32_bits(variant):
    """Forty keys, 2^26 elements apart: 5 GB of address space, of which next to nothing is touched."""
    q, k, v = make(head_dim=16)
    step = 1 << 26
    far = torch.empty(40 * step, dtype=torch.bfloat16).as_strided((1, 1, 40, 16), (0, 0, step, 1))
    far.copy_(k[:, :1])
    check(q, far, v[:, :1], variant=variant, causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_memory_around_the_tensors_never_matters(variant, value):
    def surround(tensor):
        padded = torch.full([size + 16 for size in tensor.shape], value, dtype=tensor.dtype)
        inner = padded[8:-8, 8:-8, 8:-8, 8:-8]
        inner.copy_(tensor)
        return inner

    check(*map(surround, make(seq_q=40, seq_kv=45, head_dim=40)), variant=variant, causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_key_that_is_not_finite_reaches_only_rows_that_see_it(variant, value):
    q, k, v = make(seq_q=70, seq_kv=90, head_dim=16)
    k[0, 0, 50, 3] = value
    k[0, 1, 89, 0] = value
    check(q, k, v, variant=variant, config=SMALL, causal=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rows_whose_scores_are_all_minus_infinity(variant, causal):
    q, k, v = make(head_dim=16)
    q.abs_()
    k[:, :, :20] = -math.inf
    check(q, k, v, variant=variant, config=SMALL, causal=causal)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-42, -1e-42, 2.0])
def test_scales(variant, scale):
    check(*make(seq_q=33, seq_kv=50, head_dim=16), variant=variant, causal=True, scale=scale)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gain", [1e-4, 100.0])
def test_magnitudes(variant, gain):
    """Against naive attention in fp32: in fp16 its scores overflow, and then it allows any error."""
    tensors = make(seq_q=64, seq_kv=96, head_dim=64, dtype=torch.float16, gain=gain)
    check(*tensors, variant=variant, naive_dtype=torch.float32, causal=True)


def test_variants_agree_to_the_last_bit():
    tensors = make(seq_q=40, seq_kv=50, head_dim=72)
    results = [run(*tensors, variant=variant, causal=True) for variant in VARIANTS]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_the_best_variant_is_the_descriptor_where_it_can_be():
    q, k, v = make(head_dim=16)
    assert explain(q, k, v, backend="triton").variant == "full"
    assert explain(q, k[:, :1].expand(-1, 2, -1, -1), v, backend="triton").variant == "pointer_full"
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=64)
    assert explain(problem, backend="triton", arch="sm80").variant == "pointer_full"
    torch.testing.assert_close(fmha(q, k, v, backend="triton"), run(q, k, v, variant="full")[0])


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS.keys())
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_has_a_rule_that_fits(arch, head_dim):
    for causal in (False, True):
        problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=head_dim, causal=causal)
        plan = make_plan(BACKEND, problem, arch, probe=False)
        assert isinstance(plan, Plan)
        assert find_variant(BACKEND, plan.variant).fits(problem, arch, plan.config) == ()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_candidates_fit_and_differ(head_dim, causal):
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=4096, head_dim=head_dim, causal=causal)
    arch = by_name("sm90")
    for name in ("full", "pointer_full"):
        variant = find_variant(BACKEND, name)
        found = BACKEND.forward.candidates(variant, problem, arch)
        assert len(found) == len(set(found)) >= 7
        assert not any(variant.fits(problem, arch, config) for config in found)
        assert BACKEND.forward.candidates(variant, problem, by_name("cpu")) == ()


def test_a_config_that_does_not_fit_is_a_reason():
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=256)
    large = TritonConfig(tile_m=128, tile_n=128, num_warps=8, num_stages=4)
    assert smem_bytes(problem, by_name("sm90"), large) > by_name("sm90").smem_per_block
    assert [reason.code for reason in why_not_fit(problem, by_name("sm90"), large)] == ["config"]
    odd = TritonConfig(tile_m=48, tile_n=8, num_warps=3, num_stages=0)
    got = [reason.got for reason in why_not_fit(problem, by_name("sm90"), odd)]
    assert got == ["tile_m=48", "num_warps=3", "tile_n=8", "num_stages=0"]


def test_a_grid_that_is_too_large_is_a_reason():
    config = TritonConfig(tile_m=64, tile_n=64, num_warps=4, num_stages=2)
    fits = Problem.contiguous(batch=1, heads_q=1, heads_kv=1, seq_q=64, head_dim=8)
    large = Problem.contiguous(batch=1 << 20, heads_q=1 << 11, heads_kv=1, seq_q=64, head_dim=8)
    assert why_not_fit(fits, by_name("sm90"), config) == ()
    (reason,) = why_not_fit(large, by_name("sm90"), config)
    assert (reason.code, reason.got) == ("config", f"{GRID_MAX + 1} programs")


def test_probing_beside_an_amd_gpu_raises_nothing(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(BACKEND.probe(Arch(name="gfx942", title="AMD GPU")), tuple)


def test_head_pad():
    assert [head_pad(head_dim) for head_dim in (8, 16, 24, 64, 72, 256)] == [16, 16, 32, 64, 128, 256]


def test_registered():
    assert backend.get("triton") is BACKEND
