"""The driver, by cuda-bindings, and its failures as exceptions."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver


def check(result: Any, value: Any = None) -> Any:
    """The value of a driver call; RuntimeError with the driver's name and words for a failure."""
    if result == driver.CUresult.CUDA_SUCCESS:
        return value
    _, text = driver.cuGetErrorString(result)
    raise RuntimeError(f"CUDA driver: {result.name}: {text.decode() if text else 'no description'}")
