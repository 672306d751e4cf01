"""Keywords that reach `attend` and change no attention, and the refusal of all that nobody has looked at.

A model hands the keywords of its call down to its attention, mixed with those that are meant for it. One that is
swallowed may select keys, add sinks or hide a part: the result is then wrong, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig

OUTPUTS = (
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_hidden_states_before_downsampling",
    "output_router_logits",
    "return_dict",
    "return_loss",
    "use_cache",
)
"""They say what a model gives back."""

APPLIED = (
    "cache",
    "cache_offset",
    "cache_position",
    "cross_attention_mask",
    "cycle_offset",
    "full_text_row_masked_out_mask",
    "past_key_value",
    "past_key_values",
    "position_embeddings",
    "shared_kv_states",
    "t_cond",
)
"""They are applied before attention, to states, caches and masks."""

INPUTS = (
    "decoder_attention_mask",
    "decoder_input_ids",
    "decoder_inputs_embeds",
    "decoder_position_ids",
    "encoder_attention_mask",
    "encoder_hidden_states",
    "encoder_outputs",
    "input_ids",
    "inputs_embeds",
    "mm_token_type_ids",
    "token_type_ids",
)
"""They are inputs of another part of the model."""

OTHER_KINDS = ("always_partition", "cu_seqlens", "grid_thw", "max_seqlen", "seq_idx")
"""They are for other kinds of layers, or were told to attention by other names."""

BATCHING = (
    "block_table",
    "k_cache",
    "logits_indices",
    "logits_processor_args",
    "read_index",
    "v_cache",
    "write_index",
)
"""They come with transformers' continuous batching; `attend` takes the table and the caches."""

GENERATION = tuple(sorted(it for it in vars(GenerationConfig()) if it != "output_attentions" and it[0] != "_"))
"""Options of `generate`, which that of some models hands to their forward."""

HARMLESS = frozenset((*OUTPUTS, *APPLIED, *INPUTS, *OTHER_KINDS, *BATCHING, *GENERATION))
"""Keywords of `attend` that may have any value: eager attention gets them, too, and reads none of them."""


def refuse_unknown(keywords: Mapping[str, Any]) -> None:
    """Refuse keywords that are not `HARMLESS` and not None.

    Raises:
        NotImplementedError: For `output_attentions`, and for a keyword that nobody has looked at.
    """
    for name, given in keywords.items():
        if name in HARMLESS or given is None:
            continue
        if name != "output_attentions":
            raise NotImplementedError(
                f"{name}: got {_told(given)}, a keyword that multiattn does not know, and which may change attention; "
                'allowed None. Leave it out, or use attn_implementation="eager" or "sdpa"'
            )
        if given:
            raise NotImplementedError(
                "output_attentions: got True, but multiattn never has the attention weights in memory; allowed False. "
                'Use attn_implementation="eager"'
            )


def refuse_trace() -> None:
    """Refuse `torch.jit.trace`, which would keep what masks and positions of its example are.

    Raises:
        NotImplementedError: While it traces.
    """
    if torch._C._is_tracing():
        raise NotImplementedError(
            "torch.jit.trace would keep the padding and the packing of its example; allowed torch.export and "
            'torch.compile. Or use attn_implementation="eager"'
        )


def _told(given: Any) -> str:
    shape = getattr(given, "shape", None)
    return repr(given)[:60] if shape is None else f"a {type(given).__name__} {list(shape)}"
