"""The only validation of a call's arguments: TypeError or ValueError, naming what came and what is accepted."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch

from multiattn.layout import DTYPE_NAMES, Shape

LOG2_E = math.log2(math.e)

SCALE_MAX = 3.4028234663852886e38 / LOG2_E
"""The largest whose product with `LOG2_E`, which kernels take, fp32 can hold."""

LSE_DTYPES = (torch.float32, torch.float64)
"""Dtypes of a log-sum-exp: kernels give the first, and `multiattn.reference` may compute in the second."""

F = TypeVar("F", bound=Callable[..., Any])

OUR_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "is_causal": "causal; it is aligned at the bottom right",
        "attn_mask": "bias, which is added to scores, or block_mask",
        "attn_bias": "bias",
        "dropout_p": "nothing: there is no dropout",
        "dropout": "nothing: there is no dropout",
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


def hides_unknown(function: F) -> F:
    """The function itself, whose signature does not show the ``**unknown`` that it takes to refuse."""
    signature = inspect.signature(function)
    shown = [it for it in signature.parameters.values() if it.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]  # `inspect` looks for it
    return function


def refuse_unknown(function: str, unknown: Mapping[str, object]) -> NoReturn:
    """TypeError for options that a function does not have, with the names that they have here."""
    name = next((it for it in unknown if it in OUR_NAMES), next(iter(unknown)))
    hint = f"; here it is {OUR_NAMES[name]}" if name in OUR_NAMES else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, *, strides: bool = True
) -> None:
    """TypeError or ValueError for tensors that are wrong for every backend; fake tensors are fine.

    Without `strides` those are not asked: a tensor that `torch.vmap` maps may be laid out anew before it runs.
    """
    _check_tensors(q, k, v)
    check_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    if strides:
        _check_strides(q, k, v)
    if sinks is not None:
        check_sinks(sinks, q)


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        check_operand(name, tensor)
    _check_share("q, k and v", tensors)
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"device: got {q.device}; allowed cpu, cuda and meta")


def check_operand(name: str, tensor: object) -> torch.Tensor:
    """The tensor; TypeError or ValueError for what is no q, keys or values: not dense, negated, of another dtype."""
    _check_dense(name, tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.is_neg():
        raise ValueError(f"{name} must hold its own values; got a negated view; call .resolve_neg() on it")
    _check_dtype(name, tensor, DTYPE_NAMES)
    return tensor


def _check_dense(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense strided tensor; got {got}")


def _check_dtype(name: str, tensor: torch.Tensor, allowed: Iterable[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        raise TypeError(f"{name}.dtype: got {tensor.dtype}; allowed {', '.join(map(str, allowed))}")


def _check_share(names: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """TypeError or ValueError for tensors that have not all one dtype and one device."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"{names} must share one dtype; got {_list(dtypes)}")
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{names} must be on one device; got {_list(devices)}")


def check_shapes(q: Shape, k: Shape, v: Shape) -> None:
    """ValueError for shapes that are no q, k and v of one call."""
    shapes = _list({"q": q, "k": k, "v": v})
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            raise ValueError(f"{name} must have rank 4, [B, H, S, D]; got rank {len(shape)} ({shapes})")
        if min(shape) < 0:
            raise ValueError(f"sizes must not be negative; got {shapes}")
    batch, heads_q, _, head_dim = q
    if k != v:
        raise ValueError(f"k and v must have one shape, [B, Hkv, Skv, D]; got {shapes}")
    if k[0] != batch:
        raise ValueError(f"q, k and v must share the batch size; got {shapes}")
    if k[3] != head_dim:
        raise ValueError(f"q, k and v must share head_dim; got {shapes}")
    heads_kv = k[1]
    if head_dim < 1 or heads_q < 1 or heads_kv < 1:
        raise ValueError(f"heads and head_dim must be at least 1; got {shapes}")
    if heads_q % heads_kv:
        raise ValueError(
            f"query heads must be a multiple of key/value heads (GQA); got Hq={heads_q}, Hkv={heads_kv} ({shapes})"
        )


def _check_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[3] > 1 and tensor.stride(3) != 1:
            raise ValueError(
                f"{name} must have unit stride on D; got strides {tuple(tensor.stride())} for shape "
                f"{tuple(tensor.shape)}; call .contiguous() on it"
            )


def check_sinks(sinks: torch.Tensor, q: torch.Tensor) -> None:
    """TypeError or ValueError for what is no sink for each head, the second dimension of q."""
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks must be a torch.Tensor or None; got {type(sinks).__name__}")
    if not sinks.is_floating_point() or sinks.layout != torch.strided:
        raise TypeError(f"sinks must be a dense floating-point tensor; got {sinks.dtype}, layout {sinks.layout}")
    if sinks.shape != q.shape[1:2]:
        allowed = f"[{q.shape[1]}], one for each head of q"
        raise ValueError(f"sinks: got shape {list(sinks.shape)}; allowed {allowed}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on the device of q, {q.device}; got {sinks.device}")


def check_modification(
    q: torch.Tensor,
    lengths: tuple[int, int, int],
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    score_mod: object,
) -> None:
    """TypeError or ValueError for what modifies no scores of these lengths: (B, Sq, Skv)."""
    if softcap is not None:
        cap = as_float(softcap, "softcap")
        if not 0.0 < cap < math.inf:
            raise ValueError(f"softcap: got {cap}; allowed positive and finite numbers, or None")
    (batch, seq_q, seq_kv), heads = lengths, q.shape[1]
    if alibi_slopes is not None:
        _check_captured("alibi_slopes", alibi_slopes, q, (torch.float32,))
        if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
            got, allowed = tuple(alibi_slopes.shape), f"({heads},) and ({batch}, {heads})"
            raise ValueError(f"alibi_slopes: got shape {got}; allowed {allowed}")
    if bias is not None:
        _check_captured("bias", bias, q, (q.dtype, torch.float32))
        sizes = (batch, heads, seq_q, seq_kv)
        if bias.ndim != 4 or any(it not in (1, size) for it, size in zip(bias.shape, sizes, strict=True)):
            allowed = f"[B|1, Hq|1, Sq|1, Skv|1] with {sizes}"
            raise ValueError(f"bias: got shape {tuple(bias.shape)}; allowed {allowed}")
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be callable or None; got {type(score_mod).__name__}")


def _check_captured(name: str, tensor: object, q: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None; got {type(tensor).__name__}")
    if tensor.dtype not in dtypes or tensor.layout != torch.strided:
        allowed = " or ".join(map(str, dict.fromkeys(dtypes)))
        raise TypeError(f"{name}: got {tensor.dtype}, layout {tensor.layout}; allowed dense {allowed}")
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}; got {tensor.device}")


def check_parts(outs: Mapping[str, torch.Tensor], lses: Mapping[str, torch.Tensor]) -> None:
    """TypeError or ValueError for outs and lses, by their names, that are not parts of one attention."""
    if not outs or len(outs) != len(lses):
        got = f"{len(outs)} outs and {len(lses)} lses"
        raise ValueError(f"outs and lses: got {got}; allowed as many of each, at least one")
    for tensors, dtypes in ((outs, DTYPE_NAMES), (lses, LSE_DTYPES)):
        for name, tensor in tensors.items():
            _check_dense(name, tensor)
            _check_dtype(name, tensor, dtypes)
        _check_share(" and ".join(tensors), tensors)
    (first, out), lse = next(iter(outs.items())), next(iter(lses.values()))
    if out.ndim not in (3, 4):
        raise ValueError(
            f"{first}: got shape {list(out.shape)}; allowed [B, Hq, Sq, D], or [T, Hq, D] in packed batches"
        )
    for name, tensor in outs.items():
        if tensor.shape != out.shape:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}; allowed {list(out.shape)}, that of {first}")
    of_rows = list(out.shape[:3]) if out.ndim == 4 else [out.shape[1], out.shape[0]]
    layout = "[B, Hq, Sq]" if out.ndim == 4 else "[Hq, T]"
    for name, tensor in lses.items():
        if list(tensor.shape) != of_rows:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}; allowed {of_rows}, {layout}")
    if lse.device != out.device:
        raise ValueError(f"lse must be on the device of out, {out.device}; got {lse.device}")


def check_scale(scale: float | None, head_dim: int) -> float:
    """The scale as a float, None its default; TypeError or ValueError for what fp32 has no finite number for."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    number = as_float(scale)
    if not abs(number) <= SCALE_MAX:
        raise ValueError(f"scale must be finite, up to {SCALE_MAX:.4g} (zero and negative are fine); got {number}")
    return number


def as_float(scale: Any, name: str = "scale") -> float:
    """A number as a float, infinite beyond every float; TypeError for what is none. A traced one stays what it is."""
    if isinstance(scale, (torch.SymFloat, torch.SymInt)) or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return scale  # type: ignore[no-any-return]  # stands for a float until the graph runs
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"{name} must be a float or None; got {type(scale).__name__}")
    try:
        return float(scale)
    except OverflowError:  # an int or a fraction beyond every float
        return math.inf


def _list(named: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in named.items())
