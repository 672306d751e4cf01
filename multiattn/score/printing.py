"""From expressions to text: the walk that all languages share, and `TEXT`, the form that people and digests read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from multiattn.score.arithmetic import DType
from multiattn.score.expression import Node, walk

INFIX: Mapping[str, str] = MappingProxyType(
    {op: f"({{0}} {sign} {{1}})" for op, sign in {
        "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
        "and": "&", "or": "|", "xor": "^", "shr": ">>",
    }.items()}
)  # fmt: skip
"""Operators that every language writes alike."""

_LONGEST = 72
"""Characters of an expression within another one; a longer one gets a name, and so does one that is used again."""


class Language(NamedTuple):
    """How one language writes what kernels compute.

    `ops` has a format for each operation, with ``{0}``, ``{1}`` and ``{2}`` for its arguments; one named with a type,
    as ``min:f32``, goes first. `literal` writes a constant. `load` writes a load from its node, the texts of its
    indices, and the names of what a kernel takes.
    """

    types: Mapping[DType, str]
    ops: Mapping[str, str]
    cast: str
    """``{0}`` as the type ``{1}``."""
    literal: Callable[[Node], str]
    load: Callable[[Node, Sequence[str], Mapping[str, str]], str]
    statement: str = "{name} = {value}"
    """Gives a value a name; may have the ``{type}``, too."""

    def expression(self, node: Node, args: Sequence[str], names: Mapping[str, str]) -> str:
        """One node, of the texts of its arguments. `names`: what inputs and numbers that a kernel takes are called."""
        if node.op == "const":
            return self.literal(node)
        if node.op in ("input", "scalar", "derived"):
            name = str(node.value)
            return names.get(name, name)
        if node.op == "load":
            return self.load(node, [_bare(it) for it in args], names)
        if node.op == "cast":
            return self.cast.format(_bare(args[0]), self.types[node.dtype])
        typed = f"{node.op}:{node.dtype}"
        form = self.ops[typed if typed in self.ops else node.op]
        return form.format(*(map(_bare, args) if form[0].isalpha() else args))  # a call has parentheses of its own

    def statements(
        self, roots: Sequence[Node], names: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[list[str], list[str]]:
        """Statements that compute `roots`, and an expression for each root. Loads come once, and each has a name."""
        uses = Counter(argument for node in walk(*roots) for argument in node.args)
        lines: list[str] = []
        texts: dict[Node, str] = {}
        for node in walk(*roots):
            text = self.expression(node, [texts[it] for it in node.args], names)
            if node.args and (uses[node] > 1 or len(text) > _LONGEST or node.op == "load"):
                name = f"t{len(lines)}"
                lines.append(self.statement.format(name=name, value=_bare(text), type=self.types[node.dtype]))
                text = name
            texts[node] = text
        return lines, [_bare(texts[root]) for root in roots]


def _bare(text: str) -> str:
    """Without the parentheses around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text


def calls(names: str, prefix: str = "") -> dict[str, str]:
    """Formats of functions of one argument; ``op:name`` where the language has another name than the operation."""
    pairs = (it.partition(":") for it in names.split())
    return {op: f"{prefix}{name or op}({{0}})" for op, _, name in pairs}


TEXT = Language(
    types=MappingProxyType({it: it for it in ("f32", "i32", "i64", "bool")}),
    ops=MappingProxyType(
        {
            **INFIX,
            **calls("neg:- not:! abs exp exp2 log log2 sqrt sqrt_rn sin cos erf tanh sigmoid floor"),
            **{op: f"{op}({{0}}, {{1}})" for op in ("min", "max", "quotient", "remainder", "fmod", "mul_rn", "div_rn")},
            "floordiv": "({0} // {1})",
            "mod": "({0} % {1})",
            "where": "where({0}, {1}, {2})",
        }
    ),
    cast="{1}({0})",
    literal=lambda node: repr(node.value),
    load=lambda node, indices, names: f"tensor{node.value}[{', '.join(indices)}]",
)
"""Python's operators and plain names. Two expressions with one text are one expression, but for types of loads."""


# ---------------------------------------------------------------- generated code

DIGEST = "DIGEST"
"""In the text of generated code, where its digest goes: compilers cache by name, so other code has other names."""


def sign(text: str) -> tuple[str, str]:
    """The digest of generated code, 16 hexadecimal digits, and its text with that for `DIGEST`."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return digest, text.replace(DIGEST, digest)
