"""Multi-head latent attention (MLA) as DeepSeek has it: trained with keys and values of each head, decoded without.

A token leaves a latent of 512 numbers, and 64 columns of a key that know its place. Training makes keys and values of
each head from the latent: q and k are 128 + 64 wide, v 128. Decoding has those matrices in queries and results instead.
Then the rows of the cache, 512 + 64 wide, are the keys of all heads, and their first 512 columns are the values.
"""

import torch

import multiattn
from multiattn.truth.tolerance import derive_budget, deviate, probe_rounding

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, NOPE, ROPE, VALUE, LATENT = 4, 128, 64, 128, 512
WIDTH, BATCH, TOKENS, PROMPT, PAGE = 256, 2, 40, 33, 16
SCALE = (NOPE + ROPE) ** -0.5
Tensors = tuple[torch.Tensor, ...]


def weight(*shape: int) -> torch.Tensor:
    """A random weight, which keeps the size of what it multiplies."""
    drawn = torch.randn(*shape, device=device, dtype=torch.bfloat16)
    return (drawn * shape[-2] ** -0.5).requires_grad_()


weights = (
    *(weight(WIDTH, HEADS * (NOPE + ROPE)), weight(WIDTH, LATENT), weight(WIDTH, ROPE)),
    *(weight(HEADS, LATENT, NOPE), weight(HEADS, LATENT, VALUE)),  # from a latent to keys and values of each head
)


def placed(x: torch.Tensor) -> torch.Tensor:
    """Rows ``[..., S, ROPE]``, turned by the places of their tokens."""
    angles = torch.arange(x.shape[-2], device=device)[:, None] * 10_000.0 ** -torch.arange(
        0, 1, 2 / ROPE, device=device
    )
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)


def projected(x: torch.Tensor, weights: Tensors) -> Tensors:
    """Both parts of the queries of each head, the latents, and the columns of keys that know places."""
    to_q, to_latent, to_places = weights[:3]
    q = (x @ to_q).unflatten(-1, (HEADS, NOPE + ROPE)).transpose(1, 2)
    return q[..., :NOPE], placed(q[..., NOPE:]), x @ to_latent, placed(x @ to_places)


def expanded(x: torch.Tensor, weights: Tensors) -> Tensors:
    """q and k ``[B, H, S, 192]`` and v ``[B, H, S, 128]``."""
    q, q_placed, latent, k_placed = projected(x, weights)
    k, v = (latent[:, None] @ it for it in weights[3:])
    k_placed = k_placed[:, None].expand(-1, HEADS, -1, -1)
    return torch.cat((q, q_placed), dim=-1), torch.cat((k, k_placed), dim=-1), v


def absorbed(x: torch.Tensor, weights: Tensors) -> Tensors:
    """q ``[B, H, S, 576]``, and rows of the cache ``[B, 1, S, 576]``."""
    q, q_placed, latent, k_placed = projected(x, weights)
    of_latents = q @ weights[3].transpose(-2, -1)
    return torch.cat((of_latents, q_placed), dim=-1), torch.cat((latent, k_placed), dim=-1)[:, None]


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in plain PyTorch, in the dtype of its inputs."""
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).triu(1)
    return (q @ k.mT * SCALE).masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v


# Training: attention whose values are narrower than its keys.
x = torch.randn(BATCH, TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
goal = torch.randn(BATCH, HEADS, TOKENS, VALUE, device=device, dtype=torch.bfloat16)
optimizer = torch.optim.Adam(weights, lr=1e-3)
for step in range(4):
    out = multiattn.fmha(*expanded(x, weights), causal=True, scale=SCALE)
    loss = (out - goal).square().mean()
    print(f"step {step}: loss {loss.item():.3f}")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
weights = tuple(it.detach() for it in weights)
trained = multiattn.fmha(*expanded(x, weights), causal=True, scale=SCALE)

# Decoding: a prompt at once, then token by token. Keys and values are views of the same pages.
q, rows = absorbed(x, weights)
pages_each = -(-TOKENS // PAGE)
pages = torch.zeros(BATCH * pages_each, 1, PAGE, LATENT + ROPE, device=device, dtype=torch.bfloat16)
page_table = torch.randperm(BATCH * pages_each, device=device).view(BATCH, pages_each).int()
found = []
for first, last in [(0, PROMPT), *((token, token + 1) for token in range(PROMPT, TOKENS))]:
    places = torch.arange(first, last, device=device)
    pages[page_table[:, places // PAGE].long(), 0, places % PAGE] = rows[:, 0, first:last]
    lengths = torch.full((BATCH,), last, device=device, dtype=torch.int32)
    found.append(
        multiattn.fmha_kvcache(
            q[:, :, first:last], pages, pages[..., :LATENT],
            seqlens_kv=lengths, page_table=page_table, causal=True, scale=SCALE,
        )
    )  # fmt: skip
decoded = torch.cat(found, dim=2) @ weights[4]

# Each may be twice as far from the truth as plain PyTorch that computes the same in bfloat16.
truth = eager(*expanded(x.double(), tuple(it.double() for it in weights)))
naives = eager(*expanded(x, weights)), eager(q, rows, rows[..., :LATENT]) @ weights[4]
atol = probe_rounding(truth, torch.bfloat16)
budgets = [derive_budget((naive,), truth, atol=atol) for naive in naives]
for name, result, budget in zip(("trained", "decoded"), (trained, decoded), budgets, strict=True):
    error = deviate(result, truth)
    print(f"{name}: {error.max:.1e} from the truth at most, allowed {budget.max:.1e}")
    assert error.max <= budget.max
    assert error.rms <= budget.rms
apart, allowed = deviate(decoded, trained).max, sum(budget.max for budget in budgets)
print(f"decoded beside trained: {apart:.1e} apart at most, allowed {allowed:.1e}")
assert apart <= allowed
elements = HEADS * (NOPE + ROPE + VALUE)
print(f"elements of a token in the cache: {LATENT + ROPE}, of keys and values of each head {elements}")
