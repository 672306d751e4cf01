"""Candidates compiled and checked, in processes that may hang, die or lose the device.

A result is held to the derived budget of `multiattn.truth`, at the problem itself and at lengths that no tile divides.
The processes leave their compiled code in the caches of the compilers, so that timing compiles next to nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from multiattn.inspect.pool import Outcome, run_isolated
from multiattn.operands import FORWARD_RESULTS, GRADIENTS, Operands
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Direction, Plan, make_plan
from multiattn.problem import Problem, options_of
from multiattn.truth.gradients import expected_gradients
from multiattn.truth.tolerance import Expected, Mismatch, expected_forward
from multiattn.tune.candidates import Candidate

RAGGED = ((200, 16), (777, 7))
"""Lengths, and batches of about six heads, that candidates are checked at as well.

No tile divides them, at one of them the last tile has warps with nothing to do, and there are more tiles than any GPU
has SMs: a block of a persistent kernel has several.
"""

OUT_OF_MEMORY = ("torch.OutOfMemoryError", "CUDA_ERROR_OUT_OF_MEMORY")

Item = TypeVar("Item")


def device_works() -> bool:
    """Tell whether this process may go on after an error."""
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def check_all(
    function: Callable[[Item], bool], wanted: Sequence[Item], *, jobs: int, timeout_s: float
) -> Generator[Outcome[Item, bool], None, None]:
    """Call `function` for each in processes of their own; each outcome as it ends. Closing it ends the processes.

    What finds too little memory beside the others is tried once more, alone.
    """
    waiting = list(wanted)
    for processes in (jobs, 1):
        crowded = []
        outcomes = run_isolated(function, waiting, jobs=processes, timeout_s=timeout_s, keep=device_works)
        with contextlib.closing(outcomes):
            for outcome in outcomes:
                if processes > 1 and any(word in outcome.error for word in OUT_OF_MEMORY):
                    crowded.append(outcome.item)
                else:
                    yield outcome
        waiting = crowded


# ---------------------------------------------------------------- one candidate


def check_candidate(it: Candidate, device: str) -> bool:
    """Compile and launch a candidate, at its problem and at `RAGGED` ones, and check what it wrote.

    Raises Mismatch where that is wrong, RuntimeError where there is no Plan, and whatever its compiler does.
    """
    plan = it.plan()
    if not isinstance(plan, Plan):
        raise RuntimeError("; ".join(map(str, plan)))
    check_plan(plan, device)
    for problem in ragged(it.problem):
        other = replace(it, config=plan.config).plan(problem)
        if isinstance(other, Plan):  # else it is no candidate there: only its own problem, planned above, is asked for
            check_plan(other, device)
    return True


def ragged(problem: Problem) -> list[Problem]:
    """The problem at each of `RAGGED` lengths."""
    heads_kv = max(1, 6 // problem.group)
    return [
        Problem.contiguous(
            batch=batch,
            heads_q=heads_kv * problem.group,
            heads_kv=heads_kv,
            seq_q=min(problem.seq_q, seq),
            seq_kv=seq,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            dtype=problem.dtype,
            band=problem.band.within(min(problem.seq_q, seq), seq),
            scale=problem.scale,
        )
        for seq, batch in RAGGED
    ]


def check_plan(plan: Plan, device: str) -> None:
    """Launch a Plan once and hold what it wrote to the truth of the last heads of the last batch entry.

    Those are what a wrong decoding of the grid spoils. Nothing else may be NaN.
    """
    operands, expected = _truth(plan.problem, plan.arch, plan.direction, plan.backend, device)
    launch = registry.get(plan.backend).op(plan.direction).prepare(plan)
    names = FORWARD_RESULTS if plan.direction == "forward" else GRADIENTS
    for name in names:
        operands.named[name].fill_(torch.nan)
    launch(operands)
    for name in names:
        result = operands.named[name]
        if bool(result.isnan().any()):
            raise Mismatch(f"{name} has NaN: an element that was never written, or a wrong one\n  {plan}")
        heads = expected[name].truth.shape[1]
        expected[name].check(result[-1:, -heads:], plan)


@functools.lru_cache(maxsize=1 + len(RAGGED))
def _truth(
    problem: Problem, arch: Arch, direction: Direction, backend: str, device: str
) -> tuple[Operands, Mapping[str, Expected]]:
    """Tensors of a problem, and the truth of its last heads of keys and of the query heads that share them."""
    operands = tensors_of(problem, arch, direction, backend, device)
    q, k, v = operands.qkv
    group = problem.group
    some = Operands(q[-1:, -group:], k[-1:, -1:], v[-1:, -1:])
    of_some = Problem.of_operands(some, options_of(problem))
    if direction == "forward":
        expected = {it.name: it for it in expected_forward(some, of_some)}
    else:
        assert operands.dout is not None
        expected = expected_gradients(some._replace(dout=operands.dout[-1:, -group:]), of_some)
    if q.is_cuda:
        torch.cuda.empty_cache()  # several processes do this at once
    return operands, expected


def tensors_of(problem: Problem, arch: Arch, direction: Direction, backend: str, device: str) -> Operands:
    """Tensors of a plain problem, the same each time, with room for results; of a backward with those of a forward.

    The forward is that of `backend`, by the package's own rules.
    """
    generator = torch.Generator(device).manual_seed(0)

    def make(name: str) -> torch.Tensor:
        shape, strides, dtype = problem.layouts[name]
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return tensor.normal_(generator=generator) if name in ("q", "k", "v", "dout") else tensor.zero_()

    names = ("q", "k", "v", *FORWARD_RESULTS, *(("dout", *GRADIENTS) if direction == "backward" else ()))
    made: dict[str, Any] = {name: make(name) for name in names}
    operands = Operands(**made)
    if direction == "backward":
        forward = registry.get(backend).forward
        forward.prepare(make_plan(registry.get(backend), problem, arch))(operands)
    return operands
