"""docs/languages.md: how lines are counted, and what its tables make of results, whatever is missing of them."""

from __future__ import annotations

import re
from dataclasses import replace

import bench_fakes as fakes
import pytest
import targets_fakes
import torch

from bench import cli, expected, hopper_docs, host, languages_docs, readme, rule_table, source_lines
from bench.environment import results_root
from bench.errors import InputError
from bench.languages import CUDA, CUTILE, GLUON_TRITON, LANGUAGES, TL, language_of, language_of_row
from bench.matrix import SUITES
from bench.results import dumps
from multiattn import backend as registry
from multiattn.arch import GPU_ARCHS
from multiattn.backend import BACKENDS, DIRECTIONS
from multiattn.support import Reason
from multiattn.targets.mix import Counts, Mix

FULL = next(cell for cell in SUITES["standard"] if (cell.head_dim, cell.seq, cell.causal) == (128, 4096, False))
SHORT = next(cell for cell in SUITES["standard"] if (cell.head_dim, cell.seq, cell.causal) == (128, 512, False))
BACKWARD = replace(FULL, direction="bwd")
NO = Reason(code="arch", got="a", allowed="b")


def cells_of(text, *first):
    """The cells of the table's line that begins with these, without them."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return next(line[len(first) :] for line in lines if line[: len(first)] == [str(it) for it in first])


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ("a = 1  # comment\n\n# comment\nb = 2\n", 2),
        ('"""Module.\n\nMore.\n"""\n\nimport a\n', 1),
        ('def f():\n    """Document."""\n    return 1\n', 2),
        ('A = 1\n"""What A is,\nin two lines."""\n', 1),
        ('class A:\n    """Document."""\n\n    b: int\n    """Of b."""\n', 2),
        ('a = """not\n\na document\n"""\n', 3),
        ('a = "# no comment"\n', 1),
        ("f(\n    1,  # one\n    # nothing\n    2,\n)\n", 4),
        ("f(\n    '''an argument'''\n)\n", 3),
        ('ä = "é"; """a\ndocument\n"""\n', 1),
        ('"ä"; a = 1\n', 1),
        ("'''one\n''' 'two'\na = 1 + \\\n    2\n", 2),
        ("if a:\n    pass\n", 2),
    ],
)
def test_lines_of_python(text, lines):
    assert source_lines.python_lines(text) == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ("int a;  // comment\n\n// comment\n  /* another */\nint b;\n", 2),
        ("/* a\n int b;\n\n*/ int c;\n", 1),
        ("int a; /* b\n*/ int c;\n", 2),
        ('asm("// no comment\\n"\n    "/*" : : "r"(a));\n', 2),
        ('a = "\\"// no comment";\n// one\n', 1),
        ("char a = '\"'; /* \"\n*/\nchar b = '\\''; /* '\n*/\n", 2),
        ("int a = 1'000; /* it's\n*/\nint b = 0xff'ff'f; /* ' */\n", 2),
        ('a = R"x(\n// no comment\n)" )x";\n', 3),
        ("// goes on \\\nto here\nint a;\n", 1),
        ("#pragma once\n#include <a>\n", 2),
        ("/**/ int a; /* // */ int b; // /*\nint c;\n", 2),
    ],
)
def test_lines_of_cuda(text, lines):
    assert source_lines.cpp_lines(text) == lines


def test_every_source_of_a_kernel_is_counted():
    """A file that has code for a GPU and is in no part would make its language look short."""
    decorated = re.compile(r"^@(triton\.jit|gluon\.jit|ct\.kernel|ct\.function)", re.MULTILINE)
    root = source_lines.PACKAGE
    has_kernels = {path for path in root.rglob("*.py") if decorated.search(path.read_text())}
    for name in ("kernels", "include"):
        has_kernels |= {path for path in (root / "cuda" / name).rglob("*") if path.is_file()}
    counted = {name for part in source_lines.parts() for name in part.files}
    assert {path.relative_to(root).as_posix() for path in has_kernels} <= counted


def test_what_kernels_share_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(source_lines, "PACKAGE", tmp_path)
    monkeypatch.setattr(source_lines, "_CUDA", tmp_path)
    for name, text in {
        "kernels/a.cuh": '#include "multiattn/c.h"\n#include <b>\nint a;\n',
        "kernels/b.cuh": '  # include "a.cuh"\n',
        "include/multiattn/c.h": '#include "multiattn/d.h"\n',
        "include/multiattn/d.h": "int d;\nint e;\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    headers = ("include/multiattn/c.h", "include/multiattn/d.h")
    assert source_lines.included("b.cuh") == (*headers, "kernels/a.cuh", "kernels/b.cuh")
    one, two = (("kernels/a.cuh", *headers[:1]), ("kernels/b.cuh", *headers))
    parts = [source_lines.Part(language=name, what="", files=files) for name, files in (("x", one), ("x", two))]
    assert [(it.own, it.shared) for it in source_lines.count(parts)] == [(3, 1), (3, 1)]
    alone = [parts[0], replace(parts[1], language="y")]
    assert [(it.own, it.shared) for it in source_lines.count(alone)] == [(4, 0), (4, 0)]


# ---------------------------------------------------------------- whose a row is


def test_every_variant_is_in_one_language():
    for name in BACKENDS:
        for direction in DIRECTIONS:
            for variant in registry.get(name).op(direction).variants:
                assert [it.has(name, variant.name) for it in LANGUAGES].count(True) == 1
    assert language_of("triton", "warp_specialized") is GLUON_TRITON
    assert language_of("reference", "eager") is None


def ours(contender, time_ms, variant, cell=FULL, **more):
    return replace(fakes.row(contender, time_ms, cell=cell, **more), plan={"variant": variant, "config": None})


@pytest.mark.parametrize(
    ("contender", "variant", "language"),
    [
        ("triton", "full", TL),
        ("triton", "warp_specialized", GLUON_TRITON),
        ("triton/full", "full", TL),
        ("cutile", "two_pass", CUTILE),
        ("cuda/split_q", "split_q", CUDA),
        ("cuda", None, CUDA),
        ("triton/warp_specialized", None, GLUON_TRITON),
        ("triton", None, None),
        ("fa4", None, None),
    ],
)
def test_the_plan_says_in_which_language_a_row_ran(contender, variant, language):
    row = fakes.row(contender, 1.0) if variant is None else ours(contender, 1.0, variant)
    assert language_of_row(row) is language


# ---------------------------------------------------------------- the page


def test_the_page_is_what_the_records_give():
    assert languages_docs.update(results_root(), check=True), "run python -m bench readme"


def test_the_page_has_every_block():
    marked = [match[2] for match in readme.MARKED.finditer(languages_docs.PAGE.read_text())]
    assert sorted(marked) == sorted(languages_docs.blocks(results_root()))


def test_a_stale_page_fails_the_check(monkeypatch, capsys):
    monkeypatch.setattr(hopper_docs, "update", lambda results, check: True)
    monkeypatch.setattr(languages_docs, "update", lambda results, check: False)
    assert cli.main(["readme", "--check"]) == 1
    assert "languages.md: its tables are stale" in capsys.readouterr().out


def test_what_is_not_on_record_is_a_dash(tmp_path):
    results = tmp_path / "results"
    made = {name: block() for name, block in languages_docs.blocks(results).items()}
    for name, wide in (("forward", 4), ("backward", 4), ("forward_by_length", 7), ("backward_by_length", 7)):
        assert cells_of(made[name], 128, "causal")[-wide + 1 :] == ["-"] * (wide - 1)
        assert re.search(r"Not on record yet: `bench/results/h200/\w+\.json` is not there\.$", made[name])
    assert cells_of(made["host"], "cuTile") == ["-"] * len(host.KINDS)
    assert cells_of(made["machinery"], "cuTile", "forward") == [", ".join(GPU_ARCHS), "-"]
    assert cells_of(made["registers"], "plain Triton", "backward") == ["-"] * 6


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("results/h200/standard.json", "forward"),
        ("results/h200/standard.json", "forward_by_length"),
        ("results/h200/backward.json", "backward"),
        ("results/h200/host.json", "host"),
        ("results/compiled/rules.json", "registers"),
        ("expected/sm90.json", "machinery"),
    ],
)
def test_a_file_of_another_schema_is_an_error_that_names_it(tmp_path, name, block):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 99}')
    with pytest.raises(InputError, match=path.name):
        languages_docs.blocks(tmp_path / "results")[block]()


# ---------------------------------------------------------------- speed


def write_rows(folder, rows, name="standard"):
    path = folder / "h200" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(name, rows))
    return languages_docs.blocks(folder)


def test_languages_are_set_against_the_faster_peer(tmp_path):
    rows = [
        *(ours("cutile", 1.0, "full"), ours("triton", 0.8, "warp_specialized"), ours("triton/full", 2.0, "full")),
        *(fakes.row("sdpa-cudnn", 2.0, cell=FULL), fakes.row("fa4", 1.25, cell=FULL)),
        fakes.row("flex", 0.1, cell=FULL),
        *(ours("cutile", 1.0, "full", SHORT), fakes.row("fa4", 4.0, cell=SHORT)),
        replace(fakes.row("cuda", 1.0, cell=SHORT), measured=None, reasons=(NO,)),
        replace(ours("cuda", 0.1, "wgmma"), regime="graph"),
        replace(ours("cuda", 0.1, "wgmma"), cell=replace(FULL, dtype="fp16")),
    ]
    made = write_rows(tmp_path, rows)
    text = made["forward"]()
    # cuTile: the geometric mean of 1.25 and 4
    assert cells_of(text, 128, "full") == ["2.24 (2 of 6 cells)", "0.62 (1 of 6 cells)", "1.56 (1 of 6 cells)", "-"]
    assert cells_of(text, 64, "causal") == ["-"] * 4
    assert "The fastest of the languages, of 2 cells: cuTile in 1, Gluon in 1." in text
    assert "cuTile `full` (2); plain Triton `full` (1); Gluon `warp_specialized` (1)." in text
    text = made["forward_by_length"]()
    assert cells_of(text, 128, "full", 4096) == ["100", "50", "125", "-", "50", "80"]
    assert cells_of(text, 128, "full", 512) == ["100", "-", "-", "refused", "-", "25"]
    assert fakes.SETUP.commit in text


def test_plain_triton_is_set_against_flex_where_one_run_has_both(tmp_path):
    older = "2026-11-20T05:00:00+00:00-0a"
    rows = [
        *(ours("triton/full", 1.0, "full"), fakes.row("flex", 1.5, cell=FULL), fakes.row("fa4", 0.1, cell=FULL)),
        *(ours("triton/full", 1.0, "full", SHORT), ours("flex", 9.0, "", SHORT, run=older)),
    ]
    made = write_rows(tmp_path, rows)["plain_triton"]
    assert cells_of(made(), 128, "full") == ["-", "-", "-", "1.50", "-", "-"]
    assert "Of 1 cells: geometric mean 1.50, least 1.50." in made()
    assert fakes.SETUP.commit in made()
    assert cells_of(write_rows(tmp_path, rows[3:])["plain_triton"](), 128, "full") == ["-"] * 6


def test_every_cell_of_a_suite_gives_a_mean_without_a_count(tmp_path):
    cells = [cell for cell in SUITES["standard"] if (cell.head_dim, cell.causal) == (128, False)]
    rows = [row for cell in cells for row in (ours("cuda", 1.0, "wgmma", cell), fakes.row("fa4", 2.0, cell=cell))]
    text = write_rows(tmp_path, rows)["forward"]()
    assert cells_of(text, 128, "full") == ["-", "-", "-", "2.00"]


def test_the_fastest_variant_speaks_for_a_language_and_rows_of_two_runs_do_not_meet(tmp_path):
    older = "2026-11-20T05:00:00+00:00-0a"
    rows = [
        *(ours("cutile", 2.0, "atomic", BACKWARD), ours("cutile/two_pass", 1.0, "two_pass", BACKWARD)),
        ours("cutile/other", 3.0, "other", BACKWARD),
        fakes.row("fa4", 1.0, cell=BACKWARD),
        *(ours("cuda", 0.1, "atomic", BACKWARD, run=older), fakes.row("sdpa-cudnn", 0.1, cell=BACKWARD, run=older)),
    ]
    made = write_rows(tmp_path, rows, "backward")
    assert cells_of(made["backward_by_length"](), 128, "full", 4096) == ["100", "-", "-", "-", "-", "100"]
    assert "cuTile `two_pass` (1)." in made["backward"]()


# ---------------------------------------------------------------- host


def test_host_costs_are_of_a_language_where_the_file_says_which(tmp_path):
    path = tmp_path / "host.json"
    cuda = host.HostCost(contender="cuda", call_us=1.0)
    told = [
        host.HostCost(contender="triton", variant="warp_specialized", call_us=2.0),
        host.HostCost(contender="triton", variant="warp_specialized", kind=host.GRAPH, error="RuntimeError: no"),
    ]
    host.save([cuda, *told, host.HostCost(contender="sdpa", call_us=3.0)], fakes.SETUP, path)
    text = languages_docs.host_block(path)
    assert cells_of(text, "Gluon") == ["2.0", "-", "-", "RuntimeError: no"]
    assert cells_of(text, "plain Triton") == ["-"] * 4
    assert cells_of(text, "CUDA C++")[0] == "1.0"
    assert cells_of(text, "sdpa")[0] == "3.0"
    assert host.CELL.key in text
    host.save([replace(told[0], variant="")], fakes.SETUP, path)
    text = languages_docs.host_block(path)
    assert cells_of(text, "Gluon") == cells_of(text, "plain Triton") == ["-"] * 4
    assert cells_of(text, "triton, in which of its languages is not on record")[0] == "2.0"


def test_host_costs_say_which_variant_was_called(monkeypatch):
    def timed(calls, _):
        return {key: host.HostCost(contender=key[0], kind=key[1], call_us=1.0) for key in calls}

    monkeypatch.setattr(host, "time_in_turns", timed)
    monkeypatch.setattr(host, "time_in_graphs", timed)
    costs = host.host_costs(torch.device("cpu"), synchronize=lambda: None)
    assert {cost.variant for cost in costs if cost.contender == "triton"} == {"full"}
    assert {cost.variant for cost in costs if cost.contender == host.SDPA} == {""}


# ---------------------------------------------------------------- what compilers made


def test_head_dims_are_of_the_capabilities():
    text = languages_docs.head_dims_block()
    assert cells_of(text, "Gluon", "forward") == ["8-256" if arch == "sm90" else "-" for arch in ("cpu", *GPU_ARCHS)]
    assert cells_of(text, "Gluon", "backward") == ["-"] * (1 + len(GPU_ARCHS))
    assert cells_of(text, "plain Triton", "forward") == ["8-256"] * (1 + len(GPU_ARCHS))


def test_what_code_uses_is_of_the_record(tmp_path):
    entry = targets_fakes.entry("triton", "sm90", direction="forward", head_dim=128, mask="causal")
    gluon = replace(entry, variant="warp_specialized")
    nothing = targets_fakes.facts(mix=Mix(code=Counts(), hot=Counts(), loops=(), code_bytes=16))
    wider = replace(gluon, cell=replace(entry.cell, head_dim=256), kernels=(nothing,))
    expected.save([gluon, wider], tmp_path / "expected")
    text = languages_docs.machinery_block(tmp_path / "expected")
    rest = ", ".join(arch for arch in GPU_ARCHS if arch != "sm90")
    assert cells_of(text, "Gluon", "forward", "sm90") == [", ".join(entry.main.features)]
    assert cells_of(text, "Gluon", "forward", rest) == ["-"]


def test_registers_are_of_the_rule_that_runs(tmp_path):
    plan = TL.plan(languages_docs.Target(backend="triton", arch="sm90").problem, "sm90", "forward")
    row = rule_table.Row(
        backend="triton",
        direction="forward",
        variant=plan.variant,
        arch="sm90",
        head_dim=128,
        mask="causal",
        config=str(plan.config),
        kernel="attention",
        threads=128,
        registers=168,
        smem_bytes=1024,
        stack_bytes=0,
        hot_loops=1,
        hot_spills=2,
        other_spills=3,
        blocks=3,
        share=0.2,
        limiter="registers",
        compiler="triton 3.9",
        digest="",
    )
    path = tmp_path / "rules.json"
    rule_table.save({row.key: [row]}, path)
    text = languages_docs.registers_block(path)
    assert cells_of(text, "plain Triton", "forward") == ["`attention`", "128", "168", "2 + 3", "1024", "3 (registers)"]
    assert "triton 3.9" in text
    rule_table.save({row.key: [replace(row, config="another")]}, path)
    assert cells_of(languages_docs.registers_block(path), "plain Triton", "forward") == ["-"] * 6
