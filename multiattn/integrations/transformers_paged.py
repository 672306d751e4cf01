"""transformers' continuous batching, `model.generate_batch`, with caches in pages.

transformers 5.24 accepts only the names of attention in a list of its own, ``"sdpa"``, ``"paged|eager"`` and any with
``flash`` in it, and has no way to register another. `register_continuous_batching` wraps three of its functions. The
wrappers see our names first and pass all other names on.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from multiattn.integrations.caches import put
from multiattn.kvcache import fmha_kvcache

NAME = "multiattn"


def is_ours(name: str | None) -> bool:
    """True for the names that `multiattn.integrations.transformers.register` adds."""
    return name is not None and (name == NAME or name.startswith(f"{NAME}_"))


def register_continuous_batching() -> None:
    """Let transformers' `generate_batch` and `ContinuousBatchingManager` run models with our attention.

    Call `multiattn.integrations.transformers.register` as well, and name the attention as usual. Batches of prompts are
    packed sequences. Where every request has one token and all layers see all keys, `multiattn.fmha_kvcache` reads the
    pages of the cache, on any device; `max_blocks_per_request=0` of `ContinuousBatchingConfig` turns that off. Calling
    it again does nothing new.

    Raises:
        ImportError, AttributeError: The continuous batching of this transformers is built otherwise.
    """
    from transformers.generation.continuous_batching import cache, continuous_api, initialization

    manager = continuous_api.ContinuousBatchingManager
    if getattr(manager.switch_to_cb_friendly_attn, "is_multiattn", False):
        return
    switch, ensure = manager.switch_to_cb_friendly_attn, initialization.ensure_decode_fast_path_is_available
    requested = initialization.is_flash_attention_requested

    @wraps(switch)
    def switch_unless_ours(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if not is_ours(model.config._attn_implementation):
            switch(self, model, *args, **kwargs)

    @wraps(ensure)
    def ensure_or_ours(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        allocators = (cache.ATTN_TYPE_TO_ALLOCATOR[it] for it in cache.group_layers_by_attn_type(config))
        if not (is_ours(config._attn_implementation) and all(it.supports_block_table for it in allocators)):
            ensure(config, cb_config, *args, **kwargs)

    @wraps(requested)
    def requested_or_ours(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        if config is not None and not args and not kwargs and is_ours(config._attn_implementation):
            return True  # packed sequences, and no mask
        return bool(requested(config, *args, **kwargs))

    switch_unless_ours.is_multiattn = True  # type: ignore[attr-defined]
    manager.switch_to_cb_friendly_attn = switch_unless_ours
    initialization.ensure_decode_fast_path_is_available = ensure_or_ours
    for module in (initialization, cache):
        module.is_flash_attention_requested = requested_or_ours


def attend_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of one token of each request, q ``[1, Hq, T, D]``, over pages; its key and value are put there first.

    A request of length zero fills up a batch: its row of the table is -1, and nothing is written for it.
    """
    count, page = q.shape[2], caches[0].shape[1]
    lengths = cu_seqlens_k[1 : count + 1] - cu_seqlens_k[:count]
    is_kept, place = lengths > 0, (lengths - 1).clamp(min=0)
    table = block_table[:count]
    entry = table.gather(1, (place // page).to(torch.int64)[:, None])[:, 0].to(torch.int64)
    put(caches, (k[0].transpose(0, 1), v[0].transpose(0, 1)), entry, place % page, is_kept)
    k_cache, v_cache = (it.transpose(1, 2) for it in caches)
    out: torch.Tensor = fmha_kvcache(
        q.transpose(0, 2), k_cache, v_cache, seqlens_kv=lengths, page_table=table, **options
    )
    return out.transpose(0, 2)
