"""`Features`: the part of a problem that code of its kernels depends on, as one value."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from multiattn.block_mask import BlockSpec
from multiattn.layout import VECTOR_BYTES
from multiattn.mask import Kind
from multiattn.problem import Problem

Keys = Literal["dense", "packed", "cache", "pages"]
"""Where a kernel finds keys and values: in ``[B, H, S, D]``, in a packed batch, in a cache, in pages of a cache."""


class Features(NamedTuple):
    """All of a problem that constants and names of kernels, conditions of rules and capabilities may depend on.

    Two problems with equal features take the same code with the same config. Numbers that kernels are told when they
    run (lengths, strides, heads, a scale, the bounds of a window) are not here. A new feature is a field here first.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    """The width of v and out."""
    mask: Kind
    sinks: bool = False
    row_max: bool = False
    """A forward also writes the largest score of each row."""
    score: str | None = None
    """The digest of the program that modifies scores or hides some; None for plain scores."""
    gradients: tuple[int, ...] = ()
    """Slots of the tensors that the program loads from, and that want a gradient."""
    blocks: BlockSpec | None = None
    """The blocks of a block mask."""
    keys: Keys = "dense"
    packed_queries: bool = False
    """Queries are those of sequences one after another."""
    aligned: bool = True
    """Every row of q, k and v starts at a multiple of 16 bytes."""
    stored: str | None = None
    """The dtype of a cache of 8-bit numbers, of `multiattn.layout.STORED`."""
    per_token: tuple[str, ...] = ()
    """The scales of such a cache, of `SCALES`, that are of each token; others are of each head."""
    v_in_k: bool = False
    """v is the first columns of k. Only a kernel that then reads k alone may have it in its name and constants: for
    all others it is no feature, and must not have them compiled twice."""

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, problem: Problem) -> Features:
        """The features of a problem."""
        score = problem.score
        return cls(
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            mask=problem.band.kind,
            sinks=problem.has_sinks,
            row_max=problem.row_max,
            score=None if score is None else score.program.digest,
            gradients=() if score is None else score.gradients,
            blocks=problem.blocks,
            keys="dense" if problem.batching is None else problem.batching.kind,
            packed_queries=problem.has_packed_queries,
            aligned=problem.alignment % VECTOR_BYTES == 0,
            stored=problem.stored,
            per_token=() if problem.cache is None else problem.cache.per_token,
            v_in_k=problem.v_in_k,
        )
