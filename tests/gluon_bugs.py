"""Bugs of the Gluon forward, as changes of its source: each is what somebody might write."""

from dataclasses import dataclass, replace

from gluon_on_cpu import PLAIN, case_of

from multiattn.plan.support import OutOfBoundsError
from multiattn.triton.cpu.gluon.errors import BarrierError, DeadlockError, GluonError, LayoutError, RaceError
from parity.case import Case
from parity.tolerance import Mismatch

CAUSAL, D128 = case_of("len_200x329_causal"), case_of("d128_bf16_full")


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A change of a file, and the error that it is found by."""

    file: str
    old: str
    """A text that there is once in the file."""
    new: str
    """Instead of it."""
    error: type[Exception]
    says: str | None = None
    """A regular expression."""
    case: Case = D128
    config: object = PLAIN


TWO_SLOTS = replace(PLAIN, q_slots=2)
AWAIT_FULL = "    ring.await_full(shared.ring_kv, place)\n"
SCORES_WAIT = "    scores = warpgroup_mma_wait(C.pieces, [scores])\n"
RELEASE = "    ring.release(shared.ring_kv, place)\n"
SIGN = "    scores = _finish_scores(scores, block, "
EXPECT = "mbarrier.expect(full, 2 * rows * C.columns)"
LAST_WORD = "    ring.write_word(shared.words, slot * C.words + END, ring.NO_TILE)\n"
LAST_ARRIVAL = "    mbarrier.arrive(shared.ring_q.full.index(slot))\n"
EMPTY = "ring.make(C.stages, C.warpgroups)"

COMPUTED = {
    "a diagonal one key too far": Bug(
        file="scores.py", old="end = queries + 1 + (seq_kv", new="end = queries + 2 + (seq_kv",
        case=CAUSAL, error=Mismatch, says="^(out|lse) ",
    ),
    "a mask one key too wide": Bug(
        file="scores.py", old=".s32 p, $2, 0", new=".s32 p, $2, -1", case=case_of("varlen_apart_d64_causal"),
        error=Mismatch,
    ),
    "a block left out": Bug(
        file="scores.py", old="return begin, (end + C.tile_n - 1)", new="return begin, end",
        case=case_of("len_129x257_full"), error=Mismatch,
    ),
    "maxima outgrown, and nobody looks": Bug(
        file="forward.py", old="return product != 0.0", new="return product > 1.0",
        case=case_of("descending_full"), config=replace(PLAIN, lazy_max=True), error=Mismatch,
    ),
}  # fmt: skip

ORDERED = {
    "nobody waits for keys": Bug(
        file="forward.py", old=f"{AWAIT_FULL}    scores", new="    scores", error=RaceError,
        says="a product's read of buffer",
    ),
    "keys given back before they were used": Bug(
        file="forward.py", old=SCORES_WAIT + RELEASE, new=RELEASE + SCORES_WAIT, error=RaceError,
        says="a load by TMA of buffer .* conflicts with a product's read",
    ),
    "keys loaded where others are in use": Bug(
        file="tiles.py", old="    ring.await_empty(ring_of, place)\n", new="", error=GluonError,
    ),
    "scores used before they are there": Bug(
        file="forward.py", old="warpgroup_mma_wait(C.pieces, [scores]", new="warpgroup_mma_wait(2, [scores]",
        error=RaceError, says="the result of a product is used before",
    ),
    "outputs used before they are there": Bug(
        file="tiles.py", old="warpgroup_mma_wait(under_way, [", new="warpgroup_mma_wait(under_way + 1, [",
        error=RaceError, says="the result of a product is used before",
    ),
    "a word read before it is written": Bug(
        file="producer.py", old=LAST_WORD + LAST_ARRIVAL, new=LAST_ARRIVAL + LAST_WORD, error=RaceError,
        says="nothing orders|was never written",
    ),
    "an output that TMA does not see yet": Bug(
        file="forward.py", old="    fence_async_shared()\n    if first", new="    if first", error=RaceError,
        says="a store by TMA of buffer .* without a fence_async_shared",
    ),
    "a slot of Q given back while TMA reads it": Bug(
        file="forward.py", old="            tma.store_wait(0)\n            ring.release(shared.ring_q, q_place - 1",
        new="            ring.release(shared.ring_q, q_place - 1", case=case_of("mha_b2"), config=TWO_SLOTS,
        error=RaceError, says="a load by TMA of buffer .* conflicts with a store by TMA",
    ),
    "a block that ends while TMA reads": Bug(
        file="forward.py", old="    tma.store_wait(0)  # shared", new="    # shared", config=TWO_SLOTS,
        error=GluonError, says="ends while TMA may still read",
    ),
}  # fmt: skip

BARRIERS = {
    "keys never given back": Bug(
        file="forward.py", old=RELEASE + SIGN, new=SIGN, error=DeadlockError,
        says="(?s)produce waits for parity . of mbarrier .* 2 of 2 arrivals",
    ),
    "more bytes expected than come": Bug(
        file="tiles.py", old=EXPECT, new=EXPECT.replace("2 *", "4 *"), error=DeadlockError,
        says="0 of 1 arrivals and 16384 bytes",
    ),
    "fewer bytes expected than come": Bug(
        file="tiles.py", old=EXPECT, new=EXPECT.replace("2 *", "1 *"), error=BarrierError,
        says="more bytes than expected",
    ),
    "an arrival that nobody makes": Bug(
        file="forward.py", old=EMPTY, new=EMPTY.replace("warpgroups", "warpgroups + 1"), error=DeadlockError,
        says=r"1 of 3 arrivals and 0 bytes to come\) \[at ring.py:\d+ in await_empty\]",
    ),
    "an arrival that nobody expects": Bug(
        file="forward.py", old=EMPTY, new=EMPTY.replace("warpgroups", "warpgroups - 1"), error=GluonError,
    ),
    "more arrivals than there can be": Bug(
        file="ring.py", old="mbarrier.arrive(ring.empty.index(place % ring.empty.shape[0]))",
        new="mbarrier.arrive(ring.empty.index(place % ring.empty.shape[0]), count=3)", error=BarrierError,
        says="arrives once more than expected at mbarrier",
    ),
    "turns that nobody passes": Bug(
        file="forward.py", old="    _pass_turn(warpgroup, shared.turns, C)\n    of_score", new="    of_score",
        config=replace(PLAIN, pingpong=True), error=DeadlockError, says="in _await_turn",
    ),
    "a phase of the wrong parity": Bug(
        file="ring.py", old="((place // slots) & 1) ^ 1)", new="((place // slots) & 1))", error=DeadlockError,
        says="in await_empty",
    ),
}  # fmt: skip

REFUSED = {
    "a factor in the layout of scores": Bug(
        file="tiles.py", old="gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))", new="factor",
        error=LayoutError, says="operands have different layouts",
    ),
    "weights in no layout of a product's": Bug(
        file="tiles.py", old="gl.DotOperandLayout(0, sums.type.layout, 2)",
        new="gl.DotOperandLayout(0, sums.type.layout, 1)", error=LayoutError, says="is not trivial",
    ),
    "keys along the wrong dimension": Bug(
        file="scores.py", old="gl.arange(0, C.tile_n, C.column)  # [tile_n]",
        new="gl.arange(0, C.tile_n, C.row)", case=CAUSAL, error=LayoutError,
        says="got axis 0 of a slice along 1",
    ),
    "registers of more warps than there are": Bug(
        file="ring.py", old="load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))",
        new="load(gl.BlockedLayout([1], [32], [4], [0]))", config=replace(PLAIN, lazy_max=True), error=LayoutError,
        says="of 4 warps; allowed 1",
    ),
    "lse beyond its tensor": Bug(
        file="forward.py", old=", mask=(rows >= 0) & (rows < end))", new=")", case=CAUSAL, error=OutOfBoundsError,
        says="store in program",
    ),
    "rows before the first are stored": Bug(
        file="forward.py", old="    if first_query >= 0:  # a store", new="    if True:  # a store",
        case=case_of("len_129x257_full"), error=GluonError, says="an illegal instruction",
    ),
    "an instruction that the interpreter does not know": Bug(
        file="scores.py", old='"mov.b32 $0, $1;"', new='"brev.b32 $0, $1;"', error=NotImplementedError,
        says=r"no brev\.b32",
    ),
}  # fmt: skip

BUGS = COMPUTED | ORDERED | BARRIERS | REFUSED
