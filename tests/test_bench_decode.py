"""bench.decode: cells over caches, their truth, and runs of them; peers are modules of the reference here."""

from dataclasses import replace

import bench_fakes as fakes
import pytest
import torch
from xla_fakes import wheel

import bench.peers
import multiattn
from bench import cli, decode, features, peers_decode, peers_jax
from bench.contenders import Ours, RefusedError, check, in_turns
from bench.decode_cells import CELLS, CHUNKS, COPIES_ON_CPU, DecodeCell, matching, too_large
from bench.matrix import cell_flops
from bench.peers_decode import fastest
from bench.results import Store, load
from multiattn.plan.arch import ARCHS
from multiattn.problem import problem_of
from multiattn.reference import reference
from parity.tolerance import Mismatch

DENSE = DecodeCell(
    batch=2, heads=4, heads_kv=2, seq=32, head_dim=16, dtype="bf16", causal=False, layout="bshd", queries=1
)
PAGED = replace(DENSE, page=8, heads_kv=1)
FEW = replace(DENSE, queries=3, causal=True, page=4)
MIXED = replace(DENSE, batch=6, queries=5, causal=True, mixed=True, page=16)
WIDE = replace(DENSE, head_dim_v=24)
LATENT = replace(PAGED, head_dim=80, head_dim_v=16, latent=True)
KINDS = (
    *(DENSE, PAGED, FEW, MIXED),
    *(replace(DENSE, heads_kv=None), replace(FEW, page=None, heads=8), replace(MIXED, page=None)),
    *(WIDE, replace(MIXED, head_dim_v=24)),
    *(
        LATENT,
        replace(LATENT, page=None, queries=3, causal=True),
        replace(MIXED, head_dim_v=8, heads_kv=1, latent=True),
    ),
)


EIGHT = replace(DENSE, stored="e4m3")
STORED = EIGHT, replace(PAGED, stored="e4m3"), replace(FEW, stored="e4m3")
TOKENS = replace(EIGHT, per_token=True), replace(PAGED, stored="int8", per_token=True), replace(PAGED, stored="int8")
TREE = replace(FEW, feature="tree", queries=8)
SCORES = (
    *(replace(PAGED, feature="relative", seq=1040), replace(DENSE, feature="alibi")),
    *(TREE, replace(TREE, page=None, queries=16)),
)
ALL = *KINDS, *STORED, *TOKENS, *SCORES

OURS = Ours(backend="reference")
SPLITS = (0, 1, 8)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Choices of peers are timed by it: the last that was made is the fastest."""

    class Falling(fakes.FakeClock):
        def _sample(self, regime, call, launches):
            return replace(super()._sample(regime, call, launches), time_ms=1 / (1 + len(self.log)))

    monkeypatch.setattr(peers_decode, "CudaClock", Falling)


def job(*providers, cells=(DENSE,), **changes):
    made = fakes.job(*providers, cells=cells)
    return replace(made, suite="decode", truth_of=decode.truth_of, copy=decode.make_copy("cpu", 1000), **changes)


def run(folder, *providers, clock=None, seconds=60.0, now=None, told=print, **changes):
    given = job(*providers, **changes), fakes.machine(clock), Store(folder / "decode.json", "decode")
    more = {} if now is None else {"now": now}
    return decode.run_cells(*given, seconds=seconds, tell=told, memory_bytes=1 << 22, **more)


# ---------------------------------------------------------------- attention over caches, as peers are asked for it


def attended(q, k, v, *, seqlens_kv, page_table=None, cu_seqlens_q=None, causal=False, **more):
    """Attention over a cache in fp64, a sequence at a time; q ``[B, Hq, Sq, D]`` or packed."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)

    def gathered(cache, name):
        scale = more.get(name, torch.ones(len(seqlens_kv), cache.shape[1]))
        if scale.ndim == 3:
            cache, scale = cache.double() * scale[..., None], torch.ones(len(seqlens_kv), cache.shape[1])
        pages = [entry] if page_table is None else page_table[entry].tolist()
        return torch.cat([cache[page].double() for page in pages], dim=1)[:, :length] * scale[entry, :, None, None]

    for entry, length in enumerate(seqlens_kv.tolist()):
        own = entry if cu_seqlens_q is None else slice(*cu_seqlens_q[entry : entry + 2].tolist())
        rows = q[own] if cu_seqlens_q is None else q[own].transpose(0, 1)
        given = (it[None].double() for it in (rows, gathered(k, "k_scale"), gathered(v, "v_scale")))
        bias = added(entry, *rows.shape[:2], length, **more)
        result = reference(*given, causal=causal, bias=bias, compute_dtype=torch.float64)[0][0]
        out[own] = result if cu_seqlens_q is None else result.transpose(0, 1)
    return out


def added(entry, heads, queries, keys, *, alibi_slopes=None, score_mod=None, bias=None, **_):
    """The sum that scores of a sequence are changed by."""
    head, key = torch.arange(heads)[:, None, None], torch.arange(keys)
    query = torch.arange(keys - queries, keys)[:, None]
    found = torch.zeros(heads, queries, keys, dtype=torch.float64)
    if alibi_slopes is not None:
        found -= alibi_slopes[head] * (query - key)
    if score_mod is not None:
        found = score_mod(found, entry, head, query, key)
    if bias is not None:
        found[..., -queries:].masked_fill_(~bias[entry], -torch.inf)
    return found[None]


def of_flash_attention(q, k, v, causal=False, packed=None, table=None, lengths=None, **scales):
    """Attention of ``[B, S, H, D]`` or packed, by what flash-attn's functions are given."""
    swap = (lambda it: it) if packed is not None else (lambda it: it.transpose(1, 2))
    options = {"seqlens_kv": lengths, "page_table": table, "cu_seqlens_q": packed, "causal": causal, **scales}
    return swap(attended(swap(q), k.transpose(1, 2), v.transpose(1, 2), **options))


def whole(q, k, v, latent):
    """q and k of absorbed latent attention, which FlashAttention-3 takes apart."""
    if latent is None:
        return q, k
    assert q.shape[-1] == k.shape[-1] == 64
    return torch.cat((latent, q), dim=-1), torch.cat((v, k), dim=-1)


def fa3(q, k, v, *, cache_seqlens, num_splits, causal, page_table=None, cu_seqlens_q=None, max_seqlen_q=None, qv=None):
    assert num_splits in SPLITS
    assert (cu_seqlens_q is None) == (max_seqlen_q is None)
    q, k = whole(q, k, v, qv)
    return of_flash_attention(q, k, v, causal, cu_seqlens_q, page_table, cache_seqlens)


def fa3_of_vllm(q, k, v, *others):
    """The op, by the places of its arguments."""
    assert len(others) == 34
    latent, starts, lengths, longest, most, table, scale, causal, splits = (
        others[at] for at in (2, 4, 8, 9, 10, 11, 20, 21, 27)
    )
    assert others[22:26] == (-1, -1, 0.0, True)
    assert splits in SPLITS
    assert longest == q.shape[1] or starts is not None
    assert most == (None if table is None else table.shape[1] * k.shape[1])
    q, k = whole(q, k, v, latent)
    assert scale == q.shape[-1] ** -0.5
    if q.dtype != torch.float8_e4m3fn:
        return of_flash_attention(q, k, v, causal, starts, table, lengths), None
    of_q, of_k, of_v = others[17:20]
    of_k = of_q * of_k  # scores have both
    return of_flash_attention(q, k, v, causal, starts, table, lengths, k_scale=of_k, v_scale=of_v), None


def fa4(q, k, v, *, seqused_k, max_seqlen_q, causal, page_table=None, cu_seqlens_q=None):
    return of_flash_attention(q, k, v, causal, cu_seqlens_q, page_table, seqused_k), None


# ---------------------------------------------------------------- cells


def test_cells_have_names_of_their_own_and_the_largest_are_left_out():
    assert len(CELLS) == len(set(CELLS)) == len({cell.key for cell in CELLS}) == 3 * 4 * 3 * 4 * 4 + 48 + 6 + 20 + 26
    assert min(cell.cache_bytes for cell in CELLS if too_large(cell)) > 32 << 30
    largest = replace(DENSE, batch=128, heads=64, heads_kv=8, seq=131072, head_dim=128)
    assert "got 68.7 GB of keys and values; allowed up to 34.4 GB" in too_large(largest)
    assert too_large(replace(DENSE, seq=1 << 20, head_dim=128), memory_bytes=1 << 30)


def test_numbers_of_8_bits_have_a_byte_each_and_their_scales_four():
    keys = 2 * 32 * 2  # of all heads
    assert EIGHT.cache_bytes == keys * 32 + 2 * 4 * 2 * 2
    assert replace(EIGHT, per_token=True).cache_bytes == keys * (32 + 2 * 4)
    assert EIGHT.moved_bytes - EIGHT.cache_bytes == DENSE.moved_bytes - DENSE.cache_bytes
    assert [replace(cell, stored=None, per_token=False).key for cell in TOKENS] == [DENSE.key, PAGED.key, PAGED.key]
    assert [cell.key.split("bf16 ")[1] for cell in TOKENS] == ["dense e4m3 tokens", "page8 int8 tokens", "page8 int8"]
    for wrong in ({"stored": "e5m2"}, {"per_token": True}):
        with pytest.raises(ValueError, match=r"stored: got .*; allowed None without scales, e4m3, int8"):
            replace(DENSE, **wrong)


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_trees_have_a_root_and_whole_lines_of_ancestors(tokens):
    (seen,) = features.draw_trees(1, tokens)[0]
    assert seen.diagonal().all()
    assert seen[:, 0].all()
    assert not seen.triu(1).any()
    assert torch.equal(seen, (seen.float() @ seen.float()) > 0)  # ancestors of an ancestor are its own


@pytest.mark.parametrize("cell", ALL, ids=str)
def test_the_problem_is_that_of_the_tensors(cell):
    problem = problem_of(*cell.asked(cell.tensors("cpu")))
    assert str(cell.problem) == str(problem)
    assert (cell.problem.batching, cell.problem.alignment) == (problem.batching, problem.alignment)


@pytest.mark.parametrize(
    ("patterns", "holds"),
    [
        ((), lambda cell: True),
        (("H64/8 Q1 page*",), lambda cell: cell.heads_text == "64/8" and cell.queries == 1 and cell.page is not None),
        (("mixed", "Q512 B1"), lambda cell: cell.queries == 512),
        (("relative", "int8"), lambda cell: cell.feature == "relative" or cell.stored == "int8"),
        (("N1024 dense", "Q4"), lambda cell: cell.queries == 4 or (cell.seq == 1024 and cell.page is None)),
    ],
)
def test_patterns_choose_cells_by_words(patterns, holds):
    assert matching(patterns) == tuple(cell for cell in CELLS if holds(cell))


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("cell", ALL, ids=str)
def test_the_truth_and_the_work_are_those_of_each_sequence(cell):
    served = cell.tensors("cpu")
    truth = decode.truth_of(cell, served)
    assert len({k.data_ptr() for k, _ in served.caches}) == COPIES_ON_CPU
    pairs = [q * kv - q * (q - 1) // 2 for q, kv in zip(cell.lengths_q, cell.lengths_kv, strict=True)]
    if cell.feature == "tree":
        pairs = [cell.queries * (it - cell.queries) for it in cell.lengths_kv] + [int(served.scores["bias"].sum())]
    assert cell_flops(cell) == 2 * cell.heads * (cell.head_dim + cell.width_v) * sum(pairs)
    options = cell.arguments(served)
    out = attended(served.q.double(), *served.caches[1], **options)
    assert torch.allclose(truth.forward.out.truth, out, rtol=1e-12, atol=1e-12)
    assert check({"out": out.to(served.q.dtype)}, truth, "eager") <= 1
    for wrong in (out * 1.1, out.roll(1, dims=0), out.roll(1, dims=1)):
        with pytest.raises(Mismatch):
            check({"out": wrong.to(served.q.dtype)}, truth, "eager")


@pytest.mark.parametrize("cell", ALL, ids=str)
def test_a_measured_row_has_rates_of_memory_and_its_plan(cell, tmp_path):
    told = []
    rows, unrun = run(tmp_path, OURS, cells=(cell,), told=told.append)
    (row,) = rows
    assert not unrun
    assert row.measured, row.error or row.reasons
    assert row.measured.tb_per_s == pytest.approx(cell.moved_bytes / 0.5e-3 / 1e12, rel=1e-5)
    assert row.measured.copy_tb_per_s == pytest.approx(2000 / 0.5e-3 / 1e12)
    assert row.measured.error_ratio <= 1
    assert row.plan["variant"] == "eager"
    assert load(tmp_path / "decode.json") == rows
    assert told == [decode.line(rows)]
    assert f"reference 500.0 us {decode.figure(row)} TB/s {100 * decode.copy_share(row):.0f} %" in told[0]
    assert ("plain x1.00" in told[0]) == (row.measured.plain_ms == 0.5) == (cell.feature != "none")


def test_the_launch_without_scores_takes_turns_and_is_told(monkeypatch, tmp_path):
    def attend(q, k_cache, v_cache, **options):
        asked.append((options["causal"], "bias" in options))
        return right(q, k_cache, v_cache, **options)

    asked, right = [], multiattn.fmha_kvcache
    monkeypatch.setattr(multiattn, "fmha_kvcache", attend)
    rows, _ = run(tmp_path, OURS, cells=(TREE, *STORED[:1], DENSE))
    assert set(asked) == {(False, True), (True, False), (False, False)}
    (row, *_) = (replace(row, regime="graph") for row in rows)
    row = replace(row, measured=replace(row.measured, plain_ms=0.4))
    assert decode.table([row]).splitlines()[0].split(" | ")[-1].strip("| ") == "reference, time over plain"
    assert decode.table([row]).splitlines()[2].split(" | ")[-1].strip("| ") == "1.25"
    Store(tmp_path / "told.json", "decode").add([row, *(replace(it, regime="graph") for it in rows[1:])])
    told = decode.block(tmp_path / "told.json")
    assert "**decode with scores, D = 16, bf16, TB/s**" in told
    assert "**decode of 8-bit numbers, D = 16, bf16, TB/s**" in told
    assert "| all | all     | 1       |" in told


def test_a_launch_without_scores_that_fails_is_an_error(monkeypatch, tmp_path):
    def attend(*tensors, **options):
        if "bias" not in options:
            raise RuntimeError("no plain one")
        return right(*tensors, **options)

    right = multiattn.fmha_kvcache
    monkeypatch.setattr(multiattn, "fmha_kvcache", attend)
    (row,), _ = run(tmp_path, OURS, cells=(TREE,))
    assert row.error == "RuntimeError: no plain one"


def test_another_copy_than_the_first_is_checked(monkeypatch, tmp_path):
    def wrong(q, k_cache, v_cache, **options):
        first.append(k_cache.data_ptr())
        result = right(q, k_cache, v_cache, **options)
        return result if k_cache.data_ptr() == first[0] else result.mul_(1.5)

    first, right = [], multiattn.fmha_kvcache
    monkeypatch.setattr(multiattn, "fmha_kvcache", wrong)
    (row,), _ = run(tmp_path, OURS)
    assert row.error.startswith("multiattn.truth.tolerance.Mismatch: out is off")
    assert len(set(first)) == COPIES_ON_CPU


def test_reasons_are_those_of_the_plan(tmp_path):
    (row,), _ = run(tmp_path, Ours(backend="cuda"), cells=(replace(DENSE, head_dim=2048),))
    assert "head_dim" in {it.code for it in row.reasons}
    assert [it.code for it in OURS.why_not(DENSE, None)] == ["gpu"]


def test_a_run_ends_with_its_time_and_goes_on_later(tmp_path):
    clock, cells = fakes.FakeClock(), (DENSE, PAGED, FEW, replace(DENSE, batch=1024))
    times = iter([0.0, 1.0, 20.0])
    rows, unrun = run(tmp_path, OURS, cells=cells, seconds=10.0, now=lambda: next(times, 30.0))
    assert [row.cell for row in rows] == [DENSE]
    (late, large) = unrun.items()
    assert late == ("the time is over", [PAGED, FEW])
    assert large[0].startswith("memory: got ")
    again, unrun = run(tmp_path, OURS, cells=cells, clock=clock)
    assert again[0] == rows[0]
    assert [row.cell for row in again] == [DENSE, PAGED, FEW]
    assert list(unrun) == [large[0]]
    assert load(tmp_path / "decode.json") == again


# ---------------------------------------------------------------- peers


@pytest.fixture
def modules(monkeypatch):
    functions = {
        "flash_attn_interface": {"flash_attn_with_kvcache": fa3},
        "flash_attn.cute": {"flash_attn_varlen_func": fa4},
    }
    monkeypatch.setattr(peers_decode, "forward_of_vllm", lambda module: fa3_of_vllm)
    for name, members in functions.items():
        fakes.stand_in(monkeypatch, name, **members)
    monkeypatch.setattr(bench.peers, "_import_problem", lambda module: "")
    monkeypatch.setattr(peers_decode, "SPLITS", SPLITS)


def peer(name):
    (found,) = (it for it in peers_decode.PEERS if it.name == name)
    return found


@pytest.mark.parametrize("cell", KINDS, ids=str)
@pytest.mark.parametrize(
    ("name", "detail"), [("fa3", "num_splits=8"), ("fa3-vllm", "num_splits=8"), ("fa4", "keys not split")]
)
def test_peers_compute_every_cell_that_they_take(name, detail, cell, modules, tmp_path):
    (row,), _ = run(tmp_path, peer(name), cells=(cell,))
    assert row.measured, row.error or row.reasons
    assert row.detail == detail


@pytest.mark.parametrize("cell", [*STORED, *TOKENS, *SCORES], ids=str)
@pytest.mark.parametrize("it", peers_decode.PEERS, ids=lambda it: it.name)
def test_one_peer_takes_e4m3_with_scales_of_heads_and_none_has_scores(it, cell, modules, tmp_path):
    (row,), _ = run(tmp_path, it, cells=(cell,))
    if it.name == "fa3-vllm" and cell in STORED:
        assert row.measured, row.error
    else:
        assert {"stored", "feature"} & {it.code for it in row.reasons}


@pytest.mark.parametrize(
    ("cell", "codes"),
    [(DENSE, []), (PAGED, ["cache"]), (replace(FEW, page=None), ["queries"]), (MIXED, ["batch", "cache", "queries"])],
    ids=str,
)
def test_sdpa_takes_dense_caches_and_one_query(cell, codes, tmp_path, monkeypatch):
    sdpa = peer("sdpa-cudnn")
    if not codes:
        (row,), _ = run(tmp_path, replace(sdpa, context=fakes.peer("x").context), cells=(cell,))
        assert row.measured, row.error
        return
    with pytest.raises(RefusedError) as refusal:
        sdpa.prepare(cell, cell.tensors("cpu"), ARCHS["sm90"])
    assert sorted(it.code for it in refusal.value.reasons) == codes


def test_peers_that_are_missing_say_so(monkeypatch):
    monkeypatch.setattr(bench.peers, "_import_problem", lambda module: f"no {module}")
    for it in peers_decode.PEERS:
        (reason,) = it.why_not(DENSE, ARCHS["sm90"])
        assert reason.code == "module"
        assert reason.hint


def test_the_fastest_choice_that_runs_is_taken():
    def fails():
        raise RuntimeError("no split KV here")

    assert fastest({"one": fails, "two": int, "three": float}) == (float, "three")
    assert fastest({"one": fails}) == (fails, "one")
    with pytest.raises(RuntimeError, match="no split KV"):
        fastest({"one": fails, "two": fails})
    calls = in_turns([lambda: 1, lambda: 2])
    assert [calls() for _ in range(5)] == [1, 2, 1, 2, 1]


WHEEL = [
    (replace(cell, head_dim=128), splits) for cell in (DENSE, PAGED, FEW, MIXED) for splits in peers_decode.SPLITS[:3]
]


@pytest.mark.parametrize(("cell", "splits"), WHEEL, ids=str)
def test_the_wheel_of_fa3_is_asked_right(cell, splits, monkeypatch):
    def forward(call):
        q, k, v, *others = call.arguments
        starts, lengths, table = others[3], others[7], others[8]
        assert not any(it.numel() for place, it in enumerate(others) if place not in (3, 7, 8))
        assert call.attributes["num_splits"] == splits
        assert call.attributes["max_seqlen_q"] == max(cell.lengths_q)
        assert call.attributes["max_seqlen_k"] == (0 if cell.page else cell.seq)
        assert (call.results[2].numel() > 0) == (splits != 1)
        given = [it if it.numel() else None for it in (starts, table)]
        call.results[0].copy_(of_flash_attention(q, k, v, call.attributes["is_causal"], *given, lengths))

    served = cell.tensors("cpu")
    with wheel(monkeypatch, flash_mha_fwd=forward):
        options = {"page_table": served.page_table, "cu_seqlens_q": served.cu_seqlens_q}
        options |= {"max_seqlen_q": cell.queries, "causal": cell.causal, "num_splits": splits}
        swap = (lambda it: it) if cell.mixed else (lambda it: it.transpose(1, 2))
        caches = [it.transpose(1, 2) for it in served.caches[0]]
        out = peers_jax.flash_attn_with_kvcache(swap(served.q), *caches, cache_seqlens=served.seqlens_kv, **options)
    assert torch.equal(swap(out), attended(served.q, *served.caches[0], **cell.arguments(served)))


def test_the_command_lists_cells_and_needs_a_gpu(capsys):
    assert cli.main(["decode", "--cells", "mixed", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert CHUNKS == 4
    assert cli.main(["decode", "--cells", "mixed", "--backends", "cuda", "--peers", "none"]) == 1
    assert "Nothing to time on" in capsys.readouterr().out
