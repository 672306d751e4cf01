"""The colour, mark and dash of each contender, the same in every plot.

Ours are near Okabe and Ito's blue, green and vermilion ("Color Universal Design", 2008); the other colours were
searched for, so that any two of `MAIN` differ for dichromats, too, and each stands out from its background by 3:1.
Tests of the page and of the pictures hold both.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable
from dataclasses import dataclass

from multiattn.plan.backend import BACKENDS

BACKGROUNDS = {"light": "#ffffff", "dark": "#14171c"}
"""The colours that plots are drawn on; page.css has the same."""

SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right", "triangle-left")
DASHES = ((1, 0), (7, 3), (2, 2), (8, 3, 2, 3), (12, 4), (4, 2, 1, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How a contender is drawn: `light` and `dark` are its colours on either background."""

    light: str
    dark: str
    shape: str = "circle"
    dash: tuple[int, ...] = DASHES[0]


MAIN = {
    "triton": Style(light="#006eb2", dark="#5ec0ec"),
    "cutile": Style(light="#00a370", dark="#009577", shape="square"),
    "cuda": Style(light="#d55e00", dark="#f0a000", shape="diamond"),
    "sdpa-cudnn": Style(light="#16181d", dark="#fbf7f2", shape="triangle-up", dash=DASHES[1]),
    "fa4": Style(light="#b45cf5", dark="#bf45ff", shape="triangle-down", dash=DASHES[2]),
    "fa3": Style(light="#6e2c0c", dark="#a5560c", shape="cross", dash=DASHES[3]),
    "cudnn": Style(light="#4b0a80", dark="#c3c2ac", shape="triangle-right", dash=DASHES[4]),
    "flashinfer": Style(light="#8a8fa8", dark="#6a65a0", shape="triangle-left", dash=DASHES[5]),
    "flex": Style(light="#1f14c8", dark="#89f75b", shape="cross", dash=DASHES[1]),
}
"""Contenders that stand beside each other in many plots."""

_RARE = {
    "triton/warp_specialized_two_pass": Style(light="#3f8fbe", dark="#9fd3f3", dash=DASHES[1]),
    "triton/atomic": Style(light="#5a86a0", dark="#2f86bd", dash=DASHES[2]),
    "cutile/two_pass": Style(light="#3f9c7e", dark="#6fd1b3", shape="square", dash=DASHES[1]),
    "cutile/atomic": Style(light="#00664a", dark="#3f8f78", shape="square", dash=DASHES[2]),
    "cuda/wgmma_two_pass": Style(light="#a84a00", dark="#ffc966", shape="diamond", dash=DASHES[1]),
    "cuda/two_pass": Style(light="#c4763a", dark="#b88a30", shape="diamond", dash=DASHES[2]),
    "sdpa-flash": Style(light="#5f6470", dark="#b9bec9", shape="triangle-up", dash=DASHES[2]),
    "sdpa-efficient": Style(light="#8a6d00", dark="#d8c04a", shape="triangle-up", dash=DASHES[3]),
    "fa2": Style(light="#c2185b", dark="#ff7fae", shape="triangle-down", dash=DASHES[3]),
    "fa3-vllm": Style(light="#9a4a2a", dark="#d08a5c", shape="cross", dash=DASHES[2]),
    "tilegym": Style(light="#7b5e57", dark="#c2a79f", shape="cross", dash=DASHES[4]),
}
_KNOWN = {**MAIN, **_RARE}


def styles(contenders: Iterable[str]) -> dict[str, Style]:
    """A Style for each contender; one that has none here gets a colour that no other has."""
    names = list(dict.fromkeys(contenders))
    others = [name for name in names if name not in _KNOWN]
    made = {name: _spun(place, name) for place, name in enumerate(others)}
    return {name: _KNOWN.get(name) or made[name] for name in names}


def in_order(contenders: Iterable[str]) -> list[str]:
    """Our backends, their other variants, then peers; among each those that have a Style here come first."""
    known = list(_KNOWN)

    def place(name: str) -> tuple[int, int, str]:
        backend, _, variant = name.partition("/")
        group = 2 if backend not in BACKENDS else int(bool(variant))
        return group, known.index(name) if name in _KNOWN else len(known), name

    return sorted(dict.fromkeys(contenders), key=place)


def _spun(place: int, name: str) -> Style:
    """A hue by the golden angle from the last, with the mark of the backend if it is one's."""
    hue = (0.08 + place * 0.618034) % 1
    told = {scheme: _hex(hue, light, 0.55) for scheme, light in (("light", 0.36), ("dark", 0.68))}
    owner = MAIN.get(name.partition("/")[0]) if name.partition("/")[0] in BACKENDS else None
    shape = owner.shape if owner is not None else SHAPES[place % len(SHAPES)]
    return Style(**told, shape=shape, dash=DASHES[1 + place % (len(DASHES) - 1)])


def _hex(hue: float, light: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, saturation))
