"""transformers' models with attn_implementation="multiattn", beside their own eager attention."""

import copy
import inspect

import pytest
import torch

import multiattn

transformers = pytest.importorskip("transformers")

from transformers_cells import padding  # noqa: E402
from transformers_models import BATCH, LENGTH, Recipe, build, tokens  # noqa: E402

from multiattn.integrations.transformers import attend, register  # noqa: E402

register()
transformers.logging.set_verbosity_error()
_NAMES = inspect.signature(transformers.LlamaModel.forward).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"


def small(name, **changes):
    """The config of a decoder of two layers, whose windows are of six keys."""
    return Recipe().small(getattr(transformers, f"{name}Config"), **changes)


def decoder(name, layers=2):
    changes = {"Gemma2": {"attn_logit_softcapping": 3.0}, "GptOss": {"num_local_experts": 2}}
    config = small(name, **changes.get(name, {}))
    config.num_hidden_layers = layers
    return build(getattr(transformers, f"{name}ForCausalLM"), config)


def run(model, implementation, dtype, function):
    """Run a function of a copy of a model, which gives tensors, and give them in float64."""
    model = copy.deepcopy(model).to(dtype)
    model.set_attn_implementation(implementation)
    return [it.double() for it in function(model)]


def check(model, function, dtype=torch.float32, name="multiattn"):
    """Ours errs at most twice as much as eager attention in this dtype does.

    The spread of eager attention is measured in bfloat16, beside its own float32, and shrinks with the dtype's epsilon;
    in float32 what it is measured by errs as well. It is that of the worst tensor, as a share of its largest value: one
    tensor alone may be close by chance, and is on some CPUs.
    """
    truth = run(model, "eager", torch.float32, function)
    rough = run(model, "eager", torch.bfloat16, function)
    ours = run(model, name, dtype, function)
    scale = torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps
    spread = max(((b - c).abs().max() / c.abs().max()).item() for b, c in zip(rough, truth, strict=True))
    for place, (a, c) in enumerate(zip(ours, truth, strict=True)):
        assert a.isfinite().all()
        allowed = (2 if dtype == torch.bfloat16 else 4) * scale * spread * c.abs().max()
        assert (a - c).abs().max() <= allowed, f"{place}: {(a - c).abs().max():.3g}, allowed {allowed:.3g}"


def gradients(model, **given):
    out = model.train()(**given)
    (out.loss if "loss" in out else out.last_hidden_state.square().mean()).backward()
    return [it.grad for it in model.parameters() if it.grad is not None]


def packed():
    """Two sequences in each row, told by positions alone."""
    positions = torch.cat((torch.arange(9), torch.arange(LENGTH - 9)))
    return {"position_ids": positions.expand(BATCH, -1), "use_cache": False}


@pytest.mark.parametrize("static", [False, True])
def test_prefill_in_parts(static):
    """A later part sees the keys before it: bottom right, not top left."""

    def parts(model):
        kind = transformers.StaticCache if static else transformers.DynamicCache
        cache = kind(config=model.config, **({"max_cache_len": 40} if static else {}))
        mask, found = padding(left=3), []
        for first, last in ((0, 9), (9, 20), (20, 21), (21, 23)):
            result = model(tokens()[:, first:last], attention_mask=mask[:, :last], **{CACHE: cache})
            found.append(result.logits * mask[:, first:last, None])
        return found

    with torch.no_grad():
        check(decoder("Mistral"), parts)


def test_gradients_of_padded_and_packed_batches_with_checkpointing():
    mask = padding(left=5)
    labels = torch.where(mask.bool() & mask.roll(1, 1).bool(), tokens(), -100)  # less those that padding would predict
    padded = {"input_ids": tokens(), "attention_mask": mask, "labels": labels}

    def both(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found = gradients(model, **padded)
        model.zero_grad()
        return found + gradients(model, input_ids=tokens(), labels=tokens(), **packed())

    check(decoder("Mistral"), both)


@pytest.mark.parametrize("given", ["mask", "positions", "lengths", "cache"])
def test_compiles_whole(given):
    """With lengths as transformers' DataCollatorWithFlattening gives them positions may go on."""

    def logits(model):
        torch.compiler.reset()
        mine = model.config._attn_implementation != "eager"
        forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if mine else model.forward
        if given == "cache":
            cache = transformers.StaticCache(config=model.config, max_cache_len=30)
            parts = (tokens()[:, :20], tokens()[:, 20:21], tokens()[:, 21:22])
            with torch.no_grad():
                return [forward(it, **{CACHE: cache}).logits for it in parts]
        mask = padding(left=5)
        mask[1, 11:13] = 0  # between tokens, where a window counts it
        options = {"attention_mask": mask} if given == "mask" else packed()
        if given == "lengths" and mine:
            lengths = torch.tensor([0, 9, LENGTH, LENGTH + 9, 2 * LENGTH])
            most = dict.fromkeys(("max_length_q", "max_length_k"), LENGTH - 9)
            options = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, **most, "use_cache": False}
        return [forward(tokens(), **options).logits * (mask[..., None] if given == "mask" else 1)]

    check(decoder("Mistral", layers=1), logits)


@pytest.mark.parametrize("kind", ["none", "padding", "few numbers", "numbers", "bools"])
def test_a_position_bias_stands_beside_any_mask(kind):
    seed = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(BATCH, 4, length, 8, generator=seed) for length in (5, 9, 9))
    bias = torch.randn(1, 4, 5, 9, generator=seed)
    mask = {
        "none": None,
        "padding": padding(right=3, length=9).bool(),
        "few numbers": torch.randn(BATCH, 1, 1, 9, generator=seed),
        "numbers": torch.randn(BATCH, 1, 5, 9, generator=seed),
        "bools": torch.randn(BATCH, 1, 5, 9, generator=seed) > 0,
    }[kind]
    out, weights = attend(torch.nn.Module(), q, k, v, mask, is_causal=False, position_bias=bias)
    assert weights is None
    shown = mask[:, None, None] if kind == "padding" else mask
    if shown is not None:
        bias = bias + (shown if shown.is_floating_point() else torch.where(shown, 0.0, -torch.inf))
    torch.testing.assert_close(out.transpose(1, 2), multiattn.reference(q, k, v, bias=bias)[0])


@pytest.mark.parametrize("backend", multiattn.BACKENDS)
def test_each_backend_takes_padding(backend):
    """A packed batch, and one query over a cache with padding."""
    mask = padding(left=5, length=12)

    def generate(model):
        options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "output_logits": True}
        return model.generate(tokens(length=12), attention_mask=mask, return_dict_in_generate=True, **options).logits

    model = decoder("Qwen3", layers=1)
    check(model, generate, torch.bfloat16, f"multiattn_{backend}")


def test_what_is_not_had_is_refused():
    model = build(transformers.LlamaForCausalLM, small("Llama", attention_dropout=0.1))
    model.set_attn_implementation("multiattn")
    with pytest.raises(NotImplementedError, match="attention_dropout"):
        model.train()(tokens())
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model.eval()(tokens(), output_attentions=True)
    model.set_attn_implementation("multiattn_cuda")
    with pytest.raises(multiattn.Unsupported, match="cuda cannot run"):
        model(tokens())  # in fp32, of which it has no kernel
