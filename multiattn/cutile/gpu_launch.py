"""Launchers of cuTile's forward on a GPU: compiled as `ct.launch` would, launched by the driver itself.

`ct.launch` looks at every tensor, each time, to find the code for such tensors. All of that is fixed by a Plan, so code
and arguments are made once: see `multiattn.cutile.bind`, which is held against what cuTile made of the same call.
"""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import torch

from multiattn import abi
from multiattn.backend import Launcher, Plan
from multiattn.context import ensure_context
from multiattn.cutile.compile import get_signature, make_cubin
from multiattn.cutile.export import bind_proven, tile_ir
from multiattn.cutile.launch import get_grid, get_kernel, prepare_through_cutile
from multiattn.driver_launch import DriverLauncher, load_kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class _Code:
    """A kernel, loaded for every device, and what its cubin says of it."""

    function: int
    entry: abi.Entry
    tile_ir: str
    host: str | None


_known: dict[tuple[object, ...], _Code] = {}
_warned: set[str] = set()


def prepare(plan: Plan) -> Launcher:
    """The launcher of a Plan for the current device, compiled now.

    By `ct.launch` where the cubin has no host code for this machine, or where cuTile is of a release that compiles to
    something else than is known here, of which a RuntimeWarning tells, once. Both launch the same code with the same
    arguments; the driver takes half of the host's time.

    Raises `ct.TileCompilerTimeoutError` after `launch.COMPILE_SECONDS`, unless the environment variable
    CUDA_TILE_COMPILER_TIMEOUT_SEC says otherwise.
    """
    device = torch.cuda.current_device()
    ensure_context(device)
    signature = get_signature(plan)
    kernel = get_kernel(plan)
    key = (kernel, plan.arch.name, repr(signature))  # Plans of many lengths share code
    cubin = None if key in _known else make_cubin(kernel, signature, plan.arch)
    try:
        if cubin is not None:
            _known[key] = _load(cubin, signature.symbol, device)
        code = _known[key]
        if code.host not in (None, platform.machine()):
            return prepare_through_cutile(plan)
        binding = bind_proven(plan, signature, code.tile_ir, code.entry)
    except ValueError as error:
        _warn_once(error)
        return prepare_through_cutile(plan)
    return DriverLauncher(code.function, replace(binding, grid=get_grid(plan)), device)


def _load(cubin: bytes, symbol: str, device: int) -> _Code:
    """ValueError for a cubin that says less than those of the releases that are known."""
    return _Code(
        entry=abi.read_entry(cubin, symbol),
        tile_ir=tile_ir(cubin),
        host=abi.host_of(cubin),
        function=load_kernel(cubin, symbol, device),
    )


def _warn_once(error: ValueError) -> None:
    release: Any = ct.__version__
    if release not in _warned:
        _warned.add(release)
        warnings.warn(
            f"cuda-tile {release} compiles kernels to what multiattn does not know ({error}); ct.launch is used, which "
            "costs the host more",
            RuntimeWarning,
            stacklevel=3,
        )
