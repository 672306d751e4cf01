"""``pytest parity``: each case on each backend within its tolerance; a skip is only ever the backend's own reasons.

On several processes: ``pytest parity -n 8 --dist loadgroup``, which keeps the huge cases of a GPU in one of them.
"""

from __future__ import annotations

import pytest
import torch

from multiattn.backend import BACKENDS, Plan
from multiattn.support import Reason
from parity.cases import Case, suite
from parity.run import Contender, launch_plan, plan_case, prepare_case


def test_parity(case: Case, contender: Contender, device: torch.device) -> None:
    inputs, truth = prepare_case(case, device)
    plan = plan_case(case, contender, inputs)
    if not isinstance(plan, Plan):
        pytest.skip("; ".join(map(str, plan)))
    outputs = launch_plan(plan, inputs)
    truth.out.check(outputs.out, plan)
    truth.lse.check(outputs.lse, plan)


def test_every_backend_that_is_asked_for_runs_something(request: pytest.FixtureRequest, device: torch.device) -> None:
    """Else a suite of skips would pass. Backends that a machine lacks are left out with --parity-backend."""
    for name in request.config.getoption("--parity-backend") or BACKENDS:
        refusals: list[Reason] = []
        for case in suite(device):
            plan = plan_case(case, Contender(backend=name), prepare_case(case, device)[0])
            if isinstance(plan, Plan):
                break
            refusals += plan
        else:
            pytest.fail(f"{name} was asked for and runs nothing: {'; '.join(dict.fromkeys(map(str, refusals)))}")
