"""2^x as a polynomial, for where the units of ex2 are the bottleneck: the numbers that every kernel's version shares.

`tests/exp2_model.py` fits them, models the result bit for bit, and has the errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

KERNEL_DEGREE = 4
"""Not 3, as in FlashAttention-4: its mean error of 4e-5 goes into every lse, more than parity's budget has. H200,
2026-11-22, D=64 N=4096 causal, a sixteenth of the exponentials: off by 1.9e-5 where 8.4e-6 is allowed."""
COEFFICIENTS: Mapping[int, tuple[float, ...]] = MappingProxyType(
    {
        3: (0.6932829, 0.24221095, 0.055008933),
        4: (0.6931242, 0.24024099, 0.055906426, 0.009582853),
        5: (0.693147, 0.24022242, 0.055507336, 0.009671513, 0.0013264727),
    }
)
"""By degree: those of f, f^2 and so on; that of f^0 is 1, so that 2^0 is 1. Rounded to fp32."""
LOWEST = -127.0
ROUND = 1.5 * 2**23 + 127
"""Added to x it leaves round(x) + 127 in the low bits."""
SIXTEENTHS_MAX = 8
"""Sixteenths of the exponentials: more than half of them on the FMA units is never worth it."""


def is_polynomial(pair: int, sixteenths: int) -> bool:
    """True for a thread's pair of scores that goes to the FMA units: an even share of all pairs."""
    return (pair + 1) * sixteenths // 16 > pair * sixteenths // 16


def share_unit(pairs: int) -> int:
    """The number that sixteenths must be a multiple of, so that a whole number of the pairs goes there."""
    return 16 // math.gcd(16, pairs)
