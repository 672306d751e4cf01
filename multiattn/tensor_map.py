"""Encoding tensor maps with NVIDIA's driver, through its library itself: as cheap as Python can be."""

from __future__ import annotations

import ctypes

from multiattn import abi, context

_NOT_INTERLEAVED, _ZEROS_BEYOND_THE_ENDS = 0, 0  # of cuTensorMapEncodeTiled
_KEPT = 64


class Encoder:
    """Makes CUtensorMaps of one tensor map for the memory at any address; those of some addresses stay at hand.

    Threads may share it. They need a CUDA context.
    """

    def __init__(self, tensor_map: abi.TensorMap) -> None:
        self._tensor_map = tensor_map
        box, rank = tensor_map.box, len(tensor_map.shape)
        self._kind = (box.dtype, rank)
        self._layout = (
            (ctypes.c_uint64 * rank)(*reversed(tensor_map.shape)),
            (ctypes.c_uint64 * (rank - 1))(*reversed(tensor_map.strides)),
            (ctypes.c_uint32 * rank)(*reversed(box.extents)),
            (ctypes.c_uint32 * rank)(*(1,) * rank),
            _NOT_INTERLEAVED,
            box.swizzle,
            tensor_map.l2_promotion,
            _ZEROS_BEYOND_THE_ENDS,
        )
        self._known: dict[int, bytes] = {}

    def __call__(self, address: int) -> bytes:
        """The CUtensorMap of the memory at `address`; RuntimeError where the driver refuses it, OSError without one."""
        if (known := self._known.get(address)) is not None:
            return known
        encoded = self._encode(address)
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[address] = encoded
        return encoded

    def _encode(self, address: int) -> bytes:
        """By the driver, which wants the map at a multiple of 64 bytes, where cuda-bindings' objects are not."""
        library = context.load_driver()
        if library is None:
            raise OSError("tensor map: no NVIDIA driver")
        memory = ctypes.create_string_buffer(abi.TENSOR_MAP_BYTES + abi.TENSOR_MAP_ALIGNMENT)
        start = ctypes.addressof(memory)
        start += -start % abi.TENSOR_MAP_ALIGNMENT
        places = ctypes.c_void_p(start), ctypes.c_void_p(address)
        status = library.cuTensorMapEncodeTiled(places[0], *self._kind, places[1], *self._layout)
        if status:
            raise RuntimeError(f"cuTensorMapEncodeTiled: CUresult {status} for {self._tensor_map} at {address:#x}")
        return ctypes.string_at(start, abi.TENSOR_MAP_BYTES)


def encode_tensor_map(tensor_map: abi.TensorMap, address: int) -> bytes:
    """A CUtensorMap of the memory at `address`, as `Encoder` makes it."""
    return Encoder(tensor_map)(address)
