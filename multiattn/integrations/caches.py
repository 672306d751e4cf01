"""New keys and values put into caches by PyTorch's indexing, whose shapes depend on no length."""

from __future__ import annotations

import torch


def put(
    caches: tuple[torch.Tensor, torch.Tensor],
    news: tuple[torch.Tensor, torch.Tensor],
    entry: torch.Tensor,
    row: torch.Tensor,
    is_kept: torch.Tensor | None = None,
) -> None:
    """Write rows of `news` into keys and values ``[entries, rows, Hkv, D]``, in place.

    `entry`, `row` and `is_kept` have the leading dimensions of `news`. With `is_kept` they have one; a row that is not
    kept repeats the first that is, as no row may be written twice with two values. Where none is kept the first row of
    the cache is written as it is. Numbers of 8 bits are moved as bytes, which every device can index.
    """
    if caches[0].dtype.itemsize == 1:
        caches, news = ((it[0].view(torch.uint8), it[1].view(torch.uint8)) for it in (caches, news))
    if is_kept is None:
        for cache, new in zip(caches, news, strict=True):
            cache.index_put_((entry, row), new)
        return
    count = is_kept.shape[0]
    if not count:
        return
    here = torch.where(is_kept, torch.arange(count, device=is_kept.device), is_kept.to(torch.int32).argmax())
    is_any = is_kept.any()
    entry, row = (torch.where(is_any, it[here], 0) for it in (entry, row))
    for cache, new in zip(caches, news, strict=True):
        cache.index_put_((entry, row), torch.where(is_any, new[here], cache[0, 0]))
