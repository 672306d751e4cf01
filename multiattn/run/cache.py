"""Compiled code on disk, addressed by all that went into it, and checked before it is loaded.

Each entry has the SHA-256 digest of its content beside it. An entry that does not match is made again, with a warning.
Nothing is loaded from a directory that another user can write to.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import filelock
import platformdirs

DIRECTORY_VARIABLE = "MULTIATTN_CACHE_DIR"
_DIGEST_SUFFIX = ".sha256"
_DRAFT_PREFIX = ".making-"
_ABANDONED_S = 3600.0
"""Age of a draft that no compiler still works on: the slowest takes minutes."""


def directory() -> Path:
    """``MULTIATTN_CACHE_DIR``, or multiattn's folder in the user's cache directory (``XDG_CACHE_HOME`` on Linux).

    For a user without a home directory it is ``multiattn-<uid>`` in the system's temporary directory.
    """
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen)
    with contextlib.suppress(
        RuntimeError
    ):  # no HOME and no entry in the password database; older releases keep the `~`
        found = platformdirs.user_cache_path("multiattn", appauthor=False)
        if found.is_absolute():
            return found
    return Path(tempfile.gettempdir(), f"multiattn-{os.getuid()}")


def key_of(parts: Iterable[str]) -> str:
    """A digest of `parts`, each with its length, so that no two lists run into one."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


def fetch(key: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The entry of `key`; `make(path)` writes it where it is missing or damaged.

    Of several processes and threads that want one entry, one makes it and the others wait. When `make` raises, nothing
    is left behind.

    Raises:
        PermissionError: the directory belongs to another user, or others can write to it.
        OSError: the directory cannot be written to.
    """
    folder = directory()
    entry = folder / f"{key}{suffix}"
    with _named_errors(folder):
        check_owner(folder)
        if _state(entry) == "whole":
            return entry
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(folder)
        locks = folder / ".locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        lock = filelock.FileLock(locks / f"{entry.name}.lock")
        lock.acquire()
    try:
        state = _state(entry)
        if state == "whole":  # another process made it in the meantime
            return entry
        if state == "damaged":
            warnings.warn(f"{entry} is damaged and is compiled again", RuntimeWarning, stacklevel=2)
        with _named_errors(folder):
            _sweep(folder)
            made_in = tempfile.TemporaryDirectory(dir=folder, prefix=_DRAFT_PREFIX)
        with made_in as scratch:
            made = Path(scratch) / entry.name
            make(made)
            _publish(made, entry)
    finally:
        lock.release()
    return entry


def _state(entry: Path) -> str:
    """``whole``, ``damaged``, or ``missing``: also for an entry without a digest, which was not finished."""
    try:
        return "whole" if _digest(entry) == _digest_path(entry).read_text() else "damaged"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except UnicodeDecodeError:
        return "damaged"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_path(entry: Path) -> Path:
    return entry.with_name(entry.name + _DIGEST_SUFFIX)


def _publish(made: Path, entry: Path) -> None:
    """Move a draft to its place, the digest first: an entry beside no digest, or another one's, is never loaded."""
    digest = _digest_path(made)
    digest.write_text(_digest(made))
    for draft, place in ((digest, _digest_path(entry)), (made, entry)):
        _sync(draft)
        os.replace(draft, place)
    _sync(entry.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove our own drafts that a killed process left."""
    for draft in folder.glob(f"{_DRAFT_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # another process sweeps, too
            status = draft.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _ABANDONED_S:
                shutil.rmtree(draft, ignore_errors=True)


def check_owner(folder: Path) -> None:
    """PermissionError if a user other than this one and root can put code into the directory."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    wrong = ""
    if status.st_uid not in (0, os.geteuid()):
        wrong = f"belongs to user {status.st_uid}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = f"can be written to by other users (mode {stat.S_IMODE(status.st_mode):04o}; chmod go-w)"
    if wrong:
        allowed = f"a directory of user {os.geteuid()} or root that nobody else can write to"
        raise PermissionError(f"{DIRECTORY_VARIABLE}: {folder} {wrong}, and code is loaded from it; allowed {allowed}")


@contextlib.contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:  # already says what is wrong
            raise
        said = f"cannot write to {folder}: {error.strerror}; allowed a folder that can be"
        raise OSError(f"{DIRECTORY_VARIABLE}: {said}") from error
