"""The tensors of a case with a cache: keys and values among NaN, and where they are.

Rows of pages beyond a sequence's end, pages that no sequence has, and what a cache has room for beyond a sequence's
length are NaN, and so are their scales; int8, which has no NaN, is 127 there. Entries of the page table beyond a
sequence's pages name none that exists. So whatever a kernel reads that is not a sequence's own shows.
"""

from __future__ import annotations

import itertools

import torch

from multiattn.layout import STORED
from multiattn.sequences import Batching, Scaling
from multiattn.validate.scales import scales_of
from parity.case import CacheCase, Case, Scales
from parity.memory import GUARD, Values3, generator_of, poisoned, poisoned_view
from parity.tolerance import Cached

NO_PAGE = 1 << 30
"""In a page table: an entry that must not be read, as no cache has so many pages."""

TABLE_PAD = 3
"""Unused entries after each row of a page table."""

UNIT = 2.0**-5
"""The step of normal numbers that 8 bits store."""


def draw_cache(case: Case, cache: CacheCase, device: torch.device) -> tuple[tuple[torch.Tensor, ...], Values3, Cached]:
    """The memory of all tensors; q, k and v; and what says where keys and queries are."""
    table = None if cache.page is None else _page_table(case, cache)
    places = _keys_of_rows(case, cache, table).to(device)[:, None, :, None]
    used = places >= 0
    entries, _, rows, _ = used.shape
    memory_of_q, q = poisoned_view(
        case.torch_dtype, case.layout, (case.batch, case.heads_q, case.seq_q, case.head_dim), device
    )
    memory_of_caches, k, v = _caches(case, cache, (entries, case.heads_kv, rows), device)
    generator = generator_of(case.seed, max(q.numel(), k.numel(), v.numel()), device)
    drawn = [torch.randn(it.shape, generator=generator, device=generator.device).to(device) for it in (q, k, v)]
    q.copy_(drawn[0])
    if case.values in ("ascending", "descending"):  # as `parity.tensors` has it: 8 a key, after the scale
        middle = case.seq_kv // 2
        q[..., 0] = 64.0
        drawn[1].zero_()[..., 0] = (places - middle if case.values == "ascending" else middle - places)[..., 0]
    for view, numbers_of in ((k, drawn[1]), (v, drawn[2])):
        view.copy_(_stored(numbers_of, cache).masked_fill(~used, torch.nan if view.dtype != torch.int8 else 127))
    numbers = [torch.tensor(cache.lengths)]
    numbers += [] if table is None else [table]
    if cache.queries is not None:
        starts = torch.tensor([0, *itertools.accumulate(cache.queries)])
        q[:, :, int(starts[-1]) :] = torch.nan
        numbers.append(starts)
    memory_of_numbers, tensors = zip(*(_numbers(it, device) for it in numbers), strict=True)
    most = None if cache.queries is None else case.most_queries + cache.room
    batching = Batching("cache" if table is None else "pages", most, splits=cache.splits)
    if cache.stored is not None:
        seeds = case.seed + 5, case.seed + 6
        asked = zip(seeds, cache.scales, (k, v), strict=True)
        scales = [_scales(case, seed, granularity, view, used[..., 0]) for seed, granularity, view in asked]
        memory_of_numbers += tuple(memory for memory, _ in scales)
        given = zip(("k_scale", "v_scale"), (it for _, it in scales), (k, v), strict=True)
        tensors += tuple(scales_of(name, it, view, tensors[0]) for name, it, view in given)
        of_k, of_v = (Scaling(it == "token") for it in cache.scales)
        batching = batching._replace(k_scaling=of_k, v_scaling=of_v)
    return (memory_of_q, *memory_of_caches, *memory_of_numbers), (q, k, v), Cached(tensors, batching)


def _stored(drawn: torch.Tensor, cache: CacheCase) -> torch.Tensor:
    """Normal numbers in units of what 8 bits store; as they are where a cache has the dtype of q."""
    if cache.stored is None:
        return drawn
    return (drawn / UNIT).round().clamp(-127, 127) if cache.stored == "int8" else (drawn / UNIT).clamp(-448, 448)


def _scales(
    case: Case, seed: int, granularity: Scales, cache: torch.Tensor, used: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory, and scales of half to twice the `UNIT` in it, as a caller gives them."""
    assert case.cache is not None
    entries, heads, rows, _ = cache.shape
    shapes = {"number": (), "head": (heads,), "batch": (len(case.pairs), heads), "token": (entries, rows, heads)}
    shape = torch.Size(shapes[granularity])
    memory = poisoned(shape.numel(), torch.float32, cache.device)
    view = memory[GUARD:-GUARD].view(shape)
    if granularity == "token":
        is_nhd = case.cache.order == "nhd"
        view = view.transpose(1, 2) if is_nhd else view.view(entries, heads, rows)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(tuple(view.shape), generator=generator).to(cache.device).mul(2).sub(1).exp2() * UNIT
    view.copy_(drawn.masked_fill(~used, torch.nan) if granularity == "token" else drawn)
    return memory, view


def _page_table(case: Case, cache: CacheCase) -> torch.Tensor:
    """The pages of each sequence ``[B, max_pages]``, in no order."""
    page = cache.page
    assert page is not None
    if case.seq_kv % page:
        raise ValueError(f"{case.name}: seq_kv must be whole pages of {page}; got {case.seq_kv}")
    needed = [-(-length // page) for length in cache.lengths]
    if cache.shared and cache.shared > min(needed[:2]):
        raise ValueError(f"{case.name}: shared must be pages of both sequences; got {cache.shared} of {needed[:2]}")
    pages = sum(needed) - cache.shared + cache.slack
    order = iter(torch.randperm(pages, generator=torch.Generator().manual_seed(case.seed + 4)).tolist())
    table = torch.full((len(needed), case.seq_kv // page), NO_PAGE)
    for entry, (number, keys) in enumerate(zip(needed, cache.owned(case), strict=True)):
        shared = cache.shared if entry == 1 else 0
        table[entry, :shared] = table[0, :shared]
        table[entry, shared:number] = torch.tensor([*itertools.islice(order, number - shared)], dtype=table.dtype)
        table[entry, : keys.start // page] = NO_PAGE if entry % 2 else -1
    return table


def _keys_of_rows(case: Case, cache: CacheCase, table: torch.Tensor | None) -> torch.Tensor:
    """The key of its sequence that each row of an entry, or of a page, is; -1 where it is none."""
    page, pages = cache.page or case.seq_kv, len(cache.lengths)
    if table is None:
        table = torch.arange(pages)[:, None]
    else:
        pages = sum(-(-length // page) for length in cache.lengths) - cache.shared + cache.slack
    found = torch.full((pages, page), -1)
    for entry, own in enumerate(cache.owned(case)):
        keys = torch.tensor(own, dtype=torch.int64)
        found[table[entry, keys // max(page, 1)], keys % max(page, 1)] = keys
    return found


def _caches(
    case: Case, cache: CacheCase, shape: tuple[int, int, int], device: torch.device
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Poisoned memory, and k and v in it."""
    (entries, heads, rows), width, width_v = shape, case.head_dim, case.width_v
    dtype = case.torch_dtype if cache.stored is None else STORED[cache.stored]

    def views(row: int, *columns: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        """Memory of rows of so many elements, and a view of each of these columns: their first, and how many."""
        row += cache.row_pad
        entry = rows * heads * row
        step = entry * (2 if cache.joint == "entries" else 1)
        strides = (step, row, heads * row, 1) if cache.order == "nhd" else (step, rows * row, row, 1)
        memory = poisoned(cache.offset + entries * step, dtype, device)
        begins = [GUARD + cache.offset + begin for begin, _ in columns]
        if cache.joint == "entries":
            begins[1] += entry
        pairs = zip(columns, begins, strict=True)
        return memory, *(memory.as_strided((*shape, wide), strides, begin) for (_, wide), begin in pairs)

    if cache.joint == "none":
        memory, k = views(width, (0, width))
        other, v = views(width_v, (0, width_v))
        return (memory, other), k, v
    row = width + width_v if cache.joint == "rows" else max(width, width_v)
    memory, k, v = views(row, (0, width), (width if cache.joint == "rows" else 0, width_v))
    return (memory,), k, v


def _numbers(values: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned memory, and int32 values in it; rows of a table are apart."""
    pad = TABLE_PAD if values.ndim > 1 else 0
    shape = (*values.shape[:-1], values.shape[-1] + pad)
    memory = poisoned(torch.Size(shape).numel(), torch.int32, device)
    view = memory[GUARD:-GUARD].view(shape)[..., : values.shape[-1]]
    return memory, view.copy_(values)
