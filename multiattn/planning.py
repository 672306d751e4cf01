"""From arguments to what launches: which backend and variant (`choose`), and what like calls share (`get_forward`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from multiattn import backend as registry
from multiattn.arch import Arch, detect
from multiattn.backend import BACKENDS, REFERENCE, Direction, Launcher, Plan, make_plan
from multiattn.log import logged
from multiattn.preference import preferred_order
from multiattn.problem import VECTOR_BYTES, Operands, Problem, strides_like
from multiattn.run import compat
from multiattn.support import Reason, Unsupported

FORWARD: tuple[Direction, ...] = ("forward",)
BACKWARD: tuple[Direction, ...] = ("backward",)
BOTH: tuple[Direction, ...] = ("forward", "backward")


# ---------------------------------------------------------------- choice


def choose(
    problem: Problem,
    arch: Arch,
    backend: str,
    variant: str | None,
    *,
    directions: tuple[Direction, ...] = FORWARD,
    deterministic: bool = False,
    probe: bool = True,
) -> tuple[Plan, ...]:
    """A Plan per direction, of one backend that can run all of them; `Unsupported` with every reason if there is none.

    `variant` is one of the first direction. ``"auto"`` follows the recorded measurements of the first direction too.
    """
    check_names(backend, variant)
    if backend != "auto":
        try:
            return _plan(backend, problem, arch, directions, deterministic, probe, variant)
        except Unsupported as error:
            raise _with_alternatives(error, directions, deterministic, probe) from None
    if variant is not None:
        raise ValueError(f"variant={variant!r} needs a named backend; got backend='auto'")
    if not arch.is_gpu:
        return _plan(REFERENCE, problem, arch, directions, deterministic, probe)
    reasons: list[Reason] = []
    for name, why in preferred_order(problem, arch, directions[0]):
        try:
            first, *others = _plan(name, problem, arch, directions, deterministic, probe)
        except Unsupported as error:
            reasons += error.reasons
            continue
        return (first.because(why), *others)
    raise Unsupported(
        backend="auto",
        arch=arch,
        problem=problem,
        reasons=dict.fromkeys(reasons),
        alternatives=(REFERENCE,),
        direction=" and ".join(directions),
    )


def check_names(backend: str, variant: str | None) -> None:
    """TypeError for a backend or a variant that is not even a string."""
    for name, value in (("backend", backend), ("variant", variant)):
        if not isinstance(value, str) and not (name == "variant" and value is None):
            raise TypeError(f"{name} must be a string; got {type(value).__name__}")


def is_deterministic(deterministic: bool | None) -> bool:
    """Whether only deterministic variants may run: as asked, or None: as PyTorch is told for all of its own."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool or None; got {type(deterministic).__name__}")
    return deterministic


def _plan(
    backend: str,
    problem: Problem,
    arch: Arch,
    directions: tuple[Direction, ...],
    deterministic: bool,
    probe: bool,
    variant: str | None = None,
) -> tuple[Plan, ...]:
    plans: list[Plan] = []
    reasons: list[Reason] = []
    refused: list[Direction] = []
    for direction in directions:
        named = variant if direction == directions[0] else None
        try:
            plan = make_plan(
                registry.get(backend),
                problem,
                arch,
                direction=direction,
                variant=named,
                deterministic=deterministic,
                probe=probe,
            )
        except Unsupported as error:
            reasons += error.reasons
            refused.append(direction)
        else:
            plans.append(plan)
    if refused:
        raise Unsupported(
            backend=backend,
            arch=arch,
            problem=problem,
            reasons=dict.fromkeys(reasons),
            direction=" and ".join(refused),
        )
    return tuple(plans)


def _with_alternatives(
    error: Unsupported, directions: tuple[Direction, ...], deterministic: bool, probe: bool
) -> Unsupported:
    able = []
    for name in (*BACKENDS, REFERENCE):
        if name == error.backend:
            continue
        try:
            plans = _plan(name, error.problem, error.arch, directions, deterministic, probe)
        except Unsupported:
            continue
        variants = dict.fromkeys(plan.variant for plan in plans)
        able.append(f"{name} (variant {', '.join(variants)})")
    return Unsupported(
        backend=error.backend,
        arch=error.arch,
        problem=error.problem,
        reasons=error.reasons,
        alternatives=able,
        direction=error.direction,
    )


# ---------------------------------------------------------------- what like calls share

_CallKey = tuple[object, ...]
_LIMIT = 4096  # distinct call signatures kept; a serving loop with ever-changing lengths must not grow for ever
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Ready:
    """A forward call planned and prepared, with what its results look like."""

    plan: Plan
    launch: Launcher
    out_shape: tuple[int, ...]
    out_strides: tuple[int, int, int, int]
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class ReadyBackward:
    """A backward call planned, with what its results look like; prepared by the first launch.

    That is when a kernel may be compiled: a forward whose gradient nobody asks for does not pay for it.
    """

    plan: Plan
    dq_strides: tuple[int, int, int, int]
    dk_strides: tuple[int, int, int, int]
    dv_strides: tuple[int, int, int, int]
    lse_strides: tuple[int, int, int]
    device: torch.device
    prepared: Launcher | None = None

    @property
    def launch(self) -> Launcher:
        """The launcher. Two threads may both prepare the first time; either result will do."""
        if self.prepared is None:
            self.prepared = prepare_backward(self.plan, self.device)
        return self.prepared


class _Calls(Generic[R]):
    """What earlier calls made ready, found again by all that a Plan depends on and that two calls can share.

    Asking three tensors for all of that takes a host 2 us. So the last call of each pair of shapes and options leaves
    a guard, which looks at the tensors in one step, in half of the time; who passes it, and is as aligned, is such a
    call again. The others are asked.
    """

    def __init__(self) -> None:
        self.ready: dict[_CallKey, R] = {}
        self._latest: dict[_CallKey, tuple[Callable[..., bool], int, R]] = {}

    def find(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        scale: float | None,
        backend: str,
        variant: str | None,
        deterministic: bool,
        other: bool,
    ) -> tuple[_CallKey, R | None]:
        """What an earlier such call made ready, behind the key to keep it under where there is nothing yet.

        The types are part of the key because ``True == 1 == 1.0``: only what was validated may hit.
        """
        try:
            brief = (
                q.shape, k.shape, causal, type(causal), scale, type(scale), backend, variant, deterministic, other,
            )  # fmt: skip
            offset = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & (VECTOR_BYTES - 1)
            latest = self._latest.get(brief)
            if latest is not None:
                are_alike, its_offset, ready = latest
                if offset == its_offset and are_alike(q, k, v):
                    return brief, ready
            key = (
                *brief, v.shape, offset, q.is_neg() or k.is_neg() or v.is_neg(),
                q.stride(), q.dtype, q.device, k.stride(), k.dtype, k.device, v.stride(), v.dtype, v.device,
            )  # fmt: skip
            known = self.ready.get(key)
        except (AttributeError, RuntimeError, TypeError):
            # Say in our words what is wrong, of whichever argument; else the error is not about the arguments.
            Problem.of(q, k, v, causal=causal, scale=scale)
            check_names(backend, variant)
            raise
        if known is not None and (guard := compat.tensor_guard(q, k, v)) is not None:
            self._latest[brief] = (guard, offset, known)
        return key, known

    def keep(self, key: _CallKey, ready: R) -> None:
        """Let calls of the key that `find` gave find `ready`."""
        if len(self.ready) >= _LIMIT:
            self.clear()
        self.ready[key] = ready

    def clear(self) -> None:
        """Forget all."""
        self._latest.clear()
        self.ready.clear()


_forward: _Calls[Ready] = _Calls()
_backward: _Calls[ReadyBackward] = _Calls()


def get_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    backend: str,
    variant: str | None,
    deterministic: bool,
    needs_grad: bool,
) -> Ready:
    """The forward of a call, ready to launch. With `needs_grad` its backward has a Plan too, or the call is refused."""
    key, ready = _forward.find(q, k, v, causal, scale, backend, variant, deterministic, needs_grad)
    if ready is None:
        problem = Problem.of(q, k, v, causal=causal, scale=scale)
        directions = BOTH if needs_grad else FORWARD
        plan, *backwards = choose(
            problem, detect(q.device), backend, variant, directions=directions, deterministic=deterministic
        )
        ready = _ready_forward(plan, q)
        for backward in backwards:  # what `get_backward` will be asked for by this call's gradient
            own, known = _backward.find(q, k, v, causal, scale, plan.backend, None, deterministic, False)
            if known is None:
                _backward.keep(own, _ready_backward(backward, q, k, v))
        _forward.keep(key, ready)
    return ready


def get_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    backend: str,
    variant: str | None,
    deterministic: bool,
    after_forward: bool = False,
) -> ReadyBackward:
    """The backward of a call, ready to launch. ``"auto"`` is the backend of the forward with `after_forward`."""
    key, ready = _backward.find(q, k, v, causal, scale, backend, variant, deterministic, after_forward)
    if ready is None:
        problem = Problem.of(q, k, v, causal=causal, scale=scale)
        directions = BOTH if after_forward and backend == "auto" else BACKWARD
        *_, plan = choose(
            problem, detect(q.device), backend, variant, directions=directions, deterministic=deterministic
        )
        ready = _ready_backward(plan, q, k, v)
        _backward.keep(key, ready)
    return ready


def _ready_forward(plan: Plan, q: torch.Tensor) -> Ready:
    _, heads, seq, _ = q.shape
    row = max(seq, 1)
    return Ready(
        plan=plan,
        launch=prepare(plan, q.device),
        out_shape=tuple(q.shape),
        out_strides=(*plan.problem.strides_out, 1),
        lse_shape=tuple(q.shape[:3]),
        lse_strides=(heads * row, row, 1),
        dtype=q.dtype,
        device=q.device,
    )


def _ready_backward(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ReadyBackward:
    _, heads, seq, _ = q.shape
    return ReadyBackward(
        plan=plan,
        dq_strides=strides_like(q),
        dk_strides=strides_like(k),
        dv_strides=strides_like(v),
        lse_strides=(heads * seq, seq, 1),
        device=q.device,
    )


# ---------------------------------------------------------------- launchers


def prepare(plan: Plan, device: torch.device) -> Launcher:
    """The launcher of a forward Plan, made with the tensors' device current; no kernel is asked for no work."""
    if plan.problem.is_empty:
        return _launch_nothing
    if plan.problem.seq_kv == 0:
        return _fill_empty_rows
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return logged(plan, registry.get(plan.backend).forward.prepare(plan))


def prepare_backward(plan: Plan, device: torch.device) -> Launcher:
    """The launcher of a backward Plan, as `prepare`."""
    if plan.problem.is_empty or plan.problem.seq_kv == 0:
        return _zero_gradients
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return logged(plan, registry.get(plan.backend).backward.prepare(plan))


def _launch_nothing(operands: Operands) -> None:
    """Launcher of a problem without queries."""


def _fill_empty_rows(operands: Operands) -> None:
    """Launcher of a problem without keys: every row is empty."""
    assert operands.out is not None
    assert operands.lse is not None
    operands.out.zero_()
    operands.lse.fill_(-math.inf)


def _zero_gradients(operands: Operands) -> None:
    """Launcher of a backward without queries or without keys: nothing depends on anything."""
    for gradient in (operands.dq, operands.dk, operands.dv):
        assert gradient is not None
        gradient.zero_()
