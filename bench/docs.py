"""``python -m bench docs [--check]``: the generated tables of README.md and docs/.

A page marks a table with ``<!-- generated:NAME -->`` and ``<!-- /generated -->``. `pages` says what makes each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import doc_tables, ladder_list, layout_docs, readme
from bench.environment import ROOT, results_root
from bench.errors import InputError
from multiattn.inspect.layout_svg import draw

MARKED = re.compile(r"(<!-- generated:([\w-]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)

Blocks = Mapping[str, Callable[[], str]]


def pages(root: Path = ROOT, results: Path | None = None) -> dict[Path, Blocks]:
    """Every page with generated tables, and what makes each of its tables."""
    found = results or results_root()
    return {
        root / "README.md": {**readme.blocks(found), "peers": lambda: doc_tables.peers_summary(found)},
        root / "docs" / "hopper.md": {"peers": lambda: doc_tables.peers_block(found)},
        root / "docs" / "languages.md": doc_tables.language_blocks(found),
        root / "docs" / "ladder.md": ladder_list.blocks(found),
        root / "docs" / "swizzle.md": layout_docs.SWIZZLE,
        root / "docs" / "fragments.md": layout_docs.FRAGMENTS,
    }


def pictures(root: Path = ROOT) -> dict[Path, str]:
    """The generated pictures, with their text."""
    return {root / "docs" / name: draw(tile) for name, tile in layout_docs.PICTURES.items()}


def render(text: str, blocks: Blocks) -> str:
    """`text` with every marked table made again; InputError for a marker that nothing generates."""

    def replacement(match: re.Match[str]) -> str:
        name = match[2]
        if name not in blocks:
            raise InputError(f"<!-- generated:{name} -->: nothing generates it; allowed {', '.join(blocks)}")
        return f"{match[1]}\n{blocks[name]()}\n\n{match[3]}"

    return MARKED.sub(replacement, text)


def update(page: Path, blocks: Blocks, *, check: bool) -> bool:
    """Make a page's tables again; with `check` only compare. Returns whether they were current.

    InputError for a file that is missing, cannot be read or written, or has no marker.
    """
    try:
        old = page.read_text()
        if not MARKED.search(old):
            raise InputError(f"{page.name} has no <!-- generated:NAME --> ... <!-- /generated --> table")
        new = render(old, blocks)
        if new != old and not check:
            page.write_text(new)
    except OSError as error:
        raise InputError(f"{page}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{page}: not text: {error}") from None
    return new == old


def update_all(*, check: bool, root: Path = ROOT, results: Path | None = None) -> list[Path]:
    """Write every page and picture, or with `check` only compare. Returns those that were stale."""
    stale = [page for page, blocks in pages(root, results).items() if not update(page, blocks, check=check)]
    for path, text in pictures(root).items():
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if not check:
                path.write_text(text)
    return stale
