"""The cross-backend report: one set of tables, written as Markdown, as JSON and as one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import multiattn
from multiattn.plan import backend as registry
from multiattn.plan.arch import detect
from multiattn.plan.backend import Direction
from parity.case import CacheCase, Case
from parity.results import TENSORS, CaseReport, Contender, Pair, Result, Score

TableRow = tuple[str, ...]

ALL_TENSORS = tuple(tensor for tensors in TENSORS.values() for tensor in tensors)
"""Everything that is scored: out, lse, dq, dk, dv."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One run: who was asked, what became of every case, and where."""

    contenders: tuple[Contender, ...]
    cases: tuple[CaseReport, ...]
    environment: dict[str, str]
    command: str

    @property
    def results(self) -> tuple[Result, ...]:
        """Every case on every contender."""
        return tuple(result for case in self.cases for result in case.results)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Every two backends that ran a case."""
        return tuple(pair for case in self.cases for pair in case.pairs)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the run has failed, one text each; empty when it has passed."""
        broken = (
            f"{result.who} {result.status} on {result.case}: {result.message}"
            for result in self.results
            if result.status in ("failed", "error")
        )
        apart = (
            f"{pair.left} and {pair.right} disagree on {pair.case} {pair.direction}: "
            + "; ".join(
                f"|A - B| ({score.of}) of {score.tensor} is {score.error:.3e}, allowed {score.budget:.3e}"
                for score in pair.scores
            )
            for pair in self.pairs
            if not pair.passed
        )
        return (*self._idle_backends(), *broken, *apart)

    def _idle_backends(self) -> Iterator[str]:
        """Backends that ran nothing in a direction: neither a suite of refusals nor one without any case passes."""
        for name, direction in dict.fromkeys((who.backend, who.direction) for who in self.contenders):
            results = [r for r in self.results if (r.contender.backend, r.contender.direction) == (name, direction)]
            if not any(result.ran for result in results):
                reasons = dict.fromkeys(reason for result in results for reason in result.reasons)
                yield f"{name} {direction} was asked for and ran nothing: {'; '.join(reasons) or 'no case'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text, whatever it is written as."""

    title: str
    note: str
    header: TableRow
    rows: tuple[TableRow, ...]


def describe_environment(device: torch.device, contenders: Iterable[Contender]) -> dict[str, str]:
    """Where a run took place: device, versions and date."""
    environment = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "arch": detect(device).name,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "multiattn": multiattn.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in dict.fromkeys(contender.backend for contender in contenders):
        versions = registry.get(name).versions()
        environment[name] = ", ".join(f"{package} {version or 'missing'}" for package, version in versions.items())
    return environment


def write(report: Report, folder: Path) -> tuple[Path, Path, Path]:
    """Write parity.md, parity.json and parity.html into `folder` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = make_tables(report)
    texts = {
        "parity.md": to_markdown(report, tables),
        "parity.json": to_json(report),
        "parity.html": to_html(report, tables),
    }
    paths = []
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths[0], paths[1], paths[2]


# ---------------------------------------------------------------- tables


def make_tables(report: Report) -> tuple[Table, ...]:
    """Every table of the report, the short one first."""
    return (
        *short_tables(report),
        *(_details(report.results, direction) for direction in TENSORS),
        *(_pair_details(report.pairs, direction) for direction in TENSORS),
        _case_list(report.cases),
    )


def short_tables(report: Report) -> tuple[Table, ...]:
    """The part of the report for a page on more than parity: the summary, the pairs, and the refusals."""
    return summary_table(report), feeding_table(report), _pair_summary(report.pairs), _skips(report.results)


def summary_table(report: Report) -> Table:
    """Per contender: how many runs passed, failed, were refused, and of each tensor the worst ratio of error to budget.

    "not run" counts refusals and what a case itself excludes.
    """
    rows = []
    for contender in report.contenders:
        results = [result for result in report.results if result.contender == contender]
        counts = [sum(result.status == status for result in results) for status in ("passed", "failed", "error")]
        ran = sum(result.ran for result in results)
        ratios = (_worst_ratio(results, tensor) for tensor in ALL_TENSORS)
        rows.append((str(contender), str(ran), *map(str, counts), str(len(results) - ran), *ratios, _worst(results)))
    return Table(
        title="Summary",
        note="Ratio: the share of its budget that an error uses, the larger of max and RMS; 1 is the limit. Each "
        "column has the worst of all cases, the last one names the worst of all.",
        header=("backend", "ran", "passed", "failed", "error", "not run", *ALL_TENSORS, "worst ratio"),
        rows=tuple(rows),
    )


def feeding_table(report: Report) -> Table:
    """Every backward (rows) with the out and lse of every forward (columns)."""
    fed = [result for result in report.results if result.ran and result.fed_by]
    feeders = tuple(dict.fromkeys(result.fed_by for result in fed))
    rows = []
    for contender in dict.fromkeys(result.contender for result in fed):
        of_feeder = ([r for r in fed if (r.contender, r.fed_by) == (contender, feeder)] for feeder in feeders)
        rows.append((str(contender), *map(_feeding, of_feeder)))
    return Table(
        title="Every backward on every forward",
        note="A row's backward is given out and lse of a column's forward. Runs that passed, of how many, and the "
        "worst ratio of error to budget.",
        header=("backward", *(f"fed by {feeder}" for feeder in feeders)),
        rows=tuple(rows),
    )


def _feeding(results: Sequence[Result]) -> str:
    if not results:
        return ""
    passed = sum(result.status == "passed" for result in results)
    return f"{passed} of {len(results)}, {_worst(results)}"


def _worst_ratio(results: Iterable[Result], tensor: str) -> str:
    ratios = [score.ratio for result in results for score in result.scores if score.tensor == tensor]
    return f"{max(ratios):.2f}" if ratios else ""


def _worst(results: Iterable[Result]) -> str:
    scored = [(result.ratio, result.case) for result in results if result.scores]
    if not scored:
        return ""
    ratio, case = max(scored)
    return f"{ratio:.2f} ({case})"


def _pair_summary(pairs: Sequence[Pair]) -> Table:
    rows = []
    for key in dict.fromkeys((pair.direction, pair.left, pair.right) for pair in pairs):
        these = [pair for pair in pairs if (pair.direction, pair.left, pair.right) == key]
        worst = max(these, key=lambda pair: pair.ratio)
        agree = sum(pair.passed for pair in these)
        rows.append((*key, str(len(these)), str(agree), f"{worst.ratio:.2f} ({worst.case})"))
    return Table(
        title="Backends against each other",
        note="|A - B| against the sum of what both are allowed. It holds where both pass; the ratio says how close.",
        header=("direction", "A", "B", "cases", "agree", "worst ratio"),
        rows=tuple(rows),
    )


def _skips(results: Iterable[Result]) -> Table:
    cases: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for result in results:
        if not result.ran:
            cases.setdefault((str(result.contender), result.reasons), {})[result.case] = None
    rows = ((who, "; ".join(reasons), str(len(names)), ", ".join(names)) for (who, reasons), names in cases.items())
    return Table(
        title="Not run, and why",
        note="A case is left out only for a reason that the backend itself gives, or, of backward, that the case has.",
        header=("backend", "reasons", "cases", "which"),
        rows=tuple(rows),
    )


def _details(results: Iterable[Result], direction: Direction) -> Table:
    fed = ("fed by",) if direction == "backward" else ()
    rows = (
        (
            result.case,
            result.contender.backend,
            result.variant,
            *((result.fed_by,) if fed else ()),
            result.status,
            *_cells(result.scores, direction),
        )
        for result in results
        if result.ran and result.contender.direction == direction
    )
    return Table(
        title=f"Every case, {direction}",
        note="Error against the reference in fp64, max or rms, whichever uses more of what it is allowed.",
        header=("case", "backend", "variant", *fed, "status", *_headings(direction, ("error", "budget", "ratio"))),
        rows=tuple(rows),
    )


def _pair_details(pairs: Iterable[Pair], direction: Direction) -> Table:
    rows = (
        (pair.case, pair.left, pair.right, *_cells(pair.scores, direction))
        for pair in pairs
        if pair.direction == direction
    )
    return Table(
        title=f"Every pair, {direction}",
        note="The best variant of each backend.",
        header=("case", "A", "B", *_headings(direction, ("|A - B|", "allowed", "ratio"))),
        rows=tuple(rows),
    )


def _case_list(reports: Iterable[CaseReport]) -> Table:
    rows = ((report.case.name, describe_case(report.case), report.case.why) for report in reports)
    return Table(title="The cases", note="", header=("case", "problem", "why"), rows=tuple(rows))


def describe_case(case: Case) -> str:
    """A case's sizes and what is special about it, in one line."""
    is_packed = case.packed is not None or (case.cache is not None and case.cache.queries is not None)
    entries = f"{'packed ' * is_packed}B={case.lengths[0]}"
    parts = [
        f"{entries} Hq={case.heads_q} Hkv={case.heads_kv} Sq={case.seq_q} Skv={case.seq_kv} {case.widths}",
        case.dtype,
        "causal" if case.causal else "full",
    ]
    if case.scale is not None:
        parts.append(f"scale={case.scale:g}")
    if case.cache is not None:
        parts.append(describe_cache(case.cache))
    if case.values != "normal":
        parts.append(case.values)
    if case.has_dlse and not case.no_backward:
        parts.append("dlse")
    defaults = type(case.layout)()
    for field in ("order", "offset", "row_pad", "broadcast", "stray_strides"):
        value = getattr(case.layout, field)
        if value != getattr(defaults, field):
            parts.append(f"{field}={value}")
    return " ".join(parts)


def describe_cache(cache: CacheCase) -> str:
    """Where a case's keys are, and what else its cache is not by default."""
    parts = ["dense" if cache.page is None else f"pages of {cache.page}"]
    defaults = CacheCase(lengths=())
    for field in ("order", "joint", "offset", "row_pad", "shared", "splits", "tree", "stored", "scales"):
        value = getattr(cache, field)
        if value != getattr(defaults, field):
            parts.append(f"{field}={value}")
    return f"cache: {' '.join(parts)}"


def _headings(direction: Direction, what: Sequence[str]) -> TableRow:
    return tuple(f"{tensor} {each}" for tensor in TENSORS[direction] for each in what)


def _cells(scores: Sequence[Score], direction: Direction) -> TableRow:
    found = {score.tensor: score for score in scores}
    return tuple(cell for tensor in TENSORS[direction] for cell in _score(found.get(tensor)))


def _score(score: Score | None) -> TableRow:
    if score is None:
        return "", "", ""
    return f"{score.error:.2e} {score.of}", f"{score.budget:.2e}", f"{score.ratio:.3f}"


# ---------------------------------------------------------------- formats


def to_markdown(report: Report, tables: Iterable[Table]) -> str:
    """The report as Markdown, verdict first."""
    lines = ["# Parity", "", verdict(report), ""]
    lines += [f"- {name}: {value}" for name, value in report.environment.items()]
    lines += [f"- command: `{report.command}`", ""]
    if report.problems:
        lines += ["## Failures", "", *(f"```\n{problem}\n```\n" for problem in report.problems)]
    for table in tables:
        rows = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
        header = [cell.replace("|", "\\|") for cell in table.header]
        text = tabulate(rows, headers=header, tablefmt="pipe", disable_numparse=True) if rows else "None."
        lines += [f"## {table.title}", "", *([table.note, ""] if table.note else []), text, ""]
    return "\n".join(lines)


def to_html(report: Report, tables: Iterable[Table]) -> str:
    """The report as one page that needs nothing else."""
    import jinja2  # an extra's, which those who import the tables of this module may lack

    source = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(report=report, tables=tuple(tables), verdict=verdict(report))


def verdict(report: Report) -> str:
    """One line: did it pass."""
    ran = sum(result.ran for result in report.results)
    what = f"{ran} runs of {len(report.cases)} cases, {len(report.pairs)} comparisons between backends"
    return f"FAILED: {len(report.problems)} problems in {what}." if report.problems else f"Passed: {what}."


def to_json(report: Report) -> str:
    """The report as JSON, one result a line and three digits a number, as it is kept under version control."""
    results = [_pack_result(result) for result in report.results]
    pairs = [
        {"case": pair.case, **_backward(pair.direction), "left": pair.left, "right": pair.right, **_pack(pair.scores)}
        for pair in report.pairs
    ]
    cases = [{"name": entry.case.name, "problem": describe_case(entry.case)} for entry in report.cases]
    parts: dict[str, Any] = {
        "verdict": verdict(report),
        "failures": report.problems,
        "command": report.command,
        "environment": report.environment,
        "score": ["error", "budget", "ratio", "of"],
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in parts.items()]
    tables = [dataclasses.asdict(table) for table in short_tables(report)]
    for key, rows in (("tables", tables), ("cases", cases), ("results", results), ("pairs", pairs)):
        body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        lines.append(f"{json.dumps(key)}: [\n{body}\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _pack_result(result: Result) -> dict[str, object]:
    """One result; of a backward also its direction and who feeds it. Its config is that of the one its own feeds."""
    is_cross_fed = result.fed_by not in ("", result.contender.backend)
    row: dict[str, object] = {
        "case": result.case,
        **_backward(result.contender.direction),
        "backend": result.contender.backend,
        "variant": result.variant or result.contender.variant,
        "config": "" if is_cross_fed else result.config,
        "fed_by": result.fed_by,
        "status": result.status,
        **_pack(result.scores),
        "reasons": list(result.reasons),
        "message": result.message,
    }
    return {key: value for key, value in row.items() if value}


def _backward(direction: Direction) -> dict[str, str]:
    """The word for a row of backward; empty for forward."""
    return {} if direction == "forward" else {"direction": direction}


def _pack(scores: Sequence[Score]) -> dict[str, list[float | str]]:
    """Per tensor three numbers and which error they are of; inf, which JSON has not, as the text "inf"."""
    packed: dict[str, list[float | str]] = {}
    for score in scores:
        numbers = (float(f"{number:.3g}") for number in (score.error, score.budget, score.ratio))
        packed[score.tensor] = [*("inf" if number == float("inf") else number for number in numbers), score.of]
    return packed
