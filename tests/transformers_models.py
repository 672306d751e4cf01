"""A small random model of each class that the installed transformers registers, and inputs that it takes.

A config is made small by the names of its fields (`RULES`), sub-configs too; `EXCEPTIONS` says what names do not. The
first of several recipes with which eager attention runs is taken. Nothing is fetched.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

BATCH, LENGTH, TARGETS = 2, 23, 11
VOCABULARY = 99
FIRST_TOKEN, LAST_TOKEN = 3, 60
"""Ordinary tokens; those above stand for images and the like."""

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
)
"""Kinds of head that have masks of their own; of other configs the first class of any mapping is taken."""

RULES: tuple[tuple[str, Any], ...] = (
    (r"(^|_)pad_(token_id|index|id)$", 0),
    (r"(^|_)bos_(token_id|index|id)$|^(forced_)?decoder_start_token_id$", 1),
    (r"(^|_)eos_(token_id|index|id)$", 2),
    (r"(token_id|token_index|token_ids|_id|patch_id)$", "token"),
    (r"^vocab_size_per_layer_input$|vocab_size$|^vocab$|codebook_size$", VOCABULARY),
    (r"type_vocab_size$", 2),
    (r"^(num_nextn_predict_layers|num_kv_shared_layers|first_k_dense_replace|num_dense_layers|encoder_sparse_step)$", 0),
    (r"layers_per_|_layer_(period|interval|offset)$|feature_layer|global_attn_every", "keep"),
    (r"(layers|n_layer|_depth|^depth|num_blocks|n_layers)$", 2),
    (r"(num_key_value_heads|num_kv_heads|kv_heads|key_value_heads|num_key_value_groups|num_key_heads)$", "kv"),
    (r"(heads|n_head)$", 4),
    (r"^(qk_rope_head_dim|rotary_dim|index_rope)$", 8),
    (r"(head_dim|d_kv|kv_channels|attention_head_size|d_head)$", 16),
    (r"lora_rank$", 16),
    (r"(moe|expert\w*)_(intermediate|hidden|ffn_hidden)_size$|share_expert_dim$", 32),
    (r"^(n_group|topk_group|num_expert_group|moe_num_shared_experts|n_shared_experts|num_shared_experts)$", 1),
    (r"(experts_per_tok|experts_per_token|moe_topk|moe_k|top_k_experts|num_selected_experts)$", 2),
    (r"experts$", 4),
    (r"expert_capacity$", 64),
    (r"(intermediate_size|intermediate_dim|ffn_dim|d_ff|mlp_dim|n_inner|d_inner|ffn_hidden_size|feed_forward_size)$", 96),
    (r"^index_topk$", 4),
    (r"^(sliding_window|sliding_window_size|attention_window_size|local_attention)$", 6),
    (r"(query_pre_attn_scalar)$", 16),
    (r"(projection_dim|embedding_size|emb_dim|embed_dim|hidden_size|d_model|n_embd|hidden_dim|^dim|_width)$", 64),
    (r"(position_embeddings|n_positions|max_seq_len|n_ctx|max_length|_positions|context_length)$", 128),
    (r"image_size$|input_size$|crop_size$", 32),
    (r"patch_size$", 8),
    (r"dropout|drop_rate|drop_path|layerdrop|_drop$|_pdrop$|apply_spec_augment|^jitter|jitter_noise", "off"),
)

EXCEPTIONS: dict[str, dict[str, Any]] = {}
"""Fields of a config, by model type, that its names do not tell."""


def classes() -> Iterator[str]:
    """Name each class that is swept: `MAPPINGS` in full, and one class for each other config."""
    named: set[str] = set()
    for mapping in (*MAPPINGS, "MODEL_MAPPING", *sorted(vars(modeling_auto))):
        if not mapping.endswith("_MAPPING") or not hasattr(modeling_auto, f"{mapping}_NAMES"):
            continue
        for model_type, names in getattr(modeling_auto, f"{mapping}_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                if mapping in MAPPINGS or model_type not in named:
                    yield name
            named.add(model_type)


def config_class(kind: type) -> type[PretrainedConfig]:
    """The config that a model class is made of."""
    if getattr(kind, "config_class", None) is not None:
        return kind.config_class
    return inspect.signature(kind.__init__).parameters["config"].annotation


class Recipe:
    """One way to make a config small."""

    def __init__(self, kv: int | None = 2, **changes: Any) -> None:
        self.kv, self.changes, self.tokens = kv, changes, iter(range(LAST_TOKEN + 1, VOCABULARY))

    def value(self, name: str, value: Any) -> Any:
        """The small value of a field, or the value as it is."""
        if name in self.changes:
            return self.changes[name]
        for pattern, small in RULES:
            if re.search(pattern, name):
                break
        else:
            return value
        if small == "keep" or value is None and small not in (0, 1, 2):
            return value
        if small == "off":
            return type(value)(0) if isinstance(value, (bool, int, float)) else value
        if small == "token":
            return next(self.tokens) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value
        if small == "kv":
            return min(value, self.kv) if self.kv else min(value, 4)
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        return small

    def small(self, kind: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
        """A small config of this kind."""
        default = kind()
        given: dict[str, Any] = {}
        names = [it.name for it in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(vars(default))
        for name in names:
            value = getattr(default, name, None)
            if name.startswith("_") or name in ("transformers_version", "dtype", "architectures"):
                continue
            if isinstance(value, PretrainedConfig):
                given[name] = self.small(type(value))
            elif name == "layer_types" and isinstance(value, list):
                given[name] = list(dict.fromkeys(value))
                given[name] *= 3 - min(len(given[name]), 2)
            else:
                small = self.value(name, value)
                if small is not value:
                    given[name] = small
        if "layer_types" in given and "num_hidden_layers" in given:
            given["num_hidden_layers"] = len(given["layer_types"])
        given |= EXCEPTIONS.get(kind.model_type, {}) | more
        return kind(**given)


def small_of(kind: type, recipe: Recipe) -> PretrainedConfig:
    """The small config of a model class."""
    more = {}
    fields = config_class(kind)
    if kind.__name__ in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and hasattr(fields(), "is_decoder"):
        more["is_decoder"] = True
    return recipe.small(fields, **more)


def recipes() -> Iterator[Recipe]:
    """Ways to make a config small, best first."""
    yield Recipe()
    yield Recipe(kv=None)


def build(kind: type, config: PretrainedConfig, implementation: str = "eager", seed: int = 0) -> torch.nn.Module:
    """A random model whose attention is far from uniform, so that what scores are made of shows."""
    torch.manual_seed(seed)
    model = kind._from_config(copy.deepcopy(config), attn_implementation=implementation, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, it in model.named_parameters():
            if not it.is_floating_point():
                continue
            if it.ndim >= 2:
                torch.nn.init.normal_(it, std=1.5 * (it[0].numel() if it.ndim != 3 else it.shape[-1]) ** -0.5)
            elif "sink" in name or not it.isfinite().all() or it.abs().max() > 100:
                torch.nn.init.normal_(it)
    return model


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    """Ordinary tokens ``[batch, length]``."""
    return torch.randint(FIRST_TOKEN, LAST_TOKEN, (batch, length), generator=torch.Generator().manual_seed(seed))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _field(config: PretrainedConfig, *names: str) -> Any:
    """The first of these fields that a config or one of its sub-configs has."""
    for name in names:
        for it in (config, *(getattr(config, sub, None) for sub in getattr(config, "sub_configs", {}))):
            found = getattr(it, name, None) if it is not None else None
            if found is not None:
                return found
    return None


def inputs(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs that a model may take, the likeliest first."""
    config, names = model.config, inspect.signature(model.forward).parameters
    targets = {"decoder_input_ids": tokens(length=TARGETS, seed=3)} if "decoder_input_ids" in names else {}
    text = {"input_ids": tokens()} if "input_ids" in names else {}
    if text:
        yield text | targets
    for given in media(config, names):
        yield given | targets
        if text:
            yield text | given | targets


def media(config: PretrainedConfig, names: Any) -> list[dict[str, torch.Tensor]]:
    """Images and sounds, for arguments of these names."""
    images: list[dict[str, torch.Tensor]] = []
    if "pixel_values" in names or "pixel_values_videos" in names:
        name = "pixel_values" if "pixel_values" in names else "pixel_values_videos"
        size = _field(config, "image_size", "input_size", "crop_size") or 32
        height, width = (size[-2:] if isinstance(size, (list, tuple)) else (size, size)) if not isinstance(size, dict) else (32, 32)
        channels = _field(config, "num_channels", "in_channels", "in_chans", "channels") or 3
        frames = _field(config, "num_frames", "frames_per_clip") or 4
        for side in ((height, width), (64, 64), (224, 224)):
            images.append({name: _noise(BATCH, channels, *side)})
            images.append({name: _noise(BATCH, frames, channels, *side)})
    sounds: list[dict[str, torch.Tensor]] = []
    for name in ("input_features", "input_values", "audio_values", "spectrogram"):
        if name in names:
            bins = _field(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim") or 80
            longest = 2 * (_field(config, "max_source_positions") or 64)
            sounds += [{name: _noise(BATCH, bins, longest)}, {name: _noise(BATCH, 64, bins)}]
            sounds += [{name: _noise(BATCH, 4000)}, {name: _noise(BATCH, 1, 4000)}, {name: _noise(BATCH, longest, bins)}]
    return images + sounds
