"""Where the values of lengths and pages are read, to refuse wrong ones by name.

On a CPU that costs microseconds. On a GPU it waits for the device, so it is done only where ``MULTIATTN_CHECK=1`` asks
for it when the process starts, and not while a CUDA graph is captured.
"""

from __future__ import annotations

import functools
import os

import torch

from multiattn.run import compat

VARIABLE = "MULTIATTN_CHECK"
ALLOWED = ("0", "1")


@functools.cache
def is_asked() -> bool:
    """True where `MULTIATTN_CHECK` asks for checks on a GPU; ValueError for what it does not know."""
    value = os.environ.get(VARIABLE, "0")
    if value not in ALLOWED:
        raise ValueError(f"{VARIABLE}: got {value!r}; allowed 1 to check values on a GPU, too, 0 or unset not to")
    return value == "1"


def are_read(device: torch.device) -> bool:
    """True where the values of real tensors on this device are to be checked."""
    kind = device.type
    return kind == "cpu" or (kind == "cuda" and is_asked() and not torch.cuda.is_current_stream_capturing())


def can_be_read(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """True where the values of tensors on one device are to be checked, and nobody traces or transforms this call.

    Otherwise the op checks them, which gets real tensors.
    """
    if not are_read(first.device):
        return False
    is_plain = all(it is None or type(it) is torch.Tensor for it in (first, *others))
    return is_plain and not (compat.transforms_active() or compat.dispatch_modes() or compat.is_tracing())
