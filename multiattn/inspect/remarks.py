"""The choices that cuTile's compiler (tileiras) reports for each line of source.

It writes YAML documents, one for each remark, of which this reads the one shape that tileiras writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

_HINTS = "Hints"
"""The pass that only says which hints a line had."""
_FAILURES = ("Missed", "Failure")

_DOCUMENT = re.compile(r"^--- !(Passed|Missed|Failure|Analysis)\n(.*?)^\.\.\.$", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^(?:  - )?(\w+): +(?!\n)(.*)$", re.MULTILINE)
_PLACE = re.compile(r"\{ File: '?(.+?)'?, Line: (\d+), Column: \d+ \}")
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


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Choice:
    """One thing that the compiler chose for a line of source, or failed to choose."""

    file: str
    """The last part of its path; empty where the remark has no place."""
    line: int
    what: str
    """In a few words: ``TMA load 64x128``, ``wgmma 64x128x16``, ``cp.async``, ``Failed to ...: why``."""
    failed: bool
    is_instruction: bool
    count: int
    """How often it was chosen for that line."""


def parse(text: str) -> tuple[Choice, ...]:
    """The choices in the order of the source; ValueError for text that is not what tileiras writes."""
    if rest := _DOCUMENT.sub("", text).strip():
        raise ValueError(f"remarks: got {rest.splitlines()[0]!r}; allowed documents of --- !Passed and its like")
    found: Counter[tuple[str, int, str, bool, bool]] = Counter()
    for kind, body in _DOCUMENT.findall(text):
        fields = {name: _unquoted(value) for name, value in _FIELD.findall(body)}
        if "Pass" not in fields:
            raise ValueError(f"remarks: got a document without Pass: {body!r}")
        if fields["Pass"] != _HINTS:
            instruction = fields.get("Instruction", "")
            sentence = ": ".join(fields[name] for name in ("Remark", "Reason") if name in fields)
            what = _instruction(instruction, fields) if instruction else sentence
            file, line = _place(fields.get("DebugLoc", ""))
            found[file, line, what, kind in _FAILURES, bool(instruction)] += 1
    return tuple(
        Choice(file=file, line=line, what=what, failed=failed, is_instruction=is_instruction, count=count)
        for (file, line, what, failed, is_instruction), count in sorted(found.items())
    )


def _unquoted(value: str) -> str:
    if value[:1] in ("'", '"') and value[-1:] == value[:1] and len(value) > 1:
        return value[1:-1].replace("''", "'")
    return value


def _place(text: str) -> tuple[str, int]:
    found = _PLACE.fullmatch(text)
    return (PurePosixPath(found[1]).name, int(found[2])) if found else ("", 0)


def _instruction(name: str, fields: Mapping[str, str]) -> str:
    """An instruction in the words of this project, with its shape; in the compiler's own words if it is a new one."""
    tensor_core = _TENSOR_CORE.fullmatch(name)
    verb = _TENSOR_VERBS.get(int(tensor_core[1]), "mma.sync") if tensor_core else _VERBS.get(name, name)
    if verb == _VERBS["FMA"]:
        return verb
    shape = re.findall(r"\d+", fields.get("Shape", ""))
    while len(shape) > 1 and shape[-1] == "1":  # the box of a 4-D tensor that TMA moves has two other extents at most
        shape.pop()
    ctas = fields.get("NumCTAs", "1")
    return " ".join(filter(None, (verb, "x".join(shape), "" if ctas == "1" else f"by {ctas} blocks")))


def table(choices: Iterable[Choice], sources: Mapping[str, Sequence[str]]) -> list[tuple[str, str, str]]:
    """A row for each choice: its place, what was chosen and how often, the line of source; ``!`` where it failed.

    `sources` has the lines of each file by the last part of its path.
    """
    return [
        (
            f"{it.file}:{it.line}" if it.file else "-",
            f"{'! ' * it.failed}{it.what}{f' ({it.count})' if it.count > 1 else ''}",
            "".join(sources.get(it.file, ())[it.line - 1 : it.line]).strip(),
        )
        for it in choices
    ]


def chosen(choices: Iterable[Choice]) -> tuple[str, ...]:
    """The choices that a new compiler should still make somewhere: TMA without its shape, multiplications with theirs.

    Left out are failures, and plain loads and stores, which any compiler can make.
    """
    good = [it.what for it in choices if it.is_instruction and not it.failed and not it.what.startswith(_PLAIN)]
    return tuple(sorted({next((move for move in _MOVES if what.startswith(move)), what) for what in good}))
