"""Run an unmodified ``@ct.kernel`` on CPU tensors, op by op in PyTorch: for truth and debugging, not for speed.

    from multiattn.cutile.cpu import launch
    launch(grid, kernel, args)   # the arguments of ct.launch, without the stream

A kernel runs as plain Python, so `breakpoint()` and `print` work in it, and it is held to what cuTile leaves undefined
more strictly than a GPU would hold it:

- undetermined padding is NaN (0x55 bytes for integers);
- a load or store wholly outside its array raises, and so does an array of 2^31 elements that is indexed in 32 bits;
- two blocks that store to one element raise, and so does a block that loads what another one stored;
- blocks run in a random order, the same for the same `seed`;
- tile shapes must be powers of two, dtypes promote by cuTile's own table, a store never narrows by itself;
- `if`, `while` and `range` take 0-d tiles as the compiler does, and reject others;
- an op without a rule here raises NotImplementedError with its name: there are rules for those that our kernels use.

Rounding is cuTile's: fp16 and bf16 arithmetic in fp32 with one rounding, `mma` in its accumulator's dtype, flush to
zero where asked. What is not modelled: integers outside tiles (block ids, shapes, loop counters) are Python's and do
not wrap; approximate division and exp2 are exact; latency, TMA and memory order arguments have no effect; atomics see
one block at a time.

It needs `cuda.tile` to import, no driver and no compiler, and stands on the private dispatch mode of cuda-tile 1.7.
"""

from __future__ import annotations

from multiattn.cutile.cpu.machine import launch
from multiattn.cutile.cpu.memory import DataRaceError
from multiattn.plan.support import OutOfBoundsError

__all__ = ["DataRaceError", "OutOfBoundsError", "launch"]
