"""The compile table: which cells, what comes of each, what the cache keeps, and what the command says."""

import json
import os
import shutil
from dataclasses import replace

import pytest
from targets_fakes import entry, facts, failed, refused

from multiattn.__main__ import main
from multiattn.inspect import build, cli, store, tables
from multiattn.inspect.build import Entry, compile_cell
from multiattn.inspect.cells import Cell, cells
from multiattn.plan.arch import GPU_ARCHS
from multiattn.plan.backend import BACKENDS, Exported, get
from multiattn.run import cache

needs_compilers = pytest.mark.skipif(
    any(get(name).probe_compiler() for name in BACKENDS), reason="a compiler is not installed"
)


def test_the_table_is_the_product():
    wanted = cells()
    assert len(wanted) == len(set(wanted)) == 2 * len(BACKENDS) * len(GPU_ARCHS) * 3 * 2
    assert wanted == sorted(wanted, key=lambda cell: cell.place)
    assert len(cells(("cuda", "cuda"), ("sm90",), directions=("forward",), masks=("full",))) == 3  # each once
    named = cells(arches=("sm90",), directions=("forward",), head_dims=(64,), masks=("full",), variants=("two_pass",))
    assert named == []  # it is a backward's
    assert {cell.variant for cell in cells(("triton",), ("sm90",), variants=("offered",))} >= {"full", "two_pass"}


def test_every_cell_has_a_plan_or_every_reason():
    for cell in cells(head_dims=(8, 64, 256, 264)):
        plan = build.find_plan(cell)
        if isinstance(plan, Exception):
            assert plan.reasons
            assert cell.head_dim == 264
        else:
            assert plan.config is not None


def test_an_entry_is_exactly_one_of_three():
    cell = Cell(backend="cuda", arch="sm90")
    for outcome in ({}, {"kernels": (facts(),), "error": "x"}):
        with pytest.raises(ValueError, match="an entry has kernels, or carries reasons, or carries an error"):
            Entry(cell=cell, **outcome)


@pytest.mark.parametrize("made", [entry(), refused(), failed(), entry(shape=(1, 2, 64))], ids=lambda it: it.text[:9])
def test_an_entry_survives_json(made):
    assert Entry.from_dict(json.loads(json.dumps(made.as_dict()))) == made


class TestCache:
    @pytest.fixture(autouse=True)
    def empty(self, tmp_path, monkeypatch):
        monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))
        self.exported, self.read = 0, 0

        def export(plan):
            self.exported += 1
            return (Exported(kernel="k", seconds=1.0, cubin=b"code", threads=128, remarks="words"),)

        def read(kernel, plan):
            assert (kernel.cubin, kernel.threads, kernel.remarks) == (b"code", 128, "words")
            self.read += 1
            return facts(kernel.kernel)

        monkeypatch.setattr(store, "_export", export)
        monkeypatch.setattr(build, "read_kernel", read)
        monkeypatch.setattr(build, "_lacking", lambda plan: ())

    def test_what_is_kept_is_not_compiled_again(self):
        cell = Cell(backend="cuda", arch="sm90")
        first, second = compile_cell(cell), compile_cell(cell)
        assert (self.exported, self.read) == (1, 1)
        assert (first.cached, second.cached) == (False, True)
        assert first.kernels == second.kernels
        assert [it.cached for it in build.build([cell], jobs=1)] == [True]

    def test_fresh_compiles_again(self):
        cell = Cell(backend="cuda", arch="sm90")
        assert not any(compile_cell(cell, fresh=True).cached for _ in range(2))
        assert self.exported == 2

    def test_whoever_reads_otherwise_reads_again(self, monkeypatch):
        cell = Cell(backend="cuda", arch="sm90")
        compile_cell(cell)
        monkeypatch.setattr(store, "readers", lambda: "another")
        assert not compile_cell(cell).cached
        assert (self.exported, self.read) == (1, 2)

    @pytest.mark.parametrize("change", [{"mask": "full"}, {"head_dim": 64}, {"arch": "sm80"}, {"dtype": "fp16"}])
    def test_another_cell_is_another_entry(self, change):
        compile_cell(Cell(backend="cuda", arch="sm90"))
        compile_cell(Cell(**{"backend": "cuda", "arch": "sm90", **change}))
        assert self.exported == 2

    def test_other_sources_compilers_or_settings_are_another_entry(self, monkeypatch):
        plan = Cell(backend="cuda", arch="sm90").plan()
        keys = [store.compile_key(plan)]
        for name, changed in (("sources", "edited"), ("compilers", (("nvrtc", "0.1"),))):
            with monkeypatch.context() as patch:
                patch.setattr(store, name, lambda backend, changed=changed: changed)
                keys.append(store.compile_key(plan))
        monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
        keys.append(store.compile_key(plan))
        assert len(set(keys)) == 4
        monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")  # where something is kept changes nothing
        assert store.compile_key(plan) == keys[-1]
        assert store.compile_key(replace(plan, why="in other words")) == keys[-1]

    def test_another_reader_is_another_entry(self, monkeypatch):
        before = store.reading_key("a")
        monkeypatch.setattr(store, "reader_version", lambda: "0.1")
        assert store.reading_key("a") != before

    def test_a_torn_entry_is_made_again(self, tmp_path):
        cell = Cell(backend="cuda", arch="sm90")
        compile_cell(cell)
        for text in ('[{"kernel": ', "[]", "{}"):
            build.kept_at(cell.plan()).write_text(text)
            assert not compile_cell(cell).cached
            assert compile_cell(cell).cached
        (archive,) = tmp_path.glob("*.zip")
        archive.write_bytes(b"PK torn")
        build.kept_at(cell.plan()).unlink()
        assert not compile_cell(cell).cached
        assert self.exported == 2

    def test_a_cache_that_cannot_be_written_is_named_at_once(self, tmp_path, monkeypatch, capsys):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "file"))
        assert main(["compile"]) == 2
        assert f"MULTIATTN_CACHE_DIR: cannot write to {tmp_path / 'file'}" in capsys.readouterr().err


def test_sources_change_with_what_is_compiled_and_not_with_the_cpus(monkeypatch, tmp_path):
    copy = tmp_path / "multiattn"
    shutil.copytree(store.ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(store, "ROOT", copy)
    digest = store.sources.__wrapped__
    before = {name: digest(name) for name in BACKENDS}
    for path in ("cuda/emulation/fiber.h", "triton/cpu/interpreter.py", "cutile/interpreter/tile.py", "parity.py"):
        (copy / path).write_text("edited")
    assert {name: digest(name) for name in BACKENDS} == before
    for name, path in (("cuda", "cuda/kernels/softmax.cuh"), ("triton", "triton/launch.py"), ("cutile", "plan/abi.py")):
        (copy / path).write_text("edited")
        assert digest(name) != before[name]


def crash(cell):
    if cell.arch == "sm80":
        os._exit(3)
    return entry(cell.backend, cell.arch)


def test_a_crash_is_its_own_cells(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))
    wanted = cells(("cuda",), ("sm80", "sm90"), directions=("forward",), head_dims=(128,), masks=("causal",))
    found = {it.cell.arch: it for it in build.build(wanted, jobs=1, function=crash)}
    assert found["sm80"].error == "the process died with exit code 3"
    assert found["sm90"].ok


class TestCommand:
    @pytest.fixture
    def made(self, monkeypatch):
        entries = [entry(kernels=[facts(hot_spills=7)]), refused(), failed()]
        monkeypatch.setattr(cli.build, "build", lambda wanted, **_: iter(entries))
        return entries

    def test_the_table_says_all(self, made, capsys, tmp_path):
        path = tmp_path / "deep" / "table.json"
        assert main(["compile", "--json", str(path)]) == 1  # a compiler failed
        printed = capsys.readouterr().out
        assert "168 +7 18.8%" in printed
        assert "- arch: got sm86; allowed sm90 [cuda forward D=128 causal sm86]" in printed
        assert "- error: RuntimeError: ptxas: out of luck [cuda forward D=128 causal sm80]" in printed
        assert "3 cells, 1 kernels: 1 compiled, 1 refused, 1 failed" in printed
        assert cli.load(path) == build.ordered(made)

    def test_options_may_be_given_again(self, monkeypatch):
        asked = []
        monkeypatch.setattr(cli.build, "build", lambda wanted, **_: asked.extend(wanted) or iter([entry()]))
        main(["compile", "--backend", "cuda", "--backend", "triton", "--arch", "sm90,sm80", "--head-dim", "64"])
        assert {(cell.backend, cell.arch) for cell in asked} == {
            (b, a) for b in ("cuda", "triton") for a in ("sm80", "sm90")
        }

    @pytest.mark.parametrize(
        "options", [("--shape", "1,2,0,64"), ("--shape", "0,2,64,64"), ("--shape", "1,2,0,64", "--emit", "cubin", "x")]
    )
    def test_a_shape_that_needs_no_kernel_is_refused(self, options, monkeypatch, tmp_path, capsys):
        monkeypatch.chdir(tmp_path)
        for name in BACKENDS:
            assert main(["compile", "--arch", "sm80,sm90", "--backend", name, "--direction", "forward", *options]) == 2
            assert "shape: got B=" in (error := capsys.readouterr().err)
            assert error.endswith("allowed one that needs a kernel\n")

    def test_what_cannot_be_written_is_said_before_anything_is_compiled(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(cli.build, "build", None)
        assert main(["compile", "--json", str(tmp_path)]) == 2
        assert f"--json: cannot write {tmp_path}: Is a directory" in capsys.readouterr().err
        (tmp_path / "file").write_text("")
        assert main(["compile", "--emit", "cubin", str(tmp_path / "file")]) == 2
        assert "--emit: cannot write to" in capsys.readouterr().err
        (tmp_path / "manifest.json").write_text("no json")
        assert main(["compile", "--emit", "cubin", str(tmp_path)]) == 2
        assert "manifest.json" in capsys.readouterr().err
        assert main(["compile", "--emit", "cubin", str(tmp_path), "--long"]) == 2
        assert "--emit: got it with --long" in capsys.readouterr().err

    def test_an_interruption_is_no_traceback(self, monkeypatch, capsys):
        def interrupt(wanted, **_):
            raise KeyboardInterrupt

        monkeypatch.setattr(cli.build, "build", interrupt)
        assert main(["compile"]) == 130
        assert "Interrupted" in capsys.readouterr().err

    def test_a_line_for_every_kernel(self, made, capsys):
        main(["compile", "--long"])
        assert "7 + 0" in capsys.readouterr().out

    def test_a_backend_of_which_nothing_compiled_is_a_failure(self, made, capsys):
        made[:] = [refused()]
        assert main(["compile"]) == 1
        assert "cuda was asked for and nothing of its forward compiled: arch: got sm86" in capsys.readouterr().out
        made[:] = [refused(), entry()]
        assert main(["compile"]) == 0

    @pytest.mark.parametrize("text", ["{}", '{"schema": 99, "entries": []}', "no json"])
    def test_another_file_is_named(self, text, tmp_path):
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"x\.json: got .*; allowed a compile table of schema 1"):
            cli.load(path)


def test_a_table_without_tabulate(monkeypatch):
    import builtins

    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "tabulate":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert "168 18.8%" in tables.text_table([entry()])


@needs_compilers
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_real_kernel_is_read_whole(backend, tmp_path, monkeypatch):
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))
    made = compile_cell(Cell(backend=backend, arch="sm90", head_dim=64, mask="full"))
    assert made.ok
    assert made.main.hot.tensor > 0
    assert made.main.hot.unknown == {}
    assert "wgmma" in made.main.features
    assert made.main.code_bytes > 1000
    assert bool(made.main.remarks) == (backend == "cutile")
    assert compile_cell(made.cell).kernels == made.kernels
