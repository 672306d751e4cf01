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

import jinja2
import torch
from tabulate import tabulate

import multiattn
from multiattn import backend as registry
from multiattn.arch import detect
from parity.cases import Case
from parity.run import CaseReport, Contender, Pair, Result, Score

Row = tuple[str, ...]


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
            f"{result.contender} {result.status} on {result.case}: {result.message}"
            for result in self.results
            if result.status in ("failed", "error")
        )
        apart = (
            f"{pair.left} and {pair.right} disagree on {pair.case}: |A - B| ({pair.out.of}) of out is "
            f"{pair.out.error:.3e}, allowed {pair.out.budget:.3e}; ({pair.lse.of}) of lse {pair.lse.error:.3e}, "
            f"allowed {pair.lse.budget:.3e}"
            for pair in self.pairs
            if not pair.passed
        )
        return (*self._idle_backends(), *broken, *apart)

    def _idle_backends(self) -> Iterator[str]:
        for name in dict.fromkeys(contender.backend for contender in self.contenders):
            results = [result for result in self.results if result.contender.backend == name]
            if not any(result.ran for result in results):
                reasons = dict.fromkeys(reason for result in results for reason in result.reasons)
                yield f"{name} was asked for and ran nothing: {'; '.join(reasons) or 'no case'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text, whatever it is written as."""

    title: str
    note: str
    header: Row
    rows: tuple[Row, ...]


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
        _details(report.results),
        _pair_details(report.pairs),
        _case_list(report.cases),
    )


def short_tables(report: Report) -> tuple[Table, ...]:
    """What a page on more than parity shows of it: the summary, the pairs, and what was not run and why."""
    return summary_table(report), _pair_summary(report.pairs), _skips(report.results)


def summary_table(report: Report) -> Table:
    """Per contender: how many cases ran, passed, failed, were refused, and the worst ratio of error to budget."""
    rows = []
    for contender in report.contenders:
        results = [result for result in report.results if result.contender == contender]
        counts = [
            sum(result.status == status for result in results) for status in ("passed", "failed", "error", "refused")
        ]
        rows.append((str(contender), str(sum(result.ran for result in results)), *map(str, counts), _worst(results)))
    return Table(
        title="Summary",
        note="Ratio: the share of its budget that an error uses, largest of max and RMS, out and lse; 1 is the limit.",
        header=("backend", "ran", "passed", "failed", "error", "refused", "worst ratio"),
        rows=tuple(rows),
    )


def _worst(results: Iterable[Result]) -> str:
    scored = [(max(result.out.ratio, result.lse.ratio), result.case) for result in results if result.out and result.lse]
    if not scored:
        return ""
    ratio, case = max(scored)
    return f"{ratio:.2f} ({case})"


def _pair_summary(pairs: Sequence[Pair]) -> Table:
    rows = []
    for left, right in dict.fromkeys((pair.left, pair.right) for pair in pairs):
        these = [pair for pair in pairs if (pair.left, pair.right) == (left, right)]
        worst = max(these, key=lambda pair: max(pair.out.ratio, pair.lse.ratio))
        agree = sum(pair.passed for pair in these)
        rows.append((left, right, str(len(these)), str(agree), f"{_ratio(worst.out, worst.lse):.2f} ({worst.case})"))
    return Table(
        title="Backends against each other",
        note="|A - B| against the sum of what both are allowed. It holds where both pass; the ratio says how close.",
        header=("A", "B", "cases", "agree", "worst ratio"),
        rows=tuple(rows),
    )


def _skips(results: Iterable[Result]) -> Table:
    cases: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for result in results:
        if result.status == "refused":
            cases.setdefault((str(result.contender), result.reasons), []).append(result.case)
    rows = ((who, "; ".join(reasons), str(len(names)), ", ".join(names)) for (who, reasons), names in cases.items())
    return Table(
        title="Not run, and why",
        note="A case is left out only for a reason that the backend itself gives.",
        header=("backend", "reasons", "cases", "which"),
        rows=tuple(rows),
    )


def _details(results: Iterable[Result]) -> Table:
    rows = (
        (result.case, result.contender.backend, result.variant, result.status, *_score(result.out), *_score(result.lse))
        for result in results
        if result.ran
    )
    score = ("error", "budget", "ratio")
    return Table(
        title="Every case",
        note="Error against the reference in fp64, max or rms, whichever uses more of what it is allowed.",
        header=("case", "backend", "variant", "status", *(f"{of} {what}" for of in ("out", "lse") for what in score)),
        rows=tuple(rows),
    )


def _pair_details(pairs: Iterable[Pair]) -> Table:
    rows = ((pair.case, pair.left, pair.right, *_score(pair.out), *_score(pair.lse)) for pair in pairs)
    score = ("|A - B|", "allowed", "ratio")
    return Table(
        title="Every pair",
        note="The best variant of each backend.",
        header=("case", "A", "B", *(f"{of} {what}" for of in ("out", "lse") for what in score)),
        rows=tuple(rows),
    )


def _case_list(reports: Iterable[CaseReport]) -> Table:
    rows = ((report.case.name, describe_case(report.case), report.case.why) for report in reports)
    return Table(title="The cases", note="", header=("case", "problem", "why"), rows=tuple(rows))


def describe_case(case: Case) -> str:
    """A case's sizes and what is special about it, in one line."""
    parts = [
        f"B={case.batch} Hq={case.heads_q} Hkv={case.heads_kv} Sq={case.seq_q} Skv={case.seq_kv} D={case.head_dim}",
        case.dtype,
        "causal" if case.causal else "full",
    ]
    if case.scale is not None:
        parts.append(f"scale={case.scale:g}")
    if case.values != "normal":
        parts.append(case.values)
    defaults = type(case.layout)()
    for field in ("order", "offset", "row_pad", "broadcast", "stray_strides"):
        value = getattr(case.layout, field)
        if value != getattr(defaults, field):
            parts.append(f"{field}={value}")
    return " ".join(parts)


def _ratio(*scores: Score) -> float:
    return max(score.ratio for score in scores)


def _score(score: Score | None) -> Row:
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
        {"case": pair.case, "left": pair.left, "right": pair.right, "out": _pack(pair.out), "lse": _pack(pair.lse)}
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
    row: dict[str, object] = {
        "case": result.case,
        "backend": result.contender.backend,
        "variant": result.variant or result.contender.variant,
        "config": result.config,
        "status": result.status,
        "out": _pack(result.out),
        "lse": _pack(result.lse),
        "reasons": list(result.reasons),
        "message": result.message,
    }
    return {key: value for key, value in row.items() if value}


def _pack(score: Score | None) -> list[float | str] | None:
    """Three numbers and which error they are of; inf, which JSON has not, as the text "inf"."""
    if score is None:
        return None
    numbers = (float(f"{number:.3g}") for number in (score.error, score.budget, score.ratio))
    return [*("inf" if number == float("inf") else number for number in numbers), score.of]
