"""Locks that a forked child finds free."""

from __future__ import annotations

import os
from typing import Protocol


class Lock(Protocol):
    """As those of `threading`."""

    def acquire(self) -> object:
        """Wait for it and take it."""

    def release(self) -> None:
        """Give it back."""


def hold_across_fork(lock: Lock) -> None:
    """Let `os.fork` wait for `lock`, so that the child inherits what it guards whole and never waits for a lost thread.

    A new lock in the child would not do: what the other thread had half changed would stay so.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
