"""Where and with what a measurement was made: GPU, driver, versions, commit, date."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import torch

from bench.results import Environment
from multiattn.plan import backend as registry
from multiattn.plan.arch import Arch, detect, find_gpu
from multiattn.plan.backend import BACKENDS
from multiattn.plan.support import Reason
from multiattn.plan.toolchain import version_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
NO_GPU = Reason(code="gpu", got="none on this machine", allowed="an NVIDIA GPU", hint="compiling needs none")
"""The reason of every timing where there is nothing to time on."""

PEER_PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4", "tilegym")
TIMED_WITH = ("matrix.py", "contenders.py", "peers.py", "timing.py", "flops.py")


def gpu_arch() -> Arch | None:
    """The arch of the current GPU, or None where there is none."""
    return detect(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None


def device_works() -> bool:
    """Tell whether this process may go on after an error."""
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
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if arch is not None else None
    return Environment(
        gpu=name,
        arch=arch.name if arch is not None else "none",
        peak_tflops=gpu.tflops if gpu is not None else None,
        driver=driver.splitlines()[0] if driver else "unknown",
        commit=_commit(),
        source=source_digest(),
        versions=versions(),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    )


def results_dir(gpu: str) -> Path:
    """The folder bench/results/<gpu>, which is committed; out/bench/no-gpu where nothing was measured."""
    if gpu == "none":
        return ROOT / "out" / "bench" / "no-gpu"
    known = find_gpu(gpu)
    name = known.name if known is not None else gpu.removeprefix("NVIDIA ")
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> Mapping[str, str]:
    """Versions of Python, torch, what the backends stand on, and the peers that are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "torch": torch.__version__}
    if torch.version.cuda is not None and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for name in BACKENDS:
        told = registry.get(name).versions().items()
        found |= {key: it for key, it in told if it is not None and not Path(it).is_absolute()}  # where a tool is
    found |= {package: it for package in PEER_PACKAGES if (it := version_of(package)) is not None}
    return dict(sorted(found.items()))


def source_digest() -> str:
    """Twelve hex digits over every source file of multiattn and of the timing modules here."""
    digest = hashlib.sha256()
    files = [path for path in (ROOT / "multiattn").rglob("*") if path.suffix in {".py", ".cuh", ".h", ".cu", ".cpp"}]
    for path in sorted([*files, *(ROOT / "bench" / name for name in TIMED_WITH)]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _commit() -> str:
    """Short hash, with `+` where tracked sources differ from it; MULTIATTN_COMMIT speaks for a copy without .git."""
    if given := os.environ.get("MULTIATTN_COMMIT"):
        return given
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", "multiattn")
    return f"{commit}+" if commit and changed else commit or "unknown"


def _output(*command: str) -> str | None:
    """The output of a tool, or None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else None
