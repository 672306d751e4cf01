"""What the pages link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page):
    targets = _LINK.findall(page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name}: no such file: {', '.join(missing)}"


def test_pages_are_linked_to_each_other():
    assert any(_LINK.findall(page.read_text()) for page in PAGES)
