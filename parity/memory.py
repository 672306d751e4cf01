"""Memory that is NaN wherever nobody has put anything, and views in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parity.case import Memory

POISON = 0x7FC5
"""A 16-bit pattern that is NaN as fp16 and as bf16, and twice in a row as fp32."""

POISON_8 = 0x7F
"""An 8-bit pattern that is NaN as float8_e4m3fn, and the largest number as int8, which has no NaN."""

GUARD = 1 << 15
"""Poisoned elements before and after each tensor: a whole tile of rows; a multiple of any alignment."""

STRAY_STRIDE = 12345
"""An odd stride for dimensions that nobody walks."""

DRAWN_ON_CPU = 1 << 26
"""Elements up to which values are drawn on the CPU, so that a case's values are the same on every device."""

Values3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def synchronize(device: torch.device) -> None:
    """Wait for what was launched on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def poisoned(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``GUARD + numel + GUARD`` elements of NaN, each 16 bits of them POISON; one more if bytes are an odd number.

    Each byte of 8-bit numbers is `POISON_8`, and each bool True.
    """
    is_byte = dtype.itemsize == 1
    memory = torch.empty(GUARD + numel + numel % 2 * is_byte + GUARD, dtype=dtype, device=device)
    if is_byte:
        memory.view(torch.uint8).fill_(1 if dtype == torch.bool else POISON_8)
    else:
        memory.view(torch.int16).fill_(POISON)
    return memory


def poisoned_view(
    dtype: torch.dtype, layout: Memory, shape: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory and the view of `shape` in it that a layout asks for."""
    batch, heads, seq, head_dim = shape
    if layout.order == "bhsd":
        row = head_dim + layout.row_pad
        strides = [heads * seq * row, seq * row, row, 1]
    else:
        token = heads * head_dim + layout.row_pad
        strides = [seq * token, head_dim, token, 1]
    numel = layout.offset + batch * strides[0]
    if layout.stray_strides:
        strides = [stride if size > 1 else STRAY_STRIDE for stride, size in zip(strides, shape, strict=True)]
    memory = poisoned(numel, dtype, device)
    return memory, memory.as_strided(shape, strides, GUARD + layout.offset)


def generator_of(seed: int, numel: int, device: torch.device) -> torch.Generator:
    """On the CPU where that takes no time, so that a case's values are the same on every device."""
    return torch.Generator(device="cpu" if numel <= DRAWN_ON_CPU else device).manual_seed(seed)
