"""The documentation site builds without a warning, needs nothing from outside, and a dead link is an error."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
ROOT = Path(__file__).parents[1]
PICTURE = '<picture><source media="(prefers-color-scheme: dark)" srcset="n.svg"><img src="n.svg" alt="x"></picture>'


def build(config, site):
    """Build in a process of its own: status, and all that was printed. ``--quiet`` would silence strictness, too."""
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", config, "--site-dir", site]
    setting = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=setting, timeout=120)
    return found.returncode, found.stdout + found.stderr


def test_the_site_is_whole_and_refers_to_nothing_outside(tmp_path):
    status, said = build(ROOT / "mkdocs.yml", tmp_path)
    assert status == 0, said
    assert "WARNING" not in said
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.html")}
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|link|img|iframe|source)[^>]*(?:src|href|srcset)="(https?:[^"]*)"', text)
        assert loaded == [], name
        assert not re.search(r"<p>(?:(?!</p>).)*\n- ", text, re.DOTALL), f"{name}: a list that is shown as text"
    assert "multiattn.fmha_kvcache" in pages["api/sequences.html"]
    assert "Keep a Changelog" in pages["changelog.html"]
    assert re.search(r'<img[^>]*-light.svg#only-light"', pages["results.html"])
    assert re.search(r'<img[^>]*-dark.svg#only-dark"', pages["results.html"])


def build_page(text, folder):
    """Build a page of this text, beside one more."""
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(f"# A page\n\n{text}\n")
    (folder / "docs" / "versions.md").write_text((ROOT / "docs" / "versions.md").read_text())
    config = folder / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nnav: [index.md, versions.md]\nplugins: [search]\n"
        f"hooks: [{ROOT / 'docs' / 'site_hooks.py'}]\nextra_css: []\n"
    )
    return build(config, folder / "site")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a page](nowhere.md)", "no such file: nowhere.md"),
        ("[a source](../multiattn/nowhere.py)", "no such file: ../multiattn/nowhere.py"),
        ("[a heading](#nowhere)", "#nowhere"),
        ("[a heading](versions.md#nowhere)", "versions.md#nowhere"),
        ("![a picture](nowhere.svg)", "nowhere.svg"),
        (PICTURE, "n.svg"),
    ],
)
def test_a_dead_link_is_an_error(text, why, tmp_path):
    status, said = build_page(text, tmp_path)
    assert status != 0
    assert why in said


def test_links_that_lead_somewhere_and_those_in_code_are_none(tmp_path):
    links = "[here](#a-page), [there](versions.md), [a source](../multiattn/nn.py), [itself](../docs/versions.md)"
    status, said = build_page(f"{links}, `code[0](index)`\n\n```\n[0](x)\n```", tmp_path)
    assert status == 0, said
    page = (tmp_path / "site" / "index.html").read_text()
    assert "a source (<code>multiattn/nn.py</code>)" in page
    assert '<a href="versions.html">itself</a>' in page
