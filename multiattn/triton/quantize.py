"""The launch of the kernel that writes 8-bit numbers to a cache: through Triton's JIT, or interpreted on the CPU."""

from __future__ import annotations

import torch

from multiattn.triton.cpu import interpreter
from multiattn.triton.kernels.quantize import quantize_rows


def run(
    tensors: tuple[torch.Tensor, ...], scales: tuple[torch.Tensor, ...], slots: torch.Tensor | None, per_token: bool
) -> None:
    """Quantise k and v to k_cache and v_cache, all ``[entries, Hkv, rows, D]``; the kernel says more."""
    k, v, k_cache, _v_cache = tensors
    batch, heads_kv, n, _ = k.shape
    if k.numel() + v.numel() == 0:
        return
    strides = [(it.stride(0) if it.shape[0] > 1 else 0, *it.stride()[1:3]) for it in tensors]
    strides += [(*it.stride(), 0)[:3] for it in scales]
    largest = 127.0 if k_cache.dtype == torch.int8 else 448.0
    constants = (k.shape[3], v.shape[3], per_token, largest)
    sizes = (heads_kv, k_cache.shape[2])
    arguments = (*tensors, *scales, slots, n, sizes, tuple(strides), constants)
    grid = batch * n * heads_kv
    if k.is_cpu:
        interpreter.run(quantize_rows, grid, *arguments)
        return
    with interpreter.exclusive_language.as_it_is(), torch.cuda.device(k.device):
        quantize_rows[(grid,)](*arguments, num_warps=1)
