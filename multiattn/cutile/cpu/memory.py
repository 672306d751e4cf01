"""Arrays, and the ops that load from and store to them: name -> rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._datatype import promote_dtypes

from multiattn.cutile.cpu.tile import Tile, as_tile, require, tile_dtype, tile_shape
from multiattn.plan.support import OutOfBoundsError

_UNDETERMINED_INTEGER = 0x55


class DataRaceError(RuntimeError):
    """Two blocks touch one element and one of them writes it, so the outcome depends on their order."""


@dataclass(kw_only=True)
class Run:
    """The block that runs now; `number` counts blocks from 1, so that 0 can mean nobody."""

    grid: tuple[int, ...]
    block: tuple[int, ...] = (0, 0, 0)
    number: int = 1


_ADDED = -1


class Ledger:
    """The block that last stored each element of one storage: finds what depends on the order of blocks.

    All views that a launch has of a storage share a ledger, as they may overlap. It goes from the first element of any
    to the last one, and not over all of a cache that they are a part of.

    An element that blocks updated atomically is everybody's and nobody's: any block may update it again, none may load
    or store it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], run: Run) -> None:
        self.run = run
        self.is_written = False
        extents = [_extent(tensor) for tensor in tensors]
        self._begin = min(begin for begin, _ in extents)
        self.owner = torch.empty(max(end for _, end in extents) - self._begin, dtype=torch.int32)
        for tensor in tensors:  # and not what lies between them, which may be gigabytes that nobody has touched
            self.of(tensor).zero_()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The owners of a tensor's elements, as a view of its shape."""
        return self.owner.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - self._begin)

    def check(self, owner: torch.Tensor, verb: str) -> None:
        """DataRaceError if another block stored one of these elements."""
        others = (owner != 0) & (owner != self.run.number)
        if bool(others.any()):
            other = int(owner[others][0])
            did = "atomics of any block update" if other == _ADDED else f"block number {other} stored"
            raise DataRaceError(f"block {self.run.block} {verb} what {did}")

    def own(self, owner: torch.Tensor, number: int) -> None:
        """Enter who stored these elements."""
        self.is_written = True
        owner.fill_(number)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its storage a tensor's elements begin and end."""
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + last + 1 if tensor.numel() else begin


class Array:
    """A tensor argument, as a kernel sees it."""

    def __init__(self, data: torch.Tensor, ledger: Ledger) -> None:
        self.data = data
        self.ledger = ledger
        self.owner = ledger.of(data)
        self.dtype = tile_dtype(data.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """Rank."""
        return self.data.ndim

    def slice(self, axis: int, start: Any, stop: Any) -> Array:
        """The part from `start` to `stop` of an axis; OutOfBoundsError for one that is not within the array."""
        begin, end, size = int(start), int(stop), self.shape[axis]
        if not 0 <= begin <= end <= size or begin == size > 0:
            raise OutOfBoundsError(f"slice [{begin}, {end}) of an axis of {size}")
        return Array(self.data.narrow(axis, begin, end - begin), self.ledger)

    def tiled_view(self, tile_shape: Any, **options: Any) -> TiledView:
        """The array in tiles, which overlap where steps are smaller than they are."""
        return TiledView(self, tile_shape, **options)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"Array.{name} has no rule in the interpreter")


class TiledView:
    """An array in tiles, as `Array.tiled_view` gives it."""

    def __init__(self, array: Array, shape: Any, *, padding_mode: Any = None, traversal_steps: Any = None) -> None:
        self.array = array
        self.tile_shape = tile_shape(shape)
        self.padding_mode = padding_mode or ct.PaddingMode.UNDETERMINED
        self.steps = traversal_steps or self.tile_shape

    def load(self, index: Any, *, latency: int | None = None, allow_tma: bool | None = None) -> Tile:
        """A tile, padded beyond the ends."""
        window = _window(self.array, index, self.tile_shape, steps=self.steps)
        return _padded(self.array, window, self.tile_shape, self.padding_mode, latency)

    def atomic_store_add(self, index: Any, update: Any) -> None:
        """Add to the part of a tile that is inside the array."""
        array = self.array
        window = _window(array, index, self.tile_shape, steps=self.steps)
        array.ledger.check(torch.where(window.owner == _ADDED, 0, window.owner), "updates")
        array.ledger.own(window.owner, _ADDED)
        change = as_tile(update, array.dtype).data.to(array.data.dtype).expand(self.tile_shape)
        window.data.add_(change[window.inside])

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"TiledView.{name} has no rule in the interpreter")


@dataclass(frozen=True, kw_only=True)
class _Window:
    """A tile's place in an array: the part inside it, and that part's extents."""

    data: torch.Tensor
    owner: torch.Tensor
    inside: tuple[slice, ...]


def _window(array: Array, index: Any, shape: tuple[int, ...], order: Any = None, *, steps: Any = None) -> _Window:
    indices = index if isinstance(index, tuple | list) else (index,)
    same_rank = len(indices) == len(shape) == array.ndim
    require(same_rank, f"index {indices}, tile {shape} and array {array.shape} differ in rank")
    axes = tuple(order or range(array.ndim))
    limits = [array.shape[axis] for axis in axes]
    starts = [int(i) * step for i, step in zip(indices, steps or shape, strict=True)]
    extents = [min(extent, limit - start) for extent, limit, start in zip(shape, limits, starts, strict=True)]
    if any(start < 0 or extent <= 0 for start, extent in zip(starts, extents, strict=True)):
        raise OutOfBoundsError(f"tile {tuple(map(int, indices))} of {shape} lies wholly outside the array {limits}")
    part = tuple(slice(start, start + extent) for start, extent in zip(starts, extents, strict=True))
    return _Window(
        data=array.data.permute(axes)[part],
        owner=array.owner.permute(axes)[part],
        inside=tuple(slice(extent) for extent in extents),
    )


def _load(
    array: Array,
    index: Any,
    shape: Any,
    *,
    order: Any = None,
    padding_mode: Any = ct.PaddingMode.UNDETERMINED,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> Tile:
    extents = tile_shape(shape) if shape != () else (1,) * array.ndim
    tile = _padded(array, _window(array, index, extents, order), extents, padding_mode, latency)
    return tile if shape != () else Tile(tile.data.reshape(()), array.dtype)


def _padded(array: Array, window: _Window, extents: tuple[int, ...], padding_mode: Any, latency: int | None) -> Tile:
    """The tile of a window of an array, as it is loaded."""
    require(latency is None or 1 <= latency <= 10, f"latency {latency} is not in 1..10")
    if array.ledger.is_written:
        array.ledger.check(window.owner, "loads")
    require(padding_mode in (ct.PaddingMode.UNDETERMINED, ct.PaddingMode.ZERO), f"{padding_mode} has no rule here")
    undetermined = math.nan if array.data.is_floating_point() else _UNDETERMINED_INTEGER
    padding = 0 if padding_mode == ct.PaddingMode.ZERO else undetermined
    data = torch.full(extents, padding, dtype=array.data.dtype)
    data[window.inside] = window.data
    return Tile(data, array.dtype)


def _store(array: Array, index: Any, tile: Any, *, allow_tma: bool | None = None) -> None:
    tile = as_tile(tile, array.dtype)
    extents = tile_shape(tile.shape) if tile.ndim else (1,) * array.ndim
    wanted = promote_dtypes(tile.dtype, array.dtype)
    require(wanted == array.dtype, f"a store of {tile.dtype} into {array.dtype} needs astype")
    window = _window(array, index, extents)
    array.ledger.check(window.owner, "overwrites")
    array.ledger.own(window.owner, array.ledger.run.number)
    window.data.copy_(tile.data.reshape(extents)[window.inside])


# ---------------------------------------------------------------- element by element


@dataclass(frozen=True, kw_only=True)
class _Elements:
    """The elements of an array at some indices, and which of them count: inside, and not masked off."""

    places: tuple[torch.Tensor, ...]
    chosen: torch.Tensor

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """The elements that count, of the array's data or its owners."""
        return data[tuple(place[self.chosen] for place in self.places)]


def _elements(array: Array, indices: Any, mask: Any, check_bounds: bool) -> _Elements:
    places = tuple(as_tile(index).data.long() for index in (indices if isinstance(indices, tuple) else (indices,)))
    require(len(places) == array.ndim, f"{len(places)} indices of an array {array.shape}")
    chosen = torch.tensor(True) if mask is None else as_tile(mask).data
    *places, chosen = torch.broadcast_tensors(*places, chosen)
    inside = torch.ones_like(chosen)
    for place, size in zip(places, array.shape, strict=True):
        inside &= (place >= 0) & (place < size)
    if not check_bounds and bool((chosen & ~inside).any()):
        raise OutOfBoundsError(f"{int((chosen & ~inside).sum())} unchecked indices lie outside the array {array.shape}")
    return _Elements(places=tuple(places), chosen=chosen & inside)


def _gather(
    array: Array,
    indices: Any,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    latency: Any = None,
) -> Tile:
    found = _elements(array, indices, mask, check_bounds)
    if array.ledger.is_written:
        array.ledger.check(found.of(array.owner), "loads")
    data = as_tile(padding_value, array.dtype).data.to(array.data.dtype).expand(found.chosen.shape).clone()
    data[found.chosen] = found.of(array.data)
    return Tile(data, array.dtype)


def _slice(made: Any, start: Any, length: int) -> None:
    """A start and a length, of a part of an array's axis."""
    made.start, made.length = start, length


def _load_advanced_indexing(
    array: Array,
    indices: Any,
    *,
    padding_mode: Any = ct.PaddingMode.UNDETERMINED,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> Tile:
    """Whole slices of an array: one index is a tile of places, every other a start and a length, ``ct.Slice``."""
    places = [isinstance(it, Tile) for it in indices]
    require(len(indices) == array.ndim and places.count(True) == 1, f"one index of {len(indices)} must be a tile")
    require(padding_mode == ct.PaddingMode.ZERO, f"{padding_mode} has no rule here")
    each = [it.data if isinstance(it, Tile) else torch.arange(*tile_shape(it.length)) + int(it.start) for it in indices]
    shape = [[-1 if other == axis else 1 for other in range(array.ndim)] for axis in range(array.ndim)]
    return _gather(array, tuple(Tile(it.int().reshape(to)) for it, to in zip(each, shape, strict=True)))


def _scatter(
    array: Array, indices: Any, value: Any, *, mask: Any = None, check_bounds: bool = True, latency: Any = None
) -> None:
    found = _elements(array, indices, mask, check_bounds)
    tile = as_tile(value, array.dtype)
    require(promote_dtypes(tile.dtype, array.dtype) == array.dtype, f"a scatter of {tile.dtype} into {array.dtype}")
    array.ledger.check(found.of(array.owner), "overwrites")
    chosen = tuple(place[found.chosen] for place in found.places)
    array.owner[chosen] = array.ledger.run.number
    array.ledger.is_written = True
    array.data[chosen] = tile.data.expand(found.chosen.shape)[found.chosen]


def _atomic_add(
    array: Array,
    indices: Any,
    update: Any,
    *,
    check_bounds: bool = True,
    memory_order: Any = None,
    memory_scope: Any = None,
) -> None:
    """Without the value before: kernels here do not ask for it."""
    found = _elements(array, indices, None, check_bounds)
    owner = found.of(array.owner)
    array.ledger.check(torch.where(owner == _ADDED, 0, owner), "updates")
    chosen = tuple(place[found.chosen] for place in found.places)
    array.owner[chosen] = _ADDED
    array.ledger.is_written = True
    change = as_tile(update, array.dtype).data.to(array.data.dtype).expand(found.chosen.shape)[found.chosen]
    array.data.index_put_(chosen, change, accumulate=True)


RULES: dict[str, Callable[..., Any]] = {
    "load": _load,
    "store": _store,
    "gather": _gather,
    "Slice": _slice,
    "load_advanced_indexing": _load_advanced_indexing,
    "scatter": _scatter,
    "atomic_add": _atomic_add,
}
"""Rules of memory ops, by the op's name in `cuda.tile`."""
