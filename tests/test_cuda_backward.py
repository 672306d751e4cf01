"""The CUDA backward on the CPU: what parity's cases leave out, and what selects the kernels."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cuda_runs import on_cpu
from gradient_checks import make_tensors, run

from multiattn import Problem
from multiattn.cuda import BACKEND
from multiattn.cuda.cpu import host
from multiattn.cuda.cpu.host import CpuLauncher
from multiattn.cuda.instances import kernels_of
from multiattn.operands import Operands
from multiattn.plan.arch import CPU
from multiattn.plan.backend import make_plan

VARIANTS = {variant.name: variant for variant in BACKEND.backward.variants}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def plan_of(variant, q, k, v, *, config=None, **options):
    return make_plan(BACKEND, Problem.of(q, k, v, **options), CPU, direction="backward", variant=variant, config=config)


# ---------------------------------------------------------------- beside parity's cases


@on_cpu
@each_variant
def test_a_masked_product_that_overflows_is_zero(variant):
    """Rows 0 to 4 do not see key 30, with which dout @ v^T is 1e60; who sees it has no dout."""
    q, k, v, dout = make_tensors(heads_q=1, seq_q=40, seq_kv=40, head_dim=16)
    v[0, 0, 30], dout[0, 0, :5], dout[0, 0, 30:] = 1e30, 1e30, 0.0
    assert all(grad.isfinite().all() for grad in run(plan_of(variant, q, k, v, causal=True), q, k, v, dout))


OFFSETS = """
#include "backward_common.cuh"
#include "forward_stream.cuh"

using namespace multiattn;

struct Dense {
  using Blocked = NoBlockMask;
  using Params = ForwardParams;
};

// In elements from the start: of the sum of dq, of delta, of the forward's lse.
extern "C" void offsets(int head, int seq_q, int first_query, long long* out) {
  static float start[1];
  BackwardParams backward{};
  backward.dq_sum = backward.delta = start;
  backward.seq_q = seq_q;
  out[0] = DqSum<16, true>::rows(backward, head, first_query) - start;
  out[1] = QuerySequence<NoSequence>{backward, head, {}}.delta() - start;
  ForwardParams forward{};
  forward.lse = start;
  forward.seq_q = seq_q;
  forward.heads_q = 1;
  out[2] = HeadTensors<Dense>{forward, Work<Dense>{head, 0, 0, 0, {}}}.lse() - start;
}
"""


@on_cpu
def test_sums_and_statistics_past_2_to_31_elements():
    """No workspace of that size can be filled here, so that the addresses are asked for themselves."""
    head, seq_q, first_query = 70_000, 65_520, 48
    found = (ctypes.c_longlong * 3)()
    host.load(host.build_source(OFFSETS)).offsets(head, seq_q, first_query, found)
    assert list(found) == [(head * seq_q + first_query) * 256, head * seq_q, head * seq_q]


# ---------------------------------------------------------------- configs


@on_cpu
@pytest.mark.parametrize("variant", ["atomic", "two_pass"])
def test_no_ldmatrix_has_a_bank_conflict(variant):
    q, k, v, dout = make_tensors(head_dim=128)
    plan = plan_of(variant, q, k, v, causal=True)
    launcher = CpuLauncher(plan)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
    launcher(Operands(q, k, v, out, lse, dout, None, *map(torch.empty_like, (q, k, v))))
    assert set(launcher.counts) == {kernel.name for kernel in kernels_of(plan)}
    assert sum(counts.ldmatrix for counts in launcher.counts.values()) > 0
    assert all(counts.bank_conflicts == 0 for counts in launcher.counts.values())
