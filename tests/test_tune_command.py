"""The command `multiattn tune`: options, output, files, and what happens when it ends early."""

import json
import os
from dataclasses import asdict, replace

import pytest
import torch
import tune_fakes as fakes
from tune_fakes import GPU, LAYER, other_config, timed, way

from bench import cli as bench_cli
from bench.matrix import InputError
from bench.tuned_lines import print_lines
from multiattn import __main__ as command
from multiattn.inspect import ncu
from multiattn.plan import backend as registry
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, find_variant, get, make_plan
from multiattn.plan.records import config_of
from multiattn.plan.support import Reason
from multiattn.plan.tuning import tuning_of
from multiattn.run import cache
from multiattn.run import tuning as kept
from multiattn.tune import check, cli, measure

CUDA = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch, folder, gpu):
    """The command on the fake GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(command, "default_arch", lambda: "sm90")
    monkeypatch.setattr(ncu, "default_arch", lambda: "sm90")
    monkeypatch.setattr(cli, "gpu_name", lambda index: GPU)
    monkeypatch.setattr(cli, "Bench", lambda **_: gpu.bench())
    monkeypatch.setattr(cli, "detect", lambda device: ARCHS["cpu"])
    monkeypatch.setattr(measure, "device_works", lambda: True)
    return gpu


SHAPE = ["tune", "--shape", "2,4,48,16", "--kv-heads", "2", "--causal", "--backend", "cuda"]


def test_the_command_measures_keeps_lists_exports_and_forgets(machine, folder, tmp_path, capsys):
    machine.wrong = (32,)
    assert command.main([*SHAPE, "--direction", "both"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("NVIDIA Test: 8 candidates of cuda, about 92 s\n")
    assert "cuda/first tile_m=32 tile_n=16: Mismatch: out is off" in said
    chosen = [line.split() for line in said.splitlines() if " chosen " in line]
    assert [(line[:2], line[-2:]) for line in chosen] == [(["cuda", "first"], ["tile_m=64", "tile_n=16"])] * 2
    assert [cell.direction for cell in kept.tuning_for(CUDA).cells] == ["forward", "backward"]
    assert command.main(["tune", "--list"]) == 0
    assert "B=2 Hq=4 Hkv=2 N=48 D=16 bf16 causal backward: cuda first tile_m=64" in capsys.readouterr().out
    exported = tmp_path / "mine.json"
    assert command.main(["tune", "--export", str(exported)]) == 0
    assert "Attach it to an issue" in capsys.readouterr().out
    assert tuning_of(json.loads(exported.read_text())) == kept.tuning_for(CUDA)
    assert command.main(["tune", "--forget"]) == 0
    assert list(folder.iterdir()) == []
    assert command.main(["tune", "--forget"]) == 0
    assert "Nothing was kept in" in capsys.readouterr().out
    assert command.main(["tune", "--export", str(exported)]) == 1
    assert "measures first" in capsys.readouterr().err


def exported(folder, cell, **more):
    path = folder / "mine.json"
    path.write_text(json.dumps(asdict(fakes.tuning(cell, **more))))
    return path


def test_an_export_becomes_lines_for_the_package(tmp_path, capsys):
    config, bundled = other_config()
    own = timed(way(bundled.variant, asdict(config), 512), bundled=way(bundled.variant, None, 498, "tile_m=1"))
    same = timed(way("full", None, 300))
    path = exported(tmp_path, fakes.cell(LAYER, {"cuda": own, "triton": same}), gpu="NVIDIA H200")
    assert bench_cli.main(["tune", "--import", str(path)]) == 0
    first, place, line = capsys.readouterr().out.replace("\n\n", "\n").strip().split("\n")
    assert first.endswith("1 cells, 1 rules")
    assert place == "multiattn/plan/tuned.json:"
    row = json.loads(line)
    assert (row["seq_min"], row["seq_max"], row["head_dim_min"], row["banded"]) == (724, 1448, 128, True)
    assert config_of(row["config"], find_variant(get("cuda"), row["variant"])) == config
    assert "NVIDIA H200, 2026-11-26" in row["why"]
    path.write_text("{}")
    with pytest.raises(InputError, match="schema: got None"):
        print_lines(path)


def test_a_rule_of_a_backward_is_not_for_the_file_of_forward_ones(tmp_path, capsys):
    plan = make_plan(get("cuda"), LAYER, ARCHS["sm90"], direction="backward", variant="wgmma", probe=False)
    cell = fakes.cell(LAYER, {"cuda": timed(way("wgmma", asdict(plan.config), 9))}, "backward")
    assert print_lines(exported(tmp_path, cell)) == 0
    assert "\nmultiattn/cuda/rules/, as a Rule of wgmma backward:\n" in capsys.readouterr().out


def test_a_config_that_fits_no_more_is_no_rule(tmp_path, capsys):
    config, bundled = other_config()
    wide = asdict(config) | {"tile_n": 4096}
    cell = fakes.cell(LAYER, {"cuda": timed(way(bundled.variant, wide, 9))})
    assert print_lines(exported(tmp_path, cell)) == 1
    said = capsys.readouterr().out
    assert "1 cells, 0 rules" in said
    assert "does not fit" in said


@pytest.mark.parametrize(
    ("where", "error", "status", "said"),
    [
        ((check, "check_plan"), KeyboardInterrupt(), 130, "Interrupted"),
        ((measure, "time_candidates"), measure.LostError("the GPU is unusable"), 1, "the GPU is unusable"),
        ((measure, "time_candidates"), torch.OutOfMemoryError("of memory\nhelp"), 1, "of memory"),
    ],
)
def test_a_run_that_ends_early_keeps_what_is_finished(machine, monkeypatch, capsys, where, error, status, said):
    real = getattr(*where)

    def end(plans, other):
        plan = plans[0] if isinstance(plans, list) else plans
        if plan.problem.head_dim == 24:
            raise error
        return real(plans, other)

    monkeypatch.setattr(*where, end)
    assert command.main([*SHAPE, "--shape", "2,4,48,24"]) == status
    assert f"{said}: 1 of 2 measured and kept" in capsys.readouterr().err
    (cell,) = kept.tuning_for(CUDA).cells
    assert cell.sizes.head_dim == 16


def test_a_shorter_sweep_does_not_lose_what_a_longer_one_found(machine, monkeypatch):
    assert command.main(SHAPE) == 0
    monkeypatch.setattr(cli, "MOST_QUICK", 0)
    assert command.main([*SHAPE, "--quick"]) == 0
    (cell,) = kept.tuning_for(CUDA).cells
    assert cell.backends["cuda"].candidates == 3, "both rules' own and what was best before"
    assert cell.timed["cuda"].config["tile_m"] == 64


@pytest.mark.parametrize("found", [replace(fakes.tuning(), multiattn="0.0.1"), fakes.tuning(gpu="NVIDIA Other")])
def test_a_file_of_another_version_or_gpu_is_replaced(machine, capsys, found):
    kept.write(found, kept.path_of(GPU))
    assert command.main([*SHAPE, "--direction", "both"]) == 0
    assert capsys.readouterr().err.count("Replaced by new measurements") == 1
    assert kept.tuning_for(CUDA).gpu == GPU


def test_another_process_that_tunes_loses_nothing(machine, monkeypatch):
    path, real = kept.path_of(GPU), cli.tune

    def tune_beside(*given, **more):
        kept.write(fakes.tuning(fakes.cell(LAYER, {"cuda": timed()}), arch="cpu"), path)
        return real(*given, **more)

    monkeypatch.setattr(cli, "tune", tune_beside)
    assert command.main(SHAPE) == 0
    assert [it.sizes.head_dim for it in kept.read(path).cells] == [128, 16]


@pytest.mark.usefixtures("machine")
def test_a_folder_that_cannot_be_written_to_is_named_before_all_is_measured(monkeypatch, capsys):
    monkeypatch.setenv("MULTIATTN_CACHE_DIR", "/proc/none")
    assert command.main(SHAPE) == 2
    said = capsys.readouterr()
    assert "cannot write /proc/none/tuned/nvidia-test.json" in said.err
    assert not said.out


def test_a_folder_that_calls_would_not_read_is_refused(machine, folder, capsys):
    folder.mkdir()
    folder.chmod(0o777)
    assert command.main(SHAPE) == 2
    assert "can be written to by other users" in capsys.readouterr().err
    assert not list(folder.iterdir())


def test_the_cache_is_made_for_this_user_alone(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("MULTIATTN_CACHE_DIR", str(tmp_path / "new"))
    before = os.umask(0o002)
    try:
        assert command.main(SHAPE) == 0
    finally:
        os.umask(before)
    cache.check_owner(tmp_path / "new")
    assert kept.tuning_for(CUDA) is not None


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune"], "--shape: got none; allowed B,H,S,D"),
        (["tune", "--list", "--forget"], "--list: got --shape, --export or --forget, too; allowed alone"),
        ([*SHAPE, "--backend", "cutile"], "--backend: got what cannot run here\n  cutile: package: got no cuda-tile"),
        ([*SHAPE, "--variant", "third"], "--variant: got third; allowed first, second"),
        (["tune", "--shape", "2,4,0,16"], "allowed one that needs a kernel"),
    ],
)
def test_wrong_options_say_what_is_accepted(words, said, capsys):
    assert command.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_without_a_gpu_the_command_says_what_to_do(capsys):
    assert command.main(SHAPE) == 1
    assert "torch finds no GPU here. `multiattn doctor`" in capsys.readouterr().out


def test_explain_cites_what_was_tuned(monkeypatch, capsys):
    config, bundled = other_config()
    own = timed(way(bundled.variant, asdict(config), 512), bundled=way(bundled.variant, None, 498))
    found = fakes.tuning(fakes.cell(replace(LAYER, batch=16), {"cuda": own}))
    monkeypatch.setattr(command, "_tuning_here", lambda arch: found)
    assert command.main(["explain", "--shape", "16,16,1024,128", "--causal", "--arch", "sm90"]) == 0
    said = capsys.readouterr().out
    assert said.count("tuned here: NVIDIA Test, 2026-11-26") == 2  # of auto and of the variant
    assert f"config: {config}" in said
    assert command.main(["explain", "--shape", "16,16,1024,128", "--window", "4096:0", "--arch", "sm90"]) == 0
    assert "tuned here" in capsys.readouterr().out, "the same mask, as calls see it"


def test_explain_names_no_backend_that_a_call_cannot_have_here(monkeypatch, capsys):
    real = get
    missing = (Reason(code="package", got="no cuda-core", allowed="1.0"),)
    made = {name: replace(real(name), probe=lambda arch: ()) for name in BACKENDS}
    asked = ["explain", "--shape", "2,16,1024,128", "--causal", "--arch", "sm90"]
    assert command.main(asked) == 0
    best = capsys.readouterr().out.split("auto takes ")[1].split()[0]
    made[best] = replace(real(best), probe=lambda arch: missing)
    monkeypatch.setattr(registry, "get", lambda name: made.get(name) or real(name))
    monkeypatch.setattr(command, "detect", lambda device: ARCHS["sm90"])
    monkeypatch.setattr(command, "tuning_for", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "default_arch", lambda: "sm90")
    monkeypatch.setattr(ncu, "default_arch", lambda: "sm90")
    assert command.main(asked) == 0
    assert f"auto takes {best}" not in (said := capsys.readouterr().out)
    assert "auto takes " in said
