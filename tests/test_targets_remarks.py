"""What cuTile's compiler says of its choices: read strictly, folded, told by the line."""

import json
from dataclasses import asdict

import pytest

from multiattn.inspect.remarks import FormatError, Remark, Row, facts, parse, per_line, text_rows, with_sources
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name
from multiattn.plan.backend import make_plan
from multiattn.problem import Problem

BACKEND = registry.get("cutile")


def document(kind="Passed", passname="Memory", *arguments, line=7, head=(), file="'/a folder/of: mine/forward.py'"):
    place = f"DebugLoc:        {{ File: {file}, Line: {line}, Column: 11 }}"
    lines = [f"--- !{kind}", f"Pass:            {passname}", "Name:            RemarkSomething", place, *head]
    return "\n".join([*lines, "Function:        forward_Kt2", "Args:", *arguments, "...", ""])


def said(number, remark, **named):
    first = [f"  - RemarkId:    {number}", f"  - Remark:      {remark}"]
    return [*first, *(f"  - {f'{name}:':<12} {value}" for name, value in named.items())]


def chosen(instruction, shape=None, **named):
    shapes = {} if shape is None else {"Shape": f"'[{shape}]'"}
    return said(1, "Load instruction selected", Instruction=instruction, **shapes, **named)


LOAD = document("Passed", "Memory", *chosen("TMA Load instruction", "64, 128, 1, 1"))
REFUSED = document("Failure", "Memory", *said(2, "Failed to select TMA load instruction", Reason="base pointer 'x'"))
HINT = document("Passed", "Hints", *said(3, "OptimizationHint used default latency"), line=5)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (chosen("TMA Load instruction", "64, 128, 1, 1"), "TMA load 64x128"),
        (chosen("TMA Store instruction", "32, 1, 1"), "TMA store 32"),
        (chosen("TMA Load instruction", "1, 1"), "TMA load 1"),
        (chosen("Ldgsts instruction"), "cp.async"),
        (chosen("Global-memory load instruction"), "plain load"),
        (chosen("Global-memory store instruction"), "plain store"),
        (chosen("Shared-memory Matrix load instruction"), "ldmatrix"),
        (chosen("Tensor-core SM80", "16, 8, 16"), "mma.sync 16x8x16"),
        (chosen("Tensor-core SM120", "16, 8, 32"), "mma.sync 16x8x32"),
        (chosen("Tensor-core SM90", "64, 128, 16"), "wgmma 64x128x16"),
        (chosen("Tensor-core SM100", "128, 64, 16", NumCTAs=1), "tcgen05 128x64x16"),
        (chosen("Tensor-core SM100", "256, 64, 16", NumCTAs=2), "tcgen05 256x64x16 by 2 blocks"),
        (chosen("FMA", "1, 1, 1"), "FMA instead of a tensor core"),
        (chosen("Warp-speed instruction", "3, 4"), "Warp-speed instruction 3x4"),
        (said(1, "Failed to select TMA store instruction", Reason="stride"), "no TMA store: stride"),
        (said(1, "Shared memory allocated: 74240 bytes"), "Shared memory allocated: 74240 bytes"),
    ],
)
def test_a_choice_is_told_in_the_words_of_this_project(arguments, what):
    (remark,) = parse(document("Passed", "Memory", *arguments))
    assert remark.what == what
    assert (remark.file, remark.line, remark.column, remark.function) == ("forward.py", 7, 11, "forward_Kt2")


def test_duplicates_are_folded_whatever_their_number():
    again = LOAD.replace("RemarkId:    1", "RemarkId:    9")
    load, refused = parse(LOAD + REFUSED + again)
    assert (load.count, refused.count) == (2, 1)
    assert (refused.kind, refused.reason) == ("Failure", "base pointer 'x'")
    assert load.shape == (64, 128, 1, 1)
    assert parse("") == ()


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("plain words: and more", "plain words: and more"),
        ("'it''s [quoted]'", "it's [quoted]"),
        (r'"two\nlines"', "two\nlines"),
    ],
)
def test_values_may_be_quoted(value, read):
    (remark,) = parse(document("Analysis", "Memory", *said(1, "x", Suggestion=value)))
    assert remark.arguments == (("Suggestion", read),)


def test_a_remark_may_have_no_place_and_no_arguments():
    text = "--- !Missed\nPass:            Memory\nName:            RemarkX\n...\n"
    assert parse(text) == (Remark(kind="Missed", passname="Memory", name="RemarkX"),)
    assert text_rows(per_line(parse(text))).startswith("-")
    (windows,) = parse(document("Passed", "Memory", file=r"'C:\mine\forward.py'"))
    assert windows.file == "forward.py"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LOAD.replace("!Passed", "!Praised"), "line 1: got '--- !Praised'; allowed --- !Passed, --- !Missed"),
        (LOAD.replace("--- !Passed\n", ""), "line 1: got 'Pass: "),
        (LOAD.removesuffix("...\n"), "got the end of the text; allowed '...' after it"),
        ("...\n", "line 1: got '...'; allowed a document before it"),
        (LOAD.replace("Pass: ", "Past: "), "line 2: got 'Past: "),
        (LOAD.replace("Name: ", "Pass: "), "line 3: got Pass again"),
        (LOAD.replace("Pass:            Memory\n", ""), "a document without Pass"),
        (LOAD.replace("Column: 11", "Colon: 11"), "got a document with DebugLoc: { File"),
        (LOAD.replace("'[64, 128, 1, 1]'", "'[64, x]'"), r"got a document with Shape: \[64, x\]"),
        (LOAD.replace("'[64, 128, 1, 1]'", "[64, 128]"), r"got \[64, 128\]; allowed a value on one line"),
        (LOAD.replace("1, 1]'", "1, 1]"), "allowed a closing quote"),
        (LOAD.replace("'[64, 128, 1, 1]'", '"64'), "allowed a closing quote"),
        (LOAD.replace("Args:\n", ""), "got '  - RemarkId: "),
        (LOAD.replace("Args:\n", "Args:\n    nested: yes\n"), "got '    nested: yes'"),
    ],
)
def test_anything_else_is_refused(text, message):
    with pytest.raises(FormatError, match=f"remarks, .*{message}"):
        parse(text)


def test_each_line_says_what_was_chosen_for_it():
    rows = per_line(parse(HINT + LOAD + REFUSED + LOAD))
    assert [(row.line, row.what, row.count, row.failed) for row in rows] == [
        (7, "TMA load 64x128", 2, False),
        (7, "no TMA load: base pointer 'x'", 1, True),
    ]
    assert [row.line for row in per_line(parse(LOAD + HINT), hints=True)] == [5, 7]
    shown = with_sources(rows, {"forward.py": "\n" * 6 + "  tile = load(q)\n", "other.py": ""})
    assert text_rows(shown).splitlines() == [
        "forward.py:7  TMA load 64x128 (2)              tile = load(q)",
        "forward.py:7  ! no TMA load: base pointer 'x'  tile = load(q)",
    ]
    assert with_sources(rows, {"forward.py": ""}) == rows
    assert text_rows(()) == "no remarks"
    assert tuple(Row(**row) for row in json.loads(json.dumps([asdict(row) for row in shown]))) == shown


def test_facts_are_what_a_new_compiler_should_still_choose():
    wgmma = document("Passed", "Tensor-core", *chosen("Tensor-core SM90", "64, 128, 16"))
    plain = document("Passed", "Memory", *chosen("Global-memory load instruction"))
    fma = document("Failure", "Tensor-core", *chosen("FMA", "1, 1, 1"))
    assert facts(parse(HINT + LOAD + REFUSED + wgmma + plain + fma)) == {"TMA load", "wgmma 64x128x16"}


@pytest.mark.skipif(bool(BACKEND.probe_compiler()), reason=str(BACKEND.probe_compiler()))
def test_the_real_compiler_is_understood():
    problem = Problem.contiguous(batch=1, heads_q=16, seq_q=4096, head_dim=64)
    (kernel,) = BACKEND.forward.export(make_plan(BACKEND, problem, by_name("sm90"), probe=False), ())
    found = parse(kernel.remarks)
    assert "TMA load" in facts(found)
    assert any(fact.startswith("wgmma 64x") for fact in facts(found))
    assert {row.file for row in per_line(found)} == {"parts.py"}, "where loads and products are"
    assert not any(row.failed for row in per_line(found))
