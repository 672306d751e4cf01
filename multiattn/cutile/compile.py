"""A launch's kernel and signature as cuTile has them, compiled for any arch with no GPU and no driver.

A Plan's kernels are compiled to run elsewhere as well: cubins with the compiler's remarks, Tile IR on demand.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import _compile as private
from cuda.tile._cext import default_tile_context
from cuda.tile._compile import compile_cubin
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, ScalarConstraint, export_kernel

from multiattn import progress
from multiattn.cutile.arrays import ArrayKind
from multiattn.cutile.bind import bind_proven
from multiattn.cutile.claims import tile_ir
from multiattn.cutile.families import family_of, launches_of
from multiattn.cutile.forward import PIPELINES
from multiattn.cutile.kernels.constants import KernelConstants
from multiattn.cutile.kernels.tiles import IN_64_BITS
from multiattn.cutile.launches import KernelLaunch, Scalar
from multiattn.cutile.score import functions_of, text_of
from multiattn.plan import abi
from multiattn.plan.arch import Arch
from multiattn.plan.backend import Exported, Plan
from multiattn.run import ahead
from multiattn.run.fork import hold_across_fork

KINDS = ("tileir", "tileirbc")
"""Tile IR as text, and as the bytecode that tileiras takes."""

COMPILE_SECONDS = 120.0
"""Longest compilation: a tile too large for the registers can take tileiras minutes, a good one takes it seconds."""

_DTYPES = {
    **{getattr(torch, name): getattr(ct, name) for name in ("float16", "bfloat16", "float32", "float64")},
    **{getattr(torch, name): getattr(ct, name) for name in ("int8", "uint8", "int16", "int32", "int64")},
    torch.bool: ct.bool_,
    torch.float8_e4m3fn: ct.float8_e4m3fn,
}


def get_kernel(launch: KernelLaunch) -> Any:
    """The kernel with its constants and hints; launches that share them share the kernel, and what it has compiled."""
    return _kernel(launch.module, launch.kernel, launch.constants, launch.is_64bit, launch.blocks_per_sm, launch.warps)


@functools.cache
def _kernel(
    place: str,
    name: str,
    constants: KernelConstants,
    is_64bit: bool,
    blocks_per_sm: int | None,
    warps: int | None,
) -> Any:
    asked: Any = constants
    if getattr(constants, "score", None) is not None:
        asked = replace(asked, score=functions_of(asked.score, getattr(constants, "gradients", ())))
    module = importlib.import_module(f"multiattn.cutile.kernels.{place}")
    function = getattr(module, f"{name}_kernel")(asked)
    if is_64bit:
        annotations = function.__annotations__
        function.__annotations__ = {it: IN_64_BITS.get(kind, kind) for it, kind in annotations.items()}
    return ct.kernel(function, occupancy=blocks_per_sm, num_worker_warps=warps)


def get_signature(launch: KernelLaunch) -> Any:
    """The parameters of a kernel as a launch would specialise them; its symbol tells the constants, too.

    Launches of many sizes share one, made once: that costs the host as much as all else of a launch.
    """
    arrays = tuple(it.kind for it in launch.arrays.values())
    optional = tuple(tuple(it.kind for it in given) for given in launch.optional.values())
    scalars = tuple(map(_type_of, launch.scalars.values()))
    return _signature(launch.kernel, launch.constants, launch.is_64bit, arrays, optional, scalars)


@functools.cache
def _signature(
    kernel: str,
    constants: KernelConstants,
    is_64bit: bool,
    arrays: tuple[ArrayKind, ...],
    optional: tuple[tuple[ArrayKind, ...], ...],
    scalars: tuple[type | tuple[type, ...], ...],
) -> Any:
    dtype = ct.int64 if is_64bit else ct.int32
    parameters = [
        *(_array(array, dtype) for array in arrays),
        *(tuple(_array(array, dtype) for array in given) for given in optional),
        *map(_scalar, scalars),
    ]
    convention = CallingConvention.cutile_python_v2()  # v2: a static extent
    values = dict(vars(constants))
    score, slots = values.pop("score", None), values.pop("gradients", ())
    name = f"{kernel}_packed" if values.pop("packed", False) else kernel
    name = name if score is None else f"{name}_{text_of(score, slots)[0]}"
    records = [vars(it) if is_dataclass(it) else {"": it} for it in values.values()]
    numbers = [_number(it) for record in records for it in record.values()]
    named = KernelSignature([*parameters, *numbers], convention).with_mangled_symbol(name)
    return KernelSignature(parameters, convention, named.symbol)


def _type_of(value: Scalar) -> type | tuple[type, ...]:
    return tuple(map(type, value)) if isinstance(value, tuple) else type(value)


def _scalar(kind: type | tuple[type, ...]) -> Any:
    if isinstance(kind, tuple):
        return tuple(ScalarConstraint(ct.int32 if it is int else ct.float32) for it in kind)
    return ScalarConstraint(ct.float32)


def _number(constant: float | str | None) -> float:
    """A constant as a symbol can have it."""
    if constant is None:
        return 0
    return PIPELINES.index(constant) if isinstance(constant, str) else constant


def _array(array: ArrayKind, index_dtype: Any) -> Any:
    """With a static D, where it has one."""
    tail = () if array.head_dim is None else (1,)
    static_dim = {"shape_constant": (None, None, None, array.head_dim)} if tail else {}
    return ArrayConstraint(
        _DTYPES[array.dtype],
        len(array.strides) + 1,
        index_dtype=index_dtype,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=array.overlaps,
        shape_divisible_by=(*array.extents, *tail),
        stride_constant=(*(None for _ in array.strides), array.last_stride),
        stride_divisible_by=(*array.strides, 1),
        base_addr_divisible_by=array.alignment,
        **static_dim,
    )


def _compile_limit() -> AbstractContextManager[None]:
    """Bounds compilation to `COMPILE_SECONDS`, unless the environment has its own limit."""
    if "CUDA_TILE_COMPILER_TIMEOUT_SEC" in os.environ:
        return nullcontext()
    limit: AbstractContextManager[None] = ct.compiler_timeout(COMPILE_SECONDS)
    return limit


def make_cubins(launches: Sequence[KernelLaunch], arch: Arch) -> list[bytes]:
    """Compile kernels, or find them in cuTile's cache on disk, as `ct.launch` would, within the limit of compilation.

    While tileiras compiles one the next is traced, that with the most arrays first: it takes the longest.
    """
    if not launches:
        return []
    with compiling, progress.compiling("cutile", arch.name):
        if len(launches) == 1:
            return [_make_cubin(launch, arch) for launch in launches]
        ordered = sorted(launches, key=lambda it: -len(it.arrays))
        with ThreadPoolExecutor(len(launches)) as threads:
            made = dict(zip(map(id, ordered), threads.map(lambda it: _make_cubin(it, arch), ordered), strict=True))
        return [made[id(launch)] for launch in launches]


class _Compiling:
    """Held by every compilation; those that overlap share the limit of time, which is cuTile's for the whole process.

    A limit that a caller sets meanwhile (`ct.compiler_timeout`) is lost when the last of them ends. While tileiras
    runs, a process of its own, cuTile's lock, which is of all compilation, is let go.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._shared = ExitStack()

    def __enter__(self) -> None:
        with self._changed:
            if not self._count:
                with ExitStack() as entered:
                    entered.enter_context(_compile_limit())
                    entered.enter_context(_without_lock())
                    self._shared = entered.pop_all()
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._count -= 1
            if not self._count:
                self._shared.close()
                self._changed.notify_all()

    def acquire(self) -> None:
        """Wait until nobody compiles, and let nobody begin."""
        self._changed.acquire()
        self._changed.wait_for(lambda: not self._count)

    def release(self) -> None:
        """Let others compile."""
        self._changed.release()


compiling = _Compiling()
hold_across_fork(compiling)


def _make_cubin(launch: KernelLaunch, arch: Arch) -> bytes:
    buffer, gpu_code = io.BytesIO(), arch.name.replace("sm", "sm_")
    export_kernel(get_kernel(launch), [get_signature(launch)], buffer, gpu_code=gpu_code, output_format="cubin")
    return buffer.getvalue()


@contextmanager
def _without_lock() -> Iterator[None]:
    """Lets go of cuTile's lock while tileiras runs."""
    lock = private._compiler_lock

    def compile_unlocked(*args: Any, **options: Any) -> Any:
        ahead.begin()
        lock.release()
        try:
            return known(*args, **options)
        finally:
            lock.acquire()

    known, private.compile_cubin = private.compile_cubin, compile_unlocked
    try:
        yield
    finally:
        private.compile_cubin = known


# ---------------------------------------------------------------- exported


def export_plan(plan: Plan, kinds: Sequence[str]) -> tuple[Exported, ...]:
    """Every kernel of a Plan, compiled afresh; of `kinds` it has `KINDS`. The compiler's own error passes through.

    A backward is one without dlse. ValueError where the Binding of a forward kernel is not what its Tile IR and its
    cubin take.
    """
    return tuple(_export(plan, launch, kinds) for launch in launches_of(plan))


def _export(plan: Plan, launch: KernelLaunch, kinds: Sequence[str]) -> Exported:
    signature = get_signature(launch)
    begin = time.perf_counter()
    bytecode, cubin, remarks = compile_with_remarks(get_kernel(launch), signature, plan.arch)
    seconds = time.perf_counter() - begin
    text = tile_ir(cubin)
    entry = abi.read_entry(cubin, signature.symbol)
    binding = bind_proven(launch, text, entry) if plan.direction == "forward" else None
    texts = {"tileir": text.encode(), "tileirbc": bytecode}
    return Exported(
        kernel=signature.symbol,
        seconds=seconds,
        cubin=cubin,
        threads=entry.threads,
        texts={kind: texts[kind] for kind in KINDS if kind in kinds},
        remarks=remarks,
        binding=binding if family_of(plan).is_emitted else None,
    )


def compile_with_remarks(kernel: Any, signature: Any, arch: Arch) -> tuple[bytes, bytes, str]:
    """Bytecode, cubin and remarks (YAML) of a kernel, within the limit of compilation.

    The public `export_kernel` gives a cubin without the remarks. So it only makes the bytecode here, and the private
    function that it would call next compiles it, with the same flags. cuda-tile also keeps remarks in its cache, but
    a cache folder of our own would be a setting of the whole process, and the remarks in it are edited.
    """
    gpu_code = arch.name.replace("sm", "sm_")
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, compiling:
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
