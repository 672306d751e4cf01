"""Wrong calls, as people make them: each is told what came, what is allowed, and what to do."""

import re
import typing
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

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
PAGES, TABLE = bf16(6, 2, 8, 16), int32(*range(6)).view(2, 3)
BLOCKS = create_block_mask(noop_mask, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=8)
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


def kvcache(q=ONE, k=CACHE, v=CACHE, **changes):
    given = {"seqlens_kv": int32(3, 4), **changes}
    return multiattn.fmha_kvcache(q, k, v, **{name: it for name, it in given.items() if it is not ...})


def backward(out=Q, lse=LSE, dout=Q, **rest):
    return multiattn.fmha_backward(Q, K, K, out, lse, dout, **rest)


def plan(arch="sm90", backend="cuda", direction="forward", variant=None, deterministic=False, **sizes):
    given = {"batch": 2, "heads_q": 4, "seq_q": 64, "head_dim": 64, **sizes}
    problem = Problem.contiguous(**{name: it for name, it in given.items() if name != "blocks"})
    if "blocks" in given:
        problem = Problem(**{**_fields(problem), "blocks": given["blocks"], "lists": ((1, 1, 1),) * 8})
    asked = Options(backend=backend, variant=variant, deterministic=deterministic)
    return choose(problem, arch if isinstance(arch, Arch) else by_name(arch), asked, direction, probe=False)


def _fields(problem):
    return {name: getattr(problem, name) for name in problem.__dataclass_fields__}


def twice():
    q = bf16(1, 1, 2, 16).requires_grad_()
    (first,) = torch.autograd.grad(multiattn.fmha(q, q, q, backend="reference").sum(), q, create_graph=True)
    first.sum().backward()


GPU_TURING = Arch(name="sm75", title="GPU without a row in ARCHS")

CALLS = {
    # the call, and pieces of its error: what came | what is allowed | what to do
    "fp32 to a kernel": (
        lambda: fmha(Q.float(), K.float(), K.float(), backend="triton"),
        "got fp32 | allowed fp16, bf16 | .bfloat16(), or call under torch.autocast",
    ),
    "D=20": (
        lambda: fmha(*[bf16(1, 1, 2, 20)] * 3, backend="cuda"),
        "head_dim: got 20 | multiples of 8 up to 1024 | pad q, k and v with zeros to D=24 | give scale=20**-0.5",
    ),
    "D=20 with a scale": (
        lambda: fmha(*[bf16(1, 1, 2, 20)] * 3, scale=0.5, backend="cuda"),
        "head_dim: got 20 | multiples of 8 | give scale=0.5",
    ),
    "D too wide": (
        lambda: plan(backend="triton", head_dim=264),
        "head_dim: got 264 | multiples of 8 up to 256 | name a backend that takes wider heads",
    ),
    "Turing": (lambda: plan(GPU_TURING), 'arch: got sm75 | allowed cpu, sm80 | backend="reference" runs on it'),
    "no backward there": (lambda: plan("sm80", variant="wgmma"), "arch: got sm80 | allowed sm90 | leave variant out"),
    "blocks too small": (
        lambda: plan(backend="triton", blocks=BlockSpec(8, 8, True)),
        "blocks of 8 x 8 | multiples of 16 | BLOCK_SIZE=128",
    ),
    "a cache to another variant": (
        lambda: plan(variant="wgmma", batching=Batching.cached(2, 2)),
        "cache: got keys in a cache (dense) | k and v in no cache | leave variant out",
    ),
    "packed to another variant": (
        lambda: plan(backend="triton", variant="split_keys", batch=1, batching=Batching.packed(2)),
        "packed batch of 2 | [B, H, S, D] | leave variant out",
    ),
    "not deterministic": (
        lambda: plan(direction="backward", variant="atomic", deterministic=True),
        "variant atomic | the same bits | deterministic=False",
    ),
    "too long": (lambda: plan(seq_kv=1 << 31), "Skv=2147483648 | lengths up to | multiattn.merge"),
    "no such backend": (
        lambda: fmha(backend="tritn"),
        "got 'tritn' | allowed auto, reference, triton | did you mean 'triton'",
    ),
    "no such variant": (lambda: fmha(backend="cuda", variant="wgma"), "got 'wgma' | cuda has | None is the best"),
    "a variant of auto": (
        lambda: fmha(variant="wgmma"),
        "got backend='auto' | needs a named backend | give backend='triton'",
    ),
    "a backend that is no string": (lambda: fmha(backend=3), "got int | must be a string | multiattn.backends()"),
    "numpy": (
        lambda: fmha(numpy.zeros((2, 4, 8, 16))),
        "got numpy.ndarray | must be a torch.Tensor | torch.from_numpy(q)",
    ),
    "JAX": (lambda: fmha(Q, FromJax()), "got jaxlib._jax.FromJax | k must be a torch.Tensor | torch.from_dlpack(k)"),
    "a list": (lambda: fmha([Q]), "got list | must be a torch.Tensor | torch.stack(q)"),
    "a nested tensor": (lambda: fmha(NESTED), "got a nested tensor | dense strided tensor | fmha_varlen"),
    "a sparse tensor": (
        lambda: fmha(Q.float().to_sparse()),
        "got layout torch.sparse_coo | dense strided tensor | .to_dense()",
    ),
    "int64": (lambda: fmha(Q.long()), "got torch.int64 | allowed torch.float16 | .bfloat16()"),
    "two dtypes": (lambda: fmha(Q.half()), "q=torch.float16, k=torch.bfloat16 | share one dtype | .to(q.dtype)"),
    "two devices": (lambda: fmha(META), "q=meta, k=cpu | on one device | .to(q.device)"),
    "a negated view": (lambda: fmha(torch._neg_view(Q)), "got a negated view | its own values | .resolve_neg()"),
    "three dimensions": (lambda: fmha(Q[0], K[0], K[0]), "got rank 3 | rank 4, [B, H, S, D] | fmha_varlen"),
    "two dimensions": (
        lambda: fmha(Q[0, 0], K[0, 0], K[0, 0]),
        "got rank 2 | rank 4, [B, H, S, D] | .unflatten(-1, (H, D))",
    ),
    "[B, S, H, D]": (
        lambda: fmha(bf16(2, 9, 4, 16), bf16(2, 7, 2, 16), bf16(2, 7, 2, 16)),
        "Hq=9, Hkv=7 | multiple of key/value heads | q.transpose(1, 2)",
    ),
    "heads that do not divide": (
        lambda: fmha(bf16(2, 3, 8, 16)),
        "Hq=3, Hkv=2 | multiple of key/value heads | the heads come second",
    ),
    "two batches": (lambda: fmha(Q[:1]), "q=(1, 4, 8, 16) | share the batch size | .expand"),
    "two head_dims": (lambda: fmha(bf16(2, 4, 8, 24)), "q=(2, 4, 8, 24) | share head_dim | pad the narrower"),
    "k transposed": (
        lambda: fmha(Q, bf16(2, 4, 16, 9), bf16(2, 4, 16, 9)),
        "k=(2, 4, 16, 9) | share head_dim | k.transpose(-2, -1)",
    ),
    "another stride on D": (lambda: fmha(Q, K.mT.contiguous().mT), "got strides | unit stride on D | .contiguous()"),
    "by position": (
        lambda: multiattn.fmha(Q, K, K, True),
        "4 arguments by position, the first of them too many True | takes 3 by position | causal=",
    ),
    "a mask by position": (lambda: multiattn.fmha(Q, K, K, Q), "a Tensor | takes 3 by position | bias="),
    "a scale by position": (lambda: multiattn.fmha(Q, K, K, 0.5), "too many 0.5 | takes 3 by position | scale="),
    "lengths by position": (
        lambda: multiattn.fmha_varlen(ROWS, ROWS, ROWS, STARTS),
        "a Tensor | takes 3 by position | cu_seqlens_q=",
    ),
    "PyTorch's names": (lambda: multiattn.fmha(query=Q, key=K, value=K), "'query' | unexpected keyword | here it is q"),
    "no v": (lambda: multiattn.fmha(Q, K), "got None or nothing for v | needs q, k, v | by its name"),
    "a typo": (lambda: fmha(casual=True), "'casual' | unexpected keyword | it takes causal"),
    "cache_seqlens": (
        lambda: kvcache(seqlens_kv=..., cache_seqlens=3),
        "'cache_seqlens' | unexpected keyword | here it is seqlens_kv",
    ),
    "block_table": (lambda: kvcache(block_table=TABLE), "'block_table' | unexpected keyword | here it is page_table"),
    "cu_seqlens_k": (
        lambda: varlen(cu_seqlens_kv=..., cu_seqlens_k=3),
        "'cu_seqlens_k' | unexpected keyword | here it is cu_seqlens_kv",
    ),
    "max_seqlen_k": (
        lambda: varlen(max_seqlen_kv=..., max_seqlen_k=3),
        "'max_seqlen_k' | unexpected keyword | here it is max_seqlen_kv",
    ),
    "no lengths": (
        lambda: varlen(max_seqlen_q=...),
        "got None or nothing for max_seqlen_q | needs q, k, v, cu_seqlens_q | by its name",
    ),
    "a block mask that is a tensor": (
        lambda: fmha(block_mask=torch.ones(8, 8)),
        "got Tensor | attention.BlockMask | a mask tensor is bias, or make one by create_block_mask",
    ),
    "a block mask of other lengths": (
        lambda: fmha(bf16(2, 4, 80, 16), block_mask=BLOCKS),
        "lists [1, 1, 1, 1] | 10 or more | create_block_mask for these lengths",
    ),
    "a block mask of packed rows": (
        lambda: varlen(block_mask=BLOCKS),
        "got one | allowed None in a packed batch | score_mod can hide keys",
    ),
    "causal that is a mask": (lambda: fmha(causal=torch.ones(8, 8)), "got Tensor | must be a bool | a mask is bias"),
    "causal as text": (lambda: fmha(causal="yes"), "got str | must be a bool | give True or False"),
    "a window of one number": (
        lambda: fmha(window=128),
        "got 128 | must be a pair (left, right) or None | window=(128 - 1, 0)",
    ),
    "a window of -1": (lambda: fmha(window=(-1, 0)), "got -1 | allowed 0 and more | None for all keys"),
    "a scale that is a tensor": (
        lambda: fmha(scale=torch.tensor(0.5)),
        "got Tensor | must be a float or None | scale.item()",
    ),
    "an infinite scale": (lambda: fmha(scale=float("inf")), "got inf | must be finite | None is 1/sqrt(D)"),
    "softcap=0": (lambda: fmha(softcap=0.0), "got 0.0 | positive and finite | None, which caps nothing"),
    "slopes of another shape": (
        lambda: fmha(alibi_slopes=torch.zeros(4, 1, 1)),
        "got shape (4, 1, 1) | allowed (4,) and (2, 4) | one slope for each head",
    ),
    "slopes in bf16": (
        lambda: fmha(alibi_slopes=bf16(4)),
        "got torch.bfloat16 | allowed dense torch.float32 | .float()",
    ),
    "a bias of keys": (
        lambda: fmha(bias=bf16(2, 8)),
        "got shape (2, 8) | [B|1, Hq|1, Sq|1, Skv|1] | bias[:, None, None, :]",
    ),
    "a bias in int64": (lambda: fmha(bias=bf16(1, 1, 8, 8).long()), "got torch.int64 | allowed dense | .float()"),
    "a bias elsewhere": (
        lambda: fmha(bias=bf16(1, 1, 8, 8, device="meta")),
        "got meta | on the device of q, cpu | .to(q.device)",
    ),
    "sinks of another shape": (lambda: fmha(sinks=bf16(1, 4, 1)), "got shape [1, 4, 1] | allowed [4] | .flatten()"),
    "sinks as integers": (lambda: fmha(sinks=int32(1, 2, 3, 4)), "got torch.int32 | floating-point | .float()"),
    "a score_mod that is a tensor": (
        lambda: fmha(score_mod=Q),
        "got Tensor | must be callable or None | a tensor to add to scores is bias",
    ),
    "deterministic=1": (
        lambda: fmha(deterministic=1),
        "got int | must be a bool or None | torch.use_deterministic_algorithms",
    ),
    "dout in numpy": (
        lambda: backward(dout=numpy.zeros((2, 4, 8, 16))),
        "got numpy.ndarray | dout must be a torch.Tensor | torch.from_numpy(dout)",
    ),
    "no dout": (
        lambda: multiattn.fmha_backward(Q, K, K, Q, LSE),
        "got None or nothing for dout | needs q, k, v, out, lse, dout | by its name",
    ),
    "lse of another shape": (
        lambda: backward(lse=LSE[..., :4]),
        "lse: got (2, 4, 4) | allowed (2, 4, 8) | return_lse=True",
    ),
    "a gradient of a gradient": (twice, "differentiated once | no gradient of their own | multiattn.reference"),
    "a gradient of a cache": (
        lambda: kvcache(ONE.clone().requires_grad_()),
        "fmha_kvcache has no gradient | fmha_varlen has one | torch.no_grad()",
    ),
    "a padded batch as packed": (lambda: varlen(Q, K, K), "got rank 4 | rank 3, [T, H, D] | fmha_padded"),
    "cu_seqlens in int64": (
        lambda: varlen(cu_seqlens_q=STARTS.long()),
        "got torch.int64 | allowed torch.int32 | .int()",
    ),
    "cu_seqlens as a list": (
        lambda: varlen(cu_seqlens_q=[0, 4, 9]),
        "got list | cu_seqlens_q must be a torch.Tensor",
    ),
    "a longest length below 0": (lambda: varlen(max_seqlen_kv=-1), "got -1 | allowed 0 and more"),
    "a bias of other lengths": (
        lambda: varlen(bias=bf16(2, 4, 6, 5)),
        "bias: got shape (2, 4, 6, 5) | allowed | (2, 4, 5, 5)",
    ),
    "slopes of other sequences": (
        lambda: varlen(alibi_slopes=torch.zeros(3, 4)),
        "alibi_slopes: got shape (3, 4) | allowed (4,) and (2, 4)",
    ),
    "cu_seqlens of two dimensions": (
        lambda: varlen(cu_seqlens_q=STARTS[None]),
        "got shape (1, 3) | [B + 1] | torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()",
    ),
    "two numbers of sequences": (
        lambda: varlen(cu_seqlens_q=STARTS[:2]),
        "(2,) | one shape, [B + 1] | repeats its start",
    ),
    "a longest length as a tensor": (
        lambda: varlen(max_seqlen_q=torch.tensor(5)),
        "got Tensor | must be an int | max_seqlen_q.item()",
    ),
    "lengths of a cache in int64": (
        lambda: kvcache(seqlens_kv=int32(3, 4).long()),
        "got torch.int64 | allowed torch.int32 | .int()",
    ),
    "a length beyond the cache": (
        lambda: kvcache(seqlens_kv=int32(3, 40)),
        "got 40 of sequence 1 | allowed 0 to 32 | write the new keys into the cache first",
    ),
    "a page that is not there": (
        lambda: kvcache(k=PAGES, v=PAGES, page_table=TABLE + 4, seqlens_kv=int32(24, 3)),
        "got 6 of sequence 0 | allowed 0 to 5 | name a page there",
    ),
    "one query without its dimension": (
        lambda: kvcache(ONE[:, :, 0]),
        "got shape (2, 4, 16) | [B, Hq, Sq, D] | q.unsqueeze(2)",
    ),
    "a cache of more entries": (
        lambda: kvcache(k=bf16(3, 2, 32, 16), v=bf16(3, 2, 32, 16)),
        "got shape (3, 2, 32, 16) | an entry for each of 2 sequences | k_cache[:2]",
    ),
    "a cache in [B, S, H, D]": (
        lambda: kvcache(k=bf16(2, 32, 2, 16), v=bf16(2, 32, 2, 16)),
        "k_cache=(2, 32, 2, 16) | multiple of key/value heads | k_cache.transpose(1, 2)",
    ),
    "packed queries without a bound": (
        lambda: kvcache(ROWS[:2], cu_seqlens_q=int32(0, 1, 2)),
        "got None | must be an int with cu_seqlens_q | the most queries",
    ),
    "num_splits=0": (lambda: kvcache(num_splits=0), "got 0 | allowed 1 to 256 | None leaves it to the plan"),
    "out of another dtype": (lambda: kvcache(out=ONE.float()), "torch.float32 | must be like q | torch.empty_like(q)"),
    "parts of other queries": (
        lambda: multiattn.merge(Q, LSE, Q[:, :, :4], LSE[..., :4]),
        "got shape [2, 4, 4, 16] | allowed [2, 4, 8, 16] | the same queries, and other keys",
    ),
    "lse without return_lse": (
        lambda: multiattn.merge(Q, LSE.mT, Q, LSE),
        "got shape [2, 8, 4] | allowed [2, 4, 8] | return_lse=True",
    ),
    "heads of a layer": (
        lambda: multiattn.nn.Attention(64, 4, 3),
        "got 4 and 3 | multiple of num_kv_heads | num_kv_heads=None",
    ),
    "no such arch": (
        lambda: multiattn.explain(Q, K, K, arch="h300"),
        "got 'h300' | allowed cpu, sm80 | or a GPU, as A100",
    ),
    "an arch of several": (
        lambda: multiattn.explain(Q, K, K, arch="blackwell"),
        "it is of sm100 and sm103 | allowed cpu, sm80 | or a GPU, as A100",
    ),
    "explain without arch": (lambda: multiattn.explain(Problem.of(Q, K, K)), 'got None | needs arch= | "sm90", "H100"'),
    "GQA in flex_attention": (
        lambda: multiattn.flex_attention(Q, K, K),
        "got False | as many heads of key | allowed True",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_says_what_came_what_is_allowed_and_what_to_do(name):
    call, told = CALLS[name]
    with pytest.raises((TypeError, ValueError, NotImplementedError, Unsupported)) as caught:
        call()
    for piece in told.split(" | "):
        assert piece in str(caught.value)
    if isinstance(caught.value, Unsupported):
        assert all(reason.hint for reason in caught.value.reasons)


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
