"""The editor of the pages: it finds each fault that is planted, where it stands, and reads no code for prose."""

from __future__ import annotations

import pytest
from prose import LONGEST_SENTENCE, PAGES, faults, faults_of_file

OPENING = "# A page\n\nThis page says how a launch is planned.\n\n"
GOOD = f"""{OPENING}## Plans

A plan names `leverage` and `leverage` twice, and nobody minds. See [the plan](leverage.md).

    in order to leverage

```python
leverage = "in order to"
```

| in order to | leverage |
|---|---|
| 0 0 0 | 1 1 |

<!-- generated:table -->
Not measured.
<!-- /generated -->

1. D=160 0.87 to 0.93, D=192 0.84.
2. {"A sentence ends; " * LONGEST_SENTENCE}
"""
PLANTED = {
    "a word": ("Kernels leverage TMA.", '"leverage": write use'),
    "a phrase": ("It runs, in order to be\nmeasured.", '"in order to": write to'),
    "no subject": ("It is fast. Not measured on an H100.", "no subject"),
    "no end": (" ".join(["word"] * (LONGEST_SENTENCE + 1)) + ".", f"{LONGEST_SENTENCE + 1} words in a sentence"),
    "twice": ("It waits for for the product.", "lexical_illusions"),
    "archaism": ("They wait for ever.", "archaism"),
    "cliche": ("At the end of the day it is fast.", "cliches"),
    "redundant": ("Each and every kernel runs.", "redundancy.misc"),
}


def test_good_prose_has_no_fault():
    assert faults(GOOD) == []


@pytest.mark.parametrize(("sentence", "message"), PLANTED.values(), ids=PLANTED)
@pytest.mark.parametrize("before", ["", "- ", "1. ", "> ", "#### "])
def test_a_planted_fault_is_found_on_its_line(sentence, message, before):
    found = faults(f"{GOOD}\n{before}{sentence}\n\nThe end.\n")
    assert {line for line, what in found if message in what} == {GOOD.count("\n") + 2}


@pytest.mark.parametrize("page", [OPENING[2:], OPENING.replace("\n\n", "\n\n## Plans\n\n", 1)])
def test_a_page_opens_with_its_title_and_a_paragraph(page):
    assert any("a page" in what for _, what in faults(page))


MODULE = '''"""Plans."""


def plan(q):
    """A plan.

    Args:
        q: Queries, which
            {planted}

    Returns:
        {planted}
    """
    return "in order to leverage"
'''


def test_a_docstring_is_read_where_it_stands(tmp_path):
    path = tmp_path / "plan.py"
    path.write_text(MODULE.format(planted="leverage TMA."))
    assert faults_of_file(path) == [(9, '"leverage": write use'), (12, '"leverage": write use')]
    path.write_text(MODULE.format(planted="have TMA."))
    assert faults_of_file(path) == []


def test_every_page_is_read():
    names = {page.name for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "hopper.md"} <= names
