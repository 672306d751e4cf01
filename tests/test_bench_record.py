"""The record of what compilers make: its keys, its digests, what it finds, its file."""

import importlib.util
import struct
from dataclasses import replace
from pathlib import Path

import bench_ladder_fakes as ladders
import pytest

from bench import record, record_doors, record_kernels
from bench.record import Record, compare, is_older, load, promises, sample, save
from bench.record_cases import Case, cases, dead_rules
from bench.record_kernels import KNOWN_SPILLS, Job, Kernel, digest_of
from multiattn.cuda.axes import SPLIT_Q
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Exported, find_variant
from multiattn.plan.config import Rule
from multiattn.plan.toolchain import version_of

KERNEL = Kernel(
    name="attention_forward",
    key="k",
    digest="d",
    threads=128,
    registers=128,
    stack_bytes=0,
    smem_bytes=1024,
    blocks=3,
    share=0.1875,
    limiter="registers",
    code_bytes=4096,
    hot_loops=2,
    hot_spills=0,
    other_spills=0,
    hot={"HGMMA": 8, "FP32": 80},
    mma={"HGMMA.64x128x16.F32.BF16": 8},
    features=("wgmma", "TMA load", "mbarrier"),
)


@pytest.fixture
def doors(tmp_path, monkeypatch):
    """Doors in front of the compilers of this process, gone after the test."""
    if version_of("triton") is not None:
        import triton

        monkeypatch.setattr(triton, "compile", triton.compile)
    if version_of("cuda-tile") is not None:
        from cuda.tile import _compile

        monkeypatch.setattr(_compile, "_get_bytecode", _compile._get_bytecode)
        monkeypatch.setattr(_compile, "compile_cubin", _compile.compile_cubin)
    if version_of("cuda-core") is not None:
        import cuda.core

        monkeypatch.setattr(cuda.core, "Program", cuda.core.Program)
    return record_doors.open_doors(tmp_path / "compiled")


def module_of(path: Path, text: str):
    """A module of its own for `text`."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- keys

TRITON = """
import triton
import triton.language as tl


@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    {doc}
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    {comment}
    tl.store(x + at, {factor} * tl.load(x + at, at < n), at < n)
"""
WORDED = {"doc": '"""Double x."""\n    # in blocks', "comment": "# at: [BLOCK]"}
PLAIN = {"doc": "pass", "comment": ""}


@pytest.mark.skipif(version_of("triton") is None, reason="no Triton")
def test_words_are_not_what_triton_compiles(doors, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def key(name, **texts):
        kernel = module_of(tmp_path / f"{name}.py", TRITON.format(**texts)).double
        source = ASTSource(kernel, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 128})
        cubin = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]
        return doors.take(), digest_of(Exported(kernel="double", seconds=0, cubin=cubin))

    first = key("one", factor="2.0", **PLAIN)
    assert key("one", factor="2.0", **WORDED) == first
    assert doors.compiled == 1, "a comment made Triton compile again"
    other = key("one", factor="3.0", **PLAIN)
    assert other[0] != first[0]
    assert other[1] != first[1]
    assert doors.compiled == 2


CUTILE = """
import cuda.tile as ct


@ct.kernel
def double(x):
    {doc}
    at = ct.bid(0)
    {comment}
    ct.store(x, index=(at,), tile={factor} * ct.load(x, index=(at,), shape=(128,)))
"""


@pytest.mark.skipif(version_of("tileiras") is None and version_of("cuda-tile") is None, reason="no cuTile")
def test_words_are_not_what_cutile_compiles(doors, tmp_path):
    import io

    import cuda.tile as ct
    from cuda.tile import _compile
    from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, export_kernel

    def key(**texts):
        kernel = module_of(tmp_path / "double.py", CUTILE.format(**texts)).double
        array = ArrayConstraint(
            ct.float32,
            1,
            index_dtype=ct.int32,
            stride_lower_bound_incl=0,
            alias_groups=(),
            may_alias_internally=False,
            stride_constant=(1,),
            shape_divisible_by=(1,),
            stride_divisible_by=(1,),
            base_addr_divisible_by=16,
        )
        signature = KernelSignature([array], CallingConvention.cutile_python_v2()).with_mangled_symbol("double")
        buffer = io.BytesIO()
        export_kernel(kernel, [signature], buffer, gpu_code="sm_80", output_format="tileir_bytecode")
        source = tmp_path / "double.tileirbc"
        source.write_bytes(buffer.getvalue())
        options, remarks = kernel._compiler_options, tmp_path / "remarks.yaml"
        cubin = _compile.compile_cubin(str(source), options, "sm_80", timeout_sec=None, remarks_output_file=remarks)
        return doors.take(), digest_of(Exported(kernel="double", seconds=0, cubin=Path(cubin).read_bytes()))

    first = key(factor="2.0", **PLAIN)
    assert key(factor="2.0", **WORDED) == first
    assert doors.compiled == 1, "a comment made cuTile compile again"
    assert key(factor="3.0", **PLAIN) != first
    assert doors.compiled == 2


@pytest.mark.skipif(version_of("cuda-core") is None, reason="no cuda.core")
def test_words_are_not_what_nvrtc_compiles(doors, tmp_path):
    import cuda.core

    def key(header, name="double_it"):
        (tmp_path / "double.cuh").write_text(header)
        source = f'#include "double.cuh"\nextern "C" __global__ void {name}(float* x) {{ x[threadIdx.x] *= FACTOR; }}'
        options = cuda.core.ProgramOptions(arch="sm_80", include_path=[str(tmp_path)], std="c++17")
        code = cuda.core.Program(source, "c++", options).compile("cubin").code
        return doors.take(), digest_of(Exported(kernel=name, seconds=0, cubin=bytes(code)))

    first = key("#define FACTOR 2.0f\n")
    assert key("// by how much\n#define FACTOR  2.0f /* twice */\n\n") == first
    assert doors.compiled == 1, "a comment made NVRTC compile again"
    assert key("#define FACTOR 3.0f\n")[1] != first[1]
    assert doors.compiled == 2
    assert key("#define FACTOR 2.0f\n", name="renamed")[1] == first[1], "a digest has the name of a kernel in it"


def test_slashes_in_a_string_are_no_comment():
    assert record_doors._plain('a = "//x"; // y\n\n  b /* c */ = 1;') == 'a = "//x";\nb = 1;'


def test_a_digest_is_of_the_launch_too():
    names = b"\0.shstrtab\0.text.kernel\0"
    code = b"\x01" * 16
    at_code = 64 + len(names)
    table = at_code + len(code)
    heads = [
        struct.pack("<IIQQQQIIQQ", 0, *[0] * 9),
        struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, 64, len(names), 0, 0, 1, 0),
        struct.pack("<IIQQQQIIQQ", 11, 1, 0, 0, at_code, len(code), 0, 40 << 24, 1, 0),
    ]
    elf = bytearray(64) + names + code + b"".join(heads)
    struct.pack_into("<Q", elf, 0x28, table)
    struct.pack_into("<HHH", elf, 0x3A, 64, 3, 1)
    base = Exported(kernel="kernel", seconds=0, cubin=bytes(elf), threads=128, dynamic_smem_bytes=1024)
    changed = bytearray(elf)
    changed[at_code] ^= 1
    others = [replace(base, threads=256), replace(base, dynamic_smem_bytes=0), replace(base, cubin=bytes(changed))]
    assert len({digest_of(it) for it in (base, *others)}) == 4
    assert digest_of(replace(base, kernel="renamed", seconds=1)) == digest_of(base)


# ---------------------------------------------------------------- which


@pytest.fixture(scope="module")
def every():
    return cases()


def test_every_rule_has_a_case_on_every_arch_that_it_names():
    assert dead_rules() == []
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
    (line,) = dead_rules(("cuda",), ("forward",))
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
    assert dead_rules(("cutile",), ("forward",)) == []


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
    (line,) = dead_rules(("cutile",), ("forward",))
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
    assert {line.split()[2] for line in dead_rules(("cutile",), ("forward",))} == {"full", "pointer"}


def test_the_sample_has_every_backend_on_every_arch_and_both_directions(every):
    chosen = sample(every)
    assert chosen == sample(reversed(every)), "the sample depends on the order"
    assert {(it.plan.backend, it.plan.arch.name) for it in chosen} == {(b, a) for b in BACKENDS for a in GPU_ARCHS}
    assert {(it.plan.backend, it.direction) for it in chosen} == {
        (b, d) for b in BACKENDS for d in ("forward", "backward")
    }


# ---------------------------------------------------------------- findings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hot_spills": 3, "registers": 255}, "0 -> 3 spills in its hot loops (128 -> 255 registers)"),
        ({"other_spills": 3}, "spills outside"),
        ({"stack_bytes": 16}, "bytes of stack"),
        ({"blocks": 2, "share": 0.125}, "occupancy 3 blocks, 18.75 % of the warps -> 2 blocks, 12.5 %"),
        ({"hot_loops": 0}, "no loop on tensor cores"),
        ({"features": ("mma.sync", "TMA load", "mbarrier")}, "wgmma is lost"),
        ({"features": ("wgmma", "mbarrier")}, "TMA load is lost"),
    ],
)
def test_what_is_worse_is_named(change, words):
    now = replace(KERNEL, digest="e", **change)
    worse, changed = compare("case", (KERNEL,), (now,), "same")
    assert worse.kind == "regression"
    assert words in worse.text
    assert changed.kind == "changed"
    assert [it.kind for it in compare("case", (KERNEL,), (now,), "newer")] == ["regression", "note"]
    assert [it.kind for it in compare("case", (KERNEL,), (now,), "older")] == ["note", "note"]


def test_only_the_machine_code_counts():
    assert compare("case", (KERNEL,), (replace(KERNEL, key="another", name="renamed"),), "same") == []
    (found,) = compare("case", (KERNEL,), (replace(KERNEL, digest="e"),), "same")
    assert found.kind == "changed"
    assert "other code of the same counts" in found.text
    (found,) = compare("case", (KERNEL,), (KERNEL, KERNEL), "same")
    assert found.kind == "changed"
    assert "kernels" in found.text
    assert [it.kind for it in compare("case", (), (KERNEL,), "same")] == ["missing"]


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


# ---------------------------------------------------------------- the file


def test_a_record_comes_back_from_its_file(tmp_path):
    key = ("cuda", "forward", "wgmma", "sm90", "128", "causal", "tile_m=128 tile_n=128")
    written = Record(compilers={"cuda": "nvidia-cuda-nvrtc 13.5.37"}, rows={key: (KERNEL,)})
    save(written, "sm90", tmp_path)
    assert load(tmp_path / "sm90.json") == written


def test_no_rule_on_record_breaks_a_promise():
    for found in record.load_all().values():
        assert not promises(found.rows)


def test_a_broken_promise_is_told():
    key = ("cuda", "forward", "wgmma", "sm90", "128", "causal", "c")
    assert "3 spills" in promises({key: (replace(KERNEL, hot_spills=3),)})[0]
    assert "not one block" in promises({key: (replace(KERNEL, blocks=0),)})[0]
    assert not promises({(*key[:4], "256", *key[5:]): (replace(KERNEL, hot_spills=3),)})


@pytest.mark.parametrize("known", list(KNOWN_SPILLS))
def test_known_spills_pass_and_no_more(known):
    name, variant = known
    key = (name, "forward", variant, "sm90", "128", "causal", "c")
    assert not promises({key: (replace(KERNEL, hot_spills=KNOWN_SPILLS[known]),)})
    assert promises({key: (replace(KERNEL, hot_spills=KNOWN_SPILLS[known] + 1),)})


def test_a_rung_that_must_be_named_may_spill(monkeypatch):
    ladders.install(monkeypatch)
    keys = [("cutile", "forward", name, "sm90", "64", "full", "c") for name in ("full", "pointer", "math", "basic")]
    assert [bool(promises({key: (replace(KERNEL, hot_spills=9),)})) for key in keys] == [True, True, False, False]


def test_a_job_reads_again_only_what_changed(monkeypatch, every, tmp_path):
    case = next(it for it in every if it.plan.backend == "cuda")
    made = (Exported(kernel="k", seconds=0, cubin=b""),)
    stand = record_doors.Doors(tmp_path)
    monkeypatch.setattr(record_kernels, "doors", lambda: stand)
    monkeypatch.setattr(record_kernels, "digest_of", lambda kernel: "d")
    monkeypatch.setattr(record_kernels.registry, "get", lambda name: Fake(stand, made))
    assert record_kernels.compile_job(Job(direction="forward", plan=case.plan, known=(KERNEL,))) == (KERNEL,)


class Fake:
    """A backend that exports kernels."""

    def __init__(self, stand, made):
        self.stand, self.made = stand, made

    def op(self, direction):
        return self

    def export(self, plan, kinds):
        self.stand.keys.append("k")
        return self.made


def test_case_reads_as_a_sentence_of_its_key(every):
    case: Case = every[0]
    assert all(part in str(case) for part in case.key)
