"""``pytest --benchmark-only``, anywhere in this repository, collects benchmarks alone, and prints a table that fits."""

import pytest

COLUMNS = "median,iqr,min,rounds,iterations"
"""Of the table at the end, where ``--benchmark-columns`` does not say it."""


def pytest_addoption(parser):
    from bench.matrix import SUITES
    from multiattn.tune.timing import Budget

    group = parser.getgroup("bench")
    group.addoption("--bench-suite", choices=tuple(SUITES), default="floors", help="cells to time")
    group.addoption("--bench-rounds", type=int, default=Budget().rounds, help="readings of each")


@pytest.hookimpl(tryfirst=True)  # pytest-benchmark reads its options in this hook
def pytest_configure(config):
    if not config.getoption("benchmark_only", default=False):
        return
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args[:] = [str(config.rootpath / "bench")]
    if not any(str(it).startswith("--benchmark-columns") for it in config.invocation_params.args):
        config.option.benchmark_columns = COLUMNS.split(",")


@pytest.hookimpl(tryfirst=True)  # pytest-benchmark would skip them, each with a line
def pytest_collection_modifyitems(config, items):
    if not config.getoption("benchmark_only", default=False):
        return
    others = [it for it in items if "benchmark" not in getattr(it, "fixturenames", ())]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [it for it in items if "benchmark" in getattr(it, "fixturenames", ())]
