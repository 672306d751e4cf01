"""Memory beyond the ends of sequences, lists of blocks and counts reaches nothing, in any backend.

Parity makes its block masks of callables. Here are lists that no callable makes, and scores that are no numbers where
there is no query or key.
"""

import functools

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from multiattn import BACKENDS, fmha, fmha_backward, reference, reference_backward
from multiattn.plan import backend as registry
from multiattn.plan.arch import CPU

SEQ_Q, SEQ_KV = 150, 180


def normal(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).half() for shape in shapes]


def tensors(seq_q=SEQ_Q, seq_kv=SEQ_KV, head_dim=24):
    return normal((2, 2, seq_q, head_dim), *((2, 1, seq_kv, head_dim),) * 2)


def check(backend, given, deterministic=False, **options):
    """Out, lse and gradients of a call as of the reference's."""
    results = []
    for name, own in ((backend, {"deterministic": deterministic}), ("reference", {})):
        leaves = [it.clone().requires_grad_() for it in given]
        out, lse = fmha(*leaves, backend=name, return_lse=True, **options, **own)
        seen = torch.where(lse == -torch.inf, 0.0, lse)
        gradients = torch.autograd.grad(out.float().square().sum() + seen.sum(), leaves)
        results.append((out.detach(), lse.detach(), *gradients))
    for got, true in zip(*results, strict=True):
        torch.testing.assert_close(got, true, rtol=0.02, atol=0.02)


def variants_of(direction, able):
    """The variants of all backends that a CPU runs and that are able to."""
    return [
        pytest.param(name, variant.name, id=f"{name}-{variant.name}")
        for name in BACKENDS
        for variant in registry.get(name).op(direction).variants
        if CPU.name in variant.capability.arches and able(variant.capability)
    ]


# ---------------------------------------------------------------- lists of blocks


def lists(counts, order, full_counts, full_order):
    """Lists of three blocks of queries and five of keys, which are more of each than there are."""
    given = ([[counts]], [order] * 3, [[full_counts]], [full_order] * 3)
    return [torch.tensor(it).int().view(1, 1, 3, -1).squeeze(-1) for it in given]


def mask_of(*given):
    return BlockMask.from_kv_blocks(*given, BLOCK_SIZE=64, mask_mod=lambda b, h, q, kv: (q + kv) % 3 == 0)


MASKS = {
    "full blocks in no order, the ragged ones among them": lambda: mask_of(
        *lists([1, 2, 0], [2, 0, 1, 4, 3], [3, 1, 0], [3, 4, 1, 0, 2])
    ),
    "all full": lambda: mask_of(*lists([0, 0, 0], [0] * 5, [3, 3, 3], [0, 1, 2, 3, 4])),
    "none full": lambda: mask_of(*lists([1, 2, 0], [2, 0, 1, 4, 3], [0, 0, 0], [0] * 5)[:2]),
    "longer than sequences": lambda: create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 300, 400, device="cpu"),
    "nothing": lambda: mask_of(*lists([0, 0, 0], [0] * 5, [0, 0, 0], [0] * 5)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
def test_a_block_mask_is_its_lists(name, backend):
    """A full block is seen whole, whatever mask_mod says, but not what lies beyond the ends."""
    check(backend, tensors(), block_mask=MASKS[name](), sinks=torch.linspace(-1, 1, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_entries_behind_a_count_are_not_looked_at(backend):
    """Interpreters refuse addresses beyond tensors."""
    make = functools.partial(create_block_mask, lambda b, h, q, kv: q >= kv, 2, None, SEQ_Q, SEQ_KV, device="cpu")
    clean, mask = make(BLOCK_SIZE=64), make(BLOCK_SIZE=64)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
        indices[torch.arange(indices.shape[-1]) >= counts[..., None]] = 1 << 20
    wanted, got = (fmha(*tensors(), block_mask=it, backend=backend) for it in (clean, mask))
    assert torch.equal(wanted, got)


@pytest.mark.parametrize(("backend", "variant"), variants_of("backward", lambda it: it.block_masks))
def test_a_key_beyond_the_end_of_a_block_has_no_weight(backend, variant):
    """Its score of 0 would be far above all others, and its weight infinite."""
    q, k, v = tensors(64, 70)
    mask = create_block_mask(lambda b, h, q, kv: kv >= 0, None, None, 64, 70, device="cpu", BLOCK_SIZE=64)
    given, options = (q.abs() + 4, -k.abs() - 4, v), {"block_mask": mask}
    out, lse = reference(*given, **options)
    dout = v[:, :, :64].repeat(1, 2, 1, 1)
    gradients = fmha_backward(*given, out.half(), lse, dout, backend=backend, variant=variant, **options)
    assert lse.max() < -89  # which exp(-lse) exceeds fp32 of
    assert all(it.isfinite().all() for it in gradients)


# ---------------------------------------------------------------- scores

SCORES = {
    "a score of no number": lambda score, b, h, q, kv: score + torch.log(38.0 - q),
    "a slope without bound": lambda score, b, h, q, kv: torch.sqrt(torch.abs(score)),
}
"""The first is -inf and nan for queries 38 and on; the second has an infinite slope where q is 0."""


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("backend", "variant"), variants_of("backward", lambda it: it.scores))
def test_scores_beyond_the_ends_reach_nothing(backend, variant, name):
    q, k, v, dout = normal(*((1, 2, length, 16) for length in (37, 45, 45, 37)))
    out, lse = reference(q, k, v, score_mod=SCORES[name])
    given = q, k, v, out.half(), lse, dout
    made = fmha_backward(*given, score_mod=SCORES[name], backend=backend, variant=variant)
    for got, true in zip(made, reference_backward(*given, score_mod=SCORES[name]), strict=True):
        torch.testing.assert_close(got, true.half(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("backend", "variant"), variants_of("backward", lambda it: it.scores))
def test_slopes_of_keys_that_a_mask_hides_reach_nothing(backend, variant):
    """They are NaN for keys behind the query."""
    q, k, v, dout = normal(*((1, 2, length, 16) for length in (49, 83, 83, 49)))
    options = {"score_mod": lambda s, b, h, q, kv: s * torch.sqrt(q + 34 - kv), "causal": True}
    out, lse = reference(q, k, v, **options)
    given = q, k, v, out.half(), lse, dout
    made = fmha_backward(*given, backend=backend, variant=variant, **options)
    for got, true in zip(made, reference_backward(*given, **options), strict=True):
        assert got.isfinite().all()
        known = true.isfinite()
        torch.testing.assert_close(got[known], true.half()[known], rtol=0.02, atol=0.02)
