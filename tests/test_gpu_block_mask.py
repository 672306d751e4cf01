"""Block masks on a GPU: graphs whose lists change at each step, lists of documents in a graph, no waiting."""

import pytest
import torch
from test_gpu_kvcache import captured, check_no_wait
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import multiattn
from multiattn import Plan, block_mask, document_mask
from multiattn.plan.backend import BACKENDS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
BLOCKS, SIZE = 8, 128
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def draw(length, batch=1):
    return [torch.randn(batch, heads, length, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]


def skip_refused(*tensors, **options):
    plan = multiattn.explain(*tensors, **options)
    if not isinstance(plan, Plan):
        pytest.skip("; ".join(map(str, plan)))


def visible_of(counts, indices):
    """The scores that lists show, read by the host: bool ``[1, H, S, S]``."""
    seen = torch.zeros(*indices.shape, dtype=torch.bool)
    for place, names in enumerate(indices.cpu().flatten(0, 2)):
        seen.flatten(0, 2)[place, names[: counts.flatten()[place]].long()] = True
    return seen.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3).cuda()


@pytest.mark.parametrize("has_gradient", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_the_lists_of_every_step(backend, has_gradient):
    """A router's choice, written to the lists a hundred times: what was captured reads them anew each time."""
    q, k, v = (it.requires_grad_(has_gradient) for it in draw(BLOCKS * SIZE))
    counts = torch.ones(1, 4, BLOCKS, device="cuda", dtype=torch.int32)
    indices = torch.zeros(1, 4, BLOCKS, BLOCKS, device="cuda", dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=SIZE, compute_q_blocks=False)
    skip_refused(q, k, v, block_mask=mask, backend=backend)

    def step(mask=mask, backend=backend):
        out = multiattn.fmha(q, k, v, block_mask=mask, backend=backend)
        return out, *(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)) if has_gradient else ())

    check_no_wait(step)
    graph, results = captured(step)
    for at in range(100):
        torch.manual_seed(at)
        counts.copy_(torch.randint(0, BLOCKS + 1, counts.shape))
        indices.copy_(torch.rand(indices.shape).argsort(-1))
        graph.replay()
        if at % 11 == 0:  # up to the last: a new mask, of the same lists, by the same kernels; and what the lists mean
            fresh = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=SIZE)
            torch.testing.assert_close(results[0], step(fresh)[0], rtol=0, atol=0)
        with torch.no_grad():
            expected, _ = multiattn.reference(q, k, v, bias=visible_of(counts.cpu(), indices))
        torch.testing.assert_close(results[0].float(), expected, atol=2e-2, rtol=2e-2)
    if has_gradient:
        torch.testing.assert_close(results[1:], step(fresh)[1:], atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_the_documents_of_every_step(backend):
    q, k, v = draw(1000)
    starts = torch.tensor([0, 400, 1000, 1000, 1000], device="cuda", dtype=torch.int32)

    def step():
        mask = document_mask(starts, total_q=1000, causal=True)
        return multiattn.fmha(q, k, v, block_mask=mask, backend=backend)

    skip_refused(q, k, v, block_mask=document_mask(starts, total_q=1000, causal=True), backend=backend)
    check_no_wait(step)
    graph, out = captured(step)
    for lengths in ((1000, 0, 0, 0), (1, 2, 3, 4), (300, 0, 500, 200), (250, 250, 250, 250)):
        starts.copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 1000, "max_seqlen_kv": 1000}
        rows = [it[0].transpose(0, 1) for it in (q, k, v)]
        expected = multiattn.fmha_varlen(*rows, **packed, causal=True, backend="reference")
        used = sum(lengths)
        torch.testing.assert_close(out[0].transpose(0, 1)[:used], expected[:used], atol=2e-2, rtol=2e-2)
        assert not out[0, :, used:].any()


def test_lists_are_those_of_create_block_mask_and_of_exact_masks_nothing_waits():
    documents = torch.randint(0, 9, (1000,), device="cuda").sort().values

    def window(b, h, q, kv):
        return (q >= kv) & (q - kv < 300)

    for mask_mod in (window, lambda b, h, q, kv: (documents[q] == documents[kv]) & (q >= kv)):
        found, expected = (
            block_mask(mask_mod, 1, 1, 1000, 1000, device="cuda"),
            create_block_mask(mask_mod, 1, 1, 1000, 1000),
        )
        for name in LISTS:
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
    check_no_wait(lambda: block_mask(window, 1, 1, 1000, 1000, device="cuda"))


@pytest.mark.parametrize("has_gradient", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_the_sequences_and_lists_of_every_step(backend, has_gradient):
    """Over the packed axis: where sequences begin changes, and what a router lists for blocks that they cut."""
    rows = BLOCKS * SIZE
    q, k, v = (it[0].transpose(0, 1).contiguous().requires_grad_(has_gradient) for it in draw(rows))
    starts = torch.tensor([0, 300, 301, rows], device="cuda", dtype=torch.int32)
    counts = torch.full((1, 4, BLOCKS), BLOCKS, device="cuda", dtype=torch.int32)
    indices = torch.arange(BLOCKS, device="cuda", dtype=torch.int32).expand(1, 4, BLOCKS, BLOCKS).contiguous()
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=SIZE, compute_q_blocks=False)
    asked = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": rows, "max_seqlen_kv": rows}
    asked |= {"block_mask": mask, "causal": True}
    skip_refused(q, k, v, backend=backend, **asked)

    def step(backend=backend):
        out = multiattn.fmha_varlen(q, k, v, backend=backend, **asked)
        return out, *(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)) if has_gradient else ())

    check_no_wait(step)
    graph, results = captured(step)
    for at in range(20):
        torch.manual_seed(at)
        starts[1:3].copy_(torch.randint(0, rows, (2,)).sort().values)
        counts.copy_(torch.randint(0, BLOCKS + 1, counts.shape))
        indices.copy_(torch.rand(indices.shape).argsort(-1))
        graph.replay()
        torch.testing.assert_close(results, step("reference"), atol=5e-2, rtol=5e-2)
