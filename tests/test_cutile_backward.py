"""The cuTile backward, interpreted, against the reference; what its launches are made of; what the compiler makes."""

import inspect
import itertools
import math
import re
import subprocess
from dataclasses import replace

import gradient_checks
import pytest
import torch
from gradient_checks import run

from multiattn import Problem
from multiattn.cutile.backward_configs import OnePassConfig, TwoPassConfig
from multiattn.plan.arch import ARCHS, GPU_ARCHS
from multiattn.plan.backend import find_variant, get, make_plan, plan_variant
from multiattn.plan.config import COMPILED
from multiattn.problem import Operands

pytest.importorskip("cuda.tile")

from multiattn.cutile import cpu as interpreter
from multiattn.cutile import launch as launching
from multiattn.cutile.kernels import backward
from multiattn.cutile.table import needs_64bit, steps_of
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.run.arguments import layouts

BACKEND = get("cutile")
VARIANTS = [variant.name for variant in BACKEND.backward.variants]
CPU = ARCHS["cpu"]

each_variant = pytest.mark.parametrize("variant", VARIANTS)
both_masks = pytest.mark.parametrize("causal", [False, True])


def make_tensors(
    *,
    batch=1,
    heads_q=2,
    heads_kv=1,
    seq_q=45,
    seq_kv=70,
    head_dim=64,
    dtype=torch.bfloat16,
    spread=1.0,
    has_dlse=False,
):
    """q, k, v, dout and dlse."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads, seq, factor=1.0):
        return (torch.randn(batch, heads, seq, head_dim, generator=generator) * factor).to(dtype)

    q, k, v = normal(heads_q, seq_q, spread), normal(heads_kv, seq_kv, spread), normal(heads_kv, seq_kv)
    dlse = torch.randn(batch, heads_q, seq_q, generator=generator) if has_dlse else None
    return q, k, v, normal(heads_q, seq_q), dlse


def plan_of(variant, problem, config=None, arch=CPU):
    return make_plan(
        BACKEND, problem, arch, direction="backward", variant=variant, config=config, probe=arch.is_gpu is False
    )


def config_of(variant, **fields):
    """A config of the variant's kind; `dq_` fields are of two passes only."""
    if variant == "two_pass":
        return TwoPassConfig(**fields)
    return OnePassConfig(**{name: value for name, value in fields.items() if not name.startswith("dq_")})


def check(variant, q, k, v, dout, dlse, *, naive_dtype=None, config=None, **options):
    """dq, dk and dv of one variant, which are as right as they must be."""
    plan = plan_of(variant, Problem.of(q, k, v, **options), config)
    return gradient_checks.check(plan, q, k, v, dout, dlse, naive_dtype=naive_dtype)


@each_variant
@both_masks
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 128, 256])
def test_head_dims(head_dim, dtype, causal, variant):
    check(variant, *make_tensors(head_dim=head_dim, dtype=dtype, has_dlse=True), causal=causal)


@each_variant
@both_masks
@pytest.mark.parametrize(
    ("seq_q", "seq_kv"), [(1, 1), (1, 70), (45, 1), (32, 32), (64, 96), (33, 31), (100, 45), (130, 17), (5, 64)]
)
def test_lengths(seq_q, seq_kv, causal, variant):
    check(variant, *make_tensors(seq_q=seq_q, seq_kv=seq_kv, head_dim=16), causal=causal)


@each_variant
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 1), (3, 3), (6, 2), (8, 1)])
def test_heads_that_share_keys(heads_q, heads_kv, variant):
    tensors = make_tensors(batch=2, heads_q=heads_q, heads_kv=heads_kv, head_dim=16, has_dlse=True)
    check(variant, *tensors, causal=True)


@each_variant
@both_masks
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-44, 1.0])
def test_scales(scale, causal, variant):
    check(variant, *make_tensors(has_dlse=True), causal=causal, scale=scale)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_magnitudes(dtype, variant):
    """Against naive gradients in fp32: in fp16 the scores overflow, and then they allow any error."""
    check(variant, *make_tensors(dtype=dtype, spread=30.0), naive_dtype=torch.float32, causal=True)


@each_variant
def test_very_small_lse_makes_no_nan(variant):
    """Of keys beyond the end ``exp2(0 - lse)`` overflows: scores of about -300 make it infinite in fp32."""
    q, k, v, dout, _ = make_tensors(seq_kv=40, head_dim=16)
    check(variant, torch.full_like(q, 8.75), torch.full_like(k, -8.75), v, dout, None)
    check(variant, torch.full_like(q, 8.75), torch.full_like(k, -8.75), v, dout, None, causal=True)


@each_variant
def test_rows_that_see_no_key(variant):
    tensors = make_tensors(seq_q=100, seq_kv=45, has_dlse=True)
    dq, _, _ = check(variant, *tensors, causal=True)
    assert (dq[:, :, :55] == 0).all()


@each_variant
@both_masks
def test_memory_beyond_the_ends_does_not_matter(causal, variant):
    """Also unaligned: rows start at multiples of 2 bytes, and the strides of S are odd."""
    q, k, v, dout, _ = make_tensors(head_dim=40)
    surrounded = []
    for tensor in (q, k, v):
        batch, heads, seq, head_dim = tensor.shape
        memory = torch.full((batch + 1, heads + 1, seq + 40, head_dim + 25), math.nan, dtype=tensor.dtype)
        view = memory[:batch, :heads, 3 : seq + 3, 7 : head_dim + 7]
        surrounded.append(view.copy_(tensor))
    expected = run(plan_of(variant, Problem.of(q, k, v, causal=causal)), q, k, v, dout)
    problem = Problem.of(*surrounded, causal=causal)
    assert problem.alignment == 2
    got = run(plan_of(variant, problem), *surrounded, dout)
    assert all(map(torch.equal, got, expected))


@each_variant
def test_strides(variant):
    q, k, v, dout, dlse = make_tensors(heads_q=4, heads_kv=2, head_dim=16, has_dlse=True)
    transposed = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]
    got = check(variant, *transposed, dout, dlse)
    assert [grad.stride() for grad in got] == [tensor.stride() for tensor in transposed]
    assert all(map(torch.equal, got, check(variant, q, k, v, dout, dlse)))
    one_key_head = k[:, :1].expand(-1, 2, -1, -1)
    assert one_key_head.stride(1) == 0
    check(variant, q, one_key_head, v, dout, dlse)


@each_variant
@both_masks
@pytest.mark.parametrize("heads_together", [2, 3, 100])
def test_every_order_of_tiles_covers_every_tile(heads_together, causal, variant):
    config = config_of(
        variant,
        tile_m=16,
        tile_n=32,
        heads_together=heads_together,
        dq_tile_m=32,
        dq_tile_n=16,
        dq_heads_together=heads_together,
    )
    tensors = make_tensors(batch=2, heads_q=4, heads_kv=2, head_dim=16)
    check(variant, *tensors, causal=causal, config=config)  # the interpreter raises if two blocks own one tile


@both_masks
def test_two_passes_give_the_same_bits_in_every_order_of_blocks(causal, monkeypatch):
    q, k, v, dout, dlse = make_tensors(heads_q=4, heads_kv=2, seq_q=100, seq_kv=130, head_dim=16, has_dlse=True)
    plan = plan_of("two_pass", Problem.of(q, k, v, causal=causal))
    launch, seed = interpreter.launch, itertools.count()
    monkeypatch.setattr(interpreter, "launch", lambda *args: launch(*args, seed=next(seed)))
    first, second = (run(plan, q, k, v, dout, dlse) for _ in range(2))
    assert next(seed) == 4
    assert all(map(torch.equal, first, second))


def test_one_pass_says_that_it_may_differ():
    assert {variant.name: variant.deterministic for variant in BACKEND.backward.variants} == {
        "atomic": False,
        "two_pass": True,
    }


@each_variant
def test_workspace_is_what_a_launch_allocates(variant, monkeypatch):
    allocated = []
    allocate = torch.empty

    def counted(*args, **options):
        tensor = allocate(*args, **options)
        if tensor.ndim >= 3:
            allocated.append(tensor.nbytes)
        return tensor

    q, k, v, dout, _ = make_tensors(head_dim=40)
    plan = plan_of(variant, Problem.of(q, k, v))
    out, lse = gradient_checks.saved(plan.problem, q, k, v)
    monkeypatch.setattr(launching.torch, "empty", counted)
    monkeypatch.setattr(interpreter, "launch", lambda *args: None)
    run(plan, q, k, v, dout, out=out, lse=lse)
    assert sum(allocated) == plan.workspace_bytes == 4 * 2 * 45 * {"two_pass": 1, "atomic": 41}[variant]


@each_variant
def test_a_gpu_gets_the_strides_that_were_planned(variant, monkeypatch):
    """PyTorch leaves the stride of a one-element dimension arbitrary, and cuTile would specialise on it."""
    launched = []
    monkeypatch.setattr("cuda.tile.launch", lambda stream, grid, kernel, args: launched.append(args))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    q, k, v, dout, dlse = make_tensors(seq_q=1, has_dlse=True)
    problem = Problem.of(q, k, v)
    odd = [q.as_strided(q.shape, (5, 64, 3, 1)), k.as_strided(k.shape, (7, 9, 64, 1)), v]
    odd_row = dlse.as_strided(dlse.shape, (1, 1, 3))
    grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
    plan = plan_of(variant, problem, config=config_of(variant, tile_m=64, tile_n=64), arch=ARCHS["sm90"])
    launching.through_cutile(plan)(Operands(*odd, dout, odd_row, dout, odd_row, *grads))
    steps = steps_of(plan, has_dlse=True)
    arrays = layouts(problem)
    for step, args in zip(steps, launched, strict=True):
        for name, tensor in zip(step.arrays.values(), args, strict=False):
            assert tensor.stride() == arrays[name].strides, name


@each_variant
def test_steps_have_the_parameters_of_their_kernels_in_order(variant):
    plan = plan_of(variant, Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=32))
    for has_dlse in (False, True):
        for step in steps_of(plan, has_dlse=has_dlse):
            parameters = list(inspect.signature(getattr(backward, step.kernel)).parameters)
            assert [*step.arrays, *step.scalars, *step.constants] == parameters


def test_64_bit_exactly_when_an_offset_needs_it():
    fits = Problem.contiguous(batch=2, heads_q=1, seq_q=2**22, head_dim=256)
    assert not needs_64bit(fits, backward=True)
    assert needs_64bit(Problem.contiguous(batch=2, heads_q=1, seq_q=2**22 + 1, head_dim=256), backward=True)
    assert needs_64bit(
        Problem.contiguous(batch=1, heads_q=1, seq_q=2**23, head_dim=256), backward=True
    )  # a stride of 2^31
    # One head of keys may stand for all of them: dk is then as large as if it did not.
    broadcast = replace(
        Problem.contiguous(batch=2, heads_q=64, seq_q=1, seq_kv=2**17, head_dim=256), strides_k=(0, 0, 256)
    )
    assert needs_64bit(replace(broadcast, strides_v=(0, 0, 256)), backward=True)


@each_variant
def test_the_64_bit_kernels_are_the_same_kernels(variant, monkeypatch):
    tensors = make_tensors(head_dim=40)
    expected = check(variant, *tensors, causal=True)
    monkeypatch.setattr("multiattn.plan.abi.INT32_MAX", 0)
    assert needs_64bit(Problem.of(*tensors[:3]), backward=True)
    assert all(map(torch.equal, check(variant, *tensors, causal=True), expected))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@both_masks
def test_every_arch_has_a_deterministic_rule_for_every_head_dim(head_dim, causal):
    problem = Problem.contiguous(batch=1, heads_q=8, seq_q=4096, head_dim=head_dim, causal=causal)
    for arch in ARCHS.values():
        plan = make_plan(BACKEND, problem, arch, direction="backward", deterministic=True, probe=False)
        assert plan.variant == "two_pass"
        assert plan.why


def test_every_rule_is_reached_and_says_why():
    for variant in BACKEND.backward.variants:
        reached = set()
        sizes = itertools.product(ARCHS.values(), range(8, 257, 8), (False, True), (256, 1024, 2048, 4096, 16384))
        for arch, head_dim, causal, seq in sizes:
            problem = Problem.contiguous(batch=1, heads_q=8, seq_q=seq, head_dim=head_dim, causal=causal)
            plan = plan_variant(BACKEND, variant, problem, arch, direction="backward")
            reached.add(getattr(plan, "why", None))
        for rule in variant.rules:
            assert rule.why in reached
            assert rule.why.startswith(("interpreted", COMPILED, "H200"))


@each_variant
def test_candidates_are_distinct_and_fit(variant):
    for head_dim, name in itertools.product((64, 128, 256), GPU_ARCHS):
        problem = Problem.contiguous(batch=4, heads_q=16, heads_kv=4, seq_q=4096, head_dim=head_dim, causal=True)
        configs = BACKEND.backward.candidates(find_variant(BACKEND, variant, "backward"), problem, ARCHS[name])
        assert 4 <= len(configs) <= 24
        assert len(set(configs)) == len(configs)


WRONG_FIELDS = [
    ({"tile_m": 48}, "tile_m=48"),
    ({"occupancy": 0}, "occupancy=0"),
    ({"latency": 11}, "latency=11"),
]
WRONG_DQ_FIELDS = [
    ({"dq_tile_n": 8}, "dq_tile_n=8"),
    ({"dq_num_worker_warps": 16}, "dq_num_worker_warps=16"),
    ({"dq_heads_together": 0}, "dq_heads_together=0"),
]


@pytest.mark.parametrize(
    ("variant", "change", "got"),
    [
        *((variant, *wrong) for variant in VARIANTS for wrong in WRONG_FIELDS),
        *(("two_pass", *wrong) for wrong in WRONG_DQ_FIELDS),
    ],
)
def test_configs_that_cannot_be(variant, change, got):
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=64)
    config = config_of(variant, **{"tile_m": 64, "tile_n": 64, **change})
    (reason,) = find_variant(BACKEND, variant, "backward").fits(problem, ARCHS["sm90"], config)
    assert reason.code == "config"
    assert reason.got == got


def test_a_config_of_the_other_variant_is_a_reason():
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=64)
    for variant, other in (("atomic", "two_pass"), ("two_pass", "atomic")):
        (reason,) = find_variant(BACKEND, variant, "backward").fits(
            problem, ARCHS["sm90"], config_of(other, tile_m=64, tile_n=64)
        )
        assert reason.allowed == type(config_of(variant, tile_m=64, tile_n=64)).__name__


needs_compiler = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()) or find_cuobjdump() is None,
    reason="; ".join(map(str, BACKEND.probe_compiler())) or "no cuobjdump",
)


def compile_all(variant, arch, **sizes):
    problem = Problem.contiguous(**{"batch": 1, "heads_q": 2, "seq_q": 4096, "head_dim": 64, **sizes})
    return BACKEND.backward.compile(plan_of(variant, problem, arch=ARCHS[arch]))


@needs_compiler
@pytest.mark.parametrize(
    ("arch", "head_dim", "causal"),
    [
        ("sm80", 128, True),
        ("sm90", 128, True),
    ],
)  # the others are on record, and `bench expected --check` compiles some each time
def test_rules_up_to_128_do_not_spill(arch, head_dim, causal):
    compiled = compile_all("two_pass", arch, head_dim=head_dim, causal=causal)
    assert [one.kernel for one in compiled] == ["query_grads", "key_grads"]
    for one in compiled:
        assert one.cubin.startswith(b"\x7fELF")
        assert one.spill_bytes == 0
        assert 0 < one.registers <= 255
        assert 0 < one.smem_bytes <= ARCHS[arch].smem_per_block
        assert one.threads in (128, 256, 384)


def sass(compiled, tmp_path):
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.cubin)
    return subprocess.run([find_cuobjdump(), "-sass", file], capture_output=True, text=True, check=True).stdout


@needs_compiler
def test_hopper_adds_to_dq_by_tma_and_keeps_p_in_registers(tmp_path):
    rows, keys, rounding = compile_all("atomic", "sm90", head_dim=64)
    assert [one.kernel for one in (rows, keys, rounding)] == ["row_deltas", "all_grads", "round_query_grads"]
    assert all(one.spill_bytes == 0 for one in (rows, keys, rounding))
    text = sass(keys, tmp_path)
    assert "UTMAREDG" in text
    assert re.search(r"HGMMA\S+ R\d+, R\d+, gdesc", text)  # the left operand in registers: p^T, ds^T


@needs_compiler
def test_the_rarer_branches_compile():
    assert compile_all("two_pass", "sm90", seq_q=1001, head_dim=40, causal=True, scale=0.0)
    assert compile_all("two_pass", "sm90", batch=64, heads_q=64, seq_q=65536, seq_kv=128)
