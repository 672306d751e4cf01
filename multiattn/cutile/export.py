"""A Plan's kernels compiled to run elsewhere: cubins with the compiler's remarks, Tile IR on demand."""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda.tile._cext import default_tile_context
from cuda.tile._compile import compile_cubin
from cuda.tile.compilation import export_kernel

from multiattn.cutile.bind import bind_proven, for_most_heads, tile_ir
from multiattn.cutile.compile import compile_limit, get_kernel, get_signature
from multiattn.cutile.table import KernelLaunch, launches_of
from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Exported, Plan

KINDS = ("tileir", "tileirbc")
"""Tile IR as text, and as the bytecode that tileiras takes."""


def export_plan(plan: Plan, kinds: Sequence[str]) -> tuple[Exported, ...]:
    """Every kernel of a Plan, compiled afresh; of `kinds` it has `KINDS`. The compiler's own error passes through.

    A backward is one without dlse. ValueError where the Binding of a forward kernel is not what its Tile IR and its
    cubin take.
    """
    plan = for_most_heads(plan) if plan.direction == "forward" else plan
    return tuple(_export(plan, launch, kinds) for launch in launches_of(plan))


def _export(plan: Plan, launch: KernelLaunch, kinds: Sequence[str]) -> Exported:
    signature = get_signature(launch)
    begin = time.perf_counter()
    bytecode, cubin, remarks = compile_with_remarks(get_kernel(launch), signature, plan.arch)
    seconds = time.perf_counter() - begin
    text = tile_ir(cubin)
    entry = abi.read_entry(cubin, signature.symbol)
    texts = {"tileir": text.encode(), "tileirbc": bytecode}
    return Exported(
        kernel=signature.symbol,
        seconds=seconds,
        cubin=cubin,
        threads=entry.threads,
        texts={kind: texts[kind] for kind in KINDS if kind in kinds},
        remarks=remarks,
        binding=bind_proven(launch, text, entry) if plan.direction == "forward" else None,
    )


def compile_with_remarks(kernel: Any, signature: Any, arch: Arch) -> tuple[bytes, bytes, str]:
    """Bytecode, cubin and remarks (YAML) of a kernel, within the limit of compilation.

    The public `export_kernel` gives a cubin without the remarks. So it makes the bytecode, and what it would call next
    is called here: of cuda-tile that is private, but it takes all flags from there. The other way, a cache folder of
    our own in whose entries cuda-tile keeps remarks, changes a setting of the whole process, and edits them.
    """
    gpu_code = arch.name.replace("sm", "sm_")
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, compile_limit():
        export_kernel(kernel, [signature], buffer, gpu_code=gpu_code, output_format="tileir_bytecode")
        source, remarks = Path(folder, "kernel.tileirbc"), Path(folder, "remarks.yaml")
        source.write_bytes(buffer.getvalue())
        cubin = compile_cubin(
            str(source),
            kernel._compiler_options,
            gpu_code,
            timeout_sec=default_tile_context.config.compiler_timeout_sec,
            remarks_output_file=remarks,
        )
        return buffer.getvalue(), Path(cubin).read_bytes(), remarks.read_text(encoding="utf-8", errors="replace")
