"""The cuTile backend: kernels for both directions, compiled by tileiras or interpreted on the CPU."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping
from typing import Any

import torch

from multiattn.cutile import decode
from multiattn.cutile.families import FAMILIES, candidates_of
from multiattn.cutile.forward import FAMILY, STEPS
from multiattn.cutile.rules import rules_of
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Backend, Direction, Op, Variant, later
from multiattn.plan.ladder import rung_variants
from multiattn.plan.support import Reason
from multiattn.plan.toolchain import dotted, probe_gpu, probe_release, release_of, version_of
from multiattn.run import driver

CUDA_TILE = (1, 7)
"""The release of cuda-tile that kernel, signatures and interpreter were run with; all three touch what is private."""

OLDEST_TILEIRAS = (13, 4)
"""The first that knows every arch (13.2 has no sm_90) and the bytecode of cuda-tile 1.7."""

OLDEST_DRIVER = (13, 0)
"""CUDA version of the oldest driver that loads tileiras' cubins: r580."""

_HINT = "pip install 'multiattn[cutile]'"


@functools.cache
def _tileiras_version() -> str | None:
    """Version of the tileiras that cuda-tile uses (of its packages, PATH or CUDA_HOME); None if it finds none."""
    from cuda.tile._compile import _get_compiler_version_string

    try:
        text = _get_compiler_version_string() or ""  # a broken one prints no version: as good as none
    except FileNotFoundError:
        return None
    match = re.search(r"release [\d.]+, V([\d.]+)", text)
    return match.group(1) if match else None


def _versions() -> Mapping[str, str | None]:
    tileiras = None if _probe_module() else _tileiras_version()
    return {"cuda-tile": version_of("cuda-tile"), "tileiras": tileiras, "torch": torch.__version__}


def _probe_module() -> tuple[Reason, ...]:
    return probe_release("cuda-tile", "cuda.tile", CUDA_TILE, CUDA_TILE, _HINT)


def _probe_compiler() -> tuple[Reason, ...]:
    if reasons := _probe_module():
        return reasons
    version = _tileiras_version()
    if version is not None and release_of(version) >= OLDEST_TILEIRAS:
        return ()
    got = "no tileiras" if version is None else f"tileiras {version}"
    allowed = f"tileiras {dotted(OLDEST_TILEIRAS)} or newer"
    return (Reason(code="compiler", got=got, allowed=allowed, hint=_HINT),)


def _driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, as its own library says (torch has no public way); None without it."""
    if driver.load_driver() is None:
        return None
    number = ctypes.c_int()
    driver.ask("cuDriverGetVersion", ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def _probe_gpu() -> tuple[Reason, ...]:
    if reasons := probe_gpu():
        return reasons
    version = _driver_version()
    if version is not None and version >= OLDEST_DRIVER:
        return ()
    got = "no NVIDIA driver" if version is None else f"a driver for CUDA {dotted(version)}"
    allowed, hint = f"a driver for CUDA {dotted(OLDEST_DRIVER)} or newer", "install NVIDIA's driver r580 or newer"
    return (Reason(code="driver", got=got, allowed=allowed, hint=hint),)


def _probe(arch: Arch) -> tuple[Reason, ...]:
    return (*_probe_compiler(), *_probe_gpu()) if arch.is_gpu else _probe_module()


def _variant(direction: Direction, name: str) -> Variant:
    return FAMILIES[direction, name].variant(name, rules_of(name))


_OPERATIONS: dict[str, Any] = {
    "prepare": later("multiattn.cutile.launch", "prepare"),
    "compile_ahead": later("multiattn.cutile.launch", "compile_ahead"),
    "export": later("multiattn.cutile.compile", "export_plan"),
}

BACKEND = Backend(
    name="cutile",
    summary="NVIDIA cuTile Python",
    probe=_probe,
    probe_compiler=_probe_compiler,
    versions=_versions,
    forward=Op(
        variants=(
            _variant("forward", decode.NAME),
            *rung_variants(
                STEPS,
                FAMILY.config,
                capability_of=lambda step: FAMILY.capability,
                rules_of=rules_of,
                fits=FAMILY.fits,
                workspace=FAMILY.workspace,
            ),
        ),
        candidates=candidates_of("forward"),
        **_OPERATIONS,
    ),
    backward=Op(
        variants=tuple(_variant("backward", name) for name in ("stored", "atomic", "two_pass")),
        candidates=candidates_of("backward"),
        **_OPERATIONS,
    ),
)
