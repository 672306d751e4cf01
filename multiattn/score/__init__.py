"""Scores as expressions: what modifies a score, traced once from Python, for every kernel language.

``bind_score`` makes a `ScoreProgram` of a call's options, `lower` makes it what kernels compute, and ``score.py`` of
each language prints that. `eager` is the same program in PyTorch.
"""

from multiattn.score.lower import AuxField, LoweredScore, lower
from multiattn.score.program import BoundScore, Captured, Modification, ScoreProgram, bind, bind_score
from multiattn.score.trace import UntraceableError

__all__ = [
    "AuxField",
    "BoundScore",
    "Captured",
    "LoweredScore",
    "Modification",
    "ScoreProgram",
    "UntraceableError",
    "bind",
    "bind_score",
    "lower",
]
