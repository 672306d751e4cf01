"""A digest of the code that reads cubins, under which readings may be kept."""

from __future__ import annotations

import functools
from pathlib import Path

import multiattn
from multiattn.plan.toolchain import version_of
from multiattn.run import cache

_READERS = ("inspect/facts", "inspect/mix", "inspect/remarks", "inspect/sass", "plan/arch", "plan/toolchain")


@functools.cache
def readers() -> str:
    """A digest of the modules that read cubins, and of the tool that they call."""
    root = Path(multiattn.__file__).parent
    code = [(root / f"{name}.py").read_text(encoding="utf-8") for name in _READERS]
    return cache.key_of([*code, str(version_of("nvidia-cuda-cuobjdump"))])
