"""The command `multiattn`: what explain prints, and the flags that its commands share."""

import pytest

import multiattn
from multiattn.__main__ import main

WHAT = "B=2 Hq=16 Hkv=4 Sq=1024 Skv=1024 D=128 bf16 causal forward on sm90"
EVERY = [f"\n{backend} forward, variant " for backend in multiattn.BACKENDS]
OF_EACH = ["\nauto takes ", "  config: tile_m=", "  why: ", "  workspace: "]
PASSED_OVER = ["cuda forward takes wgmma", "variant split_q", "  rejected: rule tile_m="]
BOTH = [" full forward on sm90", " full backward on sm90"]
BACKWARDS = ["\ncutile backward, variant atomic: ", "\ncuda backward, variant wgmma: "]
OF_ALL_KINDS = ("", "--packed", "--cache 16", "--cache --sinks", "--block 64 --softcap 3")
SAME_BITS = [f"\n  deterministic=True: variant {it}, " for it in ("two_pass", "wgmma_ordered")]


@pytest.mark.parametrize(
    ("words", "status", "printed"),
    [
        ("--shape 2,16,1024,128 --kv-heads 4 --causal", 0, [WHAT, *EVERY, *OF_EACH]),
        ("--shape 2,16/4,1024,128 --causal --verbose", 0, [*EVERY, *OF_EACH, *PASSED_OVER]),
        ("--shape 1,2,128,64 --direction both", 0, BOTH),
        ("--shape 2,32,4096,64 --direction backward", 0, [*BACKWARDS, *SAME_BITS]),
        ("--shape 1,1,64,260 --backend cutile", 1, ["head_dim: got 260; allowed multiples of 8 up to "]),
        *((f"--shape 2,8/2,9/512,20/12 {it}", 1, [" D=20 Dv=12 ", "got 20 Dv=12; "]) for it in OF_ALL_KINDS),
        ("--shape 1,1,64,20", 1, ['auto takes none; backend="reference" runs it', "give scale=20**-0.5"]),
        ("--shape 1,2,64,64 --backend cuda --variant split_kv", 0, ["\ncuda forward, variant split_kv: "]),
        ("--shape 2,8/2,1/512,64 --softcap 30", 0, [" score=", *OF_EACH]),
        ("--shape 2,8/2,1/512,64 --window 128:0 --sinks", 0, [" window:128:0 sinks ", *OF_EACH]),
        ("--shape 2,8/2,1/512,64 --cache 16 --causal", 0, [" cache: pages of 16 ", *OF_EACH]),
        ("--shape 2,8/2,1/512,64 --cache 16 --latent", 0, [" v in k cache: pages of 16 ", *OF_EACH]),
        ("--shape 2,8/2,1/512,64 --cache --softcap 30 --sinks --direction both", 0, ["cache: dense forward", *OF_EACH]),
        ("--shape 2,8/2,1/512,64 --block 128x64 --alibi", 0, [" blocks=128x64 ", *OF_EACH]),
        (
            "--shape 2,8/2,512,64 --packed --block 256",
            0,
            ["packed B=2 Hq=8 Hkv=2 Tq=1024 Tkv=1024", " blocks=128x128 ", "12 full, 8 partial", *OF_EACH],
        ),
        ("--shape 2,8/2,1/512,64 --packed --bias", 0, ["packed B=2 Hq=8 Hkv=2 Tq=2 Tkv=1024", *OF_EACH]),
    ],
)
def test_the_command_explains(words, status, printed, capsys):
    assert main(["explain", *words.split(), "--arch", "sm90"]) == status
    said = capsys.readouterr().out
    assert [text for text in printed if text not in said] == []


def test_an_explanation_is_read_at_one_look(capsys):
    assert main(["explain", "--shape", "2,16,4096,128", "--causal", "--arch", "h100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert lines[1].startswith("auto takes ")
    assert not any("rejected" in line for line in lines)


def test_the_commands_take_one_set_of_flags(capsys):
    for command in ("explain", "compile", "roofline", "tune", "ncu"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        said = capsys.readouterr().out
        flags = (
            "--shape B,H[/Hkv],S[/Skv],D[/Dv] --kv-heads --kv-len --dtype --causal --window --scale --softcap --alibi "
        )
        flags += "--bias --sinks --block --packed --cache --latent --arch --direction --backend"
        for flag in flags.split():
            assert flag in said or (command, flag) in {("roofline", "--backend"), ("tune", "--arch")}, (command, flag)


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"multiattn {multiattn.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("explain --shape 1,2,3", "got '1,2,3'; allowed B,H,S,D or B,H/Hkv,S/Skv,D/Dv"),
        ("explain --shape 1,2/1,64,64 --kv-heads 2", "--kv-heads: got 2 with a shape that has its own"),
        ("explain --shape 1,2,64,64 --arch h300", "got 'h300'; allowed cpu, sm80"),
        ("explain --shape 1,2,64,64 --cache --bias", "--bias: got it; allowed --cache, --latent, --softcap"),
        ("explain --shape 1,2,64,64/72 --latent", "--latent: got D=64 Dv=72; allowed values of up to 64 columns"),
        ("explain --shape 1,2,64,64 --cache --direction backward", "allowed forward: a cache has no gradient"),
        ("tune --shape 1,2,64,64 --softcap 30", "--softcap: got it; allowed plain problems: calls with features run"),
        ("ncu --shape 1,2,64,64 --backend cuda --sinks", "--sinks: got it; allowed plain problems"),
        ("roofline --device h200 --shape 1,2,64,64 --block 64", "--block: got it; allowed --packed, --cache"),
        ("roofline --device h200 --shape 1,2,64,64 --seq 64", "--seq: got it with --shape"),
        ("roofline --device H300", "device: got 'H300'; allowed A100 SXM 80GB, RTX 3090"),
        ("roofline --device H200 --seq 32768", "--seq: got 32768; allowed up to 16384 tokens, or a --batch"),
        ("roofline --device H200 --heads 3 --kv-heads 2", "query heads must be a multiple"),
        ("ncu --read no_such.csv", "No such file"),
        ("ncu --backend cuda", "got no plan; allowed without them: --read"),
        ("ncu --backend cuda --shape 4,16,4096,128 --kv-len 0", "allowed one that needs a kernel"),
        ("ncu --backend cuda --shape 4,16,4096,128 --variant no_such", "variant: got 'no_such'"),
        ("ncu --backend cuda --shape 4,16,4096,128 --kv-heads 3", "heads"),
        ("ncu --backend cuda --shape 1,2,64,4096", "head_dim"),
        ("compile --arch sm80,sm90 --shape 1,2,0,64", "allowed one that needs a kernel\n"),
        ("compile --arch sm80,sm90 --shape 1,2,0,64 --emit cubin no_folder", "allowed one that needs a kernel\n"),
        ("compile --shape 1,2,64,64 --causal --mask full", "--mask: got it with --causal"),
        ("explain --shape 1,2,64,64 --kv-len -1", "sizes must not be negative"),
        ("explain --shape 1,3,5,8 --kv-heads 2", "got Hq=3, Hkv=2"),
        ("compile --backend x", "got 'x'; allowed triton, cutile, cuda"),
        ("compile --arch sm90,sm75", "got 'sm75'; allowed cpu, sm80, sm86"),
        ("compile --arch sm90,cpu", "got 'cpu'; allowed sm80, sm86"),
        ("compile --head-dim 64,zwei", "got zwei; allowed whole numbers from 1 on"),
        ("compile --variant split_q --backend cutile", "variant: got 'split_q'; cutile has split_keys, full, memory"),
        ("compile --variant nobody", "--variant: got 'nobody', which none of these backends has; allowed offered"),
        ("compile --shape 1,2,64,64 --head-dim 128", "got 128 with a shape of D=64"),
        ("compile --shape 1,2,64,64 --head-dim 64/32", "got 64/32 with a shape of D=64"),
        ("roofline --device h200 --head-dim 64/", "got ; allowed whole numbers from 1 on"),
        ("compile --shape 1,3,64,64 --kv-heads 2", "got Hq=3, Hkv=2"),
        ("compile --emit cubin,exe somewhere", "got exe; allowed cubin, ptx, sass, tileir, ttgir"),
    ],
)
def test_wrong_options_are_named(words, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        status = main(words.split())
    except SystemExit as stop:
        status = stop.code
    assert status
    assert message in f"{status} {capsys.readouterr().err}"
