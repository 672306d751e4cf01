"""Parts of the page with one plot and one table: which fields of its records each shows, and where.

js/parts.js draws them. A column, and a line of the panel, is a title, a field and how it is written: one of FORMATS
there. A field ``value`` is the place or the colour of a mark; a record without it has none.
"""

from __future__ import annotations

from typing import Any

PARTS: dict[str, dict[str, Any]] = {
    "parity": {
        "title": "Parity",
        "note": "The error of each result against fp64, over the budget that its case derives; 1 is the limit.",
        "heading": "Error over budget",
        "plot": "strip",
        "guide": "the budget",
        "label": "Plot of each case's error over its budget, by result; 1 is the limit.",
        "dims": {"report": "Run"},
        "boxes": {"backend": "Backends", "tensor": "Results"},
        "styled": "backend",
        "name": ("backend", "case", "tensor"),
        "columns": (
            *(("case", "case", "text"), ("backend", "backend", "text"), ("direction", "direction", "text")),
            *(("result", "tensor", "text"), ("error", "error", "small"), ("budget", "budget", "small")),
            ("error / budget", "figure", "opens"),
        ),
        "panel": {
            "Error": (
                *(("result", "tensor", "text"), ("error over budget", "figure", "text"), ("error", "told", "text")),
                *(("budget", "budget", "text"), ("fed by", "fed_by", "text"), ("variant", "variant", "text")),
                *(("config", "config", "text"), ("problem", "problem", "text")),
            )
        },
    },
    "targets": {
        "title": "Targets",
        "note": "Registers a thread +spills in hot loops; below, the share of an SM's warps. It takes no GPU.",
        "heading": "Registers, spills and occupancy",
        "plot": "heat",
        "label": "Heat map of registers and occupancy by backend, head_dim and arch.",
        "dims": {"made": "Compiled", "direction": "Direction", "mask": "Mask"},
        "name": ("backend", "direction", "d", "mask", "arch"),
        "columns": (
            *(("backend", "backend", "text"), ("D", "d", "number"), ("arch", "arch", "text")),
            *(("variant", "variant", "text"), ("registers", "label", "opens"), ("spills", "spills", "number")),
            *(("occupancy", "value", "percent"), ("shared memory, KiB", "smem_kib", "number")),
            ("threads", "threads", "number"),
        ),
        "panel": {
            "Plan": (("variant", "variant", "text"), ("config", "config", "text")),
            "Kernel": (
                *(("name", "kernel", "text"), ("registers", "registers", "text")),
                *(("spills in hot loops", "spills", "text"), ("occupancy", "value", "percent")),
                *(("limited by", "limiter", "text"), ("MMA", "mma", "text")),
            ),
            "Why there is none": "why",
        },
    },
    "models": {
        "title": "Models",
        "note": "Tokens a second; below, over the fastest other attention. Random weights, 8 layers, bf16.",
        "heading": "Thousands of tokens a second",
        "plot": "heat",
        "label": "Heat map of tokens a second by model and attention.",
        "dims": {"gpu": "GPU", "mode": "Mode"},
        "name": ("model", "implementation", "mode"),
        "columns": (
            *(("model", "model", "text"), ("attention", "implementation", "text")),
            *(("thousand tokens a second", "thousands", "opens"), ("over the fastest other", "ratio", "ratio")),
        ),
        "panel": {
            "Measured": (
                *(("thousand tokens a second", "thousands", "text"), ("a step", "step", "text")),
                ("logits' error over bf16 eager's", "logits_error", "ratio"),
            ),
            "Why it has no time": "error",
            "Where": "environment",
        },
    },
    "changes": {
        "title": "Every difference",
        "note": "Click a mark, or a figure of the table, for both readings and their plans.",
        "heading": "Speed-up, cell by cell",
        "plot": "changes",
        "guide": "as before",
        "label": "Plot of each cell's speed-up by contender; 1 is as before.",
        "dims": {},
        "boxes": {"verdict": "Verdict", "contender": "Contenders"},
        "styled": "contender",
        "name": ("contender", "cell"),
        "columns": (
            *(("contender", "contender", "text"), ("cell", "cell", "text"), ("timed", "regime", "text")),
            *(("before", "before_text", "number"), ("after", "after_text", "number"), ("speed-up", "figure", "opens")),
            *(("spread", "spread", "percent"), ("verdict", "verdict", "text")),
        ),
        "panel": {
            "Change": (("verdict", "verdict", "text"), ("speed-up", "figure", "text"), ("spread", "spread", "percent")),
            "Before": "before",
            "After": "after",
        },
    },
}


def shown(name: str, *, is_drawn: bool = True, failures: list[str] | None = None) -> dict[str, Any]:
    """The part as the template has it."""
    told = {key: PARTS[name][key] for key in ("title", "note", "heading")}
    is_wide = PARTS[name]["plot"] == "heat"
    return {**told, "template": "part.html", "failures": failures or [], "is_wide": is_wide, "is_drawn": is_drawn}
