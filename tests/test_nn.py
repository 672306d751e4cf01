"""The layer, against the reference between plain projections."""

import pytest
import torch

import multiattn
from multiattn.nn import Attention

OPTIONS = {
    "plain": {},
    "grouped, with a bias": {"num_kv_heads": 2, "bias": True, "scale": 0.3},
    "causal window with sinks": {"head_dim": 8, "causal": True, "window": (3, None), "sinks": True, "softcap": 2.0},
}


def plainly(layer, x, context, **options):
    """The layer's output by the reference between its projections."""

    def heads(projection, tensor):
        return projection(tensor).view(*tensor.shape[:2], -1, layer.head_dim).transpose(1, 2)

    q, k, v = heads(layer.q_proj, x), heads(layer.k_proj, context), heads(layer.v_proj, context)
    of_call = {name: it for name, it in options.items() if name in ("causal", "window", "softcap", "scale")}
    out, _ = multiattn.reference(q, k, v, sinks=layer.sinks, compute_dtype=torch.float64, **of_call)
    return layer.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_cross", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_attention_between_projections(name, is_cross):
    torch.manual_seed(0)
    layer = Attention(32, 4, **OPTIONS[name], dtype=torch.float64)
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    given = (x, torch.randn(2, 9, 32, dtype=torch.float64)) if is_cross else (x,)
    found, expected = layer(*given), plainly(layer, given[0], given[-1], **OPTIONS[name])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gradients = (torch.autograd.grad(it.square().sum(), tuple(layer.parameters())) for it in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_it_compiles_whole():
    torch._dynamo.reset()
    layer = Attention(32, 4, 2, causal=True, sinks=True)
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_what_it_is_made_of():
    layer = multiattn.nn.Attention(48, 4, 2, head_dim=16, bias=True, causal=True, window=(5, 0), device="meta")
    shapes = {name: tuple(it.shape) for name, it in layer.named_parameters() if name.endswith("weight")}
    expected = {"q_proj": (64, 48), "k_proj": (32, 48), "v_proj": (32, 48), "o_proj": (48, 64)}
    assert shapes == {f"{name}.weight": its for name, its in expected.items()}
    assert layer(torch.empty(3, 5, 48, device="meta")).shape == (3, 5, 48)
    assert layer.extra_repr() == "causal=True, window=(5, 0)"
