"""Programs as the Gluon kernel computes them: each part where it is computed the fewest times.

A thread has a few rows of a tile and many keys of each row. A load that depends on no key is done once in a tile of
queries; other loads go ahead of the products whose scores they modify; and the distance of a key, which would take a
subtraction and a conversion for each score, comes from one conversion for each row by an addition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace as with_fields
from typing import NamedTuple

from multiattn.score import LoweredScore
from multiattn.score.expression import Node, apply, const, inputs_of, make, read, rebuild, replace, walk
from multiattn.score.integers import may_wrap

DISTANCES = ("distance", "scaled_distance")
"""Operations of this language alone: ``f32(rows - keys)``, and its product with a third argument."""


class Stages(NamedTuple):
    """A score in three functions; the results of the first two are further items of `aux` for the next."""

    once: tuple[Node, ...]
    """For a tile of queries."""
    ahead: tuple[Node, ...]
    """For a block of keys, before there are products."""
    rest: Node

    @property
    def functions(self) -> tuple[tuple[str, tuple[Node, ...]], ...]:
        """Those that have results, by name."""
        found = (("once", self.once), ("ahead", self.ahead), ("rest", (self.rest,)))
        return tuple((name, roots) for name, roots in found if roots)

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the further items of `aux`."""
        return tuple(f"kept{place}" for place in range(len(self.once) + len(self.ahead)))


@functools.lru_cache(maxsize=256)
def stages_of(score: Node) -> Stages:
    """The stages of a lowered score."""
    once = _largest(score, lambda it: any(part.op == "load" for part in walk(it)) and not inputs_of(it) & {"raw", "kv"})
    names = {it: make("derived", it.dtype, (), f"kept{place}") for place, it in enumerate(once)}
    score = replace(score, names)
    ahead = _largest(score, lambda it: it.op == "load" and "raw" not in inputs_of(it))
    names = {it: make("derived", it.dtype, (), f"kept{place}") for place, it in enumerate(ahead, len(once))}
    return Stages(once, ahead, _with_distances(replace(score, names)))


def under_diagonal(lowered: LoweredScore) -> LoweredScore:
    """The score where keys behind the diagonal are hidden later on: the distance of the others has a sign."""
    if lowered.score is None:
        return lowered
    changes = {it: it.args[0] for it in walk(lowered.score) if it.op == "abs" and _is_from_diagonal(it.args[0])}
    return with_fields(lowered, score=replace(lowered.score, changes))


def follows_distance(lowered: LoweredScore) -> bool:
    """True where keys differ only in how far they are, and scores move with that in one direction.

    As ALiBi's under a causal mask do, whose largest ones are those of the nearest keys; a softcap's take no notice.
    """
    if lowered.score is None:
        return True
    stages = stages_of(lowered.score)
    return not stages.ahead and _adds_distance(stages.rest)


def _adds_distance(node: Node) -> bool:
    if node.op in ("add", "sub", "neg"):
        return all(map(_adds_distance, node.args))
    return node.op in DISTANCES or "kv" not in inputs_of(node)


def _largest(root: Node, wanted: Callable[[Node], bool]) -> tuple[Node, ...]:
    """The nodes that are wanted and part of no other one, each once."""
    found: dict[Node, None] = {}
    rest = [root]
    while rest:
        node = rest.pop()
        if wanted(node):
            found[node] = None
        else:
            rest += reversed(node.args)
    return tuple(found)


# ---------------------------------------------------------------- distances


def _with_distances(root: Node) -> Node:
    made: dict[Node, Node] = {}
    for node in walk(root):
        args = [made[it] for it in node.args]
        form = None
        if node.op == "cast" and node.dtype == "f32" and node.args[0].dtype == "i32":
            form = _distance(node.args[0])
        elif node.op == "mul":
            form = _scaled(*args) or _scaled(*reversed(args))
        made[node] = form or rebuild(node, args)
    return made[root]


def _distance(node: Node) -> Node | None:
    """The fp32 number of an integer, which is the position of a key and what depends on none, or its absolute value."""
    if node.op == "abs":
        inside = _distance(node.args[0])
        return None if inside is None else apply("abs", inside.args[0] if inside.op == "neg" else inside)
    if any(map(may_wrap, walk(node))):
        return None
    terms = _terms(node)
    keys = [sign for sign, it in terms if it is read("kv")]
    others = [(sign, it) for sign, it in terms if it is not read("kv")]
    if len(keys) != 1 or any("kv" in inputs_of(it) for _, it in others):
        return None
    rows = const(0, "i32")
    for sign, it in others:
        rows = apply("add" if sign != keys[0] else "sub", rows, it)
    found = make("distance", "f32", (rows, read("kv")))
    return found if keys[0] < 0 else apply("neg", found)


def _scaled(x: Node, factor: Node) -> Node | None:
    if x.op == "neg":
        x, factor = x.args[0], apply("neg", factor)
    if x.op != "distance" or inputs_of(factor) & {"raw", "kv"}:
        return None
    return make("scaled_distance", "f32", (*x.args, factor))


def _terms(node: Node, sign: int = 1) -> list[tuple[int, Node]]:
    """The terms of a sum of integers, each with 1 or -1."""
    if node.op == "neg":
        return _terms(node.args[0], -sign)
    if node.op in ("add", "sub"):
        return _terms(node.args[0], sign) + _terms(node.args[1], sign if node.op == "add" else -sign)
    return [(sign, node)]


def _is_from_diagonal(node: Node) -> bool:
    """True for ``q + seq_kv - seq_q - kv``, which is positive or 0 wherever a causal mask lets a query see a key."""
    wanted = {(1, "q"), (1, "seq_kv"), (-1, "seq_q"), (-1, "kv")}
    terms = _terms(node)
    return len(terms) == len(wanted) and {(sign, it.value) for sign, it in terms if it.op == "input"} == wanted
