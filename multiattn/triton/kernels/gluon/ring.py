"""Rings of shared memory between the producer and the consumers: who waits for what, and where a tile lives.

Every slot of a ring has two mbarriers: *full*, which TMA completes, and *empty*, at which each consumer warpgroup
arrives when it is done. A place in a ring is counted from its beginning: slot and phase follow from it. One ring of the
forward has tiles of K and V in the order of their use: K of a block, then V of the block before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

NO_TILE = gl.constexpr(-1)
"""In a word of a slot: there are no more tiles."""

WARPGROUP_THREADS = gl.constexpr(128)


class Ring(NamedTuple):
    """The mbarriers of each slot."""

    full: Any
    empty: Any


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
def make(slots: gl.constexpr, consumers: gl.constexpr, producers: gl.constexpr = 1):
    """A ring of so many slots, whose phases so many arrivals complete."""
    return Ring(make_barriers(slots, producers), make_barriers(slots, consumers))


@gluon.jit
def await_full(ring, place):
    """Until a slot has what belongs at `place`."""
    slots: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(place % slots), (place // slots) & 1)


@gluon.jit
def await_empty(ring, place):
    """Until nobody needs what was in the slot of `place` before."""
    slots: gl.constexpr = ring.empty.shape[0]
    mbarrier.wait(ring.empty.index(place % slots), ((place // slots) & 1) ^ 1)


@gluon.jit
def release(ring, place):
    """A warpgroup is done with what is at `place`.

    Triton puts a barrier of the warpgroup before an arrival, so all of its threads have read the slot, its words too,
    when one of them arrives; the producer waits for that phase before it writes there. racecheck does not carry the
    order from that thread to the others, and reports the words.
    """
    mbarrier.arrive(ring.empty.index(place % ring.empty.shape[0]))


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
def skip(ring, place):
    """A tile that only other warpgroups have a use for."""
    await_full(ring, place)
    release(ring, place)


# ---------------------------------------------------------------- of pieces

# A ring may have tiles in pieces, each with barriers of its own. Places are those of tiles, whose slots are together.


@gluon.jit
def slot_of_piece(ring, place, piece: gl.constexpr, PIECES: gl.constexpr):
    """The slot that has a piece of the tile at `place`."""
    return place % (ring.full.shape[0] // PIECES) * PIECES + piece


@gluon.jit
def _phase(ring, place, PIECES: gl.constexpr):
    return (place // (ring.full.shape[0] // PIECES)) & 1


@gluon.jit
def await_full_piece(ring, place, piece: gl.constexpr, PIECES: gl.constexpr):
    """Until a piece of the tile at `place` is there."""
    mbarrier.wait(ring.full.index(slot_of_piece(ring, place, piece, PIECES)), _phase(ring, place, PIECES))


@gluon.jit
def await_empty_piece(ring, place, piece: gl.constexpr, PIECES: gl.constexpr):
    """Until nobody needs what was in its slot before."""
    mbarrier.wait(ring.empty.index(slot_of_piece(ring, place, piece, PIECES)), _phase(ring, place, PIECES) ^ 1)


@gluon.jit
def release_piece(ring, place, piece: gl.constexpr, PIECES: gl.constexpr):
    """A warpgroup is done with it: see `release`."""
    mbarrier.arrive(ring.empty.index(slot_of_piece(ring, place, piece, PIECES)))


# ---------------------------------------------------------------- launches


@gluon.jit
def await_launch_before():
    """Until all that the launch before this one wrote is there."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin_loading():
    """The launch after this one may begin, and what the one before it wrote is there: Programmatic Dependent Launch."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    await_launch_before()


@gluon.jit
def await_lanes():
    """Until all lanes of a warp are here: ptxas has nothing before it that stands behind."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def recomputed(number):
    """A number made where it stands: what follows from it is not kept in registers across a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], gl.int32, is_pure=False, pack=1)


# ---------------------------------------------------------------- words


@gluon.jit
def make_words(number: gl.constexpr):
    """Numbers in shared memory, by which the producer tells the others what a tile is."""
    return gl.allocate_shared_memory(gl.int32, [number, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def read_word(words, at):
    """A number that `write_word` wrote."""
    return gl.max(words.index(at).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def write_word(words, at, value):
    """A number for others to read, who wait for the phase that the writer completes afterwards."""
    words.index(at).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))


@gluon.jit
def write_words(words, at, values):
    """One after another from `at` on."""
    for i in gl.static_range(len(values)):
        write_word(words, at + i, values[i])
