"""ALiBi and documents for FlashAttention-4, which has no argument for them, in the language of its kernels.

Imported only where it runs, as it needs the CuTe DSL. `flash_attn.cute` calls a score_mod by the names of its last
parameters, a mask_mod by place; both get vectors of integers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch


def alibi(heads: int) -> dict[str, Any]:
    """Arguments for ALiBi with `bench.features.slopes_of`, of a causal mask.

    A slope is computed of its head: a score_mod that reads a tensor pays two divisions for each score, so that it never
    reads beyond the end.
    """
    exponent = -8.0 / heads

    @cute.jit
    def biased(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = cute.math.exp2((head + 1).to(cutlass.Float32) * exponent, fastmath=True)
        return score + slope * (kv_idx - q_idx).to(cutlass.Float32)

    @cute.jit
    def unchanged(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return grad

    return {"score_mod": biased, "score_mod_bwd": unchanged}


def documents(ids: torch.Tensor, blocks: Any, causal: bool) -> dict[str, Any]:
    """Arguments for a mask of documents with these `ids`, int32 ``[S]``, and Flex's BlockMask of it.

    A mask_mod stands in place of `causal`, so it has that, too.
    """

    @cute.jit
    def same_document(batch, head, query, key, seqlen_info, aux_tensors):
        ids = aux_tensors[0]
        of_query = utils.scalar_to_ssa(ids[query[0]], cutlass.Int32)
        of_key = utils.scalar_to_ssa(ids[key[0]], cutlass.Int32)
        if cutlass.const_expr(causal):
            return (of_query == of_key) & (key <= query)
        return of_query == of_key

    def sparse(side):
        """The blocks of keys that each block of queries has (``kv``), or the other way around (``q``)."""
        return BlockSparseTensorsTorch(
            mask_block_cnt=getattr(blocks, f"{side}_num_blocks"),
            mask_block_idx=getattr(blocks, f"{side}_indices"),
            full_block_cnt=getattr(blocks, f"full_{side}_num_blocks"),
            full_block_idx=getattr(blocks, f"full_{side}_indices"),
            block_size=blocks.BLOCK_SIZE,
        )

    tensors = {"block_sparse_tensors": sparse("kv"), "block_sparse_tensors_bwd": sparse("q")}
    return {"mask_mod": same_document, "aux_tensors": [ids], **tensors}
