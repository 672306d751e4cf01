"""`scaled_dot_product_attention` and `varlen_attn` of PyTorch by this package's kernels.

    import multiattn.integrations.torch
    torch.nn.attention.activate_flash_attention_impl("multiattn")

From then on what PyTorch would give to its FlashAttention, forward and backward, runs here, in eager and in compiled
code, and in all that is built on it: `torch.nn.MultiheadAttention`, transformers' ``sdpa``, diffusers'
``_native_flash``, `torch.distributed.tensor.experimental.context_parallel`. `use` chooses the backend. What this
package refuses (dropout, masks, fp32, a head dim) runs PyTorch's own kernel, and the reason is logged, once, by
`logging`. ``torch.nn.attention.restore_flash_attention_impl()`` undoes all.

PyTorch still decides which calls are FlashAttention's: on GPUs where it prefers cuDNN, or for a call with a mask,
``with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)`` says so, or that it cannot be.
"""

from __future__ import annotations

from torch.nn.attention import register_flash_attention_impl

from multiattn.integrations import flash, sdpa
from multiattn.integrations.overrides import Overrides, use

__all__ = ["NAME", "override", "use"]

NAME = "multiattn"
"""The name for `torch.nn.attention.activate_flash_attention_impl`."""


def override() -> Overrides:
    """Put our kernels before PyTorch's until `remove` of the result; `activate_flash_attention_impl` calls this."""
    return Overrides(sdpa.KERNELS, flash.KERNELS)


register_flash_attention_impl(NAME, register_fn=override)
