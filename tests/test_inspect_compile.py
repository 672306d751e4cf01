"""The compile table, and the remarks of cuTile's compiler: what is asked for, what comes of it, what commands say."""

import json

import pytest
from targets_fakes import entry, facts, failed, refused, request

from multiattn.__main__ import main
from multiattn.inspect import build, cli
from multiattn.inspect.build import Compilation, compile_request, requests
from multiattn.inspect.options import layer
from multiattn.inspect.pool import Outcome
from multiattn.inspect.remarks import Choice, chosen, parse, table
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
    refusals = [wanted for wanted in requests(problems(8, 64, 256, 1032)) if wanted.refused]
    assert {wanted.problem.head_dim for wanted in refusals} == {1032}
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
    made = compile_request(request(backend, head_dim=64, mask="full", variant={"triton": "full"}.get(backend)))
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


# ---------------------------------------------------------------- remarks


def document(kind, passname, *arguments, line=7, file="'/a folder/of: mine/forward.py'"):
    place = f"DebugLoc:        {{ File: {file}, Line: {line}, Column: 11 }}"
    lines = [f"--- !{kind}", f"Pass:            {passname}", "Name:            RemarkSomething", place]
    return "\n".join([*lines, "Function:        forward_Kt2", "Args:", *arguments, "...", ""])


def said(remark, **named):
    first = ["  - RemarkId:    1", f"  - Remark:      {remark}"]
    return [*first, *(f"  - {f'{name}:':<12} {value}" for name, value in named.items())]


def instruction(name, shape=None, **named):
    shapes = {} if shape is None else {"Shape": f"'[{shape}]'"}
    return said("Load instruction selected", Instruction=name, **shapes, **named)


LOAD = document("Passed", "Memory", *instruction("TMA Load instruction", "64, 128, 1, 1"))
REFUSED = document("Failure", "Memory", *said("Failed to select TMA load instruction", Reason="'base ''x'''"), line=9)
HINT = document("Passed", "Hints", *said("OptimizationHint used default latency"), line=5)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (instruction("TMA Load instruction", "64, 128, 1, 1"), "TMA load 64x128"),
        (instruction("TMA Load instruction", "1, 1"), "TMA load 1"),
        (instruction("Ldgsts instruction"), "cp.async"),
        (instruction("Tensor-core SM80", "16, 8, 16"), "mma.sync 16x8x16"),
        (instruction("Tensor-core SM120", "16, 8, 32"), "mma.sync 16x8x32"),
        (instruction("Tensor-core SM90", "64, 128, 16"), "wgmma 64x128x16"),
        (instruction("Tensor-core SM100", "128, 64, 16", NumCTAs=1), "tcgen05 128x64x16"),
        (instruction("Tensor-core SM100", "256, 64, 16", NumCTAs=2), "tcgen05 256x64x16 by 2 blocks"),
        (instruction("FMA", "1, 1, 1"), "FMA instead of a tensor core"),
        (instruction("Warp-speed instruction", "3, 4"), "Warp-speed instruction 3x4"),
        (said("Shared memory allocated: 74240 bytes"), "Shared memory allocated: 74240 bytes"),
    ],
)
def test_a_choice_is_told_in_the_words_of_this_project(arguments, what):
    (choice,) = parse(document("Passed", "Memory", *arguments))
    assert (choice.what, choice.file, choice.line) == (what, "forward.py", 7)


def test_choices_are_folded_by_line():
    load, refused = parse(LOAD + HINT + REFUSED + LOAD.replace("RemarkId:    1", "RemarkId:    9"))
    assert (load.count, refused.count, load.failed, refused.failed) == (2, 1, False, True)
    assert refused.what == "Failed to select TMA load instruction: base 'x'"
    assert table((load, refused), {"forward.py": [""] * 6 + ["  k = load()"]}) == [
        ("forward.py:7", "TMA load 64x128 (2)", "k = load()"),
        ("forward.py:9", "! Failed to select TMA load instruction: base 'x'", ""),
    ]
    assert parse("") == ()


def test_a_remark_may_have_no_place_and_no_arguments():
    choices = parse("--- !Missed\nPass:            Memory\nName:            RemarkX\n...\n")
    assert choices == (Choice(file="", line=0, what="", failed=True, is_instruction=False, count=1),)
    assert table(choices, {}) == [("-", "! ", "")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LOAD.replace("!Passed", "!Praised"), "got '--- !Praised'; allowed documents of --- !Passed"),
        (LOAD.replace("--- !Passed\n", ""), "got 'Pass: "),
        (LOAD.removesuffix("...\n"), "got '--- !Passed'"),
        (LOAD.replace("Pass: ", "Past: "), "got a document without Pass"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_what_a_new_compiler_should_still_choose():
    wgmma = document("Passed", "Tensor-core", *instruction("Tensor-core SM90", "64, 128, 16"))
    plain = document("Passed", "Memory", *instruction("Global-memory load instruction"))
    fma = document("Failure", "Tensor-core", *instruction("FMA", "1, 1, 1"))
    assert chosen(parse(HINT + LOAD + REFUSED + wgmma + plain + fma)) == ("TMA load", "wgmma 64x128x16")
