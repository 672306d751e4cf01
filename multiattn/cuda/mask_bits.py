"""The expression's mask of partial blocks as bits, which one kernel asks for once where heads share a list.

A video's mask has some twenty operations for a score, a forward without it seven. `kernels/mask_bits.cuh` is the
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from multiattn.block_mask import KEYS_OF_QUERIES
from multiattn.cuda.source import Instance, PlannedLaunch
from multiattn.problem import Problem
from multiattn.score.expression import inputs_of

WORD_BYTES = 4

AREA = "mask_bits"
BYTES_MAX = 1 << 27
"""The most bytes of bits: those of all partial blocks that a mask of 32768 x 32768 may have. Where a list may have
more, its first blocks have bits. A guess of what callers can spare."""
HEADS_MIN = 4
"""Heads of all batch entries that share a list at least. A guess."""
_THREADS, _SPLITS = 256, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskBits:
    """The bits of the lists of one direction."""

    lists: int
    """How many there are: of batch entries, heads and rows of blocks."""
    columns: int
    """Blocks of a list that have bits, from its first partial one on."""
    capacity: int
    """Blocks that it may have."""
    block_bytes: int

    @classmethod
    def of(cls, problem: Problem, names: tuple[str, ...], columns: int) -> MaskBits | None:
        """For the lists called `names`, and tiles of so many columns; None where kernels ask the expression themselves.

        They do in a packed batch, where few heads share a list, and where the expression says different things for
        heads that do.
        """
        blocks, score = problem.blocks, problem.score
        if blocks is None or problem.packing is not None or score is None or (mask := score.program.mask) is None:
            return None
        batch, heads, rows, capacity = dict(zip(blocks.names, problem.lists, strict=True))[names[1]]
        used, lists = inputs_of(mask), batch * heads * rows
        shares = (batch == problem.batch or "b" not in used) and (heads == problem.heads_q or "h" not in used)
        if not lists or not shares or problem.batch * problem.heads_q < HEADS_MIN * batch * heads:
            return None
        elements = columns // 2  # of a thread, in whole words
        block_bytes = blocks.queries * blocks.keys // elements * -(-elements // 32) * WORD_BYTES
        found = min(capacity, BYTES_MAX // (lists * block_bytes))
        return cls(lists=lists, columns=found, capacity=capacity, block_bytes=block_bytes) if found else None

    @property
    def areas(self) -> dict[str, int]:
        """Their area of workspace, and its bytes."""
        return {AREA: self.lists * self.columns * self.block_bytes}

    @property
    def suffix(self) -> str:
        """The end of the name of a kernel that reads them."""
        return "_bits" if self.columns == self.capacity else "_some_bits"

    @property
    def spec(self) -> dict[str, bool]:
        """The fields of C++'s `BlockSpec` that are of bits."""
        return {"has_bits": True, "all_bits": self.columns == self.capacity}

    def launch(self, kernel: Instance, names: tuple[str, ...], columns: int) -> PlannedLaunch:
        """The kernel that makes them for a walking kernel."""
        walks_keys = names == KEYS_OF_QUERIES
        side = "queries" if walks_keys else "keys"
        bits = f"multiattn::BitsOf<{kernel.traits}::Blocked, {str(walks_keys).lower()}, {columns}>"
        made = replace(
            kernel,
            name=f"mask_bits_of_{side}_{columns}_{kernel.name}",
            entry=f"mask_bits_of_{side}",
            traits=f"multiattn::MaskBitsTraits<{kernel.traits}, {bits}, {_THREADS}, {_SPLITS}>",
            threads=_THREADS,
            smem_bytes=0,
            cluster=1,
            wgmma_columns=(),
        )
        return PlannedLaunch(kernel=made, blocks=self.lists * _SPLITS)
