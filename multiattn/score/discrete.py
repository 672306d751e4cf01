"""Where the last bit of an fp32 number decides: before it is cut to an integer or compared.

One rule: in what floor (so ceil, trunc, round), an integer cast, ``fmod`` (so ``remainder``) or a comparison is made
of, **each operation is rounded to nearest by itself**, as PyTorch's are. A division is no product with a reciprocal
(``41 * (1 / 41)`` is less than 1), a root no approximation, and a product of positions and captured numbers is not
fused into a sum. Everywhere else a kernel has the cheaper ones, within an ulp or two. exp, log, sin and others are no
better here than there: no two libraries have the same last bit of these.
"""

from __future__ import annotations

import functools
import math

from multiattn.score.arithmetic import BITS, COMPARISONS
from multiattn.score.expression import Node, apply, inputs_of, rebuild, walk

_DECIDE = frozenset(("floor", "fmod", *COMPARISONS))
_ROUNDED = {"mul": "mul_rn", "div": "div_rn", "sqrt": "sqrt_rn"}


def decides(node: Node) -> bool:
    """True for an operation whose result may change by far more than an ulp where an argument does by one."""
    return node.op in _DECIDE or (node.op == "cast" and node.dtype in (*BITS, "bool"))


@functools.lru_cache(maxsize=256)
def decisive(root: Node) -> frozenset[Node]:
    """The fp32 nodes of an expression whose last bit decides a result."""
    found: set[Node] = set()
    for node in reversed(list(walk(root))):
        if decides(node) or node in found:
            found.update(it for it in node.args if it.dtype == "f32")
    return frozenset(found)


def with_rounding(root: Node) -> Node:
    """The expression with operations that are rounded by themselves where that decides."""
    deciding = decisive(root)
    made: dict[Node, Node] = {}
    for node in walk(root):
        args = [made[it] for it in node.args]
        op = _ROUNDED.get(node.op) if node in deciding and node.dtype == "f32" else None
        if op is None or (op == "mul_rn" and depends_on_score(node)):
            made[node] = rebuild(node, args)
        elif op == "div_rn" and _is_power_of_two(args[1]):
            made[node] = rebuild(node, args)  # its reciprocal is exact
        else:
            made[node] = apply(op, *args)
    return made[root]


def depends_on_score(node: Node) -> bool:
    """True for what comes of products on tensor cores, whose last bits depend on the order in which they add."""
    return bool(inputs_of(node) & {"score", "raw"})


def _is_power_of_two(node: Node) -> bool:
    if node.op != "const" or not math.isfinite(node.value):
        return False
    fraction, exponent = math.frexp(abs(node.value))
    return fraction == 0.5 and abs(exponent) < 100
