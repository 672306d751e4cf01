"""bench.hopper_docs: what docs/hopper.md shows of results, and what it says where there are none."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import bench_fakes as fakes
import pytest

from bench import hopper_docs, profile, readme
from bench.environment import results_root
from bench.errors import InputError
from bench.matrix import SUITES
from bench.results import dumps
from bench.tune_results import Sweep, Tried, merge
from multiattn.arch import ARCHS
from multiattn.cuda import exp2
from multiattn.cuda.wgmma_configs import WgmmaConfig
from multiattn.support import Reason
from multiattn.targets.ncu import METRICS

FULL = next(cell for cell in SUITES["standard"] if (cell.head_dim, cell.seq) == (128, 4096))
CAUSAL = replace(FULL, causal=True)
GROUPED = replace(FULL, heads_kv=2, dtype="fp16", batch=1)


def ours(time_ms, cell, name="cuda", variant="wgmma"):
    return replace(fakes.row(name, time_ms, cell=cell), plan={"variant": variant, "config": None, "why": ""})


def write_rows(folder, rows, name="standard"):
    path = folder / "h200" / "peers" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(name, rows))
    return path


def cells_of(text, first):
    """The cells of the table's line that begins with these."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return next(line for line in lines if line[: len(first)] == [str(it) for it in first])


def test_the_page_is_what_the_results_give():
    assert hopper_docs.update(results_root(), check=True), "run python -m bench readme"


def test_the_page_has_every_block():
    marked = [match[2] for match in readme.MARKED.finditer(hopper_docs.PAGE.read_text())]
    assert sorted(marked) == sorted(hopper_docs.blocks(results_root()))


def test_without_results_every_block_says_so(tmp_path):
    made = {name: block() for name, block in hopper_docs.blocks(tmp_path).items()}
    for name, text in made.items():
        if name != "exp2":
            assert re.fullmatch(r"Not measured yet: `bench/results/h200/[\w/-]+\.json` is not there\.", text), name
    assert exp2.degrees_table() in made["exp2"]
    assert exp2.table() in made["exp2"]


# ---------------------------------------------------------------- peers


def test_ours_is_set_against_the_faster_peer(tmp_path):
    rows = [
        *(ours(1.0, FULL), fakes.row("sdpa-cudnn", 2.0, cell=FULL), fakes.row("fa4", 1.25, cell=FULL)),
        *(ours(2.0, CAUSAL), fakes.row("sdpa-cudnn", 1.0, cell=CAUSAL), fakes.row("sdpa-flash", 0.1, cell=CAUSAL)),
    ]
    text = hopper_docs.peers_block(write_rows(tmp_path, rows))
    assert cells_of(text, (128, "full")) == ["128", "full", "4096", "100", "50", "80", "1.250"]
    assert cells_of(text, (128, "causal")) == ["128", "causal", "4096", "50", "100", "not in this run", "0.500"]
    assert cells_of(text, ("all",)) == ["all", "2", "0.791", "1", "0"]
    assert "NVIDIA H200" in text
    assert "2026-11-21" in text
    assert "c0ffee" in text


def test_the_setups_of_ours_and_of_peers_are_told(tmp_path):
    measured_later = replace(fakes.SETUP, commit="1ater")
    rows = [replace(ours(1.0, FULL), environment=measured_later), fakes.row("fa4", 1.0, cell=FULL)]
    text = hopper_docs.peers_block(write_rows(tmp_path, rows))
    assert "1ater" in text
    assert "c0ffee" in text


def test_the_headline_is_of_all_three_comparisons(tmp_path):
    untimed = replace(fakes.row("cuda", 1.0, cell=CAUSAL), measured=None, error="RuntimeError: no")
    slower = [ours(1.25, FULL), fakes.row("fa4", 1.0, cell=FULL), untimed, fakes.row("fa4", 1.0, cell=CAUSAL)]
    replayed = [replace(it, regime="graph") for it in (ours(1.0, FULL), fakes.row("fa4", 2.0, cell=FULL))]
    write_rows(tmp_path, [*slower, *replayed])
    assert hopper_docs.headline(tmp_path) == "Not measured yet: `bench/results/h200/peers/heldout.json` is not there."
    level = [ours(1.0, FULL), fakes.row("fa4", 1.0, cell=FULL)]
    write_rows(tmp_path, [*level, ours(4.0, CAUSAL), fakes.row("sdpa-cudnn", 1.0, cell=CAUSAL)], "heldout")
    text = hopper_docs.headline(tmp_path)
    assert cells_of(text, ("`standard`, back to back",))[1:] == ["1 of 2", "0.800", "1", f"0.800, {FULL.key}"]
    assert cells_of(text, ("`standard`, graph replay",))[1:] == ["1 of 1", "2.000", "0", f"2.000, {FULL.key}"]
    assert cells_of(text, ("`heldout`, back to back",))[1:] == ["2 of 2", "0.500", "1", f"0.250, {CAUSAL.key}"]


def test_there_is_no_headline_without_a_ratio(tmp_path):
    write_rows(tmp_path, [ours(1.0, FULL), fakes.row("fa4", 1.0, cell=FULL)])
    assert "peers/standard.json` has no ratio in the graph regime" in hopper_docs.headline(tmp_path)


def test_what_rounds_to_one_is_still_below_it(tmp_path):
    rows = [ours(1.0004, FULL), fakes.row("fa4", 1.0, cell=FULL)]
    assert cells_of(hopper_docs.peers_block(write_rows(tmp_path, rows)), ("all",)) == ["all", "1", "1.000", "1", "0"]


def test_a_cell_without_a_time_counts_as_one_without_a_ratio(tmp_path):
    refused = replace(
        fakes.row("cuda/wgmma", 1.0, cell=FULL), measured=None, reasons=(Reason(code="arch", got="a", allowed="b"),)
    )
    text = hopper_docs.peers_block(write_rows(tmp_path, [refused, fakes.row("fa4", 1.0, cell=FULL)]))
    assert cells_of(text, (128, "full"))[3:] == ["refused", "not in this run", "100", "-"]
    assert cells_of(text, ("all",)) == ["all", "0", "-", "0", "1"]


def test_a_peer_that_was_refused_takes_no_cell_away(tmp_path):
    refused = replace(
        fakes.row("fa4", 1.0, cell=FULL), measured=None, reasons=(Reason(code="dtype", got="a", allowed="b"),)
    )
    rows = [replace(ours(1.0, FULL), run="2026-11-22T10"), replace(refused, run="")]
    text = hopper_docs.peers_block(write_rows(tmp_path, rows))
    assert cells_of(text, (128, "full"))[3:] == ["100", "not in this run", "refused", "-"]


def test_another_variant_of_cuda_is_not_ours(tmp_path):
    path = write_rows(tmp_path, [ours(1.0, FULL, variant="split_q"), fakes.row("fa4", 1.0, cell=FULL)])
    assert "has no row of cuda's variant wgmma" in hopper_docs.peers_block(path)
    path = write_rows(tmp_path, [ours(1.0, FULL, variant="split_q"), ours(0.5, FULL, "cuda/wgmma")])
    assert cells_of(hopper_docs.peers_block(path), (128, "full"))[3] == "200"


def test_a_cell_in_which_another_variant_ran_or_none_is_not_left_out(tmp_path):
    failed = replace(fakes.row("cuda", 1.0, cell=GROUPED), measured=None, error="RuntimeError: no")
    rows = [ours(1.0, FULL), ours(1.0, CAUSAL, variant="split_q"), failed]
    rows += [fakes.row("fa4", 1.0, cell=cell) for cell in (FULL, CAUSAL)]
    text = hopper_docs.peers_block(write_rows(tmp_path, rows))
    assert cells_of(text, (128, "causal"))[3:] == ["100 (split_q)", "not in this run", "100", "-"]
    assert "| error" in text
    assert cells_of(text, ("all",)) == ["all", "1", "1.000", "0", "2"]


def test_held_out_cells_are_told_by_all_their_sizes(tmp_path):
    path = write_rows(tmp_path, [ours(1.0, GROUPED), fakes.row("fa4", 2.0, cell=GROUPED)], "heldout")
    text = hopper_docs.blocks(tmp_path)["heldout"]()
    assert text == hopper_docs.peers_block(path, every_size=True)
    assert cells_of(text, (128, "full"))[2:7] == ["4096", "1", "16/2", "fp16", "100"]


# ---------------------------------------------------------------- peers and other variants in a CUDA graph

SM80 = "split_q+swizzle_qkv"


def graph_rows(cell, wgmma, **others):
    """Rows of the graph regime that took turns: milliseconds of ours, of `sm80`, of `slow`, of a peer."""
    rows = [ours(wgmma, cell, "cuda/wgmma")]
    for name, time_ms in others.items():
        variant = {"sm80": SM80, "slow": "split_kv"}.get(name)
        row = ours(time_ms, cell, f"cuda/{variant}", variant) if variant else fakes.row(name, time_ms, cell=cell)
        rows.append(row)
    return [replace(row, regime="graph") for row in rows]


def test_in_a_graph_ours_is_set_against_peers_and_against_the_fastest_other_variant(tmp_path):
    rows = graph_rows(FULL, 1.0, slow=5.0, sm80=4.0, fa4=1.25) + graph_rows(CAUSAL, 1.0, sm80=2.0, fa4=0.5)
    write_rows(tmp_path, rows)
    blocks = hopper_docs.blocks(tmp_path)
    graph, variants = blocks["graph"](), blocks["variants"]()
    assert cells_of(graph, ("D", "mask"))[3:] == ["cuda wgmma", "sdpa-cudnn", "fa4", "ratio"]
    assert cells_of(graph, (128, "full"))[3:] == ["100", "not in this run", "80", "1.250"]
    assert cells_of(graph, (128, "causal"))[3:] == ["100", "not in this run", "200", "0.500"]
    assert cells_of(graph, ("all",)) == ["all", "2", "0.791", "1", "0"]
    assert cells_of(variants, (128, "full"))[3:] == ["100", f"25 ({SM80})", "4.000"]
    assert cells_of(variants, (128, "causal"))[3:] == ["100", f"50 ({SM80})", "2.000"]
    assert "wgmma is never slower than the variants that took turns with it: the least ratio is 2.000" in variants
    assert "c0ffee" in variants


def test_variants_and_peers_may_be_of_runs_of_their_own(tmp_path):
    """Slow variants leave the chip cool for whoever comes after them: peers are timed without."""

    def of_run(run, *rows):
        return [replace(row, regime="graph", run=run) for row in rows]

    rows = [
        *of_run("2026-11-22T10", ours(1.0, FULL), fakes.row("fa4", 1.25, cell=FULL)),
        *of_run("2026-11-22T11", *graph_rows(FULL, 0.5, sm80=2.0)),
    ]
    for order in (rows, rows[::-1]):
        write_rows(tmp_path, order)
        blocks = hopper_docs.blocks(tmp_path)
        assert cells_of(blocks["graph"](), (128, "full"))[3:] == ["100", "not in this run", "80", "1.250"]
        assert cells_of(blocks["variants"](), (128, "full"))[3:] == ["200", f"50 ({SM80})", "4.000"]


def test_a_variant_that_is_faster_is_told(tmp_path):
    rows = graph_rows(FULL, 1.0, sm80=2.0) + graph_rows(CAUSAL, 1.0, sm80=0.75)
    text = hopper_docs.variants_block(write_rows(tmp_path, rows), regime="graph")
    assert "wgmma is slower in places than the variants that took turns with it: the least ratio is 0.750" in text
    assert f"at D=128 causal N={CAUSAL.seq}." in text


def test_a_variant_that_did_not_run_is_no_yardstick(tmp_path):
    *timed, sm80 = graph_rows(FULL, 1.0, fa4=2.0, sm80=2.0)
    refused = replace(sm80, plan=None, measured=None, reasons=(Reason(code="arch", got="a", allowed="b"),))
    text = hopper_docs.variants_block(write_rows(tmp_path, [*timed, refused]), regime="graph")
    assert text.endswith("has no run of cuda's variants together in the graph regime.")
    path = write_rows(tmp_path, [*timed, refused, *graph_rows(CAUSAL, 1.0, sm80=2.0)])
    text = hopper_docs.variants_block(path, regime="graph")
    assert cells_of(text, (128, "causal"))[-1] == "2.000"
    assert "| full" not in text


def test_regimes_do_not_leak_into_one_another(tmp_path):
    device = [ours(1.0, FULL), fakes.row("fa4", 2.0, cell=FULL)]
    made = {}
    for name, rows in {
        "device": device,
        "graph": graph_rows(FULL, 4.0, fa4=2.0, sm80=8.0),
        "both": [*device, *graph_rows(FULL, 4.0, fa4=2.0, sm80=8.0)],
    }.items():
        write_rows(tmp_path, rows)
        made[name] = [hopper_docs.blocks(tmp_path)[block]() for block in ("standard", "graph")]
    missing = "`bench/results/h200/peers/standard.json` has no row of cuda's variant wgmma in the"
    assert made["device"][1] == f"Not measured yet: {missing} graph regime."
    assert made["graph"][0] == f"Not measured yet: {missing} device regime."
    assert made["both"] == [made["device"][0], made["graph"][1]]
    standard, graph = (cells_of(text, (128, "full"))[3:] for text in made["both"])
    assert standard == ["100", "not in this run", "50", "2.000"]
    assert graph == ["25", "not in this run", "50", "0.500"]


# ---------------------------------------------------------------- techniques


def tried(tflops, failure="", **fields):
    config = WgmmaConfig(**{"tile_m": 128, "tile_n": 128, "lazy_max": True, "pingpong": True, **fields})
    return Tried(name=f"cuda/wgmma {config}", config=asdict(config), tflops=tflops, failure=failure)


def sweep(*candidates, cell=FULL, variant="wgmma"):
    return Sweep(
        backend="cuda",
        variant=variant,
        cell=cell,
        environment=fakes.SETUP,
        yardstick="sdpa-cudnn",
        yardstick_tflops=560.0,
        tried=candidates,
    )


CANDIDATES = (
    tried(640.0),
    tried(560.0, lazy_max=False),
    tried(480.0, scheduler="static"),
    tried(600.0, exp2_fma_fraction=0.125),
    tried(None, failure="spills", q_in_registers=True),
    tried(400.0, scheduler="static", lazy_max=False),
)


def test_a_change_is_one_field_away_from_the_winner():
    found = hopper_docs.changes(sweep(*CANDIDATES))
    assert [(it.field, it.winner, it.other, it.ratio) for it in found] == [
        ("scheduler", "dynamic", "static", 0.75),
        ("q_in_registers", False, True, None),
        ("lazy_max", True, False, 0.875),
        ("exp2_fma_fraction", 0.0, 0.125, 0.9375),
    ]
    assert hopper_docs.changes(sweep(tried(None, failure="spills"))) == []


def test_after_finals_a_change_is_of_turns_that_both_were_in():
    def final(tflops, first_tflops, **fields):
        return replace(tried(tflops, **fields), first_tflops=first_tflops)

    found = hopper_docs.changes(
        sweep(
            final(500.0, 800.0),
            final(450.0, 790.0, lazy_max=False),
            final(None, 600.0, scheduler="static"),
            final(None, None, q_in_registers=True),
        )
    )
    assert {it.field: it.ratio for it in found} == {"lazy_max": 0.9, "scheduler": 0.75, "q_in_registers": None}


def test_a_change_that_ran_in_other_turns_than_the_winner_has_not_failed(tmp_path):
    """A file of the time before `first_tflops` was kept, or a winner that the first turns had no time of."""
    other = replace(tried(None, scheduler="static"), first_tflops=600.0)
    path = tmp_path / "tune-cuda.json"
    merge([sweep(tried(500.0), other, tried(None, failure="spills", q_in_registers=True))], path)
    text = hopper_docs.techniques_block(path)
    assert cells_of(text, ("`scheduler`",)) == ["`scheduler`", "dynamic → static", ""]
    assert cells_of(text, ("`q_in_registers`",)) == ["`q_in_registers`", "off → on", "failed"]


def test_techniques_are_told_by_length(tmp_path):
    path = tmp_path / "tune-cuda.json"
    longer = replace(FULL, seq=16384, batch=1)
    others = (
        sweep(tried(500.0), tried(510.0, pingpong=False), cell=CAUSAL),
        sweep(tried(700.0), cell=longer),
        sweep(tried(900.0), variant="split_q"),
        sweep(tried(900.0), cell=replace(FULL, direction="bwd")),
    )
    merge([sweep(*CANDIDATES), *others], path)
    text = hopper_docs.techniques_block(path)
    first, second = text.split("N=16384.")
    assert first.startswith("N=4096.")
    assert cells_of(first, ("128 full",))[2:] == ["640", "sdpa-cudnn 560"]
    assert cells_of(first, ("`lazy_max`",)) == ["`lazy_max`", "on → off", "0.875", ""]
    assert cells_of(first, ("`q_in_registers`",)) == ["`q_in_registers`", "off → on", "failed", ""]
    assert cells_of(first, ("`exp2_fma_fraction`",))[1] == "0/16 → 2/16"
    assert cells_of(first, ("`pingpong`",)) == ["`pingpong`", "off → on", "", "0.980"]
    assert "One field changed" not in second
    assert "900" not in text
    assert "c0ffee" in text


def test_a_file_without_a_sweep_of_ours_is_not_measured(tmp_path):
    path = tmp_path / "tune-cuda.json"
    merge([sweep(tried(1.0), variant="split_q")], path)
    assert "has no timed sweep of wgmma" in hopper_docs.techniques_block(path)


# ---------------------------------------------------------------- cycles

LAUNCH = {
    "kernel": "forward_wgmma",
    "cell": "D=128 full",
    "metrics": {
        "lts__throughput.avg.pct_of_peak_sustained_elapsed": 31.456,
        "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active": 78.123,
        "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": 55,
        "something__else": "as it is",
        "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": 1.0,
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": 3.0,
    },
}


def test_every_metric_is_a_row(tmp_path):
    path = tmp_path / "ncu-wgmma.json"
    second = {**LAUNCH, "cell": FULL.as_dict(), "metrics": {"something__more": 2}}
    path.write_text(json.dumps([LAUNCH, second]))
    text = hopper_docs.cycles_block(path)
    assert FULL.key in text
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:]
    assert [row.partition(" (")[0] for row in rows] == [
        "tensor pipe active, %",
        "XU pipe",
        "L2 throughput, %",
        "`something__else`",
        "`something__more`",
        "stalls, most first",
    ]
    assert cells_of(text, ("stalls, most first",)) == ["stalls, most first", "long_scoreboard 75 %, wait 25 %", ""]
    assert cells_of(text, ("`something__more`",)) == ["`something__more`", "", "2"]
    assert "| 78.12" in text
    assert "Kernels: `forward_wgmma`. On which GPU, when and of which commit the file does not say" in text


def test_a_file_of_counts_may_say_where_it_is_from(tmp_path):
    path = tmp_path / "ncu-wgmma.json"
    launches = [LAUNCH, {**LAUNCH, "kernel": "another"}]
    setup = {"gpu": "NVIDIA H200", "date": "2026-11-22", "commit": "c0ffee"}
    path.write_text(json.dumps({**setup, "launches": launches}))
    text = hopper_docs.cycles_block(path)
    assert text.endswith("NVIDIA H200, 2026-11-22, commit c0ffee")
    assert "forward_wgmma, D=128 full" in text
    path.write_text(json.dumps([{**LAUNCH, **setup}]))
    assert hopper_docs.cycles_block(path).endswith("NVIDIA H200, 2026-11-22, commit c0ffee")


@pytest.mark.parametrize("text", ["{", "3", '{"launches": [1]}', '[{"kernel": "a", "cell": "b"}]'])
def test_another_file_of_counts_is_an_error_that_names_it(tmp_path, text):
    path = tmp_path / "ncu-wgmma.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"ncu-wgmma\.json: no list of kernel, cell and metrics"):
        hopper_docs.cycles_block(path)


COUNTED = "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
CSV = f"""==PROF== Connected
"ID","Kernel Name","CC","Grid Size","Block Size","gpu__time_duration.sum","{METRICS["tensor pipe"]}","{COUNTED}","other"
"","","","","","ns","%","inst",""
"0","forward_wgmma_d128(WgmmaParams)","9.0","(132, 1, 1)","(384, 1, 1)","500","80.5","1.5","384"
"""


def test_what_ncu_prints_becomes_a_file_of_counts(tmp_path, monkeypatch):
    asked = []

    def run(arguments):
        asked.append(arguments)
        return CSV

    monkeypatch.setattr(profile, "find_ncu", lambda: "ncu")
    cells = [replace(FULL, layout="bshd"), CAUSAL]
    launches = profile.profiled(cells, "cuda", "wgmma", ARCHS["sm90"], run=run)
    assert [it["cell"]["causal"] for it in launches] == [False, True]
    assert all(it[:3] == ["ncu", "--section", "WarpStateStats"] for it in asked)
    assert [json.loads(it[-1])["variant"] for it in asked] == ["wgmma"] * 2
    path = tmp_path / "ncu-wgmma.json"
    profile.write(launches, fakes.SETUP, path)
    text = hopper_docs.cycles_block(path)
    assert fakes.SETUP.commit in text
    assert "tensor pipe active, %" in text
    assert set(launches[0]["metrics"]) == {METRICS["duration"], METRICS["tensor pipe"], COUNTED}  # ncu tells more


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "ERR_NVGPUCTRPERM"),
        (CSV + CSV.splitlines()[-1].replace("0", "1", 1), "2 launches"),
    ],
)
def test_what_ncu_did_not_count_is_an_error_that_names_the_cell(monkeypatch, printed, told):
    monkeypatch.setattr(profile, "find_ncu", lambda: "ncu")
    with pytest.raises(InputError, match=told) as raised:
        profile.profiled([FULL], "cuda", "wgmma", ARCHS["sm90"], run=lambda arguments: printed)
    assert replace(FULL, layout="bhsd").key in str(raised.value)


# ---------------------------------------------------------------- probes


def test_a_probe_of_two_runs_is_told_by_shares_of_their_own_peers(tmp_path):
    path = tmp_path / "hopper_probes.json"
    point = {
        "head_dim": 128,
        "seq": 4096,
        "causal": True,
        "label": "a",
        "with": {"config": "x", "tflops": 300.0, "peer": 500.0},
        "without": {"config": "y", "tflops": 300.0, "peer": 600.0},
    }
    more = {**point, "seq": 1024, "with": {"config": "x", "tflops": 400.0, "peer": 600.0}}
    setup = {"schema": 1, "gpu": "NVIDIA H200", "date": "2026-11-22", "commit": "c0ffee", "labels": "Labels."}
    path.write_text(json.dumps({**setup, "probes": [{"name": "Probe", "what": "What.", "points": [point, more]}]}))
    text = hopper_docs.probes_block(path)
    assert text.startswith("**Probe.** What. Geometric mean of the ratio: 1.265, over 2 cells.")
    assert cells_of(text, (128, "causal", "a"))[3:] == ["1.33 (400, 300)", "1.20 (300, 300)"]
    assert text.endswith("Labels. NVIDIA H200, 2026-11-22, commit c0ffee.")
    path.write_text(json.dumps({"schema": 7}))
    with pytest.raises(InputError, match=r"hopper_probes\.json: not a file of probes of schema 1"):
        hopper_docs.probes_block(path)
