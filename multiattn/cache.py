"""Compiled code on disk, addressed by all that went into it: entries are written atomically and never change."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

DIRECTORY_VARIABLE = "MULTIATTN_CACHE_DIR"


def directory() -> Path:
    """``MULTIATTN_CACHE_DIR``, or multiattn's folder in the user's cache directory."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multiattn"


def key_of(parts: Iterable[str]) -> str:
    """A digest of `parts`, each with its length, so that no two lists run into one."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


def fetch(
    key: str, suffix: str, make: Callable[[Path], None], *, is_whole: Callable[[Path], bool] = Path.exists
) -> Path:
    """The entry of `key`; `make(path)` writes it when it is missing, or is not whole, as a crash may leave it.

    Two processes may make one entry at the same time: each writes a file of its own and the last rename wins. When
    `make` raises, nothing is left behind. OSError that says so for a folder that cannot be written to.
    """
    entry = directory() / f"{key}{suffix}"
    try:
        if is_whole(entry):
            return entry
        entry.parent.mkdir(parents=True, exist_ok=True)
        made_in = tempfile.TemporaryDirectory(dir=entry.parent, prefix=".making-")
    except OSError as error:
        said = f"cannot write to {entry.parent}: {error.strerror}; allowed a folder that can be"
        raise OSError(f"{DIRECTORY_VARIABLE}: {said}") from error
    with made_in as scratch:
        made = Path(scratch) / entry.name
        make(made)
        os.replace(made, entry)
    return entry
