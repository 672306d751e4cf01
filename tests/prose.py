"""``python tests/prose.py [FILE ...]``: read Markdown pages, and docstrings of Python, as a strict editor would.

proselint and the project's own rules see sentences alone: code, tables, targets of links and generated blocks are
blanked, so that lines keep their numbers. `make prose` runs this after typos, whose word list is in pyproject.toml.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from proselint.checks import __register__
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).parents[1]
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
PUBLIC = ("*.py", "aot/__init__.py", "integrations/*.py", "plan/backend.py", "plan/support.py")
MODULES = sorted(path for pattern in PUBLIC for path in (ROOT / "multiattn").glob(pattern))

# More words than this, and a reader goes back to the beginning.
LONGEST_SENTENCE = 35

# proselint's checks that a page of Markdown about code does not want.
LEFT_OUT = (
    "typography.symbols",  # quotes, dots and the x of 64x128 are ASCII here, as in the code beside them
    "dates_times",  # CUDA 13's and N=512's are no decades
    "misc.phrasal_adjectives.ly",  # takes the minus of "multiply-add" for a hyphen after an adverb
)

# Patterns of what nobody here writes, each with the usual word for it. proselint has more of them, such as "utilize".
USUAL_WORDS = {
    r"leverag(e|es|ed|ing)": "use",
    r"in order to": "to",
    r"performant": "fast, with its figure",
    r"blazing(ly)?|lightning[- ]fast|state[- ]of[- ]the[- ]art|cutting[- ]edge": "the figure itself",
    r"seamless(ly)?|effortless(ly)?|out of the box": "the steps that it takes",
    r"functionalit(y|ies)": "function, feature",
    r"due to the fact that": "because",
    r"(it )?(should|must) be noted that|(please )?note that": "the fact alone",
    r"of course": "nothing: a reader who knows it does not want it",
    r"prior to": "before",
    r"(for|by) who": "a noun: callers, readers, users",
    r"unasked": "by default",
    r"(in|out)side of": "inside, outside",
    r"in dependence of": "depending on",
}
_USUAL_WORDS = [(re.compile(rf"\b({pattern})\b", re.IGNORECASE), better) for pattern, better in USUAL_WORDS.items()]
# A sentence has a subject. "Not measured yet" leaves a reader to ask who did not measure which thing.
_NO_SUBJECT = re.compile(r"(?:^|[.!?] )((Not|Never) (measured|kept|built|run|timed|tried|tested)\b|Compiled[,.])")

_GENERATED = re.compile(r"<!-- generated:.*?<!-- /generated -->", re.DOTALL)
_FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
_TABLE = re.compile(r"^(?:\|.*| *<[^>]*>)$", re.MULTILINE)  # or HTML
_LINK_TARGET = re.compile(r"(?<=\])\([^)]*\)")
_CODE = re.compile(r"(`+)[^`]+?\1")
_NUMBERS = re.compile(r"[0-9.]*[0-9]")  # "D=160 0.87" repeats no word
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
_SECTION = re.compile(r"^(?:Args|Returns|Raises):$", re.MULTILINE)  # of a docstring; its entries are items of a list
_ENTRY = re.compile(r"^ {4}(?! )", re.MULTILINE)
_SENTENCE_ENDS = re.compile(r"(?<=[.!?:;])[)\"'*_]*\s+")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


def prose_of(text: str) -> str:
    """The sentences of a Markdown page, each on the line where it was; a code span is one word, unlike all others."""
    for pattern in (_GENERATED, _FENCED, _INDENTED, _TABLE, _LINK_TARGET):
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
    numbers = count()
    return _CODE.sub(lambda found: f"code{next(numbers)}" + "\n" * found.group().count("\n"), text)


def docstrings_of(source: str) -> str:
    """The docstrings of a Python file as a page, each line where it was."""
    lines = [""] * len(source.splitlines())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(text := getattr(node.value, "value", None), str):
            first, _, rest = text.partition("\n")
            page = f"{first}\n{textwrap.dedent(rest)}"
            for offset, line in enumerate(_ENTRY.sub("- ", _SECTION.sub("", page)).splitlines()):
                lines[node.lineno - 1 + offset] = line
    return "\n".join(lines)


def paragraphs(prose: str) -> Iterator[tuple[int, str]]:
    """Each paragraph, heading and item of a list, with the line on which it begins."""
    start, lines = 0, list[str]()
    for number, line in enumerate([*prose.splitlines(), ""], 1):
        begins = _ITEM.match(line) or line.startswith("#")
        if lines and (begins or not line.strip() or lines[0].startswith("#")):
            yield start, " ".join(lines)
            lines = []
        if line.strip():
            start = start if lines else number
            lines.append(_ITEM.sub("", line, count=1).strip() if begins else line.strip())


def _of_the_project(prose: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(prose.splitlines(), 1):
        for pattern, better in _USUAL_WORDS:
            for found in pattern.finditer(line):
                yield number, f'"{found.group()}": write {better}'
    for number, paragraph in paragraphs(prose):
        if found := _NO_SUBJECT.search(paragraph):
            yield number, f'"{found.group(1)}": the sentence has no subject'
        for sentence in _SENTENCE_ENDS.split(paragraph):
            words = len(_WORD.findall(sentence))
            if words > LONGEST_SENTENCE:
                yield number, f'{words} words in a sentence, at most {LONGEST_SENTENCE}: "{sentence[:60]}..."'


def _of_proselint(prose: str) -> Iterator[tuple[int, str]]:
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    text = _NUMBERS.sub(lambda found: "#" * len(found.group()), prose)
    for found in LintFile("page", text).lint():
        check = found.check_result
        across = "\n\n" in text[check.span[0] - 1 : check.span[1] - 1].strip()  # a heading's end, and what follows
        if not across and not check.check_path.startswith(LEFT_OUT):
            start = max(check.span[0] - 1, 0)  # proselint puts a line end before all
            start += len(text[start:]) - len(text[start:].lstrip())
            yield text.count("\n", 0, start) + 1, f"{check.check_path}: {' '.join(check.message.split())}"


def _of_its_opening(prose: str) -> Iterator[tuple[int, str]]:
    blocks = list(paragraphs(prose))
    first = blocks[1] if len(blocks) > 1 else (1, "")
    if not blocks or not blocks[0][1].startswith("# "):
        yield 1, "a page begins with its title"
    elif first[1].startswith("#") or len(_WORD.findall(first[1])) < 6:
        yield first[0], "a page opens with a paragraph that says what it is for"


def faults(text: str, *, is_page: bool = True) -> list[tuple[int, str]]:
    """The faults of a Markdown page, or of docstrings that look like one: line, and what is wrong there."""
    prose = prose_of(text)
    opening = _of_its_opening(prose) if is_page else ()
    return sorted([*_of_the_project(prose), *_of_proselint(prose), *opening])


def faults_of_file(path: Path) -> list[tuple[int, str]]:
    """The faults of a Markdown page, or of the docstrings of a Python file."""
    text = path.read_text()
    return faults(docstrings_of(text), is_page=False) if path.suffix == ".py" else faults(text)


def main() -> int:
    """Print the faults of the files; the exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(description="Read Markdown pages and docstrings as a strict editor would.")
    parser.add_argument("files", nargs="*", type=Path, default=(*PAGES, *MODULES), help="all pages and public calls")
    found = [(path, *fault) for path in parser.parse_args().files for fault in faults_of_file(path)]
    for path, line, message in found:
        print(f"{path}:{line}: {message}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
