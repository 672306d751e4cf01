"""Arrays, and the ops that load from and store to them: name -> rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile._datatype import promote_dtypes

from multiattn.cutile.cpu.errors import DataRaceError, OutOfBoundsError
from multiattn.cutile.cpu.tile import Tile, as_tile, require, tile_dtype, tile_shape

_PADDING = {
    ct.PaddingMode.ZERO: 0.0,
    ct.PaddingMode.NEG_ZERO: -0.0,
    ct.PaddingMode.NAN: math.nan,
    ct.PaddingMode.POS_INF: math.inf,
    ct.PaddingMode.NEG_INF: -math.inf,
}
_UNDETERMINED_INTEGER = 0x55


@dataclass(kw_only=True)
class Run:
    """The block that runs now; `number` counts blocks from 1, so that 0 can mean nobody."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int] = (0, 0, 0)
    number: int = 1


_ADDED = -1


class Ledger:
    """Which block last stored each element of one storage: finds what depends on the order of blocks.

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
        self.owner = torch.zeros(max(end for _, end in extents) - self._begin, dtype=torch.int32)

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


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its storage a tensor's elements begin and end."""
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + last + 1 if tensor.numel() else begin


class Array:
    """What a kernel sees of a tensor argument."""

    def __init__(self, data: torch.Tensor, ledger: Ledger, owner: torch.Tensor | None = None) -> None:
        self.data = data
        self.ledger = ledger
        self.owner = ledger.of(data) if owner is None else owner
        self.dtype = tile_dtype(data.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(self.data.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self.data.stride()

    @property
    def ndim(self) -> int:
        """Rank."""
        return self.data.ndim

    def slice(self, axis: int, start: Any, stop: Any) -> Array:
        """The part ``start..stop`` of an axis; OutOfBoundsError if it is not inside."""
        first, last = int(start), int(stop)
        if not 0 <= first <= last <= self.data.shape[axis]:
            raise OutOfBoundsError(f"slice {first}..{last} leaves axis {axis} of {self.shape}")
        narrowed = (tensor.narrow(axis, first, last - first) for tensor in (self.data, self.owner))
        return Array(next(narrowed), self.ledger, next(narrowed))

    def tiled_view(
        self, tile_shape: Any, *, padding_mode: Any = ct.PaddingMode.UNDETERMINED, traversal_steps: Any = None
    ) -> TiledView:
        """The array in tiles; overlapping tiles are not modelled."""
        if traversal_steps is not None:
            raise NotImplementedError("traversal_steps has no rule in the interpreter")
        return TiledView(self, tile_shape, padding_mode)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"Array.{name} has no rule in the interpreter")


class TiledView:
    """What `Array.tiled_view` gives a kernel."""

    def __init__(self, array: Array, shape: Any, padding_mode: Any) -> None:
        self.array = array
        self.tile_shape = tile_shape(shape)
        self.padding_mode = padding_mode
        self.dtype = array.dtype

    def num_tiles(self, axis: int) -> int:
        """Tiles along an axis."""
        return _num_tiles(self.array, axis, self.tile_shape)

    def load(self, index: Any, **hints: Any) -> Tile:
        """As `ct.load` of a tile."""
        return _load(self.array, index, self.tile_shape, padding_mode=self.padding_mode, **hints)

    def store(self, index: Any, tile: Any, **hints: Any) -> None:
        """As `ct.store` of a tile."""
        _store(self.array, index, tile, **hints)

    def atomic_store_add(self, index: Any, update: Any) -> None:
        """Add to the part of a tile that is inside the array."""
        window = _window(self.array, index, self.tile_shape, "C", True)
        self.array.ledger.check(torch.where(window.owner == _ADDED, 0, window.owner), "updates")
        self.array.ledger.is_written = True
        window.owner.fill_(_ADDED)
        change = as_tile(update, self.dtype).data.to(self.array.data.dtype).expand(self.tile_shape)
        window.data.add_(change[window.inside])

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"TiledView.{name} has no rule in the interpreter")


def _axis_order(order: Any, ndim: int) -> Sequence[int]:
    named = {"C": tuple(range(ndim)), "F": tuple(reversed(range(ndim)))}
    return named[order] if isinstance(order, str) else order


@dataclass(frozen=True, kw_only=True)
class _Window:
    """A tile's place in an array: the part inside it, and that part's extents."""

    data: torch.Tensor
    owner: torch.Tensor
    inside: tuple[slice, ...]


def _window(array: Array, index: Any, shape: tuple[int, ...], order: Any, check_bounds: bool) -> _Window:
    indices = index if isinstance(index, tuple | list) else (index,)
    same_rank = len(indices) == len(shape) == array.ndim
    require(same_rank, f"index {indices}, tile {shape} and array {array.shape} differ in rank")
    axes = tuple(_axis_order(order, array.ndim))
    limits = [array.shape[axis] for axis in axes]
    starts = [int(i) * extent for i, extent in zip(indices, shape, strict=True)]
    extents = [min(extent, limit - start) for extent, limit, start in zip(shape, limits, starts, strict=True)]
    if any(start < 0 or extent <= 0 for start, extent in zip(starts, extents, strict=True)):
        raise OutOfBoundsError(f"tile {tuple(map(int, indices))} of {shape} lies wholly outside the array {limits}")
    if not check_bounds and tuple(extents) != shape:
        raise OutOfBoundsError(f"check_bounds=False, but tile {indices} of {shape} leaves the array {limits}")
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
    order: Any = "C",
    padding_mode: Any = ct.PaddingMode.UNDETERMINED,
    check_bounds: bool = True,
    latency: int | None = None,
    **hints: Any,
) -> Tile:
    require(latency is None or 1 <= latency <= 10, f"latency {latency} is not in 1..10")
    extents = tile_shape(shape) if shape != () else (1,) * array.ndim
    window = _window(array, index, extents, order, check_bounds)
    if array.ledger.is_written:
        array.ledger.check(window.owner, "loads")
    undetermined = math.nan if array.data.is_floating_point() else _UNDETERMINED_INTEGER
    data = torch.full(extents, _PADDING.get(padding_mode, undetermined), dtype=array.data.dtype)
    data[window.inside] = window.data
    return Tile(data if shape != () else data.reshape(()), array.dtype)


def _store(
    array: Array,
    index: Any,
    tile: Any,
    *,
    order: Any = "C",
    check_bounds: bool = True,
    latency: int | None = None,
    **hints: Any,
) -> None:
    require(latency is None or 1 <= latency <= 10, f"latency {latency} is not in 1..10")
    tile = as_tile(tile, array.dtype)
    extents = tile_shape(tile.shape) if tile.ndim else (1,) * array.ndim
    wanted = promote_dtypes(tile.dtype, array.dtype)
    require(wanted == array.dtype, f"a store of {tile.dtype} into {array.dtype} needs astype")
    window = _window(array, index, extents, order, check_bounds)
    _own(array, window.owner)
    window.data.copy_(tile.data.reshape(extents)[window.inside])


def _own(array: Array, owner: torch.Tensor) -> None:
    array.ledger.check(owner, "overwrites")
    array.ledger.is_written = True
    owner.fill_(array.ledger.run.number)


def _element_index(
    array: Array, indices: Any, mask: Any, check_bounds: bool
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Broadcast element indices, those not to be touched replaced by 0, and which are to be touched."""
    parts = indices if isinstance(indices, tuple | list) else (indices,)
    require(len(parts) == array.ndim, f"{len(parts)} indices into an array of rank {array.ndim}")
    index = torch.broadcast_tensors(*[as_tile(part).data.long() for part in parts])
    inside = torch.ones_like(index[0], dtype=torch.bool)
    for part, limit in zip(index, array.shape, strict=True):
        inside &= (part >= 0) & (part < limit)
    wanted = torch.ones_like(inside) if mask is None else as_tile(mask).data.expand_as(inside)
    if not check_bounds and not bool((inside | ~wanted).all()):
        raise OutOfBoundsError(f"check_bounds=False, but an index leaves the array {array.shape}")
    touched = wanted & inside
    return tuple(torch.where(touched, part, 0) for part in index), touched


def _gather(
    array: Array,
    indices: Any,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    latency: int | None = None,
) -> Tile:
    index, touched = _element_index(array, indices, mask, check_bounds)
    if array.ledger.is_written:
        array.ledger.check(array.owner[index][touched], "gathers")
    padding = as_tile(padding_value, array.dtype).data.to(array.data.dtype)
    return Tile(torch.where(touched, array.data[index], padding), array.dtype)


def _scatter(
    array: Array, indices: Any, value: Any, *, mask: Any = None, check_bounds: bool = True, latency: int | None = None
) -> None:
    index, touched = _element_index(array, indices, mask, check_bounds)
    index = tuple(part[touched] for part in index)
    array.ledger.check(array.owner[index], "overwrites")
    array.ledger.is_written = True
    array.owner[index] = array.ledger.run.number
    tile = as_tile(value, array.dtype)
    require(promote_dtypes(tile.dtype, array.dtype) == array.dtype, f"a scatter of {tile.dtype} needs astype")
    array.data[index] = tile.data.expand(touched.shape)[touched].to(array.data.dtype)


def _atomic_add(array: Array, indices: Any, update: Any, *, check_bounds: bool = True, **order: Any) -> Tile:
    """Its old values are those of the order in which blocks run here."""
    index, touched = _element_index(array, indices, None, check_bounds)
    elements = tuple(part[touched] for part in index)
    owner = array.owner[elements]
    array.ledger.check(torch.where(owner == _ADDED, 0, owner), "updates")
    array.ledger.is_written = True
    array.owner[elements] = _ADDED
    old = array.data[index].clone()
    change = as_tile(update, array.dtype).data.expand(touched.shape)[touched].to(array.data.dtype)
    array.data.index_put_(elements, change, accumulate=True)
    return Tile(old, array.dtype)


def _num_tiles(array: Array, axis: int, shape: Any, order: Any = "C") -> int:
    extent = array.shape[_axis_order(order, array.ndim)[axis]]
    return -(-extent // tile_shape(shape)[axis])


RULES: dict[str, Callable[..., Any]] = {
    "load": _load,
    "store": _store,
    "gather": _gather,
    "scatter": _scatter,
    "atomic_add": _atomic_add,
    "num_tiles": _num_tiles,
}
"""Rules of memory ops, by the op's name in `cuda.tile`."""
