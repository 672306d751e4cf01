"""The mask: which keys a query sees, and how many pairs of a query and a key that makes.

A mask is a band of diagonals, aligned at the bottom right: with ``offset = Skv - Sq``, a causal query i sees key j when
``j <= i + offset``.
"""

from __future__ import annotations

import torch


def count_visible_pairs(seq_q: int, seq_kv: int, *, causal: bool) -> int:
    """The number of (query, key) pairs of two sequences that the mask leaves, bottom-right aligned if `causal`."""
    if not causal:
        return seq_q * seq_kv
    offset = seq_kv - seq_q
    first = max(0, -offset)  # rows before it see no key
    rows = seq_q - first
    shortest = max(0, offset) + 1  # what row `first` sees, when there is such a row
    return rows * shortest + rows * (rows - 1) // 2 if rows > 0 and seq_kv > 0 else 0


def visible_pairs(seq_q: int, seq_kv: int, device: torch.device, *, causal: bool) -> torch.Tensor:
    """The keys that each query sees: bool ``[Sq, Skv]``. The one definition of the mask outside the kernels."""
    if not causal:
        return torch.ones(seq_q, seq_kv, dtype=torch.bool, device=device)
    query = torch.arange(seq_q, device=device)[:, None]
    key = torch.arange(seq_kv, device=device)[None, :]
    return key <= query + seq_kv - seq_q
