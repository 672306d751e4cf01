"""Modules of generated Python, kept as files that a reader and a compiler can open."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

from multiattn.run import cache


@functools.lru_cache(maxsize=256)
def module_of(name: str, text: str) -> ModuleType:
    """The module of this text, from ``<name>.py`` in the cache directory. The name must tell texts apart."""

    def make(draft: Path) -> None:
        draft.write_text(text)

    path = cache.fetch(name, ".py", make)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
