"""Pages, docstrings and examples: links lead somewhere, sentences begin in plain English, and code runs as it is."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def anchors(page):
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = (re.sub(r"[^\w\s-]", "", it).strip().lower() for it in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[-\s]+", "-", it) for it in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = page.read_text()
    missing = [target for target in _LINK.findall(text) if not (page.parent / target).exists()]
    found = re.findall(r"\]\(([^)#:\s]*\.md|)#([^)]+)\)", text)
    missing += [f"{to}#{anchor}" for to, anchor in found if anchor not in anchors(page.parent / to if to else page)]
    assert not missing, f"{page.name}: no such file or heading: {', '.join(missing)}"


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
        ours, theirs = names["ours"], names["theirs"]
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02, msg=lambda it, at=code: it + at)


# ---------------------------------------------------------------- the README and the examples

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LINES_AT_MOST = 150


@pytest.mark.parametrize("code", BLOCKS, ids=[str(place) for place in range(len(BLOCKS))])
def test_each_block_of_the_readme_runs_after_the_first(code, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if "transformers" in code:
        pytest.importorskip("transformers")
    names = {}
    try:
        for part in dict.fromkeys((BLOCKS[0], code)):
            exec(compile(part, "README.md", "exec"), names)
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def test_the_readme_is_short_and_says_first_what_was_timed():
    assert len(README.splitlines()) <= LINES_AT_MOST
    first_screen = README[: README.index("## Install")]
    assert all(word in first_screen for word in ("H200", "H100", "forward (", "backward (", "training a model ("))
    assert len(BLOCKS) == 5


NEEDED = {"transformers_model": "transformers", "gemma_layers": "transformers.models.gemma4"}
"""Modules that examples need, and that may be missing."""


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda it: it.stem)
def test_example_runs(path, capsys, monkeypatch):
    """Here on the CPU; each holds what it asserts."""
    if path.stem in NEEDED:
        pytest.importorskip(NEEDED[path.stem])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
