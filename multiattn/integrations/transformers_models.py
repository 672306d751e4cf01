"""Models that are refused by name, because their attention is not that of transformers' `AttentionInterface`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from multiattn.integrations.transformers_paged import NAME

EAGER_ONLY = frozenset(
    (
        # sinks, which PyTorch's SDPA has not
        "deepseek_v4",
        "flint",
        "gpt_oss",
        "granite_swa",
        "granitemoe_swa",
        "hy_v4",
        "hy_v4_vl",
        "inkling2",
        "inkling2_loop",
        "mimo_v2_flash",
        "openai_privacy_filter",
        # softcap, which it has not either
        "gemma2",
        "t5gemma",
        "vaultgemma",
        "videoprism",
        # a model of theirs, or nobody has tried it there
        "align",
        "apertus1p5",
        "bigbird_pegasus",
        "bridgetower",
        "clap",
        "gemma4",
        "git",
        "informer",
        "longt5",
        "markuplm",
        "maskformer",
        "nllb_moe",
        "patchtsmixer",
        "pegasus_x",
        "speech_to_text",
        "splinter",
        "switch_transformers",
        "time_series_transformer",
    )
)
"""Models of transformers that refuse SDPA and run here: their eager attention reads nothing that `attend` does not."""


JOIN_NUMBERS = frozenset(("deepseek_v4",))
"""Models that join their masks with numbers to add, which turns bools into something else."""


@cache
def refuse_own_attention(config: type) -> None:
    """Refuse the models of a config that make masks and compute attention by code of their own.

    Raises:
        NotImplementedError: For such a model.
    """
    module = sys.modules.get(config.__module__.replace(".configuration_", ".modeling_"))
    if module is None or not _models(module) or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return
    if not any(getattr(it, "_supports_attention_backend", False) for it in _models(module)):
        raise NotImplementedError(
            f"{_name(module)} computes attention by code of its own, which no attn_implementation replaces; allowed "
            f'models that call transformers\' AttentionInterface. Use attn_implementation="eager" instead of "{NAME}"'
        )


@cache
def refuse_untested(attention: type) -> None:
    """Refuse the layers of a model that does not support SDPA and that nobody has compared with eager attention.

    Raises:
        NotImplementedError: For such a layer.
    """
    module = sys.modules.get(attention.__module__)
    if module is None or _name(module) in EAGER_ONLY or not any(not it._supports_sdpa for it in _models(module)):
        return
    raise NotImplementedError(
        f"{_name(module)} says that it does not support SDPA, so its attention may be one of its own kind; allowed "
        f'models that support SDPA, and {", ".join(sorted(EAGER_ONLY))}. Use attn_implementation="eager"'
    )


def _is_eager_only(attention: type) -> bool:
    module = sys.modules.get(attention.__module__)
    return module is not None and _name(module) in EAGER_ONLY


is_eager_only: Callable[[type], bool] = torch.compiler.assume_constant_result(_is_eager_only)
"""True for the layers of a model in `EAGER_ONLY`, also in a compiled function."""


def _makes_blocks(attention: type) -> bool:
    module = sys.modules.get(attention.__module__)
    return module is not None and hasattr(module, "__file__") and "block_sequence_ids" in inspect.getsource(module)


makes_blocks: Callable[[type], bool] = torch.compiler.assume_constant_result(_makes_blocks)
"""True for the layers of a model whose masks may show blocks of tokens, such as an image, to themselves."""


@cache
def refuse_bools(attention: type) -> None:
    """Refuse a mask of bools for the layers of a model that would not keep it as it is.

    Raises:
        NotImplementedError: For such a layer.
    """
    module = sys.modules.get(attention.__module__)
    if module is not None and _name(module) in JOIN_NUMBERS:
        raise NotImplementedError(
            f"attention_mask: got bools, which {_name(module)} joins with numbers; allowed numbers to add: 0, and the "
            "lowest of the dtype where a key is hidden"
        )


def _models(module: Any) -> list[type[PreTrainedModel]]:
    """The model classes that a module defines."""
    return [
        it
        for it in vars(module).values()
        if isinstance(it, type) and issubclass(it, PreTrainedModel) and it.__module__ == module.__name__
    ]


def _name(module: Any) -> str:
    return str(module.__name__).rpartition(".")[2].removeprefix("modeling_")
