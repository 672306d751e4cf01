"""Block masks in Triton beyond what parity runs: tiles that blocks cut, lists as they come, what is compiled."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from multiattn import fmha, fmha_backward, reference
from multiattn.inspect.facts import read_plan
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import by_name
from multiattn.plan.backend import make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import problem_of
from multiattn.triton import BACKEND
from multiattn.triton.plain import tiles, within_blocks
from multiattn.triton.plain_backward import passes, within

DOCUMENTS = (torch.arange(512) // 70).int()
PREFIXES = torch.tensor([[50, 3], [0, 130]])
SEQ_Q, SEQ_KV = 150, 180


def documents(b, h, q, kv):
    return DOCUMENTS[q] == DOCUMENTS[kv]


def causal(b, h, q, kv):
    return q >= kv


def prefix_lm(b, h, q, kv):
    return (kv < PREFIXES[b, h]) | (q >= kv)


def every_other(b, h, q, kv):
    """Rows that see nothing in every block, and two blocks that nobody sees."""
    return ((q // 24) % 2 == 0) & (kv < 64)


def nothing(b, h, q, kv):
    return q < 0


def tensors(*, head_dim=24, seq_q=SEQ_Q, seq_kv=SEQ_KV):
    generator = torch.Generator().manual_seed(seq_q)
    shapes = (2, 2, seq_q, head_dim), (2, 1, seq_kv, head_dim), (2, 1, seq_kv, head_dim)
    return [torch.randn(shape, generator=generator).half() for shape in shapes]


def block_mask(mask_mod, size=64, *, batch=None, heads=None, seq_q=SEQ_Q, seq_kv=SEQ_KV):
    return create_block_mask(mask_mod, batch, heads, seq_q, seq_kv, device="cpu", BLOCK_SIZE=size)


def check(given, *, options, **ours):
    """Out, lse and gradients of it as of the reference."""
    results = []
    for run in (
        lambda *qkv: fmha(*qkv, backend="triton", return_lse=True, **options, **ours),
        lambda *qkv: reference(*qkv, **options),
    ):
        leaves = [it.clone().requires_grad_() for it in given]
        out, lse = run(*leaves)
        seen = torch.where(lse == -torch.inf, 0.0, lse)
        gradients = torch.autograd.grad(out.float().square().sum() + seen.sum(), leaves)
        results.append((out.detach(), lse.detach(), *gradients))
    for got, true in zip(*results, strict=True):
        torch.testing.assert_close(got, true.to(got.dtype), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("mask_mod", "size", "options"),
    [
        (documents, (128, 64), {"softcap": 5.0}),
        (documents, (32, 16), {"causal": True}),
        (causal, 32, {"scale": -0.2}),
        (causal, (64, 128), {"window": (90, 40)}),
        (prefix_lm, 96, {}),
        (every_other, 32, {"sinks": torch.linspace(-1, 1, 2)}),
        (nothing, 128, {}),
    ],
    ids=lambda it: getattr(it, "__name__", str(it).replace(" ", "")[:12]),
)
def test_masks(mask_mod, size, options):
    shape = {"batch": 2, "heads": 2} if mask_mod is prefix_lm else {}
    check(tensors(), options={"block_mask": block_mask(mask_mod, size, **shape), **options})


def test_full_blocks_end_where_the_keys_do():
    """Nothing is partial, and the last block has more keys and queries than there are."""
    counts, indices = torch.full((1, 1, 3), 3), torch.arange(3).expand(1, 1, 3, 3)
    mask = BlockMask.from_kv_blocks(torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=64)
    check(tensors(), options={"block_mask": mask})


@pytest.mark.parametrize("variant", [it.name for it in BACKEND.backward.variants if it.capability.block_masks])
def test_a_key_beyond_the_end_has_no_weight(variant):
    """Its score of 0 would be far above all others, and its weight infinite."""
    q, k, v = tensors(seq_q=64, seq_kv=70)
    mask = block_mask(lambda b, h, q, kv: kv >= 0, 64, seq_q=64, seq_kv=70)
    given, options = (q.abs() + 4, -k.abs() - 4, v), {"block_mask": mask}
    out, lse = reference(*given, **options)
    gradients = fmha_backward(
        *given, out.half(), lse, v[:, :, :64].repeat(1, 2, 1, 1), backend="triton", variant=variant, **options
    )
    assert lse.max() < -89  # which exp(-lse) exceeds fp32 of
    assert all(it.isfinite().all() for it in gradients)


def test_entries_behind_a_count_are_not_looked_at():
    """The interpreter refuses addresses beyond tensors."""
    mask = block_mask(causal, 64, batch=2)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
        indices[torch.arange(indices.shape[-1]) >= counts[..., None]] = 1 << 20
    given = tensors()
    with_garbage = fmha(*given, block_mask=mask, backend="triton")
    assert torch.equal(with_garbage, fmha(*given, block_mask=block_mask(causal, 64, batch=2), backend="triton"))


@pytest.mark.parametrize("variant", [it.name for it in BACKEND.forward.variants if it.capability.block_masks])
def test_every_forward(variant):
    given, options = tensors(), {"block_mask": block_mask(documents, 32), "softcap": 3.0}
    out = fmha(*given, backend="triton", variant=variant, **options)
    torch.testing.assert_close(out, reference(*given, **options)[0].half(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("variant", [it.name for it in BACKEND.backward.variants if it.capability.block_masks])
@pytest.mark.parametrize("mask_mod", [documents, every_other])
def test_every_backward(variant, mask_mod):
    given, options = tensors(), {"block_mask": block_mask(mask_mod, (64, 32))}
    leaves = [it.clone().requires_grad_() for it in given]
    out, lse = reference(*leaves, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
    true = torch.autograd.grad(out, leaves, dout.float())
    saved = out.detach().half(), lse.detach(), dout
    for got, wanted in zip(
        fmha_backward(*given, *saved, backend="triton", variant=variant, **options), true, strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


def test_tiles_divide_blocks_and_stay_as_they_are_without():
    q = torch.empty(1, 1, 256, 64, dtype=torch.float16)
    config = passes(tiles(128, 64, 4, 2), tiles(64, 256, 8, 3))
    problem = make_problem(q, None)
    assert within(config, problem) == config
    problem = make_problem(q, block_mask(causal, (48, 128), seq_q=256, seq_kv=256))
    got = within(config, problem)
    assert got == passes(tiles(16, 64, 4, 2), tiles(16, 128, 8, 3))
    assert within_blocks(tiles(128, 256, 4, 2), problem) == tiles(16, 128, 4, 2)


def make_problem(q, mask):
    return problem_of(*with_score(Operands(q, q, q), Options(), None, None, None, None, mask))


# ---------------------------------------------------------------- compiled


@pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))
@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")
@pytest.mark.parametrize(
    ("direction", "variant", "head_dim"),
    [
        ("forward", "full", 128),
        pytest.param("backward", "two_pass", 64, marks=pytest.mark.nightly),
        pytest.param("forward", "full", 64, marks=pytest.mark.nightly),
        pytest.param("backward", "two_pass", 128, marks=pytest.mark.nightly),
    ],
)
def test_as_many_tiles_are_in_flight_as_without_a_mask(direction, variant, head_dim):
    """Loads from lists and documents go through no shared memory, and no wgmma waits for another."""
    q = torch.empty(1, 8, 256, head_dim, dtype=torch.bfloat16)
    smem = []
    for mask in (None, block_mask(documents, 128, seq_q=256, seq_kv=256)):
        problem = make_problem(q, mask)
        plan = make_plan(BACKEND, problem, by_name("sm90"), direction=direction, variant=variant, probe=False)
        facts = read_plan(plan)
        smem.append([it.smem_bytes for it in facts])
    assert smem[0] == smem[1]
    for it in facts:
        assert it.hot_spills <= 2
        assert 0 < it.hot["WARPGROUP"] < it.hot["HGMMA"]
