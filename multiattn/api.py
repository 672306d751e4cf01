"""The public calls: `fmha`, `explain`, `backends`. Orchestration only; what is decided is decided elsewhere."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, overload

import torch

from multiattn import backend as registry
from multiattn.arch import Arch, detect
from multiattn.arch import by_name as arch_by_name
from multiattn.backend import BACKENDS, REFERENCE, Launcher, Plan, make_plan
from multiattn.preference import preferred_order
from multiattn.problem import VECTOR_BYTES, Problem
from multiattn.support import Reason, Unsupported

_CallKey = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Ready:
    plan: Plan
    launch: Launcher
    out_strides: tuple[int, int, int, int]


_ready: dict[_CallKey, _Ready] = {}
_BACKWARD = Reason(
    code="backward",
    got="an input that requires grad",
    allowed="inputs without grad: backward is not there yet",
    hint="call under torch.no_grad(), or detach; multiattn.reference is differentiable",
)
_READY_LIMIT = 4096  # distinct call signatures kept; a serving loop with ever-changing lengths must not grow for ever


@overload
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    backend: str = ...,
    variant: str | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    backend: str = ...,
    variant: str | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def fmha(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    variant: str | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Fused multi-head attention, forward: ``softmax(scale * q @ k^T + mask) @ v``.

    Args:
        q: ``[B, Hq, Sq, D]``, fp16 or bf16, any strides with unit stride on D.
        k: ``[B, Hkv, Skv, D]`` with ``Hq % Hkv == 0`` (GQA, MQA); dtype and device of q.
        v: like k.
        causal: bottom-right aligned: key j is visible to query i when ``j <= i + Skv - Sq``.
        scale: finite, may be zero or negative; None is ``1/sqrt(D)``.
        backend: one of `backends()`, ``"reference"``, or ``"auto"``: the fastest by recorded measurements on a GPU,
            the reference on CPU tensors. A named backend runs or raises; nothing falls back. On CPU tensors a named
            backend runs its kernel source on the CPU: exact, and slow.
        variant: a variant of that backend; None is its best that can run the problem.
        return_lse: also return the log-sum-exp.

    Returns:
        out, dtype of q, ``[B, Hq, Sq, D]`` (in memory ``[B, S, H, D]`` where q is); with `return_lse` also lse, fp32
        ``[B, Hq, Sq]``: the natural log of the sum of exp of scaled scores. A row that sees no key has ``out = 0``
        and ``lse = -inf``.

    Raises:
        TypeError, ValueError: an input that is wrong for every backend.
        Unsupported: the backend cannot run this problem here; `.reasons` says why. Also for an input that
            requires grad: backward is not there yet.

    The launch goes to the current stream of the tensors' device, without synchronising. Source of the algorithm:
    Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm 1.
    """
    key, ready = _look_up(q, k, v, causal, scale, backend, variant)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise _no_backward(q, k, v, causal, scale, backend)
    if ready is None:
        ready = _get_ready(q, k, v, causal=causal, scale=scale, backend=backend, variant=variant)
        if len(_ready) >= _READY_LIMIT:
            _ready.clear()
        _ready[key] = ready
    out = torch.empty_strided(q.shape, ready.out_strides, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            ready.launch(q, k, v, out, lse)
    else:
        ready.launch(q, k, v, out, lse)
    return (out, lse) if return_lse else out


def launch(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launch exactly `plan` on tensors that its Problem describes, into out and lse given by the caller.

    For tests, benchmarks and tuning: the plan may carry a config or an arch of their choice. ValueError if the
    tensors are not those of the plan.
    """
    problem = Problem.of(q, k, v, causal=plan.problem.causal, scale=plan.problem.scale)
    if problem != plan.problem:
        raise ValueError(f"the tensors are not those of the plan: got {problem}; the plan is for {plan.problem}")
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        _prepare(plan, q.device)(q, k, v, out, lse)


def explain(
    q: torch.Tensor | Problem,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    variant: str | None = None,
    arch: str | None = None,
) -> Plan | tuple[Reason, ...]:
    """The Plan that `fmha` would launch for these arguments, or every reason why it would refuse.

    Args:
        q, k, v: as for `fmha`; or one `Problem` in place of all three, with `arch`.
        causal, scale, backend, variant: as for `fmha` (a Problem carries its own causal and scale).
        arch: explain for this arch (``"sm80"``) instead of the tensors' device. Then only the data is asked, not
            whether this machine has such a GPU.
    """
    if isinstance(q, Problem):
        if arch is None:
            raise ValueError("explain(Problem) needs arch=, as there is no tensor whose device would tell it")
        problem = q
    else:
        if k is None or v is None:
            raise TypeError("explain needs q, k and v, or one Problem")
        problem = Problem.of(q, k, v, causal=causal, scale=scale)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
            return (_BACKWARD,)
    target = arch_by_name(arch) if arch is not None else detect(_device(q))
    try:
        return _choose(problem, target, backend, variant, probe=arch is None)
    except Unsupported as error:
        return error.reasons


def backends(device: torch.device | str | None = None) -> Mapping[str, tuple[Reason, ...]]:
    """Every backend and what this machine lacks to run it on `device`: no reason, no lack.

    `device` None is the current GPU where there is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = detect(torch.device(device))
    return {name: registry.get(name).probe(target) for name in BACKENDS}


def _look_up(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    backend: str,
    variant: str | None,
) -> tuple[_CallKey, _Ready | None]:
    """What a Plan depends on that two calls can share, and what an earlier such call made ready.

    The types are part of the key because ``True == 1 == 1.0``: only what was validated may hit.
    """
    try:
        key = (
            q.shape, q.stride(), q.dtype, q.device,
            k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device,
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & (VECTOR_BYTES - 1),
            causal, type(causal), scale, type(scale), backend, variant,
        )  # fmt: skip
        return key, _ready.get(key)
    except (AttributeError, RuntimeError, TypeError):
        Problem.of(q, k, v, causal=causal, scale=scale)  # raises what is wrong with them, in our words
        raise


def _get_ready(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    backend: str,
    variant: str | None,
) -> _Ready:
    problem = Problem.of(q, k, v, causal=causal, scale=scale)
    plan = _choose(problem, detect(q.device), backend, variant, probe=True)
    return _Ready(plan, _prepare(plan, q.device), (*problem.strides_out, 1))


def _prepare(plan: Plan, device: torch.device) -> Launcher:
    """The launcher of a Plan, made with the tensors' device current; none of the kernels is asked for no work."""
    if plan.problem.is_empty:
        return _launch_nothing
    if plan.problem.seq_kv == 0:
        return _fill_empty_rows
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return registry.get(plan.backend).forward.prepare(plan)


def _choose(problem: Problem, arch: Arch, backend: str, variant: str | None, *, probe: bool) -> Plan:
    if backend != "auto":
        try:
            return make_plan(registry.get(backend), problem, arch, variant=variant, probe=probe)
        except Unsupported as error:
            raise _with_alternatives(error, probe=probe) from None
    if variant is not None:
        raise ValueError(f"variant={variant!r} needs a named backend; got backend='auto'")
    if not arch.is_gpu:
        return make_plan(registry.get(REFERENCE), problem, arch, probe=probe)
    reasons: list[Reason] = []
    for name, why in preferred_order(problem, arch):
        try:
            plan = make_plan(registry.get(name), problem, arch, probe=probe)
        except Unsupported as error:
            reasons += error.reasons
            continue
        return plan.because(why)
    raise Unsupported(
        backend="auto", arch=arch, problem=problem, reasons=dict.fromkeys(reasons), alternatives=(REFERENCE,)
    )


def _with_alternatives(error: Unsupported, *, probe: bool) -> Unsupported:
    able = []
    for name in (*BACKENDS, REFERENCE):
        if name == error.backend:
            continue
        try:
            plan = make_plan(registry.get(name), error.problem, error.arch, probe=probe)
        except Unsupported:
            continue
        able.append(f"{name} (variant {plan.variant})")
    return Unsupported(
        backend=error.backend, arch=error.arch, problem=error.problem, reasons=error.reasons, alternatives=able
    )


def _no_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, backend: str
) -> Unsupported:
    problem = Problem.of(q, k, v, causal=causal, scale=scale)
    return Unsupported(backend=backend, arch=detect(q.device), problem=problem, reasons=(_BACKWARD,))


def _launch_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launcher of a problem without queries."""


def _fill_empty_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launcher of a problem without keys: every row is empty."""
    out.zero_()
    lse.fill_(-math.inf)


def _device(tensor: torch.Tensor | Problem) -> torch.device:
    assert isinstance(tensor, torch.Tensor)
    return tensor.device
