"""The distributions: multiattn alone, all that it reads, importable from every directory, with a console script."""

import email
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import multiattn

ROOT = Path(__file__).parents[1]
TOP = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the checkout in a folder named multiattn, as clones are."""
    clone = tmp_path_factory.mktemp("parent") / "multiattn"
    clone.mkdir()
    for name in TOP:
        shutil.copy(ROOT / name, clone)
    for name in ("multiattn", "bench", "parity", "tests"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "results", "compiled"))
    return clone


def build(clone, hook, folder):
    subprocess.run([sys.executable, "-c", BUILD, hook, str(folder)], cwd=clone, capture_output=True, check=True)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def unpacked(clone, tmp_path_factory):
    """The sdist, as whoever builds from it has it."""
    sdist = build(clone, "build_sdist", tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    """The wheel of the sdist."""
    return zipfile.ZipFile(build(unpacked, "build_wheel", tmp_path_factory.mktemp("wheel")))


def package_files():
    files = (path for path in (ROOT / "multiattn").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_sdist_holds_what_the_wheel_is_made_of_and_no_tests(unpacked):
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    made = {name for name in names if name.startswith("multiattn.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == package_files() | set(TOP)


def test_the_wheel_holds_multiattn_alone_and_all_of_it(wheel):
    names = set(wheel.namelist())
    (information,) = {name.split("/")[0] for name in names} - {"multiattn"}
    assert information.endswith(".dist-info")
    assert f"{information}/licenses/LICENSE" in names
    assert package_files() == {it for it in names if it.startswith("multiattn/")}
    assert "multiattn = multiattn.__main__:main" in wheel.read(f"{information}/entry_points.txt").decode()


def test_an_index_shows_what_it_is_and_runs_on(wheel):
    (name,) = (it for it in wheel.namelist() if it.endswith(".dist-info/METADATA"))
    metadata = email.message_from_string(wheel.read(name).decode())
    assert metadata["Version"] == multiattn.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == f">={PYTHONS[0]}"
    said = [it.rpartition(" ")[2] for it in metadata.get_all("Classifier") if ":: Python :: 3." in it]
    assert said == [*PYTHONS]


def test_the_citation_and_the_changelog_are_of_this_version():
    """A field a line, as `cffconvert --validate` has found it right."""
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == multiattn.__version__
    first = re.search(r"^## \[(\d.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first.groups() == (multiattn.__version__, citation["date-released"])


def test_an_editable_install_works_in_the_clones_parent(clone, tmp_path):
    folder = tmp_path / "wheel"
    folder.mkdir()
    zipfile.ZipFile(build(clone, "build_editable", folder)).extractall(tmp_path / "site")
    folders = [str(tmp_path / "site"), *site.getsitepackages()]  # before an editable install of this interpreter's own
    code = f"import site; [site.addsitedir(it) for it in {folders}]; import multiattn; print(multiattn.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=clone.parent, env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == clone / "multiattn" / "__init__.py"
