"""The plots as Vega-Lite specs, made by Altair. They have no rows: the page hands each those that its controls choose.

A row brings its own colour, mark and text, as these depend on the reader's theme. Titles stand in the page, where they
wrap and are read aloud.
"""

from __future__ import annotations

import functools
from typing import Any

import altair as alt

LINE_HEIGHT = 400
STEP = 46
"""Height of a heat map's row: two lines of text."""
LANE = 72
A_WORD_A_LINE = "split(replace(datum.label, /_/g, ' '), ' ')"


def _data(name: str) -> alt.NamedData:
    return alt.NamedData(name=name)


def _x(**axis: Any) -> alt.X:
    drawn = alt.Axis(labelAngle=0, ticks=False, **axis)
    return alt.X("x:N", sort=alt.EncodingSortField("xo", op="min"), title=None, axis=drawn)


def _lanes(field: str, **axis: Any) -> alt.Y:
    drawn = alt.Axis(ticks=False, domain=False, **axis)
    return alt.Y(f"{field}:N", sort=alt.EncodingSortField("yo", op="min"), title=None, axis=drawn)


def _colour(field: str = "colour") -> alt.Color:
    return alt.Color(f"{field}:N", scale=None, legend=None)


def _spec(chart: Any) -> dict[str, Any]:
    """The spec of a chart that is as wide as its place in the page."""
    fitted = chart.properties(width="container", autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))
    plain = fitted.configure(background="transparent", aria=False).configure_view(stroke=None)
    spec: dict[str, Any] = plain.to_dict(validate=True)
    return spec


def lines() -> dict[str, Any]:
    """Rate by length, or what else is along x: a line, marks and whiskers for each contender, and the bounds above."""
    along = _x(labelExpr=A_WORD_A_LINE)
    rate = alt.Y("y:Q", title=None, scale=alt.Scale(zero={"expr": "zero"}, nice=True), axis=alt.Axis(tickCount=6))
    shape = alt.Shape("shape:N", scale=None, legend=None)
    series = [alt.Detail("contender:N"), _colour()]
    dash = alt.StrokeDash("dash:N", scale=None, legend=None)
    tips = [alt.Tooltip(f"{name}:N", title=title) for name, title in TIPS]
    drawn = alt.Chart(_data("rows")).encode(x=along, y=rate)
    parts = (
        alt.Chart(_data("bounds"))
        .mark_tick(thickness=2, size=34, color="#808890")
        .encode(x=along, y="y:Q", tooltip=[alt.Tooltip("told:N", title="bound")]),
        alt.Chart(_data("guide")).mark_rule(strokeWidth=1.5, color="#808890").encode(y="y:Q"),
        drawn.mark_rule(strokeWidth=1.5).encode(alt.Y2("high:Q"), *series, y="low:Q"),
        alt.Chart(_data("paths")).mark_line(strokeWidth=2.25).encode(*series, dash, x=along, y=rate),
        drawn.mark_point(filled=True, size=64, opacity=1).encode(*series, shape),
        drawn.mark_point(filled=True, size=220, opacity=0, cursor="pointer").encode(*series, tooltip=tips),
    )
    chart = alt.layer(*parts).properties(height=LINE_HEIGHT)
    return _spec(chart.add_params(alt.param(name="zero", value=True)))


TIPS = (("contender", "contender"), ("rate", "rate"), ("spread", "spread"), ("over", "over the best peer"))


def heat() -> dict[str, Any]:
    """Cells of two axes, each with a colour, a figure and a line of small print below it."""
    tips = [alt.Tooltip(f"{name}:N", title=name) for name in ("cell", "figure", "print")]
    drawn = alt.Chart(_data("rows")).encode(x=_x(orient="top", domain=False), y=_lanes("y"))
    ink = alt.Color("ink:N", scale=None, legend=None)
    parts = (
        drawn.mark_rect(cornerRadius=3, stroke="transparent", strokeWidth=3, cursor="pointer").encode(
            alt.Fill("fill:N", scale=None, legend=None), tooltip=tips
        ),
        drawn.mark_text(fontSize=13, fontWeight=600, dy=-6, cursor="pointer").encode(ink, text="label:N", tooltip=tips),
        drawn.mark_text(fontSize=10.5, dy=9, cursor="pointer").encode(ink, text="below:N", tooltip=tips),
    )
    return _spec(alt.layer(*parts).properties(height=alt.Step(STEP)))


def strip(*, logarithmic: bool = False, size: int = 30) -> dict[str, Any]:
    """One mark a row of data along x, in lanes by name, with a rule at 1."""
    kind: dict[str, Any] = {"type": "log", "base": 2, "padding": 24} if logarithmic else {"zero": True, "padding": 12}
    drawn = alt.Chart(_data("rows")).encode(
        x=alt.X("x:Q", title=None, scale=alt.Scale(**kind, nice=False), axis=alt.Axis(tickCount=6, labelBound=True)),
        y=_lanes("lane", labelLimit=200),
        yOffset=alt.YOffset("jitter:Q", scale=alt.Scale(domain=[-1.1, 1.1])),
    )
    tips = [alt.Tooltip(f"{name}:N", title=title) for name, title in (("what", "case"), ("figure", "ratio"))]
    shape = alt.Shape("shape:N", scale=None, legend=None)
    parts = (
        drawn.mark_point(filled=True, size=size, opacity=0.7, cursor="pointer").encode(_colour(), shape, tooltip=tips),
        alt.Chart(_data("guide")).mark_rule(strokeWidth=2, color="#808890").encode(x="x:Q"),
        alt.Chart(_data("guide"))
        .mark_text(align="right", baseline="top", dx=-6, y=0, fontSize=12)
        .encode(_colour("ink"), x="x:Q", text="told:N"),
    )
    return _spec(alt.layer(*parts).properties(height=alt.Step(LANE)))


@functools.cache
def all_specs() -> dict[str, dict[str, Any]]:
    """Every kind of plot by name, compiled to Vega, which a page draws at once."""
    import vl_convert

    made = {"lines": lines(), "heat": heat(), "strip": strip(), "changes": strip(logarithmic=True, size=70)}
    return {name: dict(vl_convert.vegalite_to_vega(spec)) for name, spec in made.items()}
