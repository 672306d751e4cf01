"""A program as text that says all of it: what an op takes in a graph, which may be saved and loaded elsewhere."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from multiattn.score.expression import Node, make, walk
from multiattn.score.program import Captured, ScoreProgram


@functools.lru_cache(maxsize=256)
def dumps(program: ScoreProgram) -> str:
    """The program in JSON; `loads` makes an equal one of it."""
    nodes = list(walk(*program.roots))
    place = {node: index for index, node in enumerate(nodes)}
    record = {
        "nodes": [[it.op, it.dtype, [place[argument] for argument in it.args], it.value] for it in nodes],
        "score": None if program.score is None else place[program.score],
        "mask": None if program.mask is None else place[program.mask],
        "tail": None if program.tail is None else place[program.tail],
        "scalars": program.scalars,
        "tensors": [[str(it.dtype).removeprefix("torch."), it.rank] for it in program.tensors],
    }
    return json.dumps(record, separators=(",", ":"))  # NaN and inf as Python reads them


@functools.lru_cache(maxsize=256)
def loads(text: str) -> ScoreProgram:
    """The program that `dumps` wrote."""
    record: dict[str, Any] = json.loads(text)
    nodes: list[Node] = []
    for op, dtype, arguments, value in record["nodes"]:
        nodes.append(make(op, dtype, tuple(nodes[it] for it in arguments), value))
    score, mask, tail = (None if record[name] is None else nodes[record[name]] for name in ("score", "mask", "tail"))
    captured = tuple(Captured(dtype=getattr(torch, dtype), rank=rank) for dtype, rank in record["tensors"])
    return ScoreProgram(score=score, mask=mask, tail=tail, scalars=tuple(record["scalars"]), tensors=captured)
