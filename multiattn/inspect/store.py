"""What was compiled, kept on disk under all that went into it, so that a table is made again in seconds."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import multiattn
from multiattn.plan import backend as registry
from multiattn.plan.backend import Exported, Plan
from multiattn.plan.toolchain import find_cuobjdump, version_of
from multiattn.run import cache

ROOT = Path(multiattn.__file__).parent
_SHARED = ("plan/abi.py", "plan/arch.py", "plan/backend.py", "plan/config.py", "plan/toolchain.py", "problem.py")
"""What every backend's compilation goes through."""
_CPU = ("cpu", "emulation", "interpreter.py")
_SOURCES = (".py", ".cuh", ".h")
_READERS = tuple(f"inspect/{name}.py" for name in ("facts", "mix", "remarks", "sass"))
_SETTINGS = ("TRITON_", "PTXAS_", "NVPTX_", "DISABLE_", "ENABLE_", "CUDA_TILE_", "NVRTC_", "LLVM_", "MLIR_")
_FOLDERS = ("_DIR", "_HOME")
_META = "kernels.json"


def compile_key(plan: Plan) -> str:
    """A digest of all that the cubins of `plan` depend on: sources, the Plan, every compiler's version and settings."""
    asked = repr(replace(plan, rejected=(), why=""))
    return cache.key_of((sources(plan.backend), asked, repr(compilers(plan.backend)), repr(settings())))


def reading_key(compiled: str) -> str:
    """A digest of what is read off the cubins of `compile_key`: those, and who reads them."""
    return cache.key_of((compiled, readers(), reader_version()))


@functools.cache
def compilers(backend: str) -> tuple[tuple[str, str], ...]:
    """What a backend's compiler says of itself; of NVRTC also the library's own word, as it may be a toolkit's."""
    versions = [(name, str(it)) for name, it in registry.get(backend).versions().items()]
    if backend == "cuda" and not registry.get(backend).probe_compiler():
        from cuda.bindings import nvrtc

        versions.append(("nvrtc", repr(nvrtc.nvrtcVersion())))
    return tuple(sorted(versions))


def settings() -> tuple[tuple[str, str], ...]:
    """Variables of the environment that compilers listen to, but for those that name folders of theirs."""
    mine = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    return tuple(sorted((name, value) for name, value in mine.items() if not name.endswith(_FOLDERS)))


@functools.cache
def reader_version() -> str:
    """The version of the cuobjdump that reads cubins: its wheel's, else its own word."""
    wheel, tool = version_of("nvidia-cuda-cuobjdump"), find_cuobjdump()
    if wheel is not None or tool is None:
        return str(wheel)
    return subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout


@functools.cache
def sources(backend: str) -> str:
    """A digest of a backend's folder, less what only the CPU runs, and of the modules that all backends share."""
    folder = ROOT / backend
    mine = [path for path in folder.rglob("*") if not set(path.relative_to(folder).parts) & set(_CPU)]
    return _digest([path for path in mine if path.suffix in _SOURCES] + [ROOT / name for name in _SHARED])


@functools.cache
def readers() -> str:
    """A digest of the modules that read cubins, and of the arch and tools that they ask."""
    return _digest([ROOT / name for name in (*_READERS, "plan/arch.py", "plan/toolchain.py")])


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def compiled(plan: Plan, *, fresh: bool = False) -> tuple[Exported, ...]:
    """The kernels of `plan`, from the cache or compiled now; without texts and bindings.

    With `fresh`, and where the entry is damaged, they are compiled again. The compiler's own exception passes through.
    """
    path = cache.directory() / f"{compile_key(plan)}.zip"
    if not fresh:
        try:
            return _unpack(path)
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):  # not there, or cut off by a full disk
            pass
    kernels = tuple(replace(kernel, texts={}, binding=None) for kernel in _export(plan))
    put(path, _pack(kernels))
    return kernels


def put(path: Path, content: bytes) -> None:
    """Write an entry whole, over another one where there is one: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as scratch:
        draft = Path(scratch) / path.name
        draft.write_bytes(content)
        os.replace(draft, path)


def why_unusable() -> str:
    """What is wrong with the cache's folder; empty where nothing is."""
    folder = cache.directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{cache.DIRECTORY_VARIABLE}: cannot write to {folder}: {error.strerror}; allowed a folder that can be"


def _export(plan: Plan) -> tuple[Exported, ...]:
    return registry.get(plan.backend).op(plan.direction).export(plan, ())


def _pack(kernels: Sequence[Exported]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        meta = [
            {
                "kernel": it.kernel,
                "seconds": it.seconds,
                "threads": it.threads,
                "dynamic_smem_bytes": it.dynamic_smem_bytes,
                "remarks": it.remarks,
            }
            for it in kernels
        ]
        archive.writestr(_META, json.dumps(meta))
        for place, it in enumerate(kernels):
            archive.writestr(f"{place}.cubin", it.cubin)
    return buffer.getvalue()


def _unpack(path: Path) -> tuple[Exported, ...]:
    with zipfile.ZipFile(path) as archive:
        meta = json.loads(archive.read(_META))
        return tuple(Exported(**it, cubin=archive.read(f"{place}.cubin")) for place, it in enumerate(meta))
