"""What a kernel can do wrong that a GPU would let pass."""

from __future__ import annotations


class OutOfBoundsError(IndexError):
    """A tile or an index leaves its array where cuTile leaves the outcome undefined."""


class DataRaceError(RuntimeError):
    """Two blocks touch one element and one of them writes it, so the outcome depends on their order."""
