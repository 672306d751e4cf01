"""Results of a good kernel for parity's cases, and what breaks them: the tester's tests judge both."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from parity.case import Case
from parity.cases import CASES
from parity.launch import prepare_case
from parity.tensors import Inputs
from parity.tolerance import operands_and_problem, reference_in_chunks

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}

Result = tuple[torch.Tensor, torch.Tensor]
Break = Callable[[Case, Inputs], Result]


def options_of(case: Case, inputs: Inputs, **changes: Any) -> dict[str, Any]:
    """The options of a case's call, with changes."""
    named = {"causal": case.causal, "window": case.window, "scale": case.scale, "sinks": inputs.sinks}
    named |= {"score": inputs.score, "blocks": inputs.blocks, "packed": inputs.packed, "cached": inputs.cached}
    return named | changes


def attend(case: Case, inputs: Inputs, **changes: Any) -> Result:
    """A good kernel's result: fp32 inside, rounded once. `changes` to its options break it."""
    options = options_of(case, inputs, **changes)
    operands, problem = operands_and_problem(inputs.q, inputs.k, inputs.v, **options)
    out, lse = reference_in_chunks(operands, problem, torch.float32)
    return out.to(case.torch_dtype), lse


def other(**changes: Any) -> Break:
    """A result with other options."""
    return lambda case, inputs: attend(case, inputs, **changes)


def check(case: Case, result: Result) -> None:
    """Mismatch where a result is not within its case's tolerance."""
    _, truth = prepare_case(case, CPU)
    truth.out.check(result[0], "a plan")
    truth.lse.check(result[1], "a plan")


def then(change: Callable[[torch.Tensor, torch.Tensor], Result]) -> Break:
    """A right result, changed."""
    return lambda case, inputs: change(*attend(case, inputs))


def each(broken: Mapping[str, tuple[Any, str]]) -> list[tuple[str, str]]:
    """Names of breaks, each with the name of a case that must find it."""
    return [(name, case) for name, (_, cases) in broken.items() for case in cases.split()]


WINDOWS = {
    (1, 0): "window_0_0 window_7_3 window_64_0 window_130_causal window_left_only window_d128_bf16 window_30_0_113x203",
    (-1, 0): "window_1_0 window_7_3 window_64_0 window_130_causal window_left_only window_50_0_1x300",
    (0, 1): "window_0_0 window_7_3 window_64_0 window_right_only window_30_2_203x113 window_1_1_300x3",
    (0, -1): "window_7_3 window_63_64 window_right_only window_30_2_203x113 window_1_1_300x3 window_d40_fp16",
}
"""By how many more keys on either side, cases that must find a window that has them."""


def moved_bounds(case: Case, left: int, right: int) -> tuple[int | None, ...]:
    """The bounds of a case's window, each by so much elsewhere."""
    bounds = zip(case.window or (), (left, right), strict=True)
    return tuple(None if bound is None else max(bound + more, 0) for bound, more in bounds)
