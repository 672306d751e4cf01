"""The mask of the Gluon kernel: which blocks of keys a tile walks over, and which scores count.

A causal query i sees the keys up to ``i + seq_kv - seq_q``. `C` is the kernel's `GluonConstants`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def end_of_blocks(first_query, queries, seq_q, seq_kv, C: gl.constexpr):
    """Blocks of keys from the first on that any of `queries` queries from `first_query` on sees."""
    end = seq_kv
    if C.banded:
        end = gl.minimum(gl.maximum(gl.minimum(first_query + queries, seq_q) + seq_kv - seq_q, 0), seq_kv)
    return (end + C.tile_n - 1) // C.tile_n


@gluon.jit
def blocks_to_see(first_query, blocks, exact_tile, seq_q, seq_kv, C: gl.constexpr):
    """The number of a tile's blocks that the warpgroup sees, and the first of these from which on maxima are exact.

    Exact are those that are seen in part, and of a lazy maximum also the one with the last key of the first query, so
    that every row's maximum is that of a real score; all, where a tile is done again.
    """
    seen = blocks
    all_see = seq_kv
    if C.banded:
        seen = gl.minimum(end_of_blocks(first_query, 64, seq_q, seq_kv, C), blocks)
        all_see = gl.minimum(gl.maximum(first_query + 1 + seq_kv - seq_q, 0), seq_kv)
    if first_query < 0:
        seen = 0
    first_exact = all_see // C.tile_n
    if C.lazy_max:
        first_exact = gl.maximum(all_see - 1, 0) // C.tile_n
        if exact_tile > 0:
            first_exact = 0
    return seen, first_exact


@gluon.jit
def end_of_keys(queries, seq_q, seq_kv, C: gl.constexpr):
    """The first key that a query does not see, nor any after it."""
    end = 0 * queries + seq_kv
    if C.banded:
        end = gl.minimum(queries + 1 + (seq_kv - seq_q), seq_kv)
    return end


@gluon.jit
def mask_scores(scores, first_query, first_key, seq_q, seq_kv, C: gl.constexpr):
    """Scores, -inf where a query does not see a key. With gl.where, whose conditions are packed, twice as slow."""
    end = end_of_keys(first_query + gl.arange(0, 64, C.row), seq_q, seq_kv, C)  # [64]
    keys = first_key + gl.arange(0, C.tile_n, gl.SliceLayout(0, C.scores))  # [tile_n]
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, 0; selp.f32 $0, $1, 0fFF800000, p;}", "=f,f,r",
        [scores, end[:, None] - keys[None, :]], gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
