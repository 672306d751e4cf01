"""Lengths that only the device knows: whatever they are, no kernel reads or writes outside of its tensors.

Calls on a CPU refuse such values, so these tests launch below that check. Outputs lie in memory with a mark all around,
inputs in NaN, which would reach outputs.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cuda_runs import on_cpu
from packed_lists import WRONG, WRONG_ROWS, ranges

from multiattn import fmha_kvcache, fmha_varlen, fmha_varlen_backward
from multiattn.operands import Options
from multiattn.plan import backend as registry
from multiattn.plan.arch import CPU
from multiattn.plan.backend import make_plan
from multiattn.problem import problem_of
from multiattn.varlen import Lengths, pack, with_packing
from parity.launch import poisoned_workspaces

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of lengths go to kernels as on a GPU, where nobody reads them before. Nor does cuTile's interpreter refuse
    two sequences that have one row.
    """
    monkeypatch.setattr("multiattn.run.values.can_be_read", lambda *tensors: False)
    monkeypatch.setattr("multiattn.run.ops.are_read", lambda device: False)
    monkeypatch.setattr("multiattn.cutile.cpu.memory.Ledger.check", lambda *found: None)


MARK = 77.0
GUARD = 3000
"""Rows on either side: more than any length here is off by, but for those that would leave all memory."""
HEADS = 4, 2


class Guarded:
    """Rows ``[1, heads, rows, ...]`` between others: marked ones, or NaN."""

    def __init__(self, rows: int, heads: int, head_dim: int | None, fill: float, dtype: torch.dtype = torch.float16):
        inner = rows * heads * (head_dim or 1)
        guard = GUARD * heads * (head_dim or 1)
        self.memory = torch.full((guard + inner + guard,), fill, dtype=dtype)
        its_rows = self.memory[guard : guard + inner]
        if head_dim is None:
            self.rows = its_rows.view(1, heads, rows)
        else:
            self.rows = its_rows.view(1, rows, heads, head_dim).transpose(1, 2)
        self._around = self.memory[:guard], self.memory[guard + inner :]
        self.bits = torch.cat(self._around).clone()

    def filled(self, seed: int) -> Guarded:
        """Itself, with numbers in its own rows."""
        self.rows.normal_(generator=torch.Generator().manual_seed(seed))
        return self

    def check(self, *, whole: bool = True) -> None:
        """Nothing around the rows was written, and with `whole` nothing from around others is among them."""
        assert torch.equal(torch.cat(self._around), self.bits)
        assert not (whole and self.rows.isnan().any())


def run(
    given: tuple[list[int], list[int]], backend: str, forward: str, backward: str, head_dim: int = 16, **asked: Any
) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv of a packed batch, of whatever starts are given."""
    rows_q, rows_kv = every = asked.pop("rows", WRONG_ROWS)
    q, dout = (Guarded(rows_q, HEADS[0], head_dim, torch.nan).filled(seed).rows for seed in (1, 2))
    k, v = (Guarded(rows_kv, HEADS[1], head_dim, torch.nan).filled(seed).rows for seed in (3, 4))
    longest = asked.pop("longest", (rows_q, rows_kv))
    lengths = Lengths(*(torch.tensor(it, dtype=torch.int32) for it in given), *longest)
    unset = dict.fromkeys(("window", "scale", "variant", "deterministic"))
    options = Options.of(**unset, causal=asked.pop("causal", True), backend=backend)
    bias = asked.pop("bias", None)
    packed = pack(*(it[0].transpose(0, 1) for it in (q, k, v)), lengths)
    operands, options = with_packing(packed, options, lengths, None, None, bias, None)
    problem = problem_of(operands, options)
    made = {
        "out": Guarded(rows_q, HEADS[0], head_dim, MARK),
        "lse": Guarded(rows_q, HEADS[0], None, MARK, torch.float32),
        "dq": Guarded(rows_q, HEADS[0], head_dim, MARK),
        "dk": Guarded(rows_kv, HEADS[1], head_dim, MARK),
        "dv": Guarded(rows_kv, HEADS[1], head_dim, MARK),
    }
    results = {name: it.rows for name, it in made.items()}
    of_bias = () if bias is None else (torch.full((3, *bias.shape), MARK),)
    operands = operands._replace(dout=dout, **results, dcaptured=tuple(it[1].zero_() for it in of_bias))
    for direction, variant in (("forward", forward), ("backward", backward)):
        plan = make_plan(registry.get(backend), problem, CPU, direction=direction, variant=variant, probe=False)
        with poisoned_workspaces():
            of_forward = dict.fromkeys(("dout", "dq", "dk", "dv")) if direction == "forward" else {}
            registry.get(backend).op(direction).prepare(plan)(operands._replace(**of_forward))
    overlap = any(sum(length for _, length in ranges(it, rows)) > rows for it, rows in zip(given, every, strict=True))
    for name, it in made.items():  # a row of two sequences has the lse of either: with that of the other all may be inf
        it.check(whole=name in ("out", "lse") or not overlap)
    assert all((it[[0, 2]] == MARK).all() for it in of_bias)
    return tuple(results.values())


KERNELS = [
    pytest.param("reference", "eager", "eager", id="reference"),
    pytest.param("triton", "full", "atomic", id="triton"),
    pytest.param("triton", "full", "two_pass", id="triton_two_pass"),
    pytest.param("triton", "warp_specialized", "warp_specialized", id="gluon"),
    pytest.param("triton", "warp_specialized", "warp_specialized_two_pass", id="gluon_two_pass"),
    pytest.param("cutile", "full", "atomic", id="cutile"),
    pytest.param("cutile", "full", "two_pass", id="cutile_two_pass"),
    pytest.param("cuda", "split_q", "atomic", id="cuda", marks=on_cpu),
    pytest.param("cuda", "split_q", "two_pass", id="cuda_two_pass", marks=on_cpu),
    pytest.param("cuda", "wgmma", "wgmma", id="wgmma", marks=on_cpu),
    pytest.param("cuda", "wgmma", "wgmma_two_pass", id="wgmma_two_pass", marks=on_cpu),
]


def nightly_but(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Lists of tiles are made of all of these by tests of their own: two show what kernels do with them."""
    return () if name in ("a_later_0", "beyond") else (pytest.mark.nightly,)


@pytest.mark.parametrize(("backend", "forward", "backward"), KERNELS)
@pytest.mark.parametrize("given", [pytest.param(it, id=name, marks=nightly_but(name)) for name, it in WRONG.items()])
def test_packed_kernels_stay_inside_their_tensors(given, backend, forward, backward):
    run(given, backend, forward, backward)


@pytest.mark.parametrize(("backend", "forward", "backward"), KERNELS)
def test_rows_outside_of_all_sequences_are_zeros(backend, forward, backward):
    """Before the first as behind the last; the sequences between are what they are by themselves.

    Tiles of 64 rows before the first would have the statistics of the second.
    """
    given, every = ([133, 156, 188], [21, 21, 99]), (196, 130)
    found = run(given, backend, forward, backward, rows=every)
    rows = [slice(it[0], it[-1]) for it in given]
    drawn = [Guarded(every[0], HEADS[0], 16, 0.0).filled(seed).rows[:, :, rows[0]] for seed in (1, 2)]
    drawn += [Guarded(every[1], HEADS[1], 16, 0.0).filled(seed).rows[:, :, rows[1]] for seed in (3, 4)]
    q, dout, k, v = (it[0].transpose(0, 1) for it in drawn)
    starts = (torch.tensor(it, dtype=torch.int32) - it[0] for it in given)
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=True))
    named |= {"max_seqlen_q": 40, "max_seqlen_kv": 99, "causal": True, "backend": "reference"}
    out, lse = fmha_varlen(q, k, v, **named, return_lse=True)
    gradients = fmha_varlen_backward(q, k, v, out, lse, dout, **named)
    own = [rows[0], rows[0], rows[0], rows[1], rows[1]]
    wanted = [out, lse.T, *gradients]
    for got, want, its_rows, around in zip(found, wanted, own, (0, -torch.inf, 0, 0, 0), strict=True):
        got = got[0].transpose(0, 1)  # [T, heads, D], or [T, heads]
        torch.testing.assert_close(got[its_rows].float(), want.float(), atol=1e-2, rtol=1e-2)
        assert (torch.cat([got[: its_rows.start], got[its_rows.stop :]]) == around).all()


WITH_BIAS = ("triton", "triton_two_pass", "cutile", "cuda", "cuda_two_pass")


@pytest.mark.parametrize(("backend", "forward", "backward"), [it for it in KERNELS if it.id in WITH_BIAS])
def test_a_bias_is_read_as_far_as_it_goes(backend, forward, backward):
    """Sequences that are longer than they were said to be."""
    bias = torch.full((3, 1, 1, 35, 17), torch.nan).half()
    bias[1] = 0.5
    run(([0, 100], [0, 130]), backend, forward, backward, bias=bias[1].requires_grad_(), longest=(35, 17))


# ---------------------------------------------------------------- caches

CACHED = [
    pytest.param("reference", None, id="reference"),
    pytest.param("triton", None, id="triton"),
    pytest.param("cutile", None, id="cutile"),
    pytest.param("cuda", None, id="cuda", marks=on_cpu),
    pytest.param("cuda", "split_keys_wgmma", id="wgmma", marks=on_cpu),
]


MANY_SPLITS = pytest.param(17, marks=pytest.mark.nightly)


@pytest.mark.parametrize("splits", [1, 3, MANY_SPLITS])
@pytest.mark.parametrize("page", [None, 5, pytest.param(16, marks=pytest.mark.nightly)], ids=["dense", "5", "16"])
@pytest.mark.parametrize(("backend", "variant"), CACHED)
def test_kernels_of_caches_stay_inside_their_tensors(backend, variant, page, splits):
    choose = random.Random(0)
    rows_q, room = 40, 80
    q = Guarded(rows_q, HEADS[0], 16, torch.nan).filled(1).rows[0].transpose(0, 1)
    entries, rows = (4, room) if page is None else (4 * room // page, page)
    caches = [torch.full((entries + 200, rows, HEADS[1], 16), torch.nan).half() for _ in range(2)]
    k, v = (it[100:-100].normal_().transpose(1, 2) for it in caches)
    for turn in range(4):
        starts = [choose.choice([-(2**31), -7, 0, 3, 11, 25, 40, 41, 900, 2**31 - 1]) for _ in range(5)]
        lengths = [choose.choice([-(2**31), -1, 0, 7, 80, 81, 200, 2**31 - 1]) for _ in range(4)]
        if turn == 0:  # each sequence has queries, and they would reach beyond every end
            starts, lengths = [-7, 3, 11, 25, 60], [200] * 4
        given: dict[str, Any] = {"seqlens_kv": torch.tensor(lengths, dtype=torch.int32), "causal": True}
        given |= {"cu_seqlens_q": torch.tensor(starts, dtype=torch.int32), "max_seqlen_q": rows_q}
        if page is not None:
            given["page_table"] = torch.arange(entries, dtype=torch.int32).view(4, -1)
        out = Guarded(rows_q, HEADS[0], 16, MARK)
        out.rows.fill_(0.0)
        written = out.rows[0].transpose(0, 1)
        fmha_kvcache(q, k, v, **given, num_splits=splits, out=written, backend=backend, variant=variant)
        out.check(whole=splits == 1)  # merged, rows that no sequence has are made of parts that nobody wrote


@pytest.mark.parametrize("splits", [3, MANY_SPLITS])
@pytest.mark.parametrize(("backend", "variant"), CACHED)
def test_queries_outside_of_all_sequences_are_left_as_they_are(backend, variant, splits):
    q = torch.randn(40, HEADS[0], 16).half()
    k, v = torch.randn(2, 2, HEADS[1], 80, 16).half()
    given: dict[str, Any] = {"seqlens_kv": torch.tensor([80, 33], dtype=torch.int32), "num_splits": splits}
    given |= {"cu_seqlens_q": torch.tensor([7, 20, 32], dtype=torch.int32), "max_seqlen_q": 13}
    out = torch.full_like(q, MARK)
    fmha_kvcache(q, k, v, **given, out=out, backend=backend, variant=variant)
    want = fmha_kvcache(q, k, v, **given, backend="reference")
    torch.testing.assert_close(out[7:32], want[7:32], atol=1e-2, rtol=1e-2)
    assert (torch.cat([out[:7], out[32:]]) == MARK).all()
