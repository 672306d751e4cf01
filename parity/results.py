"""The records of a run: a `Result` for each case and contender, a `Pair` for each two backends; plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multiattn.plan.backend import Direction
from parity.case import Case

Status = Literal["passed", "failed", "refused", "excluded", "error"]
"""`refused`: by why_not, with reasons. `excluded`: not asked, for the case's own reason. `failed`: wrong numbers.
`error`: something was raised."""

TENSORS: dict[Direction, tuple[str, ...]] = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
"""The tensors that each direction writes and is judged by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A direction of a backend, with one of its variants or (None) the best that can run a case."""

    backend: str
    variant: str | None = None
    direction: Direction = "forward"
    turn: int | None = None
    """Run each case on the variant, and on a CPU the config, whose first turn (0) or later one it is, not on the best:
    each has its share of cases."""

    def __str__(self) -> str:
        name = self.backend if self.variant is None else f"{self.backend}-{self.variant}"
        name += f"-turn{self.turn + 1}" if self.turn else ""
        return name if self.direction == "forward" else f"{name} backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One tensor of one run against its budget: of max and RMS the one that uses more of it."""

    tensor: str
    """One of TENSORS."""
    of: str
    """``max`` or ``rms``."""
    error: float
    budget: float
    ratio: float
    """Share of the budget used; inf where NaN or inf stand in wrong places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of one case on one contender; a backward took out and lse from `fed_by`'s forward."""

    case: str
    contender: Contender
    status: Status
    variant: str = ""
    config: str = ""
    fed_by: str = ""
    seconds: float = 0.0
    scores: tuple[Score, ...] = ()
    reasons: tuple[str, ...] = ()
    message: str = ""

    @property
    def ran(self) -> bool:
        """True if there was a Plan to run."""
        return self.status not in ("refused", "excluded")

    @property
    def ratio(self) -> float:
        """The largest share of a budget used; zero where nothing was scored."""
        return max((score.ratio for score in self.scores), default=0.0)

    @property
    def who(self) -> str:
        """The contender, and who feeds it where that is another backend."""
        other = self.fed_by not in ("", self.contender.backend)
        return f"{self.contender} fed by {self.fed_by}" if other else str(self.contender)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two backends' results of one case against each other: allowed is the sum of what each is allowed."""

    case: str
    left: str
    right: str
    scores: tuple[Score, ...]
    direction: Direction = "forward"

    @property
    def ratio(self) -> float:
        """The largest share of what is allowed."""
        return max(score.ratio for score in self.scores)

    @property
    def passed(self) -> bool:
        """True if they agree on every tensor."""
        return self.ratio <= 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseReport:
    """Everything about one case."""

    case: Case
    results: tuple[Result, ...]
    pairs: tuple[Pair, ...]
