"""Windows and features in the benchmark: what a cell asks for, what each contender is asked, and the tables."""

import json
import re
from dataclasses import replace

import bench_fakes as fakes
import pytest
import torch
import torch.nn.attention.flex_attention as flex
from test_bench_peers import stand_in, time_peer

import multiattn
from bench import cli
from bench.contenders import Ours, check, truth_of
from bench.docs import features_tables
from bench.features import FEATURES, SOFTCAP, ids_of
from bench.matrix import SUITES, Cell, cell_flops
from bench.peers import PACKED, PEERS, _with_sinks, find_peers
from bench.report import groups
from bench.run import run
from bench.verdicts import preferences
from multiattn.mask import CAUSAL, Band
from multiattn.plan.arch import ARCHS
from multiattn.problem import Problem
from multiattn.reference import reference

PLAIN = replace(fakes.CELL, heads=4, seq=150)
WINDOW = replace(PLAIN, window=20)
CELLS = [WINDOW, *(replace(PLAIN, feature=feature) for feature in FEATURES if feature != "none")]
(DOCUMENTS,) = (it for it in CELLS if it.feature == "documents16")
BOTH = [replace(cell, direction=direction) for direction in ("fwd", "bwd") for cell in CELLS]


# ---------------------------------------------------------------- cells


def test_the_suite_has_the_promised_cells():
    cells = SUITES["features"]
    shapes = {(cell.heads, cell.head_dim) for cell in cells}
    assert shapes == {(16, 128), (32, 64)}
    assert {(cell.batch, cell.dtype, cell.causal) for cell in cells} == {(1, "bf16", True)}
    for attention in ("window:1023:0", "causal softcap30", "causal alibi", "causal sinks", "causal documents16"):
        lengths = (65536,) if "documents" in attention else (4096, 16384, 65536)
        found = [(cell.direction, cell.heads, cell.seq) for cell in cells if cell.attention == attention]
        assert sorted(found) == [(it, heads, seq) for it in ("bwd", "fwd") for heads in (16, 32) for seq in lengths]


@pytest.mark.parametrize("cell", [PLAIN, *CELLS, replace(PLAIN, window=1), replace(DOCUMENTS, causal=False)], ids=str)
def test_a_cell_counts_the_pairs_that_its_mask_leaves(cell):
    places = torch.arange(cell.seq)
    seen = cell.mask_mod("cpu")(0, 0, places[:, None], places[None, :])
    assert cell.visible_pairs == int(seen.sum()) < cell.seq**2
    assert cell_flops(cell) == 4 * cell.heads * cell.head_dim * int(seen.sum())
    assert cell.problem == cell.problem_of(cell.tensors("cpu"))
    assert Cell(**json.loads(json.dumps(cell.as_dict()))) == cell


def test_a_plain_cell_is_recorded_as_it_was():
    assert "window" not in PLAIN.as_dict()
    assert "feature" not in PLAIN.as_dict()
    assert (PLAIN.band, PLAIN.key) == (CAUSAL, "B1 H4 N150 D16 bf16 causal bshd")
    assert (WINDOW.band, WINDOW.key) == (Band(19, 0), "B1 H4 N150 D16 bf16 window:19:0 bshd")
    assert DOCUMENTS.key == "B1 H4 N150 D16 bf16 causal documents16 bshd"
    assert replace(PLAIN, window=150).band == CAUSAL, "it hides nothing"
    assert WINDOW.problem == Problem.of(*WINDOW.tensors("cpu"), causal=True, window=(19, None))
    assert len(DOCUMENTS.document_lengths) == 16
    assert ids_of(DOCUMENTS.document_lengths, "cpu").bincount().tolist() == list(DOCUMENTS.document_lengths)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"window": 0}, "window: got 0; allowed None, or 1 and more of a causal cell"),
        ({"window": 8, "causal": False}, "window: got 8"),
        ({"feature": "softcap"}, "feature: got 'softcap'; allowed none, sinks"),
        ({"feature": "documents16", "seq": 15}, "seq: got 15; allowed 16 and more"),
    ],
)
def test_a_cell_says_what_it_accepts(change, told):
    with pytest.raises(ValueError, match=told):
        replace(PLAIN, **change)


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
        job = replace(fakes.job(Ours(backend="reference"), cells=(cell,)), regime=regime)
        (row,) = run(job, fakes.machine(), fakes.store(tmp_path), quiet=True)
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


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_flash_attn_4_is_asked_in_its_own_words(cell, monkeypatch, tmp_path):
    (peer,) = find_peers(("fa4",))
    asked = {}

    def flash_attn_func(q, k, v, causal=False, window_size=(None, None), softcap=0.0, learnable_sink=None, **mods):
        asked.update(mods)
        assert window_size in ((None, None), (19, 0))
        options = {"causal": causal, "window": window_size, "softcap": softcap or None, "sinks": learnable_sink}
        if cell.feature == "alibi":
            options["score_mod"] = mods["score_mod"]
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if cell.has_documents:
            out = flex.flex_attention(q, k, v, block_mask=mods["block_sparse_tensors"])
        else:
            out = reference(q, k, v, **options)[0]
        return out.to(q.dtype).transpose(1, 2), None

    def alibi(heads):
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
        return {"score_mod": lambda score, b, h, i, j: score + slopes[h] * (j - i)}

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_k}
        longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_k}
        return multiattn.fmha_varlen(q, k, v, **starts, **longest, causal=causal, backend="reference"), None

    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    stand_in(monkeypatch, peer.module, **functions)
    stand_in(
        monkeypatch,
        "bench.peers_cute",
        alibi=alibi,
        documents=lambda ids, blocks, causal: {"block_sparse_tensors": blocks, "aux_tensors": [ids]},
    )
    (row,) = time_peer(replace(peer, module="torch"), tmp_path, cell)
    assert row.measured, row.error
    assert row.detail == {"alibi": "score_mod", "documents16": "mask_mod, block-sparse"}.get(cell.feature, "")
    assert bool(asked) == (cell.feature in ("alibi", "documents16"))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_what_a_peer_cannot_is_a_reason_and_what_it_does_instead_an_error(cell, tmp_path):
    able = {"fa2": ("none", "softcap30", "alibi", *PACKED), "fa3": ("none", "softcap30", *PACKED)}
    able |= {"fa4": FEATURES, "flex": FEATURES}
    for peer in PEERS:
        peer = replace(peer, instead=None)
        told = {reason.code for reason in peer.why_not(cell, ARCHS["sm90"])} & {"mask", "feature"}
        expected = "mask" if cell.window else "feature"
        can = peer.name in able and cell.feature in able[peer.name]
        assert told == (set() if can else {expected})
    lenient = replace(fakes.peer("causal only"), masks=("full", "causal", "two_sided"), features=FEATURES)
    build = lenient.build
    lenient = replace(lenient, build=lambda cell, tensors: build(cell, tensors[:3]))
    (row,) = time_peer(lenient, tmp_path, cell)
    if cell.feature == "softcap30" or (cell.is_packed and cell.document_lengths == (cell.seq,)):
        assert row.measured, f"scores of normal values are far below {SOFTCAP}, or there is but one sequence"
    else:
        assert "computes something else" in row.error


# ---------------------------------------------------------------- tables


def test_features_have_tables_and_prefer_nothing(monkeypatch):
    monkeypatch.setattr("bench.docs.auto_backend", lambda cell, arch, direction: "cuda")
    cells = [cell for cell in SUITES["features"] if cell.seq == 16384 and cell.head_dim == 128]
    times = {"cuda": 1.0, "triton": 1.0, "cutile": 1.0, "fa4": 1.5, "flex": 3.0}
    rows = [fakes.row(name, time_ms, cell=cell) for cell in cells for name, time_ms in times.items()]
    forward, table, _, backward, *_ = features_tables(rows)
    assert ("forward" in forward, "backward" in backward) == (True, True)
    assert re.search(r"window:1023:0 +\| 128 +\| 16384 +\|.*\| 1.50 +\| 3.00 +\|", table)
    assert len(table.splitlines()) == 2 + len(cells) // 2
    assert [group.cells[0].attention for group in groups(rows)] == [cell.attention for cell in cells]
    assert preferences(rows) == []


def test_a_suite_is_narrowed_by_feature(tmp_path):
    asked = (
        "run --suite features --feature alibi,sinks --head-dim 64 --seq 4096 --no-compile --peer none --jobs 1 --out"
    )
    assert cli.main([*asked.split(), str(tmp_path)]) == 0
    cells = json.loads((tmp_path / "features.json").read_text())["cells"]
    assert sorted(it["feature"] for it in cells) == ["alibi", "alibi", "sinks", "sinks"]
