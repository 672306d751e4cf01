"""The cuTile backend: kernels for both directions, compiled by tileiras or interpreted on the CPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from multiattn.cutile import fits, rules
from multiattn.cutile.candidates import backward_candidates, forward_candidates
from multiattn.cutile.steps import STEPS
from multiattn.cutile.table import workspace_bytes
from multiattn.plan.arch import GPU_ARCHS, Arch
from multiattn.plan.backend import Backend, Op, Variant, later
from multiattn.plan.support import Capability, Reason
from multiattn.plan.toolchain import probe_gpu, version_of

CUDA_TILE = (1, 7)
"""The release of cuda-tile that kernel, signatures and interpreter were run with; all three touch what is private."""

OLDEST_TILEIRAS = (13, 4)
"""The first that knows every arch (13.2 has no sm_90) and the bytecode of cuda-tile 1.7."""

OLDEST_DRIVER = (13, 0)
"""CUDA version of the oldest driver that loads tileiras' cubins: r580."""

_DRIVER = "libcuda.so.1"
_HINT = "pip install 'multiattn[cutile]'"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


@functools.cache
def _tileiras_version() -> str | None:
    """Version of the tileiras that cuda-tile uses (of its packages, PATH or CUDA_HOME); None if it finds none."""
    from cuda.tile._compile import _find_compiler_bin

    try:
        path = _find_compiler_bin().path
    except FileNotFoundError:
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"release [\d.]+, V([\d.]+)", text)  # a broken one prints no version: as good as none
    return match.group(1) if match else None


def _versions() -> Mapping[str, str | None]:
    tileiras = None if _probe_module() else _tileiras_version()
    return {"cuda-tile": version_of("cuda-tile"), "tileiras": tileiras, "torch": torch.__version__}


def _probe_module() -> tuple[Reason, ...]:
    allowed = f"cuda-tile {_dotted(CUDA_TILE)}"
    version = version_of("cuda-tile")
    if version is None or importlib.util.find_spec("cuda.tile") is None:
        return (Reason(code="module", got="no cuda-tile", allowed=allowed, hint=_HINT),)
    if _release(version) != CUDA_TILE:
        return (Reason(code="module", got=f"cuda-tile {version}", allowed=allowed, hint=_HINT),)
    return ()


def _probe_compiler() -> tuple[Reason, ...]:
    if reasons := _probe_module():
        return reasons
    version = _tileiras_version()
    if version is not None and _release(version) >= OLDEST_TILEIRAS:
        return ()
    got = "no tileiras" if version is None else f"tileiras {version}"
    allowed = f"tileiras {_dotted(OLDEST_TILEIRAS)} or newer"
    return (Reason(code="compiler", got=got, allowed=allowed, hint=_HINT),)


def _driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, as its own library says (torch has no public way); None without it."""
    try:
        library = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    number = ctypes.c_int()
    status = library.cuDriverGetVersion(ctypes.byref(number))
    if status != 0:
        raise RuntimeError(f"cuDriverGetVersion failed with CUresult {status}")
    return number.value // 1000, number.value % 1000 // 10


def _probe_gpu() -> tuple[Reason, ...]:
    if reasons := probe_gpu():
        return reasons
    version = _driver_version()
    if version is not None and version >= OLDEST_DRIVER:
        return ()
    got = f"no {_DRIVER}" if version is None else f"a driver for CUDA {_dotted(version)}"
    return (Reason(code="driver", got=got, allowed=f"a driver for CUDA {_dotted(OLDEST_DRIVER)} or newer (r580)"),)


def _probe(arch: Arch) -> tuple[Reason, ...]:
    return (*_probe_compiler(), *_probe_gpu()) if arch.is_gpu else _probe_module()


def _forward_variant(name: str) -> Variant:
    """A rung of the ladder; one that leads to another is selected only by name."""
    rung = STEPS[name]
    return Variant(
        name=name,
        summary=rung.summary,
        capability=_EVERYWHERE,
        rules=rules.rules_of(name),
        flags=tuple(asdict(rung.step).items()),
        parent=rung.parent,
        only_named=any(other.parent == name for other in STEPS.values()),
        fits=functools.partial(fits.why_not_forward, step=rung.step),
    )


def _backward_variant(name: str, summary: str, **rest: Any) -> Variant:
    workspace = functools.partial(workspace_bytes, name)
    return Variant(name=name, summary=summary, capability=_EVERYWHERE, workspace=workspace, **rest)


_EVERYWHERE = Capability(arches=("cpu", *GPU_ARCHS))
_OPERATIONS: dict[str, Any] = {
    "prepare": later("multiattn.cutile.launch", "prepare"),
    "export": later("multiattn.cutile.export", "export_plan"),
}

BACKEND = Backend(
    name="cutile",
    summary="NVIDIA cuTile Python",
    probe=_probe,
    probe_compiler=_probe_compiler,
    versions=_versions,
    forward=Op(variants=tuple(_forward_variant(name) for name in STEPS), candidates=forward_candidates, **_OPERATIONS),
    backward=Op(
        variants=(
            _backward_variant(
                "atomic",
                "one pass over the keys, dq added up in fp32 by atomics (TMA reductions where there are)",
                rules=rules.ATOMIC_RULES,
                fits=fits.why_not_one_pass,
                deterministic=False,
            ),
            _backward_variant(
                "two_pass",
                "a pass over the queries for dq, one over the keys for dk and dv",
                rules=rules.TWO_PASS_RULES,
                fits=fits.why_not_two_pass,
            ),
        ),
        candidates=backward_candidates,
        **_OPERATIONS,
    ),
)
