"""Advice for callers whose problem a kernel refuses: the hint of a `Reason`, made from the problem's own numbers."""

from __future__ import annotations

import math

from multiattn.layout import DTYPES
from multiattn.plan.arch import ARCHS, Arch
from multiattn.problem import Problem

OTHERS = "leave variant out, or name a backend that `multiattn explain` says can run it"
"""The advice where only some variants have code for a feature."""

CONFIG = "leave config to the variant's rules"
"""The advice on a config that a caller gave, and no kernel of the variant has."""

DTYPE = "convert q, k and v, as by .bfloat16(), or call under torch.autocast"

LENGTH = "attend to parts of the keys and combine them by multiattn.merge"
"""The advice on lengths beyond what a kernel counts."""

STRIDES = "call .contiguous() on the tensor, or leave variant out"
"""The advice on strides that a kernel cannot walk: broadcast dimensions, or huge ones."""


def for_arch(arch: Arch) -> str:
    """Advice on an arch that a variant has no code for."""
    if arch.name in ARCHS:
        return OTHERS
    return 'no kernel here is made for this GPU; backend="reference" runs on it, as torch\'s own attention does'


def for_head_dim(problem: Problem, multiple: int, most: int) -> str:
    """Advice on a head_dim: zeros behind it change no score if the scale stays what it is."""
    dim, dim_v = problem.head_dim, problem.head_dim_v
    padded, padded_v = (-(-width // multiple) * multiple for width in (dim, dim_v))
    if max(padded, padded_v) > most:
        return 'name a backend that takes wider heads, which `multiattn explain` lists, or backend="reference"'
    is_usual = math.isclose(problem.scale, 1 / math.sqrt(dim))
    scale = f"give scale={f'{dim}**-0.5' if is_usual else repr(problem.scale)}"
    pad, cut = "with zeros to {}={} by torch.nn.functional.pad(x, (0, {}))", f"take out[..., :{dim_v}]"
    if dim == dim_v:
        return f"pad q, k and v {pad.format('D', padded, padded - dim)}, {scale}, and {cut}"
    of_qk = f"pad q and k {pad.format('D', padded, padded - dim)}, {scale}" if padded > dim else ""
    of_v = f"pad v {pad.format('Dv', padded_v, padded_v - dim_v)}, {cut}" if padded_v > dim_v else ""
    return "; ".join(filter(None, (of_qk, of_v)))


def for_alignment(problem: Problem, multiple: int) -> str:
    """Advice on addresses and strides: a copy has good ones, unless the rows themselves are too short."""
    row = math.gcd(problem.head_dim, problem.head_dim_v) * DTYPES[problem.dtype].itemsize
    if row % multiple:
        return (
            f"pad head_dim to a multiple of {multiple // DTYPES[problem.dtype].itemsize} elements, or leave variant out"
        )
    return "copy the tensors by .clone(memory_format=torch.contiguous_format), or leave variant out"


def for_blocks(step: int) -> str:
    """Advice on a block mask's blocks, of which a kernel wants multiples of `step`; 0: it has no code for any."""
    return f"create_block_mask(..., BLOCK_SIZE={max(128, step)})" if step else OTHERS
