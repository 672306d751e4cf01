"""The kernels' source: which there are (`Kernel`), the translation unit that makes them, the files it reaches."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiattn.backend import Plan
from multiattn.cuda.configs import CudaConfig, smem_bytes
from multiattn.cuda.params import ForwardParams
from multiattn.cuda.variants import flags_of
from multiattn.problem import VECTOR_BYTES, Problem

ROOT = Path(__file__).parent
DEVICE_INCLUDES = (ROOT / "include", ROOT / "kernels")
HOST_INCLUDES = (ROOT / "emulation" / "include", *DEVICE_INCLUDES)
"""The emulation's `multiattn/ptx.cuh` comes first: a kernel never says which of the two it runs on."""

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One instance of the forward kernel: what of a Problem and a config is known when it is compiled."""

    dtype: str
    head_dim: int
    causal: bool
    aligned: bool
    config: CudaConfig
    smem_bytes: int

    @classmethod
    def of(cls, problem: Problem, config: CudaConfig, flags: Mapping[str, Any]) -> Kernel:
        """The instance that runs `problem`."""
        return cls(
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            causal=problem.causal,
            aligned=problem.alignment % VECTOR_BYTES == 0,
            config=config,
            smem_bytes=smem_bytes(flags, config, problem),
        )

    @property
    def name(self) -> str:
        """Its C symbol, what a profiler shows."""
        config = self.config
        mask = "causal" if self.causal else "full"
        q_place = "qreg" if config.q_in_registers else "qsmem"
        tiles = f"{config.tile_m}x{config.tile_n}_w{config.warps}_s{config.stages}_{q_place}_o{config.occupancy}"
        return f"forward_{self.dtype}_d{self.head_dim}_{mask}_{tiles}{'' if self.aligned else '_unaligned'}"

    @property
    def traits(self) -> str:
        """Its `ForwardTraits`."""
        config = self.config
        what = (self.head_dim, _cpp(self.causal), _cpp(self.aligned))
        how = (config.tile_m, config.tile_n, config.warps, config.stages, _cpp(config.q_in_registers))
        return f"multiattn::ForwardTraits<multiattn::{self.dtype}, {', '.join(map(str, (*what, *how)))}>"


def kernel_of(plan: Plan) -> Kernel:
    """The kernel that a Plan of this backend launches."""
    assert isinstance(plan.config, CudaConfig)
    return Kernel.of(plan.problem, plan.config, flags_of(plan))


def translation_unit(kernels: Sequence[Kernel]) -> str:
    """C++ that defines `kernels`, and asserts what Python believes about each."""
    params_size = ctypes.sizeof(ForwardParams)
    parts = [
        '#include "forward.cuh"\n',
        f'static_assert(sizeof(multiattn::ForwardParams) == {params_size}, "params.ForwardParams");\n',
    ]
    for kernel in kernels:
        traits = f"Traits_{kernel.name}"
        parts.append(
            f"using {traits} = {kernel.traits};\n"
            f'static_assert({traits}::SMEM_BYTES == {kernel.smem_bytes}, "configs.smem_bytes");\n'
            f"KERNEL({traits}::THREADS, {kernel.config.occupancy})\n"
            f"{kernel.name}(PARAMETERS(multiattn::ForwardParams) params) {{\n"
            f"  multiattn::forward<{traits}>(params);\n"
            "}\n"
        )
    return "\n".join(parts)


def files_reached(source: str, includes: Sequence[Path]) -> dict[str, str]:
    """Every file that `source` includes by a quoted name, directly or not, by that name: what a cache key must cover.

    Raises FileNotFoundError for a name that is in none of `includes`.
    """
    reached: dict[str, str] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        path = next((directory / name for directory in includes if (directory / name).is_file()), None)
        if path is None:
            raise FileNotFoundError(f"#include {name!r}: in none of {', '.join(map(str, includes))}")
        reached[name] = path.read_text()
        waiting += _INCLUDE.findall(reached[name])
    return reached


def _cpp(value: bool) -> str:
    return "true" if value else "false"
