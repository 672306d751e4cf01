"""Checks of results: those of a forward, their gradients, parts of one attention, and tensors to write them to."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from multiattn.layout import DTYPE_NAMES, VECTOR_BYTES, Layout, shape_of_out
from multiattn.validate import check_dense, check_dtype, check_share, not_a_tensor

LSE_DTYPES = (torch.float32, torch.float64)
"""Dtypes of a log-sum-exp: kernels give the first, and `multiattn.reference` may compute in the second."""


def check_parts(outs: Mapping[str, torch.Tensor], lses: Mapping[str, torch.Tensor]) -> None:
    """TypeError or ValueError for outs and lses, by their names, that are not parts of one attention."""
    if not outs or len(outs) != len(lses):
        got = f"{len(outs)} outs and {len(lses)} lses"
        raise ValueError(f"outs and lses: got {got}; allowed as many of each, at least one; call with return_lse=True")
    for tensors, dtypes in ((outs, DTYPE_NAMES), (lses, LSE_DTYPES)):
        for name, tensor in tensors.items():
            check_dense(name, tensor)
            check_dtype(name, tensor, dtypes, "; return_lse=True gives it so" if dtypes is LSE_DTYPES else "")
    (first, out), lse = next(iter(outs.items())), next(iter(lses.values()))
    if out.ndim not in (3, 4):
        raise ValueError(
            f"{first}: got shape {list(out.shape)}; allowed [B, Hq, Sq, Dv], or [T, Hq, Dv] in packed batches"
        )
    for name, tensor in outs.items():
        if tensor.shape != out.shape:
            hint = "parts have the same queries, and other keys; the lse of each comes behind its out"
            raise ValueError(
                f"{name}: got shape {list(tensor.shape)}; allowed {list(out.shape)}, that of {first}; {hint}"
            )
    of_rows = list(out.shape[:3]) if out.ndim == 4 else [out.shape[1], out.shape[0]]
    layout = "[B, Hq, Sq]" if out.ndim == 4 else "[Hq, T]"
    for name, tensor in lses.items():
        if list(tensor.shape) != of_rows:
            allowed = f"{of_rows}, {layout}, as return_lse=True gives it"
            raise ValueError(f"{name}: got shape {list(tensor.shape)}; allowed {allowed}")
    for tensors in (outs, lses):
        check_share(" and ".join(tensors), tensors, "")
    if lse.device != out.device:
        raise ValueError(
            f"lse must be on the device of out, {out.device}; got {lse.device}; move it by .to(out.device)"
        )


def check_out(out: object, q: torch.Tensor, v: torch.Tensor, *, layout: bool = True) -> None:
    """TypeError or ValueError for a tensor that results cannot be written to as it is; without `layout`, copied to."""
    if not isinstance(out, torch.Tensor):
        raise not_a_tensor("out", out, "a torch.Tensor or None")
    shape = shape_of_out(q.shape, v.shape)
    hint = f"{'torch.empty_like(q)' if shape == q.shape else f'q.new_empty({shape})'} makes one"
    if out.shape != shape or out.dtype != q.dtype or out.device != q.device or (layout and out.is_neg()):
        got = f"{tuple(out.shape)}, {out.dtype} on {out.device}"
        allowed = f"{shape}, {q.dtype} on {q.device}"
        raise ValueError(f"out must be like q, as wide as v: got {got}; allowed {allowed}; {hint}")
    if not layout:
        return
    walked = [(stride, size) for size, stride in zip(out.shape, out.stride(), strict=True) if size > 1]
    strides = [stride for size, stride in zip(out.shape[:-1], out.stride(), strict=False) if size > 1]
    extent = 1
    for stride, size in sorted(walked):
        if stride < extent and out.numel():
            got = f"strides {tuple(out.stride())} for shape {tuple(out.shape)}"
            allowed = f"strides by which no two elements have one place; {hint}"
            raise ValueError(f"out: got {got}; allowed {allowed}")
        extent = stride * size
    unit = VECTOR_BYTES // out.element_size()
    is_aligned = not out.data_ptr() % VECTOR_BYTES and not any(stride % unit for stride in strides)
    if out.numel() and not (is_aligned and (out.shape[-1] == 1 or out.stride(-1) == 1)):
        raise ValueError(
            f"out: got strides {tuple(out.stride())}, address {out.data_ptr():#x}; allowed unit stride on D, other "
            f"strides that are multiples of {unit}, an address that is a multiple of {VECTOR_BYTES}; {hint}"
        )


def check_results(q: torch.Tensor, v: torch.Tensor, out: object, lse: object, dout: object, dlse: object) -> None:
    """TypeError or ValueError for tensors that cannot be a forward's results or their gradients; any layout does."""
    like_out = shape_of_out(q.shape, v.shape), q.dtype, q.device
    like_rows = q.shape[:3], torch.float32, q.device
    _check_alike("out", out, *like_out)
    _check_alike("dout", dout, *like_out)
    _check_alike("lse", lse, *like_rows)
    if dlse is not None:
        _check_alike("dlse", dlse, *like_rows)


def _check_alike(name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """TypeError or ValueError for anything but a tensor of this shape, dtype and device."""
    if not isinstance(tensor, torch.Tensor):
        raise not_a_tensor(name, tensor)
    if tensor.is_nested or tensor.layout != torch.strided:
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense strided tensor; got {got}; give what the forward returned")
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name}: got {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; allowed {tuple(shape)}, {dtype} on "
            f"{device}; out and lse come of fmha(..., return_lse=True), gradients are like them"
        )


def check_laid_out(name: str, tensor: torch.Tensor, layout: Layout, device: torch.device) -> None:
    """TypeError or ValueError for a tensor that a launch may not read or write as it is."""
    _check_alike(name, tensor, layout.shape, layout.dtype, device)
    if not is_laid_out(tensor, layout.strides):
        raise ValueError(
            f"{name}: got strides {tuple(tensor.stride())}, address {tensor.data_ptr():#x}; allowed strides "
            f"{layout.strides}, address a multiple of {VECTOR_BYTES}, no negated view"
        )


def is_laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """True if a launch may read or write the tensor as it is; a dimension of size 1 may have any stride."""
    if tensor.data_ptr() % VECTOR_BYTES or tensor.is_neg():
        return tensor.numel() == 0
    if tensor.stride() == strides:
        return True
    walked = (index for index, size in enumerate(tensor.shape) if size > 1)
    return tensor.numel() == 0 or all(tensor.stride(index) == strides[index] for index in walked)
