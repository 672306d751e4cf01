"""Block masks: tiles lie in one block, whatever the rule; who takes which blocks; what is skipped costs nothing."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch
from cuda_runs import on_cpu
from torch.nn.attention.flex_attention import create_block_mask

from multiattn.cuda.axes import TILED
from multiattn.cuda.cpu.host import CpuLauncher
from multiattn.cutile import launches
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Plan, get, make_plan, plan_variant
from multiattn.plan.config import Config
from multiattn.plan.support import Unsupported
from multiattn.problem import problem_of
from multiattn.triton import plain, plain_backward


def asked(block, head_dim=64, mask_mod=lambda b, h, q, kv: q >= kv):
    """Operands of a call with a mask of 256 queries and keys, and its problem."""
    q = torch.zeros(1, 1, 256, head_dim, dtype=torch.float16)
    mask = create_block_mask(mask_mod, None, None, 256, 256, device="cpu", BLOCK_SIZE=block)
    operands, options = with_score(Operands(q, q, q), Options(), None, None, None, None, mask)
    return operands, problem_of(operands, options)


def cut(plan: Plan) -> Config:
    """The config that its kernels run: two languages cut tiles where they make a launch."""
    if plan.backend == "cutile":
        return launches.within_blocks(plan.problem, plan.config)
    if plan.backend == "triton":
        within = plain.within_blocks if plan.direction == "forward" else plain_backward.within
        return within(plan.config, plan.problem)
    return plan.config


def tiles_of(config: Config) -> Iterator[tuple[str, int]]:
    """Rows and columns of the tiles of all kernels."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from tiles_of(value)
        elif field.name.endswith(("tile_m", "tile_n")):
            yield field.name[-1], value


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_are_cut_to_lie_in_one_block(backend, direction):
    """Blocks of 128 leave the tiles of every rule as they are."""
    seen = 0
    for head_dim in (64, 128, 256):
        for block in (128, (64, 128), (128, 32), 32):
            problem = asked(block, head_dim)[1]
            rows, keys = (block, block) if isinstance(block, int) else block
            for variant in get(backend).op(direction).variants:
                for arch in ("sm80", "sm90", "sm120") if variant.capability.block_masks else ():
                    plan = plan_variant(get(backend), variant, problem, ARCHS[arch], direction=direction)
                    if not isinstance(plan, Plan):
                        continue
                    seen += 1
                    assert all((rows if side == "m" else keys) % size == 0 for side, size in tiles_of(cut(plan)))
                    if block == 128 and variant in get(backend).op(direction).offered:
                        assert cut(plan) in [rule.config for rule in variant.rules]
    assert seen > 20


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
        make_plan(get("cuda"), asked(block)[1], ARCHS["sm80"], variant=variant, probe=False)


@on_cpu
def test_blocks_that_are_not_listed_cost_nothing():
    """The diagonal of blocks of 64 x 64 is listed: a quarter of the products, by their reads of shared memory."""
    reads = []
    for mask_mod in (lambda b, h, q, kv: q // 64 == kv // 64, lambda b, h, q, kv: q >= 0):
        operands, problem = asked(64, mask_mod=mask_mod)
        launcher = CpuLauncher(make_plan(get("cuda"), problem, ARCHS["cpu"]))
        launcher(operands._replace(out=torch.empty_like(operands.q), lse=torch.empty(1, 1, 256)))
        reads.append(next(iter(launcher.counts.values())).ldmatrix)
    assert reads[1] == 4 * reads[0] > 0
