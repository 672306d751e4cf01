"""Tables of wrong calls, by the class of their errors; each row ends with pieces of what the error says."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

Table = Mapping[type[Exception], Iterable[tuple[Any, ...]]]


def rows(*tables: Table) -> list[Any]:
    """The parameters of a test: a class, and the rest of a row. What it says is its name."""
    return [pytest.param(kind, *row, id=row[-1]) for table in tables for kind, its in table.items() for row in its]


def assert_refused(kind: type[Exception], call: Callable[[], object], told: str) -> Exception:
    """The error of a call, which says all pieces of `told`: what came | what is allowed | what to do."""
    with pytest.raises(kind) as caught:
        call()
    assert [piece for piece in told.split(" | ") if piece not in str(caught.value)] == [], str(caught.value)
    return caught.value
