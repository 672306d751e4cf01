"""Parts of the page beside speed: parity, targets, models, calls on the host, and where all of it was measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from bench import host, models
from bench.page.data import pack_records
from bench.page.sources import Evidence, Parity, kind_of, short_name
from bench.record import Record
from bench.record_kernels import Kernel, main_of
from bench.report import describe, notes, provenance
from multiattn.inspect.build import Compilation
from multiattn.inspect.facts import Facts
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS, by_name
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Direction, make_plan
from multiattn.plan.support import Unsupported
from multiattn.problem import Problem

OFF_THE_SCALE = 10.0
"""An infinite error is drawn here."""
TENSORS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


def data(evidence: Evidence) -> dict[str, Any]:
    """The records of each part, for the page's JSON."""
    found = {
        "parity": [point for it in evidence.parities for point in parity_points(it)],
        "targets": [*compiled_now(evidence.compilations), *targets(evidence)],
        "models": [row for run in evidence.models for row in model_rows(run)],
    }
    return {name: pack_records(rows) for name, rows in found.items() if rows}


NOTES = {
    "parity": (
        "Parity",
        "The error of each result against fp64, over the budget that its case derives; 1 is the limit.",
    ),
    "targets": (
        "Targets",
        "Registers a thread +spills in hot loops; below, the share of an SM's warps. It takes no GPU.",
    ),
    "models": ("Models", "Tokens a second; below, over the fastest other attention. Random weights, 8 layers, bf16."),
}
HEADINGS = {
    "parity": "Error over budget",
    "targets": "Registers, spills and occupancy",
    "models": "Thousands of tokens a second",
}


def parts(evidence: Evidence, drawn: Collection[str]) -> dict[str, Any]:
    """The parts that the page has, with what the template says of each; `drawn` are those that have records."""
    told: dict[str, Any] = {}
    failures = [str(text) for it in evidence.parities for text in it.data.get("failures", ())]
    for name, (title, note) in NOTES.items():
        mine = failures if name == "parity" else []
        if name in drawn or mine:
            told[name] = {"title": title, "note": note, "heading": HEADINGS[name], "template": "part.html"}
            told[name] |= {"failures": mine, "is_wide": name != "parity", "is_drawn": name in drawn}
    if evidence.hosts:
        tables = [{"title": short_name(it.environment.gpu), "rows": _host_rows(it)} for it in evidence.hosts]
        told["host"] = {"title": "Host", "tables": tables, "kinds": host.KINDS, "template": "host.html"}
    told["where"] = {"title": "Where", "template": "where.html", **where(evidence)}
    return told


# ---------------------------------------------------------------- parity


def parity_points(report: Parity) -> Iterator[dict[str, Any]]:
    """The worst ratio of each case, backend and result; of a report that has only its summary the worst of all."""
    told = report.data
    named = {"report": report.name, "variant": "", "config": "", "fed_by": "", "problem": "", "of": "", "beyond": ""}
    if "results" not in told:
        yield from _summary_points(told, named)
        return
    problems = {it["name"]: it["problem"] for it in told.get("cases", ())}
    worst: dict[tuple[str, ...], dict[str, Any]] = {}
    for it in told["results"]:
        direction = it.get("direction", "forward")
        where = {**named, "case": it["case"], "backend": it["backend"], "direction": direction}
        where |= {name: it.get(name, "") for name in ("variant", "config", "fed_by")}
        where["problem"] = problems.get(it["case"], "")
        for tensor in TENSORS[direction]:
            if tensor in it:
                error, budget, ratio, of = it[tensor]
                numbers = {"error": float(error), "budget": float(budget), **_drawn(ratio)}
                key = it["case"], it["backend"], tensor
                if key not in worst or _size(numbers) > _size(worst[key]):
                    worst[key] = {**where, "tensor": tensor, **numbers, "of": of}
    yield from worst.values()


def _summary_points(told: Any, named: dict[str, Any]) -> Iterator[dict[str, Any]]:
    nothing: dict[str, Any] = {"header": [], "rows": []}
    table = next((it for it in told.get("tables", ()) if it["title"] == "Summary"), nothing)
    for row in table["rows"]:
        backend, _, direction = row[0].partition(" ")
        for direction_of, tensors in TENSORS.items():
            for tensor in tensors:
                if (direction or "forward") == direction_of and (text := row[table["header"].index(tensor)]):
                    ratio = {**_drawn(text), "error": None, "budget": None, "case": "the worst of all cases"}
                    yield {**named, "backend": backend, "direction": direction_of, "tensor": tensor, **ratio}


def _drawn(value: float | str) -> dict[str, Any]:
    """A ratio where a plot has it; `beyond` is what it is where that is no place."""
    number = float(value)
    is_finite = math.isfinite(number)
    return {"ratio": number if is_finite else OFF_THE_SCALE, "beyond": "" if is_finite else str(number)}


def _size(point: Mapping[str, Any]) -> float:
    return math.inf if point["beyond"] else float(point["ratio"])


# ---------------------------------------------------------------- targets

HEAD_DIMS = (64, 128, 256)


def targets(evidence: Evidence) -> Iterator[dict[str, Any]]:
    """The recorded kernels of each backend's best variant, by direction, head_dim and arch, as docs/targets.md has."""
    arches = [arch for arch in GPU_ARCHS if arch in evidence.compiled]
    for direction, name, head_dim, arch in itertools.product(DIRECTIONS, BACKENDS, HEAD_DIMS, arches):
        where = {"made": "on record", "direction": direction, "mask": "causal"}
        where |= {"backend": name, "d": str(head_dim), "arch": arch}
        yield {**where, **_recorded(evidence.compiled[arch], name, direction, head_dim, arch)}


def _recorded(found: Record, backend: str, direction: Direction, head_dim: int, arch: str) -> dict[str, Any]:
    problem = Problem.contiguous(batch=4, heads_q=16, seq_q=4096, head_dim=head_dim, causal=True)
    try:
        plan = make_plan(registry.get(backend), problem, by_name(arch), direction=direction, probe=False)
    except Unsupported as refusal:
        return _no_kernel(list(map(str, refusal.reasons)))
    told = {"variant": plan.variant, "config": str(plan.config)}
    kernels = found.kernels_of(plan)
    if not kernels:
        return {**_no_kernel(["not on record"]), **told}
    return {**_kernel(main_of(kernels), sum(it.hot_spills for it in kernels)), **told}


def compiled_now(entries: Iterable[Compilation]) -> Iterator[dict[str, Any]]:
    """The kernels that this machine compiled just now."""
    for entry in sorted(entries, key=_place):
        it = entry.request
        asked = {"made": "just now", "direction": it.direction, "mask": it.problem.mask, "backend": it.backend}
        asked |= {"d": str(it.problem.head_dim), "arch": it.arch}
        spills = sum(kernel.hot_spills for kernel in entry.kernels)
        found = _kernel(entry.main, spills) if entry.ok else _no_kernel([entry.text])
        yield {**asked, **found, "variant": entry.variant, "config": entry.config}


def _place(entry: Compilation) -> tuple[int, ...]:
    """As recorded kernels are sorted."""
    it = entry.request
    named = ((DIRECTIONS, it.direction), (BACKENDS, it.backend), (GPU_ARCHS, it.arch))
    direction, backend, arch = (tuple(names).index(name) for names, name in named)
    return direction, backend, it.problem.head_dim, arch


def _kernel(main: Kernel | Facts, spills: int) -> dict[str, Any]:
    mma = list(main.mma) if isinstance(main, Kernel) else [main.main_mma or "none"]
    told = {name: getattr(main, name) for name in ("registers", "share", "threads", "limiter")}
    return {**told, "smem": main.smem_bytes, "spills": spills, "kernel": main.name, "mma": ", ".join(mma), "why": []}


def _no_kernel(why: list[str]) -> dict[str, Any]:
    names = ("registers", "share", "threads", "smem", "spills")
    return {**dict.fromkeys(names), "limiter": "", "kernel": "", "mma": "", "variant": "", "config": "", "why": why}


# ---------------------------------------------------------------- models and calls


def model_rows(run: models.ModelRun) -> Iterator[dict[str, Any]]:
    """Each attention in each model and mode: tokens a second, and those over the fastest other's."""
    where = {"gpu": short_name(run.environment.gpu), "environment": describe(run.environment)}
    for row in run.rows:
        others = [
            it.tokens_per_s
            for it in run.rows
            if (it.model, it.mode) == (row.model, row.mode) and it is not row and it.tokens_per_s is not None
        ]
        ratio = row.tokens_per_s / max(others) if row.tokens_per_s is not None and others else None
        told = {name: value for name, value in asdict(row).items() if name != "tokens_per_s"}
        yield {**told, **where, "tokens": row.tokens_per_s, "ratio": ratio}


def _host_rows(found: Any) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for it in found.costs:
        text = f"{it.call_us:.1f}" if it.call_us is not None else "; ".join(map(str, it.reasons)) or it.error
        rows.setdefault(it.contender, []).append(text)
    return rows


def where(evidence: Evidence) -> dict[str, list[str]]:
    """Where rows were measured, and the commands that measure them again; what this machine refused.

    Also what was refused elsewhere, of kinds that have no part of the page, as nothing of them has a time.
    """
    rows = [row for source in evidence.sources for row in source.rows]
    refused = {str(reason) for it in evidence.sources if it.here for row in it.rows for reason in row.reasons}
    here = [row for it in evidence.sources if it.here for row in it.rows if row.measured is None]
    drawn = {kind_of(row.cell) for row in rows if row.measured is not None}
    elsewhere = [row for it in evidence.sources if not it.here for row in it.rows if kind_of(row.cell) not in drawn]
    return {
        "measured": provenance(rows),
        "commands": list(dict.fromkeys(row.command for row in rows if row.measured is not None)),
        "unrun": sorted(f"{row.contender}, {row.cell.key}" for row in here),
        "reasons": sorted(refused),
        "refused": notes(elsewhere),
    }
