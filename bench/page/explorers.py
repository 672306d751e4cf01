"""The parts of the page with controls: which dimensions each has, and what a reader sees first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.page.sources import Source, kind_of

LABELS = {
    "gpu": "GPU",
    "suite": "Suite",
    "regime": "Timed",
    "along": "Along",
    "n": "N",
    "d": "D",
    "direction": "Timed part",
    "layout": "Layout",
    "mask": "Mask",
    "dtype": "Dtype",
    "group": "Query heads a key head",
    "work": "Work",
    "heads": "Heads q/kv",
    "queries": "Queries",
    "cache": "Cache",
    "batch": "B",
}
SUITE_LABELS = {
    "backward": "standard",
    "heldout": "held out",
    "headdims": "every head_dim",
    "packed": "packed batches",
    "peers/standard": "standard, run again",
    "peers/backward": "standard, run again",
}
"""Labels of suites that are not shown by their names."""
REGIME_LABELS = {"device": "back to back", "graph": "in a CUDA graph", "call": "call by call"}
_DENSE: dict[str, Any] = {
    "zero": True,
    "dims": ("direction", "layout", "mask", "d", "n", "dtype", "group"),
    "along": ("n", "d", "mask"),
    "axes": {"default": ("n", "d"), "features": ("n", "mask"), "packed": ("d", "mask")},
    "natural": ("n", "d", "dtype", "group"),
    "usual": {"headdims": "d", "packed": "mask"},
    "defaults": {"mask": "causal", "d": 128, "n": 4096, "dtype": "bf16", "group": 1},
}
_DECODE: dict[str, Any] = {
    "zero": False,
    "dims": ("work", "d", "heads", "queries", "cache", "batch", "n"),
    "along": ("n", "batch"),
    "axes": {"default": ("n", "batch")},
    "natural": ("d", "heads", "queries", "cache", "batch", "n"),
    "usual": {},
    "defaults": {
        **{"work": "decode", "d": 128, "heads": "32/8", "queries": 1},
        **{"cache": "page16", "batch": 32, "n": 8192},
    },
}
PARTS = {
    "forward": ("Forward", "One call, from q, k and v to out. TFLOPS count visible pairs only.", _DENSE),
    "backward": ("Backward", "From the gradient of out to those of q, k and v: 2.5 times a forward's FLOP.", _DENSE),
    "decode": ("Decode", "Few queries over a cache. TB/s count keys, values, q and out, each moved once.", _DECODE),
}


def explorers(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """The parts for which something was measured, forward first."""
    kinds = {kind_of(row.cell) for source in sources for row in source.timed}
    told = {"labels": LABELS, "suites": SUITE_LABELS, "regimes": REGIME_LABELS}
    return [
        {"id": kind, "kind": kind, "title": title, "note": note, **told, **parts}
        for kind, (title, note, parts) in PARTS.items()
        if kind in kinds
    ]
