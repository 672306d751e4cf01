"""``python -m bench.ladder_child FILE``: launch every rung of a request once, for ncu to count (bench.ladder_ncu)."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.contenders import Contender
from bench.environment import gpu_arch
from bench.ladder_rungs import Rung
from bench.matrix import Cell


def main(arguments: Sequence[str]) -> int:
    """Launch what the file named by the one argument asks for; 1 where there is no GPU."""
    (path,) = arguments
    request = json.loads(Path(path).read_text())
    cell, arch = Cell(**request["cell"]), gpu_arch()
    if arch is None:
        print("no GPU to launch on", file=sys.stderr)
        return 1
    tensors = cell.tensors("cuda")
    for name in request["contenders"]:
        rung = Rung.parse(name)
        assert rung is not None, name
        try:
            made = rung.provider.prepare(cell, tensors, arch)
        except Exception:  # broad: what one rung cannot do, its row of the ladder says; the others are to be counted
            traceback.print_exc()
            continue
        if isinstance(made, Contender):
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            made.launch.call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
