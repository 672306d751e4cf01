"""A digest of the code that reads cubins, under which readings may be kept."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import multiattn
from multiattn.plan.toolchain import version_of
from multiattn.run import cache

_READERS = ("facts", "mix", "remarks", "sass")


@functools.cache
def readers() -> str:
    """A digest of the modules that read cubins, without comments and docstrings, and of the tool that they call."""
    root = Path(multiattn.__file__).parent
    paths = [*(root / "inspect" / f"{name}.py" for name in _READERS), root / "plan/arch.py", root / "plan/toolchain.py"]
    code = [_without_docstrings(path.read_text(encoding="utf-8")) for path in paths]
    return cache.key_of([*code, str(version_of("nvidia-cuda-cuobjdump"))])


def _without_docstrings(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.dump(tree)
