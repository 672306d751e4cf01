"""The expression's mask of partial blocks as bits, which one kernel asks for once where heads share a list.

A video's mask has some twenty operations for a score, a forward without it seven. `kernels/mask_bits.cuh` is the kernel.
"""

from __future__ import annotations

from dataclasses import replace

from multiattn.cuda.source import Instance, PlannedLaunch
from multiattn.problem import Problem
from multiattn.score.expression import inputs_of

AREA = "mask_bits"
BYTES_MAX = 1 << 27
"""The most bytes of bits, for as many partial blocks as lists have room for: a mask of 32768 x 32768. A guess of what
callers can spare."""
HEADS_MIN = 4
"""Heads of all batch entries that share a list at least. A guess."""
_ROWS, _THREADS, _SPLITS = 64, 256, 8


def bits_bytes(problem: Problem, names: tuple[str, ...], columns: int) -> int:
    """The bytes of bits for the lists of one direction, `names`, and tiles of so many columns; 0 where kernels ask the
    expression themselves.

    They do where few heads share a list, or where the expression says different things for heads that do.
    """
    blocks, score = problem.blocks, problem.score
    if blocks is None or score is None or (mask := score.program.mask) is None or not problem.lists:
        return 0
    batch, heads, rows, capacity = dict(zip(blocks.names, problem.lists, strict=True))[names[1]]
    shares = (batch > 1 or problem.batch == 1 or "b" not in inputs_of(mask)) and (
        heads > 1 or problem.heads_q == 1 or "h" not in inputs_of(mask)
    )
    if not shares or problem.batch * problem.heads_q < HEADS_MIN * batch * heads:
        return 0
    elements = columns // 2  # of a thread, in whole words
    words = blocks.queries * blocks.keys // elements * -(-elements // 32)
    size = batch * heads * rows * capacity * words * 4
    return size if size <= BYTES_MAX else 0


def bits_launch(kernel: Instance, problem: Problem, names: tuple[str, ...], columns: int) -> PlannedLaunch:
    """The kernel of bits for a walking kernel with tiles of so many columns: queries over keys, or keys over queries."""
    assert problem.blocks is not None
    batch, heads, rows, _ = dict(zip(problem.blocks.names, problem.lists, strict=True))[names[1]]
    walks_keys = names[0] == "kv_num_blocks"
    side = "queries" if walks_keys else "keys"
    bits = f"multiattn::BitsOf<{kernel.traits}::Blocked, {str(walks_keys).lower()}, {columns}>"
    made = replace(
        kernel,
        name=f"mask_bits_of_{side}_{columns}_{kernel.name}",
        entry=f"mask_bits_of_{side}",
        traits=f"multiattn::MaskBitsTraits<{kernel.traits}, {bits}>",
        threads=_THREADS,
        smem_bytes=0,
        cluster=1,
        wgmma_columns=(),
    )
    return PlannedLaunch(kernel=made, blocks=batch * heads * rows * _SPLITS)
