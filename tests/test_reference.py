"""The reference is the semantics: held to SDPA where the two agree, and to the contract where they do not."""

import math

import pytest
import torch
import torch.nn.functional as F

from multiattn import reference, reference_backward


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(9, 9), (3, 7), (7, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_agrees_with_sdpa_and_causal_is_bottom_right(causal, group, seq_q, seq_kv):
    q, k, v = random(2, 4, seq_q, 8), *(random(2, 4 // group, seq_kv, 8, seed=seed) for seed in (1, 2))
    out, lse = reference(q, k, v, causal=causal, compute_dtype=torch.float64)
    visible = torch.ones(seq_q, seq_kv, dtype=torch.bool)
    visible = visible.tril(seq_kv - seq_q) if causal else visible
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    torch.testing.assert_close(out, expected.where(visible.any(-1)[:, None], 0.0))
    scores = (q @ k.repeat_interleave(group, 1).mT / math.sqrt(8)).masked_fill(~visible, -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_rows_that_see_a_key_meet_its_value(value):
    q, k, v = (random(1, 1, 6, 8, seed=seed) for seed in range(3))
    v[0, 0, 3, 5] = value
    out, _ = reference(q, k, v, causal=True)
    assert out[0, 0, :3].isfinite().all()
    expected = torch.full((3,), value, dtype=out.dtype)
    torch.testing.assert_close(out[0, 0, 3:, 5], expected, equal_nan=True)
    others = [column for column in range(8) if column != 5]
    assert out[0, 0][:, others].isfinite().all()
    k[0, 0, 4] = math.nan
    out, lse = reference(q, k, v, causal=True)
    assert out[0, 0, :3].isfinite().all()
    assert out[0, 0, 4:].isnan().all()
    assert lse[0, 0, 4:].isnan().all()


def test_nothing_to_do_and_no_keys_at_all():
    for shape in ((0, 2, 3, 8), (1, 2, 0, 8)):
        out, lse = reference(torch.zeros(shape), *[torch.zeros(shape[0], 2, 5, 8)] * 2)
        assert (out.shape, lse.shape) == (shape, shape[:3])
    out, lse = reference(torch.ones(1, 2, 3, 8), *[torch.ones(1, 2, 0, 8)] * 2)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


BACKWARD = {
    "full": {},
    "causal": {"causal": True},
    "more keys": {"causal": True, "seq_kv": 9},
    "empty rows": {"causal": True, "seq_kv": 2},
    "GQA": {"heads_kv": 2},
    "MQA": {"heads_kv": 1, "causal": True},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -1.5, "causal": True},
    "huge scores": {"scale": 300.0},
    "window": {"window": (2, 1)},
    "window of one key": {"window": (0, 0), "seq_kv": 7},
    "window past empty rows": {"window": (1, 0), "seq_kv": 2},
    "no left bound": {"window": (None, 1)},
    "no right bound": {"window": (1, None), "seq_kv": 9},
    "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0, -math.inf])},
    "sinks of empty rows": {"sinks": torch.tensor([0.5, -2.0, 3.0, 20.0]), "causal": True, "seq_kv": 2},
    "sinks without keys": {"sinks": torch.tensor([0.5, -2.0, 3.0, 20.0]), "seq_kv": 0},
    "softcap": {"softcap": 1.5},
    "ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.0]), "seq_kv": 9},
    "bias that hides keys": {"bias": torch.linspace(-3, 3, 25).view(1, 1, 5, 5).where(torch.eye(5) == 0, -math.inf)},
    "a softcap that ALiBi follows": {"softcap": 1.5, "alibi_slopes": torch.rand(2, 4), "causal": True},
    "score_mod": {"score_mod": lambda s, b, h, i, j: torch.where(i > j, s * s, s - 0.1 * h), "scale": -1.0},
    "no keys": {"seq_kv": 0},
    "no queries": {"seq_q": 0},
}


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_formulas_agree_with_autograd(name, with_dlse):
    options = {"seq_q": 5, "seq_kv": 5, "heads_kv": 4} | BACKWARD[name]
    seq_q, seq_kv, heads_kv = (options.pop(key) for key in ("seq_q", "seq_kv", "heads_kv"))
    shapes = ((2, 4, seq_q, 8), (2, heads_kv, seq_kv, 8), (2, heads_kv, seq_kv, 8))
    q, k, v = (random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes))
    leaves = [q, k, v]
    if "sinks" in options:
        options["sinks"] = options["sinks"].double().requires_grad_()
        leaves.append(options["sinks"])
    out, lse = reference(q, k, v, compute_dtype=torch.float64, **options)
    dout, dlse = random(*out.shape, seed=3), random(*lse.shape, seed=4)
    loss = (out * dout).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * dlse).sum() * with_dlse
    expected = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        options |= {"dlse": dlse if with_dlse else None, "compute_dtype": torch.float64}
        grads = reference_backward(q, k, v, out, lse, dout, **options)
    torch.testing.assert_close(grads, expected)
    empty = lse == -math.inf
    assert (grads[0][empty] == 0).all()


def test_it_is_there_for_what_the_kernels_refuse():
    """Differentiating twice and forward mode, as their errors say."""
    q, k, v = (torch.randn(1, 2, 3, 8, dtype=torch.float64) for _ in range(3))

    def total(q):
        out, lse = reference(q, k, v, causal=True, compute_dtype=torch.float64)
        return out.sin().sum() + lse.sin().sum()

    dq = torch.func.grad(total)(q)
    torch.testing.assert_close(torch.func.jvp(total, (q,), (q,))[1], (dq * q).sum())
    twice = torch.func.grad(lambda q: (torch.func.grad(total)(q) * q).sum())(q)
    torch.testing.assert_close(twice, dq + torch.einsum("abcdefgh,efgh->abcd", torch.func.hessian(total)(q), q))
