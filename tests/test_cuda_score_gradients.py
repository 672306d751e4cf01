"""Gradients of captured tensors in CUDA, against autograd through the reference."""

import pytest
import torch
from cuda_runs import on_cpu, with_nvrtc
from torch.nn.attention.flex_attention import create_block_mask

from multiattn import fmha
from multiattn.cuda import BACKEND
from multiattn.cuda.instances import launches_of
from multiattn.inspect.facts import read_plan
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import problem_of

BATCH, HEADS, SEQ_Q, SEQ_KV = 2, 4, 50, 70


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).requires_grad_()


def biased(*shape, **options):
    bias = drawn(*shape)
    return [bias], {"bias": bias, **options}


def slopes(*shape):
    given = drawn(*shape)
    return [given], {"alibi_slopes": given, "causal": True}


def relative():
    """A table by distance: its index is computed, and many scores share an element."""
    table = drawn(HEADS, 31)
    return [table], {"score_mod": lambda s, b, h, q, kv: s + table[h, (q - kv).clamp(-15, 15) + 15]}


def factor():
    """A gradient that is of the score itself."""
    factors = drawn(HEADS)
    return [factors], {"score_mod": lambda s, b, h, q, kv: s * factors[h]}


def nested():
    """A slope that is of another captured tensor."""
    factors, rows = drawn(HEADS), drawn(SEQ_Q)
    return [factors, rows], {"score_mod": lambda s, b, h, q, kv: torch.tanh(s * factors[h] + rows[q]) * 3}


def masked():
    bias = drawn(1, HEADS, SEQ_Q, SEQ_KV)

    def visible(b, h, q, kv):
        return (q // 20 == kv // 30) & (q % 3 > 0)

    mask = create_block_mask(visible, None, None, SEQ_Q, SEQ_KV, device="cpu", BLOCK_SIZE=32)
    return [bias], {"bias": bias, "block_mask": mask}


CASES = {
    "a bias of each score": lambda: biased(BATCH, HEADS, SEQ_Q, SEQ_KV),
    "a bias of all batch entries": lambda: biased(1, HEADS, SEQ_Q, SEQ_KV),
    "a bias of keys": lambda: biased(BATCH, 1, 1, SEQ_KV),
    "a bias under a window": lambda: biased(1, 1, SEQ_Q, SEQ_KV, window=(10, 5)),
    "a bias behind a softcap": lambda: biased(1, HEADS, SEQ_Q, SEQ_KV, softcap=2.0),
    "slopes": lambda: slopes(BATCH, HEADS),
    "a relative table": relative,
    "a factor": factor,
    "two tensors": nested,
    "a block mask": masked,
}
IN_ORDER = ("a bias of keys", "a bias behind a softcap", "slopes", "a block mask")


@on_cpu
@pytest.mark.parametrize(("name", "deterministic"), [*((it, False) for it in CASES), *((it, True) for it in IN_ORDER)])
def test_it_is_the_gradient_of_the_reference(name, deterministic):
    generator = torch.Generator().manual_seed(0)
    shapes = (BATCH, HEADS, SEQ_Q, 16), *((BATCH, 2, SEQ_KV, 16),) * 2
    inputs = [torch.randn(shape, generator=generator).half() for shape in shapes]
    captured, options = CASES[name]()
    results = []
    for backend, own in (("cuda", {"deterministic": deterministic}), ("reference", {})):
        given = [it.clone().requires_grad_() for it in inputs]
        out = fmha(*given, backend=backend, **options, **own)
        results.append(torch.autograd.grad(out.float().square().sum(), [*given, *captured]))
    for got, true in zip(*results, strict=True):
        torch.testing.assert_close(got, true, rtol=0.01, atol=0.01 * true.abs().max().item())


def planned(*, head_dim=64, softcap=None, variant="atomic", arch="sm90"):
    q, k, v = (torch.zeros(1, 2, 48, head_dim, dtype=torch.bfloat16) for _ in range(3))
    operands, options = with_score(Operands(q, k, v), Options(), softcap, None, drawn(1, 2, 48, 48), None)
    problem = problem_of(operands, options)
    return make_plan(BACKEND, problem, by_name(arch), direction="backward", variant=variant, probe=False)


def test_only_what_needs_it_takes_more_shared_memory():
    """Where a bias is added last, its gradient is that of the score. Behind it Q K^T is wanted, in fp32 for 16 bits."""
    plain, capped = (launches_of(planned(softcap=it))[1].kernel for it in (None, 5.0))
    assert capped.smem_bytes - plain.smem_bytes == 64 * 64 * 2
    for arch in ("sm80", "sm86", "sm90"):
        for head_dim in (64, 128, 256):
            for variant in ("atomic", "two_pass"):
                planned(softcap=5.0, arch=arch, head_dim=head_dim, variant=variant)


@with_nvrtc
@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")
def test_the_gradient_of_a_bias_does_not_spill():
    for facts in read_plan(planned()):
        assert facts.hot_spills == 0
