"""Locks that a forked child finds free."""

from __future__ import annotations

import os
from typing import Any


def hold_across_fork(lock: Any) -> None:
    """Let `os.fork` wait for `lock`, one like `threading`'s.

    So the child inherits what it guards whole, and never waits for a lost thread. A new lock in the child would not do:
    what the other thread had half changed would stay so.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
