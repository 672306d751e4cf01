"""What a launch takes of device memory beside its inputs and outputs, read from PyTorch's allocator."""

from __future__ import annotations

import torch

from bench.matrix import Cell
from bench.timing import Contestant

LSE_BYTES = 4


def output_bytes(cell: Cell) -> int:
    """Bytes of what a cell's direction computes: out and lse, or dq, dk and dv, or all of them."""
    problem = cell.problem
    rows, rows_kv = (cell.batch * heads * cell.seq for heads in (problem.heads_q, problem.heads_kv))
    row = cell.head_dim * problem.torch_dtype.itemsize
    forward, backward = rows * (row + LSE_BYTES), (rows + 2 * rows_kv) * row
    return {"fwd": forward, "bwd": backward, "fwdbwd": forward + backward}[cell.direction]


def extra_bytes(contestant: Contestant, cell: Cell) -> int:
    """The peak of what one launch asks the allocator for, without the outputs where it allocates these itself.

    What it is given may be up to 1 MiB more a tensor, by which free block is at hand: no figure to compare by. It has
    run before, so that nothing is counted that is made once. Synchronises.
    """
    torch.cuda.synchronize()
    before = _requested("current")
    torch.cuda.reset_peak_memory_stats()
    with contestant.context():
        returned = contestant.call()
    torch.cuda.synchronize()
    peak = _requested("peak") - before
    return max(0, peak - (output_bytes(cell) if returned is not None else 0))


def _requested(what: str) -> int:
    size: int = torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]
    return size
