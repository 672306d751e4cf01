"""What the machine code of a kernel is made of: every opcode in one class, work per instruction, real kernels."""

import json
from collections import Counter
from dataclasses import asdict

import pytest

from multiattn.inspect import mix
from multiattn.inspect.mix import CLASSES, FEATURES, OTHER, Counts, Mix, features, flop_of, measure, warps_of
from multiattn.inspect.sass import parse
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name
from multiattn.plan.backend import make_plan
from multiattn.plan.toolchain import disassemble, find_cuobjdump
from multiattn.problem import Problem


def sass(*lines):
    """Text as cuobjdump prints it; line n is at 0x10 * n."""
    return "\n\t\tFunction : kernel\n" + "".join(
        f"        /*{16 * place:04x}*/                   {line} ;        /* 0x0000000000007918 */\n"
        for place, line in enumerate(lines)
    )


HMMA = "HMMA.16816.F32.BF16 R4, R8, R6, R4"
HGMMA = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR24], R24"
EXP, WORK, SHIFT = "MUFU.EX2 R5, R5", "FFMA R1, R2, R3, R4", "IADD3 R1, R2, R3, RZ"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (HMMA, "HMMA"),
        (f"@P0 {HMMA}", "HMMA"),
        (f"@!UPT {HGMMA}", "HGMMA"),
        ("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0", "UTCHMMA"),
        ("UTCHMMA.2CTA tmem[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], !UPT", "UTCHMMA"),
        ("UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11]", "other tensor"),
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR24], R24", "other tensor"),
        ("IMMA.16832.S8.S8 R4, R8.ROW, R6.COL, R4", "other tensor"),
        ("OMMA.SF.16864.F32.E2M1.E2M1.E8 R4, R8, R6, R4, R1, R2, URZ", "other tensor"),
        ("LDSM.16.MT88.4 R4, [R1]", "LDSM"),
        ("STSM.16.M88.4 [R1], R4", "STSM"),
        ("@!P3 LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR4][R2.64]", "LDGSTS"),
        ("UTMALDG.4D.2CTA [UR8], [UR4]", "UTMALDG"),
        ("@P1 UTMALDG.4D [UR8], [UR4], desc[UR6]", "UTMALDG"),
        ("UTMASTG.4D [UR8], [UR4]", "UTMASTG"),
        ("UTMAREDG.3D.ADD [UR8], [UR4]", "UTMAREDG"),
        ("UTMACCTL.PF [UR4]", "UTMA other"),
        ("UBLKCP.S.G [UR8], [UR4], UR6", "UBLKCP"),
        ("LDG.E.128 R4, desc[UR4][R2.64]", "LDG"),
        ("STG.E.128 desc[UR4][R2.64], R4", "STG"),
        ("REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4", "RED/ATOM"),
        ("ATOMS.MAX RZ, [R1], R2", "RED/ATOM"),
        ("LDS.128 R4, [R1]", "LDS"),
        ("STS.U16 [R1], R4", "STS"),
        ("LDL.LU.64 R4, [R1+0x8]", "LDL"),
        ("@P2 STL [R1], R4", "STL"),
        ("LDCU.64 UR4, c[0x0][0x358]", "LDC"),
        ("LDTM.16dp32bit_t0_t15.x32 R4, tmem[UR4]", "LDTM"),
        ("STTM.x64 tmem[UR4], R4", "STTM"),
        ("UTCBAR [UR4], URZ", "tcgen05 other"),
        (EXP, "MUFU.EX2"),
        ("MUFU.EX2.F16 R5, R5", "MUFU.EX2"),
        ("MUFU.RCP R5, R5", "MUFU"),
        (WORK, "FP32"),
        ("FMNMX3 R1, R2, R3, R4, !PT", "FP32"),
        ("FFMA2 R2, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO", "FP32"),
        ("HFMA2.BF16_V2 R1, R2, R3, R4", "FP16"),
        ("HFMA2.MMA R8, -RZ, RZ, 0, 1.847", "MOV"),
        ("HFMA2.BF16_V2 R1, -RZ.H0_H0, RZ.H0_H0, |R2|", "FP16"),  # an absolute value: work
        ("HADD2.BF16_V2 R1, R2, R3", "FP16"),
        ("HADD2.F32 R1, -RZ, R2.H0_H0", "conversion"),
        ("F2FP.BF16.F32.PACK_AB R1, R2, R3", "conversion"),
        ("IMAD.WIDE.U32 R2, R4, R5, R6", "INT"),
        ("IMAD.MOV.U32 R1, RZ, RZ, R2", "MOV"),
        ("ISETP.GE.AND P0, PT, R1, R2, PT", "INT"),
        ("SEL R1, R2, R3, P0", "MOV"),
        ("UIADD3 UR4, UPT, UPT, UR4, 0x1, URZ", "uniform"),
        ("R2UR UR4, R1", "uniform"),
        ("SHFL.BFLY PT, R1, R2, 0x1, 0x1f", "SHFL"),
        ("CREDUX.MAX.F32.NAN UR4, R1", "vote"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "BAR"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R1", "SYNCS"),
        ("ARRIVES.LDGSTSBAR.64 [UR4]", "SYNCS"),
        ("DEPBAR.LE SB0, 0x1", "fence"),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP"),
        ("WARPSYNC.ALL", "WARPGROUP"),
        ("@P0 BRA 0x0", "control"),
        ("NEWOP.X R1", OTHER),
        ("UNEWOP UR1", OTHER),
    ],
)
def test_an_instruction_is_of_one_class(line, name):
    counts = measure(parse(sass(line)), repairs=False).code
    assert counts.classes == {name: 1}
    assert counts[name] == counts.instructions == 1
    assert bool(counts.unknown) == (name == OTHER)
    assert counts.tensor == sum(counts.tensor_names.values()) == (name in mix.TENSOR)


def test_no_opcode_is_in_two_classes():
    opcodes = [opcode for named in mix._OPCODES.values() for opcode in named.split()]
    assert [opcode for opcode, times in Counter(opcodes).items() if times > 1] == []
    assert len(set(CLASSES)) == len(CLASSES)
    with pytest.raises(KeyError, match="class: got 'FMA'; allowed HMMA"):
        _ = Counts()["FMA"]


@pytest.mark.parametrize(
    ("name", "flop", "warps"),
    [
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16, 1),
        ("HMMA.1688.F32.TF32", 2 * 16 * 8 * 8, 1),
        ("HMMA.884.F32.F32.STEP0", 2 * 8 * 8 * 4, 1),
        ("IMMA.8816.S8.S8", 2 * 8 * 8 * 16, 1),
        ("QMMA.16832.F32.E4M3.E4M3", 2 * 16 * 8 * 32, 1),
        ("OMMA.SF.16864.F32.E2M1.E2M1.E8", 2 * 16 * 8 * 64, 1),
        ("HMMA.SP.16832.F32", None, 1),
        ("HGMMA.64x128x16.F32.BF16", 2 * 64 * 128 * 16, 4),
        ("QGMMA.64x256x32.F32.E4M3.E4M3", 2 * 64 * 256 * 32, 4),
        ("UTCHMMA", None, 1),
    ],
)
def test_a_multiplication_says_what_it_does(name, flop, warps):
    assert flop_of(name) == flop
    assert warps_of(name) == warps


def test_ratios_are_of_the_hot_loops():
    code = parse(sass(WORK, WORK, "STL [R1], R4", HMMA, HMMA, EXP, WORK, SHIFT, SHIFT, "@P0 BRA 0x30", "LDL R4, [R1]"))
    found = measure(code, repairs=False)
    assert found.loops == (found.hot,)
    assert found.hot.tensor_names == {"HMMA.16816.F32.BF16": 2}
    assert (found.hot.others_per_tensor, found.hot.alu_per_tensor, found.hot.ex2_per_tensor) == (2.5, 1.5, 0.5)
    assert (found.hot.flop_per_tensor, found.hot.ex2_per_flop) == (4096, 32 / 8192)
    assert (found.hot.spills, found.code.spills, found.code_bytes) == (0, 2, 16 * len(code))
    assert Mix.from_dict(json.loads(json.dumps(asdict(found)))) == found


def test_four_warps_share_what_a_warpgroup_multiplies():
    """64x64 scores at D = 128 take 2 * 64 * 64 * 128 FLOP twice, and 32 exponentials of each of 128 lanes."""
    found = measure(parse(sass(*[HGMMA] * 16, *[EXP] * 32, "@P0 BRA 0x0")), repairs=False)
    assert found.hot.ex2_per_flop == 1 / (4 * 128)
    assert found.hot.flop_per_tensor == 2 * 64 * 64 * 16


def test_what_is_not_known_is_none():
    roles = measure(
        parse(sass("UTCHMMA gdesc[UR4]", "@P0 BRA 0x0", EXP, "LDTM.x8 R4, tmem[UR4]", "@P1 BRA 0x20")), repairs=False
    )
    softmax, multiply = sorted(roles.loops, key=lambda loop: loop.tensor)  # warps have roles, each a loop of its own
    assert (multiply.tensor, multiply.ex2_per_tensor) == (1, 0.0)
    assert (softmax.tensor, softmax[mix.EX2], softmax.ex2_per_tensor) == (0, 1, None)
    assert (roles.hot.ex2_per_tensor, roles.hot.flop_per_tensor, roles.hot.ex2_per_flop) == (1.0, None, None)
    plain = measure(parse(sass(WORK, EXP)), repairs=False)
    assert (plain.loops, plain.hot) == ((), plain.code)
    ratios = (plain.hot.others_per_tensor, plain.hot.alu_per_tensor, plain.hot.ex2_per_tensor, plain.hot.ex2_per_flop)
    assert set(ratios) == {None}


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((WORK,), set()),
        ((HMMA, "LDSM.16.M88.4 R4, [R1]", "LDGSTS.E.128 [R1], desc[UR4][R2.64]"), {"mma.sync", "ldmatrix", "cp.async"}),
        ((f"@P0 {HGMMA}", "@!P1 UTMALDG.4D.2CTA [UR8], [UR4]"), {"wgmma", "TMA load"}),
        (("UTCHMMA.2CTA gdesc[UR4]", "UTMASTG.4D [UR8], [UR4]", HMMA), {"tcgen05", "mma.sync", "TMA store"}),
        (("UTMAREDG.4D.ADD [UR8], [UR4]", "SYNCS.EXCH.64 URZ, [UR4], UR6"), {"TMA reduce", "mbarrier"}),
        (("UBLKCP.S.G [UR8], [UR4], UR6", "LDTM.x8 R4, tmem[UR4]"), {"bulk copy"}),
    ],
)
def test_features_are_what_a_new_compiler_must_not_lose(lines, found):
    assert features(measure(parse(sass(*lines)), repairs=False)) == found <= set(FEATURES)


@pytest.mark.parametrize(("text", "message"), [("", "got no instruction"), (sass(WORK) * 2, "more than one kernel")])
def test_it_is_the_code_of_one_kernel(text, message):
    with pytest.raises(ValueError, match=message):
        measure(parse(text), repairs=False)


@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")
@pytest.mark.parametrize(
    ("backend", "arch", "expected", "excess"),
    [
        ("cuda", "sm80", {"mma.sync", "ldmatrix", "cp.async"}, 1.2),
        ("triton", "sm100", {"tcgen05", "TMA load", "mbarrier"}, None),
        ("cutile", "sm90", {"wgmma", "TMA load", "TMA store", "mbarrier"}, 1.2),
    ],
)
def test_real_kernels_have_no_unknown_opcodes(backend, arch, expected, excess):
    """Exponentials are one for each score, and a few for the running maximum."""
    found = registry.get(backend)
    if reasons := found.probe_compiler():
        pytest.skip(str(reasons))
    problem = Problem.contiguous(batch=1, heads_q=16, seq_q=4096, head_dim=64)
    (kernel,) = found.forward.compile(make_plan(found, problem, by_name(arch), probe=False))
    code = parse(disassemble(kernel.cubin))
    made = measure(code, repairs=False)
    assert made.code.unknown == {}
    assert made.code_bytes == mix.INSTRUCTION_BYTES * len(code) == mix.INSTRUCTION_BYTES * made.code.instructions
    assert features(made) >= expected
    assert made.loops
    if excess is not None:
        assert 1 <= made.hot.ex2_per_flop * 4 * problem.head_dim <= excess
