"""The needs of the backend: Python modules, NVRTC, g++. Looks, imports nothing heavy, launches nothing."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from multiattn.plan.arch import Arch
from multiattn.plan.support import Reason
from multiattn.plan.toolchain import probe_gpu, version_of

GXX = "g++"
_GXX_OLDEST = 10  # the first with -std=c++20
_PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-cuobjdump")
_INSTALL = "pip install 'multiattn[cuda]'"


def probe(arch: Arch) -> tuple[Reason, ...]:
    """Reasons why this machine cannot run on `arch`."""
    return (*probe_nvrtc(), *probe_gpu()) if arch.is_gpu else probe_host()


@functools.cache
def probe_nvrtc() -> tuple[Reason, ...]:
    """Reasons why this machine cannot compile for a GPU and launch."""
    missing = [name for name in ("cuda-core", "cuda-bindings", "cuda-pathfinder") if version_of(name) is None]
    if missing:
        return tuple(Reason(code="module", got=f"no {name}", allowed=name, hint=_INSTALL) for name in missing)
    from cuda import pathfinder

    try:
        pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError as error:
        return (
            Reason(code="compiler", got=f"no NVRTC: {' '.join(str(error).split())}", allowed="libnvrtc", hint=_INSTALL),
        )
    try:
        from cuda.core import Program, ProgramOptions

        # An empty kernel, compiled as the backend does: raises whatever a call would.
        Program('extern "C" __global__ void nothing() {}', "c++", ProgramOptions(arch="sm_90")).compile("cubin")
    except Exception as error:  # releases of cuda-core and cuda-bindings that do not fit fail in many ways
        names = " with ".join(f"{name} {version_of(name)}" for name in ("cuda-core", "cuda-bindings"))
        got = f"{names}: {type(error).__name__}: {' '.join(str(error).split())}"
        return (Reason(code="compiler", got=got, allowed="releases that compile together", hint=_INSTALL),)
    return ()


@functools.cache
def probe_host() -> tuple[Reason, ...]:
    """Reasons why this machine cannot build kernels for its CPU."""
    reasons = []
    system = f"{platform.system()} {platform.machine()}"
    if system != "Linux x86_64":
        hint = "Triton and cuTile run here; the emulation of CUDA switches fibers in x86-64 assembly"
        reasons.append(Reason(code="host", got=system, allowed="Linux x86_64", hint=hint))
    version = gxx_version()
    if version is None or int(version.split(".")[0]) < _GXX_OLDEST:
        got = f"no usable {GXX}" if version is None else f"{GXX} {version}"
        allowed, hint = f"{GXX} {_GXX_OLDEST} or later", "install it, as by apt install g++, and put it on the PATH"
        reasons.append(Reason(code="compiler", got=got, allowed=allowed, hint=hint))
    return tuple(reasons)


@functools.cache
def gxx_version() -> str | None:
    """The version of g++ on the PATH; None if there is none, or it is a clang, which does not know the question."""
    if shutil.which(GXX) is None:
        return None
    done = subprocess.run([GXX, "-dumpfullversion"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def run_compiler(command: Sequence[str], source: str, *, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run g++ on `source`, its temporary files in `scratch`; an interrupt ends it and every process that it started."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
        start_new_session=True,  # g++ is a driver: killing it alone leaves cc1plus running
    )
    try:
        stdout, stderr = process.communicate(source)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def versions() -> dict[str, str | None]:
    """Packages and tools, None for one that is missing."""
    return {**{name: version_of(name) for name in _PACKAGES}, GXX: gxx_version()}
