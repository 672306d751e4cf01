"""cuTile's backward: orders of tiles and blocks, launches, rules, and what is compiled. Parity has the numbers."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from gradient_checks import make_tensors, run

from multiattn import Problem
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import find_variant, get, make_plan

pytest.importorskip("cuda.tile")

from multiattn.cutile import cpu
from multiattn.cutile.families import launches_of
from multiattn.cutile.launches import needs_64bit
from multiattn.cutile.rules.shorthand import one_pass, queries, stored, two_passes
from multiattn.plan.cubin import read_entry
from multiattn.plan.toolchain import disassemble, find_cuobjdump

BACKEND = get("cutile")
VARIANTS = [variant.name for variant in BACKEND.backward.variants]
CPU = ARCHS["cpu"]

TWO_KERNELS = {"two_pass": two_passes, "stored": stored}

each_variant = pytest.mark.parametrize("variant", VARIANTS)
both_masks = pytest.mark.parametrize("causal", [False, True])


def plan_of(variant, problem, config=None, arch=CPU):
    return make_plan(
        BACKEND, problem, arch, direction="backward", variant=variant, config=config, probe=arch.is_gpu is False
    )


def config_of(variant, **fields):
    """A config of the variant's kind."""
    config = one_pass(16, 32, **fields)
    return TWO_KERNELS[variant](config, queries(64, 64)) if variant in TWO_KERNELS else config


@both_masks
@pytest.mark.parametrize(("variant", "launches"), [("two_pass", 2), ("stored", 3)])
def test_two_kernels_give_the_same_bits_in_every_order_of_blocks(variant, launches, causal, monkeypatch):
    q, k, v, dout = make_tensors(heads_q=4, heads_kv=2, seq_q=100, seq_kv=130, head_dim=16)
    dlse = torch.randn(q.shape[:3], generator=torch.Generator().manual_seed(1))
    plan = plan_of(variant, Problem.of(q, k, v, causal=causal))
    launch, seed = cpu.launch, itertools.count()
    monkeypatch.setattr(cpu, "launch", lambda *args: launch(*args, seed=next(seed)))
    first, second = (run(plan, q, k, v, dout, dlse) for _ in range(2))
    assert next(seed) == 2 * launches
    assert all(map(torch.equal, first, second))
    assert [it.name for it in BACKEND.backward.variants if not it.deterministic] == ["atomic"]


@pytest.mark.parametrize(
    ("variant", "how"), [("two_pass", "dq_transposed"), ("two_pass", "delta_first"), ("stored", "dq_transposed")]
)
def test_products_that_may_not_be_otherwise(variant, how):
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=64)
    config = config_of(variant, **{how: True})
    (reason,) = find_variant(BACKEND, variant, "backward").fits(problem, CPU, config)
    assert reason.allowed == "False"


# ---------------------------------------------------------------- launches


@each_variant
def test_64_bits_where_a_gradient_needs_them(variant):
    """One head of keys may stand for all of them: dk is then as large as if it did not."""
    sizes = {"batch": 2, "heads_q": 64, "seq_q": 1, "seq_kv": 2**17, "head_dim": 256}
    broadcast = replace(Problem.contiguous(**sizes), strides_k=(0, 0, 256), strides_v=(0, 0, 256))
    assert not needs_64bit(broadcast)
    assert all(launch.is_64bit for launch in launches_of(plan_of(variant, broadcast, arch=ARCHS["sm90"])))


# ---------------------------------------------------------------- compiled


needs_compiler = pytest.mark.skipif(
    bool(BACKEND.probe_compiler()) or find_cuobjdump() is None,
    reason="; ".join(map(str, BACKEND.probe_compiler())) or "no cuobjdump",
)


def compile_all(variant, arch, **sizes):
    problem = Problem.contiguous(**{"batch": 1, "heads_q": 2, "seq_q": 4096, "head_dim": 64, **sizes})
    kernels = BACKEND.backward.export(plan_of(variant, problem, arch=ARCHS[arch]), ())
    return [(one, read_entry(one.cubin, one.kernel)) for one in kernels]


def are(kernels, *names):
    return [one.kernel.startswith(name) for (one, _), name in zip(kernels, names, strict=True)] == [True] * len(names)


@needs_compiler
def test_hopper_adds_to_dq_by_tma_and_keeps_p_in_registers():
    compiled = compile_all("atomic", "sm90", head_dim=64)
    assert are(compiled, "row_deltas", "all_grads", "round_query_grads")
    assert all(entry.stack_bytes == 0 for _, entry in compiled)
    keys, _ = compiled[1]
    text = disassemble(keys.cubin)
    assert "UTMAREDG" in text
    assert re.search(r"HGMMA\S+ R\d+, R\d+, gdesc", text)  # the left operand in registers: p^T, ds^T
