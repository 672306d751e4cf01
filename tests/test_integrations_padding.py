"""`fmha_padded` beside the reference of each row without its padding."""

import pytest
import torch

import multiattn
from multiattn.integrations.padding import fmha_padded


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (3, None)}, {"window": (2, 2)}])
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_padded_is_attention_of_what_is_left(options, queries):
    """Each row by itself, without its padding; a row of padding alone is 0."""
    seed = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(4, heads, 9, width, generator=seed) for heads, width in ((4, 8), (2, 8), (2, 12)))
    q = q[:, :, 9 - queries :].requires_grad_()
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[0, :3], mask[1, 7:], mask[2] = 0, 0, 0
    out = fmha_padded(q, k, v, kv_mask=mask, **options)
    (grad,) = torch.autograd.grad(out.sum(), q)
    for row, tokens_of in enumerate(mask.bool()):
        places = tokens_of[9 - queries :]
        if options and queries > 1:  # where positions count, queries are tokens too
            wanted = torch.zeros_like(out[row])
            wanted[:, places] = multiattn.reference(
                *(it[row : row + 1, :, of] for it, of in ((q, places), (k, tokens_of), (v, tokens_of))), **options
            )[0][0]
        elif queries > 1 or places.all() or not tokens_of.any():
            some = (it[row : row + 1, :, tokens_of] for it in (k, v))
            wanted = multiattn.reference(q[row : row + 1], *some, **options)[0][0]
        else:
            continue
        torch.testing.assert_close(out[row], wanted)
        (wanted_grad,) = torch.autograd.grad(wanted.sum(), q, allow_unused=True)
        torch.testing.assert_close(grad[row], torch.zeros_like(q[row]) if wanted_grad is None else wanted_grad[row])
