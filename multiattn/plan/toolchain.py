"""The machine that a backend runs on: installed packages, the GPU, and cuobjdump, which reads cubins."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import torch

from multiattn.plan.support import Reason


@functools.cache
def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None. Asked for once: what is imported does not change either."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, ...]:
    """(major, minor) of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def dotted(release: tuple[int, ...]) -> str:
    """A release as text, as in ``3.6``."""
    return ".".join(map(str, release))


def probe_release(
    distribution: str, module: str, oldest: tuple[int, int], newest: tuple[int, int], hint: str
) -> tuple[Reason, ...]:
    """A reason unless a module is there, of a distribution from the oldest release to the newest."""
    allowed = " to ".join(dict.fromkeys((dotted(oldest), dotted(newest))))
    version = version_of(distribution)
    if version is None or importlib.util.find_spec(module) is None:
        got = f"no {distribution}"
    elif not oldest <= release_of(version) <= newest:
        got = f"{distribution} {version}"
    else:
        return ()
    return (Reason(code="module", got=got, allowed=f"{distribution} {allowed}", hint=hint),)


def probe_gpu() -> tuple[Reason, ...]:
    """A reason if torch has no CUDA device here."""
    if torch.cuda.is_available():
        return ()
    hint = "`nvidia-smi` and `multiattn doctor` say what is missing; on CPU tensors every backend runs, slowly"
    got, allowed = "no CUDA device that torch can use", "an NVIDIA GPU and its driver"
    return (Reason(code="gpu", got=got, allowed=allowed, hint=hint),)


def driver_version() -> str:
    """The version of NVIDIA's driver, or ``unknown``."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):  # what was measured must not be lost to a hanging tool
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"


@functools.cache
def find_cuobjdump() -> str | None:
    """The cuobjdump of its own wheel, which knows every target, else of a toolkit on PATH.

    None where there is none, or no nvdisasm beside it or on PATH, without which it prints no code.
    """
    try:
        files = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        files = []
    found = next((str(file.locate()) for file in files if file.name == "cuobjdump"), None)
    tool = found or shutil.which("cuobjdump")
    if tool is None or not (Path(tool).with_name("nvdisasm").exists() or shutil.which("nvdisasm")):
        return None
    return tool


def disassemble(cubin: bytes) -> str | None:
    """The SASS of a cubin as cuobjdump prints it; None without cuobjdump, or where it is too old for the target."""
    tool = find_cuobjdump()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=False).stdout or None
