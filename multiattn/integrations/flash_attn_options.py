"""Options of FlashAttention's functions as this package has them, and those that are refused or ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from multiattn.mask import Window
from multiattn.plain import plain
from multiattn.validate import as_float
from multiattn.validate.scales import is_stored

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, None]
WindowSize = tuple[int | None, int | None] | list[int] | torch.Tensor | None

DESCALES = ("q_descale", "k_descale", "v_descale")
"""FlashAttention 3's scales, fp32 ``[B, Hkv]``: over caches of 8-bit numbers those of k and v count."""

REFUSED = {
    "qv": None,
    "q_v": None,
    **dict.fromkeys(DESCALES),
    "attention_chunk": 0,
    "seqused_q": None,
    "seqused_k": None,
    "block_table": None,
    "page_table": None,
    "dropout_p": 0.0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "cp_tot_seqused_k": None,
}
"""Options with the one value that is accepted: anything else changes results in a way that no kernel here has."""

HINTS = ("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "fa_version")
"""Options of FlashAttention 3 that change speed and no result. They are ignored, as rules choose the launch here; but
over caches `num_splits` counts."""

_MEANT = {
    "is_causal": "here it is causal",
    "scale": "here it is softmax_scale",
    "window": "here it is window_size, with -1 for all keys of a side",
    "attn_mask": "FlashAttention has no masks; bias of multiattn.fmha takes them",
    "bias": "FlashAttention has no bias; multiattn.fmha has",
    "sinks": "here it is learnable_sink",
    "return_lse": "here it is return_attn_probs, or return_softmax_lse of flash_attn_with_kvcache",
    "seqlens_kv": "here it is cache_seqlens of flash_attn_with_kvcache, and seqused_k of flash_attn_varlen_func",
    "dropout": "here it is dropout_p, which may be 0.0 alone",
}
"""Names that other libraries have for options of FlashAttention."""

HEAD_DIM_MULTIPLE = 8


def refuse(function: str, others: dict[str, Any], **options: Any) -> None:
    """NotImplementedError for an option that no kernel here has, TypeError for one that FlashAttention has not."""
    for name in others:
        if name not in REFUSED and name not in HINTS:
            hint = _MEANT.get(name, "the options are FlashAttention's own; multiattn.fmha has more")
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {hint}")
    for name, value in (others | options).items():
        allowed, value = REFUSED.get(name), plain(value)
        if name in HINTS or value is None or (isinstance(value, (int, float)) and value == allowed):
            continue
        hint = "leave it out, or call FlashAttention's own function"
        raise NotImplementedError(f"{function}: {name}: got {_told(value)}; allowed {allowed}; {hint}")


def _told(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def scales_of(
    function: str, k: torch.Tensor, descales: Mapping[str, Any], *, ignores: bool = False
) -> dict[str, torch.Tensor | float | None]:
    """The scales of a call over caches as `multiattn.fmha_kvcache` takes them, of FlashAttention 3's `DESCALES`.

    NotImplementedError for a scale of q, which keeps its 16 bits, and for one of a cache of 16 bits, unless it is 1 or
    the function `ignores` them there, as FlashAttention 3's does.
    """
    given = {name: plain(descales.get(name)) for name in DESCALES}
    if not is_stored(k) and ignores:
        return {}
    allowed, hint = f"None or 1 for a cache of {k.dtype}, whose numbers have no scale", "leave it out"
    if is_stored(k):
        allowed = "None or 1, as q is fp16 or bf16 over a cache of 8-bit numbers"
        hint = "give q as it was before it was quantised"
    for name in DESCALES[:1] if is_stored(k) else DESCALES:
        scale = given[name]
        if not (scale is None or (isinstance(scale, (int, float)) and scale == 1)):
            raise NotImplementedError(f"{function}: {name}: got {_told(scale)}; allowed {allowed}; {hint}")
    return {"k_scale": given["k_descale"], "v_scale": given["v_descale"]} if is_stored(k) else {}


def as_ours(*, causal: bool, window_size: WindowSize, softcap: float, **same: Any) -> dict[str, Any]:
    """The options of a call as `multiattn.fmha` takes them; `same` are those that both have by one name."""
    return {"causal": bool(causal), "window": _window_of(window_size), "softcap": _softcap_of(softcap), **same}


def _window_of(window_size: WindowSize) -> Window | None:
    """The window as `multiattn.fmha` takes it: a negative bound is none; numbers may be elements of a tensor."""
    if window_size is None:
        return None
    if not isinstance(window_size, (tuple, list, torch.Tensor)) or len(window_size) != 2:
        hint = "n keys up to the query's own are (n - 1, 0)"
        raise TypeError(f"window_size: got {window_size!r}; allowed a pair (left, right), -1 for all of a side; {hint}")
    left, right = (None if it is None or it < 0 else int(it) for it in window_size)
    return None if left is None and right is None else (left, right)


def _softcap_of(softcap: float) -> float | None:
    """The softcap as `multiattn.fmha` takes it: 0 and less is none."""
    number = as_float(softcap, "softcap")
    return number if number > 0.0 else None


def sinks_of(learnable_sink: torch.Tensor | None, s_aux: torch.Tensor | None) -> torch.Tensor | None:
    """The sinks of a call, by FlashAttention 4's name or by vLLM's."""
    if learnable_sink is not None and s_aux is not None:
        raise TypeError("learnable_sink and s_aux are two names of one tensor: got both; give one of them")
    return learnable_sink if s_aux is None else s_aux


def result_of(out: torch.Tensor, lse: torch.Tensor, with_probs: bool, with_lse: bool) -> Result:
    """The results that a caller asked for."""
    if with_probs:
        return out, lse, None
    return (out, lse) if with_lse else out
