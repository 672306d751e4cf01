"""PyTorch's `scaled_dot_product_attention` and `varlen_attn` by this package's kernels.

    import multiattn.integrations.torch
    torch.nn.attention.activate_flash_attention_impl("multiattn")

After these lines, calls that PyTorch would give to its FlashAttention run here, forward and backward, in eager and in
compiled code. So does everything that is built on them: `torch.nn.MultiheadAttention`, transformers' ``sdpa``,
diffusers' ``_native_flash``, `torch.distributed.tensor.experimental.context_parallel`. `use` chooses the backend.

So do calls on a GPU whose v is not as wide as q and k, which PyTorch gives to cuDNN or to its memory-efficient kernel.

Calls that this package refuses (dropout, masks, fp32, a head dim) run PyTorch's own kernel, and `logging` gets the
reason, once. ``torch.nn.attention.restore_flash_attention_impl()`` undoes it all.

PyTorch still decides which calls are FlashAttention's. On GPUs where it prefers cuDNN, and for a call with a mask, put
the call under ``with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)``: it makes that choice, or raises, as
it does for a v of another width.
"""

from __future__ import annotations

from torch.nn.attention import register_flash_attention_impl

from multiattn.integrations import flash, sdpa
from multiattn.integrations.overrides import Overrides, use

__all__ = ["NAME", "override", "use"]

NAME = "multiattn"
"""The name for `torch.nn.attention.activate_flash_attention_impl`."""


def override() -> Overrides:
    """Put our kernels before PyTorch's until `remove` of the result. `activate_flash_attention_impl` calls this."""
    return Overrides(sdpa.KERNELS, flash.KERNELS)


register_flash_attention_impl(NAME, register_fn=override)
