"""Machine code read: every opcode in one class, the hot loops and what is in them, warps that part at a barrier."""

from collections import Counter
from types import SimpleNamespace

import pytest
from targets_fakes import request

from multiattn.inspect import facts, mix
from multiattn.inspect.mix import CLASSES, FEATURES, OTHER, Counts, features, flop_of, measure
from multiattn.inspect.sass import parse, parted_arrivals
from multiattn.plan import toolchain
from multiattn.plan.cubin import read_entry
from multiattn.plan.toolchain import disassemble, find_cuobjdump


def sass(*lines):
    """Text as cuobjdump prints it; line n is at 0x10 * n."""
    return "\n\t\tFunction : kernel\n" + "".join(
        f"        /*{16 * place:04x}*/                   {line} ;        /* 0x0000000000007918 */\n"
        for place, line in enumerate(lines)
    )


HMMA = "HMMA.16816.F32.BF16 R4, R8, R6, R4"
HGMMA = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR24], R24"
EXP, WORK, SHIFT = "MUFU.EX2 R5, R5", "FFMA R1, R2, R3, R4", "IADD3 R1, R2, R3, RZ"
LOAD, STORE = "LDL.LU R5, [R1+0x8]", "STL.64 [R1], R2"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"@P0 {HMMA}", "HMMA"),
        (f"@!UPT {HGMMA}", "HGMMA"),
        ("UTCHMMA.2CTA tmem[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], !UPT", "UTCHMMA"),
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR24], R24", "other tensor"),
        ("@!P3 LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR4][R2.64]", "LDGSTS"),
        ("UTMALDG.4D.2CTA [UR8], [UR4]", "UTMALDG"),
        ("REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4", "RED/ATOM"),
        ("@P2 STL [R1], R4", "STL"),
        ("MUFU.EX2.F16 R5, R5", "MUFU.EX2"),
        ("HFMA2.BF16_V2 R1, R2, R3, R4", "FP16"),
        ("HFMA2.MMA R8, -RZ, RZ, 0, 1.847", "MOV"),
        ("HFMA2.BF16_V2 R1, -RZ.H0_H0, RZ.H0_H0, |R2|", "FP16"),  # an absolute value: work
        ("HADD2.F32 R1, -RZ, R2.H0_H0", "conversion"),
        ("IMAD.MOV.U32 R1, RZ, RZ, R2", "MOV"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R1", "SYNCS"),
        ("@P0 BRA 0x0", "control"),
        ("UNEWOP UR1", OTHER),
    ],
)
def test_an_instruction_is_of_one_class(line, name):
    counts = measure(parse(sass(line))).code
    assert counts.classes == {name: 1}
    assert counts[name] == counts.instructions == 1
    assert counts.tensor == sum(counts.tensor_names.values()) == (name in mix.TENSOR)


def test_no_opcode_is_in_two_classes():
    opcodes = [opcode for named in mix._OPCODES.values() for opcode in named.split()]
    assert [opcode for opcode, times in Counter(opcodes).items() if times > 1] == []
    assert len(set(CLASSES)) == len(CLASSES)
    with pytest.raises(KeyError, match="class: got 'FMA'; allowed HMMA"):
        _ = Counts()["FMA"]


@pytest.mark.parametrize(
    ("name", "flop"),
    [
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16),
        ("HMMA.884.F32.F32.STEP0", 2 * 8 * 8 * 4),
        ("HMMA.SP.16832.F32", None),
        ("HGMMA.64x128x16.F32.BF16", 2 * 64 * 128 * 16),
        ("UTCHMMA", None),
    ],
)
def test_a_multiplication_says_what_it_does(name, flop):
    assert flop_of(name) == flop


def test_ratios_are_of_the_hot_loops():
    found = measure(parse(sass(WORK, WORK, STORE, HMMA, HMMA, EXP, WORK, SHIFT, SHIFT, "@P0 BRA 0x30", LOAD)))
    assert found.hot_loops == 1
    assert found.hot.tensor_names == {"HMMA.16816.F32.BF16": 2}
    ratios = found.hot.per_tensor(), found.hot.per_tensor("FP32", "INT"), found.hot.per_tensor(mix.EX2)
    assert (*ratios, found.hot.flop_per_tensor) == (2.5, 1.5, 0.5, 4096)
    assert (found.hot.spills, found.code.spills, found.code_bytes) == (0, 2, 16 * 11)


def test_what_is_not_known_is_none():
    tcgen05 = measure(parse(sass("UTCHMMA gdesc[UR4]", EXP, "@P0 BRA 0x0"))).hot
    assert (tcgen05.per_tensor(mix.EX2), tcgen05.flop_per_tensor) == (1.0, None)
    plain = measure(parse(sass(WORK, EXP)))
    assert (plain.hot_loops, plain.hot) == (0, plain.code)
    assert plain.hot.per_tensor() is None


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
    assert set(features(measure(parse(sass(*lines))).code)) == found <= set(FEATURES)


@pytest.mark.parametrize(("text", "message"), [("", "got no instruction"), (sass(WORK) * 2, "more than one kernel")])
def test_it_is_the_code_of_one_kernel(text, message):
    with pytest.raises(ValueError, match=message):
        measure(parse(text))


# ---------------------------------------------------------------- loops


@pytest.mark.parametrize(
    ("lines", "loops", "hot", "elsewhere"),
    [
        ((STORE, HMMA, WORK, "@P0 BRA 0x10", LOAD, "EXIT"), 1, 0, 2),
        ((WORK, HMMA, f"@!P3 {LOAD}", "@!UP0 BRA.U 0x10", STORE, "EXIT"), 1, 1, 1),
        # A wait that fails goes to the end of the code and comes back: it is of the loop, the code between is not.
        ((HMMA, "@P0 BRA 0x50", "@P1 BRA 0x0", STORE, "EXIT", LOAD, "BRA 0x20"), 1, 1, 1),
        # A loop over heads around it.
        ((STORE, HMMA, HMMA, WORK, "@P0 BRA 0x10", LOAD, "@P1 BRA 0x0", "EXIT"), 1, 0, 2),
        ((HMMA, WORK, LOAD, "@P0 BRA 0x10", "@P1 BRA 0x0", "EXIT"), 1, 1, 0),  # a loop within it
        ((HMMA, HMMA, WORK, "@P0 BRA 0x0", HMMA, *[WORK] * 6, STORE, "@P0 BRA 0x40", "EXIT"), 2, 1, 0),
        # Where there is wgmma, mma.sync computes a tile again: rare, however dense the loop.
        ((HGMMA, *[WORK] * 8, "@P0 BRA 0x0", HMMA, STORE, "@P0 BRA 0xa0", "EXIT"), 1, 0, 1),
        # Warps that read tensor memory have hot loops of their own.
        (("UTCHMMA gdesc[UR4]", "@P0 BRA 0x0", "LDTM.x8 R4, tmem[UR4]", STORE, "@P0 BRA 0x20", "EXIT"), 2, 1, 0),
        ((WORK, STORE, "EXIT"), 0, 1, 0),
        # A jump from the end back into the code makes no loop.
        ((HMMA, "@P0 BRA 0x50", STORE, "EXIT", WORK, WORK, "BRA 0x20"), 0, 1, 0),
    ],
)
def test_spills_in_hot_loops_are_told_from_others(lines, loops, hot, elsewhere):
    found = measure(parse(sass(*lines)))
    assert (found.hot_loops, found.hot.spills, found.code.spills - found.hot.spills) == (loops, hot, elsewhere)


RAISE, LOWER = "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xa0", "USETMAXREG.DEALLOC.CTAPOOL 0x20"
ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR8+0x2c010], RZ"


@pytest.mark.parametrize(
    ("lines", "parted"),
    [
        ((RAISE, f"@!P0 {ARRIVE}", "EXIT", LOWER, ARRIVE, "EXIT"), []),
        ((RAISE, "@P1 BRA 0x30", ARRIVE, "BAR.SYNC.DEFER_BLOCKING R4, 0x80", "EXIT", LOWER, ARRIVE, "EXIT"), [0x20]),
        ((LOWER, ARRIVE, "EXIT", RAISE, f"@!P0 {ARRIVE}", ARRIVE, "EXIT"), [0x50]),
        ((RAISE, "@P1 BRA 0x50", "EXIT", LOWER, "EXIT", ARRIVE, "BRA 0x20"), [0x50]),
        ((ARRIVE, "EXIT"), []),
    ],
    ids=["predicated", "a jump around it", "the loader first", "at the end of the code", "warps that are all alike"],
)
def test_a_warp_that_parts_to_arrive_is_found(lines, parted):
    assert parted_arrivals(parse(sass(*lines))) == parted


def test_a_kernel_whose_warps_part_to_arrive_is_not_read(monkeypatch):
    kernel = SimpleNamespace(kernel="k", cubin=b"", threads=128, dynamic_smem_bytes=0)
    entry = SimpleNamespace(threads=128, registers=32, smem_bytes=0)
    monkeypatch.setattr(facts, "read_entry", lambda *_: entry)
    monkeypatch.setattr(facts, "disassemble", lambda cubin: sass(RAISE, "@P1 BRA 0x30", ARRIVE, "EXIT"))
    with pytest.raises(RuntimeError, match="k: lanes leave their warp to arrive at an mbarrier, at 0x20: it may hang"):
        facts.read_kernel(kernel, request().plan())


@pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_what_a_cubin_says_of_itself(arch):
    """Threads, and shared memory without what the system keeps, which cubins of sm90 and later count."""
    core = pytest.importorskip("cuda.core")
    source = """extern "C" __global__ void __launch_bounds__(96) kernel(float* out) {
        __shared__ float kept[512];
        kept[threadIdx.x] = out[threadIdx.x];
        __syncthreads();
        out[threadIdx.x] = kept[95 - threadIdx.x];
    }"""
    cubin = bytes(core.Program(source, "c++", core.ProgramOptions(arch=arch)).compile("cubin").code)
    entry = read_entry(cubin, "kernel")
    assert (entry.threads, entry.smem_bytes, entry.stack_bytes) == (96, 2048, 0)
    assert 1 <= entry.registers <= 32
    assert measure(parse(disassemble(cubin))).hot_loops == 0
    assert disassemble(b"no cubin") is None


@pytest.mark.parametrize("has_both", [True, False])
def test_cuobjdump_without_nvdisasm_is_none(has_both, monkeypatch, tmp_path):
    """It prints no code then, and every kernel of `multiattn compile` was an error."""
    for name in ("cuobjdump", "nvdisasm") if has_both else ("cuobjdump",):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain.metadata, "files", lambda name: [])
    find = toolchain.find_cuobjdump.__wrapped__
    assert find() == (str(tmp_path / "cuobjdump") if has_both else None)
