"""Layers of Gemma 4: local ones with heads of 256 and a window, global ones with heads of 512, 16 of which share a key.

The tokens of an image see one another in local layers, the tokens behind them too. transformers says so in its masks,
which these kernels read. Weights are random, and all that attention does not see is narrow.
"""

import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig

from multiattn.integrations.transformers import register

register()

device = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, WINDOW, IMAGE = (4096, 1024, 300) if device == "cuda" else (128, 48, 30)
VOCABULARY = 500
text = Gemma4TextConfig(
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
    sliding_window=WINDOW,
    num_global_key_value_heads=1,
    global_head_dim=512,
    attention_k_eq_v=True,  # global layers make keys and values by one projection
    use_bidirectional_attention="vision",
    hidden_size=64,
    intermediate_size=128,
    hidden_size_per_layer_input=0,
    vocab_size=VOCABULARY,
)
torch.manual_seed(0)
config = Gemma4Config(text_config=text, vision_config=None, audio_config=None)
model = Gemma4ForConditionalGeneration(config).to(device, torch.bfloat16)
layers = model.model.language_model.layers
for index, layer in enumerate(layers):
    its, heads = layer.self_attn, text.num_attention_heads
    its.q_norm.weight.data.fill_(its.head_dim**-0.5)  # as training would: scores have no other scale
    groups, reach = heads // its.num_key_value_groups, its.sliding_window or "none"
    print(f"layer {index}: {heads} heads on {groups}, D={its.head_dim}, window {reach}")

# A prompt that begins with an image. There is no encoder of images here: its tokens have embeddings like the others.
tokens = torch.randint(3, VOCABULARY, (1, TOKENS), device=device)
kinds = (torch.arange(TOKENS, device=device) < IMAGE).long()[None]


def step(implementation: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradient of the global layer's keys: of training with one attention, in one dtype."""
    model.to(dtype).set_attn_implementation(implementation)
    model.zero_grad()
    found = model(tokens, mm_token_type_ids=kinds, labels=tokens)
    found.loss.backward()
    return found.logits.detach(), layers[-1].self_attn.k_proj.weight.grad.clone()


# Eager attention in fp32 is the truth. Eager attention in bfloat16 tells how far from it roundings may be.
truths, naives, results = step("eager", torch.float32), step("eager", torch.bfloat16), step("multiattn", torch.bfloat16)
for name, truth, naive, result in zip(("logits", "gradient of keys"), truths, naives, results, strict=True):
    error, allowed = ((it - truth).norm() / truth.norm() for it in (result, naive))
    print(f"{name}: {error:.1e} from fp32, eager attention {allowed:.1e}")
    assert error <= 2 * allowed

# A token of the image sees those behind it. A token of text does not.
changed = tokens.clone()
changed[0, IMAGE - 1] += 1
for name, its_kinds in (("image", kinds), ("text", torch.zeros_like(kinds))):
    with torch.no_grad():
        before, after = (model(it, mm_token_type_ids=its_kinds).logits[0, 0] for it in (tokens, changed))
    print(f"the first token, of {name}, {'sees' if (before != after).any() else 'does not see'} token {IMAGE - 1}")
    assert bool((before != after).any()) == (name == "image")
