"""Where and with what a measurement was made: GPU, driver, versions, commit, date."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeGuard

import torch

from bench.results import Environment
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch, detect, find_gpu
from multiattn.plan.backend import BACKENDS
from multiattn.plan.support import Reason

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"
NO_GPU = Reason(code="gpu", got="none on this machine", allowed="an NVIDIA GPU", hint="compiling needs none")
"""The reason of every timing where there is nothing to time on."""

PEER_PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4", "tilegym")


def is_clone(root: Path = ROOT) -> bool:
    """Whether `root` is a checkout of this project, not the site-packages that it is installed in."""
    project = root / "pyproject.toml"
    return project.exists() and re.search(r'^name = "multiattn"$', project.read_text(), re.MULTILINE) is not None


def workplace() -> Path:
    """Where commands write: the checkout, or the current directory where there is none."""
    return ROOT if is_clone(ROOT) else Path.cwd()


def results_root() -> Path:
    """bench/results of the workplace."""
    return workplace() / "bench" / "results"


def gpu_arch() -> Arch | None:
    """The arch of the current GPU, or None where there is none."""
    return detect(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None


def device_works() -> bool:
    """Whether this process may go on after an error."""
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def environment() -> Environment:
    """This machine, this checkout, now."""
    arch = gpu_arch()
    name = torch.cuda.get_device_name() if arch is not None else "none"
    gpu = find_gpu(name)
    return Environment(
        gpu=name,
        arch=arch.name if arch is not None else "none",
        peak_tflops=gpu.tflops if gpu is not None else None,
        driver=_driver(),
        commit=_commit(),
        source=source_digest(),
        versions=versions(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    )


def results_dir(gpu: str) -> Path:
    """bench/results/<gpu>, where what is committed lives; out/bench/no-gpu where nothing was measured."""
    if gpu == "none":
        return workplace() / "out" / "bench" / "no-gpu"
    known = find_gpu(gpu)
    name = known.name if known is not None else gpu.removeprefix("NVIDIA ")
    return results_root() / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> Mapping[str, str]:
    """Versions of Python, torch, what the backends stand on, and the peers that are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
    if torch.version.cuda is not None and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for name in BACKENDS:
        found |= {key: value for key, value in registry.get(name).versions().items() if _is_version(value)}
    for package in PEER_PACKAGES:
        version = _package_version(package)
        if version is not None:
            found[package] = version
    return dict(sorted(found.items()))


def source_digest() -> str:
    """Twelve hex digits over every source file of multiattn and of what this package times with."""
    digest = hashlib.sha256()
    files = [path for path in (ROOT / "multiattn").rglob("*") if path.suffix in {".py", ".cuh", ".h", ".cu", ".cpp"}]
    timed_with = ("matrix.py", "contenders.py", "providers.py", "peers.py", "timing.py", "flops.py")
    files += [ROOT / "bench" / name for name in timed_with]
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _is_version(value: str | None) -> TypeGuard[str]:
    """Whether it says a version; a tool may only say where it lies, which is no news to anybody else."""
    return value is not None and not Path(value).is_absolute()


def _package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """Short hash, with `+` where tracked sources differ from it; MULTIATTN_COMMIT speaks for a copy without .git."""
    if given := os.environ.get("MULTIATTN_COMMIT"):
        return given
    if not is_clone(ROOT):
        return UNKNOWN  # git would speak of whatever it is installed in
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return UNKNOWN
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", "multiattn")
    return f"{commit}+" if changed else commit


def _driver() -> str:
    if not torch.cuda.is_available():
        return "none"
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else UNKNOWN


def _output(*command: str) -> str | None:
    """What a tool prints, or None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else None
