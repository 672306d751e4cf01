"""multiattn tune: the ranking, what is kept of it, and what goes by that."""

import importlib
import json
import logging
import subprocess
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch
import tune_fakes as fakes
from tune_fakes import GPU, LAYER, PROBLEM, choice, other_config, timed, way

import bench
import parity
from multiattn.operands import Operands, Options
from multiattn.plan import backend as registry
from multiattn.plan import toolchain
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, find_variant, get, make_plan
from multiattn.plan.choice import choose, preferred_order
from multiattn.plan.records import config_of
from multiattn.plan.tuning import tuning_of
from multiattn.problem import Problem
from multiattn.run import calls
from multiattn.run import tuning as kept
from multiattn.tune import check, cli, measure
from multiattn.tune.candidates import candidates_of

SM90 = ARCHS["sm90"]
CUDA = torch.device("cuda", 0)


# ---------------------------------------------------------------- measured


def tuned(fake, direction="forward", most=12):
    wanted = candidates_of("cuda", PROBLEM, ARCHS["cpu"], direction, most=most)
    return measure.tune(PROBLEM, direction, wanted, fake.bench(), budget_s=None, report=lambda outcome: None)


@pytest.mark.parametrize(
    ("times", "ways"),
    [
        ({("first", 32): 0.8, ("first", 64): 0.5, ("second", 16): 2.0}, [("first", choice(64)), ("second", None)]),
        ({("first", 64): 0.995, ("second", 16): 0.995}, [("first", None), ("second", None)]),  # a rule that is as fast
        ({("first", 64): 0.985, ("second", 16): 0.985}, [("first", choice(64)), ("second", None)]),
        ({("second", 16): 0.7}, [("second", None), ("first", None)]),
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_fastest_right_config_is_chosen(gpu, direction, times, ways):
    gpu.times = {("first", 16): 1.0, **times}
    own = tuned(gpu, direction).backends["cuda"]
    assert [(it.variant, it.config) for it in own.ways] == [(name, it and asdict(it)) for name, it in ways]
    assert [(it.variant, it.config, it.time_ms) for it in own.bundled] == [("first", None, 1.0)]
    assert own.candidates == len(gpu.times)


@pytest.mark.parametrize(
    ("how", "said"),
    [("wrong", " is off"), ("wrong_elsewhere", " is off"), ("unwritten", " has NaN"), ("broken", "not compile")],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_wrong_is_listed_and_never_chosen(gpu, direction, how, said):
    setattr(gpu, how, (64,))
    own = tuned(gpu, direction).backends["cuda"]
    assert own.ways[0].config == asdict(choice(32))
    assert own.candidates == 3
    ((name, error),) = own.failed.items()
    assert name == "cuda/first tile_m=64 tile_n=16"
    assert said in error
    assert "\n" not in error


def test_short_readings_are_not_compared_with_long_ones(gpu, monkeypatch):
    gpu.times = {("first", 16): 1.0, ("first", 64): 0.5, ("second", 16): 2.0}
    gpu.times |= {("first", tile): 0.5 + tile / 1e4 for tile in (32, 48, 80, 96)}
    real = measure._measure

    def slower_in_the_finals(launchers, operands, bench, budget, errors):
        factor = 1.3 if budget is measure.FINALS else 1.0
        found = real(launchers, operands, bench, budget, errors)
        return {it: replace(its, time_ms=its.time_ms * factor) for it, its in found.items()}

    monkeypatch.setattr(measure, "_measure", slower_in_the_finals)
    own = tuned(gpu).backends["cuda"]
    assert own.ways[0].config == asdict(choice(64))
    assert own.candidates == 7


def test_what_is_not_checked_in_time_is_left_out(gpu, monkeypatch):
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr(measure.time, "monotonic", lambda: next(seconds))
    wanted = candidates_of("cuda", PROBLEM, ARCHS["cpu"], "forward", most=12)
    found = measure.tune(PROBLEM, "forward", wanted, gpu.bench(), budget_s=15, report=lambda outcome: None)
    assert found.backends["cuda"].candidates == 2
    assert found.backends["cuda"].bundled


def test_nothing_is_checked_any_more_while_candidates_are_timed(gpu, monkeypatch):
    events = []

    def run_isolated(*given, **more):
        try:
            yield from fakes.run_here(*given, **more)
        finally:
            events.append("the processes end")

    monkeypatch.setattr(check, "run_isolated", run_isolated)
    real = measure.time_candidates
    monkeypatch.setattr(measure, "time_candidates", lambda *given: events.append("timing") or real(*given))
    wanted = candidates_of("cuda", PROBLEM, ARCHS["cpu"], "forward", most=12)
    measure.tune(PROBLEM, "forward", wanted, gpu.bench(), budget_s=0, report=lambda outcome: None)
    assert events == ["the processes end", "timing"]


def test_candidates_near_the_rule_come_first(monkeypatch):
    found = candidates_of("cuda", LAYER, SM90, "forward", most=8)
    chosen = make_plan(get("cuda"), LAYER, SM90, probe=False)
    rules_own = [it for it in found if it.config is None]
    assert found[0].variant == chosen.variant
    assert found[: len(rules_own)] == rules_own
    assert {it.variant for it in found if it.config is not None} == {chosen.variant}
    assert len(found) == 8 + len(rules_own)
    changes = [sum(value != asdict(chosen.config)[name] for name, value in asdict(it.config).items())
               for it in found if it.config is not None]  # fmt: skip
    assert changes == sorted(changes)
    assert len(candidates_of("cuda", LAYER, SM90, "forward", most=None)) > 8
    own, *_ = found
    other = next(it.variant for it in rules_own if it.variant != own.variant)
    named = candidates_of("cuda", LAYER, SM90, "forward", variants=[other], most=None)
    assert [it.variant for it in named[:2]] == [own.variant, other]
    assert {it.variant for it in named[2:]} <= {other}


def test_a_driver_tool_that_hangs_costs_no_measurement(monkeypatch):
    def hang(command, **_):
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr(toolchain.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(toolchain.subprocess, "run", hang)
    assert toolchain.driver_version() == "unknown"


# ---------------------------------------------------------------- kept


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_config_comes_back_from_json(name, arch, direction):
    for it in candidates_of(name, LAYER, ARCHS[arch], direction, most=None):
        if it.config is not None:
            data = json.loads(json.dumps(asdict(it.config)))
            assert config_of(data, find_variant(get(name), it.variant, direction)) == it.config


def test_a_file_comes_back_and_is_read_once(folder, gpu):
    found = fakes.tuning(tuned(gpu), arch="cpu")
    kept.write(found, kept.path_of(GPU))
    assert kept.path_of(GPU) == folder / "nvidia-test.json"
    assert kept.tuning_for(CUDA) == found
    kept.path_of(GPU).unlink()
    assert kept.tuning_for(CUDA) == found
    assert kept.tuning_for(torch.device("cpu")) is None


def spoil(**changes):
    return lambda data: json.dumps(data | changes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (lambda data: json.dumps(data)[:-30], "Unterminated string"),
        (lambda data: "[]", "schema: got None; allowed 2"),
        (spoil(schema=1), "schema: got 1; allowed 2"),
        (spoil(multiattn="0.0.1"), "multiattn: got kernels of 0.0.1; allowed those of"),
        (spoil(gpu="NVIDIA Other"), "gpu: got 'NVIDIA Other'; allowed 'NVIDIA Test'"),
        (spoil(cells=[{}]), "got no backends"),
        (spoil(more=1), "got more; allowed"),
    ],
)
def test_a_file_that_cannot_be_used_is_warned_of_and_ignored(folder, gpu, text, said):
    path = kept.path_of(GPU)
    kept.write(fakes.tuning(tuned(gpu), arch="cpu"), path)
    path.write_text(text(json.loads(path.read_text())))
    with pytest.warns(RuntimeWarning, match="multiattn tune --forget") as warned:
        assert kept.tuning_for(CUDA) is None
    (only,) = warned
    assert said in str(only.message)
    assert str(path) in str(only.message)
    assert kept.tuning_for(CUDA) is None  # and warns once


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda its: its.update(direction="sideways"), "direction: got 'sideways'"),
        (lambda its: its["backends"].update(none=its["backends"]["cuda"]), "backends: got none"),
        (lambda its: its["backends"]["cuda"]["ways"][0]["config"].update(tile_m="wide"), "tile_m: got 'wide'"),
        (lambda its: its["backends"]["cuda"]["ways"][0].update(variant="third"), "variant: got 'third'"),
        (lambda its: its["backends"]["cuda"]["ways"][0].update(tflops=float("nan")), "tflops: got nan"),
        (lambda its: its["backends"]["cuda"]["ways"][0].update(time_ms=-1.0), "in -1.0 ms; allowed numbers above 0"),
        (lambda its: its["sizes"].update(heads_kv=0), "allowed heads from 1 on"),
        (lambda its: its["sizes"].update(mask="striped"), "striped"),
    ],
)
def test_wrong_cells_are_named(gpu, spoil, said):
    data = json.loads(json.dumps(asdict(fakes.tuning(tuned(gpu), arch="cpu"))))
    spoil(data["cells"][0])
    with pytest.raises(ValueError, match=said):
        tuning_of(data)


def test_a_config_without_sizes_is_named():
    its = make_plan(get("cuda"), LAYER, SM90, direction="backward", variant="two_pass", probe=False)
    none = asdict(its.config) | {"tile_n": 0}
    cell = fakes.cell(LAYER, {"cuda": timed(way("two_pass", none, 500))}, "backward")
    with pytest.raises(ValueError, match=r"config: got .* tile_n=0.*; allowed sizes above 0"):
        tuning_of(json.loads(json.dumps(asdict(fakes.tuning(cell)))))


def test_others_may_not_put_rules_into_the_folder(folder, gpu):
    kept.write(fakes.tuning(tuned(gpu), arch="cpu"), kept.path_of(GPU))
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="can be written to by other users"):
        assert kept.tuning_for(CUDA) is None


def test_a_backend_that_is_left_out_keeps_what_it_had():
    first = fakes.cell(LAYER, {"cuda": timed(way("wgmma", None, 500)), "triton": timed(way("full", None, 300))})
    again = fakes.cell(LAYER, {"cuda": timed(way("wgmma", None, 510))})
    again = replace(again, date="2027-01-01")
    found = cli.with_cell(fakes.tuning(first), again)
    assert [(it.date, set(it.backends)) for it in found.cells] == [("2026-11-26", {"triton"}), ("2027-01-01", {"cuda"})]
    assert "2027-01-01" in found.choices(LAYER, "forward", "cuda")[0].why
    assert "2026-11-26" in found.choices(LAYER, "forward", "triton")[0].why
    assert cli.with_cell(found, first).cells == (first,)


# ---------------------------------------------------------------- used


NEAR = [{}, {"seq_q": 1448, "seq_kv": 1448}, {"seq_q": 725, "seq_kv": 725}, {"batch": 4}]
FAR = [
    *({"seq_q": 1449, "seq_kv": 1449}, {"seq_q": 724, "seq_kv": 724}, {"seq_kv": 2048}, {"batch": 5}),
    *({"head_dim": 120}, {"head_dim_v": 64}, {"heads_kv": 8}, {"dtype": "fp16"}),
    *({"causal": False}, {"window": (512, 0)}, {"has_sinks": True}),
]


@pytest.mark.parametrize(("changes", "is_near"), [*((it, True) for it in NEAR), *((it, False) for it in FAR)])
def test_a_cell_holds_near_its_problem(changes, is_near):
    sizes = {"batch": 2, "heads_q": 16, "seq_q": 1024, "head_dim": 128, "causal": True}
    its = fakes.cell(LAYER, {})
    assert its.is_near(Problem.contiguous(**(sizes | changes))) == is_near
    assert (fakes.tuning(its).nearest(LAYER, "backward")) is None


def test_a_named_backend_runs_what_was_tuned_and_says_so():
    config, bundled = other_config()
    own = timed(way(bundled.variant, asdict(config), 512.4), bundled=way(bundled.variant, None, 498.2, "tile_m=1"))
    found = fakes.tuning(fakes.cell(LAYER, {"cuda": own}))
    options = Options(LAYER.band.left, LAYER.band.right, backend="cuda")
    (plan,) = choose(LAYER, SM90, options, "forward", probe=False, tuning=found)
    assert plan.config == config
    assert plan.why == (
        "tuned here: NVIDIA Test, 2026-11-26, B=2 H=16 N=1024 D=128 bf16 causal forward: 512 TFLOPS; "
        "the bundled choice, tile_m=1, 498"
    )
    assert choose(LAYER, SM90, options, "forward", probe=False) == (bundled,)
    far = replace(LAYER, seq_q=4096, seq_kv=4096)
    assert choose(far, SM90, options, "forward", probe=False, tuning=found) == choose(
        far, SM90, options, "forward", probe=False
    )


def test_a_rule_that_proved_best_is_cited_before_its_own_evidence():
    _, bundled = other_config()
    same = way(bundled.variant, None, 498)
    found = fakes.tuning(fakes.cell(LAYER, {"cuda": timed(same, bundled=same)}))
    plan = make_plan(get("cuda"), LAYER, SM90, probe=False, tuned=found.choices(LAYER, "forward", "cuda"))
    assert plan.config == bundled.config
    assert plan.why.endswith(f"498 TFLOPS, the bundled rule, the best of 7 timed; {bundled.why}")


@pytest.mark.parametrize(("deterministic", "variant"), [(False, "second"), (True, "first")])
def test_a_tuned_variant_comes_first_unless_it_may_not_run(gpu, deterministic, variant):
    gpu.times = {("first", 16): 1.0, ("second", 16): 0.7}
    choices = fakes.tuning(tuned(gpu)).choices(PROBLEM, "forward", "cuda")
    found = make_plan(registry.get("cuda"), PROBLEM, ARCHS["cpu"], deterministic=deterministic, tuned=choices)
    assert found.variant == variant
    named = make_plan(registry.get("cuda"), PROBLEM, ARCHS["cpu"], variant="first", tuned=choices)
    assert named.variant == "first"


def test_a_config_that_does_not_fit_gives_way_to_the_rule():
    config, bundled = other_config()
    tiles = {name: 4096 if name == "tile_n" else value for name, value in asdict(config).items()}
    found = fakes.tuning(fakes.cell(LAYER, {"cuda": timed(way(bundled.variant, tiles, 999))}))
    plan = make_plan(get("cuda"), LAYER, SM90, probe=False, tuned=found.choices(LAYER, "forward", "cuda"))
    assert plan.config == bundled.config
    assert "tuned here" in plan.rejected[0]


@pytest.mark.parametrize(
    ("rates", "order"),
    [
        ({"triton": 300, "cutile": 400, "cuda": 500}, ["cuda", "cutile", "triton"]),
        ({"triton": 600, "cutile": 400, "cuda": 500}, ["triton", "cuda", "cutile"]),
        ({"triton": 600}, None),
        ({"triton": 600, "cuda": 500}, "two"),
    ],
)
def test_auto_takes_the_order_of_this_gpu(rates, order):
    known = preferred_order(LAYER, SM90)
    found = fakes.tuning(fakes.cell(LAYER, {name: timed(way("any", None, it)) for name, it in rates.items()}))
    got = [name for name, _ in found.order(LAYER, "forward", known)]
    names = [name for name, _ in known]
    if order == "two":
        swapped = iter(("triton", "cuda"))
        order = [next(swapped) if name in rates else name for name in names]
    assert got == (order or names)
    assert [name for name, _ in found.order(LAYER, "backward", known)] == names


def test_the_nearest_cell_decides_and_the_latest_of_the_same_distance():
    longer = Problem.contiguous(batch=2, heads_q=16, seq_q=1400, head_dim=128, causal=True)
    rates = {LAYER: ("triton", 500), longer: ("cuda", 700)}
    found = fakes.tuning(
        *(fakes.cell(it, {name: timed(way("any", None, rate)), "cutile": timed(way("any", None, 600))})
          for it, (name, rate) in rates.items()), *[fakes.cell(LAYER, {"cuda": timed(way("any", None, rate))})
                                                     for rate in (1, 2)]
    )  # fmt: skip
    assert found.nearest(LAYER, "forward", "triton").sizes.seq_q == 1024
    assert found.nearest(longer, "forward", "cutile").sizes.seq_q == 1400
    assert found.nearest(LAYER, "forward", "cuda").timed["cuda"].tflops == 2
    assert found.nearest(LAYER, "forward", "triton", "cuda") is None
    known = (("triton", ""), ("cutile", ""), ("cuda", ""))
    assert [name for name, _ in found.order(LAYER, "forward", known)] == ["cutile", "triton", "cuda"]


def test_auto_cites_what_was_tuned():
    backends = {name: timed(way(make_plan(get(name), LAYER, SM90, probe=False).variant, None, rate))
                for name, rate in {"triton": 900, "cutile": 400, "cuda": 500}.items()}  # fmt: skip
    found = fakes.tuning(fakes.cell(LAYER, backends))
    options = Options(LAYER.band.left, LAYER.band.right, backend="auto")
    (plan,) = choose(LAYER, SM90, options, "forward", probe=False, tuning=found)
    assert plan.backend == "triton"
    tuned_here = "tuned here: NVIDIA Test, 2026-11-26, B=2 H=16 N=1024 D=128 bf16 causal forward: 900 TFLOPS"
    assert plan.why.startswith(f"timed here: triton 900, cuda 500, cutile 400 TFLOPS; {tuned_here}")


# ---------------------------------------------------------------- who uses it


@pytest.mark.usefixtures("fresh_calls")
def test_a_call_plans_by_what_its_gpu_has(monkeypatch, folder):
    found, asked = fakes.tuning(arch="sm90"), []
    monkeypatch.setattr(calls, "detect", lambda device: SM90)
    monkeypatch.setattr(calls, "choose", lambda *given, **more: asked.append(more["tuning"]) or given)
    monkeypatch.setattr(calls, "tuning_for", lambda device: found)
    told = []
    monkeypatch.setattr(calls, "tell_unmeasured", lambda *given: told.append(given))
    q = torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16)
    calls._choose(Operands(q, q, q), Options(None, None, None), "forward")
    assert asked == [found]
    assert told == [(q.device, "sm90")]


@pytest.mark.parametrize("package", [bench, parity])
def test_tables_and_verdicts_never_depend_on_what_a_user_has_tuned(package, monkeypatch, folder, gpu):
    kept.write(fakes.tuning(tuned(gpu), arch="cpu"), kept.path_of(GPU))
    assert kept.tuning_for(CUDA) is not None
    monkeypatch.setenv(kept.VARIABLE, "1")
    importlib.reload(package)
    assert kept.tuning_for(CUDA) is None


def test_the_variable_is_checked(monkeypatch):
    monkeypatch.setenv(kept.VARIABLE, "off")
    with pytest.raises(ValueError, match="MULTIATTN_TUNED: got 'off'; allowed 0 for off"):
        kept.tuning_for(CUDA)


@pytest.mark.parametrize(
    ("gpu_name", "arch", "level", "said"),
    [
        ("NVIDIA H200", "sm90", None, ""),
        ("NVIDIA H100 80GB HBM3", "sm90", None, ""),
        ("NVIDIA A100-SXM4-80GB", "sm80", "WARNING", "no measurement of NVIDIA A100-SXM4-80GB (sm80) yet"),
        ("NVIDIA GH200 480GB", "sm90", "INFO", "NVIDIA GH200 480GB (sm90) has the rules of sm90, measured on NVIDIA H"),
    ],
)
def test_a_gpu_without_a_record_is_told_once(folder, monkeypatch, caplog, gpu_name, arch, level, said):
    monkeypatch.setattr(kept, "gpu_name", lambda index: gpu_name)
    with caplog.at_level(logging.INFO, logger="multiattn"):
        for _ in range(2):
            kept.tell_unmeasured(CUDA, arch)
    assert [it.levelname for it in caplog.records] == ([] if level is None else [level])
    assert said in caplog.text
    assert ("multiattn tune --shape" in caplog.text) == (level is not None)


def test_threads_that_call_together_are_told_once(folder, monkeypatch, caplog):
    both = threading.Barrier(2)

    def slow(arch):
        time.sleep(0.05)
        return ()

    def call():
        both.wait()
        kept.tell_unmeasured(CUDA, "sm80")

    monkeypatch.setattr(kept, "measured_gpus", slow)
    threads = [threading.Thread(target=call) for _ in range(2)]
    for it in threads:
        it.start()
    for it in threads:
        it.join()
    assert len(caplog.records) == 1


def test_a_gpu_that_its_user_measured_is_not_told_of(folder, monkeypatch, caplog):
    kept.write(fakes.tuning(), kept.path_of(GPU))
    with caplog.at_level(logging.INFO, logger="multiattn"):
        kept.tell_unmeasured(CUDA, "sm80")
    assert not caplog.records
