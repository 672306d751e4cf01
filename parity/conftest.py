"""Options of ``pytest parity``: which backends, variants and device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from multiattn.plan.backend import BACKENDS, Direction
from parity.case import Case
from parity.cases import is_cross_fed, suite
from parity.launch import dealt, has_turn, waits_for_night
from parity.results import Contender
from parity.run import VARIANTS, Variants, contenders_of, feeders_of

QUICKEST = "cutile"
"""Its interpreter takes the least time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption("--parity-backend", action="append", choices=BACKENDS, help="one that must run; may be given again")
    group.addoption("--parity-variants", choices=VARIANTS, help="of each backend (default: best, on a CPU turns)")
    group.addoption("--parity-device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): kept in one process by pytest-xdist's --dist loadgroup")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each case with each contender, and of backward with who feeds it; those of a case together: they share truth."""
    if "contender" not in metafunc.fixturenames:
        return
    config = metafunc.config
    backends = config.getoption("--parity-backend") or BACKENDS
    device = torch.device(config.getoption("--parity-device"))
    is_backward = "fed_by" in metafunc.fixturenames
    directions: list[Direction] = ["backward" if is_backward else "forward"]
    contenders = contenders_of(backends, _variants(config), directions, all_turns=device.type == "cpu")
    params = []
    for case in suite(device):
        marks = [pytest.mark.xdist_group("huge")] if case.size == "huge" else []  # two at a time would not fit a GPU
        if is_backward and case.no_backward:
            marks.append(pytest.mark.skip(reason=case.no_backward))
        for who in contenders:
            if not has_turn(case, who, device):
                continue
            mine = [*marks, pytest.mark.nightly] if waits_for_night(case, who, device) else marks
            if not is_backward:
                params.append(pytest.param(case, who, marks=mine, id=f"{case}-{who}"))
                continue
            params += [
                pytest.param(
                    case, who, feeder, marks=mine, id=f"{case}-{str(who).removesuffix(' backward')}-fed_by_{feeder}"
                )
                for feeder in _feeders(case, who, backends, device)
            ]
    names = ("case", "contender", "fed_by") if is_backward else ("case", "contender")
    metafunc.parametrize(names, params)


def _feeders(case: Case, who: Contender, backends: Sequence[str], device: torch.device) -> tuple[str, ...]:
    """The backends that feed a backward: on a CPU the quickest forward; `CROSS_FED` has the cases of all others."""
    is_one = is_cross_fed(case, device) and not who.turn
    if device.type != "cpu" or is_one or QUICKEST not in backends:
        return feeders_of(case, who.backend, backends, device)
    return (QUICKEST if dealt(QUICKEST, "forward").plan(case, 0) is not None else who.backend,)


def _variants(config: pytest.Config) -> Variants:
    on_cpu = config.getoption("--parity-device") == "cpu"
    chosen: Variants = config.getoption("--parity-variants") or ("turns" if on_cpu else "best")
    return chosen


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--parity-device"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the cases are small; workers of pytest-xdist are the parallelism
