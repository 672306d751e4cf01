"""Rings of shared memory between the producer and the consumers: who waits for what, and where a tile lives.

One ring has tiles of K and V in the order of their use: K of a block, then V of the block before it. The other has Q,
and what the tile of queries is, in words. Every slot has two mbarriers: *full*, which TMA completes, and *empty*, at
which each consumer warpgroup arrives when it is done. A place in a ring is counted from its beginning: slot and phase
follow from it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from multiattn.triton.kernels.gluon.constants import TILE_WORDS

# Triton 3.6 has the long names, 3.9 the short ones; between them both.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

NO_TILE = gl.constexpr(-1)
"""In place of the end of a tile's blocks: there are no more tiles."""

WARPGROUP_THREADS = gl.constexpr(128)

# Words of shared memory for each slot of Q: what its tile is, and from SPOILED on one for each warpgroup.
FIRST_QUERY, HEAD, BATCH, END, EXACT, TILE, SPOILED = (gl.constexpr(i) for i in range(TILE_WORDS + 1))


@gluon.jit
def make_barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """`number` mbarriers, each of which `arrivals` complete.

    Make none that nobody waits for. Triton would give their memory to something else once they are made, with no
    `mbarrier.inval`, and it seems that an SM writes their state there later, over what is there by then.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def tile_of(buffers, slot, C: gl.constexpr):
    """A warpgroup's tile ``[64, head_dim]`` in shared memory, in a piece or two."""
    wide = buffers[0].index(slot).reshape([64, C.wide])
    both = (wide, wide)
    if C.narrow > 0:
        both = (wide, buffers[1].index(slot).reshape([64, C.narrow]))
    return both


@gluon.jit
def await_full(ring, place, SLOTS: gl.constexpr):
    """Until a slot has what belongs at `place`."""
    mbarrier.wait(ring[0].index(place % SLOTS), (place // SLOTS) & 1)


@gluon.jit
def await_empty(ring, place, SLOTS: gl.constexpr):
    """Until nobody needs what was in the slot of `place` before."""
    mbarrier.wait(ring[1].index(place % SLOTS), ((place // SLOTS) & 1) ^ 1)


@gluon.jit
def release(ring, place, SLOTS: gl.constexpr):
    """A warpgroup is done with what is at `place`.

    Triton puts a barrier of the warpgroup before an arrival, so all of its threads have read the slot, its words too,
    when one of them arrives; the producer waits for that phase before it writes there. racecheck does not carry the
    order from that thread to the others, and reports the words.
    """
    mbarrier.arrive(ring[1].index(place % SLOTS))


@gluon.jit
def arrive_each(barrier):
    """Each thread of a warpgroup arrives for itself, as soon as what it wrote is there for wgmma and TMA.

    `mbarrier.arrive` is one thread's for all, behind a barrier of the warpgroup. This is PTX's
    ``cp.async.mbarrier.arrive.noinc``: an arrival when all that a thread copies by cp.async is there, and it copies
    nothing. It is no release, so the fence before it is what orders the writes.
    """
    fence_async_shared()
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def skip(ring, place, SLOTS: gl.constexpr):
    """A tile that only other warpgroups have a use for."""
    await_full(ring, place, SLOTS)
    release(ring, place, SLOTS)


@gluon.jit
def await_launch_before():
    """Until all that the launch before this one wrote is there."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_lanes():
    """Until all lanes of a warp are here: ptxas has nothing before it that stands behind."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def read_word(words, at):
    """A number that `write_word` wrote."""
    return gl.max(words.index(at).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def write_word(words, at, value):
    """A number for others to read, who wait for the phase that the writer completes afterwards."""
    words.index(at).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
