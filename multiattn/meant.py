"""Calls that Python would refuse in words of its own, and what their authors meant: TypeErrors with what to write."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

OUR_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "is_causal": "causal; it is aligned at the bottom right",
        "attn_mask": "bias, bool (true is visible) or added to the scores, [B|1, Hq|1, Sq|1, Skv|1], or block_mask",
        "attention_mask": "bias=mask[:, None, None, :].bool() for [B, Skv], where true is a token, or fmha_padded, "
        "which leaves the padding out",
        "key_padding_mask": "bias=~mask[:, None, None, :] for [B, Skv], where true is padding, or fmha_padded, which "
        "leaves the padding out",
        "mask": "bias, bool (true is visible) or added to the scores, [B|1, Hq|1, Sq|1, Skv|1]; for the padding of a "
        "batch there is fmha_padded",
        "kv_mask": "bias=mask[:, None, None, :], bool; only fmha_padded has a kv_mask",
        "attn_bias": "bias",
        "dropout_p": "nothing: a call with a cache drops nothing",
        "dropout": "dropout_p, which may be 0.0 alone",
        "attention_dropout": "dropout_p, which may be 0.0 alone",
        "p": "dropout_p, which may be 0.0 alone",
        "training": "nothing: no call drops anything",
        "window_size": "window, a pair like this one with None in place of -1",
        "sliding_window": "window; n keys up to the query's own are (n - 1, 0)",
        "enable_gqa": "nothing: k and v may always have fewer heads than q",
        "softmax_scale": "scale",
        "sm_scale": "scale",
        "scaling": "scale",
        "logits_soft_cap": "softcap",
        "s_aux": "sinks",
        "learnable_sink": "sinks",
        "return_attn_probs": "return_lse",
        "return_softmax_lse": "return_lse",
        "need_weights": "nothing: weights are never in memory; return_lse gives the log-sum-exp",
        "output_attentions": "nothing: weights are never in memory; return_lse gives the log-sum-exp",
        "out": "nothing: results are new tensors, and only fmha_kvcache writes to a given one",
        "cu_seqlens": "cu_seqlens_q and cu_seqlens_kv, which may be one tensor",
        "max_seqlen": "max_seqlen_q and max_seqlen_kv",
        "cu_seqlens_k": "cu_seqlens_kv",
        "cu_seq_lens_q": "cu_seqlens_q",
        "cu_seq_lens_k": "cu_seqlens_kv",
        "max_seqlen_k": "max_seqlen_kv",
        "max_length_q": "max_seqlen_q",
        "max_length_k": "max_seqlen_kv",
        "query": "q",
        "key": "k",
        "value": "v",
        "cache_seqlens": "seqlens_kv",
        "seqused_k": "seqlens_kv",
        "block_table": "page_table",
        "block_tables": "page_table",
        "cache_batch_idx": "page_table, whose pages may be whole entries of a cache",
        "kv_layout": "nothing: strides say it; pages [page, Hkv, D] are given as a transposed view",
        "pack_gqa": "nothing: heads that share keys share tiles wherever that is faster",
        "scheduler_metadata": "nothing: no call needs a plan made before it",
    }
)
"""Options by the names that other libraries have for them, and what they are here."""

_NO_DROPOUT = "nothing: no call drops anything"
_PADDED_ALONE = "nothing: give the padding of q and k by kv_mask; multiattn.fmha has more options"
_IN_CACHE = (
    "nothing: write new keys and values into the cache first, and count them in seqlens_kv; flash_attn_with_kvcache of "
    "multiattn.integrations.flash_attn writes them"
)
_OF_LAST_KEYS = "bias, [B|1, Hq|1, Sq|1, n] of all keys that there is room for, or of the last n"
_IN_BLOCK_MASK = "block_mask=create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
_OF_TOKENS = "bias=mask[:, None, None, :] for [B, Skv], bool, where true is a token"
_OF_CALLS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "fmha_kvcache": {
            **dict.fromkeys(("k", "v"), _IN_CACHE),
            **dict.fromkeys(("attention_mask", "key_padding_mask"), "seqlens_kv, the keys that each sequence has"),
            **dict.fromkeys(("attn_mask", "attn_bias", "custom_mask", "tree_mask"), _OF_LAST_KEYS),
            **{"k_descale": "k_scale", "v_descale": "v_scale"},
            **dict.fromkeys(("q_descale", "q_scale"), "nothing: q has 16 bits, and no scale; multiply scale by it"),
        },
        "flex_attention": {
            **dict.fromkeys(("mask_mod", "mask"), _IN_BLOCK_MASK),
            **dict.fromkeys(("is_causal", "causal"), f"{_IN_BLOCK_MASK} with q_idx >= kv_idx, or causal=True of fmha"),
            **dict.fromkeys(("attn_mask", "bias", "attn_bias"), f"{_IN_BLOCK_MASK}, or bias of fmha"),
            **dict.fromkeys(("dropout_p", "dropout"), _NO_DROPOUT),
            **{"q": "query", "k": "key", "v": "value"},
        },
        "fmha_padded": {
            **dict.fromkeys(("attention_mask", "mask", "padding_mask"), "kv_mask, [B, Skv], where nonzero is a token"),
            "key_padding_mask": "kv_mask=~key_padding_mask, as there true is a token",
            **dict.fromkeys(("bias", "attn_mask", "return_lse", "score_mod", "block_mask", "q_mask"), _PADDED_ALONE),
            **dict.fromkeys(("dropout_p", "dropout"), _NO_DROPOUT),
        },
        "Attention": {
            **dict.fromkeys(("dropout", "dropout_p", "attention_dropout"), _NO_DROPOUT),
            "batch_first": "nothing: x is always [B, S, embed_dim]",
            "num_key_value_heads": "num_kv_heads",
            "num_attention_heads": "num_heads",
            "hidden_size": "embed_dim",
            **dict.fromkeys(("kdim", "vdim"), "nothing: keys and values are made from embed_dim"),
        },
        "Attention.forward": {
            "key_padding_mask": "bias=~mask[:, None, None, :] for [B, Skv], where true is padding",
            **dict.fromkeys(("attention_mask", "mask"), _OF_TOKENS),
            "attn_mask": "bias, bool (true is visible) or added to the scores, [B|1, num_heads|1, Sq|1, Skv|1]",
            "query": "x",
            "hidden_states": "x",
            **dict.fromkeys(("key", "value", "encoder_hidden_states"), "context, which keys and values are made from"),
            **dict.fromkeys(("is_causal", "causal"), "causal of Attention() itself"),
        },
        "reference": {"backend": "nothing: it is the backend; fmha(..., backend=...) runs the others"},
    }
)
"""Answers of one call where it has another one, by the name of the call."""

_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_lens_q", "cu_seq_lens_k"),
                *("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv", "max_length_q", "max_length_k"),
            ),
            "fmha_varlen takes packed sequences",
        ),
        **dict.fromkeys(
            ("seqlens_kv", "cache_seqlens", "seqused_k", "page_table", "block_table", "block_tables", "num_splits"),
            "fmha_kvcache takes keys in a cache",
        ),
        **dict.fromkeys(("k_scale", "v_scale", "k_descale", "v_descale"), "fmha_kvcache takes caches of 8-bit numbers"),
    }
)
"""Options that other calls have."""


def refuses_calls(function: F, absent: object = None, options: Sequence[inspect.Parameter] = ()) -> F:
    """The function itself, which can say what is wrong with a call that Python would refuse in words of its own.

    Its signature does not show the ``*extra`` and ``**unknown`` that it takes to hand them to `refuse_call`, but the
    `options` that it takes by name. What it must be given is `absent` where a call leaves it out, for the function to
    look at.
    """
    signature = inspect.signature(function)
    hidden = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    own = [it for it in signature.parameters.values() if it.kind not in hidden]
    of_options = sorted(options, key=lambda it: it.default is not inspect.Parameter.empty)
    needed = sum(it.default is inspect.Parameter.empty for it in options)
    leading = sum(it.kind is not inspect.Parameter.KEYWORD_ONLY for it in own)
    shown = [*own[:leading], *of_options[:needed], *own[leading:], *of_options[needed:]]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]  # `inspect` looks for it
    without = [it for it in own if it.default is inspect.Parameter.empty]
    by_place = sum(it.kind is not inspect.Parameter.KEYWORD_ONLY for it in without)
    function.__defaults__ = (absent,) * by_place + (function.__defaults__ or ())
    function.__kwdefaults__ = {**{it.name: absent for it in without[by_place:]}, **(function.__kwdefaults__ or {})}
    return function


def refuse_call(
    function: Callable[..., Any], extra: Sequence[object], options: Mapping[str, object], **needed: object
) -> NoReturn:
    """TypeError for a call of a function that `refuses_calls`: with more arguments than it takes by position, with
    `options` that it does not have, or without those that it needs, which are None.
    """
    parameters = [it for it in inspect.signature(function).parameters.values() if it.name != "self"]
    call = function.__qualname__.removesuffix(".__init__")
    told = f"{call}()"
    named = [it.name for it in parameters if it.kind is inspect.Parameter.KEYWORD_ONLY]
    names = [it.name for it in parameters]
    if unknown := [it for it in options if it not in names]:
        found = {name: hint for name in unknown if (hint := _meant_by(name, call, names))}
        name = next(iter(found or unknown))
        near = difflib.get_close_matches(name, names, n=1)
        hint = found.get(name) or "it takes " + ", ".join(near or named or names)
        raise TypeError(f"{told} got an unexpected keyword argument {name!r}; {hint}")
    if extra:
        count = len(parameters) - len(named)
        got = f"{count + len(extra)} arguments by position, the first of them too many {_short(extra[0])}"
        hint = f"options have names, as {_keyword_for(extra[0], named)}=" if named else "leave it out"
        raise TypeError(f"{told} takes {count} by position; got {got}; {hint}")
    missing = [name for name, value in needed.items() if value is None]
    raise TypeError(
        f"{told} needs {', '.join(needed)}; got None or nothing for {', '.join(missing)}; give each by its name"
    )


def _meant_by(name: str, call: str, names: Sequence[str]) -> str:
    """The option that a call has in place of a name that it does not have; empty where that is not known."""
    ours = _OF_CALLS.get(call, {}).get(name) or OUR_NAMES.get(name, "")
    option = ours.partition(",")[0].partition(";")[0].partition("=")[0].partition(":")[0].partition(" ")[0]
    if option == "nothing" or option in names:
        return f"here it is {ours}"
    return _ELSEWHERE.get(name, "")


def _short(value: object) -> str:
    """A value in an error: a plain one as it is, of others the type."""
    return repr(value) if isinstance(value, (bool, int, float, str, tuple)) else f"a {type(value).__name__}"


def _keyword_for(value: object, named: Sequence[str]) -> str:
    """The option that a value without a name was probably meant for."""
    if named[0] != "causal":
        return named[0]  # the first that it needs
    kinds: dict[type, str] = {float: "scale", tuple: "window", list: "window", str: "backend", torch.Tensor: "bias"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "causal")
