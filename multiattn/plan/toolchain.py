"""The machine that a backend runs on: installed packages, the GPU, and cuobjdump, which reads cubins."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata

import torch

from multiattn.plan.support import Reason

_USAGE = re.compile(r"\bREG:(\d+) STACK:(\d+) SHARED:(\d+)")
_THREADS = re.compile(r"EIATTR_(REQNTID|MAX_THREADS)\n.*\n\s*Value:\s*0x(\w+) 0x(\w+) 0x(\w+)")
_RESERVED_SMEM = ".nv.shared.reserved.0"  # a section of the cubins, sm90 and later, that count what the system keeps
_RESERVED_SMEM_BYTES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """One compiled kernel's resources: registers and bytes of stack a thread, bytes of static shared memory a block."""

    registers: int
    stack_bytes: int
    smem_bytes: int
    """Without the KiB that the system keeps in every block."""
    threads: int | None = None
    """Threads of a block, where the kernel was compiled for one number of threads, or for at most so many."""


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, ...]:
    """(major, minor) of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def dotted(release: tuple[int, ...]) -> str:
    """A release as one writes it."""
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
    return (Reason(code="gpu", got="no CUDA device that torch can use", allowed="an NVIDIA GPU and its driver"),)


@functools.cache
def find_cuobjdump() -> str | None:
    """The cuobjdump of its own wheel, which knows every target, else of a toolkit on PATH; None where there is none."""
    try:
        files = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        files = []
    found = next((str(file.locate()) for file in files if file.name == "cuobjdump"), None)
    return found or shutil.which("cuobjdump")


def resource_usage(cubin: bytes) -> Usage | None:
    """Resources of the one kernel of a cubin; None without cuobjdump, or with one too old for the cubin's target.

    None of the kernels indexes an array at run time, so their stack is what the compiler spilled.
    """
    printed = _cuobjdump(cubin, "-elf", "-res-usage")
    found = _USAGE.search(printed)
    if found is None:
        return None
    registers, stack_bytes, smem_bytes = map(int, found.groups())
    return Usage(
        registers=registers,
        stack_bytes=stack_bytes,
        smem_bytes=max(0, smem_bytes - (_RESERVED_SMEM_BYTES if _RESERVED_SMEM in printed else 0)),
        threads=_threads(printed),
    )


def disassemble(cubin: bytes) -> str | None:
    """The SASS of a cubin as cuobjdump prints it; None where `resource_usage` is."""
    return _cuobjdump(cubin, "-sass") or None


def _threads(printed: str) -> int | None:
    """Threads of a block: those that were required, else the most that were allowed for."""
    sizes = {name: int(x, 16) * int(y, 16) * int(z, 16) for name, x, y, z in _THREADS.findall(printed)}
    return sizes.get("REQNTID", sizes.get("MAX_THREADS"))


def _cuobjdump(cubin: bytes, *options: str) -> str:
    """The output of cuobjdump for a cubin; empty where there is no cuobjdump, or it cannot read the cubin."""
    tool = find_cuobjdump()
    if tool is None:
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=False).stdout
