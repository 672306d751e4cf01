"""What cuTile's compiler (tileiras) says it chose for each line of source: its remarks read, folded and laid out.

They come as YAML, of which this reads the one shape that tileiras writes, and refuses any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath, PureWindowsPath

KINDS = ("Passed", "Missed", "Failure", "Analysis")
HINTS = "Hints"
"""The pass whose remarks say what hints a line had; most say that it had none."""
FAILURES = ("Missed", "Failure")

_HEAD = re.compile(r"--- !(\w+)")
_FIELD = re.compile(r"(Pass|Name|DebugLoc|Function|Args):\s*(.*)")
_PLACE = re.compile(r"\{ File: (.+), Line: (\d+), Column: (\d+) \}")
_ARGUMENT = re.compile(r"  - (\w+):\s+(.*)")
_SHAPE = re.compile(r"\[(\d+(?:, \d+)*)\]")
_TENSOR_CORE = re.compile(r"Tensor-core SM(\d+)")

_VERBS: Mapping[str, str] = {
    "TMA Load instruction": "TMA load",
    "TMA Store instruction": "TMA store",
    "Ldgsts instruction": "cp.async",
    "Global-memory load instruction": "plain load",
    "Global-memory store instruction": "plain store",
    "Shared-memory load instruction": "shared load",
    "Shared-memory store instruction": "shared store",
    "Shared-memory Matrix load instruction": "ldmatrix",
    "Shared-memory Matrix store instruction": "stmatrix",
    "FMA": "FMA instead of a tensor core",
}
_TENSOR_VERBS: Mapping[int, str] = {90: "wgmma", 100: "tcgen05", 107: "tcgen05"}  # mma.sync for any other
_MOVES = ("TMA load", "TMA store")
_PLAIN = ("plain load", "plain store")
_FAILED: Mapping[str, str] = {
    "Failed to select TMA load instruction": "no TMA load",
    "Failed to select TMA store instruction": "no TMA store",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """One remark, and how often it was made."""

    kind: str
    """One of KINDS."""
    passname: str
    """``Memory``, ``Tensor-core``, ``Hints``."""
    name: str
    function: str = ""
    """The kernel's symbol."""
    file: str = ""
    """Its last part, so that nothing of this depends on a machine; empty where the remark has no place."""
    line: int = 0
    column: int = 0
    remark: str = ""
    instruction: str = ""
    shape: tuple[int, ...] = ()
    """Of a tile that TMA moves, the contiguous dimension first; of a matrix multiplication M, N, K."""
    reason: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    """All others, such as NumCTAs."""
    count: int = 1

    @property
    def what(self) -> str:
        """In a few words: ``TMA load 64x128``, ``wgmma 64x128x16``, ``cp.async``, ``no TMA load: why``."""
        if not self.instruction:
            said = _FAILED.get(self.remark, self.remark)
            return f"{said}: {self.reason}" if self.reason else said
        shape, verb = _trimmed(self.shape), self.verb
        if verb == _VERBS["FMA"]:
            return verb
        ctas = dict(self.arguments).get("NumCTAs", "1")
        together = "" if ctas == "1" else f" by {ctas} blocks"
        return f"{verb}{' ' * bool(shape)}{'x'.join(map(str, shape))}{together}"

    @property
    def verb(self) -> str:
        """The instruction as the rest of this project calls it; the compiler's own words for one not met before."""
        tensor_core = _TENSOR_CORE.fullmatch(self.instruction)
        if tensor_core is not None:
            return _TENSOR_VERBS.get(int(tensor_core[1]), "mma.sync")
        return _VERBS.get(self.instruction, self.instruction)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that was chosen for a line of source."""

    file: str
    line: int
    what: str
    count: int
    failed: bool
    source: str = ""


class FormatError(ValueError):
    """The text is not what tileiras writes."""


def parse(text: str) -> tuple[Remark, ...]:
    """The remarks of a text, duplicates folded, in the order in which each was first made.

    FormatError, naming the line, for anything but the documents that tileiras writes.
    """
    found: dict[Remark, int] = {}
    document: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line == "...":
            remark = _remark(document, number)
            found[remark] = found.get(remark, 0) + 1
            document = []
        elif line.strip():
            document.append((number, line))
    if document:
        raise _refusal(document[-1][0], "the end of the text", "'...' after it")
    return tuple(replace(remark, count=count) for remark, count in found.items())


def _remark(document: Sequence[tuple[int, str]], end: int) -> Remark:
    """A document's remark, without its RemarkId: that only numbers them."""
    if not document:
        raise _refusal(end, "'...'", "a document before it")
    number, first = document[0]
    head = _HEAD.fullmatch(first)
    if head is None or head[1] not in KINDS:
        raise _refusal(number, repr(first), ", ".join(f"--- !{kind}" for kind in KINDS))
    fields: dict[str, str] = {}
    arguments: dict[str, str] = {}
    for number, line in document[1:]:
        argument, plain = _ARGUMENT.fullmatch(line), _FIELD.fullmatch(line)
        if argument is not None and "Args" in fields:
            _add(arguments, argument[1], _scalar(argument[2], number), number)
        elif plain is not None and "Args" not in fields:
            value = plain[2] if plain[1] == "DebugLoc" else _scalar(plain[2], number)
            _add(fields, plain[1], value, number)
        else:
            raise _refusal(number, repr(line), "Pass, Name, DebugLoc, Function, then Args with '  - Name: value'")
    for name in ("Pass", "Name"):
        if not fields.get(name):
            raise _refusal(end, f"a document without {name}", "one with Pass and Name")
    file, row, column = _place(fields.get("DebugLoc"), document[0][0])
    arguments.pop("RemarkId", None)
    return Remark(
        kind=head[1],
        passname=fields["Pass"],
        name=fields["Name"],
        function=fields.get("Function", ""),
        file=file,
        line=row,
        column=column,
        remark=arguments.pop("Remark", ""),
        instruction=arguments.pop("Instruction", ""),
        shape=_shape(arguments.pop("Shape", ""), end),
        reason=arguments.pop("Reason", ""),
        arguments=tuple(arguments.items()),
    )


def _add(fields: dict[str, str], name: str, value: str, number: int) -> None:
    if name in fields:
        raise _refusal(number, f"{name} again", "each name once in a document")
    fields[name] = value


def _scalar(text: str, number: int) -> str:
    """A plain scalar, or one in quotes."""
    text = text.strip()
    if text[:1] == "'":
        if len(text) < 2 or text[-1] != "'" or "'" in text[1:-1].replace("''", ""):
            raise _refusal(number, text, "a closing quote at its end, quotes within doubled")
        return text[1:-1].replace("''", "'")
    if text[:1] == '"':
        try:
            return str(json.loads(text))
        except json.JSONDecodeError:
            raise _refusal(number, text, "a closing quote at its end, JSON's escapes within") from None
    if text[:1] in tuple("[]{}&*!|>%@`#"):
        raise _refusal(number, text, "a value on one line, in quotes if it begins so")
    return text


def _place(text: str | None, number: int) -> tuple[str, int, int]:
    if text is None:
        return "", 0, 0
    found = _PLACE.fullmatch(text)
    if found is None:
        raise _refusal(number, f"a document with DebugLoc: {text}", "{ File: '...', Line: 1, Column: 1 }")
    file = PurePosixPath(PureWindowsPath(_scalar(found[1], number)).as_posix()).name
    return file, int(found[2]), int(found[3])


def _shape(text: str, number: int) -> tuple[int, ...]:
    if not text:
        return ()
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise _refusal(number, f"a document with Shape: {text}", "'[64, 64]'")
    return tuple(int(size) for size in found[1].split(", "))


def _refusal(number: int, got: str, allowed: str) -> FormatError:
    return FormatError(f"remarks, line {number}: got {got}; allowed {allowed}")


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the ones at its end: the box of a 4-D tensor that TMA moves has no more than two others."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


# ---------------------------------------------------------------- what they say


def per_line(remarks: Iterable[Remark], *, hints: bool = False) -> tuple[Row, ...]:
    """What was chosen for each line, in the order of the source; what is said of hints only where `hints` says so."""
    counts: dict[tuple[str, int, str, bool], int] = {}
    for it in remarks:
        if hints or it.passname != HINTS:
            key = (it.file, it.line, it.what, it.kind in FAILURES)
            counts[key] = counts.get(key, 0) + it.count
    return tuple(
        Row(file=file, line=line, what=what, count=count, failed=failed)
        for (file, line, what, failed), count in sorted(counts.items())
    )


def with_sources(rows: Iterable[Row], sources: Mapping[str, str]) -> tuple[Row, ...]:
    """Rows with the text of their lines, from the text of each file by the last part of its name."""
    lines = {file: text.splitlines() for file, text in sources.items()}
    return tuple(replace(row, source=_source(lines.get(row.file, ()), row.line)) for row in rows)


def _source(lines: Sequence[str], line: int) -> str:
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def text_rows(rows: Iterable[Row]) -> str:
    """Rows for a terminal: a line's place, what was chosen for it, how often, and its source; ! where that failed."""
    cells = [
        (
            f"{row.file}:{row.line}" if row.file else "-",
            ("! " if row.failed else "") + row.what + (f" ({row.count})" if row.count > 1 else ""),
            row.source,
        )
        for row in rows
    ]
    if not cells:
        return "no remarks"
    widths = [max(len(row[column]) for row in cells) for column in range(2)]
    return "\n".join(f"{place:<{widths[0]}}  {what:<{widths[1]}}  {source}".rstrip() for place, what, source in cells)


def facts(remarks: Iterable[Remark]) -> frozenset[str]:
    """What a new compiler should still choose somewhere: copies by their kind, multiplications with their shape.

    Without what any compiler can do: plain loads and stores, and what failed.
    """
    chosen = [it for it in remarks if it.instruction and it.kind not in FAILURES and it.verb not in _PLAIN]
    return frozenset(it.verb if it.verb in _MOVES else it.what for it in chosen)
