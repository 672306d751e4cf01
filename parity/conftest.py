"""Options of ``pytest parity``: which backends, variants and device."""

from __future__ import annotations

import pytest
import torch

from multiattn.backend import BACKENDS
from parity.cases import suite
from parity.run import contenders_of


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity")
    group.addoption("--parity-backend", action="append", choices=BACKENDS, help="one that must run; may be given again")
    group.addoption("--parity-variants", choices=("best", "all"), default="best", help="of each backend")
    group.addoption("--parity-device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): kept in one process by pytest-xdist's --dist loadgroup")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each case with each contender, the contenders of one case together: they share its truth."""
    if "contender" not in metafunc.fixturenames:
        return
    config = metafunc.config
    contenders = contenders_of(config.getoption("--parity-backend") or BACKENDS, config.getoption("--parity-variants"))
    if "case" in metafunc.fixturenames:
        cases = suite(torch.device(config.getoption("--parity-device")))
        alone = pytest.mark.xdist_group("huge")  # two at a time would not fit a GPU's memory
        params = [pytest.param(case, marks=alone if case.size == "huge" else (), id=case.name) for case in cases]
        metafunc.parametrize("case", params)
        metafunc.parametrize("contender", contenders, ids=str)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--parity-device"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the cases are small; workers of pytest-xdist are the parallelism
