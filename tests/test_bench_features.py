"""Windows and features in the benchmark: what a cell asks for, what each contender is asked, and the tables."""

import json
from dataclasses import replace

import bench_fakes as fakes
import pytest
import torch
import torch.nn.attention.flex_attention as flex

from bench import block_lists
from bench.contenders import Ours, check, truth_of
from bench.features import LISTS, PACKED, SOFTCAP, WITHOUT_LISTS
from bench.matrix import SUITES, Cell, cell_flops
from bench.peers import PEERS, _with_sinks, find_peers
from multiattn.block_mask import read_block_mask, seen_blocks
from multiattn.plan.arch import ARCHS

PLAIN = replace(fakes.CELL, heads=4, seq=150)
WINDOW = replace(PLAIN, window=20)
CELLS = [WINDOW, *(replace(PLAIN, feature=feature) for feature in WITHOUT_LISTS if feature != "none")]
(DOCUMENTS,) = (it for it in CELLS if it.feature == "documents16")
BOTH = [replace(cell, direction=direction) for direction in ("fwd", "bwd") for cell in CELLS]


# ---------------------------------------------------------------- cells


@pytest.mark.parametrize("cell", [PLAIN, *CELLS, replace(PLAIN, window=1), replace(DOCUMENTS, causal=False)], ids=str)
def test_a_cell_counts_the_pairs_that_its_mask_leaves(cell):
    places = torch.arange(cell.seq)
    seen = cell.mask_mod("cpu")(0, 0, places[:, None], places[None, :])
    assert cell.visible_pairs == int(seen.sum()) < cell.seq**2
    assert cell_flops(cell) == 4 * cell.heads * cell.head_dim * int(seen.sum())
    assert cell.problem == cell.problem_of(cell.tensors("cpu"))
    assert Cell(**json.loads(json.dumps(cell.as_dict()))) == cell


@pytest.mark.parametrize("feature", LISTS)
def test_a_block_mask_shows_the_pairs_that_count_and_has_a_truth(feature, monkeypatch):
    """At a length at which a score can be looked at: a video of fewer lines, a shorter prefix and shorter blocks."""
    assert feature in {cell.feature for cell in SUITES["lists"]}
    for name, small in (("VIDEO", (2, 20, 32)), ("REACH", (1, 3, 5)), ("PREFIX", 128), ("CAUSAL_BLOCK", 32)):
        monkeypatch.setattr(block_lists, name, small)
    cell = replace(PLAIN, feature=feature, causal=False, seq=1280, heads=2, head_dim=16)
    mask = cell.block_mask(torch.device("cpu"))  # Flex's, with the sequences of a packed batch
    lists, mask_mod = read_block_mask(mask, *cell.tensors("cpu")[:2])
    size, places = mask.BLOCK_SIZE[0], torch.arange(cell.seq)
    partial, full = seen_blocks(lists.named, places // size, places // size)
    inside = True if mask_mod is None else mask_mod(*torch.zeros(2, dtype=torch.int64), places[:, None], places)
    visible = (full | (partial & inside)).expand(1, 2, -1, -1)
    assert cell.visible_pairs * 2 == int(visible.sum())
    tensors = cell.tensors("cpu")
    q, k, v = (it.float().requires_grad_() for it in tensors)
    scores = (q @ k.mT / 4).masked_fill(~visible, -torch.inf)
    out = (scores.softmax(-1).nan_to_num() @ v).to(tensors[0].dtype)
    truth_of(cell, tensors).forward.out.check(out.detach(), "dense")
    assert cell.problem == cell.problem_of(tensors)
    # Kernels that are launched past autograd find lists of both walks, as a call with gradients has them.
    given = (it.asked(its)[0].indices for it, its in ((replace(cell, direction="bwd"), tensors), (cell, (q, k, v))))
    for one, other in zip(*given, strict=True):
        assert other is None if one is None else torch.equal(one, other)


@pytest.mark.parametrize("seq", [128, 300, 1024])
@pytest.mark.parametrize("cell", [PLAIN, WINDOW, DOCUMENTS], ids=str)
def test_a_block_mask_is_that_of_flex(cell, seq):
    cell = replace(cell, seq=seq)
    ours, theirs = (
        make.as_tuple()
        for make in (
            cell.block_mask(torch.device("cpu")),
            flex.create_block_mask(cell.mask_mod("cpu"), None, None, seq, seq, device="cpu"),
        )
    )
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# ---------------------------------------------------------------- contenders


@pytest.mark.parametrize("cell", BOTH, ids=str)
def test_ours_is_asked_for_what_the_cell_has(cell, tmp_path):
    for regime in ("device", "call"):
        (row,) = fakes.run_once(tmp_path, Ours(backend="reference"), cells=(cell,), regime=regime)
        assert row.measured, row.error
        assert 0 < row.measured.error_ratio <= 1


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_flex_computes_every_feature(cell):
    """Eager, as a compile takes seconds; and forward, as it has no backward on a CPU."""
    (peer,) = find_peers(("flex",))
    tensors = cell.tensors("cpu")
    call, detail = peer.build(cell, tensors)
    assert ("scaled by lse" in detail) == cell.has_sinks
    out = (_with_sinks(flex) if cell.has_sinks else flex.flex_attention)(*tensors, **call.keywords)
    assert check({"out": out}, truth_of(cell, tensors), "flex", strict=False) < 4


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_what_a_peer_cannot_is_a_reason_and_what_it_does_instead_an_error(cell, tmp_path):
    able = {"fa2": ("none", "softcap30", "alibi", *PACKED), "fa3": ("none", "softcap30", *PACKED)}
    able |= {"fa4": WITHOUT_LISTS, "flex": WITHOUT_LISTS}
    for peer in PEERS:
        peer = replace(peer, instead=None)
        told = {reason.code for reason in peer.why_not(cell, ARCHS["sm90"])} & {"mask", "feature"}
        expected = "mask" if cell.window and "none" in peer.features else "feature"
        can = peer.name in able and cell.feature in able[peer.name]
        assert told == (set() if can else {expected})
    lenient = replace(fakes.peer("causal only"), masks=("full", "causal", "two_sided"), features=WITHOUT_LISTS)
    build = lenient.build
    lenient = replace(lenient, build=lambda cell, tensors: build(cell, tensors[:3]))
    (row,) = fakes.run_once(tmp_path, lenient, cells=(cell,))
    if cell.feature == "softcap30" or (cell.is_packed and cell.document_lengths == (cell.seq,)):
        assert row.measured, f"scores of normal values are far below {SOFTCAP}, or there is but one sequence"
    else:
        assert "computes something else" in row.error
