"""Pictures of README.md and docs/: TFLOPS by length beside the peers, as Vega-Lite and as the SVG that is made of it.

An SVG names the digest of its Vega-Lite specification, which holds all the data. So a picture is known to be current
without drawing it, and a new release of the renderer makes none stale. Each is drawn twice, for light and dark pages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.matrix import InputError
from bench.page.styles import MAIN
from bench.results import Row, newest

FOLDER = Path("docs") / "pictures"
WIDTH, HEIGHT = 325, 250
"""Pixels of one plot; two of them, with their axes, are as wide as a README is on GitHub."""
DIGEST = re.compile(r"<!-- specification ([0-9a-f]{16}), drawing ([0-9a-f]{16}) -->\n$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """Colours of a page's mode; lines have those of the report. A test holds that they stand out, to every eye."""

    text: str
    grid: str
    lines: Mapping[str, str]


class Line(NamedTuple):
    """A contender of a plot: its title, dashes and symbol. Ours are solid lines, peers dashed ones."""

    title: str
    dash: tuple[int, int]
    symbol: str


LINES: Mapping[str, Line] = {
    "cuda": Line("multiattn CUDA", (1, 0), "diamond"),
    "triton": Line("multiattn Triton", (1, 0), "circle"),
    "cutile": Line("multiattn cuTile", (1, 0), "square"),
    "sdpa-cudnn": Line("cuDNN", (6, 3), "triangle-up"),
    "fa4": Line("FlashAttention-4", (6, 3), "triangle-down"),
    "fa3": Line("FlashAttention-3", (2, 2), "cross"),
    "flex": Line("FlexAttention", (2, 2), "triangle-left"),
}
THEMES: Mapping[str, Theme] = {
    "light": Theme(text="#24292F", grid="#D8DEE4", lines={name: MAIN[name].light for name in LINES}),
    "dark": Theme(text="#E6EDF3", grid="#3D444D", lines={name: MAIN[name].dark for name in LINES}),
}
BACKGROUNDS: Mapping[str, tuple[str, ...]] = {"light": ("#FFFFFF", "#F6F8FA"), "dark": ("#0D1117", "#1E2129")}
"""The pages that a picture is shown on: GitHub's, and those of the site."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Forward and backward of one GPU, head_dim and mask, side by side."""

    gpu: str
    head_dim: int
    causal: bool = True

    @property
    def name(self) -> str:
        """The beginning of its file names."""
        return f"speed-{self.gpu}-d{self.head_dim}-{'causal' if self.causal else 'full'}"

    @property
    def title(self) -> str:
        """The problem and the GPU, in words."""
        return f"{'causal' if self.causal else 'full'}, D={self.head_dim}, {self.gpu.upper()}"

    def path(self, theme: str) -> Path:
        """The file of one theme, from the top of the repository."""
        return FOLDER / f"{self.name}-{theme}.svg"

    def rows(self, results: Path) -> dict[str, list[Row]]:
        """The rows of each plot by its title, those of each contender in order of length."""
        found = {}
        for title, stem in (("forward", "standard"), ("backward", "backward")):
            its = newest(results / self.gpu / f"{stem}.json")
            found[title] = sorted(filter(self._is_shown, its), key=lambda row: row.cell.seq)
        return found

    def _is_shown(self, row: Row) -> bool:
        cell = row.cell
        is_ours = (cell.head_dim, cell.causal, row.regime) == (self.head_dim, self.causal, "device")
        return is_ours and row.contender in LINES and row.tflops > 0


H200, H200_D64, H200_D256, H100 = PICTURES = (
    Picture(gpu="h200", head_dim=128),
    Picture(gpu="h200", head_dim=64),
    Picture(gpu="h200", head_dim=256),
    Picture(gpu="h100", head_dim=128),
)


# ---------------------------------------------------------------- in words


def element(picture: Picture, results: Path, folder: str) -> str:
    """The HTML that shows a picture by the reader's mode, with a text that says the same; `folder` is where it lies."""
    if not any(picture.rows(results).values()):
        return "Not measured yet: `python -m bench` on a GPU writes bench/results."
    dark, light = (f"{folder}{picture.path(theme).name}" for theme in ("dark", "light"))
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    return f'<picture>{source}<img src="{light}" alt="{in_words(picture, results)}"></picture>'


def in_words(picture: Picture, results: Path) -> str:
    """The text in place of a picture, with the figures at the longest length."""
    parts = []
    for title, rows in picture.rows(results).items():
        longest = max((row.cell.seq for row in rows), default=0)
        its = {row.contender: row.tflops for row in rows if row.cell.seq == longest}
        figures = ", ".join(f"{LINES[name].title} {its[name]:.0f}" for name in LINES if name in its)
        parts.append(f"{title} at N={longest}: {figures}" if its else "")
    return f"TFLOPS by sequence length, {picture.title}. " + "; ".join(filter(None, parts)) + "."


# ---------------------------------------------------------------- drawing


def specification(picture: Picture, results: Path, theme: Theme) -> dict[str, Any]:
    """The Vega-Lite specification, with its data."""
    rows = picture.rows(results)
    shown = [name for name in LINES if any(row.contender == name for its in rows.values() for row in its)]
    titles = [LINES[name].title for name in shown]
    label: dict[str, Any] = {"labelColor": theme.text, "titleColor": theme.text, "titleFontWeight": "normal"}
    label |= {"labelFontSize": 13, "titleFontSize": 13}
    symbol = {"symbolSize": 100, "symbolStrokeWidth": 0, "labelLimit": 200}
    legend = {**label, **symbol, "title": None, "orient": "bottom", "columns": 6}
    scales = {
        "color": [theme.lines[name] for name in shown],
        "strokeDash": [list(LINES[name].dash) for name in shown],
        "shape": [LINES[name].symbol for name in shown],
    }
    by_name: dict[str, dict[str, Any]] = {
        channel: {"field": "name", "type": "nominal", "scale": {"domain": titles, "range": values}, "legend": legend}
        for channel, values in scales.items()
    }
    by_name["strokeDash"]["legend"] = None  # dashes would fray its symbols
    top = 1.05 * max(row.tflops for its in rows.values() for row in its)
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "background": None,
        "hconcat": [_plot(f"{title}, {picture.title}", its, by_name, theme, top) for title, its in rows.items()],
        "resolve": {"legend": dict.fromkeys(scales, "shared"), "scale": dict.fromkeys(scales, "shared")},
        "config": {
            "aria": False,
            "font": "sans-serif",
            "view": {"stroke": None},
            "axis": {**label, "gridColor": theme.grid, "domainColor": theme.text, "tickColor": theme.text},
        },
    }


def _plot(title: str, rows: Sequence[Row], by_name: Mapping[str, Any], theme: Theme, top: float) -> dict[str, Any]:
    """One plot: lines with symbols."""
    lengths = sorted({row.cell.seq for row in rows})
    values = [
        {"N": row.cell.seq, "tflops": round(row.tflops, 1), "name": LINES[row.contender].title}
        for name in LINES
        for row in rows
        if row.contender == name
    ]
    in_k = "datum.value < 1024 ? datum.value : datum.value / 1024 + 'k'"
    axis = {"values": lengths, "grid": False, "labelFlush": False, "labelExpr": in_k, "title": "sequence length N"}
    return {
        "title": {"text": title, "color": theme.text, "fontSize": 14, "anchor": "start"},
        "width": WIDTH,
        "height": HEIGHT,
        "data": {"values": values},
        "mark": {"type": "line", "point": {"filled": True, "size": 45}, "strokeWidth": 2},
        "encoding": {
            "x": {"field": "N", "type": "quantitative", "scale": {"type": "log", "base": 2, "nice": False},
                  "axis": axis},
            "y": {"field": "tflops", "type": "quantitative", "scale": {"domain": [0, round(top)]},
                  "axis": {"title": "TFLOPS", "tickCount": 5}},
            **by_name,
        },
    }  # fmt: skip


def render(spec: Mapping[str, Any]) -> str:
    """The SVG of a specification, with the digests of both at its end."""
    try:
        import vl_convert
    except ImportError as error:
        raise InputError("drawing pictures needs vl-convert-python: pip install 'multiattn[report]'") from error
    drawing = str(vl_convert.vegalite_to_svg(dict(spec))).rstrip() + "\n"
    return f"{drawing}<!-- specification {digest(spec)}, drawing {_hash(drawing)} -->\n"


def digest(spec: Mapping[str, Any]) -> str:
    """A digest of all that a picture shows."""
    return _hash(json.dumps(spec, sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_current(text: str, spec: Mapping[str, Any]) -> bool:
    """True for a drawing of this specification that nobody changed."""
    found = DIGEST.search(text)
    return found is not None and found.groups() == (digest(spec), _hash(text[: found.start()]))


def specifications(results: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each file from the top of the repository, and what it is drawn from; none of what was not measured."""
    for picture in PICTURES:
        if all(picture.rows(results).values()):
            for name, theme in THEMES.items():
                yield picture.path(name), specification(picture, results, theme)
