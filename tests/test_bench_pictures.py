"""Pictures of README.md and docs/: current by their data, readable by everybody, and told in words."""

import itertools
import math
import re

import pytest

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
    assert all(f">{pictures.LINES[name].title}<" in text for name in ("triton", "cutile", "cuda", "fa3", "fa4"))
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@font-face" not in text


def test_a_picture_is_told_in_words():
    told = pictures.in_words(pictures.H200, RESULTS)
    assert "forward at N=16384: multiattn CUDA " in told
    assert "backward at N=16384: multiattn CUDA " in told
    assert '"' not in told


@pytest.mark.parametrize("name", pictures.THEMES)
def test_lines_and_text_stand_out_from_every_page_that_they_are_on(name):
    theme = pictures.THEMES[name]
    for page in pictures.BACKGROUNDS[name]:
        assert contrast(theme.text, page) >= 4.5
        assert {line: contrast(it, page) for line, it in theme.lines.items() if contrast(it, page) < 3} == {}
    assert len(set(theme.lines.values())) == len({it.symbol for it in pictures.LINES.values()}) == len(pictures.LINES)


def contrast(one, other):
    """The contrast of two colours as WCAG 2 has it, 1 to 21."""
    light, dark = sorted(map(luminance, (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    return sum(weight * it for weight, it in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def linear(colour):
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return [it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts]


SIGHT = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""Matrices of linear red, green and blue by Machado, Oliveira and Fernandes (2009), of severity 1."""


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("name", pictures.THEMES)
def test_readers_of_every_colour_vision_tell_lines_apart(name, sight):
    """By the distance in CIELAB, of which 2 is just noticed."""
    seen = {}
    for line, colour in pictures.THEMES[name].lines.items():
        red_green_blue = linear(colour)
        mixed = (sum(map(math.prod, zip(row, red_green_blue, strict=True))) for row in SIGHT[sight])
        seen[line] = lab(*(min(1, max(0, it)) for it in mixed))
    pairs = itertools.combinations(seen, 2)
    assert {pair: it for pair in pairs if (it := math.dist(*(seen[line] for line in pair))) < 20} == {}


def lab(red, green, blue):
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (it ** (1 / 3) if it > 0.008856 else 7.787 * it + 16 / 116 for it in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)
