"""The compile table: what is asked for, what comes of each request, and what the command says."""

import json

import pytest
from targets_fakes import entry, facts, failed, refused, request

from multiattn.__main__ import main
from multiattn.inspect import build, cli
from multiattn.inspect.build import Compilation, compile_request, requests
from multiattn.inspect.options import layer
from multiattn.inspect.pool import Outcome
from multiattn.mask import MASKS
from multiattn.plan.arch import GPU_ARCHS
from multiattn.plan.backend import BACKENDS, get

needs_compilers = pytest.mark.skipif(
    any(get(name).probe_compiler() for name in BACKENDS), reason="a compiler is not installed"
)


def problems(*head_dims):
    return [layer(head_dim, 4096, mask) for head_dim in head_dims for mask in MASKS]


def test_the_table_is_the_product():
    wanted = requests(problems(64, 128, 256))
    assert len(wanted) == len(set(wanted)) == 2 * len(BACKENDS) * len(GPU_ARCHS) * 3 * 2
    assert wanted == sorted(wanted, key=lambda it: it.place)
    one = {"problems": problems(64), "arches": ("sm90",)}
    assert len(requests(**one, backends=("cuda", "cuda"), directions=("forward",))) == 2  # each once
    assert requests(**one, directions=("forward",), variant="two_pass") == []  # it is a backward's
    assert {it.variant for it in requests(**one, backends=("triton",), variant="offered")} >= {"full", "two_pass"}


@needs_compilers
def test_every_request_has_a_plan_or_every_reason():
    refusals = [wanted for wanted in requests(problems(8, 64, 256, 264)) if wanted.refused]
    assert {wanted.problem.head_dim for wanted in refusals} == {264}
    assert all(any(reason.code == "head_dim" for reason in wanted.refused) for wanted in refusals)


def test_an_entry_is_exactly_one_of_three():
    for outcome in ({}, {"kernels": (facts(),), "error": "x"}):
        with pytest.raises(ValueError, match="an entry has kernels, or carries reasons, or carries an error"):
            Compilation(request=request(), **outcome)


def test_a_crash_is_its_own_requests(monkeypatch):
    def run_isolated(function, items, **_):
        yield Outcome(item=items[0], error="the process died with exit code 3")
        yield Outcome(item=items[1], result=Compilation(request=items[1], kernels=(facts(),)))

    monkeypatch.setattr(build, "run_isolated", run_isolated)
    wanted = [request(arch="sm80"), request(arch="sm90")]
    crashed, made = build.build(wanted, jobs=1, timeout_s=300)
    assert (crashed.request, crashed.error) == (wanted[0], "the process died with exit code 3")
    assert made.ok


class TestCommand:
    @pytest.fixture
    def made(self, monkeypatch):
        entries = [entry(kernels=[facts(spills=7)]), refused(), failed()]
        monkeypatch.setattr(cli.build, "build", lambda wanted, **_: iter(entries))
        return entries

    def test_the_table_says_all(self, made, capsys, tmp_path):
        path = tmp_path / "deep" / "table.json"
        assert main(["compile", "--json", str(path)]) == 1  # a compiler failed
        printed = capsys.readouterr().out
        assert "168 +7 18.8%" in printed
        what = "B=4 H=16 N=4096 D=128 bf16 causal"
        assert f"- arch: got sm86; allowed sm90 [cuda forward {what} sm86]" in printed
        assert f"- error: RuntimeError: ptxas: out of luck [cuda forward {what} sm80]" in printed
        assert "3 plans: 1 compiled, 1 refused, 1 failed" in printed
        entries = json.loads(path.read_text())
        assert [it["request"]["arch"] for it in entries] == ["sm80", "sm86", "sm90"]
        assert entries[-1]["kernels"][0]["registers"] == 168
        main(["compile", "--long"])
        assert "7 + 0" in capsys.readouterr().out

    def test_options_may_be_given_again(self, monkeypatch):
        asked = []
        monkeypatch.setattr(cli.build, "build", lambda wanted, **_: asked.extend(wanted) or iter([entry()]))
        main(["compile", "--backend", "cuda", "--backend", "triton", "--arch", "sm90,sm80", "--head-dim", "64"])
        assert {(it.backend, it.arch) for it in asked} == {(b, a) for b in ("cuda", "triton") for a in ("sm80", "sm90")}

    def test_what_cannot_be_written_is_said_before_anything_is_compiled(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(cli.build, "build", None)
        (tmp_path / "file").touch()
        (tmp_path / "manifest.json").write_text("no json")
        for options, message in [
            (("--json", tmp_path), f"Is a directory: '{tmp_path}'"),
            (("--emit", "cubin", tmp_path / "file"), f"File exists: '{tmp_path / 'file'}'"),
            (("--emit", "cubin", tmp_path), "manifest.json: no JSON"),
            (("--emit", "cubin", tmp_path, "--long"), "--emit: got it with --long; allowed one or the other"),
            (("--emit", "cubin,elf", tmp_path), "got elf; allowed cubin, ptx"),
        ]:
            assert main(["compile", *map(str, options)]) == 2
            assert message in capsys.readouterr().err

    def test_an_interruption_is_no_traceback(self, monkeypatch, capsys):
        def interrupt(wanted, **_):
            raise KeyboardInterrupt

        monkeypatch.setattr(cli.build, "build", interrupt)
        assert main(["compile"]) == 130
        assert "Interrupted" in capsys.readouterr().err

    def test_a_backend_of_which_nothing_compiled_is_a_failure(self, made, capsys):
        made[:] = [refused()]
        assert main(["compile"]) == 1
        assert "cuda was asked for and nothing of its forward compiled" in capsys.readouterr().out
        made[:] = [refused(), entry()]
        assert main(["compile"]) == 0


@needs_compilers
@pytest.mark.parametrize(
    ("backend", "feature"), [("triton", "TMA load"), ("cutile", "TMA store"), ("cuda", "mbarrier")]
)
def test_a_real_kernel_is_read_whole(backend, feature):
    made = compile_request(request(backend, head_dim=64, mask="full"))
    kernel = made.main
    assert kernel.hot.tensor > 0
    assert kernel.code["other"] == 0
    assert kernel.code_bytes == 16 * kernel.code.instructions > 1000
    assert {"wgmma", feature} <= set(kernel.features)
    assert bool(kernel.remarks) == (backend == "cutile")
    if backend == "cutile":
        assert "TMA load" in kernel.chosen
        assert any(it.startswith("wgmma 64x") for it in kernel.chosen)
        assert {it.file for it in kernel.remarks} == {"parts.py", "tiles.py"}, "where loads and products are"
        assert not any(it.failed for it in kernel.remarks)
