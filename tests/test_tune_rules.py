"""Sweeps with made-up rates: the rules that they give, what is kept of them, the later steps of a search, spills."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import bench_fakes as fakes
import pytest

from bench import cli, tune, tune_finals, tune_refine, tune_results, tune_rules
from bench.errors import InputError
from bench.matrix import SUITES
from bench.tune_results import Sweep, Tried
from multiattn import tuned
from multiattn.arch import ARCHS, GPUS
from multiattn.backend import Plan, get, make_plan
from multiattn.config import Config, Rule
from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.problem import Problem
from multiattn.support import Reason
from parity.tolerance import Mismatch

SETUP = replace(fakes.SETUP, versions={"nvidia-cuda-nvrtc": "13.0.88"})
STANDARD = {(cell.head_dim, cell.causal, cell.seq): cell for cell in SUITES["standard"]}
WIDE, TALL, SMALL = ({"tile_m": m, "tile_n": n} for m, n in ((128, 64), (128, 48), (128, 32)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Config):
    turns: bool = False
    share: float = 0.0
    order: str = "static"


def sweep(rates, *, head_dim=128, causal=False, seq=4096, rule=SMALL, setup=SETUP, **other):
    """A sweep of WIDE, TALL and SMALL with these TFLOPS; None is a failure."""
    tried = tuple(
        Tried(
            name=f"cuda/wgmma tile_m={config['tile_m']} tile_n={config['tile_n']}",
            config=config,
            is_rule=config == rule,
            tflops=rate,
            failure="" if rate else "SpillsError: spills",
        )
        for config, rate in zip((WIDE, TALL, SMALL), rates, strict=True)
    )
    made = {"backend": "cuda", "variant": "wgmma", "yardstick": "sdpa-cudnn", "yardstick_tflops": 650.0, **other}
    return Sweep(cell=STANDARD[head_dim, causal, seq], environment=setup, tried=tried, **made)


def bands(sweeps):
    return [
        (it.head_dim_min, it.head_dim_max, it.causal, it.seq_min, it.seq_max, it.config)
        for it in tune_rules.derive(sweeps)
    ]


# ---------------------------------------------------------------- bands


def test_one_sweep_speaks_for_every_length_and_all_smaller_head_dims():
    assert bands([sweep((600, 610, 500))]) == [(1, 128, False, 0, None, TALL)]


def test_head_dims_reach_down_to_the_next_and_masks_are_apart():
    sweeps = [
        sweep((600, 500, 400), head_dim=256),
        sweep((500, 600, 400), head_dim=64),
        sweep((600, 500, 400), head_dim=128),
        sweep((500, 600, 400), head_dim=128, causal=True),
    ]
    assert bands(sweeps) == [
        (1, 64, False, 0, None, TALL),
        (65, 128, False, 0, None, WIDE),
        (129, 256, False, 0, None, WIDE),
        (1, 128, True, 0, None, TALL),
    ]


def test_a_head_dim_speaks_for_its_class():
    """That of 80 is up to 96: as wide a tile has room there."""
    between = replace(sweep((600, 500, 400)), cell=replace(STANDARD[128, False, 4096], head_dim=80))
    assert bands([between]) == [(1, 96, False, 0, None, WIDE)]
    assert [band[:2] for band in bands([sweep((500, 600, 400)), between, sweep((500, 600, 400), head_dim=64)])] == [
        (1, 64),
        (65, 96),
        (97, 128),
    ]
    both = [between, replace(between, cell=replace(between.cell, head_dim=96))]
    assert bands(both) == [(1, 96, False, 0, None, WIDE)], "of one class together"


def test_what_does_not_fit_the_widest_of_its_class_gives_no_rule():
    """Three warpgroups that store from registers under a causal mask: room at D=144, none at 160."""
    crowded = {"tile_m": 192, "tile_n": 64, "tma_store": False}
    made = sweep((600, 500, 400), causal=True)
    tried = (Tried(name="cuda/wgmma crowded", config=crowded, tflops=700.0), *made.tried)
    at_144 = replace(made, cell=replace(made.cell, head_dim=144), tried=tried)
    assert bands([at_144]) == [(1, 160, True, 0, None, WIDE)]
    assert bands([replace(at_144, cell=replace(at_144.cell, head_dim=128))])[0][-1] == crowded


def test_lengths_meet_at_the_geometric_middle():
    sweeps = [sweep((500, 600, 400), seq=1024), sweep((600, 500, 400), seq=4096)]
    assert [band[3:] for band in bands(sweeps)] == [(0, 2048, TALL), (2049, None, WIDE)]


def test_a_config_within_a_percent_is_kept_for_its_neighbours_sake():
    near = [sweep((600, 595, 400), seq=512), sweep((500, 600, 400), seq=1024), sweep((500, 600, 599), seq=2048)]
    assert [band[3:] for band in bands(near)] == [(0, None, TALL)]
    far = [sweep((600, 593, 400), seq=512), *near[1:]]
    assert [band[3:] for band in bands(far)] == [(0, 724, WIDE), (725, None, TALL)]


def test_small_losses_that_add_up_to_a_percent_are_worth_a_rule():
    sweeps = [sweep((600, 500, 400), seq=512), *(sweep((596, 600, 400), seq=seq) for seq in (1024, 2048))]
    assert [band[3:] for band in bands(sweeps)] == [(0, 724, WIDE), (725, None, TALL)]
    assert [band[3:] for band in bands(sweeps[:2])] == [(0, None, WIDE)]


def test_of_what_a_band_shares_the_best_of_all_its_lengths_is_taken():
    sweeps = [sweep((600, 599, 400), seq=512), sweep((596, 600, 400), seq=1024)]
    assert [band[3:] for band in bands(sweeps)] == [(0, None, TALL)]


def test_a_rule_is_kept_where_nothing_gains_more_than_readings_scatter():
    one = [sweep((600, 599, 500), rule=TALL, seq=512), sweep((599, 600, 598), rule=SMALL, seq=1024)]
    assert bands(one)[0][-1] == TALL, "SMALL is a rule, too, but loses more than a tie"
    assert bands([sweep((600, 598, 500), rule=TALL)])[0][-1] == WIDE


def test_to_keep_a_rule_is_not_worth_another_one():
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    sweeps = [sweep((1000, 1000 if seq == 512 else 997.7, 500), rule=TALL, seq=seq) for seq in lengths]
    assert [band[3:] for band in bands(sweeps)] == [(0, None, TALL)]
    sweeps = [sweep((1000, 1000 if seq == 512 else 997, 500), rule=TALL, seq=seq) for seq in lengths]
    assert [band[3:] for band in bands(sweeps)] == [(0, None, WIDE)]


def test_cells_of_one_length_are_judged_together():
    other = replace(sweep((600, 400, 599)), cell=replace(STANDARD[128, False, 4096], dtype="fp16"))
    assert [band[-1] for band in bands([sweep((500, 600, 590)), other])] == [SMALL]
    (rule,) = tune_rules.derive([sweep((500, 600, 590)), other])
    assert "fp16 full" in rule.why
    assert "bf16 full" in rule.why
    with pytest.raises(InputError, match="no config was timed in all of these"):
        tune_rules.derive([sweep((500, None, None)), replace(other, tried=other.tried[1:])])


def test_what_failed_and_what_is_not_taken_from_a_file_gives_no_rule():
    assert bands([sweep((None, None, 400))])[0][-1] == SMALL
    assert not bands([sweep((None, None, None))])
    assert not bands(
        [
            sweep((600, 1, 1), variant="split_q"),
            sweep((600, 1, 1), backend="triton"),
            sweep((600, 1, 1), backend="reference"),
        ]
    )
    both = sweep((600, 1, 1))
    assert not bands([replace(both, cell=replace(both.cell, direction="fwdbwd"))])


# ---------------------------------------------------------------- evidence


def test_evidence_is_made_of_the_numbers():
    (rule,) = tune_rules.derive([sweep((612.4, 640.6, 600.2))])
    assert rule.why == (
        "H200, 2026-11-21, c0ffee, NVRTC 13.0.88: B4 H16 N=4096 D=128 bf16 full 641 TFLOPS, "
        "next 612 (tile_m=128 tile_n=64), before 600 (tile_m=128 tile_n=32), sdpa-cudnn 650"
    )


def test_evidence_says_where_the_rule_stays_and_where_nobody_else_ran():
    (stays,) = tune_rules.derive([sweep((612, 600, 590), rule=WIDE, yardstick_tflops=None)])
    assert stays.why.endswith("612 TFLOPS, next 600 (tile_m=128 tile_n=48), as the rule before")
    (alone,) = tune_rules.derive([sweep((612, None, None), rule=TALL)])
    assert "612 TFLOPS, before untimed (tile_m=128 tile_n=48), sdpa-cudnn 650" in alone.why


def test_evidence_of_two_gpus_names_both():
    h100 = replace(SETUP, gpu="NVIDIA H100 80GB HBM3", date="2026-11-22")
    (rule,) = tune_rules.derive([sweep((600, 500, 400)), sweep((590, 500, 400), setup=h100)])
    assert rule.why.count("TFLOPS") == 2
    assert "H200, 2026-11-21" in rule.why
    assert "H100 80GB HBM3, 2026-11-22" in rule.why


# ---------------------------------------------------------------- kept


def test_a_later_sweep_takes_the_place_of_its_cells_only(tmp_path):
    path = tmp_path / "tune-cuda.json"
    first, second = sweep((600, 500, 400), seq=1024), sweep((600, 500, 400), seq=4096)
    tune_results.merge([first, second], path)
    again = sweep((500, 650, 400), seq=4096, setup=replace(SETUP, date="2026-11-23"))
    assert tune_results.merge([again], path) == [first, again]
    assert tune_results.load(path) == [first, again]
    assert [it["date"] for it in json.loads(path.read_text())["environments"]] == ["2026-11-21", "2026-11-23"]
    path.write_text("{}")
    with pytest.raises(InputError, match=r"tune-cuda\.json: not a file of sweeps of schema 1"):
        tune_results.load(path)


def test_the_rules_of_files_are_written_and_checked(tmp_path, monkeypatch, capsys):
    source, target = tmp_path / "tune-cuda.json", tmp_path / "tuned.json"
    monkeypatch.setattr(tune_rules, "tuned_path", lambda: target)
    tune_results.merge([sweep((600, 500, 400))], source)
    arguments = ["tune", "--rules-from", str(source)]
    assert cli.main([*arguments, "--check"]) == 1
    assert not target.exists()
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--check"]) == 0
    assert "current, by 1 files of sweeps" in capsys.readouterr().out
    (rule,) = tuned.tuned_rules("cuda", "wgmma", lambda fields: Choice(**fields), text=target.read_text())
    assert (rule.config, rule.head_dim_max, rule.seq_max) == (Choice(**WIDE), 128, None)
    assert tuned.dumps(tuned.parse(target.read_text())) == target.read_text()


def test_sweeps_are_rules_of_whoever_takes_rules_from_them():
    assert set(tune_rules.BACKENDS) == {backend for backend, _, _ in tuned.VARIANTS}


# ---------------------------------------------------------------- tuned.json


ENTRY = {
    "backend": "cuda",
    "variant": "wgmma",
    "direction": "forward",
    "arches": ["sm90"],
    "head_dim_min": 65,
    "head_dim_max": 128,
    "causal": None,
    "seq_min": 0,
    "seq_max": 2048,
    "config": WIDE,
    "why": "measured",
}


def rules_of(*entries):
    return tuned.tuned_rules("cuda", "wgmma", lambda fields: Choice(**fields), text=json.dumps(entries))


def test_an_entry_is_a_rule():
    (rule,) = rules_of(ENTRY)
    expected = Rule(
        arches=("sm90",),
        config=Choice(**WIDE),
        why="measured",
        head_dim_min=65,
        head_dim_max=128,
        seq_max=2048,
    )
    assert rule == expected
    text = json.dumps([ENTRY])
    assert not tuned.tuned_rules("cuda", "wgmma", Choice, direction="backward", text=text)
    assert not tuned.tuned_rules("triton", "warp_specialized", Choice, text=text)
    text = json.dumps([{**ENTRY, "backend": "triton", "variant": "warp_specialized"}])
    assert tuned.tuned_rules("triton", "warp_specialized", lambda fields: Choice(**fields), text=text)
    assert not tuned.tuned_rules("cuda", "warp_specialized", lambda fields: Choice(**fields), text=text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 4}, "rule 1: Tuned: got batch; its fields are backend, variant, direction"),
        ({"backend": "cutie"}, "backend: got 'cutie'; allowed cuda, triton"),
        ({"backend": "triton"}, "variant: got 'wgmma'; allowed for forward: warp_specialized"),
        ({"variant": "wgma"}, "variant: got 'wgma'; allowed for forward: wgmma"),
        ({"direction": "fwd"}, "direction: got 'fwd'; allowed forward, backward"),
        ({"arches": ["sm91"]}, r"arches: got \('sm91',\); allowed some of sm80"),
        ({"arches": []}, r"arches: got \(\); allowed some of"),
        ({"arches": 90}, "rule 1: "),
        ({"head_dim_min": 0}, "head_dim_min: got 0; allowed 1 to 256"),
        ({"head_dim_max": 64}, "head_dim_max: got 64; allowed from head_dim_min"),
        ({"head_dim_max": True}, "head_dim_max: got True"),
        ({"causal": "yes"}, "causal: got 'yes'; allowed true, false, or null"),
        ({"seq_min": -1}, "seq_min: got -1"),
        ({"seq_min": 4096}, "seq_max: got 2048; allowed from seq_min on"),
        ({"config": {}}, "config: got {}"),
        ({"config": {**WIDE, "tile_k": 3}}, "wgmma .*tile_k"),
        ({"why": ""}, "why: got ''; allowed what was measured"),
    ],
)
def test_a_wrong_entry_says_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        rules_of({**ENTRY, **change})


def test_a_wrong_file_says_so():
    with pytest.raises(ValueError, match="rule 2: Tuned: has no why"):
        rules_of(ENTRY, {key: value for key, value in ENTRY.items() if key != "why"})
    for text, message in (("[", "not JSON"), ("{}", "not a list of rules"), ("[1]", "not a list of rules")):
        with pytest.raises(ValueError, match=message):
            tuned.tuned_rules("cuda", "wgmma", Choice, text=text)


# ---------------------------------------------------------------- the second step


def refine_with(monkeypatch, *, time_of, now=lambda: 0.0, seconds=60.0, start=64):
    """Refine from tile_m = tile_n = `start` on a backend whose config times as `time_of` says; the ranking."""

    def fits(problem, arch, config):
        wrong = [Reason(code="config", got=f"order={config.order}", allowed="static, dynamic, one_tile")]
        if config.order not in wrong[0].allowed.split(", "):
            return tuple(wrong)
        small = config.tile_m <= 192 and config.tile_n <= 128 and config.share <= 0.25
        return () if small else (Reason(code="config", got=str(config), allowed="less"),)

    eager = get("reference").forward.variants[0]
    forward = replace(get("reference").forward, variants=(replace(eager, fits=fits),))
    backend = replace(get("reference"), forward=forward)
    monkeypatch.setattr("multiattn.backend.get", lambda name: backend)
    prepared = []

    def prepare(wanted, machine, **_):
        for cell, plan in wanted:
            prepared.append(plan.config)
            yield tune.Trial.of(cell, plan, failure="Mismatch: wrong" if plan.config.order == "one_tile" else "")

    def time_cell(cell, ready, machine, budget):
        timed = [replace(trial, tflops=time_of(trial.config)) for trial in ready]
        return [*timed, tune.Trial(cell=cell, name=tune.YARDSTICK, tflops=1.0)]

    monkeypatch.setattr(tune_refine, "prepare", prepare)
    monkeypatch.setattr(tune_refine, "time_cell", time_cell)
    variant = forward.variants[0]
    config = Choice(tile_m=start, tile_n=start)
    plan = tune.plan_variant(backend, variant, fakes.CELL.problem, ARCHS["cpu"], config)
    assert isinstance(plan, Plan)
    trial = replace(tune.Trial.of(fakes.CELL, plan), tflops=time_of(config))
    search = tune_refine.Search(
        machine=fakes.machine(), jobs=1, timeout_s=1, budget=fakes.BUDGET, say=lambda text: None, now=now
    )
    return tune_refine.refine(fakes.CELL, [trial], search, seconds), prepared


def test_descent_finds_what_no_candidate_had(monkeypatch):
    def time_of(config):
        return config.tile_m + config.tile_n + 50 * config.turns + 100 * config.share + 9 * (config.order == "dynamic")

    ranking, prepared = refine_with(monkeypatch, time_of=time_of)
    best = ranking[0].config
    assert best == Choice(tile_m=192, tile_n=128, turns=True, share=0.25, order="dynamic")
    assert len(prepared) == len(set(prepared))
    assert any(trial.failure == "Mismatch: wrong" for trial in ranking)
    assert [trial.name for trial in ranking].count(tune.YARDSTICK) == 1
    assert ranking[-1].tflops is None


def test_descent_ends_where_nothing_gains_and_when_time_is_up(monkeypatch):
    ranking, _ = refine_with(monkeypatch, time_of=lambda config: 100.0)
    assert ranking[0].config == Choice(tile_m=64, tile_n=64)
    clock = iter(range(1000))
    _, prepared = refine_with(monkeypatch, time_of=lambda config: config.tile_m, now=lambda: next(clock), seconds=4.0)
    assert 0 < len(prepared) < 6
    _, prepared = refine_with(monkeypatch, time_of=lambda config: None)
    assert not prepared


# ---------------------------------------------------------------- the last step


def ranking_of(cell, rates, rule=None):
    """A ranking of configs of tile_m = 1, 2, ... with these rates, and the yardstick."""
    plan = make_plan(get("reference"), cell.problem, ARCHS["cpu"])
    trials = [
        tune.Trial(
            cell=cell,
            name=f"config {tile_m}",
            variant="eager",
            config=Choice(tile_m=tile_m, tile_n=8),
            plan=replace(plan, why="a rule" if tile_m == rule else tune.GIVEN),
            tflops=rate,
            failure="" if rate else "Mismatch: wrong",
        )
        for tile_m, rate in enumerate(rates, start=1)
    ]
    return tune.ranked([*trials, tune.Trial(cell=cell, name=tune.YARDSTICK, tflops=1.0)])


def finals_of(monkeypatch, rankings, count, *, may_be_rule=lambda trial: True, breaks=()):
    """The cells that `with_finals` yields with the tile_m that each then has rates of; those of `breaks` have none."""

    def time_cell(cell, ready, machine, budget):
        assert not any(it.tflops or it.failure for it in ready)
        assert budget.rounds * budget.sample_ms > 10 * tune.TUNE_BUDGET.rounds * tune.TUNE_BUDGET.sample_ms
        yardstick = tune.Trial(cell=cell, name=tune.YARDSTICK, tflops=2.0)
        return [*map(final, ready), yardstick]

    def final(trial):
        if trial.config.tile_m in breaks:
            return replace(trial, failure="RuntimeError: broken")
        return replace(trial, tflops=100.0 + trial.config.tile_m)

    monkeypatch.setattr(tune_finals, "time_cell", time_cell)
    return list(tune_finals.with_finals(rankings.items(), fakes.machine(), count, may_be_rule))


def timed(ranking):
    return [it.config.tile_m for it in ranking if it.tflops and it.variant]


SHORT, LONG = STANDARD[128, False, 512], STANDARD[128, False, 4096]
MASKED = STANDARD[128, True, 512]
RANKINGS = {
    SHORT: ranking_of(SHORT, [90.0, 99.0, 100.0, 50.0, None]),
    MASKED: ranking_of(MASKED, [1.0, 2.0, 3.0, 100.0, None]),
    LONG: ranking_of(LONG, [200.0, 198.0, 150.0, 100.0, None], rule=4),
}


def test_finals_time_the_fastest_of_like_cells_and_the_rule_again(monkeypatch):
    found = finals_of(monkeypatch, RANKINGS, 1)
    assert [cell for cell, _ in found] == [*RANKINGS, SHORT, LONG, MASKED]
    last = dict(found)
    # 2 is the fastest in the mean, 1 and 3 each in one length, 4 what the rule has in one
    assert [timed(last[cell]) for cell in (SHORT, LONG, MASKED)] == [[4, 3, 2, 1], [4, 3, 2, 1], [4]]
    assert all([it.tflops for it in ranking if not it.variant] == [2.0] for ranking in last.values())
    failures = {it.config.tile_m: it.failure for it in last[MASKED] if it.failure}
    assert failures[3] == "no finalist: 0.030 of the fastest before"
    assert failures[5] == "Mismatch: wrong"
    before = {it.config.tile_m: it.first_tflops for it in last[MASKED] if it.variant}
    assert before == {1: 1.0, 2: 2.0, 3: 3.0, 4: 100.0, 5: None}
    assert len(last[MASKED]) == len(RANKINGS[MASKED])


def test_what_can_be_no_rule_takes_no_finalists_place(monkeypatch):
    found = dict(finals_of(monkeypatch, RANKINGS, 1, may_be_rule=lambda trial: trial.config.tile_m not in (2, 4)))
    # of MASKED 4 is the fastest, and 3 of those that may be a rule
    assert [timed(found[cell]) for cell in (SHORT, MASKED)] == [[4, 3, 1], [4, 3]]


def test_grouped_heads_are_another_kind_of_cell(monkeypatch):
    grouped = replace(SHORT, heads_kv=2)
    rankings = {SHORT: ranking_of(SHORT, [9.0, 8.0]), grouped: ranking_of(grouped, [1.0, 10.0])}
    found = dict(finals_of(monkeypatch, rankings, 1))
    assert [timed(found[cell]) for cell in (SHORT, grouped)] == [[1], [2]]


def test_what_breaks_in_finals_is_told_and_where_all_do_the_sweep_stands(monkeypatch):
    found = dict(finals_of(monkeypatch, {SHORT: RANKINGS[SHORT]}, 2, breaks=(3,)))
    assert timed(found[SHORT]) == [2]
    assert {it.config.tile_m: it.failure for it in found[SHORT] if it.variant}[3] == "RuntimeError: broken"
    found = dict(finals_of(monkeypatch, {SHORT: RANKINGS[SHORT]}, 2, breaks=(1, 2, 3)))
    assert found[SHORT] == RANKINGS[SHORT]


def test_a_config_without_room_at_the_widest_head_dim_of_its_class_can_be_no_rule():
    def trial_of(head_dim, **fields):
        cell = replace(STANDARD[128, True, 4096], head_dim=head_dim)
        config = WgmmaConfig(tile_m=192, tile_n=64, stages=6, lazy_max=True, **fields)
        plan = make_plan(get("cuda"), cell.problem, ARCHS["sm90"], variant="wgmma", config=config, probe=False)
        return tune.Trial.of(cell, plan)

    assert not tune_rules.may_be_rule(trial_of(144, tma_store=False))
    assert tune_rules.may_be_rule(trial_of(144))
    assert tune_rules.may_be_rule(trial_of(128, tma_store=False))


def test_finals_may_be_none_and_a_cell_of_failures_has_none(monkeypatch):
    assert finals_of(monkeypatch, RANKINGS, 0) == list(RANKINGS.items())
    failed = {SHORT: ranking_of(SHORT, [None, None])}
    assert finals_of(monkeypatch, failed, 3) == [*failed.items(), *failed.items()]


# ---------------------------------------------------------------- spills


def test_what_spills_in_its_hot_loops_is_not_launched(monkeypatch):
    problem = Problem.contiguous(batch=4, heads_q=16, seq_q=4096, head_dim=128, dtype="bf16", causal=True)
    plan = Plan(
        problem=problem, arch=ARCHS["sm90"], backend="cuda", variant="split_q", config=Choice(**WIDE), why=tune.GIVEN
    )
    monkeypatch.setattr(tune, "find_cuobjdump", lambda: "cuobjdump")
    monkeypatch.setattr(tune.store, "compiled", lambda plan: (3, 0))
    monkeypatch.setattr(
        tune, "read_kernel", lambda kernel, plan: SimpleNamespace(name="k", hot_spills=kernel, registers=255)
    )
    task = tune._Task(cell=fakes.CELL, plan=plan, device="cpu", spills=False)
    with pytest.raises(tune.SpillsError, match="spills in its hot loops: k 3 times with 255 registers"):
        tune.check_candidate(task)
    tune.refuse_spills(replace(plan, arch=ARCHS["cpu"]))
    monkeypatch.setattr(tune, "find_cuobjdump", lambda: None)
    tune.refuse_spills(plan)


# ---------------------------------------------------------------- the check of a candidate


def test_a_candidate_that_is_wrong_at_ragged_lengths_only_is_no_candidate(monkeypatch):
    plan = make_plan(get("reference"), fakes.CELL.problem, ARCHS["cpu"])
    task = tune._Task(cell=fakes.CELL, plan=plan, device="cpu", spills=False)
    assert tune.check_candidate(task)
    make = tune.contender_of

    def wrong_where_ragged(plan, tensors, cell, forward):
        contender = make(plan, tensors, cell, forward)
        if cell.seq == fakes.CELL.seq:
            return contender
        return replace(contender, output=lambda: {name: 2 * it for name, it in contender.output().items()})

    monkeypatch.setattr(tune, "contender_of", wrong_where_ragged)
    with pytest.raises(Mismatch):
        tune.check_candidate(task)


def test_persistent_blocks_have_several_ragged_tiles():
    tallest = 192  # that any candidate has
    for cell in tune.ragged(fakes.CELL):
        assert cell.batch * cell.heads * -(-cell.seq // tallest) > max(device.sms for device in GPUS)
