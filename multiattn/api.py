"""The public calls: `fmha`, `explain`, `backends`. Orchestration only; what is decided is decided elsewhere."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, overload

import torch

from multiattn import backend as registry
from multiattn.arch import Arch, detect
from multiattn.arch import by_name as arch_by_name
from multiattn.backend import BACKENDS, REFERENCE, Launcher, Plan, make_plan
from multiattn.preference import preferred_order
from multiattn.problem import VECTOR_BYTES, Problem
from multiattn.support import Reason, Unsupported
from multiattn.toolchain import probe_gpu

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
    if _needs_grad(q, k, v):
        _refuse_grad(q, k, v, causal=causal, scale=scale, backend=backend, variant=variant)
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

    For tests, benchmarks and tuning: the plan may carry a config of their choice. out has the shape, dtype and device
    of q and the strides `plan.problem.strides_out`, lse is fp32 ``[B, Hq, Sq]`` and contiguous; both start at a
    multiple of 16 bytes. TypeError or ValueError for anything else, with what came and what is accepted.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan; got {type(plan).__name__}")
    problem = Problem.of(q, k, v, causal=plan.problem.causal, scale=plan.problem.scale)
    if problem != plan.problem:
        raise ValueError(f"the tensors are not those of the plan: got {problem}; the plan is for {plan.problem}")
    if (arch := detect(q.device)) != plan.arch:
        raise ValueError(f"the plan is for {plan.arch.name}; got tensors on {q.device}, which is {arch.name}")
    shape = tuple(q.shape)
    _check_output("out", out, shape, (*problem.strides_out, 1), q.dtype, q.device)
    _check_output("lse", lse, shape[:3], (shape[1] * shape[2], shape[2], 1), torch.float32, q.device)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        _prepare(plan, q.device)(q, k, v, out, lse)


def _check_output(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    walked = [index for index, size in enumerate(tensor.shape) if size > 1]
    is_alike = (tuple(tensor.shape), tensor.dtype, tensor.device) == (shape, dtype, device)
    is_laid_out = all(tensor.stride(index) == strides[index] for index in walked)
    is_aligned = tensor.data_ptr() % VECTOR_BYTES == 0
    if not (is_alike and (tensor.numel() == 0 or (is_laid_out and is_aligned))):
        raise ValueError(
            f"{name}: got {tuple(tensor.shape)} with strides {tuple(tensor.stride())}, {tensor.dtype} on "
            f"{tensor.device}, address {tensor.data_ptr():#x}; allowed {shape} with strides {strides}, {dtype} on "
            f"{device}, address a multiple of {VECTOR_BYTES}"
        )


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

    A problem without queries or without keys has a Plan like any other, but its launch is no kernel: there is nothing
    to do, or every row is empty.

    Args:
        q, k, v: as for `fmha`; or one `Problem` in place of all three, with `arch`.
        causal, scale, backend, variant: as for `fmha` (a Problem carries its own causal and scale).
        arch: explain for this arch (``"sm80"``) instead of the tensors' device. Then only the data is asked, not
            whether this machine has such a GPU.
    """
    if isinstance(q, Problem):
        if arch is None:
            raise ValueError("explain(Problem) needs arch=, as there is no tensor whose device would tell it")
        if k is not None or v is not None or causal or scale is not None:
            raise TypeError("explain(Problem) takes no k, v, causal or scale: the Problem has its own")
        return _plan_or_reasons(q, arch_by_name(arch), backend, variant, probe=False)
    if k is None or v is None:
        raise TypeError("explain needs q, k and v, or one Problem")
    problem = Problem.of(q, k, v, causal=causal, scale=scale)
    target = detect(q.device) if arch is None else arch_by_name(arch)
    plan = _plan_or_reasons(problem, target, backend, variant, probe=arch is None)
    if not _needs_grad(q, k, v):
        return plan
    return (_BACKWARD,) if isinstance(plan, Plan) else (*plan, _BACKWARD)


def backends(device: torch.device | str | None = None) -> Mapping[str, tuple[Reason, ...]]:
    """Every backend and what this machine lacks to run it on `device`: no reason, no lack.

    `device` None is the current GPU where there is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device}; allowed cpu and cuda")
    if device.type == "cuda" and (reasons := probe_gpu()):
        return dict.fromkeys(BACKENDS, reasons)
    target = detect(device)
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
            q.is_neg() or k.is_neg() or v.is_neg(),
            causal, type(causal), scale, type(scale), backend, variant,
        )  # fmt: skip
        return key, _ready.get(key)
    except (AttributeError, RuntimeError, TypeError):
        # Say in our words what is wrong, of whichever argument; else the error is not about the arguments.
        Problem.of(q, k, v, causal=causal, scale=scale)
        _check_names(backend, variant)
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


def _check_names(backend: str, variant: str | None) -> None:
    for name, value in (("backend", backend), ("variant", variant)):
        if not isinstance(value, str) and not (name == "variant" and value is None):
            raise TypeError(f"{name} must be a string; got {type(value).__name__}")


def _choose(problem: Problem, arch: Arch, backend: str, variant: str | None, *, probe: bool) -> Plan:
    _check_names(backend, variant)
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


def _needs_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _refuse_grad(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    backend: str,
    variant: str | None,
) -> NoReturn:
    problem, arch = Problem.of(q, k, v, causal=causal, scale=scale), detect(q.device)
    plan = _plan_or_reasons(problem, arch, backend, variant, probe=True)
    reasons = () if isinstance(plan, Plan) else plan
    raise Unsupported(backend=backend, arch=arch, problem=problem, reasons=(*reasons, _BACKWARD))


def _plan_or_reasons(
    problem: Problem, arch: Arch, backend: str, variant: str | None, *, probe: bool
) -> Plan | tuple[Reason, ...]:
    try:
        return _choose(problem, arch, backend, variant, probe=probe)
    except Unsupported as error:
        return error.reasons


def _launch_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launcher of a problem without queries."""


def _fill_empty_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launcher of a problem without keys: every row is empty."""
    out.zero_()
    lse.fill_(-math.inf)
