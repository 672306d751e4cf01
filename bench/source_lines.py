"""Lines of kernel: what of each language's sources runs on a GPU, counted without comments, docstrings and blanks."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.environment import ROOT

PACKAGE = ROOT / "multiattn"
_CUDA = PACKAGE / "cuda"
_INCLUDED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
_CPP = re.compile(
    r"""
    (?:u8|[uUL])?R"(?P<end>[^()\\\s]*)\(.*?\)(?P=end)"   # a raw string
    | "(?:\\.|[^"\\\n])*"
    | [A-Za-z_]\w*
    | \.?\d(?:'\w|[\w.])*                                # a number, whose ' parts digits
    | '(?:\\.|[^'\\\n])*'
    | (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The kernels of one direction in one language, as paths inside multiattn."""

    language: str
    what: str
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Lines of a part: of files that no other part of its language has, and of files that one has."""

    part: Part
    own: int
    shared: int


def parts() -> tuple[Part, ...]:
    """Every language's, in the order of the page; of CUDA's the files are those that its kernels include."""
    cutile = ("forward", "parts", "shape", "exp2", "tiles")
    gluon = ("forward", "producer", "ring", "softmax", "shape", "compat")
    backward = ("backward.cuh", "backward_q.cuh", "backward_rows.cuh")
    return (
        Part(language="cuTile", what="forward", files=tuple(f"cutile/{name}.py" for name in cutile)),
        Part(language="cuTile", what="backward", files=("cutile/backward.py", "cutile/tiles.py")),
        Part(language="plain Triton", what="forward", files=("triton/forward.py", "triton/tiles.py")),
        Part(language="plain Triton", what="backward", files=("triton/backward.py", "triton/tiles.py")),
        Part(language="Gluon", what="forward", files=tuple(f"triton/gluon/{name}.py" for name in gluon)),
        Part(language="CUDA C++", what="forward, wgmma", files=included("forward_wgmma.cuh")),
        Part(language="CUDA C++", what="forward, mma.sync", files=included("forward.cuh")),
        Part(language="CUDA C++", what="backward, mma.sync", files=included(*backward)),
    )


def included(*kernels: str) -> tuple[str, ...]:
    """The files that kernels of the CUDA backend are made of: themselves, and what they include, however far."""
    waiting = [_CUDA / "kernels" / name for name in kernels]
    reached: dict[Path, None] = {}
    while waiting:
        path = waiting.pop(0)
        if path not in reached:
            reached[path] = None
            folders = (path.parent, _CUDA / "include")
            names = _INCLUDED.findall(path.read_text())
            waiting += [next(folder / name for folder in folders if (folder / name).exists()) for name in names]
    return tuple(sorted(path.relative_to(PACKAGE).as_posix() for path in reached))


def count(wanted: Sequence[Part]) -> list[Count]:
    """The lines of each part; what it shares is what other parts of its language have, too."""
    lines = {name: code_lines(PACKAGE / name) for name in {name for part in wanted for name in part.files}}
    counts = []
    for part in wanted:
        others = {name for it in wanted if it is not part and it.language == part.language for name in it.files}
        shared = _total(lines, (name for name in part.files if name in others))
        own = _total(lines, (name for name in part.files if name not in others))
        counts.append(Count(part=part, own=own, shared=shared))
    return counts


def _total(lines: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(lines[name] for name in names)


def code_lines(path: Path) -> int:
    """Lines of a source file that have code."""
    text = path.read_text()
    return python_lines(text) if path.suffix == ".py" else cpp_lines(text)


def python_lines(text: str) -> int:
    """Lines with a token that is neither a comment nor of a string that stands as a statement: a docstring."""
    documents = [
        ((node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    source = text.splitlines()
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # ast counts columns in bytes, tokenize in characters
        column = len(source[token.start[0] - 1][: token.start[1]].encode()) if token.type == tokenize.STRING else 0
        start = (token.start[0], column)
        is_document = token.type == tokenize.STRING and any(begin <= start < end for begin, end in documents)
        if token.type not in _NO_CODE and not is_document:
            found |= {line for line in range(token.start[0], token.end[0] + 1) if source[line - 1].strip()}
    return len(found)


def cpp_lines(text: str) -> int:
    """Lines that are not blank once comments are gone; what looks like one in a string is none."""

    def kept(match: re.Match[str]) -> str:
        return match[0] if match["comment"] is None else " " + "\n" * match[0].count("\n")

    return sum(bool(line.strip()) for line in _CPP.sub(kept, text).splitlines())
