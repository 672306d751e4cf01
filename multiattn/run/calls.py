"""Calls made ready to launch, and what like calls share (`get_forward`, `get_backward`)."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from multiattn.layout import VECTOR_BYTES
from multiattn.operands import GRADIENTS, Operands, Options
from multiattn.plan import backend as registry
from multiattn.plan.arch import CPU, detect
from multiattn.plan.backend import DIRECTIONS, REFERENCE, Direction, Launcher, Plan
from multiattn.plan.choice import choose
from multiattn.problem import problem_of
from multiattn.run import compat
from multiattn.run.ahead import Ahead, following
from multiattn.run.cpu_only import tell_cpu_only
from multiattn.run.log import logged
from multiattn.run.tuning import tell_unmeasured, tuning_for
from multiattn.sequences import rows_of_sequences

_CallKey = tuple[object, ...]
_LIMIT = 4096  # distinct call signatures kept; a serving loop with ever-changing lengths must not grow for ever


class Ready:
    """One direction of a call, planned, with what its results look like; the first launch prepares it.

    That is when a kernel may be compiled. A forward whose gradient nobody asks for does not pay for the backward's; one
    that autograd records has them compiled by a thread (`run.ahead`).
    """

    __slots__ = ("_ahead", "_guards", "_sums", "allocate", "device", "gradient", "launch", "options", "plan")

    def __init__(self, plan: Plan, options: Options, device: torch.device, gradient: Ready | None = None) -> None:
        self.plan = plan
        self.options = options
        self.device = device
        self.gradient = gradient
        """The backward of a forward that autograd records."""
        layouts = plan.problem.layouts
        written = plan.problem.forward_results if plan.direction == "forward" else GRADIENTS
        if plan.direction == "backward" and plan.problem.has_sinks:
            written = (*written, "delta")
        self.allocate = compat.allocator([layouts[name] for name in written], device)
        """Makes what a launch writes."""
        score = plan.problem.score if plan.direction == "backward" else None
        self._sums = () if score is None else tuple(score.gradient_layouts.values())
        self.launch: Launcher = self._prepare
        self._ahead: Ahead | None = None
        self._guards: dict[int, compat.Guard] = {}

    def allocate_zeros(self) -> tuple[torch.Tensor, ...]:
        """The sums of gradients of captured tensors."""
        return tuple(torch.zeros(it.shape, dtype=it.dtype, device=self.device) for it in self._sums)

    def _prepare(self, operands: Operands) -> None:
        """The first launch. Two threads may both prepare; either result will do."""
        if self._ahead is not None:
            self._ahead.wait()
        with following(None if self.gradient is None else self.gradient.compile_ahead()):
            self.launch = prepare(self.plan, self.device)
        self.launch(operands)

    def compile_ahead(self) -> Ahead | None:
        """The compilation for the first launch, for a thread to do before it; None where there is none."""
        if self._ahead is None and self.device.type == "cuda" and not _launches_nothing(self.plan):
            compile_plan = registry.get(self.plan.backend).op(self.plan.direction).compile_ahead
            self._ahead = None if compile_plan is None else Ahead(functools.partial(compile_plan, self.plan))
        return self._ahead

    def fits(self, read: Sequence[Any]) -> bool:
        """True if a backward may read these tensors as they are, and nobody watches or transforms this call.

        They are like tensors that it read before; all but dlse, the last, must be there.
        """
        given = read if read[-1] is not None else read[:-1]
        are_alike = self._guards.get(len(given))
        if are_alike is None or not are_alike(*given) or compat.dispatch_modes() or compat.in_forward_mode():
            return False
        return _are_aligned(given)

    def remember(self, read: Sequence[Any]) -> None:
        """Let `fits` tell tensors like these, which a backward may read as they are."""
        if self.fits(read):  # a guard costs more to make than to ask
            return
        given = read if read[-1] is not None else read[:-1]
        if _are_aligned(given) and (guard := compat.tensor_guard(*given)) is not None:
            self._guards[len(given)] = guard


class _Calls:
    """Earlier calls that were made ready, found again by all that a Plan depends on.

    Asking three tensors for all of that takes a host 2 us. So the last call of each pair of shapes and options leaves
    a guard, which looks at the tensors in one step, in half of the time. A call that passes it, and is as aligned, is
    such a call again. The others are asked. Where k and v start is one of the options: v may be in k.
    """

    def __init__(self) -> None:
        self.ready: dict[_CallKey, Ready] = {}
        self._latest: dict[_CallKey, tuple[compat.Guard, int, Ready]] = {}

    def find(self, operands: Operands, options: Options, needs_grad: bool = False) -> Ready | _CallKey:
        """The `Ready` of an earlier such call, or the key to keep a new one under."""
        inputs = operands.inputs
        q, k, v = operands.qkv
        try:
            at_k, at_v = k.data_ptr(), v.data_ptr()
            brief = (q.shape, k.shape, options, needs_grad, len(inputs), at_k == at_v)  # the last for `v_in_k`
            offset = (q.data_ptr() | at_k | at_v) & (VECTOR_BYTES - 1)
            latest = self._latest.get(brief)
            if latest is not None:
                are_alike, its_offset, ready = latest
                if offset == its_offset and are_alike(*inputs):
                    return ready
            key = (*brief, offset, *map(_metadata, inputs))
            known = self.ready.get(key)
        except (AttributeError, RuntimeError, TypeError):
            problem_of(operands, options)  # say in our words what is wrong; else the error is not about the arguments
            raise
        if known is None:
            return key
        if (guard := compat.tensor_guard(*inputs)) is not None:
            self._latest[brief] = (guard, offset, known)
        return known

    def keep(self, key: _CallKey, ready: Ready) -> Ready:
        """Let calls of the key that `find` gave find `ready`."""
        if len(self.ready) >= _LIMIT:
            self.clear()
        self.ready[key] = ready
        return ready

    def clear(self) -> None:
        """Forget all."""
        self._latest.clear()
        self.ready.clear()


def _are_aligned(tensors: Sequence[torch.Tensor]) -> bool:
    """True if all start at a multiple of the widest access."""
    return not functools.reduce(operator.or_, map(compat.data_ptr, tensors)) & (VECTOR_BYTES - 1)


def _metadata(tensor: torch.Tensor) -> _CallKey:
    """All that a Plan depends on of one tensor, but for its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg()


_forward, _backward = _Calls(), _Calls()


def get_forward(operands: Operands, options: Options, needs_grad: bool = False) -> Ready:
    """The forward of a call, ready to launch. With `needs_grad` it has its `gradient` too, or the call is refused."""
    found = _forward.find(operands, options, needs_grad)
    if isinstance(found, Ready):
        return found
    device = operands.q.device
    plan, *backward = _choose(operands, options, *DIRECTIONS[: 1 + needs_grad])
    gradient = get_backward(operands, options.of_gradient, *backward) if needs_grad else None
    return _forward.keep(found, Ready(plan, options, device, gradient))


def get_backward(operands: Operands, options: Options, plan: Plan | None = None) -> Ready:
    """The backward of a call, ready to launch; `options.variant` is one of the backward's, `plan` what was chosen."""
    found = _backward.find(operands, options)
    if isinstance(found, Ready):
        return found
    device = operands.q.device
    if plan is None:
        (plan,) = _choose(operands, options, "backward")
    return _backward.keep(found, Ready(plan, options, device))


def _choose(operands: Operands, options: Options, *directions: Direction) -> tuple[Plan, ...]:
    """`choose` for the tensors' device. On ``meta`` nothing is launched, and results look the same of any backend."""
    problem, device = problem_of(operands, options), operands.q.device
    if device.type == "meta":
        return choose(problem, CPU, options._replace(backend=REFERENCE, variant=None), *directions)
    arch = detect(device)
    tell_unmeasured(device, arch.name)
    if options.backend == "auto" and not arch.is_gpu:
        tell_cpu_only(problem, directions)
    return choose(problem, arch, options, *directions, tuning=tuning_for(device))


# ---------------------------------------------------------------- launchers


def prepare(plan: Plan, device: torch.device) -> Launcher:
    """The launcher of a Plan, made with the tensors' device current; no kernel is asked for no work."""
    if device.type == "meta":
        return _launch_nothing
    if _launches_nothing(plan):
        if plan.direction == "backward":
            return _zero_gradients
        is_packed = plan.problem.cache is not None and plan.problem.has_packed_queries
        return _fill_empty_sequences if is_packed else fill_empty
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        op = registry.get(plan.backend).op(plan.direction)
        return logged(plan, op.prepare(plan))


def _launches_nothing(plan: Plan) -> bool:
    """True if a Plan has no work for a kernel."""
    return plan.problem.is_empty or plan.problem.has_no_keys


def _launch_nothing(operands: Operands) -> None:
    """Launcher of tensors without memory."""


def fill_empty(operands: Operands) -> None:
    """Launcher of a problem without queries, which has no results, or without keys: every row is empty."""
    assert operands.out is not None
    assert operands.lse is not None
    operands.out.zero_()
    operands.lse.fill_(-math.inf)
    if operands.sinks is not None:
        operands.lse.copy_(operands.sinks[:, None].expand_as(operands.lse))
    if operands.row_max is not None:
        operands.row_max.fill_(-math.inf)


def _fill_empty_sequences(operands: Operands) -> None:
    """Fill results of packed queries whose cache has no row: rows behind the last sequence are left as they are."""
    out, lse, sinks = operands.out, operands.lse, operands.sinks
    assert out is not None
    assert lse is not None
    assert operands.indices.cu_seqlens_q is not None
    rows = rows_of_sequences(operands.indices.cu_seqlens_q, lse.shape[2])
    out.masked_fill_(rows[:, None], 0.0)
    lse.copy_(torch.where(rows, -math.inf if sinks is None else sinks[:, None], lse))
    if operands.row_max is not None:
        operands.row_max.masked_fill_(rows, -math.inf)


def _zero_gradients(operands: Operands) -> None:
    """Launcher of a backward without queries or without keys: nothing depends on anything."""
    for name in GRADIENTS:
        getattr(operands, name).zero_()
    if operands.delta is not None:
        operands.delta.zero_()
        if operands.dlse is not None:
            operands.delta.sub_(operands.dlse)
