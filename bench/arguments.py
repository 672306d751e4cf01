"""argparse's types of what ``python -m bench`` is given."""

from __future__ import annotations

import argparse
import math

from bench.matrix import DIRECTIONS, Direction


def count(text: str) -> int:
    """What is counted."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; allowed whole numbers from 1 on")
    return int(text)


def positive(text: str) -> float:
    """What takes time."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; allowed numbers above 0")
    return value


def directions(text: str) -> tuple[Direction, ...]:
    """Some of bench.matrix.DIRECTIONS, with commas between them; in their order."""
    given = text.split(",")
    wrong = [name for name in given if name not in DIRECTIONS]
    if wrong:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(wrong)}; allowed {', '.join(DIRECTIONS)}, commas between them"
        )
    return tuple(direction for direction in DIRECTIONS if direction in given)
