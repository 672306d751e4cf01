"""bench of backward: what is launched, checked and counted; and what the tables make of it."""

from dataclasses import replace

import bench_fakes as fakes
import pytest
import torch

from bench.contenders import GRADS, Ours, alike, contender_of, differentiate, our_providers, require_grad
from bench.results import load
from bench.run import output_bytes
from multiattn.cutile.backward import STORED_BYTES
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, GPU_ARCHS
from multiattn.plan.backend import BACKENDS, Plan, find_variant, plan_variant
from multiattn.plan.schedule import COUNTER_BYTES, most_multiprocessors, one_width
from multiattn.problem import Problem

OURS = Ours(backend="reference")
BWD, BOTH = (replace(fakes.CELL, direction=direction) for direction in ("bwd", "fwdbwd"))
MLA = replace(BOTH, head_dim_v=8)


def run_once(folder, *providers, cell=BWD, **more):
    return fakes.run_once(folder, *providers, cells=(cell,), **more)


def two_variants(monkeypatch, *, spoil=()):
    """The reference with an `atomic` variant before a deterministic one; gradients named in `spoil` are wrong."""
    right = registry.get("reference")
    eager = right.backward.variants[0]
    atomic = replace(eager, name="atomic", deterministic=False, workspace=lambda problem, config: 4096)
    launched = []

    def prepare(plan):
        launcher = right.backward.prepare(plan)

        def launch(operands):
            launched.append(plan.variant)
            launcher(operands)
            for name in spoil:
                getattr(operands, name)[0, 0, -1] += 1.0

        return launch

    variants = (atomic, replace(eager, name="two_pass"))
    backend = replace(right, backward=replace(right.backward, variants=variants, prepare=prepare))
    monkeypatch.setattr("multiattn.plan.backend.get", lambda name: backend)
    return launched


# ---------------------------------------------------------------- what is launched


@pytest.mark.parametrize(("cell", "written"), [(BWD, {*GRADS}), *((it, {"out", "lse", *GRADS}) for it in (BOTH, MLA))])
def test_a_launch_writes_what_its_direction_has(cell, written):
    tensors = cell.tensors("cpu")
    plan, forward = OURS.plans(cell, cell.problem, ARCHS["cpu"])
    assert (plan.direction, forward.direction) == ("backward", "forward")
    results = contender_of(plan, tensors, cell, forward).output()
    assert set(results) == written
    assert not any(result.isnan().any() for result in results.values())
    assert all(results[name].stride() == like.stride() for name, like in zip(GRADS, tensors, strict=True))


@pytest.mark.parametrize(("cell", "columns"), [(BWD, 80), (BOTH, 112), (MLA, 5 * 8 + 4 * 16 - 16)])
@pytest.mark.parametrize("regime", ["device", "call"])
def test_ours_and_peers_are_measured_in_a_backward(cell, columns, regime, tmp_path):
    ours, peer = run_once(tmp_path, OURS, replace(fakes.peer("sdpa"), values=True), cell=cell, regime=regime)
    flops = 2 * columns * 2 * (48 * 49 // 2)
    assert ours.measured.tflops == pytest.approx(flops / 0.5e-3 / 1e12, rel=1e-5)
    assert 0 < ours.measured.error_ratio <= 1
    assert ours.plan["deterministic"] is True
    assert ours.plan["workspace_bytes"] == 0
    assert ours.detail == "forward: eager"
    assert peer.detail == "a fake, torch.autograd.grad"
    assert peer.measured
    assert load(tmp_path / "smoke.json") == [ours, peer]


@pytest.mark.parametrize("name", GRADS)
def test_a_wrong_gradient_is_never_timed(name, monkeypatch, tmp_path):
    two_variants(monkeypatch, spoil=(name,))
    (row,) = run_once(tmp_path, OURS)
    assert row.error.startswith(f"multiattn.truth.tolerance.Mismatch: {name} is off")


def test_a_peer_with_another_gradient_is_an_error(tmp_path):
    def detached(q, k, v, causal):
        return torch.nn.functional.scaled_dot_product_attention(q, k.detach(), v, is_causal=causal) + 0 * k

    wrong, constant = run_once(
        tmp_path, fakes.peer("wrong", detached), fakes.peer("constant", lambda q, *_: torch.zeros_like(q))
    )
    assert "computes something else: dk has an error of" in wrong.error
    assert str(constant.reasons[0]) == "direction: got bwd; allowed forward: constant has no gradient"


def test_the_graph_is_walked_again_or_made_anew():
    forwards = []

    def forward():
        forwards.append(1)
        return leaves[0] * leaves[1] * leaves[2]

    leaves = require_grad(tuple(torch.ones(2) for _ in range(3)))
    for keeps_graph, expected in ((True, 1), (False, 3)):
        forwards.clear()
        call = differentiate(forward, leaves, torch.ones(2), keeps_graph=keeps_graph)
        grads = [call() for _ in range(3)]
        assert len(forwards) == expected
        assert all(torch.equal(grad, torch.ones(2)) for three in grads for grad in three)
    transposed = torch.empty(2, 3, 4).transpose(0, 1)
    assert alike(transposed, torch.ones(3, 2, 4)).stride() == transposed.stride()


# ---------------------------------------------------------------- variants


def test_the_deterministic_variant_stands_beside_the_fastest(monkeypatch, tmp_path):
    for name in BACKENDS:
        best, beside = (registry.get(name).backward.variants[0], our_providers((name,), direction="bwd")[1].variant)
        assert find_variant(registry.get(name), beside, "backward").deterministic != best.deterministic
    launched = two_variants(monkeypatch)
    providers = our_providers(("reference",), direction="bwd")
    assert [it.name for it in providers] == ["reference", "reference/two_pass"]
    assert [it.name for it in our_providers(("reference",))] == ["reference"]
    assert [it.name for it in our_providers(("reference",), "atomic", "bwd")] == ["reference/atomic"]
    fast, steady = run_once(tmp_path, *providers)
    assert (fast.plan["variant"], fast.plan["deterministic"]) == ("atomic", False)
    assert (steady.plan["variant"], steady.plan["deterministic"]) == ("two_pass", True)
    assert fast.plan["workspace_bytes"] == 4096
    assert set(launched) == {"atomic", "two_pass"}


# ---------------------------------------------------------------- memory


def test_memory_is_what_a_launch_takes_beside_its_outputs(tmp_path):
    machine = replace(fakes.machine(), extra_bytes=lambda contestant, cell: 1234 if contestant.call() is None else 99)
    ours, peer = run_once(tmp_path, OURS, fakes.peer("sdpa"), on=machine)
    assert (ours.measured.peak_extra_bytes, peer.measured.peak_extra_bytes) == (1234, 99)
    out = 2 * 48 * 16 * 2
    assert output_bytes(BWD) == 3 * out
    assert output_bytes(fakes.CELL) == out + 2 * 48 * 4
    assert output_bytes(BOTH) == output_bytes(BWD) + output_bytes(fakes.CELL)


def bytes_allowed(problem: Problem) -> int:
    """The workspace of FlashAttention-3: dq in fp32 and two floats a row, lengths to 128, head_dim to 32 or 64.

    And a counter of tiles. SDPA's flash has one float a row.
    """
    multiple = 32 if problem.head_dim <= 128 else 64
    seq, head_dim = -(-problem.seq_q // 128) * 128, -(-problem.head_dim // multiple) * multiple
    return problem.batch * problem.heads_q * seq * (head_dim + 2) * 4 + COUNTER_BYTES


LENGTHS = ((1000, 1), (1000, 1000), (1000, 1 << 20), (1 << 20, 1000), (1 << 20, 1 << 20))


@pytest.mark.parametrize("name", BACKENDS)
def test_no_workspace_grows_with_the_product_of_the_lengths(name):
    plans = [
        plan_variant(registry.get(name), variant, problem, ARCHS[arch], direction="backward")
        for variant in registry.get(name).backward.variants
        for arch in GPU_ARCHS
        for head_dim in (40, 64, 128, 256)
        for seq_q, seq_kv in LENGTHS
        for problem in [
            Problem.contiguous(batch=2, heads_q=8, heads_kv=2, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim)
        ]
    ]
    made = [plan for plan in plans if isinstance(plan, Plan)]
    assert {plan.variant for plan in made} == {variant.name for variant in registry.get(name).backward.variants}
    for its, plan in ((it.problem, it) for it in made):
        # Hopper divides tiles of 128 keys among SMs: of two for each SM it has dk and dv in fp32.
        divided = 2 * most_multiprocessors(ARCHS["sm90"]) * (2 * 128 * its.head_dim + 8) * 4
        once_more = its.batch * its.heads_q * (-(-its.seq_q // 64) * 64) * 4  # delta, which dP begins with
        # In cuTile blocks share a group: dk and dv of each query head in fp32, as FlashAttention has them.
        parts = 2 * its.batch * its.heads_q * its.seq_kv * one_width(its.head_dim) * 4 if name == "cutile" else 0
        more = {"wgmma": divided + once_more, "wgmma_ordered": 2 * once_more}
        more |= {"stored": STORED_BYTES + parts, "wgmma_stored": STORED_BYTES, "wgmma_wide": STORED_BYTES}
        assert plan.workspace_bytes <= bytes_allowed(its) + more.get(plan.variant, parts), plan
