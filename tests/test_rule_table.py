"""Rules as they compile: what is a hot loop's spill, which cases there are, the record and how it stands today."""

from dataclasses import replace
from types import SimpleNamespace

import bench_ladder_fakes as ladders
import pytest

from bench import rule_table
from bench.errors import InputError
from bench.rule_table import (
    KNOWN_SPILLS,
    Row,
    cases,
    check,
    compile_case,
    compiler,
    is_older,
    load,
    outdated,
    save,
)
from multiattn.cuda.axes import SPLIT_Q
from multiattn.cuda.variants import WGMMA
from multiattn.inspect import facts
from multiattn.inspect.pool import Outcome
from multiattn.inspect.sass import find_loops, find_spills, parse, parted_arrivals
from multiattn.plan import backend as registry
from multiattn.plan.arch import by_name, occupancy
from multiattn.plan.backend import BACKENDS, DIRECTIONS, find_variant
from multiattn.plan.config import Rule
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
    plan = next(case.plan for case in cases(("cuda",), ("forward",), ("sm90",)) if case.plan.variant == WGMMA.name)
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


# ---------------------------------------------------------------- cases


def test_every_rule_has_a_case_on_every_arch_that_it_names():
    assert rule_table.dead_rules() == []
    found = cases()
    assert len({case.key for case in found}) == len(found)
    assert {(case.plan.backend, case.direction) for case in found} == {
        (name, direction) for name in BACKENDS for direction in DIRECTIONS if registry.get(name).op(direction).variants
    }
    for case in found:
        assert case.direction == case.plan.direction
        assert case.plan.why != "given by the caller"  # the rules chose it


def test_the_problem_of_a_case_is_one_that_its_rule_is_for(monkeypatch):
    """Rules of lengths and batches get a problem of such a length and batch; a rule nothing reaches is named."""
    backend = registry.get("cuda")
    variant = find_variant(backend, SPLIT_Q.name)
    sm90 = next(rule.config for rule in variant.rules if "sm90" in rule.arches)
    limits = ({"seq_max": 512}, {"batch_max": 2}, {"seq_min": 8192}, {}, {"head_dim_max": 64})
    rules = tuple(
        Rule(arches=("sm90",), config=replace(sm90, stages=stages), why="", **limit)
        for stages, limit in enumerate(limits, 1)
    )
    variant = replace(variant, rules=rules, fits=lambda problem, arch, config: ())
    backend = replace(backend, forward=replace(backend.forward, variants=(variant,)))
    monkeypatch.setattr(registry, "get", lambda name: backend)
    found = cases(("cuda",), ("forward",))
    sizes = {case.plan.config.stages: (case.plan.problem.seq_q, case.plan.problem.batch) for case in found}
    assert sizes == {1: (512, 4), 2: (4096, 2), 3: (8192, 4), 4: (4096, 4)}
    (line,) = rule_table.dead_rules(("cuda",), ("forward",))
    assert line.startswith(f"cuda forward {variant.name} sm90: nothing chooses the rule tile_m=128")


def test_a_rule_for_what_earlier_ones_leave_of_the_head_dims_is_not_dead(monkeypatch):
    """Rules nested by their widest head_dim: the usual head_dims all go to the first."""
    ladders.install(monkeypatch)
    backend = registry.get("cutile")
    rules = tuple(
        Rule(arches=("sm90",), config=ladders.Tile(tile_m=tile, tile_n=16), why="a guess", head_dim_max=widest)
        for tile, widest in ((64, 256), (32, 512), (16, 1024))
    )
    variant = replace(backend.forward.offered[0], rules=rules)
    forward = replace(backend.forward, variants=(variant,))
    monkeypatch.setattr(registry, "get", lambda name: replace(backend, forward=forward))
    found = {(case.plan.config.tile_m, case.plan.problem.head_dim) for case in cases(("cutile",), ("forward",))}
    assert found == {(64, 64), (64, 128), (64, 256), (32, 512), (16, 1024)}
    assert rule_table.dead_rules(("cutile",), ("forward",)) == []


def test_a_rule_for_rows_of_no_whole_number_of_sectors_is_compiled_for_such(monkeypatch):
    """And one for head_dims of which none has such rows is named."""
    ladders.install(monkeypatch)
    backend = registry.get("cutile")
    rules = tuple(
        Rule(
            arches=("sm90",),
            config=ladders.Tile(tile_m=tile, tile_n=16),
            why="a guess",
            head_dim_min=narrowest,
            head_dim_max=widest,
            whole_sectors=False,
        )
        for tile, narrowest, widest in ((64, 97, 128), (32, 65, 96), (16, 89, 96))
    )
    variant = replace(backend.forward.offered[0], rules=rules)
    forward = replace(backend.forward, variants=(variant,))
    monkeypatch.setattr(registry, "get", lambda name: replace(backend, forward=forward))
    found = {(case.plan.config.tile_m, case.plan.problem.head_dim) for case in cases(("cutile",), ("forward",))}
    assert found == {(64, 120), (32, 88)}
    (line,) = rule_table.dead_rules(("cutile",), ("forward",))
    assert "nothing chooses the rule tile_m=16" in line


def test_rungs_that_must_be_named_are_spanned_on_two_archs(monkeypatch):
    """Of the offered every rule on every arch; of the others those that span the flags, whose rules are never dead."""
    ladders.install(monkeypatch)
    backend = registry.get("cutile")
    rules = tuple(
        Rule(arches=("sm80", "sm90", "sm120"), config=ladders.Tile(tile_m=16, tile_n=16, stages=stages), why="a guess")
        for stages in (1, 2)  # nothing ever chooses the second
    )
    arches = ("cpu", "sm80", "sm90", "sm120")
    variants = tuple(
        replace(it, rules=rules, fits=ladders.variant("x").fits, capability=replace(it.capability, arches=arches))
        for it in backend.forward.variants
    )

    def walked(spanning):
        forward = replace(backend.forward, variants=variants, spanning=spanning)
        monkeypatch.setattr(registry, "get", lambda name: replace(backend, forward=forward))
        found = {}
        for case in cases(("cutile",), ("forward",)):
            found.setdefault(case.plan.variant, set()).add(case.plan.arch.name)
        return found

    everywhere, two = {"sm80", "sm90", "sm120"}, {"sm80", "sm90"}
    assert walked(()) == {"full": everywhere, "pointer": everywhere, "math": two, "basic": two}
    assert walked(("full", "basic")) == {"full": everywhere, "pointer": everywhere, "basic": two}
    assert {line.split()[2] for line in rule_table.dead_rules(("cutile",), ("forward",))} == {"full", "pointer"}


# ---------------------------------------------------------------- record


def row_of(case, **changes):
    backend, direction, variant, arch, head_dim, mask, config = case.key
    row = Row(
        backend=backend, direction=direction, variant=variant, arch=arch, head_dim=int(head_dim), mask=mask,
        config=config, kernel="forward", threads=128, registers=168, smem_bytes=65536, stack_bytes=8, hot_loops=2,
        hot_spills=0, other_spills=3, blocks=3, share=0.1875, limiter="smem", compiler=compiler(backend),
        digest=case.digest,
    )  # fmt: skip
    return replace(row, **changes)


def best_cases(*arches):
    """Of the variant that a caller of CUDA gets on most archs."""
    return [case for case in cases(("cuda",), ("forward",), arches) if case.plan.variant == SPLIT_Q.name]


def fake_compile(case):
    return [row_of(case), row_of(case, kernel="second", digest="from the child")]


def compile_here(function, items, **_):
    """`run_isolated` in this process, with an arch that breaks."""
    for item in items:
        broken = item.plan.arch.name == "sm86"
        error = "RuntimeError: ptxas: out of luck" if broken else ""
        yield Outcome(item=item, seconds=0.1, result=None if broken else function(item), error=error)


@needs_cuobjdump
def test_only_what_changed_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(rule_table, "run_isolated", compile_here)
    monkeypatch.setattr(rule_table, "sources", lambda backend, direction: "those of today")
    path = tmp_path / "compiled" / "rules.json"
    wanted = best_cases("sm80", "sm90")
    said = []
    assert rule_table.update(wanted, path, jobs=1, say=said.append, function=fake_compile) == []
    assert said[0] == f"{len(wanted)} cases, {len(wanted)} to compile"
    recorded = load(path)
    assert len(recorded) == 2 * len(wanted)
    assert {row.digest for row in recorded} == {case.digest for case in wanted}
    stale = {wanted[1].key: [replace(row, digest="older") for row in recorded if row.key == wanted[1].key]}
    known = {row.key: [it for it in recorded if it.key == row.key] for row in recorded}
    other = row_of(wanted[0], config="of no rule any more")
    save({**known, **stale, other.key: [other]}, path)
    said.clear()
    assert rule_table.update(wanted, path, jobs=1, say=said.append, function=fake_compile) == []
    assert said[0] == f"{len(wanted)} cases, 1 to compile"
    assert load(path) == recorded
    (error,) = {line.rpartition("]: ")[2] for line in rule_table.update(
        best_cases("sm86"), path, jobs=1, say=said.append, function=fake_compile
    )}  # fmt: skip
    assert error == "RuntimeError: ptxas: out of luck"
    assert load(path) == recorded


@pytest.mark.parametrize(
    ("here", "recorded", "older"),
    [
        ("triton 3.7.1", "triton 3.9.0", True),
        ("triton 3.10.0", "triton 3.9.0", False),
        ("triton 3.9.0", "triton 3.9.0", False),
        ("nvidia-cuda-nvrtc 13.0.88", "nvidia-cuda-nvrtc 13.5.37", True),
        ("cuda-tile 1.8.0, tileiras 13.3.90", "cuda-tile 1.7.0, tileiras 13.4.92", True),
        ("cuda-tile 1.8.0, tileiras missing", "cuda-tile 1.7.0, tileiras 13.4.92", False),
        ("triton 3.9.0+git12ab", "triton 3.9.0", False),
        ("triton 3.9.0", "triton 3.9.0+git12ab", False),
        ("triton 3.9.0", "triton 3.9.0rc1", False),
        ("nvidia-cuda-nvrtc 13.0", "nvidia-cuda-nvrtc 13.0.0", False),
        ("triton 3.9.0", "triton 3.9.0.1", True),
        ("triton 3.7.1", "", False),
    ],
)
def test_releases_are_compared_tool_by_tool(here, recorded, older):
    assert is_older(here, than=recorded) is older


def test_another_compiler_is_a_reason_to_compile_but_no_fault():
    wanted = best_cases("sm90")
    rows = [row_of(case, compiler="nvidia-cuda-nvrtc 1.0") for case in wanted]
    assert outdated(wanted, rows) == wanted
    assert check(rows, wanted) == []


def test_the_check_finds_what_is_wrong():
    wanted = best_cases("sm90")
    good = {case.key: row_of(case) for case in wanted}
    assert check(list(good.values()), wanted) == []
    small = next(case for case in wanted if case.plan.problem.head_dim == 128)
    large = next(case for case in wanted if case.plan.problem.head_dim == 256)

    def found(case, **changes):
        return check(list({**good, case.key: replace(good[case.key], **changes)}.values()), wanted)

    assert found(large, hot_spills=9) == []  # beyond D=128 a rule may spill
    (line,) = found(small, hot_spills=9)
    where = f"cuda forward {small.plan.variant} sm90 D=128 {small.key[5]} ["
    assert line.startswith(f"9 spills in its hot loops: {where}")
    (line,) = found(small, blocks=0, limiter="smem")
    assert line.startswith("not one block fits an SM (smem): ")
    (line,) = found(small, digest="older")
    assert line.startswith(f"not on record, or of other sources: {where}")
    missing, gone = found(small, config="tile_m=1 tile_n=1")
    assert missing.startswith("not on record")
    assert gone.startswith("on record, but no rule has it: ")


@pytest.mark.parametrize("known", list(KNOWN_SPILLS))
def test_known_spills_pass_and_no_more(known):
    name, variant = known
    case = next(it for it in cases((name,), ("forward",), ("sm90",)) if it.plan.variant == variant)
    assert check([row_of(case, hot_spills=KNOWN_SPILLS[known])], [case]) == []
    assert check([row_of(case, hot_spills=KNOWN_SPILLS[known] + 1)], [case])


def test_a_rung_that_must_be_named_may_spill(monkeypatch):
    ladders.install(monkeypatch)
    narrow = [case for case in cases(("cutile",), ("forward",)) if case.plan.problem.head_dim == 64]
    accused = {case.plan.variant for case in narrow if check([row_of(case, hot_spills=9)], [case])}
    assert {case.plan.variant for case in narrow} == {"full", "pointer", "math", "basic"}
    assert accused == {"full", "pointer"}


def test_a_change_of_kernel_or_config_is_seen(monkeypatch):
    (case,) = best_cases("sm90")[:1]
    config = case.plan.config
    changed = replace(case, plan=replace(case.plan, config=replace(config, stages=config.stages + 1)))
    assert changed.digest != case.digest
    monkeypatch.setattr(rule_table, "sources", lambda backend, direction: "edited")
    assert case.digest != changed.digest


def test_sources_are_those_of_the_direction(tmp_path, monkeypatch):
    monkeypatch.setattr(rule_table, "ROOT", tmp_path)
    folder = tmp_path / "multiattn" / "cuda"
    (folder / "cpu").mkdir(parents=True)
    include = '#include "multiattn/mask.cuh"\n'

    def digests(name, text):
        (folder / name).write_text(text)
        return rule_table.sources("cuda", "forward"), rule_table.sources("cuda", "backward")

    digests("backward_keys.cuh", include)
    digests("launches.py", "from multiattn.cuda import axes\nfrom multiattn.cuda.source import Kernel\n")
    before = digests("forward.cuh", f'{include}#include "forward_traits.cuh"\n')
    for name in ("forward.cuh", "forward_traits.cuh", "axes.py"):  # the axes are the forward's, whoever imports them
        after = digests(name, f"{include}int more;" if name.endswith("cuh") else "MORE = 1")
        assert after[0] != before[0]
        assert after[1] == before[1]
        before = after
    for name in ("mask.cuh", "source.py"):  # both reach them
        after = digests(name, "")
        assert after[0] != before[0]
        assert after[1] != before[1]
        before = after
    after = digests("backward_keys.cuh", f"{include}int more;")
    assert after[0] == before[0]
    assert after[1] != before[1]
    # rules count by their configs, no cubin is made of the CPU's side, and nothing reaches the drawing of a layout
    for name in ("configs.py", "cpu/block.h", "layout_svg.py"):
        assert digests(name, "") == after


def test_a_record_that_is_not_ours_says_so(tmp_path):
    path = tmp_path / "rules.json"
    path.write_text('{"schema": 0}')
    with pytest.raises(InputError, match="not a rule table of schema"):
        load(path)


# ---------------------------------------------------------------- the record against today's compilers

SPANNING = (
    ("triton", "forward", "sm90"),
    ("cutile", "forward", "sm90"),
    ("cuda", "forward", "sm80"),
    ("triton", "backward", "sm90"),
    ("cutile", "backward", "sm90"),
    ("cuda", "backward", "sm90"),
)
"""One launch of each backend and direction, at D=64 and full: what compiles in seconds. Every arch takes minutes."""


@needs_cuobjdump
@pytest.mark.parametrize("which", SPANNING, ids="-".join)
def test_a_rule_spills_no_more_than_is_known(which):
    name, direction, arch = which
    if reasons := registry.get(name).probe_compiler():
        pytest.skip("; ".join(map(str, reasons)))
    if not registry.get(name).op(direction).variants:
        pytest.skip(f"{name} has no kernels for {direction}")
    case = next(it for it in cases((name,), (direction,), (arch,)) if it.key[4:6] == ("64", "full"))
    compiled = compile_case(case)
    assert all(row.hot_spills <= KNOWN_SPILLS.get((name, row.variant), 0) for row in compiled)
    for row in compiled:
        fits = occupancy(by_name(arch), row.threads, row.registers, row.smem_bytes)
        assert (row.blocks, row.limiter) == (fits.blocks, fits.limiter)
