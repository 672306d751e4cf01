"""bench.run and bench.results: a row is measured xor reasons xor error, and a run can be taken up again."""

from dataclasses import asdict, fields, replace

import bench_fakes as fakes
import pytest
import torch

import multiattn
from bench.contenders import Ours
from bench.decode_cells import DecodeCell
from bench.matrix import InputError
from bench.results import LOST_DEVICE, NO_GPU, Measured, Row, dumps, load, one_run
from bench.run import DeviceLostError, run
from multiattn.plan.backend import get

OURS = Ours(backend="reference")


def raises(*_):
    raise RuntimeError("no kernel for you")


def halves(q, k, v, causal):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal) / 2


def test_a_measured_row_has_all_that_the_contract_asks(tmp_path):
    (row,) = fakes.run_once(tmp_path, OURS)
    assert row.measured.time_ms == 0.5
    assert row.measured.tflops == pytest.approx(4 * 2 * (48 * 49 // 2) * 16 / 0.5e-3 / 1e12, rel=1e-5)
    assert 0 < row.measured.error_ratio <= 1
    assert row.plan == {"variant": "eager", "config": None, "why": "the variant has no tiles to choose"}
    assert row.command == "python -m bench run --suite smoke"
    assert (row.measured.rounds, row.measured.sample_ms) == (3, 1.0)
    assert row.environment.commit
    assert row.environment.source
    assert row.environment.versions["torch"] == torch.__version__
    assert load(tmp_path / "smoke.json") == [row]


def test_a_failing_peer_is_a_row_and_the_run_goes_on(tmp_path):
    rows = fakes.run_once(tmp_path, fakes.peer("broken", raises), fakes.peer("wrong", halves), fakes.peer("sdpa"), OURS)
    assert [row.contender for row in rows] == ["broken", "wrong", "sdpa", "reference"]
    broken, wrong, sdpa, ours = rows
    assert broken.error == "RuntimeError: no kernel for you"
    assert "computes something else" in wrong.error
    assert sdpa.measured
    assert sdpa.detail == "a fake"
    assert ours.measured


def launching(monkeypatch, forward):
    """Let the reference's forward be `forward(launcher, operands)`, which is given the right launcher."""
    right = get("reference")

    def prepare(plan):
        launcher = right.forward.prepare(plan)
        return lambda operands: forward(launcher, operands)

    wrong = replace(right, forward=replace(right.forward, prepare=prepare))
    monkeypatch.setattr("multiattn.plan.backend.get", lambda name: wrong)


def test_ours_is_held_to_parity_before_it_is_timed(tmp_path, monkeypatch):
    def wrong(launcher, operands):
        launcher(operands)
        operands.out[0, 0, -1, 0] += 0.5

    launching(monkeypatch, wrong)
    (row,) = fakes.run_once(tmp_path, OURS)
    assert row.error.startswith("multiattn.truth.tolerance.Mismatch: out is off")
    assert row.measured is None


def test_what_an_earlier_launch_wrote_is_no_result(monkeypatch):
    launches = []

    def once(launcher, operands):
        launches.append(1)
        if len(launches) == 1:
            launcher(operands)

    launching(monkeypatch, once)
    contender = OURS.prepare(fakes.CELL, fakes.CELL.tensors("cpu"), fakes.machine().arch)
    first, second = ({name: it.isnan() for name, it in contender.output().items()} for _ in range(2))
    assert not any(it.any() for it in first.values())
    assert all(it.all() for it in second.values())


def test_without_a_gpu_every_row_carries_its_reason(tmp_path):
    rows = run(fakes.job(OURS, fakes.peer("sdpa")), None, fakes.store(tmp_path), quiet=True)
    assert [row.reasons for row in rows] == [(NO_GPU,), (NO_GPU,)]
    assert load(tmp_path / "smoke.json") == rows


@pytest.mark.parametrize("outcomes", [{}, {"reasons": (NO_GPU,), "error": "x"}])
def test_a_row_is_exactly_one_of_three(outcomes):
    with pytest.raises(ValueError, match="measured, or carries reasons, or carries an error"):
        Row(cell=fakes.CELL, contender="a", regime="device", environment=fakes.SETUP, command="c", **outcomes)


def test_every_field_of_a_row_comes_back_from_its_file(tmp_path):
    """Each field of a timing has a value of its own, those of decode included; none is the default."""
    kinds = {"int": int, "float": float, "bool": lambda place: True}
    own = {
        it.name: kinds[str(it.type).removesuffix(" | None")](place)
        for place, it in enumerate(fields(Measured), start=2)
    }
    plan = {"variant": "a", "config": {"tile_m": 64}, "why": "b"}
    made = replace(fakes.row("cuda", 1.0), plan=plan, detail="how", measured=Measured(**own))
    cell = DecodeCell(**{**fakes.CELL.as_dict(), "causal": False}, page=16)
    rows = [made, replace(made, cell=cell, measured=None, reasons=(NO_GPU,)), replace(made, measured=None, error="bad")]
    (tmp_path / "x.json").write_text(dumps("smoke", rows))
    found = load(tmp_path / "x.json")
    assert found == rows
    assert asdict(found[0].measured) == own


def test_rows_timed_together_carry_one_run(tmp_path):
    cells = (fakes.CELL, replace(fakes.CELL, seq=32))
    rows = fakes.run_once(tmp_path, OURS, fakes.peer("sdpa"), fakes.peer("broken", raises), cells=cells)
    runs = {cell: {row.run for row in rows if row.cell == cell} for cell in cells}
    assert all(len(found) == 1 for found in runs.values())
    assert runs[cells[0]] != runs[cells[1]]
    assert load(tmp_path / "smoke.json") == rows
    with pytest.raises(ValueError, match="a measured row names its run"):
        replace(rows[0], run="")


def test_a_line_is_of_the_newest_complete_run():
    old = [fakes.row(name, 1.0, run="2026-11-20") for name in ("cuda", "triton", "sdpa-cudnn")]
    new = [fakes.row(name, 2.0, run="2026-11-21") for name in ("cuda", "sdpa-cudnn")]
    assert one_run([*old, *new]) == new
    lone = fakes.row("cuda", 3.0, run="2026-11-22")  # nobody took turns with it
    assert one_run([*old, *new, lone]) == new
    assert one_run([lone]) == [lone]
    refused = replace(lone, contender="fa2", measured=None, reasons=(NO_GPU,), run="")
    other = replace(refused, environment=replace(fakes.SETUP, source="def"))
    assert one_run([*new, refused, other]) == [*new, refused]


def budget(**changes):
    return lambda job: replace(job, budget=replace(fakes.BUDGET, **changes))


AGAIN = {
    "nothing new": (lambda job: job, False),
    "as it is asked for": (lambda job: replace(job, fresh=True), True),
    "a budget as good": (budget(rounds=2, sample_ms=0.5), False),
    "more rounds": (budget(rounds=4), True),
    "longer samples": (budget(sample_ms=2.0), True),
    "other sources": (lambda job: job, True),
    "rows of two runs": (lambda job: job, True),
    "a new contender": (lambda job: replace(job, providers=(*job.providers, fakes.peer("new"))), True),
}


@pytest.mark.parametrize("case", AGAIN)
def test_a_cell_takes_its_turns_again_only_for_a_reason(tmp_path, monkeypatch, case):
    change, runs = AGAIN[case]
    first, clock = fakes.run_once(tmp_path, OURS, fakes.peer("sdpa")), fakes.FakeClock()
    if case == "other sources":
        monkeypatch.setattr("bench.results.source_digest", lambda: "other")
    if case == "rows of two runs":
        fakes.run_once(tmp_path, fakes.peer("sdpa"), fresh=True)
    job = change(fakes.job(OURS, fakes.peer("sdpa")))
    again = run(job, fakes.machine(clock), fakes.store(tmp_path), quiet=True)
    assert {name for _, name, _ in clock.log} == ({"run_forward", "partial"} if runs else set())
    assert runs or again == first


def test_in_the_call_regime_the_call_itself_is_checked(tmp_path, monkeypatch):
    right = multiattn.fmha
    monkeypatch.setattr(multiattn, "fmha", lambda *args, **options: right(*args, **options) * 1.5)
    (row,) = fakes.run_once(tmp_path, OURS, regime="call")
    assert "out is off" in row.error
    monkeypatch.undo()
    (row,) = fakes.run_once(tmp_path, OURS, regime="call")
    assert row.measured


@pytest.mark.parametrize("text", ["[]", "not JSON", '{"schema": 4}', '{"schema": 5, "environments": [1]}'])
def test_a_file_that_is_not_ours_is_named(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"x\.json: not a file of schema 5"):
        load(path)


def test_one_who_takes_the_device_down_is_left_out_of_the_next_run(tmp_path):
    def synchronize():
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    broken = []

    def breaks(*_):
        broken.append(1)
        raise RuntimeError("illegal memory access")

    job = fakes.job(fakes.peer("bad", breaks), OURS)
    with pytest.raises(DeviceLostError, match="bad in B1 H2 N48"):
        run(job, fakes.machine(synchronize=synchronize), fakes.store(tmp_path), quiet=True)
    (lost,) = load(tmp_path / "smoke.json")
    assert lost.error.startswith(LOST_DEVICE)
    broken.clear()
    bad, ours = run(job, fakes.machine(), fakes.store(tmp_path), quiet=True)
    assert bad == lost
    assert ours.measured
    bad, _ = run(replace(job, fresh=True), fakes.machine(), fakes.store(tmp_path), quiet=True)
    assert bad.error == "RuntimeError: illegal memory access"
