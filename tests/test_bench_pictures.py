"""Pictures of README.md and docs/: current by their data, readable by everybody, and told in words."""

import re

import pytest
from test_bench_page import contrast

from bench import docs, pictures
from bench.results import RESULTS


def test_a_picture_is_current_until_its_data_or_its_drawing_change():
    spec = pictures.specification(pictures.H200, RESULTS, pictures.THEMES["light"])
    text = (docs.ROOT / pictures.H200.path("light")).read_text()
    assert pictures.is_current(text, spec)
    assert not pictures.is_current(text.replace("FlashAttention-4", "FlashAttention-5"), spec), "changed by hand"
    spec["hconcat"][0]["data"]["values"][0]["tflops"] += 1
    assert not pictures.is_current(text, spec), "measured again"


def test_a_picture_that_is_missing_or_stale_is_drawn_again(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(docs, "pages", lambda results: {})
    monkeypatch.setattr(pictures, "render", lambda spec: drawn.append(spec) or "<svg/>")
    (tmp_path / "docs").mkdir()
    stale = docs.update_all(check=True, root=tmp_path)
    assert sum(path.parent.name == "pictures" for path in stale) == len(pictures.PICTURES) * len(pictures.THEMES)
    docs.update_all(check=False, root=tmp_path)
    assert len(drawn) == len(pictures.PICTURES) * len(pictures.THEMES)


def test_a_drawing_needs_nothing_from_outside_and_names_every_line():
    pytest.importorskip("vl_convert")
    spec = pictures.specification(pictures.H200, RESULTS, pictures.THEMES["dark"])
    text = pictures.render(spec)
    assert pictures.is_current(text, spec)
    shown = {row.contender for its in pictures.H200.rows(RESULTS).values() for row in its}
    assert shown >= {"triton", "cutile", "cuda", "fa4"}
    assert all(f">{pictures.LINES[name].title}<" in text for name in shown)
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@font-face" not in text


@pytest.mark.parametrize("name", pictures.THEMES)
def test_lines_and_text_stand_out_from_every_page_that_they_are_on(name):
    theme = pictures.THEMES[name]
    for page in pictures.BACKGROUNDS[name]:
        assert contrast(theme.text, page) >= 4.5
        assert {line: contrast(it, page) for line, it in theme.lines.items() if contrast(it, page) < 3} == {}
    assert len(set(theme.lines.values())) == len({it.symbol for it in pictures.LINES.values()}) == len(pictures.LINES)
