"""``pytest parity``: each case on each backend within its tolerance; a skip is only ever the backend's own reasons.

On several processes: ``pytest parity -n 8 --dist loadgroup``, which keeps the huge cases of a GPU in one of them.
"""

from __future__ import annotations

import pytest
import torch

from multiattn import backend as registry
from multiattn.arch import detect
from multiattn.backend import Plan
from parity.cases import Case
from parity.run import Contender, launch_plan, plan_case, prepare_case


def test_parity(case: Case, contender: Contender, device: torch.device) -> None:
    inputs, truth = prepare_case(case, device)
    plan = plan_case(case, contender, inputs)
    if not isinstance(plan, Plan):
        pytest.skip("; ".join(map(str, plan)))
    outputs = launch_plan(plan, inputs)
    truth.out.check(outputs.out, plan)
    truth.lse.check(outputs.lse, plan)


def test_a_backend_that_is_asked_for_runs(request: pytest.FixtureRequest, device: torch.device) -> None:
    for name in request.config.getoption("--parity-backend") or ():
        reasons = registry.get(name).probe(detect(device))
        assert not reasons, f"{name} was asked for and cannot run: {'; '.join(map(str, reasons))}"
