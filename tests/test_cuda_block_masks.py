"""FlexAttention's block masks in CUDA: against the reference, forward and backward, and what a launch hands over."""

from dataclasses import replace

import pytest
import torch
from cuda_runs import on_cpu
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from multiattn import fmha, reference
from multiattn.block_mask import LISTS
from multiattn.cuda import BACKEND
from multiattn.cuda.axes import SPLIT_Q, TILED
from multiattn.cuda.backward_mma import BackwardConfig, QueryConfig
from multiattn.cuda.cpu.host import CpuLauncher
from multiattn.cuda.forward_mma import CudaConfig
from multiattn.cuda.instances import kernels_of
from multiattn.cuda.params import argument_of
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import CPU, by_name
from multiattn.plan.backend import make_plan, variant_of
from multiattn.plan.support import Unsupported
from multiattn.problem import problem_of

BATCH, HEADS, SEQ_Q, SEQ_KV = 2, 4, 150, 200
DOCUMENTS = torch.tensor([0] * 60 + [1] * 20 + [2] * 70 + [3] * 50).int()


def tensors(*, batch=BATCH, heads=HEADS, heads_kv=2, seq_q=SEQ_Q, seq_kv=SEQ_KV, head_dim=32):
    generator = torch.Generator().manual_seed(seq_q)
    shapes = ((batch, heads, seq_q, head_dim), *((batch, heads_kv, seq_kv, head_dim),) * 2)
    return [torch.randn(shape, generator=generator).half() for shape in shapes]


def document(b, h, q, kv):
    return DOCUMENTS[q] == DOCUMENTS[kv]


def causal(b, h, q, kv):
    return q >= kv


def prefix(b, h, q, kv):
    return (kv < 70) | (q >= kv)


def with_empty_rows(b, h, q, kv):
    return (q % 3 != 0) & (kv < q) & (q < 120)


def by_head(b, h, q, kv):
    return (q - kv).abs() < 20 + 30 * h + 40 * b


def everything(b, h, q, kv):
    return q >= 0


def made(mask_mod, size, *, seq_q=SEQ_Q, seq_kv=SEQ_KV, batch=None, heads=None):
    return create_block_mask(mask_mod, batch, heads, seq_q, seq_kv, device="cpu", BLOCK_SIZE=size)


def check(block_mask, inputs, **options):
    """out, lse and the gradients of q, k and v, within the roundings of fp16."""
    results = []
    deterministic = options.pop("deterministic", False)
    for backend, own in (("cuda", {"deterministic": deterministic}), ("reference", {})):
        given = [it.clone().requires_grad_() for it in inputs]
        out, lse = fmha(*given, block_mask=block_mask, return_lse=True, backend=backend, **options, **own)
        seen = lse.masked_fill(lse == -torch.inf, 0.0)
        results.append((out, lse, *torch.autograd.grad(out.float().square().sum() + seen.sum(), given)))
    for got, true in zip(*results, strict=True):
        torch.testing.assert_close(got, true, rtol=0.01, atol=0.01)


CASES = {
    "document": (document, 64, {}, {}),
    "causal, one block wider than tiles": (causal, 128, {}, {"deterministic": True}),
    "prefix, the smallest blocks": (prefix, 32, {}, {}),
    "rows without a key": (with_empty_rows, (64, 32), {}, {"deterministic": True}),
    "by batch entry and head": (by_head, (32, 96), {"batch": BATCH, "heads": HEADS}, {}),
    "full blocks that are ragged": (everything, 64, {}, {"deterministic": True}),
    "a mask that is longer": (causal, 64, {"seq_q": 300, "seq_kv": 400}, {}),
    "a softcap and a window": (document, 64, {}, {"softcap": 2.0, "window": (120, None)}),
}


@on_cpu
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_the_reference_makes_of_it(name):
    mask_mod, size, shape, options = CASES[name]
    check(made(mask_mod, size, **shape), tensors(), **options)


@on_cpu
def test_a_block_mask_is_its_lists():
    """A full block is seen whole, whatever mask_mod says; entries past a count mean nothing; no block may be full."""
    counts, indices = torch.zeros(1, 1, 3).int(), torch.full((1, 1, 3, 4), 2).int()
    full_counts, full_indices = counts.clone(), indices.clone()
    counts[..., 0], indices[..., 0, 0] = 1, 3
    counts[..., 1], indices[..., 1, :2] = 2, torch.tensor([1, 0])
    full_counts[..., 1], full_indices[..., 1, 0] = 1, 3
    lists = counts, indices, full_counts, full_indices
    for given in (lists, lists[:2]):
        mask = BlockMask.from_kv_blocks(*given, BLOCK_SIZE=64, mask_mod=lambda b, h, q, kv: kv % 2 == 1)
        check(mask, tensors(), sinks=torch.zeros(HEADS))


def planned(config, *, direction="forward", block=128, mask_mod=causal, arch=CPU, variant=None, **shape):
    """Operands and a Plan of a call with a block mask."""
    q, k, v = tensors(**shape)
    mask = made(mask_mod, block, seq_q=q.shape[2], seq_kv=k.shape[2])
    operands, options = with_score(Operands(q, k, v), Options(), None, None, None, None, mask)
    problem = problem_of(operands, options)
    return operands, make_plan(
        BACKEND, problem, arch, direction=direction, variant=variant, config=config, probe=arch.name == "cpu"
    )


@on_cpu
@pytest.mark.parametrize(
    ("variant", "config", "head_dim"),
    [
        (SPLIT_Q.name, CudaConfig(tile_m=64, tile_n=16, warps=2, stages=3, q_in_registers=True), 24),
        (SPLIT_Q.name, CudaConfig(tile_m=32, tile_n=32, warps=2, stages=1), 24),
        (TILED.name, CudaConfig(tile_m=32, tile_n=64, warps=4, column_warps=2, stages=2, q_streamed=True), 264),
    ],
)
def test_other_tiles(variant, config, head_dim):
    operands, plan = planned(config, variant=variant, block=64, batch=1, heads=1, heads_kv=1, head_dim=head_dim)
    q, k, v = operands.qkv
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan)
    CpuLauncher(plan)(operands._replace(out=out, lse=lse))
    modified = {"score_mod": lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf)}
    true, true_lse = reference(q, k, v, **modified)
    torch.testing.assert_close((out, lse), (true.half(), true_lse), rtol=0.01, atol=0.01)


@on_cpu
def test_blocks_that_are_not_listed_cost_nothing():
    """The diagonal of blocks of 64 x 64 is listed: a quarter of the products, by their reads of shared memory."""
    shape = {"batch": 1, "heads": 1, "heads_kv": 1, "seq_q": 256, "seq_kv": 256}
    reads = []
    for mask_mod in (lambda b, h, q, kv: q // 64 == kv // 64, everything):
        operands, plan = planned(None, mask_mod=mask_mod, block=64, **shape)
        launcher = CpuLauncher(plan)
        launcher(operands._replace(out=torch.empty_like(operands.q), lse=torch.empty(1, 1, 256)))
        reads.append(next(iter(launcher.counts.values())).ldmatrix)
    assert reads[1] == 4 * reads[0] > 0


def test_tiles_are_cut_to_lie_in_one_block():
    """Those of 128 stay whole, whatever the GPU."""
    for name in ("sm80", "sm90", "sm120"):
        for head_dim in (64, 128, 256):
            _, plan = planned(None, arch=by_name(name), head_dim=head_dim, variant=SPLIT_Q.name)
            assert plan.config in {rule.config for rule in variant_of(plan).rules}
            for variant in ("atomic", "two_pass"):
                _, plan = planned(None, arch=by_name(name), head_dim=head_dim, direction="backward", variant=variant)
                assert plan.config in {rule.config for rule in variant_of(plan).rules}
    _, plan = planned(None, arch=by_name("sm90"), head_dim=512)
    assert (plan.config.tile_n, plan.config.column_warps) == (128, 4)
    _, plan = planned(None, arch=by_name("sm90"), block=32, direction="backward", variant="two_pass")
    smallest = QueryConfig(tile_m=32, tile_n=32, warps=2, stages=2)
    assert plan.config == BackwardConfig(tile_m=32, tile_n=32, warps=4, stages=2, dq=smallest)


@pytest.mark.parametrize(
    ("block", "variant", "allowed"),
    [
        (48, None, "blocks of multiples of 32"),
        (32, TILED.name, "blocks of multiples of 64"),
        (128, "split_q", "none"),
    ],
)
def test_who_takes_which_blocks(block, variant, allowed):
    with pytest.raises(Unsupported, match=f"block_mask: got blocks of {block} x {block}; allowed .*{allowed}"):
        planned(None, arch=by_name("sm80"), block=block, variant=variant)


def test_a_launch_hands_over_the_lists():
    """Each pointer by the name of its operand; none of full blocks where no list names any."""
    _, plan = planned(None, mask_mod=document, direction="backward")
    names = list(argument_of(kernels_of(plan)[1], plan).pointers.values())
    assert [it for it in names if it in ("captured0", *LISTS)] == ["captured0", *LISTS]
    assert kernels_of(plan)[1].name.endswith("_blocks128x128_full")
    few = replace(plan.problem, blocks=plan.problem.blocks._replace(has_full=False), lists=plan.problem.lists[:4])
    plan = replace(plan, problem=few)
    names = list(argument_of(kernels_of(plan)[1], plan).pointers.values())
    assert [it for it in names if it in ("captured0", *LISTS)] == ["captured0", *LISTS[:2], *LISTS[4:6]]
