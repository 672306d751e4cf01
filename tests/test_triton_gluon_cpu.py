"""The Gluon kernel interpreted: orders of partitions, a window's cost, and bugs, planted here, each found."""

import importlib
import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from parity_breaks import BY_NAME, CPU

import multiattn
from multiattn import explain, fmha
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import Plan, find_variant, plan_variant
from multiattn.plan.support import OutOfBoundsError
from multiattn.problem import Problem
from multiattn.triton import BACKEND, launch
from multiattn.triton.cpu.gluon import run
from multiattn.triton.cpu.gluon.errors import BarrierError, DeadlockError, GluonError, LayoutError, RaceError
from multiattn.triton.cpu.gluon.source import as_python
from multiattn.triton.gluon_forward import GluonConfig, constants_of
from multiattn.triton.gluon_twin import GluonTwinConfig
from multiattn.triton.kernels import gluon as kernels
from multiattn.triton.kernels.gluon import scores
from multiattn.triton.kernels.gluon.schedule import LaunchSizes
from parity.case import Case
from parity.launch import prepare_case, problem_of
from parity.tensors import Outputs
from parity.tolerance import Mismatch

VARIANT, TWINS = (find_variant(BACKEND, name) for name in ("warp_specialized", "warp_specialized_twin"))
PLAIN = GluonConfig(tile_m=128, tile_n=64, stages=3)
_numbers = itertools.count()


def launched(case, config=PLAIN, seed=None, kernel=None):
    """The outputs of a launch, its plan and the truth; `seed` orders the partitions."""
    inputs, truth = prepare_case(case, CPU)
    variant = TWINS if type(config) is TWINS.config_type else VARIANT
    plan = plan_variant(BACKEND, variant, problem_of(case, inputs), ARCHS["cpu"], config)
    assert isinstance(plan, Plan), plan
    outputs = Outputs.of(plan.problem, CPU)
    given = {name: getattr(inputs, name) for name in ("q", "k", "v", "sinks", "captured", "indices")}

    def run_gluon(call, arguments):
        return run(kernel or call.kernel, call.table.grid, *arguments, seed=seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_run_gluon", run_gluon)
        multiattn.launch(plan, **given, out=outputs.out, lse=outputs.lse)
    assert not outputs.guards_were_written
    assert not inputs.were_written
    return outputs, plan, truth


def check(case, config=PLAIN, seed=None, kernel=None):
    """Mismatch where out or lse is not what it is in fp64."""
    outputs, plan, truth = launched(case, config, seed, kernel)
    for got, expected in zip(outputs.all, truth.of_plan(plan), strict=True):
        expected.check(got, plan)


CONFIGS = {
    "dynamic": replace(PLAIN, scheduler="dynamic"),
    "tight": GluonConfig(tile_m=192, tile_n=32, stages=2, pingpong=True, lazy_max=True),
    "slots": GluonConfig(tile_m=128, tile_n=16, stages=5, q_slots=3, lazy_max=True),
    "listed": GluonConfig(tile_m=128, tile_n=32, stages=3, pingpong=True, lazy_max=True),
    "listed_alone": GluonConfig(tile_m=64, tile_n=64, stages=2, q_slots=2),
    "twins": GluonTwinConfig(tile_m=64, tile_n=32, piece=64),
    "twins_deep": GluonTwinConfig(tile_m=64, tile_n=32, piece=64, k_stages=3, v_stages=2, scheduler="static"),
}


DENSE = "len_203x113_causal", "varlen_gpt_oss"
LISTED = "blocks_whole", "blocks_whole_64_causal", "varlen_blocks_apart", "varlen_blocks_uneven"


@pytest.mark.parametrize(
    ("case", "config"),
    [
        *itertools.product(DENSE, CONFIGS),
        *((it, "listed") for it in LISTED[::2]),
        *((it, "listed_alone") for it in LISTED),
    ],
)
def test_every_order_of_partitions_gives_the_same_bits(case, config):
    expected = launched(BY_NAME[case], CONFIGS[config])[0]
    for seed in range(2):
        found = launched(BY_NAME[case], CONFIGS[config], seed)[0]
        assert torch.equal(found.out.nan_to_num(7.0), expected.out.nan_to_num(7.0))
        assert torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("values", ["ascending", "descending", "twin_peaks"])
def test_maxima_of_listed_blocks_are_outgrown(values):
    """In full blocks, whose tiles are then sent again, and in partial ones, which raise them."""
    check(replace(BY_NAME["blocks_whole"], sinks=None, values=values), CONFIGS["listed"])
    check(
        replace(BY_NAME["blocks_document"], seq_q=300, seq_kv=300, blocks=(128, 128), values=values), CONFIGS["listed"]
    )


def test_a_caller_gets_it_by_name_alone():
    q = torch.randn(1, 2, 70, 64, dtype=torch.bfloat16)
    assert explain(q, q, q, backend="triton").variant == "full"
    plan = explain(q, q, q, backend="triton", variant="warp_specialized")
    assert plan.config.pingpong
    assert plan.config.lazy_max
    out = fmha(q, q, q, backend="triton", variant="warp_specialized", causal=True)
    torch.testing.assert_close(out, fmha(q, q, q, backend="reference", causal=True), atol=2e-2, rtol=0)


def test_a_window_costs_what_it_shows():
    """Blocks of a tile, and of those the ones of a warpgroup and the ones that it masks: none more than it must."""
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=4096, head_dim=32, window=(1023, 0))
    C = constants_of(problem, GluonConfig(tile_m=128, tile_n=64, lazy_max=True), ragged=False)  # noqa: N806
    sizes = LaunchSizes(4096, 4096, *[None] * 5, *problem.reach, None)

    def numbers(function, *arguments):
        return tuple(int(it) for it in as_python(function)(*arguments, sizes, C))

    assert numbers(scores.range_of_blocks, 2048, 128) == (16, 34)
    assert numbers(scores.blocks_to_see, 2048, 16, 34, 0) == (16, 17, 32, 33)
    assert numbers(scores.blocks_to_see, 2112, 16, 34, 0) == (17, 18, 33, 34)
    assert numbers(scores.blocks_to_see, 2112, 16, 34, 1) == (17, 18, 17, 34)  # done again


# ---------------------------------------------------------------- the tester, tested


def changed(folder, file, old="", new=""):
    """The kernel from a copy of its source, in which `old`, which there is once in the file, has become `new`."""
    name = f"changed_gluon_{next(_numbers)}"
    home = Path(kernels.__file__).parent
    shutil.copytree(home, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / name).glob("*.py"):
        text = path.read_text()
        if path.name == file and old:
            assert text.count(old) == 1, (old, text.count(old))
            text = text.replace(old, new)
        path.write_text(text.replace("multiattn.triton.kernels.gluon", name))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        if "twin" in file:
            return importlib.import_module(f"{name}.forward_twin").attention_twins
        return importlib.import_module(f"{name}.forward").attention_forward


CAUSAL, D128 = BY_NAME["len_200x329_causal"], BY_NAME["d128_bf16_full"]


class Bug(NamedTuple):
    """A change of a text that there is once in a file, and the error that it is found by, which says a pattern."""

    file: str
    old: str
    new: str
    error: type[Exception]
    says: str | None = None
    case: Case = D128
    config: object = PLAIN


TWO_SLOTS = replace(PLAIN, q_slots=2)
PAIR = CONFIGS["twins"]
AWAIT_FULL = "    ring.await_full(shared.ring_kv, place)\n"
SCORES_WAIT = "    scores = warpgroup_mma_wait(C.pieces_v, [scores])\n"
RELEASE = "    ring.release(shared.ring_kv, place)\n"
SIGN = "    if C.blocks is None:\n        scores = finish_scores(scores, block, "
EXPECT = "mbarrier.expect(full, 2 * rows * columns)"
LAST_WORD = "    ring.write_word(shared.words, slot * C.words + END, ring.NO_TILE)\n"
LAST_ARRIVAL = "    mbarrier.arrive(shared.ring_q.full.index(slot))\n"
EMPTY = "ring.make(C.stages, C.warpgroups)"

BUGS = {
    "a diagonal one key too far": Bug(
        "scores.py", "end = queries + 1 + (seq_kv", "end = queries + 2 + (seq_kv", Mismatch, "^(out|lse) ", case=CAUSAL,
    ),
    "a mask one key too wide": Bug(
        "scores.py", ".s32 p, $2, 0", ".s32 p, $2, -1", Mismatch, case=BY_NAME["varlen_apart_d64_causal"],
    ),
    "a block left out": Bug(
        "scores.py", "return begin, (end + C.tile_n - 1)", "return begin, end", Mismatch,
        case=BY_NAME["len_129x257_full"],
    ),
    "maxima outgrown, and nobody looks": Bug(
        "forward.py", "return product != 0.0", "return product > 1.0", Mismatch, case=BY_NAME["descending_full"],
        config=replace(PLAIN, lazy_max=True),
    ),
    "nobody waits for keys": Bug(
        "forward.py", f"{AWAIT_FULL}    scores", "    scores", RaceError, "a product's read of buffer",
    ),
    "keys given back before they were used": Bug(
        "forward.py", SCORES_WAIT + RELEASE, RELEASE + SCORES_WAIT, RaceError,
        "a load by TMA of buffer .* conflicts with a product's read",
    ),
    "a wait for as many pieces of v as of k": Bug(
        "forward.py", SCORES_WAIT, SCORES_WAIT.replace("pieces_v", "pieces"), GluonError,
        case=BY_NAME["d192_v128_causal"],
    ),
    "keys loaded where others are in use": Bug("tiles.py", "    ring.await_empty(ring_of, place)\n", "", GluonError),
    "a word read before it is written": Bug(
        "producer.py", LAST_WORD + LAST_ARRIVAL, LAST_ARRIVAL + LAST_WORD, RaceError,
        "nothing orders|was never written",
    ),
    "a slot of Q given back while TMA reads it": Bug(
        "forward.py", "            tma.store_wait(0)\n            ring.release(shared.ring_q, q_place - 1",
        "            ring.release(shared.ring_q, q_place - 1", RaceError,
        "a load by TMA of buffer .* conflicts with a store by TMA", case=BY_NAME["mha_b2"], config=TWO_SLOTS,
    ),
    "a block that ends while TMA reads": Bug(
        "forward.py", "    tma.store_wait(0)  # shared", "    # shared", GluonError, "ends while TMA may still read",
        config=TWO_SLOTS,
    ),
    "keys never given back": Bug(
        "forward.py", RELEASE + SIGN, SIGN, DeadlockError,
        "(?s)produce waits for parity . of mbarrier .* 2 of 2 arrivals",
    ),
    "more bytes expected than come": Bug(
        "tiles.py", EXPECT, EXPECT.replace("2 *", "4 *"), DeadlockError,
        r"(?s)^every partition waits, and nothing is under way:\n *partition 0 consume\(0\) waits for parity 0 of "
        r"mbarrier 0 of buffer 5, made at forward\.py.* 0 of 1 arrivals and 16384 bytes.*\n *partition 1 consume\(1\) "
        r"waits for .*\n *partition 2 produce waits for ",
    ),
    "fewer bytes expected than come": Bug(
        "tiles.py", EXPECT, EXPECT.replace("2 *", "1 *"), BarrierError, "more bytes than expected",
    ),
    "an arrival that nobody makes": Bug(
        "forward.py", EMPTY, EMPTY.replace("warpgroups", "warpgroups + 1"), DeadlockError,
        r"1 of 3 arrivals and 0 bytes to come\) \[at ring.py:\d+ in await_empty\]",
    ),
    "more arrivals than there can be": Bug(
        "ring.py", "mbarrier.arrive(ring.empty.index(place % ring.empty.shape[0]))",
        "mbarrier.arrive(ring.empty.index(place % ring.empty.shape[0]), count=3)", BarrierError,
        "arrives once more than expected at mbarrier",
    ),
    "turns that nobody passes": Bug(
        "forward.py", "    _pass_turn(warpgroup, shared.turns, C)\n    listed", "    listed", DeadlockError,
        "in _await_turn", config=replace(PLAIN, pingpong=True),
    ),
    "a phase of the wrong parity": Bug(
        "ring.py", "((place // slots) & 1) ^ 1)", "((place // slots) & 1))", DeadlockError, "in await_empty",
    ),
    "weights in no layout of a product's": Bug(
        "tiles.py", "gl.DotOperandLayout(0, sums.type.layout, 2)", "gl.DotOperandLayout(0, sums.type.layout, 1)",
        LayoutError, "is not trivial",
    ),
    "lse beyond its tensor": Bug(
        "forward.py", ", mask=(rows >= 0) & (rows < end))", ")", OutOfBoundsError, "store in program", case=CAUSAL,
    ),
    "rows before the first are stored": Bug(
        "forward.py", "    if first_query >= 0:  # a store", "    if True:  # a store", GluonError,
        "an illegal instruction", case=BY_NAME["len_129x257_full"],
    ),
    "a listed tile that some do not see, without a mask": Bug(
        "listed.py", "listed.full_tiles, seen.full_begin, seen.full_end", "listed.full_tiles, seen.begin, seen.end",
        Mismatch, case=BY_NAME["blocks_whole_window"], config=CONFIGS["listed"],
    ),
    "a partial block taken for a full one": Bug(
        "listed.py", "gl.where(is_partial, 1, 0)", "0", Mismatch, case=BY_NAME["blocks_document"],
        config=CONFIGS["listed_alone"],
    ),
    "a listed tile that is not waited for": Bug(
        "producer.py", "            ring.await_empty(ring_kv, place)\n            ring.write_word(shared.listed",
        "            ring.write_word(shared.listed", RaceError, case=BY_NAME["blocks_whole"], config=CONFIGS["listed"],
    ),
    "a twin's maxima not asked for": Bug(
        "forward_twin.py", "row_max = shared.maxima.index(twin).load(C.row)", "row_max = walk.row_max", Mismatch,
        config=PAIR,
    ),
    "a twin's weights not waited for": Bug(
        "forward_twin.py", "    mbarrier.wait(shared.handed.index(twin), walk.received & 1)\n", "", RaceError,
        "a (product's )?read of buffer", config=PAIR,
    ),
    "weights that wgmma cannot see": Bug(
        "forward_twin.py", "    fence_async_shared()\n    mbarrier.arrive(shared.handed",
        "    mbarrier.arrive(shared.handed", RaceError, "without a fence_async_shared", config=PAIR,
    ),
    "sums of a twin not waited for": Bug(
        "forward_twin.py", "    mbarrier.wait(shared.summed.index(twin), q_place & 1)\n", "", RaceError,
        "a (product's )?read of buffer|never written", config=PAIR,
    ),
    "an instruction that the interpreter does not know": Bug(
        "scores.py", '"mov.b32 $0, $1;"', '"brev.b32 $0, $1;"', NotImplementedError, r"no brev\.b32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, seed, tmp_path):
    """Whatever the order of partitions, although on a GPU most of them would give the right bits in most launches."""
    bug = BUGS[name]
    kernel = changed(tmp_path, bug.file, bug.old, bug.new)
    with pytest.raises(bug.error, match=bug.says):
        check(bug.case, bug.config, seed, kernel)


def test_a_copy_without_a_change_is_the_kernel(tmp_path):
    check(BY_NAME["len_203x113_causal"], PLAIN, None, changed(tmp_path, "ring.py"))
