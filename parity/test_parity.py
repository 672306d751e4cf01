"""``pytest parity``: each case on each backend within its tolerance; a skip is only ever the backend's own reasons.

Or, of backward, the reason that a case itself has (`Case.no_backward`). On several processes: ``pytest parity -n 8
--dist loadgroup``, which keeps the huge cases of a GPU in one of them.
"""

from __future__ import annotations

import pytest
import torch

from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, Plan
from multiattn.plan.support import Reason
from parity.case import Case
from parity.cases import suite
from parity.launch import (
    launch_gradients,
    launch_plan,
    plan_case,
    prepare_case,
    prepare_gradients,
    save_forward,
)
from parity.results import Contender
from parity.tensors import Saved


def test_parity(case: Case, contender: Contender, device: torch.device) -> None:
    inputs, truth = prepare_case(case, device)
    plan = plan_case(case, contender, inputs)
    if not isinstance(plan, Plan):
        pytest.skip("; ".join(map(str, plan)))
    outputs = launch_plan(plan, inputs)
    for got, expected in zip(outputs.all, truth.of_plan(plan), strict=True):
        expected.check(got, plan)


def test_gradients(case: Case, contender: Contender, fed_by: str, device: torch.device) -> None:
    inputs, _ = prepare_case(case, device)
    plan = plan_case(case, contender, inputs)
    saved = save_forward(case, fed_by, device)
    if not isinstance(plan, Plan):
        pytest.skip("; ".join(map(str, plan)))
    if not isinstance(saved, Saved):
        pytest.skip(f"its forward: {'; '.join(map(str, saved))}")
    upstream, truth = prepare_gradients(case, device)
    gradients = launch_gradients(plan, inputs, saved, upstream)
    for got, expected in zip(gradients.all, truth.all, strict=True):
        expected.check(got, f"{plan}, fed by {fed_by}")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_backend_that_is_asked_for_runs_something(
    request: pytest.FixtureRequest, device: torch.device, direction: Direction
) -> None:
    """Else a suite of skips would pass. Backends that a machine lacks are left out with --parity-backend."""
    for name in request.config.getoption("--parity-backend") or BACKENDS:
        refusals: list[Reason] = []
        for case in suite(device):
            plan = plan_case(case, Contender(backend=name, direction=direction), prepare_case(case, device)[0])
            if isinstance(plan, Plan):
                break
            refusals += plan
        else:
            reasons = "; ".join(dict.fromkeys(map(str, refusals)))
            pytest.fail(f"{name} {direction} was asked for and runs nothing: {reasons}")
