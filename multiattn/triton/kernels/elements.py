"""A tile of single elements, for generated functions of scores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_in_place(pointers):
    """The elements at `pointers`, each by the thread that has its score.

    After tl.load all that is computed of scores moves to the threads that Triton chose for the load: through shared
    memory and back.
    """
    if pointers.dtype.element_ty.primitive_bitwidth == 16:
        elements = tl.inline_asm_elementwise(
            "ld.global.nc.b16 $0, [$1];", "=h,l", [pointers], dtype=pointers.dtype.element_ty, is_pure=True, pack=1
        )
    elif pointers.dtype.element_ty.primitive_bitwidth == 32:
        elements = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [pointers], dtype=pointers.dtype.element_ty, is_pure=True, pack=1
        )
    elif pointers.dtype.element_ty.primitive_bitwidth == 64:
        elements = tl.inline_asm_elementwise(
            "ld.global.nc.b64 $0, [$1];", "=l,l", [pointers], dtype=pointers.dtype.element_ty, is_pure=True, pack=1
        )
    else:
        elements = tl.load(pointers)
    return elements
