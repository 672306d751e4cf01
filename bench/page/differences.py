"""The page of two results files compared: the same page as a report's, of what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.page.data import page_data, script_json, table
from bench.page.page import here, render
from bench.page.parts import shown
from bench.page.sources import Source
from bench.page.styles import in_order
from bench.report import mean_text, provenance
from bench.results import is_ours
from bench.verdicts import Change

VERDICTS = ("faster", "same", "slower", "gone")


def summaries(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """How each contender came out, ours first: its verdicts, the mean of its speed-ups, the least and where that is."""
    made = []
    for name in in_order(it.before.contender for it in changes):
        mine = [it for it in changes if it.before.contender == name]
        timed = [it for it in mine if it.speedup]
        least = min(timed, key=lambda it: it.speedup, default=None)
        told: dict[str, Any] = {"name": name, "counts": Counter(it.verdict for it in mine)}
        told |= {"mean": mean_text([it.speedup for it in timed], 3), "least": "-", "where": ""}
        told |= {"least": f"{least.speedup:.3f}", "where": least.before.cell.key} if least is not None else {}
        made.append(told)
    return made


def headline(changes: Sequence[Change]) -> tuple[bool, str]:
    """Is none of ours slower or gone, and the sentence that says so."""
    ours = Counter(it.verdict for it in changes if is_ours(it.before.contender))
    counts = ", ".join(f"{ours[it]} {it}" for it in VERDICTS)
    return not (ours["slower"] + ours["gone"]), f"Of {sum(ours.values())} cells of ours: {counts}."


def changes_page(changes: Sequence[Change], before: str, after: str) -> str:
    """The page of every change; `before` and `after` name the files."""
    old, new = [it.before for it in changes], [it.after for it in changes if it.after is not None]
    sources = [Source(gpu=name, suite=name, rows=tuple(rows)) for name, rows in ((before, old), (after, new))]
    is_good, told = headline(changes)
    return render(
        title=f"multiattn: {before} and {after} compared",
        heading="Two runs compared",
        lead="A speed-up is old time over new. It counts as a change beyond the spread of both readings.",
        here=here(),
        explorers=[],
        extras={"changes": shown("changes", is_drawn=bool(changes))},
        changes={"good": is_good, "told": told, "summaries": summaries(changes), "verdicts": VERDICTS},
        setups=[(f"Before: {before}", provenance(old)), (f"After: {after}", provenance(new))],
        data=script_json(page_data(sources, {"changes": table(records(changes))} if changes else {})),
    )


def records(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """The changes for the page's JSON; `before` and `after` are numbers of rows."""
    made, place = [], len(changes)
    order = in_order(it.before.contender for it in changes)
    for at, it in enumerate(changes):
        after = None
        if it.after is not None:
            after, place = place, place + 1
        name, cell = it.before.contender, it.before.cell.key
        told = {"contender": name, "cell": cell, "regime": it.before.regime, "verdict": it.verdict}
        told |= {"before_text": it.before.text, "after_text": it.after.text if it.after is not None else "no row"}
        told |= {"figure": f"{it.speedup:.3f}" if it.speedup else "", "lane": name, "what": cell}
        numbers = {"before": at, "after": after, "value": round(it.speedup, 4) or None, "spread": round(it.spread, 4)}
        made.append({**told, **numbers, "yo": order.index(name)})
    return made
