"""The remarks of cuTile's compiler: read, folded, told by the line."""

import pytest

from multiattn.inspect.remarks import Choice, chosen, parse, table


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
