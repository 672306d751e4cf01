"""The compilers' own doors: what reaches each compiler, its key, and what was compiled of it before.

What reaches a compiler is Triton's and Gluon's first IR, cuTile's bytecode and CUDA's source, all without comments,
docstrings and places in files. `open_doors` stands in front of each compiler of this process: what has a key that is
in the cache is taken from there, so that a kernel whose Python or C++ was only reworded or moved costs its tracing.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multiattn.plan.toolchain import version_of
from multiattn.run import cache

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
