"""Machine code read: loops, which of them are hot, spills, and warps that part to arrive at a barrier."""

from types import SimpleNamespace

import pytest

from bench.record import cases
from multiattn.cuda.variants import WGMMA
from multiattn.inspect import facts
from multiattn.inspect.sass import find_loops, find_spills, parse, parted_arrivals
from multiattn.plan.toolchain import disassemble, find_cuobjdump, resource_usage

needs_cuobjdump = pytest.mark.skipif(find_cuobjdump() is None, reason="no cuobjdump")


def sass(*lines):
    """Text as cuobjdump prints it; instructions are 16 bytes apart, so line n is at 0x10 * n."""
    return "\n\t\tFunction : kernel\n" + "".join(
        f"        /*{16 * place:04x}*/                   {line} ;        /* 0x0000000000007918 */\n"
        f"                                                       /* 0x000fc00000000000 */\n"
        for place, line in enumerate(lines)
    )


HMMA = "HMMA.16816.F32.BF16 R4, R8, R6, R4"
HGMMA = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR24], R24"
LOAD, STORE = "LDL.LU R5, [R1+0x8]", "STL.64 [R1], R2"
WORK = "FFMA R1, R2, R3, R4"


def test_a_spill_around_a_hot_loop_is_not_in_it():
    code = sass(STORE, HMMA, WORK, "@P0 BRA 0x10", LOAD, "EXIT")
    found = find_spills(code, repairs=False)
    assert (found.hot_loops, found.hot, found.elsewhere) == (1, 0, 2)


def test_a_spill_in_a_hot_loop_is_found():
    for spill in (STORE, LOAD, f"@!P3 {LOAD}"):
        found = find_spills(sass(WORK, HMMA, spill, "@!UP0 BRA.U 0x10", STORE, "EXIT"), repairs=False)
        assert (found.hot_loops, found.hot, found.elsewhere) == (1, 1, 1)


def test_what_jumps_back_from_the_end_into_the_code_is_no_loop_for_that():
    """A wait that fails goes to the end of the code and comes back: the code between is not in a loop."""
    straight = sass(HMMA, "@P0 BRA 0x50", STORE, "EXIT", WORK, WORK, "BRA 0x20")
    assert not find_loops(parse(straight))
    found = find_spills(sass(HMMA, "@P0 BRA 0x50", "@P1 BRA 0x0", STORE, "EXIT", LOAD, "BRA 0x20"), repairs=False)
    assert (found.hot, found.elsewhere) == (1, 1)  # here the slow path is a loop's: what it loads counts


def test_a_loop_over_heads_around_the_hot_loop_is_not_hot():
    nest = sass(STORE, HMMA, HMMA, WORK, "@P0 BRA 0x10", LOAD, "@P1 BRA 0x0", "EXIT")
    outer, inner = find_loops(parse(nest))
    assert (len(outer.own), outer.nested, len(inner.own)) == (0, 2, 2)
    assert find_spills(nest, repairs=False).hot == 0


def test_a_loop_within_a_hot_loop_is_hot():
    nest = sass(HMMA, WORK, LOAD, "@P0 BRA 0x10", "@P1 BRA 0x0", "EXIT")
    assert find_spills(nest, repairs=False).hot == 1


def test_the_repair_is_told_from_the_loops():
    loop, repair = (HMMA, HMMA, WORK, "@P0 BRA 0x0"), (HMMA, *[WORK] * 6, STORE, "@P0 BRA 0x40")
    kernel = sass(*loop, *repair, "EXIT")
    assert find_spills(kernel, repairs=True).hot == 0
    assert find_spills(kernel, repairs=False).hot == 1  # a backward kernel has no repair: then all loops are hot
    wgmma = sass(HGMMA, *[WORK] * 8, "@P0 BRA 0x0", HMMA, STORE, "@P0 BRA 0xa0", "EXIT")
    assert find_spills(wgmma, repairs=True).hot == 0  # 16 rows are not enough for wgmma, however dense the loop
    masked = sass(*loop, HMMA, WORK, STORE, "@P0 BRA 0x40", "EXIT")
    assert find_spills(masked, repairs=True).hot == 1


def test_the_warps_that_read_tensor_memory_have_hot_loops_too():
    kernel = sass("UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]", "@P0 BRA 0x0", "LDTM.x8 R4, tmem[UR4]", STORE,
                  "@P0 BRA 0x20", "EXIT")  # fmt: skip
    found = find_spills(kernel, repairs=True)
    assert (found.hot_loops, found.hot) == (2, 1)


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
    usage = SimpleNamespace(threads=128, registers=32, smem_bytes=0)
    monkeypatch.setattr(facts, "resource_usage", lambda cubin: usage)
    monkeypatch.setattr(facts, "disassemble", lambda cubin: sass(RAISE, "@P1 BRA 0x30", ARRIVE, "EXIT"))
    plan = next(it for it in cases(("cuda",), ("forward",), ("sm90",)) if it.variant == WGMMA.name)
    with pytest.raises(RuntimeError, match="k: lanes leave their warp to arrive at an mbarrier, at 0x20: it may hang"):
        facts.read_kernel(kernel, plan)


def test_without_a_loop_on_tensor_cores_all_the_code_counts():
    assert find_spills(sass(WORK, STORE, "EXIT"), repairs=False).hot == 1
    with pytest.raises(ValueError, match="without an instruction"):
        find_spills("cuobjdump fatal: no code", repairs=False)


@needs_cuobjdump
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
    usage = resource_usage(cubin)
    assert (usage.threads, usage.smem_bytes, usage.stack_bytes) == (96, 2048, 0)
    assert 1 <= usage.registers <= 32
    found = find_spills(disassemble(cubin), repairs=False)
    assert (found.hot_loops, found.hot, found.elsewhere) == (0, 0, 0)
    assert resource_usage(b"no cubin") is None
    assert disassemble(b"no cubin") is None
