"""Widths of tiles that are as wide as head_dim, where a language has powers of two alone: one tile, or two parts."""

from __future__ import annotations

NARROWEST = 16
"""Columns: the smallest depth of a product that every arch's tensor cores take."""


def one_width(head_dim: int) -> int:
    """The power of two that holds head_dim."""
    return max(NARROWEST, 1 << (head_dim - 1).bit_length())


def two_widths(head_dim: int) -> tuple[int, int] | None:
    """Half of `one_width`, and the power of two that holds the rest; None if half is too narrow."""
    first = one_width(head_dim) // 2
    return (first, one_width(head_dim - first)) if first >= NARROWEST else None


def saving_widths(head_dim: int) -> tuple[int, int] | None:
    """`two_widths` where they are fewer columns than one tile; else None. Of D=96 64 and 32 are a quarter less."""
    widths = two_widths(head_dim)
    return widths if widths is not None and sum(widths) < one_width(head_dim) else None
