"""Which tensors a kernel can walk with extents, strides and offsets of 32 bits. Pure Python."""

from __future__ import annotations

from multiattn import abi
from multiattn.problem import Problem


def exceeds_32bit(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the last element, or a step along some dimension, is 2^31 or more elements away from the first.

    A step counts where nobody takes it, too: the stride of a dimension of one element is an argument like any other.
    """
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return max(last, *strides) > abi.INT32_MAX


def needs_64bit(problem: Problem) -> bool:
    """Whether some tensor of a forward `exceeds_32bit`."""
    queries = problem.batch, problem.heads_q, problem.seq_q, problem.head_dim
    keys = problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim
    return (
        exceeds_32bit(queries, (*problem.strides_q, 1))
        or exceeds_32bit(keys, (*problem.strides_k, 1))
        or exceeds_32bit(keys, (*problem.strides_v, 1))
        or exceeds_32bit(queries, (*problem.strides_out, 1))
    )
