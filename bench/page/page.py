"""A page put together: one template, its style, its scripts, Vega's runtime once, and the data."""

from __future__ import annotations

import functools
import importlib.util
import platform
from pathlib import Path
from typing import Any

from bench.matrix import InputError
from bench.page.data import page_data, script_json
from bench.page.explorers import explorers
from bench.page.sources import Evidence
from bench.page.styles import in_order
from bench.report import describe
from bench.results import environment, is_ours

FOLDER = Path(__file__).resolve().parent
SCRIPTS = ("data", "plots", "plan", "table", "controls", "maps", "cells", "explore", "parts", "main")
NEEDED = {"jinja2": "jinja2", "altair": "altair", "vl_convert": "vl-convert-python"}


def require_packages() -> None:
    """InputError where a package is missing that pages are made with."""
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"a page needs {', '.join(missing)}: pip install 'multiattn[report]'")


@functools.cache
def runtime() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that needs no network."""
    import vl_convert

    return _inside_script(_own_names(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")))


def _inside_script(text: str) -> str:
    """A script in whose strings no element ends."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _own_names(text: str) -> str:
    """A script whose names no other script sees: Vega's are of one letter or two, and would be overwritten."""
    return f'(() => {{"use strict";\n{text}\n}})();'


def script() -> str:
    """The page's own scripts, one after the other."""
    return _inside_script(_own_names("\n".join((FOLDER / "js" / f"{name}.js").read_text() for name in SCRIPTS)))


def render(**told: Any) -> str:
    """The page of what the template asks for."""
    require_packages()
    import jinja2

    from bench.page import plots

    loader = jinja2.FileSystemLoader(FOLDER)
    undefined = jinja2.StrictUndefined
    made = jinja2.Environment(autoescape=True, undefined=undefined, loader=loader, trim_blocks=True, lstrip_blocks=True)
    style, specs = (FOLDER / "page.css").read_text(), script_json(plots.all_specs())
    parts = {"style": style, "specs": specs, "runtime": runtime(), "script": script()}
    return made.get_template("template.html").render(**parts, **told)


def write(path: Path, text: str) -> None:
    """Write a page, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def here() -> str:
    """This machine and its versions in one line."""
    no_gpu = "none (none, no stated peak), driver unknown"
    return describe(environment()).replace(no_gpu, f"{platform.machine()} without a GPU")


def report_page(evidence: Evidence) -> str:
    """The page of all evidence: the verdict first."""
    from bench.page import extras, verdict

    parts, records = explorers(evidence.sources), extras.data(evidence)
    timed = (row.contender for source in evidence.sources for row in source.timed)
    peers = [name for name in in_order(timed) if not is_ours(name)]
    others = f": 1 is the best peer, cell by cell. Peers are {', '.join(peers)}." if peers else "."
    return render(
        title="multiattn: speed, parity and targets",
        heading="One attention in Triton, cuTile and CUDA",
        lead=f"Beside the fastest kernels that others wrote{others}",
        machine=verdict.machine_line(evidence),
        here=here(),
        parities=verdict.parity_lines(evidence),
        boards=(boards := verdict.boards(evidence)),
        unmeasured=verdict.unmeasured(boards),
        words=verdict.WORDS,
        explorers=parts,
        extras=extras.parts(evidence, records),
        changes=None,
        data=script_json(page_data(evidence.sources, {"explorers": parts, **records})),
    )
