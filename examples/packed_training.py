"""Training on sequences of different lengths without padding: one row of tokens, and where each sequence begins.

`fmha_varlen` gives each sequence attention to itself alone. Its lengths stay on the device, so no step waits for it.
"""

import torch
import torch.nn.functional as F

import multiattn

HEADS, HEAD_DIM, VOCABULARY = 4, 32, 64
WIDTH = HEADS * HEAD_DIM


class Block(torch.nn.Module):
    """Attention and a projection, over packed tokens ``[T, WIDTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
        """The same shape; `longest` is the length of no shorter a sequence than there is."""
        q, k, v = self.qkv(x).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
        out = multiattn.fmha_varlen(q, k, v, **lengths, max_seqlen_q=longest, max_seqlen_kv=longest, causal=True)
        return x + self.out(out.flatten(1))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
model = torch.nn.ModuleList([embedding, Block(), Block()]).to(device, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# Each sequence repeats what it began with: to tell the next token is to look back.
sequences = [torch.randint(VOCABULARY, (6,)).repeat(times) for times in (2, 5, 3, 8)]
tokens = torch.cat(sequences).to(device)
lengths = torch.tensor([len(it) for it in sequences])
cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)

targets = tokens.roll(-1)
targets[cu_seqlens[1:].long() - 1] = -100  # the last token of a sequence predicts nothing
first = None
for _ in range(30):
    x = embedding(tokens)
    for block in list(model)[1:]:
        x = block(x, cu_seqlens, int(lengths.max()))
    loss = F.cross_entropy((x @ embedding.weight.T).float() / WIDTH**0.5, targets, ignore_index=-100)
    first = first or loss.item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {first:.2f} -> {loss.item():.2f}")
assert loss.item() < 0.5 * first
