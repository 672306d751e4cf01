"""FlexAttention's block masks in CUDA: how tiles are cut, what is skipped, what a launch hands over."""

from dataclasses import replace

import pytest
import torch
from cuda_runs import on_cpu
from torch.nn.attention.flex_attention import create_block_mask

from multiattn.block_mask import LISTS
from multiattn.cuda import BACKEND
from multiattn.cuda.axes import SPLIT_Q, TILED
from multiattn.cuda.backward_mma import BackwardConfig, QueryConfig
from multiattn.cuda.cpu.host import CpuLauncher
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


def everything(b, h, q, kv):
    return q >= 0


def made(mask_mod, size, *, seq_q=SEQ_Q, seq_kv=SEQ_KV, batch=None, heads=None):
    return create_block_mask(mask_mod, batch, heads, seq_q, seq_kv, device="cpu", BLOCK_SIZE=size)


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
    """Blocks of 128 stay whole, whatever the GPU."""
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
