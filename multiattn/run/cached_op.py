"""``torch.ops.multiattn.fmha_kvcache``: attention over caches as PyTorch's tracers see it. It has no gradient.

Plain eager calls go around it, to the same launchers (`run.autograd`). Under `torch.compile` a caller's ``out`` gets a
copy of its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from multiattn.layout import strides_like
from multiattn.operands import Indices, Operands, Options
from multiattn.packed import packed_strides
from multiattn.paged import Cache, check_cache, check_values
from multiattn.run.calls import get_forward
from multiattn.run.execute import run_forward
from multiattn.run.ops import KEEP_STRIDES, map_each, with_indices
from multiattn.run.values import are_read

_Pair = tuple[torch.Tensor, torch.Tensor]
_NONE = -1
"""In the place of a number that is None."""


@torch.library.custom_op(
    "multiattn::fmha_kvcache",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor[] captured, Tensor[] indices, SymInt[] cache, "
        "Tensor? sinks=None, SymInt? left=None, SymInt? right=None, float? scale=None, str? score=None, "
        'float[]? scalars=None, str backend="auto", str? variant=None, bool deterministic=False) '
        "-> (Tensor out, Tensor lse)"
    ),
    **KEEP_STRIDES,
)
def kvcache_op(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    captured: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    cache: Sequence[int],
    sinks: torch.Tensor | None = None,
    left: int | None = None,
    right: int | None = None,
    scale: float | None = None,
    score: str | None = None,
    scalars: Sequence[float] | None = None,
    backend: str = "auto",
    variant: str | None = None,
    deterministic: bool = False,
) -> _Pair:
    """Out and lse of `multiattn.fmha_kvcache`; packed queries are ``[1, Hq, T, D]`` here.

    `captured` has the tensors of the score, `indices` cu_seqlens_q, seqlens_kv and page_table as far as there are any;
    `cache` says which: whether there are pages, max_seqlen_q and num_splits, -1 for None.
    """
    spec = _cache(cache)
    operands = Operands(q, k_cache, v_cache, sinks=sinks, captured=tuple(captured))
    rows, where = _check(operands, indices, spec)
    operands = operands._replace(indices=where)
    if are_read(q.device):
        assert where.seqlens_kv is not None
        check_values(rows, k_cache, where.seqlens_kv, where.page_table, where.cu_seqlens_q, spec.max_q, left)
    options = Options(
        left,
        right,
        scale,
        sinks is not None,
        score,
        tuple(scalars or ()),
        cache=spec,
        backend=backend,
        variant=variant,
        deterministic=deterministic,
    )
    return run_forward(get_forward(operands, options), operands)


@kvcache_op.register_fake
def _fake(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    captured: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    cache: Sequence[int],
    sinks: torch.Tensor | None = None,
    *rest: object,
    **more: object,
) -> _Pair:
    spec = _cache(cache)
    _check(Operands(q, k_cache, v_cache, sinks=sinks), indices, spec)
    strides = strides_like(q) if spec.max_q is None else (*packed_strides(q.shape[1], q.shape[3]), 1)
    return q.new_empty_strided(q.shape, strides), q.new_empty(q.shape[:3], dtype=torch.float32)


@kvcache_op.register_vmap
def _map(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[_Pair, tuple[int, int]]:
    """The rule for `torch.vmap`: each entry is a call by itself, as its cache is."""
    out, lse = map_each(kvcache_op, info, in_dims, arguments)
    return (out, lse), (0, 0)


def _check(operands: Operands, indices: Sequence[torch.Tensor], cache: Cache) -> tuple[torch.Tensor, Indices]:
    """The checks of a call, whose tensors may be fake. Its rows of q, and what says where they and keys are."""
    where = with_indices(operands, Options(cache=cache), indices).indices
    rows = operands.q if where.cu_seqlens_q is None else operands.q[0].transpose(0, 1)
    its = where.seqlens_kv, where.page_table, where.cu_seqlens_q
    check_cache(rows, operands.k, operands.v, *its, operands.sinks)
    return rows, where


def _cache(numbers: Sequence[int]) -> Cache:
    is_paged, max_q, splits = (None if it == _NONE else it for it in numbers)
    return Cache(bool(is_paged), max_q, splits)


def call_kvcache_op(operands: Operands, options: Options) -> _Pair:
    """`kvcache_op` of the inputs among `operands`."""
    cache = options.cache
    assert cache is not None
    numbers = [int(cache.is_paged), *(_NONE if it is None else it for it in (cache.max_q, cache.splits))]
    out, lse = kvcache_op(
        *operands.qkv,
        list(operands.captured),
        list(operands.indices.given),
        numbers,
        operands.sinks,
        options.left,
        options.right,
        options.scale,
        options.score,
        options.scalars or None,
        options.backend,
        options.variant,
        options.deterministic,
    )
    return out, lse
