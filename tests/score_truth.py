"""The truth for modified scores: the user's own callable under `torch.vmap`, as FlexAttention's eager mode has it."""

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

from multiattn.score import bind_score
from parity.callables import Sizes

CPU = torch.device("cpu")
SIZES = Sizes(batch=2, heads=2, seq_q=20, seq_kv=28, device=CPU)
"""No multiple of a tile."""


def indices(sizes):
    shape = (sizes.batch, sizes.heads, sizes.seq_q, sizes.seq_kv)
    return shape, [torch.arange(size, dtype=torch.int32) for size in shape]


def true_scores(score_mod, scores, sizes):
    _, places = indices(sizes)
    with TransformGetItemToIndex():
        return _vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *places)


def true_mask(mask_mod, sizes):
    shape, places = indices(sizes)
    with TransformGetItemToIndex():
        return _vmap_for_bhqkv(mask_mod, prefix=())(*places).expand(shape)


def scores_of(sizes, dtype=torch.float64):
    shape, _ = indices(sizes)
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=dtype)


def bound(case, sizes=SIZES):
    """The callables of a case, and their program with its tensors."""
    made = case.make(sizes)
    return made, bind_score(device=sizes.device, **made)


def element_of(field, tensor):
    """The value of an argument of a kernel for this tensor; for a pointer the tensor."""
    if field.kind == "pointer":
        return tensor
    return tensor.stride(field.axis) if field.kind == "stride" else tensor.shape[field.axis]


def values(lowered, found, scale):
    """The value of each argument that a kernel takes for a program; for a pointer the tensor."""
    derived = iter(lowered.derived_values(found.scalars, scale))
    return tuple(next(derived) if it.kind == "f32" else element_of(it, found.tensors[it.slot]) for it in lowered.fields)


def gradients(result, inputs, upstream):
    """The gradient of each input, zero where the result does not depend on it."""
    grads = torch.autograd.grad(result, inputs, upstream, allow_unused=True)
    return [torch.zeros_like(it) if grad is None else grad for it, grad in zip(inputs, grads, strict=True)]


def tolerance(gradient):
    """How close a gradient can be that PyTorch adds up over all scores in its own dtype."""
    rtol, atol = {2: (1e-2, 1e-2), 4: (1e-4, 1e-3), 8: (1e-7, 1e-7)}[gradient.dtype.itemsize]
    return {"rtol": rtol, "atol": atol}
