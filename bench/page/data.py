"""Rows as the page's JSON has them: once each of what several rows share, and numbers in place of names.

page's JavaScript (js/data.js) reads it back.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.decode_cells import DecodeCell
from bench.matrix import Cell
from bench.page.parts import PARTS
from bench.page.sources import Source, kind_of
from bench.page.styles import in_order, styles
from bench.report import describe, fastest, notes, times_as_fast
from bench.results import Row, grouped, is_ours, pack
from multiattn.inspect.roofline import bounds
from multiattn.plan.arch import find_gpu
from multiattn.plan.backend import BACKENDS

MEASURED = (
    *("time_ms", "low_ms", "high_ms", "tflops", "tb_per_s", "copy_tb_per_s", "peak_share", "error_ratio"),
    *("rounds", "host_bound", "peak_extra_bytes"),
)
"""Fields of a timing that the page shows."""
UNITS = {"tensor": "tensor cores", "exp": "exponentials", "memory": "memory"}


def _row(row: Row, source: int, peer: Row | None) -> dict[str, Any]:
    return {
        "source": source,
        "cell": cell_data(row.cell),
        "contender": row.contender,
        "regime": row.regime,
        "environment": describe(row.environment),
        "command": row.command,
        "plan": row.plan and dict(row.plan),
        "detail": row.detail or None,
        "reasons": list(map(asdict, row.reasons)) or None,
        "error": row.error or None,
        **{name: getattr(row.measured, name, None) for name in MEASURED},
        "ratio": times_as_fast(row, peer),
        "bound": bound_data(row.cell, row.environment.gpu) if row.measured is not None else None,
    }


def _short(value: Any) -> Any:
    """Five significant digits of a number: a page needs no more. True is 1, False nothing; JSON has no inf and nan."""
    if isinstance(value, bool):
        return 1 if value else None
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return float(f"{value:.5g}") if isinstance(value, float) else value


@functools.cache
def bound_data(cell: Cell, gpu: str) -> dict[str, Any] | None:
    """TFLOPS that the roofline of a cell with a plain mask or a window allows, and the units that set it.

    In decode the stated bandwidth of the memory; None where nothing is known.
    """
    known = find_gpu(gpu)
    if known is not None and isinstance(cell, DecodeCell):
        return {"tb_per_s": _short(known.gbps / 1000), "busiest": UNITS["memory"]} if cell.has_rate_of_memory else None
    is_plain = cell.feature == "none" and not isinstance(cell, DecodeCell) and cell.direction != "fwdbwd"
    if known is None or not is_plain:
        return None
    found = bounds(cell.problem, known, cell.pass_of)
    return {"tflops": _short(found.tflops), "busiest": " and ".join(UNITS[it] for it in found.busiest)}


def cell_data(cell: Cell) -> dict[str, Any]:
    """The fields that the page filters and sorts by."""
    told: dict[str, Any] = {
        "key": cell.key,
        "kind": kind_of(cell),
        "n": cell.seq,
        "d": cell.head_dim if cell.head_dim_v is None else str(cell.widths),
        "mask": cell.attention,
        "direction": {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward and backward"}[cell.direction],
        "layout": cell.layout,
        "dtype": cell.dtype,
        "batch": cell.batch,
        "heads": cell.heads_text,
        "group": cell.group,
    }
    if isinstance(cell, DecodeCell):
        cache = cell.key.rpartition(f" {cell.dtype} ")[2]  # with its numbers, and what changes scores
        told |= {"queries": cell.queries, "cache": cache, "work": cell.work}
        told["gb"] = _short(cell.moved_bytes / 1e9)
    return told


def page_data(sources: Sequence[Source], more: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a page: sources, rows, styles of contenders, and `more` by name."""
    rows: list[dict[str, Any]] = []
    for place, source in enumerate(sources):
        places = grouped(source.rows, lambda row: (row.cell, row.regime))
        peers = {it: fastest(its, ours=False) for it, its in places.items()}
        rows += [_row(row, place, peers[row.cell, row.regime]) for row in source.rows]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    drawn = [*BACKENDS, *names]  # parity may have backends that nobody timed
    return {
        "sources": list(map(_source, sources)),
        "rows": table(rows),
        "ours": [name for name in names if is_ours(name)],
        "order": in_order(drawn),
        "styles": {name: asdict(style) for name, style in styles(drawn).items()},
        "parts": {name: it for name, it in PARTS.items() if name in more},
        **more,
    }


def _source(source: Source) -> dict[str, Any]:
    unrun = grouped((row for row in source.rows if row.measured is None), lambda row: kind_of(row.cell))
    return {
        "gpu": source.label,
        "suite": source.suite,
        "here": source.here,
        "timed": len(source.timed),
        "notes": {kind: notes(its) for kind, its in unrun.items()},
    }


def table(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Records of the same fields packed: what is no number stands once; a row ends at its last field with a value."""
    names = list(records[0]) if records else ()
    shared = [name for name in names if any(isinstance(it[name], str | list | dict) for it in records)]
    packed = pack([{name: _short(value) for name, value in it.items()} for it in records], shared)
    for row in packed["rows"]:
        while row[-1] is None:
            row.pop()
    return packed


def script_json(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
