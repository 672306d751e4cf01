"""The wheel: multiattn alone, all that it reads, importable from every directory, with a console script."""

import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the checkout in a folder named multiattn, as clones are."""
    clone = tmp_path_factory.mktemp("parent") / "multiattn"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    for name in ("multiattn", "bench", "parity"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return clone


def build(clone, hook, folder):
    subprocess.run([sys.executable, "-c", BUILD, hook, str(folder)], cwd=clone, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_the_wheel_holds_multiattn_alone_and_all_of_it(clone, tmp_path):
    wheel = build(clone, "build_wheel", tmp_path)
    names = set(wheel.namelist())
    (information,) = {name.split("/")[0] for name in names} - {"multiattn"}
    assert information.endswith(".dist-info")
    assert f"{information}/licenses/LICENSE" in names
    files = (path for path in (ROOT / "multiattn").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert {path.relative_to(ROOT).as_posix() for path in files} == {it for it in names if it.startswith("multiattn/")}
    assert "multiattn = multiattn.__main__:main" in wheel.read(f"{information}/entry_points.txt").decode()


def test_an_editable_install_works_in_the_clones_parent(clone, tmp_path):
    build(clone, "build_editable", tmp_path).extractall(tmp_path / "site")
    folders = [str(tmp_path / "site"), *site.getsitepackages()]  # before an editable install of this interpreter's own
    code = f"import site; [site.addsitedir(it) for it in {folders}]; import multiattn; print(multiattn.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=clone.parent, env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == clone / "multiattn" / "__init__.py"
