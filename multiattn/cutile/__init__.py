"""The cuTile backend: kernels for both directions, compiled by tileiras or interpreted on the CPU."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from multiattn.cutile import decode
from multiattn.cutile.families import FAMILIES, candidates_of
from multiattn.cutile.forward import FAMILY, STEPS
from multiattn.cutile.kernels.constants import SMALLEST_TILE
from multiattn.cutile.rules import rules_of
from multiattn.mask import KINDS
from multiattn.plan.arch import GPU_ARCHS, Arch
from multiattn.plan.backend import Backend, Direction, Op, Variant, later
from multiattn.plan.ladder import rung_variants
from multiattn.plan.support import Capability, Reason
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


_EVERYWHERE = Capability(
    arches=("cpu", *GPU_ARCHS),
    masks=KINDS,
    sinks=True,
    scores=True,
    block_masks=SMALLEST_TILE,
    score_gradients=True,
    packing=True,
)


def _variant(direction: Direction, name: str, summary: str, **rest: Any) -> Variant:
    """A variant whose family answers for it."""
    family = FAMILIES[direction, name]
    return Variant(
        name=name,
        summary=summary,
        config_type=family.config,
        rules=rules_of(name),
        workspace=family.workspace,
        settle=family.settle,
        fits=family.fits,
        **{"capability": _EVERYWHERE, **rest},
    )


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
            _variant(
                "forward",
                decode.NAME,
                "decode: query heads that share keys are rows of one tile, keys divided among blocks, "
                "parts merged after",
                capability=replace(_EVERYWHERE, block_masks=0, packing=False, caches=True),
            ),
            *rung_variants(
                STEPS,
                FAMILY.config,
                capability_of=lambda step: _EVERYWHERE,
                rules_of=rules_of,
                fits=FAMILY.fits,
                workspace=FAMILY.workspace,
            ),
        ),
        candidates=candidates_of("forward"),
        **_OPERATIONS,
    ),
    backward=Op(
        variants=(
            _variant(
                "backward",
                "stored",
                "a pass over the keys for dk and dv that stores ds, for some heads at a time, and dq of that",
                capability=Capability(arches=("cpu", "sm90")),
            ),
            _variant(
                "backward",
                "atomic",
                "one pass over the keys, dq added up in fp32 by atomics (TMA reductions where there are)",
                deterministic=False,
            ),
            _variant(
                "backward",
                "two_pass",
                "a pass over the queries for dq, one over the keys for dk and dv",
            ),
        ),
        candidates=candidates_of("backward"),
        **_OPERATIONS,
    ),
)
