"""The semantics of attention, eager: any device, any dtype in, any compute dtype. Truth for tests, not for speed."""

from __future__ import annotations

import math

import torch
from einops import rearrange, repeat

from multiattn.arch import ARCHS, Arch
from multiattn.backend import REFERENCE, Backend, Compiled, Launcher, Op, Plan, Variant
from multiattn.problem import Problem
from multiattn.support import Capability, Reason


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as the contract defines it, in plain differentiable PyTorch.

    ``out = softmax(scale * q @ k^T + mask) @ v`` and ``lse = log(sum(exp(scale * q @ k^T + mask)))``, natural log.

    Args:
        q: ``[B, Hq, Sq, D]``, floating point.
        k: ``[B, Hkv, Skv, D]``, with ``Hq % Hkv == 0``.
        v: like k.
        causal: bottom-right aligned: key j is visible to query i when ``j <= i + Skv - Sq``.
        scale: finite; None is ``1/sqrt(D)``.
        compute_dtype: of every intermediate, and of both results: float64 for truth, the inputs' own dtype for the
            rounding that a naive implementation commits.

    Returns:
        out ``[B, Hq, Sq, D]`` and lse ``[B, Hq, Sq]``. A row that sees no key has ``out = 0`` and ``lse = -inf``.
        Only what is visible counts: a NaN or inf in a masked key's row of k or v reaches nothing.

    Raises:
        TypeError, ValueError: as `multiattn.fmha`.
    """
    problem = Problem.of(q, k, v, causal=causal, scale=scale)
    q, k, v = (tensor.to(compute_dtype) for tensor in (q, k, v))
    k, v = (repeat(tensor, "b h s d -> b (h group) s d", group=problem.group) for tensor in (k, v))

    visible = visible_pairs(problem, q.device)  # [Sq, Skv]
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * problem.scale
    scores = scores.masked_fill(~visible, -math.inf)

    if problem.seq_kv == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf)
    row_max = scores.amax(dim=-1, keepdim=True).detach()
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)  # an empty row must not compute inf - inf
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(dim=-1, keepdim=True)
    weights = weights / row_sum.masked_fill(row_sum == 0.0, 1.0)
    lse = rearrange(row_max + torch.log(row_sum), "b h i 1 -> b h i")
    return _weighted_sum(weights, v, visible), lse


def visible_pairs(problem: Problem, device: torch.device) -> torch.Tensor:
    """Which keys each query sees: bool ``[Sq, Skv]``. The one definition of the mask outside the kernels."""
    if not problem.causal:
        return torch.ones(problem.seq_q, problem.seq_kv, dtype=torch.bool, device=device)
    query = torch.arange(problem.seq_q, device=device)[:, None]
    key = torch.arange(problem.seq_kv, device=device)[None, :]
    return key <= query + problem.causal_offset


def _weighted_sum(weights: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``weights @ v`` in which a masked key contributes nothing, where IEEE has ``0 * nan = 0 * inf = nan``."""
    finite = torch.isfinite(v)
    if bool(finite.all()):
        return weights @ v
    out = weights @ v.masked_fill(~finite, 0.0)
    seen = visible.to(v.dtype).expand_as(weights)
    for value in (math.inf, -math.inf, math.nan):
        hit = v.isnan() if math.isnan(value) else v == value
        reached = seen @ hit.to(v.dtype) > 0
        out = out + torch.zeros_like(out).masked_fill(reached, value)
    return out


def _prepare(plan: Plan) -> Launcher:
    problem = plan.problem

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        compute_dtype = torch.float64 if problem.dtype == "fp64" else torch.float32
        result = reference(q, k, v, causal=problem.causal, scale=problem.scale, compute_dtype=compute_dtype)
        out.copy_(result[0])
        lse.copy_(result[1])

    return launch


def _compile(plan: Plan) -> Compiled:
    raise NotImplementedError("the reference is eager PyTorch: there is nothing to compile")


def _probe(arch: Arch) -> tuple[Reason, ...]:
    return ()


def _probe_compiler() -> tuple[Reason, ...]:
    return (Reason(code="compiler", got=REFERENCE, allowed="a backend with kernels"),)


BACKEND = Backend(
    name=REFERENCE,
    summary="eager PyTorch, for truth",
    probe=_probe,
    probe_compiler=_probe_compiler,
    versions=lambda: {"torch": torch.__version__},
    forward=Op(
        variants=(
            Variant(
                name="eager",
                summary="the semantics in fp32, O(Sq * Skv) memory",
                capability=Capability(
                    arches=tuple(ARCHS),
                    dtypes=("fp16", "bf16", "fp32", "fp64"),
                    head_dim_multiple=1,
                    head_dim_max=1 << 16,
                ),
                rules=(),
            ),
        ),
        prepare=_prepare,
        compile=_compile,
    ),
)
