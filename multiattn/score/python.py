"""Programs as modules of Python, for the kernel languages that are written in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from multiattn.score.expression import ONE, Node, inputs_of
from multiattn.score.lower import LoadSlope, LoweredScore
from multiattn.score.printing import DIGEST, Language, sign

PLACE = "b, h, q, kv, seq_q, seq_kv"
"""Parameters of every function that say where a score is: see `expression.INPUTS`."""

AddGradient = Callable[[LoadSlope, str, Sequence[str]], Iterator[str]]
"""Statements that add a tile of values, by its text, to the elements of a gradient at these indices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonDialect:
    """A kernel language that is written in Python."""

    language: Language
    header: str
    """The imports."""
    decorator: str
    constant: str
    """The annotation of a parameter that is a number while the kernel is compiled."""

    def module(
        self,
        lowered: LoweredScore,
        names: Mapping[str, str],
        slots: Sequence[int],
        add: AddGradient,
        values: Sequence[tuple[str, tuple[Node, ...]]] = (),
    ) -> tuple[str, str]:
        """The digest and the text of a module with a program's functions, as far as there are any.

        ``score(raw, PLACE, aux)`` gives scores in the log2 domain, ``score_and_slope(raw, PLACE, aux)`` those and
        ``d modified score / d score``, ``mask(PLACE, aux)`` whether queries see keys, ``tail(PLACE, aux)`` how
        many of the last keys it may hide, the same for all places. With `slots`,
        ``load_gradients(raw, dscore, PLACE, aux, daux, q_axis)`` adds to the gradients of these tensors; `dscore` is
        the gradient of the modified scores in the natural domain, and queries go along axis `q_axis` of the tile.

        `names` says what inputs and the numbers in `aux` are called. `values` are more functions, ``(PLACE, aux)`` or
        ``(raw, PLACE, aux)`` by what they depend on: each gives the values of its nodes, as a tuple.
        """
        parts = []
        for name, roots in lowered.functions:
            statements, results = self.language.statements(roots, names)
            raw = "" if name in ("mask", "tail") else "raw, "
            parts.append(self._function(name, f"{raw}{PLACE}, aux", [*statements, f"return {', '.join(results)}"]))
        for name, roots in values:
            statements, results = self.language.statements(roots, names)
            raw = "raw, " if any("raw" in inputs_of(root) for root in roots) else ""
            parts.append(self._function(name, f"{raw}{PLACE}, aux", [*statements, f"return ({', '.join(results)},)"]))
        if slopes := lowered.gradients_of(slots):
            roots = tuple(root for it in slopes for root in (it.slope, *it.load.args))
            statements, results = self.language.statements(roots, names)
            statements += ["inside = (q < seq_q) & (kv < seq_kv)", "live = inside & (dscore != 0.0)"]
            rest = iter(results)
            for it in slopes:
                slope = next(rest)
                value = "dscore" if it.slope is ONE else f"dscore * ({slope})"
                value = self.language.ops["where"].format("live", value, "0.0")
                statements += add(it, value, [next(rest) for _ in it.load.args])
            parameters = f"raw, dscore, {PLACE}, aux, daux, q_axis: {self.constant}"
            parts.append(self._function("load_gradients", parameters, statements))
        fields = ", ".join(it.name for it in lowered.fields)
        comment = "".join(f"# {line}\n" for line in (*lowered.program.text.splitlines(), f"aux: {fields or 'nothing'}"))
        return sign("\n\n".join((f"{comment}\n{self.header}", *parts)))

    def _function(self, name: str, parameters: str, statements: Sequence[str]) -> str:
        body = "".join(f"    {line}\n" for line in statements)
        return f"{self.decorator}\ndef {name}_{DIGEST}({parameters}):\n{body}"
