"""``python -m bench docs [--check]``: the generated tables of README.md and docs/.

A page marks a table with ``<!-- generated:NAME -->`` and ``<!-- /generated -->``. `pages` says what makes each.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench import doc_tables, layout_docs
from bench.doc_tables import Blocks
from bench.environment import RESULTS, ROOT
from bench.errors import InputError
from multiattn.cuda.layout_svg import draw

MARKED = re.compile(r"(<!-- generated:([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def pages(results: Path = RESULTS) -> dict[str, Blocks]:
    """Every page with generated tables, and what makes each of its tables."""
    return {
        **doc_tables.pages(results),
        "docs/swizzle.md": layout_docs.SWIZZLE,
        "docs/fragments.md": layout_docs.FRAGMENTS,
    }


def render(text: str, blocks: Blocks) -> str:
    """The text with every marked table made again; InputError where no marker is, or nothing generates one."""

    def replacement(match: re.Match[str]) -> str:
        name = match[2]
        if name not in blocks:
            raise InputError(f"<!-- generated:{name} -->: nothing generates it; allowed {', '.join(blocks)}")
        return f"{match[1]}\n{blocks[name]()}\n\n{match[3]}"

    new, count = MARKED.subn(replacement, text)
    if not count:
        raise InputError("there is no <!-- generated:NAME --> ... <!-- /generated --> table")
    return new


def update_all(*, check: bool, root: Path = ROOT, results: Path = RESULTS) -> list[Path]:
    """Write every page and picture, or with `check` only compare. Returns those that were stale."""
    texts = {root / name: render((root / name).read_text(), blocks) for name, blocks in pages(results).items()}
    texts |= {root / "docs" / name: draw(tile) for name, tile in layout_docs.PICTURES.items()}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if not check:
        for path in stale:
            path.write_text(texts[path])
    return stale
