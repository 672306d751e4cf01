"""Generation with a cache in pages: prompts of different lengths in one call, then one token of each sequence a step.

`fmha_kvcache` reads lengths and the page table on the device. So on a GPU one CUDA graph serves every step of every
sequence; on the CPU the same steps run one by one.
"""

from typing import Any

import torch

import multiattn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, PAGE, STEPS = 256, 8, 2, 32, 16, 24
PROMPTS = (5, 40, 17)
WIDTH, BATCH = HEADS * HEAD_DIM, len(PROMPTS)


def weight(*shape: int) -> torch.Tensor:
    """A random weight, which keeps the size of what it multiplies."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[0] ** -0.5


def ints(*numbers: int) -> torch.Tensor:
    """Lengths and places, as `fmha_kvcache` takes them."""
    return torch.tensor(numbers, device=device, dtype=torch.int32)


# A model of one layer: no positions but those of the causal mask, and weights that nobody trained.
embedding, to_q, to_out = weight(VOCABULARY, WIDTH), weight(WIDTH, WIDTH), weight(WIDTH, VOCABULARY)
embedding = embedding * VOCABULARY**0.5
to_kv = weight(WIDTH, 2 * KV_HEADS * HEAD_DIM)

# The pages of all sequences, in any order. Keys and values are views of one tensor; its layout is free.
pages_each = -(-(max(PROMPTS) + STEPS) // PAGE)
pages = torch.zeros(BATCH * pages_each, 2, PAGE, KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
k_cache, v_cache = (it.transpose(1, 2) for it in pages.unbind(1))  # [pages, Hkv, page, D]
page_table = torch.randperm(BATCH * pages_each, device=device).view(BATCH, pages_each).int()


def forward(tokens: torch.Tensor, sequence: torch.Tensor, place: torch.Tensor, **where: Any) -> torch.Tensor:
    """Logits of tokens, whose keys and values go to their places in the cache."""
    x = embedding[tokens]
    kv = (x @ to_kv).unflatten(-1, (2, KV_HEADS, HEAD_DIM))
    pages[page_table[sequence, place // PAGE].long(), :, (place % PAGE).long()] = kv
    q = (x @ to_q).unflatten(-1, (HEADS, HEAD_DIM))
    out = multiattn.fmha_kvcache(q, k_cache, v_cache, page_table=page_table, causal=True, **where)
    return (x + out.flatten(1)) @ to_out


# The prompts, packed: each token has a sequence and a place.
prompts = torch.randint(VOCABULARY, (sum(PROMPTS),), device=device)
lengths, starts = ints(*PROMPTS), torch.nn.functional.pad(ints(*PROMPTS).cumsum(0).int(), (1, 0))
sequence = torch.arange(BATCH, device=device).repeat_interleave(lengths)
place = torch.arange(len(prompts), device=device) - starts[sequence]
logits = forward(prompts, sequence, place, seqlens_kv=lengths, cu_seqlens_q=starts, max_seqlen_q=max(PROMPTS))
tokens = logits[starts[1:] - 1].argmax(-1)

# All that changes from step to step is in tensors, which a graph reads where they are.
each, one_each = torch.arange(BATCH, device=device), ints(*range(BATCH + 1))
logits = logits[:BATCH].clone()


def step() -> None:
    """Put the last tokens into the cache, attend, and choose the next ones."""
    last = lengths.clone()
    lengths.add_(1)
    logits.copy_(forward(tokens, each, last, seqlens_kv=lengths, cu_seqlens_q=one_each, max_seqlen_q=1))
    tokens.copy_(logits.argmax(-1))


chosen = [tokens.clone()]
step()  # compiles
chosen.append(tokens.clone())
run = step
if device == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records, and runs nothing
        step()
    run = graph.replay
for _ in range(STEPS - 2):
    run()
    chosen.append(tokens.clone())
generated = torch.stack(chosen, dim=1)
print(f"lengths {lengths.tolist()}, {'one graph' if device == 'cuda' else 'step by step'}, pages of {PAGE}")
print("tokens", generated.tolist())

# Without a cache, all tokens of a sequence are attended to at once.
for index, prompt in enumerate(prompts.split(PROMPTS)):
    x = embedding[torch.cat((prompt, generated[index, :-1]))]
    q = (x @ to_q).unflatten(-1, (HEADS, HEAD_DIM))
    k, v = (x @ to_kv).unflatten(-1, (2, KV_HEADS, HEAD_DIM)).unbind(1)
    out = multiattn.fmha(*(it.transpose(0, 1)[None] for it in (q, k, v)), causal=True)
    whole = (x + out[0].transpose(0, 1).flatten(1)) @ to_out
    torch.testing.assert_close(logits[index], whole[-1], atol=0.05, rtol=0.05)
