"""Parts of the page beside speed: parity, targets, models, calls on the host, and where all of it was measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from bench import host, models
from bench.page.data import table
from bench.page.parts import shown
from bench.page.sources import Evidence, Parity, kind_of
from bench.record import HEAD_DIMS, Record
from bench.record_kernels import Kernel, main_of
from bench.report import describe, notes, provenance
from bench.results import short_name
from multiattn.inspect.build import Compilation
from multiattn.inspect.facts import Facts
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS, by_name
from multiattn.plan.backend import BACKENDS, DIRECTIONS, make_plan
from multiattn.plan.support import Unsupported
from multiattn.problem import Problem

OFF_THE_SCALE = 10.0
"""An infinite error is drawn here."""
TENSORS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


def data(evidence: Evidence) -> dict[str, Any]:
    """The records of each part, for the page's JSON."""
    found = {
        "parity": [point for it in evidence.parities for point in parity_points(it)],
        "targets": [*compiled_now(evidence.compilations), *targets(evidence.compiled)],
        "models": [row for run in evidence.models for row in model_rows(run)],
    }
    return {name: table(rows) for name, rows in found.items() if rows}


def parts(evidence: Evidence, drawn: Collection[str]) -> dict[str, Any]:
    """The parts that the page has, with what the template says of each; `drawn` are those that have records."""
    told: dict[str, Any] = {}
    failures = [str(text) for it in evidence.parities for text in it.data.get("failures", ())]
    for name in ("parity", "targets", "models"):
        mine = failures if name == "parity" else []
        if name in drawn or mine:
            told[name] = shown(name, is_drawn=name in drawn, failures=mine)
    if evidence.hosts:
        tables = [{"title": short_name(it.environment.gpu), "rows": it.rows} for it in evidence.hosts]
        told["host"] = {"title": "Host", "tables": tables, "kinds": host.KINDS, "template": "host.html"}
    told["where"] = {"title": "Where", "template": "where.html", **where(evidence)}
    return told


# ---------------------------------------------------------------- parity


def parity_points(report: Parity) -> Iterator[dict[str, Any]]:
    """The worst ratio of each case, backend and result; of a report that has only its summary the worst of all."""
    told = report.data
    named = {"report": report.name, "variant": "", "config": "", "fed_by": "", "problem": "", "told": ""}
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
                numbers = {"error": float(error), "budget": float(budget), "told": f"{float(error):g} ({of})"}
                key = it["case"], it["backend"], tensor
                point = {**where, "tensor": tensor, **numbers, **_drawn(ratio)}
                if key not in worst or _size(point) > _size(worst[key]):
                    worst[key] = point
    yield from map(_placed, worst.values())


def _placed(point: dict[str, Any]) -> dict[str, Any]:
    """A point with its lane of the plot."""
    direction, tensor = point["direction"], point["tensor"]
    place = [name for its in TENSORS.values() for name in its].index(tensor)
    return {**point, "lane": f"{direction} {tensor}", "yo": place, "what": f"{point['backend']} {point['case']}"}


def _summary_points(told: Any, named: dict[str, Any]) -> Iterator[dict[str, Any]]:
    nothing: dict[str, Any] = {"header": [], "rows": []}
    table = next((it for it in told.get("tables", ()) if it["title"] == "Summary"), nothing)
    for row in table["rows"]:
        backend, _, direction = row[0].partition(" ")
        for direction_of, tensors in TENSORS.items():
            for tensor in tensors:
                if (direction or "forward") == direction_of and (text := row[table["header"].index(tensor)]):
                    ratio = {**_drawn(text), "error": None, "budget": None, "case": "the worst of all cases"}
                    yield _placed({**named, "backend": backend, "direction": direction_of, "tensor": tensor, **ratio})


def _drawn(value: float | str) -> dict[str, Any]:
    """The place of a ratio in the plot, and the ratio as it is told."""
    number = float(value)
    return {"value": number if math.isfinite(number) else OFF_THE_SCALE, "figure": f"{number:.3g}"}


def _size(point: Mapping[str, Any]) -> float:
    return float(point["value"]) if math.isfinite(float(point["figure"])) else math.inf


# ---------------------------------------------------------------- targets


def targets(compiled: Mapping[str, Record]) -> Iterator[dict[str, Any]]:
    """The recorded kernels of each backend's best variant, by direction, head_dim and arch, as docs/targets.md has."""
    arches = [arch for arch in GPU_ARCHS if arch in compiled]
    for direction, name, head_dim, arch in itertools.product(DIRECTIONS, BACKENDS, HEAD_DIMS, arches):
        problem = Problem.contiguous(batch=4, heads_q=16, seq_q=4096, head_dim=head_dim, causal=True)
        where = _where("on record", direction, problem, name, arch)
        try:
            plan = make_plan(registry.get(name), problem, by_name(arch), direction=direction, probe=False)
        except Unsupported as refusal:
            yield {**where, **_no_kernel(list(map(str, refusal.reasons)))}
            continue
        kernels = compiled[arch].kernels_of(plan)
        spills = sum(it.hot_spills for it in kernels)
        found = _kernel(main_of(kernels), spills) if kernels else _no_kernel(["not on record"])
        yield {**where, **found, "variant": plan.variant, "config": str(plan.config)}


def compiled_now(entries: Iterable[Compilation]) -> Iterator[dict[str, Any]]:
    """The kernels that this machine compiled just now."""
    for entry in sorted(entries, key=_place):
        it = entry.request
        spills = sum(kernel.hot_spills for kernel in entry.kernels)
        found = _kernel(entry.main, spills) if entry.ok else _no_kernel([entry.text])
        where = _where("just now", it.direction, it.problem, it.backend, it.arch)
        yield {**where, **found, "variant": entry.variant, "config": entry.config}


def _where(made: str, direction: str, problem: Problem, backend: Any, arch: str) -> dict[str, Any]:
    """The names of a cell of the heat map, and its place."""
    d = problem.head_dim
    told = {"made": made, "direction": direction, "mask": problem.mask, "backend": backend, "d": str(d), "arch": arch}
    place = {"x": arch, "xo": int(arch[2:]), "y": f"{backend} D {d}", "yo": 10000 * BACKENDS.index(backend) + d}
    return {**told, **place, "cell": f"{backend} D={d} {arch}"}


def _place(entry: Compilation) -> tuple[int, ...]:
    """As recorded kernels are sorted."""
    it, arches = entry.request, tuple(GPU_ARCHS)
    return DIRECTIONS.index(it.direction), BACKENDS.index(it.backend), it.problem.head_dim, arches.index(it.arch)


def _kernel(main: Kernel | Facts, spills: int) -> dict[str, Any]:
    mma = list(main.mma) if isinstance(main, Kernel) else [main.main_mma or "none"]
    told = {name: getattr(main, name) for name in ("registers", "threads", "limiter")}
    words = {"label": f"{main.registers}{f' +{spills}' if spills else ''}", "below": f"{100 * main.share:.0f} %"}
    words |= {"figure": f"{main.registers} registers, {spills} spills in hot loops"}
    words |= {"print": f"{words['below']} of an SM's warps", "kernel": main.name, "mma": ", ".join(mma)}
    return {**told, **words, "value": main.share, "smem_kib": main.smem_bytes / 1024, "spills": spills, "why": []}


def _no_kernel(why: list[str]) -> dict[str, Any]:
    numbers = dict.fromkeys(("value", "registers", "threads", "smem_kib", "spills"))
    words = dict.fromkeys(("limiter", "kernel", "mma", "variant", "config", "below", "figure", "print"), "")
    return {**numbers, **words, "label": why[0].partition(":")[0], "why": why}


# ---------------------------------------------------------------- models and calls


def model_rows(run: models.ModelRun) -> Iterator[dict[str, Any]]:
    """Each attention in each model and mode: tokens a second, and those over the fastest other's."""
    where = {"gpu": short_name(run.environment.gpu), "environment": describe(run.environment)}
    for at, row in enumerate(run.rows):
        ratio, rate = models.over_others(row, run.rows), row.tokens_per_s
        told = {name: getattr(row, name) for name in ("model", "mode", "implementation", "logits_error", "error")}
        place = {"x": row.implementation, "xo": at, "y": row.model, "yo": at}
        numbers = {"ratio": ratio, "thousands": rate and round(rate / 1000, 1), "value": rate and (ratio or 1.0)}
        text = models.rate_text(row)
        words = {"label": text, "figure": f"{text} tokens a second", "below": "" if ratio is None else f"{ratio:.2f}"}
        words["print"] = f"{words['below']} times the fastest other"
        words["cell"] = f"{row.model}, {row.implementation}"
        words["step"] = f"{row.time_ms:.4g} ms, quartiles {row.low_ms:.4g} to {row.high_ms:.4g}" if rate else ""
        yield {**told, **where, **place, **numbers, **words}


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
