"""bench.expected and bench.emitted: what is on record of every target, what got worse, and what a GPU said of it."""

import json
from dataclasses import replace
from pathlib import Path

import bench_fakes as fakes
import pytest
import torch
from targets_fakes import HOT, entry, facts, failed, refused

from bench import cli, emitted, expected, rule_table, target_cli, target_docs
from bench.emitted import Loaded, Usage
from bench.environment import ROOT
from bench.errors import InputError
from multiattn.cuda.axes import SPLIT_Q
from multiattn.cuda.configs import CudaConfig
from multiattn.inspect.build import entry_of
from multiattn.inspect.cells import HEAD_DIMS, MASKS, Cell, cells
from multiattn.inspect.facts import read_kernel
from multiattn.inspect.mix import Counts, Mix
from multiattn.plan.arch import GPU_ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, find_variant, get, plan_variant

RECORDED = expected.load_all(ROOT / "bench" / "expected")


def test_the_subset_spans_the_table():
    chosen = expected.spanning_cells()
    assert len(chosen) == len(expected.SPANNING) + len(BACKENDS) * len(expected.ALWAYS)
    assert {cell.arch for cell in chosen} == set(GPU_ARCHS)
    for name in BACKENDS:
        mine = [cell for cell in chosen if cell.backend == name]
        for attribute, values in (("direction", DIRECTIONS), ("mask", MASKS), ("head_dim", HEAD_DIMS)):
            assert {getattr(cell, attribute) for cell in mine} == set(values)
        machinery = {it for cell in mine for it in features_of(cell)}
        assert machinery == {it for cell in cells((name,)) for it in features_of(cell)}


def features_of(cell):
    """What the record has of a cell's kernels: tensor cores and ways to move data."""
    entries = [it for it in RECORDED[cell.arch].entries if it.cell == cell]
    return {feature for it in entries for kernel in it.kernels for feature in kernel.features}


MADE = [
    entry(direction="backward", kernels=[facts("dq", remarks=()), facts("dkdv", hot_spills=3, chosen=("TMA load",))]),
    refused(arch="sm90", head_dim=64),
    failed(arch="sm90", head_dim=256),
    entry("triton"),
]


def test_a_record_holds_all_but_what_varies(tmp_path):
    expected.save(MADE, tmp_path)
    record = expected.load(tmp_path / "sm90.json")
    assert [it.cell for it in record.entries] == [it.cell for it in expected.ordered(MADE)]
    for before, now in zip(record.entries, expected.ordered(MADE), strict=True):
        assert expected.compare(before, now, compiler="same") == []
        assert [expected.pack(it) for it in before.kernels] == [expected.pack(it) for it in now.kernels]
    text = (tmp_path / "sm90.json").read_text()
    expected.save([replace(it, kernels=tuple(replace(k, seconds=9.0) for k in it.kernels)) for it in MADE], tmp_path)
    assert (tmp_path / "sm90.json").read_text() == text


@pytest.mark.parametrize("text", ['{"schema": 0}', "[]", "no json"])
def test_another_file_is_named(text, tmp_path):
    (tmp_path / "sm90.json").write_text(text)
    with pytest.raises(InputError, match=r"sm90\.json"):
        expected.load_all(tmp_path)


def counts(**changes):
    """The instructions of a kernel without a fault, some of them changed."""
    names = {"HMMA": "HMMA.16816.F32.BF16", "HGMMA": "HGMMA.64x128x16.F32.BF16"}
    classes = {name: number for name, number in {**HOT.classes, **changes}.items() if number}
    return Counts(classes=classes, tensor_names={names[it]: classes[it] for it in names if it in classes})


def mix(hot, code=None):
    return Mix(code=code or hot, hot=hot, loops=(hot,), code_bytes=4096)


class TestCompare:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"hot_spills": 2}, "0 -> 2 spills in its hot loops"),
            ({"other_spills": 1}, "0 -> 1 spills outside its hot loops"),
            ({"stack_bytes": 800}, "0 -> 800 bytes of stack"),
            ({"hot_loops": 0}, "no loop on tensor cores is left"),
            ({"blocks": 2, "share": 0.125}, "occupancy 3 blocks, 18.8% of the warps -> 2 blocks, 12.5% of the warps"),
            ({"mix": mix(counts(UTMALDG=0, LDGSTS=2))}, "TMA load is lost"),
            ({"mix": mix(counts(UTMALDG=0), counts())}, "UTMALDG in its hot loops is lost"),
            ({"mix": mix(counts(HGMMA=0, HMMA=16))}, "wgmma is lost"),
            ({"mix": mix(counts(HGMMA=0, HMMA=16), counts(HMMA=16))}, "wgmma in its hot loops is lost"),
            ({"mix": mix(counts(HGMMA=4))}, "12.0 -> 48.0 FP32 and integer instructions for each of the tensor core's"),
        ],
    )
    @pytest.mark.parametrize("compiler", ["same", "newer"])
    def test_what_is_worse_is_a_regression(self, change, message, compiler):
        found = expected.compare(entry(), entry(kernels=[facts(**change)]), compiler=compiler)
        assert found[0].kind == "regression"
        assert message in str(found[0])

    def test_what_an_older_compiler_makes_worse_is_a_note(self):
        worse = entry(kernels=[facts(hot_spills=2)])
        found = expected.compare(entry(), worse, compiler="older")
        assert {it.kind for it in found} == {"note"}
        assert "0 -> 2 spills in its hot loops" in str(found[0])
        (lost,) = expected.compare(entry(arch="sm80"), failed(), compiler="older")
        assert lost.kind == "regression"

    def test_kernels_are_compared_by_name(self):
        before = entry(kernels=[facts("dq"), facts("dkdv", registers=200)])
        swapped = entry(kernels=[facts("dkdv", registers=200), facts("dq")])
        assert expected.compare(before, swapped, compiler="same") == []
        fewer, more = (
            entry(kernels=kernels) for kernels in ([facts("dq")], [*before.kernels, facts("x", hot_spills=9)])
        )
        for now, message in ((fewer, "dkdv is gone"), (more, "x, which is new, spills 9 times in its hot loops")):
            found = expected.compare(before, now, compiler="newer")
            assert (found[0].kind, found[0].text) == ("regression", message)
        renamed = entry(kernels=[facts("dq"), facts("dkdv_64x64", registers=200)])
        assert [it.kind for it in expected.compare(before, renamed, compiler="newer")] == ["note"]

    def test_a_rare_pass_may_change_its_tensor_core(self):
        before, now = (entry(kernels=[facts(mix=mix(counts(), code))]) for code in (counts(HMMA=8), counts()))
        assert [it.kind for it in expected.compare(before, now, compiler="newer")] == ["note"]

    def test_what_cutile_chose_is_guarded_too(self):
        chosen = ("TMA load", "wgmma 64x64x16"), ("cp.async", "wgmma 64x32x16")  # another shape is no loss
        before, now = (entry(kernels=[facts(chosen=it)]) for it in chosen)
        lost = [it.text for it in expected.compare(before, now, compiler="newer") if it.kind == "regression"]
        assert lost == ["attention: TMA load is lost"]

    def test_a_difference_is_stale_or_a_note(self):
        now = entry(kernels=[facts(registers=160)])
        (stale,) = expected.compare(entry(), now, compiler="same")
        (note,) = expected.compare(entry(), now, compiler="newer")
        assert (stale.kind, note.kind) == ("stale", "note")
        assert stale.text == note.text == "attention registers 168 -> 160"

    @pytest.mark.parametrize(
        ("before", "now", "kind"),
        [
            (entry(arch="sm80"), failed(), "regression"),
            (entry(arch="sm86"), refused(), "regression"),
            (refused(), entry(arch="sm86"), "stale"),
            (refused(), replace(refused(), reasons=(replace(refused().reasons[0], allowed="sm100"),)), "stale"),
        ],
    )
    def test_what_compiles_and_what_does_not(self, before, now, kind):
        assert [it.kind for it in expected.compare(before, now, compiler="same")] == [kind]

    def test_nothing_is_nothing(self):
        assert expected.compare(entry(), entry(), compiler="same") == []
        assert expected.compare(failed(), failed(), compiler="same") == []


def test_a_spill_on_purpose_is_a_regression(tmp_path, monkeypatch):
    """The larger tile of a real kernel, by a real compiler."""
    if get("cuda").probe_compiler():
        pytest.skip("no NVRTC")
    monkeypatch.setenv("MULTIATTN_CACHE_DIR", str(tmp_path))
    cell = Cell(backend="cuda", arch="sm90", head_dim=128, mask="full")
    (before,) = (it for it in RECORDED["sm90"].entries if it.cell == cell)
    variant = find_variant(get("cuda"), SPLIT_Q.name)
    config = CudaConfig(tile_m=128, tile_n=96, warps=4, stages=1)
    plan = plan_variant(get("cuda"), variant, cell.problem, cell.plan().arch, config)
    kernels = tuple(read_kernel(kernel, plan) for kernel in get("cuda").forward.export(plan, ()))
    found = expected.compare(before, entry_of(cell, plan, kernels), compiler="newer")
    assert any(it.kind == "regression" and "spills in its hot loops" in it.text for it in found)


class TestRecorded:
    def test_a_cell_of_which_nothing_came_is_a_regression(self):
        cell = Cell(backend="cuda", arch="sm90")
        (found,) = expected.check_compiled([cell], RECORDED, [])
        assert str(found) == "regression: cuda forward D=128 causal sm90: nothing came of it"

    def test_it_agrees_with_the_rules_on_record(self):
        """Two tables of the same compilers over the same sources: where a rule's case is a cell, they say the same."""
        rules = {}
        for row in rule_table.load(rule_table.record_path()):
            rules.setdefault(row.key, []).append(row)
        compared = 0
        for it in (it for record in RECORDED.values() for it in record.entries):
            cell = it.cell
            key = (cell.backend, cell.direction, it.variant, cell.arch, str(cell.head_dim), cell.mask, it.config)
            rows = rules.get(key, [])
            if cell.problem.heads_q == rule_table.HEADS and rows:
                ours = [(k.registers, k.smem_bytes, k.hot_spills, k.blocks) for k in it.kernels]
                assert ours == [(r.registers, r.smem_bytes, r.hot_spills, r.blocks) for r in rows], cell
                compared += 1
        assert compared > 60

    def test_the_page_is_made_of_it(self):
        assert (ROOT / "docs" / "targets.md").read_text() == target_docs.page(RECORDED), "run make expected"

    def test_what_the_driver_said_is_what_is_on_record(self):
        """sm90 kernels of the table, loaded on an H200: registers and shared memory as the driver reports them."""
        loaded = emitted.load(ROOT / "bench" / "results" / "h200" / "emitted.json")
        assert [it.name for it in loaded if not it.is_right] == []
        said = {(it.backend, it.direction, it.head_dim, it.mask): [] for it in loaded}
        for it in loaded:
            said[it.backend, it.direction, it.head_dim, it.mask].append(
                (it.driver.registers, it.driver.static_smem_bytes, it.driver.blocks)
            )
        # Since an H200 loaded them: to be loaded again.
        changed = {("cutile", "forward"), ("triton", "forward"), ("triton", "backward")}
        assert changed.isdisjoint((it.backend, it.direction) for it in loaded)
        for it in RECORDED["sm90"].entries:
            where = (it.cell.backend, it.cell.direction, it.cell.head_dim, it.cell.mask)
            if where[:2] in changed:
                continue
            for kernel in it.kernels:
                assert (kernel.registers, kernel.static_smem_bytes, kernel.blocks) in said[where], it.cell


class TestCommand:
    @pytest.fixture(autouse=True)
    def made(self, monkeypatch, tmp_path):
        """A table of two cells, of which the second spills since it was recorded."""
        wanted = cells(("cuda",), ("sm90",), directions=("forward",), head_dims=(64, 128), masks=("full",))
        recorded = [entry(head_dim=cell.head_dim, mask="full") for cell in wanted]
        now = [recorded[0], entry(head_dim=128, mask="full", kernels=[facts(hot_spills=5)])]
        folder = tmp_path / "expected"
        (tmp_path / "docs").mkdir()
        monkeypatch.setattr(expected, "record_folder", lambda: folder)
        monkeypatch.setattr(expected, "workplace", lambda: tmp_path)
        monkeypatch.setattr(target_cli, "workplace", lambda: tmp_path)
        monkeypatch.setattr(target_cli, "ROOT", tmp_path)
        monkeypatch.setattr(expected, "all_cells", lambda: wanted)
        monkeypatch.setattr(expected, "spanning_cells", lambda: wanted)
        monkeypatch.setattr(expected, "check_recorded", lambda recorded: [])
        monkeypatch.setattr(expected, "build", lambda wanted, **_: iter(now))
        expected.save(recorded, folder)
        (tmp_path / "docs" / "targets.md").write_text(target_docs.page(expected.load_all(folder)))
        return now

    def test_a_check_is_red_where_it_got_worse(self, made, capsys):
        assert cli.main(["expected", "--check"]) == 1
        printed = capsys.readouterr().out
        assert "regression: cuda forward D=128 full sm90: attention: 0 -> 5 spills in its hot loops" in printed
        made[1] = entry(head_dim=128, mask="full")
        assert cli.main(["expected", "--check"]) == 0

    def test_a_check_excuses_what_an_older_compiler_makes(self, capsys, monkeypatch):
        newer = expected.current_compilers()
        monkeypatch.setattr(expected, "compiler", lambda name: "nvidia-cuda-nvrtc 12.0.1" if name == "cuda" else "")
        assert cli.main(["expected", "--check"]) == 0
        printed = capsys.readouterr().out
        assert "note: cuda forward D=128 full sm90: attention: 0 -> 5 spills in its hot loops" in printed
        assert f"nvidia-cuda-nvrtc 12.0.1 is older than {newer['cuda']} of the record" in printed

    def test_a_check_holds_a_newer_compiler_to_the_record(self, capsys, monkeypatch):
        monkeypatch.setattr(expected, "compiler", lambda name: "nvidia-cuda-nvrtc 99.0" if name == "cuda" else "")
        assert cli.main(["expected", "--check"]) == 1
        printed = capsys.readouterr().out
        assert "regression: cuda forward D=128 full sm90: attention: 0 -> 5 spills in its hot loops" in printed
        assert "older" not in printed

    def test_an_older_compiler_records_nothing(self, capsys, monkeypatch, tmp_path):
        before = (tmp_path / "expected" / "sm90.json").read_text()
        monkeypatch.setattr(expected, "compiler", lambda name: "nvidia-cuda-nvrtc 12.0.1" if name == "cuda" else "")
        with pytest.raises(SystemExit):
            cli.main(["expected"])
        assert "remove expected first" in capsys.readouterr().err
        assert (tmp_path / "expected" / "sm90.json").read_text() == before

    def test_recording_prints_what_differs_and_makes_it_current(self, capsys, tmp_path):
        assert cli.main(["expected"]) == 0
        assert "regression: cuda forward D=128 full sm90" in capsys.readouterr().out
        assert "168 +5 18.8%" in (tmp_path / "docs" / "targets.md").read_text()
        assert cli.main(["expected", "--check"]) == 0

    def test_a_failed_compiler_is_never_expected(self, made, capsys, tmp_path):
        made[1] = failed(arch="sm90", head_dim=128, mask="full")
        before = (tmp_path / "expected" / "sm90.json").read_text()
        assert cli.main(["expected"]) == 1
        assert "failed: cuda forward D=128 full sm90: RuntimeError: ptxas" in capsys.readouterr().out
        assert (tmp_path / "expected" / "sm90.json").read_text() == before

    def test_a_stale_page_is_red(self, made, capsys, tmp_path):
        made[1] = entry(head_dim=128, mask="full")
        (tmp_path / "docs" / "targets.md").write_text("old")
        assert cli.main(["expected", "--check"]) == 1
        assert "docs/targets.md is not what bench/expected gives; run make expected" in capsys.readouterr().out

    def test_without_a_checkout_nothing_is_recorded(self, monkeypatch):
        monkeypatch.setattr(target_cli, "is_clone", lambda: False)
        with pytest.raises(SystemExit):
            cli.main(["expected"])

    def test_without_cuobjdump_it_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(target_cli, "find_cuobjdump", lambda: None)
        with pytest.raises(SystemExit):
            cli.main(["expected", "--check"])


USAGE = Usage(registers=168, local_bytes=0, static_smem_bytes=0, blocks=3)
LOADED = Loaded(
    name="k", backend="cuda", direction="forward", head_dim=64, mask="full", cubin=USAGE, driver=USAGE, passed=("a",)
)


class TestEmitted:
    @pytest.mark.parametrize(
        ("change", "right"),
        [
            ({}, True),
            ({"driver": replace(USAGE, registers=170)}, False),
            ({"failed": ("b: off",)}, False),
            ({"passed": ()}, False),
            ({"passed": (), "direction": "backward"}, True),
            ({"error": "RuntimeError: no image"}, False),
            ({"cubin": None, "driver": None}, False),
        ],
    )
    def test_a_kernel_is_right_or_not(self, change, right):
        changed = replace(LOADED, **change)
        assert changed.is_right == right
        assert bool(changed.what_is_wrong) != right

    def test_what_cannot_be_loaded_costs_no_other_kernel(self, tmp_path, monkeypatch):
        entries = [
            {"name": name, "backend": "cuda", "direction": "forward", "problem": {"head_dim": 64, "causal": False}}
            for name in ("a", "b")
        ]
        monkeypatch.setattr(emitted.aot, "entries", lambda folder: [{**it, "arch": "sm90"} for it in entries])
        found = list(emitted.check_all(tmp_path, torch.device("cpu")))
        assert [it.error for it in found] == ["ValueError: arch: got a kernel for sm90; allowed cpu, which is here"] * 2

    def test_it_survives_json_and_shows_both_words(self, tmp_path):
        path = tmp_path / "emitted.json"
        rows = [
            replace(LOADED, cubin=None, driver=None, error="x"),
            LOADED,
            replace(LOADED, driver=replace(USAGE, registers=170), failed=("b: off",)),
        ]
        emitted.save(rows, fakes.SETUP, path)
        assert emitted.load(path) == rows
        assert "168, driver 170" in emitted.table(rows)
        assert json.loads(path.read_text())["environment"]["gpu"] == fakes.SETUP.gpu

    def test_without_a_gpu_it_says_so(self, capsys):
        if torch.cuda.is_available():
            pytest.skip("there is one")
        with pytest.raises(SystemExit):
            cli.main(["emitted", str(Path("nowhere"))])
        assert "there is no GPU to load kernels on" in capsys.readouterr().err
