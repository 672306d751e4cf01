"""A transformers model whose attention these kernels run: nothing but its `attn_implementation` changes.

On a GPU "multiattn" takes the fastest backend of each call, and "multiattn_cuda" or another always that one. On the CPU
it is the reference, for trying things out: this example runs anywhere, with random weights.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from multiattn.integrations.transformers import register

register()

device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=1000,
    attn_implementation="multiattn",  # as in AutoModelForCausalLM.from_pretrained(..., attn_implementation="multiattn")
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).to(device, torch.bfloat16)

# Two prompts of different lengths, padded on the left as tokenizers do for generation.
prompts = torch.randint(3, 1000, (2, 20), device=device)
mask = torch.ones_like(prompts)
mask[0, :8] = 0
print("tokens", model.generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)[:, 20:])

# A step of training: the backward is a kernel too.
loss = model.train()(prompts, labels=prompts).loss
loss.backward()
print(f"loss {loss.item():.3f}")

# Two documents in one row, without padding, told apart by positions that start again.
row = prompts.reshape(1, -1)
positions = torch.arange(20, device=device).repeat(2)[None]
packed = model.eval()(row, position_ids=positions, use_cache=False).logits

# Eager attention is another implementation of the same.
model.set_attn_implementation("eager")
eager = model(row, position_ids=positions, use_cache=False).logits
error = (packed - eager).float().norm() / eager.float().norm()
print(f"beside eager attention: {error:.1e} of the logits")
assert error < 0.02  # a few roundings of bfloat16
