"""All languages alike: plans, sweeps, workspaces, configs, blocks of a mask, and what lies beyond the ends."""

import functools
import itertools
from dataclasses import fields, is_dataclass

import gradient_checks
import pytest
import torch
from cuda_runs import on_cpu
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import multiattn
from multiattn import Problem, fmha, fmha_backward, fmha_varlen, reference, reference_backward
from multiattn.cuda.axes import TILED
from multiattn.cuda.cpu.host import CpuLauncher
from multiattn.cutile import launches
from multiattn.operands import Operands, Options, with_score
from multiattn.plan.arch import ARCHS, GPU_ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Plan, get, make_plan, plan_variant
from multiattn.plan.support import Unsupported
from multiattn.triton import GLUON_VARIANTS, plain, plain_backward
from multiattn.triton.gluon_two_pass import VARIANT as TWO_PASS

LANGUAGES = ("triton", "cutile")
IN_ANY_ORDER = {"triton": ("warp_specialized", "atomic"), "cutile": ("atomic",), "cuda": ("wgmma", "atomic")}
"""The backwards that add in any order, and so give other bits each time."""
each_direction = pytest.mark.parametrize("direction", DIRECTIONS)
each_language = pytest.mark.parametrize("language", LANGUAGES)


def problem_of(**options):
    return Problem.contiguous(**{"batch": 1, "heads_q": 8, "seq_q": 4096, "head_dim": 64, **options})


def needs(language):
    """Skip where a CPU runs no kernel of a language."""
    if reasons := get(language).probe(ARCHS["cpu"]):
        pytest.skip("; ".join(map(str, reasons)))


@pytest.mark.parametrize("language", BACKENDS)
@each_direction
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS.keys())
def test_every_head_dim_has_a_plan_that_fits(language, direction, arch):
    backend = get(language)
    loose = [it.name for way in DIRECTIONS for it in backend.op(way).variants if not it.deterministic]
    assert tuple(loose) == IN_ANY_ORDER[language]
    for head_dim, window in itertools.product(range(8, 257, 8), (None, (None, 0), (300, 5))):
        problem = problem_of(head_dim=head_dim, window=window)
        best = make_plan(backend, problem, arch, direction=direction, deterministic=True, probe=False)
        assert direction == "forward" or best.variant.endswith(("two_pass", "stored", "ordered"))
        for variant in backend.op(direction).variants if direction == "backward" else ():
            takes = variant.capability
            if arch.name in takes.arches and head_dim <= takes.head_dim_max and problem.mask in takes.masks:
                plan = plan_variant(backend, variant, problem, arch, direction=direction)
                assert isinstance(plan, Plan), (variant.name, plan)
                assert variant.fits(problem, arch, plan.config) == ()


@pytest.mark.parametrize("language", BACKENDS)
@each_direction
@pytest.mark.parametrize("head_dim", [40, 64, 128, 160, 256])
def test_a_sweep_tries_what_fits_and_nothing_twice(language, direction, head_dim):
    op = get(language).op(direction)
    candidates, variants = op.candidates, op.offered if direction == "forward" else op.variants
    problem = problem_of(heads_q=16, heads_kv=4, head_dim=head_dim, causal=True)
    for variant, name in itertools.product(variants, GPU_ARCHS):
        if name not in variant.capability.arches or head_dim > variant.capability.head_dim_max:
            continue
        found = candidates(variant, problem, ARCHS[name])
        least = 1 if (variant.name, head_dim) == (TWO_PASS, 256) else 4  # shared memory holds one
        assert len(found) == len(set(found))
        assert language == "cuda" or len(found) >= least
        assert direction == "forward" or len(found) <= (80 if language == "cuda" else 24)
        assert not any(variant.fits(problem, ARCHS[name], config) for config in found)
        assert direction == "forward" or {variant.config_type} == set(map(type, found)) or variant.config_type is None
        assert language == "cuda" or candidates(variant, problem, ARCHS["cpu"]) == ()


@pytest.mark.parametrize(
    ("language", "variant"),
    [(name, it.name) for name in BACKENDS for it in get(name).backward.variants if "cpu" in it.capability.arches],
)
def test_weights_that_would_be_infinite_are_zero(language, variant):
    """Masked ones, whose scores are 2^14 above their row's lse, and, as ``exp2(0 - lse)``, those beyond the ends."""
    needs(language)
    q, k, v, dout = gradient_checks.make_tensors(heads_q=1, seq_q=20, seq_kv=20, head_dim=16)
    k[0, 0, 1:] = 32 * q[0, 0, :1]

    def plan_of(**options):
        problem = Problem.of(q, k, v, **options)
        return make_plan(get(language), problem, ARCHS["cpu"], direction="backward", variant=variant)

    grads = gradient_checks.run(plan_of(causal=True, scale=64.0), q, k, v, dout)
    assert all(grad.isfinite().all() for grad in grads)
    low, high = torch.full_like(q, 8.75), torch.full_like(k, -8.75)
    for causal in (False, True):
        gradient_checks.check(plan_of(causal=causal, scale=1.0), low, high, v, dout)


@pytest.mark.parametrize("language", BACKENDS)
def test_the_mask_begins_at_every_place_of_a_block(language):
    """Scores grow by one a key: one key too many, in a block taken for unmasked, would have most of the weight."""
    needs(language)
    seq_q, options = 84, {"causal": True, "scale": 1.0}
    _, _, values, dout = gradient_checks.make_tensors(heads_q=1, seq_q=seq_q, seq_kv=seq_q + 24, head_dim=16)
    q = torch.ones_like(dout)
    for seq_kv in range(seq_q - 40, seq_q + 24):  # as many as the largest block has keys or queries
        v = values[:, :, :seq_kv].contiguous()
        k = (torch.arange(seq_kv) / 16)[:, None].expand(v.shape).bfloat16()
        truth, naive = (multiattn.reference(q, k, v, compute_dtype=it, **options)[0] for it in (torch.float64, q.dtype))
        allowed = 2 * (naive.double() - truth).abs().max() + torch.finfo(q.dtype).eps * truth.abs().max()
        assert (multiattn.fmha(q, k, v, backend=language, **options).double() - truth).abs().max() <= allowed
        for variant in ("two_pass", "atomic"):
            problem = Problem.of(q, k, v, **options)
            plan = make_plan(get(language), problem, ARCHS["cpu"], direction="backward", variant=variant)
            gradient_checks.check(plan, q, k, v, dout)


@each_language
@pytest.mark.parametrize("variant", ["atomic", "two_pass"])
def test_a_workspace_is_what_the_variant_says(language, variant, monkeypatch):
    backend, (heads, seq, head_dim) = get(language), (2, 70, 40)
    needs(language)
    q, k, v, dout = (torch.randn(1, heads, seq, head_dim).bfloat16() for _ in range(4))
    plan = make_plan(backend, Problem.of(q, k, v), ARCHS["cpu"], direction="backward", variant=variant)
    out, lse = gradient_checks.saved(plan.problem, q, k, v)
    launch, allocate, taken = backend.backward.prepare(plan), torch.empty, []
    grads = [torch.empty_like(it) for it in (q, k, v)]

    def spy(shape, *args, **options):
        made = allocate(shape, *args, **options)
        if made.ndim >= 3:  # and not what an interpreter keeps for itself
            taken.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", spy)
    launch(Operands(q, k, v, out, lse, dout, None, *grads))
    columns = {"two_pass": 1, "atomic": 1 + head_dim}[variant]
    copies = 2 * heads * 128 if language == "cutile" else 0  # of lse and delta, as seq is no multiple of 4
    assert sum(taken) == plan.workspace_bytes == 4 * (heads * seq * columns + copies)


@pytest.mark.parametrize("language", BACKENDS)
@each_direction
def test_a_config_of_another_variant_is_a_reason(language, direction):
    backend, problem, arch = get(language), problem_of(dtype="fp16"), ARCHS["sm90"]
    every = [it for name in BACKENDS for it in get(name).op(direction).variants if it.config_type]
    kinds = {it.config_type: it.rules[0].config for it in every}
    for variant in backend.op(direction).variants:
        for kind, config in kinds.items():
            if kind is not variant.config_type:
                (reason,) = plan_variant(backend, variant, problem, arch, config, direction=direction)
                assert (reason.got, reason.allowed) == (kind.__name__, variant.config_type.__name__)


# ---------------------------------------------------------------- block masks


def asked(block, head_dim=64, mask_mod=lambda b, h, q, kv: q >= kv):
    """Operands of a call with a mask of 256 queries and keys, and its problem."""
    q = torch.zeros(1, 1, 256, head_dim, dtype=torch.float16)
    mask = create_block_mask(mask_mod, None, None, 256, 256, device="cpu", BLOCK_SIZE=block)
    operands, options = with_score(Operands(q, q, q), Options(), None, None, None, None, mask)
    return operands, Problem.of_operands(operands, options)


def cut(plan):
    """The config that its kernels run: two languages cut tiles where they make a launch."""
    if plan.backend == "cutile":
        return launches.within_blocks(plan.problem, plan.config)
    if plan.backend == "triton" and plan.variant not in GLUON_VARIANTS:
        within = plain.within_blocks if plan.direction == "forward" else plain_backward.within
        return within(plan.config, plan.problem)
    return plan.config


def tiles_of(config):
    """Rows and columns of the tiles of all kernels."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from tiles_of(value)
        elif field.name.endswith(("tile_m", "tile_n")):
            yield field.name[-1], value


@each_direction
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
    [(48, None, "blocks of multiples of 32"), (32, TILED.name, "blocks of multiples of 64"), (128, "split_q", "none")],
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


# ---------------------------------------------------------------- beyond the ends of sequences, of lists and of counts


SEQ_Q, SEQ_KV = 150, 180


def normal(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).half() for shape in shapes]


def tensors(seq_q=SEQ_Q, seq_kv=SEQ_KV, head_dim=24):
    return normal((2, 2, seq_q, head_dim), *((2, 1, seq_kv, head_dim),) * 2)


def check(backend, given, deterministic=False, **options):
    """Out, lse and gradients of a call as of the reference's."""
    results = []
    for name, own in ((backend, {"deterministic": deterministic}), ("reference", {})):
        leaves = [it.clone().requires_grad_() for it in given]
        out, lse = fmha(*leaves, backend=name, return_lse=True, **options, **own)
        seen = torch.where(lse == -torch.inf, 0.0, lse)
        gradients = torch.autograd.grad(out.float().square().sum() + seen.sum(), leaves)
        results.append((out.detach(), lse.detach(), *gradients))
    for got, true in zip(*results, strict=True):
        torch.testing.assert_close(got, true, rtol=0.02, atol=0.02)


def on_cpu_if(direction, able):
    """The variants of all backends that a CPU runs and that are able to."""
    return [
        pytest.param(name, variant.name, id=f"{name}-{variant.name}")
        for name in BACKENDS
        for variant in get(name).op(direction).variants
        if "cpu" in variant.capability.arches and able(variant.capability)
    ]


def lists(counts, order, full_counts, full_order):
    """Lists of three blocks of queries and five of keys, which are more of each than there are."""
    given = ([[counts]], [order] * 3, [[full_counts]], [full_order] * 3)
    return [torch.tensor(it).int().view(1, 1, 3, -1).squeeze(-1) for it in given]


def mask_of(*given):
    return BlockMask.from_kv_blocks(*given, BLOCK_SIZE=64, mask_mod=lambda b, h, q, kv: (q + kv) % 3 == 0)


MASKS = {
    "full blocks in no order, the ragged ones among them": lambda: mask_of(
        *lists([1, 2, 0], [2, 0, 1, 4, 3], [3, 1, 0], [3, 4, 1, 0, 2])
    ),
    "all full": lambda: mask_of(*lists([0, 0, 0], [0] * 5, [3, 3, 3], [0, 1, 2, 3, 4])),
    "none full": lambda: mask_of(*lists([1, 2, 0], [2, 0, 1, 4, 3], [0, 0, 0], [0] * 5)[:2]),
    "longer than sequences": lambda: create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 300, 400, device="cpu"),
    "nothing": lambda: mask_of(*lists([0, 0, 0], [0] * 5, [0, 0, 0], [0] * 5)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
def test_a_block_mask_is_its_lists(name, backend):
    """A full block is seen whole, whatever mask_mod says, but not what lies beyond the ends."""
    check(backend, tensors(), block_mask=MASKS[name](), sinks=torch.linspace(-1, 1, 2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_entries_behind_a_count_are_not_looked_at(backend):
    """Interpreters refuse addresses beyond tensors."""
    make = functools.partial(create_block_mask, lambda b, h, q, kv: q >= kv, 2, None, SEQ_Q, SEQ_KV, device="cpu")
    clean, mask = make(BLOCK_SIZE=64), make(BLOCK_SIZE=64)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
        indices[torch.arange(indices.shape[-1]) >= counts[..., None]] = 1 << 20
    wanted, got = (fmha(*tensors(), block_mask=it, backend=backend) for it in (clean, mask))
    assert torch.equal(wanted, got)


@pytest.mark.parametrize(("backend", "variant"), on_cpu_if("backward", lambda it: it.block_masks))
def test_a_key_beyond_the_end_of_a_block_has_no_weight(backend, variant):
    """Its score of 0 would be far above all others, and its weight infinite."""
    q, k, v = tensors(64, 70)
    mask = create_block_mask(lambda b, h, q, kv: kv >= 0, None, None, 64, 70, device="cpu", BLOCK_SIZE=(128, 128))
    given, options = (q.abs() + 4, -k.abs() - 4, v), {"block_mask": mask}
    out, lse = reference(*given, **options)
    dout = v[:, :, :64].repeat(1, 2, 1, 1)
    gradients = fmha_backward(*given, out.half(), lse, dout, backend=backend, variant=variant, **options)
    assert lse.max() < -89  # which exp(-lse) exceeds fp32 of
    assert all(it.isfinite().all() for it in gradients)


@pytest.mark.parametrize(("backend", "variant"), on_cpu_if("forward", lambda it: it.packed_blocks))
def test_a_block_that_is_not_listed_reaches_no_row_of_a_packed_tile(backend, variant):
    """The second sequence begins within a block, so that its first tile is shorter than others."""
    q, k, v = torch.randn(3, 300, 1, 64, dtype=torch.bfloat16).unbind()
    v[128:256] = torch.nan
    starts = torch.tensor([0, 100, 300], dtype=torch.int32)
    diagonal = torch.nn.functional.pad(torch.arange(3, dtype=torch.int32)[:, None], (0, 2))[None, None]
    ones = torch.ones(1, 1, 3, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(ones, diagonal, BLOCK_SIZE=128, compute_q_blocks=False, seq_lengths=(300, 300))
    asked = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 200, "max_seqlen_kv": 200}
    out = fmha_varlen(q, k, v, **asked, block_mask=mask, backend=backend, variant=variant)
    assert out[256:].isfinite().all()
    if backend != "cutile":  # whose tile has rows of the next block; docs/limits.md
        assert out[:128].isfinite().all()


SCORES = {
    "of no number for queries 38 and on": (
        37,
        45,
        {"score_mod": lambda score, b, h, q, kv: score + torch.log(38.0 - q)},
    ),
    "with an infinite slope at 0": (37, 45, {"score_mod": lambda score, b, h, q, kv: torch.sqrt(torch.abs(score))}),
    "with slopes of no number for keys that a mask hides": (
        49,
        83,
        {"score_mod": lambda score, b, h, q, kv: score * torch.sqrt(q + 34 - kv), "causal": True},
    ),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("backend", "variant"), on_cpu_if("backward", lambda it: it.scores))
def test_scores_beyond_the_ends_reach_nothing(backend, variant, name):
    seq_q, seq_kv, options = SCORES[name]
    q, k, v, dout = normal(*((1, 2, length, 16) for length in (seq_q, seq_kv, seq_kv, seq_q)))
    out, lse = reference(q, k, v, **options)
    given = q, k, v, out.half(), lse, dout
    made = fmha_backward(*given, backend=backend, variant=variant, **options)
    for got, true in zip(made, reference_backward(*given, **options), strict=True):
        assert got.isfinite().all()
        known = true.isfinite()  # slopes of none, multiplied by zero, are NaN in the truth
        assert known.all() or "causal" in options
        torch.testing.assert_close(got[known], true.half()[known], rtol=0.02, atol=0.02)
