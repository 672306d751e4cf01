"""Names of Gluon that differ from one Triton to the next."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.6 has the long names, 3.9 the short ones; between them both.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
