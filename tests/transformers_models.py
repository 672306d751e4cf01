"""A small random model of each class that the installed transformers registers, and inputs that it takes.

A config is made small by the names of its fields (`RULES`), sub-configs too; `EXCEPTIONS` says what names do not. The
first of several recipes with which eager attention runs is taken. Nothing is fetched.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

BATCH, LENGTH, TARGETS = 2, 23, 11
VOCABULARY, LARGEST = 99, 30e6
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
    (r"^vocab_size_per_layer_input$|vocab_size$|^vocab$", VOCABULARY),
    (r"codebook_size$", 64),
    (r"^upsample_groups$", 1),
    (r"^(mamba_)?n_?groups$", 1),
    (r"^mamba_(num|n)_heads$", 8),
    (r"type_vocab_size$", 2),
    (r"^(num_nextn_predict_layers|num_kv_shared_layers|first_k_dense_replace)$", 0),
    (r"^(num_dense_layers|encoder_sparse_step)$", 0),
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
    (r"(intermediate_size|intermediate_dim|ffn_hidden_size|feed_forward_size)$", 96),
    (r"(ffn_dim|d_ff|mlp_dim|n_inner|d_inner)$", 96),
    (r"^(index_topk|index_block_size)$", 4),
    (r"^index_topk_blocks$", 2),
    (r"^(sliding_window|sliding_window_size|attention_window_size|local_attention|attention_chunk_size)$", 6),
    (r"(query_pre_attn_scalar)$", 16),
    (r"(projection_dim|embedding_size|emb_dim|embed_dim|hidden_size|d_model|n_embd|hidden_dim|^dim|_width)$", 64),
    (r"(position_embeddings|n_positions|max_seq_len|n_ctx|max_length|_positions|context_length)$", 128),
    (r"image_size$|input_size$|crop_size$", 32),
    (r"patch_size$", 8),
    (r"dropout|drop_rate|drop_path|layerdrop|_drop$|_pdrop$|apply_spec_augment|^jitter|jitter_noise", "off"),
)

RESNET = {
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
BACKBONE = {"use_timm_backbone": False, "backbone": None, "backbone_kwargs": None}
_OF_INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 16, "budget": 4, "compress_ratio": 2}
QSA = {f"indexer_{name}": size for name, size in _OF_INDEXER.items()}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
CODES = {"num_codebooks": 1}
ZAMBA = {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 61, "IMGIMGA": 62}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "conditional_detr": BACKBONE,
    "dab-detr": BACKBONE,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}, "ffn_config": {"ffn_hidden_size": 48}},
    "deformable_detr": BACKBONE,
    "detr": BACKBONE,
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": None,
    },
    "emu3": {"vocabulary_map": {"<image>": 61}},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_text": {"global_head_dim": 32, "hidden_size_per_layer_input": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 6},
    "glm5_next_text": {"num_key_value_heads": 4, "index_kpool": 2, "index_topk": 4},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"], "index_n_heads": 2},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "musicgen_decoder": CODES,
    "musicgen_melody_decoder": CODES,
    "qwen4_exp_text": QSA,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 6},
    "table-transformer": BACKBONE,
    "xmod": {"default_language": "en_XX"},
    "zamba": ZAMBA | {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": ZAMBA,
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields of a config, by model type, that its names do not tell."""


def classes() -> Iterator[str]:
    """Name each class that is swept: `MAPPINGS` in full, and one class for each other config."""
    named: set[str] = set()
    given: set[str] = set()
    for mapping in (*MAPPINGS, "MODEL_MAPPING", *sorted(vars(modeling_auto))):
        if not mapping.endswith("_MAPPING") or not hasattr(modeling_auto, f"{mapping}_NAMES"):
            continue
        for model_type, names in getattr(modeling_auto, f"{mapping}_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                if name not in given and (mapping in MAPPINGS or model_type not in named):
                    given.add(name)
                    yield name
            named.add(model_type)


def config_class(kind: Any) -> type[PretrainedConfig]:
    """The config that a model class is made of."""
    found: type[PretrainedConfig] | None = getattr(kind, "config_class", None)
    return found or inspect.signature(kind.__init__).parameters["config"].annotation


class Recipe:
    """One way to make a config small.

    `kv` are the heads of keys, None as many as of queries. `fills` gives numbers to fields that are None, too. `keeps`
    leaves all sizes but the numbers of layers, tokens and experts; `whole` leaves everything but dropout.
    """

    def __init__(self, kv: int | None = 2, fills: bool = False, keeps: bool = False, whole: bool = False) -> None:
        self.kv, self.fills, self.keeps, self.whole = kv, fills, keeps or whole, whole
        self.tokens = iter(range(LAST_TOKEN + 1, VOCABULARY))

    def value(self, name: str, value: Any) -> Any:
        """The small value of a field, or the value as it is."""
        small = next((small for pattern, small in RULES if re.search(pattern, name)), "keep")
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if small == "keep":
            return value
        if small == "off":
            return type(value)(0) if isinstance(value, (bool, int, float)) else value
        if self.whole:
            return value
        if small == "token":
            return next(self.tokens) if is_int and value >= 0 else value
        if value is None and small in (0, 1, 2) and re.search("(id|index)$", name):
            return small
        if self.keeps and small not in (0, 1, 2, VOCABULARY) and not name.endswith("experts"):
            return value
        if small == "kv":
            small = self.kv or 4
            return small if value is None and self.fills else min(value, small) if is_int else value
        return small if is_int or (value is None and self.fills and isinstance(small, int)) else value

    def small(self, kind: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
        """A small config of this kind."""
        exceptions = EXCEPTIONS.get(kind.model_type, {})
        default = _default(kind, exceptions)
        given: dict[str, Any] = {}
        names = {it.name: it for it in dataclasses.fields(kind)}
        for name, field in names.items():
            try:
                value = getattr(default, name, None)
            except RuntimeError:  # another for each layer
                value = field.default
            if name.startswith("_") or name in ("transformers_version", "dtype", "architectures", "model_type"):
                continue
            if isinstance(value, PretrainedConfig):
                given[name] = self.small(type(value))
            elif name == "layer_types" and not self.whole and isinstance(value, list):
                given[name] = list(dict.fromkeys(value))
                given[name] *= 3 - min(len(given[name]), 2)
            elif "rope" in name and isinstance(value, dict):
                if "mrope_section" in value:
                    given[name] = value | {"mrope_section": None}
            else:
                small = self.value(name, value)
                if small is not value and not (value is None and name in ("layer_types",)):
                    given[name] = small
        if "layer_types" in given and "num_hidden_layers" in given:
            given["num_hidden_layers"] = len(given["layer_types"])
        if not self.keeps and "rope_parameters" in names and _has_sections(kind):
            rope = getattr(default, "rope_parameters", None) or {}
            if not any(isinstance(it, dict) for it in rope.values()):
                given["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4} | rope | {"mrope_section": None}
        given |= {name: it for name, it in exceptions.items() if not self.keeps} | more
        if "backbone_config" in given and exceptions is not None and "use_timm_backbone" in given:
            given["backbone_config"] = transformers.ResNetConfig(**RESNET)
        for name, it in given.items():
            if isinstance(it, dict) and "mrope_section" in it:
                given[name] = it | {"mrope_section": self.sections(default, given, it)}
        return kind(**given)

    def sections(self, default: Any, given: dict[str, Any], rope: dict[str, Any]) -> list[int]:
        """How a small head's pairs of places are dealt out to time, height and width."""
        head = given.get("head_dim") or given.get("hidden_size", 64) // given.get("num_attention_heads", 4)
        of_config = getattr(default, "partial_rotary_factor", 1.0) or 1.0
        pairs = int(head * rope.get("partial_rotary_factor", of_config)) // 2
        if getattr(default, "qk_rope_head_dim", None):
            pairs = given["qk_rope_head_dim"] // 2
        third = max(round(pairs / 3), 1)
        return [third, third, pairs - 2 * third]


def _default(kind: type[PretrainedConfig], exceptions: dict[str, Any]) -> PretrainedConfig:
    try:
        return kind()
    except Exception:  # some defaults fit only each other's exceptions
        return kind(**exceptions)


def _has_sections(kind: type[PretrainedConfig]) -> bool:
    path = Path(inspect.getfile(kind))
    code = path.with_name(path.name.replace("configuration_", "modeling_"))
    return code.is_file() and "mrope_section" in code.read_text()


def small_of(kind: Any, recipe: Recipe) -> PretrainedConfig:
    """The small config of a model class."""
    more = {}
    fields = config_class(kind)
    if kind.__name__ in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and hasattr(fields(), "is_decoder"):
        more["is_decoder"] = True
    config = recipe.small(fields, **more)
    with torch.device("meta"):
        size = sum(it.numel() for it in kind(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters; allowed {LARGEST / 1e6:.0f}")
    return config


def recipes() -> Iterator[Recipe]:
    """Ways to make a config small, best first."""
    yield Recipe()
    yield Recipe(fills=True)
    yield Recipe(kv=None, fills=True)
    yield Recipe(keeps=True)
    yield Recipe(whole=True)


def build(kind: Any, config: PretrainedConfig, implementation: str = "eager", seed: int = 0) -> Any:
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


def noise(*shape: int) -> torch.Tensor:
    """Normal numbers, the same each time."""
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
    if text and "bbox" in names:
        text["bbox"] = torch.arange(4).expand(BATCH, LENGTH, 4)
    if text and "qformer_input_ids" in names:
        text["qformer_input_ids"] = tokens()
    if text:
        yield text | targets
    for given in media(config, names):
        yield given | targets
        if text:
            yield text | given | targets


def media(config: PretrainedConfig, names: Any) -> list[dict[str, torch.Tensor]]:
    """Images and sounds, for arguments of these names."""
    found: list[dict[str, torch.Tensor]] = []

    def field(default: int, *its: str) -> Any:
        return _field(config, *its) or default

    def add(name: str, *shapes: tuple[int, ...], **more: torch.Tensor) -> None:
        found.extend({name: noise(*shape), **more} for shape in shapes)

    for grid, name in itertools.product(("grid_thw", "image_grid_thw"), ("pixel_values", "hidden_states")):
        if grid in names and name in names:
            patch, depth = field(8, "patch_size"), field(1, "temporal_patch_size")
            width = field(3, "in_channels", "num_channels", "in_chans") * patch**2
            sizes = torch.tensor([[1, 4, 4], [1, 8, 4]])
            add(name, (48, width * depth), (48, width), (48, 3, patch, patch), **{grid: sizes})
    for name in [it for it in ("pixel_values", "pixel_values_videos") if it in names][:1]:
        size = field(32, "image_size", "input_size", "crop_size")
        side = (32, 32) if isinstance(size, dict) else size[-2:] if isinstance(size, (list, tuple)) else (size, size)
        channels = field(3, "num_channels", "in_channels", "in_chans", "channels")
        frames = field(4, "num_frames", "frames_per_clip")
        for its in (side, (64, 64), (224, 224)):
            add(name, (BATCH, channels, *its), (BATCH, frames, channels, *its))
    for name in ("input_features", "input_values", "audio_values", "spectrogram"):
        if name in names:
            bins, longest = field(80, *BINS), 2 * field(64, "max_source_positions")
            shapes = (bins, longest), (64, bins), (4000,), (1, 4000), (longest, bins)
            add(name, *((BATCH, *it) for it in shapes))
    if "pixel_values" in names:
        add("pixel_values", (BATCH, 4, 3, 32, 32))
    if "past_values" in names:
        length, width = field(32, "context_length"), field(1, "num_input_channels", "input_size")
        add("past_values", (BATCH, length, width), (BATCH, length))
    return found


BINS = ("feature_projection_input_dim", "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim")
"""Fields of a config that say how many numbers a sound has at each time."""
