"""Block masks made cheaply: `block_mask` of a callable, `document_mask` of packed sequences, on the device.

Both give FlexAttention's own `BlockMask`, with the lists that its `create_block_mask` makes, and never hold a mask of
every query and key.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from multiattn.block_mask import BLOCK, MaskMod, listed_mask
from multiattn.mask import Window, band_of
from multiattn.plain import plain
from multiattn.score import BoundScore, UntraceableError, bind_score
from multiattn.score.bounds import AXES, Grid, seen_by_bounds
from multiattn.score.eager import evaluate
from multiattn.score.expression import Node, inputs_of, walk
from multiattn.validate import not_a_tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BYTES = 1 << 28
"""Memory of the device for scores that are computed one by one, at a time; a row of one block may take more."""


def block_mask(
    mask_mod: MaskMod,
    batch: int | None,
    heads: int | None,
    seq_q: int,
    seq_kv: int,
    *,
    device: torch.device | str,
    block_size: int | tuple[int, int] = BLOCK,
) -> BlockMask:
    """FlexAttention's `BlockMask` of a callable, as its `create_block_mask` makes it, in little time and memory.

    The callable is traced as a kernel's is, and bounds over blocks decide what they can: comparisons of positions, of
    captured numbers by batch entry, head, query or key, and what logic makes of them. Blocks that bounds leave open are
    computed score by score, `BYTES` of memory at a time. So is every block of a callable that cannot be traced.

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``, of 0-d tensors.
        batch, heads: Batch entries and query heads that have lists of their own; None is 1, for all.
        seq_q, seq_kv: The lengths of queries and keys.
        device: The device of the lists and of captured tensors.
        block_size: Queries and keys of a block, one number or two.

    Returns:
        Lists of partial and of full blocks, forward and transposed. A block that the end of a sequence cuts is partial.

    Raises:
        TypeError, ValueError: An argument is wrong, or a captured tensor is too small for its index.

    On a GPU it waits for the device once, to learn how many blocks bounds leave open. It does not wait for a mask whose
    form tells that there are none: causal, a window, `q_idx` against a limit, padding of both sides. Numbers are those
    of kernels: floats are fp32, and integers of 32 bits wrap around. Inside `torch.compile` it is `create_block_mask`.
    """
    sizes = _sizes(block_size)
    batch, heads = _length("batch", 1 if batch is None else batch), _length("heads", 1 if heads is None else heads)
    shape = batch, heads, _length("seq_q", seq_q, least=0), _length("seq_kv", seq_kv, least=0)
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be callable, (b, h, q_idx, kv_idx) -> bool; got {type(mask_mod).__name__}")
    if is_compiling():
        from torch.nn.attention.flex_attention import create_block_mask  # imports SymPy

        return create_block_mask(mask_mod, *shape, device=device, BLOCK_SIZE=sizes)
    grid = Grid(shape, sizes, torch.empty(0, device=device).device)  # with its number
    with torch.no_grad():
        partial, full = _seen(mask_mod, grid)
    return listed_mask(partial, full, grid.shape, grid.sizes, mask_mod)


def document_mask(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor | None = None,
    *,
    total_q: int,
    total_kv: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    block_size: int | tuple[int, int] = BLOCK,
) -> BlockMask:
    """FlexAttention's `BlockMask` of sequences packed one after another, from lengths that only the device knows.

    Nothing waits for the device, and shapes depend on the totals alone: it may be part of a CUDA graph, which serves
    every batch of at most so many tokens and sequences.

    Args:
        cu_seqlens_q: int32 or int64 ``[N + 1]``, from 0 on: where the queries of each sequence start. A sequence
            without rows repeats its start. Queries from the last number on see nothing.
        cu_seqlens_kv: So for keys; None: each sequence has as many keys as queries.
        total_q, total_kv: Rows of q and of k; None is `total_q`.
        causal, window: As for `multiattn.fmha_varlen`, within each sequence, aligned at the bottom right.
        block_size: Queries and keys of a block, one number or two.

    Returns:
        A mask for q ``[1, Hq, total_q, D]`` and k, v ``[1, Hkv, total_kv, ...]``. Its `mask_mod` reads, for each query,
        the first key that it sees and the one behind the last, which are tensors of the mask.
    """
    sizes = _sizes(block_size)
    starts = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv)
    for name, it in zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=True):
        if not isinstance(it, torch.Tensor):
            raise not_a_tensor(name, it)
        if it.ndim != 1 or it.dtype not in (torch.int32, torch.int64) or it.shape != starts[0].shape or not len(it):
            got, allowed = f"{it.dtype} {list(it.shape)}", "int32 or int64 [N + 1], alike for queries and keys"
            raise ValueError(f"{name}: got {got}; allowed {allowed}")
    rows = _length("total_q", total_q, least=0)
    keys = _length("total_kv", rows if total_kv is None else total_kv, least=0)
    first, end = _keys_seen(starts[0].long(), starts[1].long(), rows, keys, *band_of(causal, window).window)

    def see(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (first[q] <= kv) & (kv < end[q])

    grid = Grid((1, 1, rows, keys), sizes, first.device)
    return listed_mask(*_blocks_of_ranges(first, end, grid), grid.shape, sizes, see)


def _sizes(block_size: object) -> tuple[int, int]:
    given = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(given) != 2:
        raise ValueError(f"block_size: got {block_size}; allowed one number, or a pair: queries and keys of a block")
    queries, keys = (_length("block_size", it) for it in given)
    return queries, keys


def _length(name: str, value: object, *, least: int = 1) -> int:
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int):
        hint = f"{name}.item() is one, and waits for the device" if isinstance(value, torch.Tensor) else "give a number"
        raise TypeError(f"{name} must be an int; got {type(value).__name__}; {hint}")
    if number < least:
        raise ValueError(f"{name}: got {number}; allowed {least} and more")
    return number


# ---------------------------------------------------------------- of a callable


def _seen(mask_mod: MaskMod, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that a mask shows in part, and those that it shows whole: bools ``[B|1, H|1, rows, columns]``."""
    batch, heads, seq_q, seq_kv = grid.shape
    whole = torch.ones((1, 1, *grid.counts), dtype=torch.bool, device=grid.device)
    for dim, (length, size) in enumerate(zip((seq_q, seq_kv), grid.sizes, strict=True), 2):
        whole.narrow(dim, length // size, whole.shape[dim] - length // size).fill_(False)  # the end cuts these
    if 0 in grid.shape:
        return ~whole, whole
    try:
        bound = bind_score(device=grid.device, mask_mod=mask_mod)
    except UntraceableError:
        some, every = _seen_of_rows(mask_mod, grid)
    else:
        if bound is None:  # all is seen
            return ~whole, whole
        bound.check(batch=batch, heads=heads, seq_q=seq_q, seq_kv=seq_kv)
        some, every = _seen_of_program(bound, grid, whole)
    every = every & whole
    return some & ~every, every


def _seen_of_program(bound: BoundScore, grid: Grid, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of which anything is seen, and everything: by bounds, and where these leave it open by each score."""
    root = bound.program.mask
    assert root is not None
    seen = seen_by_bounds(root, bound, grid)
    entries = [size if name in inputs_of(root) else 1 for name, size in zip("bh", grid.shape, strict=False)]
    some, none, every, flaw = (it.expand(*entries, *grid.counts) for it in seen[:4])
    if seen.is_exact:
        return some, every
    unknown = ~((some | none) & (every | flaw | ~whole))
    some, every = some.clone(), every.clone()
    lengths = [min(it) for it in zip(grid.sizes, grid.shape[2:], strict=True)]
    row_bytes = lengths[1] * _bytes_of_score(root)
    rows = min(lengths[0], max(1, BYTES // row_bytes))
    for places in torch.nonzero(unknown.flatten()).flatten().split(max(1, BYTES // (row_bytes * rows))):
        b, h, row, column = _coordinates(places, some.shape)
        ends = torch.zeros_like(places, dtype=torch.bool), torch.ones_like(places, dtype=torch.bool)
        kv = _positions(column, range(lengths[1]), 1, grid)[:, None]
        for first in range(0, lengths[0], rows):
            q = _positions(row, range(first, min(first + rows, lengths[0])), 0, grid)[:, :, None]
            inputs = {"b": b.int()[:, None, None], "h": h.int()[:, None, None], "q": q, "kv": kv}
            visible = evaluate(root, bound, inputs, torch.float32)
            ends = ends[0] | visible.any((1, 2)), ends[1] & visible.all((1, 2))
        for known, of_places in zip((some, every), ends, strict=True):
            known.view(-1)[places] = of_places
    return some, every


def _coordinates(places: torch.Tensor, shape: torch.Size) -> list[torch.Tensor]:
    found = list[torch.Tensor]()
    for size in reversed(shape):
        found.insert(0, places % size)
        places = places // size
    return found


def _positions(blocks: torch.Tensor, inside: range, axis: int, grid: Grid) -> torch.Tensor:
    """Positions ``[blocks, inside]``, int32; the last one of the sequence stands for those beyond the end."""
    positions = blocks[:, None] * grid.sizes[axis] + torch.arange(inside.start, inside.stop, device=blocks.device)
    return positions.clamp(max=grid.shape[2 + axis] - 1).int()


def _bytes_of_score(root: Node) -> int:
    """The memory that a score takes in `evaluate`: a value of each node that depends on queries and on keys."""
    own = {"bool": 1, "i32": 4, "f32": 4, "i64": 8}
    both = [it for it in walk(root) if inputs_of(it).issuperset(AXES)]
    return sum(own[it.dtype] + 24 * (it.op == "load") for it in both)  # three copies of an index, of 64 bits


def _seen_of_rows(mask_mod: MaskMod, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of which anything is seen, and everything, of a callable that PyTorch runs: some rows at a time."""
    from torch.nn.attention.flex_attention import create_mask  # imports SymPy

    (batch, heads, seq_q, seq_kv), (size_q, size_kv) = grid.shape, grid.sizes
    row_bytes = 16 * seq_kv * min(size_q, seq_q)
    is_small = batch * heads * row_bytes <= BYTES
    steps = (batch, heads) if is_small else (1, 1)
    queries = size_q * max(1, BYTES // (row_bytes * steps[0] * steps[1]))
    found = torch.zeros((2, batch, heads, *grid.counts), dtype=torch.bool, device=grid.device)
    for first in itertools.product(range(0, batch, steps[0]), range(0, heads, steps[1]), range(0, seq_q, queries)):
        b0, h0, q0 = first
        rows = min(queries, seq_q - q0)

        def moved(b: Any, h: Any, q: Any, kv: Any, first: tuple[int, int, int] = first) -> torch.Tensor:
            return mask_mod(b + first[0], h + first[1], q + first[2], kv)

        visible = create_mask(moved, *steps, rows, seq_kv, device=grid.device)
        for place, (reduce, beyond) in enumerate(((torch.amax, False), (torch.amin, True))):
            cut = (0, -seq_kv % size_kv, 0, -rows % size_q)
            blocks = torch.nn.functional.pad(visible, cut, value=beyond).unflatten(3, (-1, size_kv))
            of_rows = reduce(blocks.unflatten(2, (-1, size_q)), (3, 5))
            found[place, b0 : b0 + steps[0], h0 : h0 + steps[1], q0 // size_q :][:, :, : of_rows.shape[2]] = of_rows
    return found[0], found[1]


# ---------------------------------------------------------------- of packed sequences


def _keys_seen(
    starts_q: torch.Tensor, starts_kv: torch.Tensor, rows: int, keys: int, left: int | None, right: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first key that each query sees, and the one behind the last, int32 ``[rows]``, whatever the starts are."""
    row, sequences = torch.arange(rows, device=starts_q.device), len(starts_q) - 1
    if not sequences:
        return row.int().zero_(), row.int().zero_()
    own = torch.searchsorted(starts_q.contiguous(), row, right=True) - 1
    is_inside = (own >= 0) & (own < sequences)
    own = own.clamp(0, sequences - 1)
    first, end = starts_kv[own], starts_kv[own + 1]
    level = row - starts_q[own + 1] + end  # the key that is level with the query
    first = first if left is None else torch.maximum(first, level - left)
    end = end if right is None else torch.minimum(end, level + right + 1)
    first, end = (torch.where(is_inside, it, 0).clamp(0, keys).int() for it in (first, end))
    return first, end


def _blocks_of_ranges(first: torch.Tensor, end: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """The partial and the full blocks of queries that see one range of keys each: bools ``[1, 1, rows, columns]``."""
    (rows, columns), (size_q, size_kv) = grid.counts, grid.sizes
    cut = (0, rows * size_q - len(first))
    first, end = (torch.nn.functional.pad(it, cut).view(rows, size_q).long() for it in (first, end))
    sees = (first < end).int()
    changes = torch.zeros((rows, columns + 1), dtype=torch.int32, device=first.device)
    changes.scatter_add_(1, (first // size_kv).clamp(max=columns), sees)
    changes.scatter_add_(1, torch.where(sees > 0, (end - 1) // size_kv + 1, columns), -sees)
    some = changes.cumsum(1)[:, :columns] > 0
    edges = torch.arange(columns, device=first.device) * size_kv
    full = (first.amax(1, keepdim=True) <= edges) & (end.amin(1, keepdim=True) >= edges + size_kv)
    return (some & ~full)[None, None], full[None, None]
