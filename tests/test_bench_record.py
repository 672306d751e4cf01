"""The record of what compilers make: its keys, its digests, what it finds, its file."""

import argparse
import importlib.util
import struct
from dataclasses import replace
from pathlib import Path

import bench_ladder_fakes as ladders
import pytest

from bench import record, record_kernels
from bench.record import Record, compare, is_older, key_of, load, promises, save, walk_rules
from bench.record_kernels import KNOWN_SPILLS, Kernel, digest_of
from multiattn.inspect.pool import Outcome
from multiattn.plan import backend as registry
from multiattn.plan.arch import GPU_ARCHS, by_name, occupancy
from multiattn.plan.backend import BACKENDS, DIRECTIONS, Exported
from multiattn.plan.config import Rule
from multiattn.plan.toolchain import version_of

KERNEL = Kernel(
    name="attention_forward", key="k", digest="d", threads=128, registers=128, stack_bytes=0, smem_bytes=1024, blocks=3,
    share=0.1875, limiter="registers", code_bytes=4096, hot_loops=2, hot_spills=0, other_spills=0,
    hot={"HGMMA": 8, "FP32": 80}, mma={"HGMMA.64x128x16.F32.BF16": 8}, features=("wgmma", "TMA load", "mbarrier"),
)  # fmt: skip


@pytest.fixture
def doors(tmp_path, monkeypatch):
    """Doors in front of the compilers of this process, gone after the test."""
    for tool, module, name in (
        ("triton", "triton", "compile"),
        ("cuda-tile", "cuda.tile._compile", "_get_bytecode"),
        ("cuda-tile", "cuda.tile._compile", "compile_cubin"),
        ("cuda-core", "cuda.core", "Program"),
    ):
        if version_of(tool) is not None:
            owner = importlib.import_module(module)
            monkeypatch.setattr(owner, name, getattr(owner, name))
    return record_kernels.open_doors(tmp_path / "compiled")


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


def check_words(doors, key):
    """Other words have the same key and digest, and compile nothing; another factor has neither."""
    first = key(factor="2.0", **PLAIN)
    assert key(factor="2.0", **WORDED) == first
    assert doors.compiled == 1, "a comment was compiled"
    other = key(factor="3.0", **PLAIN)
    assert (other[0] != first[0], other[1] != first[1], doors.compiled) == (True, True, 2)


@pytest.mark.skipif(version_of("triton") is None, reason="no Triton")
def test_words_are_not_what_triton_compiles(doors, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def key(**texts):
        kernel = module_of(tmp_path / "double.py", TRITON.format(**texts)).double
        source = ASTSource(kernel, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 128})
        cubin = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]
        return doors.take(), digest_of(Exported(kernel="double", seconds=0, cubin=cubin))

    check_words(doors, key)


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
            ct.float32, 1, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(), may_alias_internally=False,
            stride_constant=(1,), shape_divisible_by=(1,), stride_divisible_by=(1,), base_addr_divisible_by=16,
        )  # fmt: skip
        signature = KernelSignature([array], CallingConvention.cutile_python_v2()).with_mangled_symbol("double")
        buffer = io.BytesIO()
        export_kernel(kernel, [signature], buffer, gpu_code="sm_80", output_format="tileir_bytecode")
        source = tmp_path / "double.tileirbc"
        source.write_bytes(buffer.getvalue())
        options, remarks = kernel._compiler_options, tmp_path / "remarks.yaml"
        cubin = _compile.compile_cubin(str(source), options, "sm_80", timeout_sec=None, remarks_output_file=remarks)
        return doors.take(), digest_of(Exported(kernel="double", seconds=0, cubin=Path(cubin).read_bytes()))

    check_words(doors, key)


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


def test_a_digest_is_of_the_launch_too():
    def cubin(code):
        elf = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0"))
        names = b"\0.shstrtab\0.text.kernel\0"
        places = ((0, 0, 0, 0, 0), (1, 3, 64, len(names), 0), (11, 1, 64 + len(names), len(code), 40 << 24))
        struct.pack_into("<Q10xHHH", elf, 0x28, 64 + len(names + code), 64, len(places), 1)
        heads = (struct.pack("<IIQQQQIIQQ", *it[:2], 0, 0, *it[2:4], 0, it[4], 1, 0) for it in places)
        return bytes(elf) + names + code + b"".join(heads)

    base = Exported(kernel="kernel", seconds=0, cubin=cubin(b"\1" * 16), threads=128, dynamic_smem_bytes=1024)
    changes = ({"threads": 256}, {"dynamic_smem_bytes": 0}, {"cubin": cubin(b"\2" * 16)})
    others = [base._replace(**change) for change in changes]
    assert len({digest_of(it) for it in (base, *others)}) == 4
    assert digest_of(base._replace(kernel="renamed", seconds=1)) == digest_of(base)


# ---------------------------------------------------------------- which


@pytest.fixture(scope="module")
def walked():
    return walk_rules()


@pytest.fixture
def every(walked):
    return walked[0]


def test_every_rule_has_a_plan_on_every_arch_that_it_names(walked, every):
    assert walked[1] == []
    assert len(set(map(key_of, every))) == len(every)
    assert {(plan.backend, plan.direction) for plan in every} == {(b, d) for b in BACKENDS for d in DIRECTIONS}
    assert not any(plan.why == "given by the caller" for plan in every)  # the rules chose them


def walk(monkeypatch, *limits):
    """The Plans of rules with these limits, told apart by their tiles, and what is said of dead ones."""
    ladders.install(monkeypatch)
    backend = registry.get("cutile")
    rules = tuple(
        Rule(arches=("sm90",), config=ladders.Tile(tile_m=16 * place, tile_n=16), why="a guess", **limit)
        for place, limit in enumerate(limits, 1)
    )
    variant = replace(backend.forward.offered[0], rules=rules)
    forward = replace(backend.forward, variants=(variant,))
    monkeypatch.setattr(registry, "get", lambda name: replace(backend, forward=forward))
    found, dead = walk_rules(("cutile",), ("forward",))
    return [(it.config.tile_m // 16, it.problem) for it in found], dead


WALKS = {
    "lengths and batches": (
        ({"seq_max": 512}, {"batch_max": 2}, {"seq_min": 8192}, {}, {"head_dim_max": 64}),
        lambda it: (it.seq_q, it.batch),
        {(1, (512, 4)), (2, (4096, 2)), (3, (8192, 4)), (4, (4096, 4))},
        5,
    ),
    "the head_dims that earlier rules leave": (
        ({"head_dim_max": 256}, {"head_dim_max": 512}, {"head_dim_max": 1024}),
        lambda it: it.head_dim,
        {(1, 64), (1, 128), (1, 256), (2, 512), (3, 1024)},
        None,
    ),
    "rows of no whole number of sectors": (
        (
            {"head_dim_min": 97, "head_dim_max": 128, "whole_sectors": False},
            {"head_dim_min": 65, "head_dim_max": 96, "whole_sectors": False},
            {"head_dim_min": 89, "head_dim_max": 96, "whole_sectors": False},
        ),
        lambda it: it.head_dim,
        {(1, 120), (2, 88)},
        3,
    ),
}


@pytest.mark.parametrize("name", WALKS)
def test_the_problem_of_a_plan_is_one_that_its_rule_is_for(monkeypatch, name):
    """A rule with limits gets a problem within them, and a rule that nothing reaches is named."""
    limits, of_interest, wanted, unreached = WALKS[name]
    found, dead = walk(monkeypatch, *limits)
    assert {(place, of_interest(problem)) for place, problem in found} == wanted
    assert [line.partition(" tile_n")[0] for line in dead] == (
        [f"cutile forward full sm90: nothing chooses the rule tile_m={16 * unreached}"] if unreached else []
    )


# ---------------------------------------------------------------- findings


def judged(before, now, here="triton 3.9.0"):
    return compare(before, now, recorded_with="triton 3.9.0", made_with=here)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hot_spills": 3, "registers": 255}, "registers 128 -> 255, hot_spills 0 -> 3"),
        ({"other_spills": 3}, "other_spills 0 -> 3"),
        ({"stack_bytes": 16}, "stack_bytes 0 -> 16"),
        ({"blocks": 2, "share": 0.125}, "blocks 3 -> 2, share 0.1875 -> 0.125"),
        ({"hot_loops": 0}, "hot_loops 2 -> 0"),
        ({"features": ("mma.sync", "TMA load", "mbarrier")}, "features"),
        ({"features": ("wgmma", "mbarrier")}, "features"),
    ],
)
def test_what_is_worse_is_a_regression(change, words):
    now = replace(KERNEL, digest="e", **change)
    kind, (text,) = judged((KERNEL,), (now,))
    assert kind == "regression"
    assert words in text
    assert judged((KERNEL,), (now,), here="triton 3.10.0")[0] == "regression"
    assert judged((KERNEL,), (now,), here="triton 3.8.0")[0] == "note"


def test_only_the_machine_code_counts():
    other = (replace(KERNEL, key="another", digest="e"),)
    assert judged((KERNEL,), (replace(KERNEL, key="another", name="renamed"),)) == ("same", [])
    for change in ({"blocks": 4}, {"features": ("tcgen05", "TMA load", "mbarrier")}, {"hot_loops": 1}):
        assert judged((KERNEL,), (replace(KERNEL, key="another", digest="e", **change),))[0] == "changed"
        assert judged((KERNEL,), (replace(KERNEL, digest="e", **change),))[0] == "note"  # of the same input
    assert judged((KERNEL,), other) == ("changed", ["attention_forward: other code of the same counts"])
    assert judged((KERNEL,), other, here="triton 3.10.0")[0] == "note"
    assert judged((KERNEL,), (KERNEL, KERNEL)) == ("changed", ["1 kernels -> 2"])
    assert judged((), (KERNEL,))[0] == "missing"


@pytest.mark.parametrize(
    ("here", "recorded", "older"),
    [
        ("triton 3.7.1", "triton 3.9.0", True),
        ("triton 3.10.0", "triton 3.9.0", False),
        ("cuda-tile 1.8.0, tileiras 13.3.90", "cuda-tile 1.7.0, tileiras 13.4.92", True),
        ("cuda-tile 1.8.0, tileiras missing", "cuda-tile 1.7.0, tileiras 13.4.92", False),
        ("triton 3.9.0", "triton 3.9.0+git12ab", False),
        ("nvidia-cuda-nvrtc 13.0", "nvidia-cuda-nvrtc 13.0.0", False),
        ("triton 3.7.1", "", False),
    ],
)
def test_releases_are_compared_tool_by_tool(here, recorded, older):
    assert is_older(here, than=recorded) is older


# ---------------------------------------------------------------- the file


KEY = ("cuda", "forward", "wgmma", "sm90", "128", "causal", "tile_m=128 tile_n=128")


def test_a_record_comes_back_from_its_file(tmp_path):
    written = Record(compilers={"cuda": "nvidia-cuda-nvrtc 13.5.37"}, rows={KEY: (KERNEL,)})
    save(written, "sm90", tmp_path)
    assert load(tmp_path / "sm90.json") == written


def test_no_rule_on_record_breaks_a_promise():
    found = record.load_all()
    assert set(found) == set(GPU_ARCHS)
    for arch, its in found.items():
        assert list(promises(its.rows)) == []
        for kernel in (kernel for kernels in its.rows.values() for kernel in kernels):
            fits = occupancy(by_name(arch), kernel.threads, kernel.registers, kernel.smem_bytes)
            assert (kernel.blocks, kernel.limiter) == (fits.blocks, fits.limiter)


def test_a_broken_promise_is_told():
    def told(key, **changes):
        return list(promises({key: (replace(KERNEL, **changes),)}))

    assert "3 spills" in told(KEY, hot_spills=3)[0]
    assert "not one block" in told(KEY, blocks=0)[0]
    assert not told((*KEY[:4], "256", *KEY[5:]), hot_spills=3)
    for (backend, variant, arch), spills in KNOWN_SPILLS.items():
        key = (backend, "forward", variant, arch, *KEY[4:])
        assert not told(key, hot_spills=spills)
        assert told(key, hot_spills=spills + 1)


def command(monkeypatch, tmp_path, plans, *words, dead=(), **made):
    """The command over some Plans, of which each compiles to one kernel; the record is in `tmp_path`."""
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "walk_rules", lambda: (plans, dead))

    def run_isolated(function, items, **_):
        return (Outcome(item=it, result=(replace(KERNEL, **made),)) for it in items)

    monkeypatch.setattr(record, "run_isolated", run_isolated)
    parser = argparse.ArgumentParser()
    record.add_arguments(parser)
    return record.run(parser.parse_args(words))


def test_the_command_writes_checks_and_finds_what_is_gone(monkeypatch, tmp_path, every, capsys):
    plans = [it for it in every if (it.backend, it.arch.name) == ("cuda", "sm80")][:3]
    assert command(monkeypatch, tmp_path, plans) == 0
    assert len(load(tmp_path / "sm80.json").rows) == 3
    assert record.load_all()["sm80"].kernels_of(plans[0]) == (KERNEL,)
    assert command(monkeypatch, tmp_path, plans, "--check") == 0
    capsys.readouterr()
    assert command(monkeypatch, tmp_path, plans, "--check", key="another", digest="e") == 1
    assert ["cuda", "forward", "0", "0", "3"] in [it.split()[:5] for it in capsys.readouterr().out.splitlines()]
    assert command(monkeypatch, tmp_path, plans[:2], "--check") == 1
    assert "no rule has it any more: cuda forward" in capsys.readouterr().out
    assert command(monkeypatch, tmp_path, plans, "--check", dead=("nothing chooses it",)) == 1
    assert "nothing chooses it\n" in capsys.readouterr().out
    assert command(monkeypatch, tmp_path, plans[:2]) == 0
    assert len(load(tmp_path / "sm80.json").rows) == 2
