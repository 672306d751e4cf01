"""Wrong calls, as people make them: each is told what came, what is allowed, and what to do."""

import re
import typing
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from refused import assert_refused, rows
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

import multiattn
from multiattn.block_mask import BlockSpec
from multiattn.operands import Options
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, Arch, by_name
from multiattn.plan.backend import BACKENDS, REFERENCE, BackendName
from multiattn.plan.choice import choose
from multiattn.plan.support import Unsupported
from multiattn.problem import Problem
from multiattn.sequences import Batching


def bf16(*shape, dtype=torch.bfloat16, **rest):
    return torch.zeros(shape, dtype=dtype, **rest)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


Q, K, META = bf16(2, 4, 8, 16), bf16(2, 2, 8, 16), bf16(2, 4, 8, 16, device="meta")
ROWS, STARTS, LSE = bf16(9, 4, 16), int32(0, 4, 9), torch.zeros(2, 4, 8)
CACHE, ONE = bf16(2, 2, 32, 16), bf16(2, 4, 1, 16)
BLOCKS, MANY = (create_block_mask(noop_mask, batch, 1, 8, 8, device="cpu", BLOCK_SIZE=8) for batch in (1, 2))


def listed(counts, room):
    """A block mask of 10 rows of blocks of 8, with lists of such counts and so much room."""
    indices = torch.zeros(1, 1, 10, room, dtype=torch.int32)
    lengths = {"seq_lengths": (80, 80), "BLOCK_SIZE": 8, "compute_q_blocks": False}
    return BlockMask.from_kv_blocks(counts.expand(1, 1, 10), indices, **lengths)


TOP, FLOATS = listed(torch.ones(1, dtype=torch.int32), 3), listed(torch.ones(1), 10)
NESTED = torch.nested.nested_tensor([bf16(4, 3, 16), bf16(4, 5, 16)])


class FromJax:
    """An array of another library, as JAX has it."""

    __module__ = "jaxlib._jax"

    def __dlpack__(self):
        """Not called."""


def fmha(q=Q, k=K, v=K, **options):
    return multiattn.fmha(q, k, v, **options)


def varlen(q=ROWS, k=ROWS, v=ROWS, **changes):
    given = {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS, "max_seqlen_q": 5, "max_seqlen_kv": 5, **changes}
    return multiattn.fmha_varlen(q, k, v, **{name: it for name, it in given.items() if it is not ...})


def kvcache(q):
    return multiattn.fmha_kvcache(q, CACHE, CACHE, seqlens_kv=int32(3, 4))


def backward(q=Q, out=Q, lse=LSE, dout=Q, **rest):
    return multiattn.fmha_backward(q, K, K, out, lse, dout, **rest)


def plan(arch="sm90", backend="cuda", direction="forward", variant=None, deterministic=False, blocks=None, **sizes):
    problem = Problem.contiguous(**{"batch": 2, "heads_q": 4, "seq_q": 64, "head_dim": 64, **sizes})
    if blocks is not None:
        problem = replace(problem, blocks=blocks, lists=((1, 1, 1),) * 8)
    asked = Options(backend=backend, variant=variant, deterministic=deterministic)
    return choose(problem, arch if isinstance(arch, Arch) else by_name(arch), asked, direction, probe=False)


GPU_TURING = Arch(name="sm75", title="GPU without a row in ARCHS")

REFUSED = {
    Unsupported: [
        (lambda: fmha(*[Q.float()] * 3, backend="triton"), "got fp32 | allowed fp16, bf16 | .bfloat16()"),
        (lambda: fmha(*[bf16(1, 1, 2, 20)] * 3, backend="cuda"), "got 20 | pad q, k and v | to D=24 | scale=20**-0.5"),
        (lambda: fmha(*[bf16(1, 1, 2, 20)] * 3, scale=0.5, backend="cuda"), "got 20 | of 8 up to 1024 | scale=0.5"),
        (lambda: plan(backend="triton", head_dim=584), "got 584 | multiples of 8 up to 576 | that takes wider"),
        (lambda: plan(GPU_TURING), 'arch: got sm75 | allowed cpu, sm80 | backend="reference" runs on it'),
        (lambda: plan("sm80", variant="wgmma"), "arch: got sm80 | allowed sm90 | leave variant out"),
        (
            lambda: plan("sm80", "triton", variant="warp_specialized"),
            "got sm80 | allowed cpu, sm90 (for Hopper's wgmma and",
        ),
        (lambda: plan(backend="triton", blocks=BlockSpec(8, 8, True)), "8 x 8 | multiples of 16 | BLOCK_SIZE=128"),
        (lambda: plan(variant="wgmma", batching=Batching.cached(2, 2)), "cache (dense) | no cache | leave variant out"),
        (
            lambda: plan(backend="triton", variant="split_keys", batch=1, batching=Batching.packed(2)),
            "packed batch of 2 | [B, H, S, D] | leave variant out",
        ),
        (
            lambda: plan(direction="backward", variant="atomic", deterministic=True),
            "variant atomic | the same bits | deterministic=False",
        ),
        (lambda: plan(seq_kv=1 << 31), "Skv=2147483648 | lengths up to | multiattn.merge"),
    ],
    NotImplementedError: [
        (lambda: kvcache(ONE.clone().requires_grad_()), "fmha_kvcache has no gradient | fmha_varlen | no_grad()")
    ],
    TypeError: [
        # tensors
        (lambda: fmha(numpy.zeros((2, 4, 8, 16))), "got numpy.ndarray | must be a torch.Tensor | torch.from_numpy(q)"),
        (lambda: fmha(Q, FromJax()), "got jaxlib._jax.FromJax | k must be a torch.Tensor | torch.from_dlpack(k)"),
        (lambda: fmha([Q]), "got list | must be a torch.Tensor | torch.stack(q)"),
        (lambda: fmha(NESTED), "got a nested tensor | dense strided tensor | fmha_varlen"),
        (lambda: fmha(Q.float().to_sparse()), "got layout torch.sparse_coo | dense strided tensor | .to_dense()"),
        (lambda: fmha(Q.long()), "got torch.int64 | allowed torch.float16 | .bfloat16()"),
        (lambda: fmha(Q.half()), "q=torch.float16, k=torch.bfloat16 | share one dtype | .to(q.dtype)"),
        (lambda: fmha(sinks=0.0), "got float | a torch.Tensor or None | torch.full("),
        (lambda: fmha(sinks=int32(1, 2, 3, 4)), "sinks must be | got torch.int32 | floating-point | .float()"),
        (lambda: fmha(alibi_slopes=bf16(4)), "got torch.bfloat16 | allowed dense torch.float32 | .float()"),
        (lambda: fmha(bias=bf16(1, 1, 8, 8).long()), "got torch.int64 | torch.bool; call .bool() on a mask, .float()"),
        (lambda: fmha(block_mask=torch.ones(8, 8)), "got Tensor | attention.BlockMask | a mask tensor is bias"),
        (lambda: fmha(score_mod=Q), "got Tensor | must be callable or None | a tensor to add to scores is bias"),
        (lambda: fmha(score_mod=1.0), "score_mod must be callable or None; got float"),
        (lambda: backward(q=[1.0]), "q must be a torch.Tensor; got list"),
        (lambda: backward(out=None), "out must be a torch.Tensor; got NoneType"),
        (lambda: backward(out=Q.to_sparse()), "out must be a dense strided tensor; got layout torch.sparse_coo"),
        (lambda: backward(dlse=NESTED), "dlse must be a dense strided tensor; got a nested tensor"),
        (lambda: backward(dout=numpy.zeros((2, 4, 8, 16))), "got numpy.ndarray | torch.from_numpy(dout)"),
        (lambda: varlen(cu_seqlens_q=STARTS.long()), "got torch.int64 | allowed torch.int32 | .int()"),
        (lambda: varlen(cu_seqlens_q=[0, 4, 9]), "got list | cu_seqlens_q must be a torch.Tensor"),
        # numbers and names
        (lambda: fmha(causal=torch.ones(8, 8)), "got Tensor | must be a bool | a mask is bias"),
        (lambda: fmha(causal="yes"), "got str | must be a bool | give True or False"),
        (lambda: fmha(causal=numpy.int64(1)), "causal must be a bool; got int"),
        (lambda: fmha(causal=numpy.array([True, False])), "causal must be a bool; got ndarray"),
        (lambda: fmha(window=128), "got 128 | must be a pair (left, right) or None | window=(128 - 1, 0)"),
        (lambda: fmha(window=(3,)), "window must be a pair | got (3,)"),
        (lambda: fmha(window=(numpy.bool_(True), 0)), "window's left must be an int or None; got bool"),
        (lambda: fmha(window=(0, 1.5)), "window's right must be an int or None; got float"),
        (lambda: fmha(scale=torch.tensor(0.5)), "got Tensor | must be a float or None | scale.item()"),
        (lambda: fmha(scale=torch.ones(4)), "Tensor of shape (4,) | multiply q by a tensor"),
        (lambda: fmha(scale=numpy.array([0.5])), "scale must be a float or None; got ndarray"),
        (lambda: fmha(scale="auto"), "got str | a float or None | leave it out"),
        (lambda: fmha(scale=True), "scale must be a float or None; got bool"),
        (lambda: fmha(scale=[1.0]), "scale must be a float or None; got list"),  # which cannot be hashed
        (lambda: fmha(dropout_p=None), "dropout_p must be a float; got NoneType | give 0.0"),
        (lambda: fmha(deterministic=1), "got int | must be a bool or None | torch.use_deterministic_algorithms"),
        (lambda: fmha(deterministic=numpy.float32(1)), "deterministic must be a bool or None; got float"),
        (lambda: fmha(backend=3), "got int | must be a string | multiattn.backends()"),
        (lambda: fmha(backend=None), 'got NoneType | must be a string | leave it out for "auto"'),
        (lambda: varlen(max_seqlen_q=torch.tensor(5)), "got Tensor | must be an int | max_seqlen_q.item()"),
        (lambda: varlen(max_seqlen_q=5.0), "got float | must be an int | the length of the longest sequence"),
        (lambda: multiattn.explain(Q, K, K, arch=90), 'got int | must be a string | "sm90"'),
        (lambda: multiattn.explain("2,16,64,64"), "got str | a torch.Tensor or a multiattn.Problem"),
        # arguments by position, or not there
        (lambda: multiattn.fmha(Q, K, K, True), "4 arguments | too many True | takes 3 by position | causal="),
        (lambda: multiattn.fmha(Q, K, K, Q), "a Tensor | takes 3 by position | bias="),
        (lambda: multiattn.fmha(Q, K, K, 0.5), "too many 0.5 | takes 3 by position | scale="),
        (lambda: multiattn.fmha_varlen(ROWS, ROWS, ROWS, STARTS), "a Tensor | takes 3 by position | cu_seqlens_q="),
        (lambda: multiattn.fmha(Q, K), "got None or nothing for v | needs q, k, v | by its name"),
        (lambda: multiattn.fmha_backward(Q, K, K, Q, LSE), "None or nothing for dout | needs q, k, v, out, lse, dout"),
        (lambda: varlen(max_seqlen_q=...), "nothing for max_seqlen_q | needs q, k, v, cu_seqlens_q | by its name"),
    ],
    ValueError: [
        # tensors
        (lambda: fmha(META), "q=meta, k=cpu | on one device | .to(q.device)"),
        (lambda: fmha(torch._neg_view(Q)), "got a negated view | its own values | .resolve_neg()"),
        (lambda: fmha(Q[0], K[0], K[0]), "got rank 3 | rank 4, [B, H, S, D] | fmha_varlen"),
        (lambda: fmha(Q[0, 0], K[0, 0], K[0, 0]), "got rank 2 | rank 4, [B, H, S, D] | .unflatten(-1, (H, D))"),
        (lambda: fmha(Q, K, Q), "k=(2, 2, 8, 16), v=(2, 4, 8, 16) | must have one shape | repeat the heads"),
        (lambda: fmha(Q, K, K[:, :, :7]), "must have one shape | cut both to the same keys"),
        (lambda: fmha(Q[:1]), "q=(1, 4, 8, 16) | share the batch size | .expand"),
        (lambda: fmha(bf16(2, 4, 8, 24)), "q=(2, 4, 8, 24) | share head_dim | pad the narrower"),
        (lambda: fmha(Q, *[bf16(2, 4, 16, 9)] * 2), "k=(2, 4, 16, 9) | share head_dim | k.transpose(-2, -1)"),
        (lambda: fmha(Q[:, :0], *[K[:, :0]] * 2), "heads and head_dim must be at least 1; got q=(2, 0, 8, 16)"),
        (
            lambda: fmha(bf16(2, 9, 4, 16), *[bf16(2, 7, 2, 16)] * 2),
            "Hq=9, Hkv=7 | multiple of key/value heads | q.transpose(1, 2)",
        ),
        (lambda: fmha(bf16(2, 3, 8, 16)), "Hq=3, Hkv=2 | multiple of key/value heads | the heads come second"),
        (lambda: fmha(Q, K.mT.contiguous().mT), "got strides | unit stride on D | .contiguous()"),
        (lambda: fmha(sinks=bf16(1, 4, 1)), "got shape [1, 4, 1] | allowed [4] | .flatten()"),
        (lambda: fmha(sinks=bf16(2)), "sinks: got shape [2]; allowed [4] | .expand(Hq)"),
        (lambda: fmha(sinks=bf16(4, device="meta")), "sinks must be on the device of q, cpu"),
        (lambda: fmha(alibi_slopes=torch.zeros(4, 1, 1)), "shape (4, 1, 1) | allowed (4,) and (2, 4) | one slope"),
        (lambda: fmha(bias=bf16(2, 8)), "(2, 8) | [B|1, Hq|1, Sq|1, Skv|1] | bias[:, None, None, :] | fmha_padded"),
        (lambda: fmha(bias=bf16(8, 8)), "got shape (8, 8) | bias[None, None]"),
        (lambda: fmha(bias=bf16(2, 8, 8).bool()), "got shape (2, 8, 8) | bias[:, None]"),
        (lambda: fmha(bias=bf16(2, 4, 8, 4)), "(2, 4, 8, 4) | with (2, 4, 8, 8) | dimension 3 is 4: make it 8"),
        (lambda: fmha(bias=bf16(2, 2, 8, 8)), "(2, 2, 8, 8) | repeat_interleave(2, dim=1)"),
        (lambda: fmha(bias=bf16(1, 1, 8, 8, device="meta")), "got meta | on the device of q, cpu | .to(q.device)"),
        (
            lambda: fmha(bf16(2, 4, 80, 16), block_mask=BLOCKS),
            "lists [1, 1, 1, 1] | 10 or more | create_block_mask for these lengths",
        ),
        (lambda: varlen(block_mask=MANY), "got lists [2, 1, 1, 1] | [1, 1 or 4, 2 or more | Tq=9 | of one batch entry"),
        (
            lambda: fmha(bf16(1, 4, 80, 16), *[bf16(1, 2, 80, 16)] * 2, block_mask=TOP),
            "got lists [1, 1, 10, 3] | 10 or more] | lists have room for every block",
        ),
        (
            lambda: fmha(bf16(1, 4, 80, 16), *[bf16(1, 2, 80, 16)] * 2, block_mask=FLOATS),
            "block_mask.kv_num_blocks: got torch.float32 | allowed int32",
        ),
        (lambda: varlen(Q, K, K), "got rank 4 | rank 3, [T, H, D] | fmha_padded"),
        (lambda: varlen(*[ROWS.mT.contiguous().mT.transpose(0, 1)] * 3), "[T, H, D]"),
        (lambda: varlen(bias=bf16(2, 4, 6, 5)), "bias: got shape (2, 4, 6, 5) | allowed | (2, 4, 5, 5)"),
        (lambda: varlen(alibi_slopes=torch.zeros(3, 4)), "alibi_slopes: got shape (3, 4) | allowed (4,) and (2, 4)"),
        (lambda: varlen(cu_seqlens_q=STARTS[None]), "got shape (1, 3) | [B + 1] | functional.pad(lengths.cumsum(0)"),
        (lambda: varlen(cu_seqlens_q=STARTS[:2]), "(2,) | one shape, [B + 1] | repeats its start"),
        (lambda: backward(lse=LSE[..., :4]), "lse: got (2, 4, 4) | allowed (2, 4, 8) | return_lse=True"),
        (lambda: backward(lse=LSE.double()), "lse: got | float64 | allowed | float32"),
        (lambda: backward(lse=LSE.to("meta")), "on meta; allowed | on cpu"),
        (lambda: backward(out=Q.float()), "out: got | float32 | allowed | bfloat16"),
        (lambda: backward(dout=Q[:, :, :4]), "dout: got (2, 4, 4, 16) | allowed (2, 4, 8, 16)"),
        (lambda: backward(dlse=LSE[..., :1]), "dlse: got"),
        # numbers and names
        (lambda: fmha(window=(-1, 0)), "window's left: got -1 | allowed 0 and more | None for all keys"),
        (lambda: fmha(scale=float("inf")), "got inf | must be finite | None is 1/sqrt(D)"),
        (lambda: fmha(scale=1e39), "scale must be finite, up to 2.359e+38 | got 1e+39"),
        (lambda: fmha(scale=-2.4e38), "scale must be finite | -2.4e"),  # log2(e) times as much is beyond fp32
        (lambda: fmha(scale=10**400), "scale must be finite | inf"),
        (lambda: fmha(softcap=0.0), "got 0.0 | positive and finite | None, which caps nothing"),
        (lambda: fmha(backend="tritn"), "got 'tritn' | allowed auto, reference, triton | did you mean 'triton'"),
        (lambda: fmha(backend="cuda", variant="wgma"), "got 'wgma' | cuda has | None is the best"),
        (lambda: fmha(backend="cuda", variant=""), "variant: got ''; cuda has "),
        (lambda: fmha(variant="wgmma"), "got backend='auto' | needs a named backend | give backend='triton'"),
        (lambda: backward(backend="reference", variant="x"), "reference has eager for backward"),
        (lambda: varlen(max_seqlen_kv=-1), "got -1 | allowed 0 and more"),
        (lambda: multiattn.explain(Q, K, K, direction="sideways"), "got 'sideways'; allowed forward, backward"),
        (lambda: multiattn.explain(Problem.of(Q, K, K)), 'got None | needs arch= | "sm90", "H100"'),
        (lambda: multiattn.explain(Q, K, K, arch="h300"), "got 'h300' | allowed cpu, sm80 | or a GPU, as A100"),
        (lambda: multiattn.explain(Q, K, K, arch="blackwell"), "of sm100 and sm103 | allowed cpu, sm80 | as A100"),
    ],
}


@pytest.mark.parametrize(("kind", "call", "told"), rows(REFUSED))
def test_a_refusal_says_what_came_what_is_allowed_and_what_to_do(kind, call, told):
    error = assert_refused(kind, call, told)
    if kind is Unsupported:
        assert all(reason.hint for reason in error.reasons)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_wrong_for_every_backend_is_told_before_a_named_one_is_asked(backend):
    assert_refused(TypeError, lambda: fmha([Q], backend=backend), "q must be a torch.Tensor; got list")
    assert_refused(ValueError, lambda: fmha(scale=1e39, backend=backend), "scale must be finite")


def test_no_reason_lacks_a_hint():
    """Hints are given wherever a Reason is made, for those that no call above can ask for, too."""
    root = registry.__file__.rpartition("plan")[0]
    for path in sorted(Path(root).rglob("*.py")):
        text = path.read_text()
        for match in re.finditer(r"\bReason\((?=code=|\s+code=)", text):
            depth, end = 1, match.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            assert "hint=" in text[match.start() : end], f"{path}: {text[match.start() : end]}"


@pytest.mark.parametrize("size", [{"dtype": "fp32"}, {"head_dim": 20}, {"dtype": "fp32", "head_dim": 20}])
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize(
    "feature",
    [{}, {"batching": Batching.cached(2, 2)}, {"batch": 1, "batching": Batching.packed(2)}, {"has_sinks": True}],
)
def test_reasons_are_of_the_variant_that_came_nearest(size, backend, feature):
    """Nothing is refused for what another variant of the backend can do."""
    with pytest.raises(Unsupported) as caught:
        plan(backend=backend, **size, **feature)
    assert {reason.code for reason in caught.value.reasons} == set(size)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *zip(ARCHS, ARCHS, strict=True),
        *dict.fromkeys(("SM_90", "9.0", "90", "h100", "H200", "NVIDIA H100 80GB HBM3", "hopper"), "sm90").items(),
        *{"a100": "sm80", "4090": "sm89", "rtx 4090": "sm89", "B200": "sm100", "GB10": "sm121", "l40s": "sm89"}.items(),
    ],
)
def test_an_arch_is_found_by_what_people_call_it(name, arch):
    assert by_name(name).name == arch


def test_the_reference_runs_on_a_gpu_that_no_kernel_is_made_for():
    (found,) = plan(GPU_TURING, REFERENCE, dtype="fp32", head_dim=20)
    assert found.backend == REFERENCE
    with pytest.raises(Unsupported, match=r"Can run it: reference \(variant eager\)"):
        plan(GPU_TURING)


def test_the_types_of_backends_are_their_names():
    names = typing.get_args(BackendName)
    assert sorted(names) == sorted(("auto", REFERENCE, *BACKENDS))


def test_dir_shows_the_public_names():
    assert set(multiattn.__all__) <= set(dir(multiattn))
    assert "fmha_kvcache" in dir(multiattn)
    assert "operands" not in dir(multiattn)
