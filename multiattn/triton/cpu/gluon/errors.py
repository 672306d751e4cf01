"""Errors of a kernel that the interpreter finds; each says where in the kernel's source it was found."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

_OWN = str(Path(__file__).parent)


class GluonError(RuntimeError):
    """A kernel does what the hardware, or Gluon's compiler, would not take or leaves undefined."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} [at {here()}]")


class LayoutError(GluonError):
    """Registers or shared memory are laid out otherwise than an operation needs."""


class RaceError(GluonError):
    """Two accesses conflict, and nothing orders them; or something is read before it is there."""


class BarrierError(GluonError):
    """An mbarrier is used in a way that PTX does not define."""


class DeadlockError(GluonError):
    """Every partition waits."""


def here() -> str:
    """The kernel's line that is being run, with its file and function."""
    return _told(_line())


def made_here() -> str:
    """The line of a helper's caller: where in the kernel something is made."""
    frame = _line()
    caller = frame
    while caller.f_back is not None and not caller.f_back.f_code.co_filename.startswith(_OWN):
        caller = caller.f_back
    return _told(caller) if caller is frame else f"{_told(caller)}, by {_told(frame)}"


def _line() -> types.FrameType:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return frame


def _told(frame: types.FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
