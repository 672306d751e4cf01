"""``python -m bench ladder``: refusals by name, a climb on a fake device, and the real one without a GPU."""

import json
from dataclasses import replace

import bench_fakes as fakes
import bench_ladder_fakes as ladders
import pytest
import torch
from bench_ladder_fakes import CELL

from bench import cli, ladder, ladder_facts
from bench.errors import InputError
from bench.ladder_facts import Conflicts, Record, emulate, inspect, small_problem, tasks
from bench.ladder_rungs import Rung, chain_rungs, listed_rungs, plan_rung, points_of, top_of
from bench.providers import Ours, our_providers
from bench.results import load
from bench.run import Machine
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS, CPU, by_name
from multiattn.plan.backend import BACKENDS, Plan, plan_variant
from multiattn.plan.toolchain import find_cuobjdump

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
SMALL = ("--batch", "1", "--heads", "2", "--head-dim", "16", "--seq", "48")
QUICK = ("--rounds", "3", "--sample-ms", "1")


@pytest.fixture
def fake_ladders(monkeypatch):
    """Fake backends, a fake device, fake peers."""
    ladders.install(monkeypatch)
    monkeypatch.setattr(Machine, "current", classmethod(lambda cls: fakes.machine()))
    monkeypatch.setattr(ladder, "find_peers", lambda names: tuple(map(fakes.peer, names)))


# ---------------------------------------------------------------- which rungs


def test_a_chain_has_every_rung_pinned_and_tuned_and_its_top_once(monkeypatch):
    ladders.install(monkeypatch)
    backend = registry.get("cutile")
    assert top_of(backend, CELL, CPU) == "full"
    assert top_of(backend, CELL, CPU, "math") == "math"
    names = [str(rung) for rung in chain_rungs(backend, "full")]
    assert names == ["cutile/basic@full", "cutile/math@full", "cutile/basic", "cutile/math", "cutile/full"]


def test_a_pinned_rung_has_the_config_of_the_top_less_what_it_cannot_do(monkeypatch):
    ladders.install(monkeypatch)
    math = plan_rung(Rung(backend="cutile", variant="math", pin="full"), CELL, CPU)
    assert (math.config.tile_m, math.config.stages, math.why) == (128, 2, "the config of full")
    basic = plan_rung(Rung(backend="cutile", variant="basic", pin="full"), CELL, CPU)
    assert (basic.config.tile_m, basic.config.stages) == (128, 1)
    assert basic.why == "the config of full, but for stages, which this variant cannot have"
    own = plan_rung(Rung(backend="cutile", variant="basic"), CELL, CPU)
    assert own.config.tile_m == 64
    provider = Ours(backend="cutile", variant="basic", pinned_to="full")
    assert provider.name == "cutile/basic@full"
    assert provider.plans(CELL, CELL.problem, CPU).timed == basic
    illegal = plan_rung(Rung(backend="cuda", variant="split_kv"), CELL, CPU)
    assert [reason.code for reason in illegal] == ["variant"]
    assert Ours(backend="cuda", variant="split_q", pinned_to="split_kv").why_not(CELL, CPU) == illegal


def test_a_list_is_narrowed_by_patterns(monkeypatch):
    ladders.install(monkeypatch)
    backend = registry.get("cuda")
    assert len(listed_rungs(backend)) == 4
    assert [rung.variant for rung in listed_rungs(backend, ("split_kv*",))] == ["split_kv", "split_kv+swizzle_q"]
    with pytest.raises(
        InputError, match=r"--variant: 'warp_\*' matches none of the 4 .* offered are split_q\+swizzle_q"
    ):
        listed_rungs(backend, ("split_q", "warp_*"))


def test_a_run_of_all_variants_leaves_rungs_to_the_ladder(monkeypatch):
    ladders.install(monkeypatch)
    names = {provider.name for provider in our_providers(("cutile", "cuda"), "all")}
    assert names == {"cutile/full", "cutile/pointer", "cuda/split_q+swizzle_q"}
    assert [provider.name for provider in our_providers(("cutile",), "basic")] == ["cutile/basic"]
    with pytest.raises(
        InputError, match=r"one of cutile/full, cutile/pointer, or one of 2 rungs \(python -m bench lad"
    ):
        our_providers(("cutile",), "wide")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--backend: got none; allowed triton, cutile, cuda"),
        (["--backend", "cudnn"], "--backend: got 'cudnn'; allowed triton, cutile, cuda"),
        (["--backend", "cutile", "--top", "ful"], "--top: variant: got 'ful'; cutile has full, math, basic, pointer"),
        (["--backend", "cuda", "--top", "split_q"], "--top: the variants of cuda are a list, not a chain"),
        (["--backend", "cutile", "--variant", "b*"], "--variant: cutile has a chain; name its end with --top"),
        (["--backend", "cuda", "--variant", "b*"], "--variant: 'b*' matches none of the 4 forward variants of cuda"),
        (["--backend", "cutile", "--head-dim", "4096"], "head_dim: got 4096; allowed multiples of 8 up to 1024"),
        (["--backend", "cuda", "--arch", "sm10"], "argument --arch: invalid choice: 'sm10'"),
    ],
)
def test_what_there_is_not_is_refused_by_name(monkeypatch, capsys, arguments, message):
    ladders.install(monkeypatch)
    monkeypatch.setattr(Machine, "current", classmethod(lambda cls: None))
    with pytest.raises(SystemExit) as ended:
        cli.main(["ladder", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- on a device


@pytest.mark.usefixtures("fake_ladders")
def test_a_chain_is_timed_in_turns_and_everything_is_written(tmp_path, capsys):
    arguments = ["--backend", "cutile", *SMALL, "--seq", "32", *QUICK, "--out", str(tmp_path)]
    assert cli.main(["ladder", *arguments]) == 0
    said = capsys.readouterr().out
    rows = load(tmp_path / "ladder_cutile.json")
    assert {row.contender for row in rows} == {
        "cutile/basic@full", "cutile/math@full", "cutile/basic", "cutile/math", "cutile/full",
        "sdpa-flash", "sdpa-cudnn", "tilegym",
    }  # fmt: skip
    assert all(row.measured is not None and row.regime == "device" for row in rows)
    assert len({row.run for row in rows}) == 2  # one a cell: all took turns
    basic = next(row for row in rows if row.contender == "cutile/basic@full")
    assert basic.plan["config"] == {"tile_m": 128, "tile_n": 32, "stages": 1}
    for text in ("Summary, pinned", "Summary, tuned", "cutile up to full"):
        assert text in said
    assert {path.name for path in tmp_path.iterdir()} == {
        "ladder_cutile.json", "ladder_cutile.md", "ladder_cutile.html", "ladder_cutile.log"
    }  # fmt: skip
    log = (tmp_path / "ladder_cutile.log").read_text()
    assert "python -m bench ladder --backend cutile --head-dim 16 --seq 48 --seq 32 --batch 1 --heads 2" in log
    assert "Summary, pinned" in log
    assert cli.main(["ladder", *arguments]) == 0
    assert load(tmp_path / "ladder_cutile.json") == rows  # what this setup has measured is not measured again


@pytest.mark.usefixtures("fake_ladders")
def test_another_arch_than_the_gpu_s_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["ladder", "--backend", "cutile", "--arch", "sm80"])
    assert "--arch: got sm80, but this GPU is cpu" in capsys.readouterr().err


@pytest.mark.usefixtures("fake_ladders")
def test_another_top_has_a_file_of_its_own(tmp_path):
    assert cli.main(["ladder", "--backend", "cutile", "--top", "pointer", *SMALL, *QUICK, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "ladder_cutile_pointer.json").exists()
    assert "pointer" in (tmp_path / "ladder_cutile_pointer.md").read_text()


def fake_inspect_all(wanted, **_):
    """Records without a compiler."""
    records = []
    for task in wanted:
        plan = plan_rung(task.rung, task.cell, CPU)
        if isinstance(plan, tuple):
            records.append(Record(rung=task.rung, arch="sm90", cell=task.cell, seqs=task.seqs, reasons=plan))
        else:
            records.append(replace(ladders.record(task.rung.variant), cell=task.cell, seqs=task.seqs))
    return records


@pytest.mark.usefixtures("fake_ladders")
def test_a_list_has_every_point_timed_or_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ladder_facts, "inspect_all", fake_inspect_all)
    arguments = ["--backend", "cuda", *SMALL, *QUICK, "--out", str(tmp_path)]
    assert cli.main(["ladder", *arguments]) == 0
    rows = {row.contender: row for row in load(tmp_path / "ladder_cuda.json")}
    assert set(rows) == {"sdpa-flash", *(f"cuda/{variant.name}" for variant in ladders.POINTS)}
    assert rows["cuda/split_kv"].reasons
    assert rows["cuda/split_q"].measured
    said = capsys.readouterr().out
    assert "Points that do not run" in said
    assert "split_kv, split_kv+swizzle_q" in said
    records = {it.rung.variant: it for it in ladder_facts.load(tmp_path / "ladder_cuda_compiled.json")}
    assert records["split_q"].kernels


@pytest.mark.usefixtures("fake_ladders")
def test_a_list_is_kept_on_record_and_a_narrowed_one_is_nobody_s(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder_facts, "inspect_all", fake_inspect_all)
    monkeypatch.setattr(ladder_facts, "results_root", lambda: tmp_path / "results")
    monkeypatch.setattr(ladder, "workplace", lambda: tmp_path)
    monkeypatch.setattr(ladder, "results_dir", lambda gpu: tmp_path / "results" / "h200")
    assert cli.main(["ladder", "--backend", "cuda", *SMALL, *QUICK, "--record"]) == 0
    (compiled,) = (tmp_path / "results" / "compiled").iterdir()
    assert len(ladder_facts.load(compiled)) == 4
    kept = tmp_path / "results" / "h200" / "ladder_cuda.json"
    before = kept.read_text()
    assert cli.main(["ladder", "--backend", "cuda", "--variant", "split_q", *SMALL, *QUICK, "--record"]) == 0
    assert len(ladder_facts.load(compiled)) == 4
    assert kept.read_text() == before
    assert json.loads((tmp_path / "out" / "bench" / "ladder_cuda.json").read_text())["suite"] == "ladder_cuda"


@pytest.mark.usefixtures("fake_ladders")
def test_a_broken_rung_is_an_error_of_its_row_and_of_the_command(tmp_path, monkeypatch):
    eager = registry.get("cutile")

    def prepare(plan):
        if plan.variant == "math":
            raise RuntimeError("ptxas: out of luck")
        return eager.forward.prepare(plan)

    broken = replace(eager, forward=replace(eager.forward, prepare=prepare))
    monkeypatch.setattr(registry, "get", lambda name: broken)
    assert cli.main(["ladder", "--backend", "cutile", *SMALL, *QUICK, "--out", str(tmp_path)]) == 1
    errors = [row.contender for row in load(tmp_path / "ladder_cutile.json") if row.error]
    assert errors == ["cutile/math@full", "cutile/math"]


# ---------------------------------------------------------------- without one


def test_lengths_of_one_config_are_one_task(monkeypatch):
    ladders.install(monkeypatch)
    cells = (CELL, replace(CELL, seq=96), replace(CELL, head_dim=32))
    rungs = (Rung(backend="cutile", variant="math"), Rung(backend="cuda", variant="split_q"))
    found = tasks(rungs, cells, by_name("sm90"), emulate=True)
    assert [(task.rung.variant, task.cell.head_dim, task.seqs, task.emulate) for task in found] == [
        ("math", 16, (48, 96), False), ("math", 32, (48,), False),
        ("split_q", 16, (48, 96), True), ("split_q", 32, (48,), True),
    ]  # fmt: skip


@needs_no_gpu
def test_every_backend_resolves_its_ladder_on_every_arch():
    parser = cli._parser()
    for name in BACKENDS:
        for arch in ("sm80", "sm90", "sm120"):
            climb = ladder.resolve(parser.parse_args(["ladder", "--backend", name, "--arch", arch]), None)
            assert climb.rungs
            assert climb.arch == ARCHS[arch]
            plans = [plan_rung(rung, climb.cells[0], climb.arch) for rung in climb.rungs]
            assert any(isinstance(plan, Plan) for plan in plans)
    assert ladder.resolve(parser.parse_args(["ladder", "--backend", "cutile"]), None).cells[-1].seq == 16384


def offered_cuda():
    backend = registry.get("cuda")
    for reasons in (backend.probe_compiler(), backend.probe(CPU)):
        if reasons:
            pytest.skip("; ".join(map(str, reasons)))
    return backend, next(variant for variant in points_of(backend) if not variant.only_named)


@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")
@needs_no_gpu
def test_the_list_without_a_gpu(tmp_path, capsys):
    """One real point: compiled, run on the CPU, said plainly not to be timed."""
    _, variant = offered_cuda()
    arguments = [
        "--backend",
        "cuda",
        "--variant",
        variant.name,
        "--arch",
        "sm80",
        "--jobs",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(["ladder", *arguments]) == 0
    said = capsys.readouterr().out
    assert "Nothing was timed: gpu: got none on this machine" in said
    (record,) = ladder_facts.load(tmp_path / "ladder_cuda_compiled.json")
    assert record.arch == "sm80"
    assert record.kernel.registers > 0
    assert record.kernel.smem_bytes > 0
    assert record.emulated.count == 0  # swizzled in all three
    assert record.emulated.ldmatrix > 0
    assert not (tmp_path / "ladder_cuda.json").exists()  # no time, no row


def test_the_emulated_problem_has_the_config_of_the_timed_one():
    backend, variant = offered_cuda()
    plan = plan_variant(backend, variant, replace(CELL, seq=1000).problem, by_name("sm90"))
    small = small_problem(plan)
    assert (small.seq_q, small.seq_kv) == (plan.config.tile_m, 2 * plan.config.tile_n)
    assert (small.head_dim, small.dtype, small.heads_q) == (16, "fp16", 1)


def test_emulation_says_what_the_machine_lacks(monkeypatch):
    ladders.install(monkeypatch)
    plan = plan_rung(Rung(backend="cuda", variant="split_q"), CELL, by_name("sm90"))
    (reason,) = ladders.never(CELL.problem, CPU, plan.config)
    lacking = replace(registry.get("cuda"), probe=lambda arch: (reason,))
    monkeypatch.setattr(registry, "get", lambda name: lacking)
    assert emulate(plan) == Conflicts(why=str(reason))


def test_a_point_that_is_illegal_is_not_compiled(monkeypatch):
    ladders.install(monkeypatch)
    (task,) = tasks((Rung(backend="cuda", variant="split_kv"),), (CELL,), by_name("sm90"))
    made = inspect(task)
    assert not made.kernels
    assert "share_qkv with split_kv" in made.text


def broken_inspect(task):
    raise RuntimeError(f"no luck with {task.rung}")


def test_what_a_process_raises_is_its_rungs_error():
    task = ladder_facts.Task(rung=Rung(backend="cuda", variant="x"), arch="sm90", cell=CELL, seqs=(48,))
    said = []
    (made,) = ladder_facts.inspect_all([task], jobs=1, say=said.append, function=broken_inspect)
    assert made.error == "RuntimeError: no luck with cuda/x"
    assert said == ["[1/1] compiled: cuda/x: RuntimeError: no luck with cuda/x"]
