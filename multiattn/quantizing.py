"""`quantize_cache` makes the 8-bit numbers and the scales that `multiattn.fmha_kvcache` reads."""

from __future__ import annotations

from typing import Literal

import torch

from multiattn.layout import STORED, STORED_NAMES
from multiattn.plan.backend import later
from multiattn.validate import not_a_tensor

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""k_cache, v_cache, k_scale and v_scale."""


@torch.no_grad()
def quantize_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    per: Literal["token", "head"] = "token",
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> Quantized:
    """Keys and values as 8-bit numbers with scales: of a whole cache, or of new tokens of one, where `slots` says.

    One kernel writes numbers and scales. The host reads nothing and waits for nothing, so a CUDA graph may have it once
    a first call has compiled it.

    Args:
        k: ``[B, Hkv, n, D]``, or with `slots` also packed, ``[T, Hkv, D]``. fp16, bf16 or fp32, unit stride on D.
        v: Like k, with its own strides and head_dim.
        dtype: torch.float8_e4m3fn or torch.int8; that of k_cache, where it is given.
        per: ``"token"`` makes a scale for each token and head, its largest number / 448, or / 127 for int8: 0 for
            zeros. With ``"head"`` each head has one: the caller's, or for a whole cache one of each batch entry.
        k_cache, v_cache: Caches to write to, of `dtype`, ``[pages, Hkv, page, D]`` or ``[B, Hkv, S, D]``, unit stride
            on D. They go with `slots`. None makes new ones like k and v.
        k_scale, v_scale: fp32. Per token those to write to, ``[pages, Hkv, page]`` or ``[B, Hkv, S]``, any strides. Per
            head those to divide by: one number, ``[Hkv]``, or one of each entry of the cache, ``[B, Hkv]``.
        slots: int32 or int64, one for each token, contiguous, on the device of k: token t goes to row
            ``slots[t] % page`` of page ``slots[t] // page``, as vLLM's slot_mapping has it. A negative one is skipped.
            Values are not checked, and no two may be equal.

    Returns:
        ``(k_cache, v_cache, k_scale, v_scale)``, as `multiattn.fmha_kvcache` takes them.

    Raises:
        TypeError, ValueError: An input is wrong; the message says what came.

    Numbers are rounded to nearest even, and saturate: int8 to 127 either way. Per token, NaN or inf anywhere in a row
    of D makes its scale NaN or inf and its numbers 0, and so the whole row NaN. Per head NaN stays NaN in e4m3 and is 0
    in int8. On CPU tensors it is eager PyTorch, with the same bits.
    """
    named = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
    for name, it in named.items():
        if not isinstance(it, torch.Tensor) and (it is not None or name in ("k", "v")):
            raise not_a_tensor(name, it)
    if k_cache is not None:
        dtype = k_cache.dtype
    whole = slots is None
    if dtype not in STORED_NAMES:
        raise TypeError(f"dtype: got {dtype}; allowed {', '.join(map(str, STORED.values()))}")
    if per not in ("token", "head"):
        raise ValueError(f"per: got {per!r}; allowed 'token' or 'head'")
    if whole != (k_cache is None) or whole != (v_cache is None):
        raise ValueError("k_cache, v_cache, slots: got some of them; allowed all three for new tokens, or none")
    rank = k.ndim
    if rank != v.ndim or k.shape[:-1] != v.shape[:-1] or rank not in ((4,) if whole else (3, 4)):
        allowed = "[B, Hkv, n, D]" + ("" if whole else " or [T, Hkv, D]")
        raise ValueError(f"k, v: got shapes {tuple(k.shape)} and {tuple(v.shape)}; allowed {allowed} of both")
    if rank == 3:
        k, v = (it.transpose(0, 1)[None] for it in (k, v))
    if k_cache is None or v_cache is None:
        k_cache, v_cache = (torch.empty(it.shape, dtype=dtype, device=it.device) for it in (k, v))
    _check({"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}, dtype)
    if slots is not None:
        _check_slots(slots, k)
    if per == "token":
        scales = _to_write(k_cache, k_scale, v_scale, whole=whole)
    else:
        top = 127.0 if dtype == torch.int8 else 448.0
        scales = _to_divide_by({"k_scale": (k, k_cache, k_scale), "v_scale": (v, v_cache, v_scale)}, top, whole=whole)
    tensors = (k, v, k_cache, v_cache)
    if k.is_cpu:
        _eager(tensors, scales, slots, per_token=per == "token")
    else:
        if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(k.device) < (8, 9):
            raise ValueError("dtype: got torch.float8_e4m3fn; allowed torch.int8 on GPUs before sm89")
        later("multiattn.triton.quantize", "run")(tensors, scales, slots, per == "token")
    k_given, v_given = (
        made if given is None else given for made, given in zip(scales, (k_scale, v_scale), strict=True)
    )
    return k_cache, v_cache, k_given, v_given  # one number or [Hkv] of pages stays that: [pages, Hkv] is no scale


def _check(named: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    k = named["k"]
    for name, it in named.items():
        allowed = (dtype,) if name.endswith("_cache") else (torch.float16, torch.bfloat16, torch.float32)
        if it.dtype not in allowed:
            raise TypeError(f"{name}.dtype: got {it.dtype}; allowed {', '.join(map(str, allowed))}")
        if it.device != k.device:
            raise ValueError(f"{name} must be on the device of k, {k.device}; got {it.device}")
        width = named[name[0]].shape[-1]
        if it.ndim != 4 or it.shape[1] != k.shape[1] or it.shape[3] != width:
            raise ValueError(f"{name}: got shape {tuple(it.shape)}; allowed [*, {k.shape[1]}, *, {width}]")
        if it.shape[3] > 1 and it.stride(3) != 1:
            raise ValueError(f"{name}: got stride {it.stride(3)} on D; allowed 1")
    if named["k_cache"].shape[:3] != named["v_cache"].shape[:3]:
        raise ValueError("k_cache and v_cache must have the same entries, heads and rows")


def _check_slots(slots: torch.Tensor, k: torch.Tensor) -> None:
    tokens = k.shape[0] * k.shape[2]
    if slots.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"slots.dtype: got {slots.dtype}; allowed torch.int32 or torch.int64")
    if slots.numel() != tokens or not slots.is_contiguous() or slots.device != k.device:
        got = f"{tuple(slots.shape)} on {slots.device}"
        raise ValueError(f"slots: got {got}; allowed {tokens} contiguous numbers on {k.device}")


def _to_write(
    cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors for scales of tokens: the caller's, or new ones for a whole cache."""
    found = []
    for name, it in (("k_scale", k_scale), ("v_scale", v_scale)):
        if it is None and whole:
            it = torch.empty(cache.shape[:3], dtype=torch.float32, device=cache.device)
        if it is None or it.dtype != torch.float32 or it.shape != cache.shape[:3] or it.device != cache.device:
            got = None if it is None else f"{it.dtype} {tuple(it.shape)} on {it.device}"
            raise ValueError(f"{name}: got {got}; allowed torch.float32 {tuple(cache.shape[:3])} on {cache.device}")
        found.append(it)
    return found[0], found[1]


def _to_divide_by(
    named: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], top: float, *, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of heads, ``[entries, Hkv]``: the caller's, or for a whole cache those of its largest numbers."""
    found = []
    for name, (numbers, cache, it) in named.items():
        heads = tuple(cache.shape[:2])
        if it is None and whole:
            it = _scale(
                numbers.float().abs().amax((2, 3)) if numbers.numel() else numbers.new_zeros(heads).float(), top
            )
        shapes = ((), (1,), heads[1:], heads)
        if it is None or it.dtype != torch.float32 or tuple(it.shape) not in shapes or it.device != cache.device:
            got = None if it is None else f"{it.dtype} {tuple(it.shape)} on {it.device}"
            raise ValueError(f"{name}: got {got}; allowed torch.float32, one number, {heads[1:]} or {heads}")
        found.append(it.expand(heads))
    return found[0], found[1]


def _scale(largest: torch.Tensor, top: float) -> torch.Tensor:
    scale = largest / torch.full_like(largest, top)  # by a number a GPU multiplies with its reciprocal
    return torch.where(scale == 0.0, 1.0, scale)


def _eager(
    tensors: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor | None,
    *,
    per_token: bool,
) -> None:
    k, v, *caches = tensors
    batch, heads, n, _ = k.shape
    rows = caches[0].shape[2]
    tokens = torch.arange(batch * n)
    places = (tokens // max(n, 1) * rows + tokens % max(n, 1)) if slots is None else slots.flatten().long()
    kept = places >= 0
    entries, its_rows = places[kept] // rows, places[kept] % rows
    for x, cache, scale in zip((k, v), caches, scales, strict=True):
        numbers = x.transpose(1, 2).reshape(batch * n, heads, x.shape[3])[kept].float()  # [tokens, Hkv, D]
        top = 127.0 if cache.dtype == torch.int8 else 448.0
        if per_token:
            its = numbers.abs().amax(-1) / top  # [tokens, Hkv]; a 1 of zeros would hide the small scales of others
            scale[entries, :, its_rows] = its
            is_finite = its.isfinite()
            numbers = torch.where(is_finite[..., None], numbers, 0.0)
            divisor = torch.where(is_finite & (its != 0.0), its, 1.0)
        else:
            its = scale[entries]
            divisor = torch.where(its == 0.0, 1.0, its)
        numbers = (numbers / divisor[..., None]).clamp(-top, top)
        if cache.dtype == torch.int8:
            numbers = numbers.round().nan_to_num(0.0)
        else:
            numbers = torch.where(numbers.isnan(), torch.nan, numbers)
        cache[entries, :, its_rows] = numbers.to(cache.dtype)
