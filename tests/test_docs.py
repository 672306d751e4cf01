"""Pages and docstrings: links lead somewhere, and sentences begin in plain English."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page):
    targets = _LINK.findall(page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name}: no such file: {', '.join(missing)}"


def anchors(page):
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = (re.sub(r"[^\w\s-]", "", it).strip().lower() for it in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[-\s]+", "-", it) for it in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_heading_leads_to_one(page):
    found = re.findall(r"\]\(([^)#:\s]*\.md|)#([^)]+)\)", page.read_text())
    missing = [f"{to}#{anchor}" for to, anchor in found if anchor not in anchors(page.parent / to if to else page)]
    assert not missing, f"{page.name}: no such heading: {', '.join(missing)}"


def docstrings(path):
    """Every docstring of a file, those of attributes included, or comment of C++ on its own lines, with its line."""
    if path.suffix != ".py":
        before = ""
        for number, line in enumerate(map(str.strip, path.read_text().splitlines()), 1):
            if line.startswith("//") and not before.startswith("//"):
                yield number, line.strip("/ ")
            before = line
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(text := getattr(node.value, "value", None), str):
            yield node.lineno, text.strip()


@pytest.mark.parametrize("folder", ["multiattn", "parity", "bench", "tests"])
def test_docstrings_and_comments_of_cpp_begin_in_plain_english(folder):
    """A sentence has a subject: it does not begin with a question word, or with what it is a part of."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".cuh", ".h", ".cpp")
        for line, text in docstrings(path)
        if re.match(r"(What|Of|Whether|Which|Who|Those of|The same|As the)\b", text)
    ]
    assert found == []


SDPA = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "from-sdpa.md").read_text(), re.DOTALL)


def test_each_call_of_sdpa_is_the_one_beside_it(monkeypatch):
    """The blocks of the page, one after the other: each gives `theirs` and `ours`."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    torch.manual_seed(0)
    names = {}
    assert len(SDPA) == 15
    for code in SDPA:
        names.pop("theirs", None)
        exec(compile(code, "from-sdpa.md", "exec"), names)
        torch.testing.assert_close(
            names["ours"], names["theirs"], rtol=0.02, atol=0.02, msg=lambda it, at=code: it + at
        )
