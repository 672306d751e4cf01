"""Tensor maps for the emulated TMA. The first 8 bytes of one are the tensor's address, which may be replaced there."""

from __future__ import annotations

import ctypes

BYTES = 128
"""Of a tensor map, on a GPU too."""
_BOX_COLUMNS = 64
_MAGIC = 0x70614D726F736E54


class _EncodedMap(ctypes.Structure):
    """Mirrors emulation/tensor_map.h."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("strides", ctypes.c_int64 * 3),
        ("sizes", ctypes.c_int32 * 4),
        ("box", ctypes.c_int32 * 4),
        ("magic", ctypes.c_uint64),
    )


def encode(address: int, shape: tuple[int, ...], strides_bytes: tuple[int, ...], box_rows: int) -> bytes:
    """The map of the 16-bit tensor at `address`.

    `shape` is of D, S, H and B, in elements; `strides_bytes` of S, H and B; D is contiguous. Boxes are 64 columns of
    `box_rows` rows, 128-byte swizzled; zeros outside.
    """
    box = (_BOX_COLUMNS, box_rows, 1, 1)
    encoded = _EncodedMap(address, strides_bytes, shape, box, _MAGIC)
    return bytes(encoded).ljust(BYTES, b"\0")
