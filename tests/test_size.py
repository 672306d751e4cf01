"""The size of the house: lines of each folder, type tests on configs, functions with many parameters.

A ceiling is what a folder needs today, rounded up. To raise one is a line of a commit, with its reason in the body:
look first for what the change made unneeded.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES = {
    "multiattn": 66_560,
    "tests": 33_340,
    "parity": 6_230,
    "bench": 10_070,
    "docs": 5_160,
}
"""For everything under version control: of `bench` without what is measured and compiled, of `docs` the pages, with
README.md and CONTRIBUTING.md."""
RESULTS_BYTES = 1_750_000
CONFIG_TESTS = 2
"""``isinstance`` of a class of configs: generic code asks the family of a kernel instead."""
MANY = 12
MANY_PARAMETERS = 24
"""Functions with `MANY` parameters or more."""


def files(*where):
    """Paths under version control, or new and not ignored, that are there."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *where]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a checkout")
    return [path for name in found.stdout.splitlines() if (path := ROOT / name).is_file()]


def python(*where):
    return [path for path in files(*where) if path.suffix == ".py"]


def lines_of(folder):
    its = files(folder)
    if folder == "bench":
        its = [path for path in its if not {"results", "compiled"} & set(path.parts)]
    if folder == "docs":
        its = [path for path in (*its, ROOT / "README.md", ROOT / "CONTRIBUTING.md") if path.suffix == ".md"]
    return sum(path.read_bytes().count(b"\n") for path in its)


@pytest.mark.parametrize("folder", LINES)
def test_a_folder_has_no_more_lines_than_its_ceiling(folder):
    assert lines_of(folder) <= LINES[folder]


def test_results_have_no_more_bytes_than_their_ceiling():
    assert sum(path.stat().st_size for path in files("bench/results")) <= RESULTS_BYTES


def config_tests(text):
    return len(re.findall(r"isinstance\([^)]*Config\b", text))


def parameters(node):
    return len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)


def functions(text):
    return [it for it in ast.walk(ast.parse(text)) if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_generic_code_asks_families_and_not_types():
    found = {path.name: count for path in python("multiattn") if (count := config_tests(path.read_text()))}
    assert sum(found.values()) <= CONFIG_TESTS, found


def test_few_functions_have_many_parameters():
    found = [it.name for path in python("multiattn") for it in functions(path.read_text()) if parameters(it) >= MANY]
    assert len(found) <= MANY_PARAMETERS, sorted(found)


def test_the_counts_see_what_they_count():
    """A count that finds nothing would hold any ceiling."""
    assert config_tests("if isinstance(it, WgmmaConfig | SplitConfig) or isinstance(it, Plan): ...") == 1
    (wide,) = functions(f"def wide({', '.join(f'a{i}' for i in range(7))}, *, {', '.join('bcdef')}): ...")
    assert parameters(wide) == MANY
    assert all(lines_of(folder) > 1000 for folder in LINES)
