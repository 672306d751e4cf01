"""The file of measurements that ``multiattn tune`` keeps for each GPU, in the cache's folder, and who reads it.

It is read once in a process, when the first plan for such a GPU is made. ``MULTIATTN_TUNED=0`` leaves it unread.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from multiattn.plan.arch import gpu_name
from multiattn.plan.measured import measured_gpus

if TYPE_CHECKING:
    from multiattn.plan.tuning import Tuning

VARIABLE = "MULTIATTN_TUNED"
ALLOWED = ("0", "1")
LOGGER = logging.getLogger("multiattn")
_ONE_AT_A_TIME = threading.RLock()
"""Holds threads whose first calls come together off: what is told once is told by one of them."""


def folder() -> Path:
    """The folder of the files, a GPU each."""
    from multiattn.run.cache import directory  # here: importing this package must not cost its libraries

    return directory() / "tuned"


def path_of(gpu: str) -> Path:
    """The file of GPUs of a name, as the driver has it."""
    return folder() / f"{re.sub('[^a-z0-9]+', '-', gpu.casefold()).strip('-')}.json"


def is_on() -> bool:
    """False where `MULTIATTN_TUNED` turns the user's measurements off; ValueError for what it does not know."""
    value = os.environ.get(VARIABLE, "1")
    if value not in ALLOWED:
        raise ValueError(f"{VARIABLE}: got {value!r}; allowed 0 for off, 1 or unset for on")
    return value == "1"


def version() -> str:
    """The version of multiattn, from the package that imports this module: its modules do not import it."""
    return str(sys.modules["multiattn"].__version__)


def read(path: Path, gpu: str | None = None) -> Tuning:
    """The measurements of a file; ValueError, with what came, where it has not those of this version's kernels.

    Nor those of `gpu`, if that is given.
    """
    from multiattn.plan.tuning import tuning_of  # here: most users have no such file, and all import the package

    try:
        found = tuning_of(json.loads(path.read_text()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if found.multiattn != version():
        raise ValueError(f"{path}: multiattn: got kernels of {found.multiattn}; allowed those of {version()}")
    if gpu not in (None, found.gpu):
        raise ValueError(f"{path}: gpu: got {found.gpu!r}; allowed {gpu!r}")
    return found


def write(tuning: Tuning, path: Path) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: it cannot be written; the message has the path.
    """
    draft = path.with_name(f".{path.stem}.{os.getpid()}.making")
    try:
        _make_folders(path)
        draft.write_text(json.dumps(asdict(tuning), indent=1) + "\n")
        os.replace(draft, path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}; allowed a folder that can be written to") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    _kept.cache_clear()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from writing the file meanwhile; OSError as `write`, or where calls would not read it."""
    import filelock  # here: as in `folder`

    from multiattn.run.cache import check_owner

    try:
        _make_folders(path)
        locks = path.parent.parent / ".locks"
        locks.mkdir(mode=0o700, exist_ok=True)
        lock = filelock.FileLock(locks / f"{path.name}.lock")
        lock.acquire()
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}; allowed a folder that can be written to") from error
    try:
        check_owner(path.parent)
        yield
    finally:
        lock.release()


def _make_folders(path: Path) -> None:
    """The folder of a file and the cache's, which only this user may write to, whatever the umask."""
    for its in (path.parent.parent, path.parent):
        its.mkdir(mode=0o700, parents=True, exist_ok=True)


def tuning_for(device: torch.device) -> Tuning | None:
    """The measurements of GPUs of this one's name; None where there are none, on a CPU, and where they are turned off.

    A file that cannot be used is warned of, once, and left as it is.
    """
    if device.type != "cuda" or not is_on():
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    gpu = gpu_name(index)
    with _ONE_AT_A_TIME:
        return _kept(gpu, path_of(gpu))


@functools.lru_cache(maxsize=64)
def _kept(gpu: str, path: Path) -> Tuning | None:
    from multiattn.run.cache import check_owner

    try:
        check_owner(path.parent)
        if not path.exists():
            return None
        return read(path, gpu)
    except (OSError, ValueError) as error:
        todo = "`multiattn tune` measures anew, `multiattn tune --forget` removes it"
        warnings.warn(f"the measurements of this GPU are not used: {error}. {todo}", RuntimeWarning, stacklevel=2)
        return None


# ---------------------------------------------------------------- a GPU without a record


def tell_unmeasured(device: torch.device, arch: str) -> None:
    """Log once for each GPU that its rules were never timed on it: the first plan for it does. Nothing for a CPU."""
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with _ONE_AT_A_TIME:
        _tell_once(gpu_name(index), arch)


@functools.lru_cache(maxsize=64)
def _tell_once(gpu: str, arch: str) -> None:
    measured = measured_gpus(arch)
    if gpu in measured or (is_on() and _kept(gpu, path_of(gpu)) is not None):
        return
    how = "`multiattn tune --shape B,H,S,D` measures this one"
    if measured:
        LOGGER.info(
            "multiattn: %s (%s) has the rules of %s, measured on %s: %s", gpu, arch, arch, " and ".join(measured), how
        )
    else:
        LOGGER.warning("multiattn: no measurement of %s (%s) yet, its rules are guesses: %s", gpu, arch, how)
