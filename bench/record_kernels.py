"""Kernels as the compilers make them: keys of what reaches a compiler, digests of machine code, what a cubin says.

What reaches a compiler is Triton's and Gluon's first IR, cuTile's bytecode and CUDA's source, all without comments,
docstrings and places in files. `open_doors` stands in front of each compiler of this process: what has a key that is
in the cache is taken from there, so that a kernel whose Python or C++ was only reworded or moved costs its tracing.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from multiattn.inspect.facts import Facts, read_kernel
from multiattn.inspect.mix import Counts
from multiattn.plan import backend as registry
from multiattn.plan.backend import Exported, Plan
from multiattn.plan.cubin import read_sections
from multiattn.plan.toolchain import version_of
from multiattn.run import cache

NO_SPILLS_UP_TO = 128
"""The head_dim up to which no rule may spill in a loop that every block runs."""
KNOWN_SPILLS: Mapping[tuple[str, str, str], int] = {
    ("triton", "warp_specialized", "sm90"): 78,
    ("triton", "two_pass", "sm90"): 2,
    ("triton", "stored", "sm100"): 2,
    ("triton", "stored", "sm103"): 2,
    ("cutile", "atomic", "sm90"): 13,
    ("cutile", "full", "sm120"): 2,
    ("cutile", "full", "sm121"): 2,
}
"""By backend, variant and arch, the spills in hot loops that pass all the same. The compiler on record makes worse code
of Gluon's kernels than the one that rules are made with (docs/gluon.md, "Newer Tritons"). cuTile's rule for
causal D=128 has spilled twice since the kernel lost its second pass; nobody has measured it on these arches. Triton's
pass over the keys spills twice with a bias at D=64, where Triton 3.6 does not. cuTile's one pass spills up to eight
times at D=64 with the mask, and thirteen with a packed batch: it was measured so, and the tile that does not is slower.
Triton's `stored` is by name alone up to D=256, and has the tiles of wider heads.
"""
_KEPT = re.compile(r"\.(text|nv\.constant(?!4\b)\d+|nv\.shared)(?=\.|$)")
_RESERVED = ".nv.shared.reserved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kernel as it was compiled: digests of what reached the compiler (`key`) and of the machine code (`digest`).

    The other fields are those of multiattn.inspect.facts.Facts; `hot` and `mma` count the instructions of its hot loops
    by class, and its matrix multiplications by full name.
    """

    name: str
    key: str
    digest: str
    threads: int
    registers: int
    stack_bytes: int
    smem_bytes: int
    blocks: int
    share: float
    limiter: str
    code_bytes: int
    hot_loops: int
    hot_spills: int
    other_spills: int
    hot: Mapping[str, int]
    mma: Mapping[str, int]
    features: tuple[str, ...]
    chosen: tuple[str, ...] = ()

    @property
    def counts(self) -> Counts:
        """The instructions of the hot loops, to be asked for ratios."""
        return Counts(classes=self.hot, tensor_names=self.mma)

    @classmethod
    def of(cls, facts: Facts, *, key: str, digest: str) -> Kernel:
        """The kernel that was read off a cubin."""
        own: dict[str, Any] = {"key": key, "digest": digest, "hot": facts.hot.classes, "mma": facts.hot.tensor_names}
        return cls(**own, **{it.name: getattr(facts, it.name) for it in fields(cls) if it.name not in own})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Kernel:
        """The kernel of its own fields, from JSON."""
        return cls(**{**data, "features": tuple(data["features"]), "chosen": tuple(data["chosen"])})


def main_of(kernels: tuple[Kernel, ...]) -> Kernel:
    """The kernel of a launch that most of the work is in: the one with the most tensor-core instructions."""
    return max(kernels, key=lambda it: (it.counts.tensor, it.code_bytes))


def promised_without_spills(key: tuple[str, ...]) -> int | None:
    """The most spills that a rule may have in its hot loops; None where nothing is promised.

    The promise is made to callers who name no variant: a rung may be there to show what spills cost.
    """
    backend, direction, name, arch, head_dim = key[:5]
    variants = registry.get(backend).op("forward" if direction == "forward" else "backward").variants
    named = any(variant.name == name and variant.only_named for variant in variants)
    width = max(map(int, head_dim.split("/")))
    return None if named or width > NO_SPILLS_UP_TO else KNOWN_SPILLS.get((backend, name, arch), 0)


# ---------------------------------------------------------------- machine code


def digest_of(kernel: Exported) -> str:
    """Sixteen hex digits over code, constants, shared memory, registers and launch.

    Left out are names, debug information, notes, build ids, and variables in global memory with bank 4, which has their
    addresses: no kernel here reads any, but the compiler keeps constants there that a header names.
    """
    found = []
    for section in read_sections(kernel.cubin):
        kind = _KEPT.match(section.name)
        if kind is not None and not section.name.startswith(_RESERVED):
            registers = section.info >> 24 if kind[1] == "text" else 0
            found.append((kind[1], section.size, registers, hashlib.sha256(section.content).hexdigest()))
    launch = (found, kernel.threads, kernel.dynamic_smem_bytes)
    return hashlib.sha256(repr(launch).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- compiled


@functools.cache
def doors() -> Doors:
    """The doors of this process."""
    return open_doors(cache.directory() / "compiled")


def compile_task(task: tuple[Plan, tuple[Kernel, ...]]) -> tuple[Kernel, ...]:
    """Compile the kernels of a Plan, unless the cache has them. The compiler's own exception passes through.

    Kernels on record, the second part of `task`, are not read again while their key and digest are the same.
    """
    stand, (plan, recorded) = doors(), task
    stand.take()
    made = registry.get(plan.backend).op(plan.direction).export(plan, ())
    known = {it.key: it for it in recorded}
    once = dict(zip(stand.take(), made, strict=True))  # a kernel may be launched again and again
    return tuple(_read(it, key, plan, known.get(key)) for key, it in once.items())


def _read(kernel: Exported, key: str, plan: Plan, known: Kernel | None) -> Kernel:
    digest = digest_of(kernel)
    if known is not None and known.digest == digest:
        return known
    return Kernel.of(read_kernel(kernel, plan), key=key, digest=digest)


# ---------------------------------------------------------------- doors

_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class Doors:
    """Keys of what was compiled since the last `take`, in order, and how many compilers ran."""

    def __init__(self, folder: Path) -> None:
        """Keep what is compiled in `folder`."""
        self.folder = folder
        self.keys: list[str] = []
        self.compiled = 0

    def take(self) -> list[str]:
        """The keys since the last time."""
        keys, self.keys = self.keys, []
        return keys

    def entry(self, key: str, make: Callable[[Path], None]) -> Path:
        """The folder of a key, which `make` fills when there is none."""
        self.keys.append(key)
        place = self.folder / key
        if not place.exists():
            self.compiled += 1
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = self.folder / f".making-{key}-{hashlib.sha256(repr(id(make)).encode()).hexdigest()[:8]}"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            make(draft)
            try:
                draft.rename(place)
            except OSError:  # another process was first
                shutil.rmtree(draft)
        return place


def key_of(*parts: object) -> str:
    """Sixteen hex digits over parts."""
    return cache.key_of(str(part) for part in parts)[:16]


def open_doors(folder: Path) -> Doors:
    """Stand in front of the compilers that are installed; once in a process, before a backend imports its compiler."""
    doors = Doors(folder)
    for name, stand in (("triton", _triton), ("cuda-tile", _cutile), ("cuda-core", _cuda)):
        if version_of(name) is not None:
            stand(doors)
    return doors


# ---------------------------------------------------------------- Triton, Gluon


def _triton(doors: Doors) -> None:
    import triton
    from triton import knobs
    from triton.compiler.compiler import CompiledKernel

    real = triton.compile

    class HitError(Exception):
        """There is code of this key, so nothing has to be compiled."""

    def compile_once(src: Any, target: Any = None, options: Any = None, **rest: Any) -> Any:
        make_ir = src.make_ir
        key = ""

        def traced(target: Any, options: Any, *more: Any) -> Any:
            nonlocal key
            module = make_ir(target, options, *more)
            asked = {name: value for name, value in vars(options).items() if name != "extern_libs"}
            key = key_of("triton", triton.__version__, target, sorted(asked.items()), module.str_nodebug())
            if (doors.folder / key).exists():
                raise HitError
            return module

        def write(draft: Path) -> None:
            for name, path in kernel.metadata_group.items():
                if name.endswith((".json", ".cubin")):
                    shutil.copy(path, draft / name)

        src.make_ir = traced
        try:
            with knobs.compilation.scope():
                knobs.compilation.always_compile = True  # else what Triton has on disk never comes to its first IR
                kernel = real(src, target=target, options=options, **rest)
        except HitError:
            pass
        finally:
            del src.make_ir
        place = doors.entry(key, write)
        group = {path.name: str(path) for path in place.iterdir()}
        return CompiledKernel(src, group, key)

    triton.compile = compile_once


# ---------------------------------------------------------------- cuTile


def _cutile(doors: Doors) -> None:
    from cuda.tile import _compile as compiler

    real_bytecode, real_cubin = compiler._get_bytecode, compiler.compile_cubin
    keys: dict[str, str] = {}

    def get_bytecode(keeper: Any, options: Any, anonymize_debug_info: bool) -> Any:
        keeper.final_ir = keeper.final_ir or [None] * keeper.num_signatures
        plain = bytes(real_bytecode(keeper, options, True).bytecode)
        found = real_bytecode(keeper, options, anonymize_debug_info)
        keys[hashlib.sha256(found.bytecode).hexdigest()] = hashlib.sha256(plain).hexdigest()
        return found

    def compile_cubin(
        source: str, options: Any, arch: str, timeout_sec: Any, remarks_output_file: Any = None, **rest: Any
    ) -> Path:
        plain = keys[hashlib.sha256(Path(source).read_bytes()).hexdigest()]
        key = key_of("cutile", version_of("cuda-tile"), compiler._get_compiler_version_string(), options, arch, plain)

        def write(draft: Path) -> None:
            remarks = draft / "remarks.yaml"
            made = real_cubin(source, options, arch, timeout_sec, remarks_output_file=remarks, **rest)
            shutil.copy(made, draft / "kernel.cubin")

        place = doors.entry(key, write)
        if remarks_output_file is not None:
            shutil.copy(place / "remarks.yaml", remarks_output_file)
        return place / "kernel.cubin"

    compiler._get_bytecode, compiler.compile_cubin = get_bytecode, compile_cubin


# ---------------------------------------------------------------- CUDA


def _cuda(doors: Doors) -> None:
    import cuda.core
    from cuda.bindings import nvrtc

    real = cuda.core.Program
    version = nvrtc.nvrtcVersion()[1:], version_of("nvidia-cuda-nvrtc")

    class Once:
        def __init__(self, source: str, language: str, options: Any) -> None:
            self.asked = source, language, options

        def compile(self, kind: str, *args: Any, **rest: Any) -> Any:
            source, language, options = self.asked
            if kind != "cubin":
                return real(source, language, options).compile(kind, *args, **rest)
            reached = _reached(source, [Path(it) for it in options.include_path])
            texts = [f"{name}\n{_plain(text)}" for name, text in sorted(reached.items())]
            key = key_of("cuda", version, options.arch, options.std, _plain(source), *texts)

            def write(draft: Path) -> None:
                (draft / "kernel.cubin").write_bytes(bytes(real(source, language, options).compile(kind).code))

            class Code:
                code = (doors.entry(key, write) / "kernel.cubin").read_bytes()

            return Code

    cuda.core.Program = Once


def _reached(source: str, includes: list[Path]) -> dict[str, str]:
    reached: dict[str, str] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        name = waiting.pop()
        path = next((it / name for it in includes if (it / name).is_file()), None)
        if name not in reached and path is not None:
            reached[name] = path.read_text()
            waiting += _INCLUDE.findall(reached[name])
    return reached


def _plain(source: str) -> str:
    """C++ without comments, blank lines and indentation."""
    text = _COMMENT.sub(lambda it: it[0] if it[0][0] in "\"'" else " ", source)
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())
