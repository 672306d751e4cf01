"""Hooks of the documentation site, named in mkdocs.yml: pages from the top, links to sources, pictures by theme."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

TOP = Path(__file__).parents[1]
FROM_TOP = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site, and the files at the top of the repository that they are."""

_CODE_OR_LINK = re.compile(r"```.*?```|(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)|`[^`\n]*`", re.DOTALL)
_LIST = re.compile(r"^((?![-*|>#`\s]).+)\n(?=- |1\. )", re.MULTILINE)
"""A paragraph that a list follows at once, as GitHub has it: this parser wants a blank line between them."""
_PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img src="([^"]+)" alt="([^"]*)">\s*</picture>'
)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages of the nav that lie at the top of the repository."""
    for name, source in FROM_TOP.items():
        if name in str(config.nav):
            files.append(File.generated(config, name, content=(TOP / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, **_: Any) -> str:
    """Let links lead where they do in the repository, and pictures follow the site's theme."""
    name = page.file.src_uri
    place = Path(FROM_TOP[name]) if name in FROM_TOP else Path("docs") / name

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        if target is None:
            return match[0]
        path = posixpath.normpath((place.parent / target).as_posix())
        if not (TOP / path).exists():
            raise PluginError(f"{place}: no such file: {target}")
        if path in FROM_TOP.values():
            path = "docs/" + next(page for page, source in FROM_TOP.items() if source == path)
        if path.startswith("docs/"):
            start = posixpath.dirname(name) or "."
            return f"[{text}]({posixpath.relpath(path.removeprefix('docs/'), start)}{anchor or ''})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})"
        return text if text.startswith("`") else f"{text} (`{path}`)"

    markdown = _LIST.sub(r"\1\n\n", markdown)
    return _PICTURE.sub(r"![\3](\2#only-light)![\3](\1#only-dark)", _CODE_OR_LINK.sub(link, markdown))


def on_post_page(output: str, **_: Any) -> str:
    """Name the theme's search dialog for screen readers."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')
