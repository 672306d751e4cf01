"""Kernels compiled to run elsewhere: their code, and that what a launch hands over is what languages and cubins say."""

import functools
import re
import subprocess
import tempfile
from dataclasses import replace

import pytest
import torch

from multiattn.plan import abi, cubin
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import get, make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem

BSHD = {"strided": True}
CASES = {
    "cuda d64": ("cuda", "sm90", {"head_dim": 64, "heads_q": 4}),
    "cuda d40 unaligned": ("cuda", "sm120", {"head_dim": 40, "offset": 1}),
    "triton d128 gqa BSHD": ("triton full", "sm90", {"head_dim": 128, "heads_q": 4, **BSHD}),
    "triton gluon d96 gqa BSHD": (
        "triton warp_specialized",
        "sm90",
        {"head_dim": 96, "heads_q": 4, "causal": True, **BSHD},
    ),
    "triton d40 causal pointers": ("triton", "sm80", {"head_dim": 40, "causal": True, "scale": -1.0}),
    "triton d64 all ones": (
        "triton full",
        "sm120",
        {"head_dim": 64, "heads_q": 1, "heads_kv": 1, "batch": 1, "seq_q": 1},
    ),
    "cutile d64 BSHD": ("cutile", "sm90", {"head_dim": 64, "seq_q": 128, **BSHD}),
    "cutile d40 unaligned": ("cutile", "sm120", {"head_dim": 40, "offset": 1}),
}
WITH_PTX = "cuda d40 unaligned"


def problem_of(*, head_dim, strided=False, offset=0, causal=False, scale=None, **changes):
    sizes = {"batch": 2, "heads_q": 2, "heads_kv": 2, "seq_q": 100, "seq_kv": 130, **changes}

    def make(heads, seq):
        memory = torch.empty(sizes["batch"] * heads * seq * head_dim + offset, dtype=torch.bfloat16)[offset:]
        if strided:
            return memory.view(sizes["batch"], seq, heads, head_dim).transpose(1, 2)
        return memory.view(sizes["batch"], heads, seq, head_dim)

    q, k = make(sizes["heads_q"], sizes["seq_q"]), make(sizes["heads_kv"], sizes["seq_kv"])
    return Problem.of(q, k, k, causal=causal, scale=scale)


@functools.cache
def exported(case):
    """The Plan and the kernel of a case, compiled once, with all texts but PTX, which is one more compilation."""
    asked, arch, sizes = CASES[case]
    name, variant = (*asked.split(), None)[:2]
    kinds = ("tileir", "ttgir", "ptx") if case == WITH_PTX else ("tileir", "ttgir")
    if reasons := get(name).probe_compiler():
        pytest.skip("; ".join(map(str, reasons)))
    plan = make_plan(get(name), problem_of(**sizes), ARCHS[arch], variant=variant, probe=False)
    (kernel,) = get(name).forward.export(plan, kinds)
    return plan, kernel


def entry_of(kernel):
    return cubin.read_entry(kernel.cubin, kernel.kernel)


@pytest.mark.parametrize("case", CASES)
def test_a_binding_is_what_the_cubin_takes(case):
    """`export` itself holds it against cubin and language: it raises where they differ."""
    _, kernel = exported(case)
    binding, entry = kernel.binding, entry_of(kernel)
    abi.check(binding, entry)
    assert binding.image.threads in (1, kernel.threads)
    assert binding.image.dynamic_smem_bytes == kernel.dynamic_smem_bytes
    with pytest.raises(ValueError, match=r"got \d+ arguments; allowed \d+, as the cubin has it"):
        abi.check(replace(binding, arguments=binding.arguments[:-1]), entry)
    if (tool := find_cuobjdump()) is None:
        pytest.skip("no cuobjdump to compare with")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        printed = subprocess.run([tool, "-elf", file.name], capture_output=True, text=True, check=True)
    found = re.findall(r"Ordinal : 0x(\w+)\s+Offset\s+: 0x(\w+)\s+Size\s+: 0x(\w+)", printed.stdout)
    numbers = sorted(tuple(int(text, 16) for text in row) for row in found)
    assert [(index, slot.offset, slot.size) for index, slot in enumerate(entry.slots)] == numbers
    assert kernel.threads == entry.threads


def test_triton_has_tensor_maps_where_it_reads_through_descriptors():
    plan, kernel = exported("triton d128 gqa BSHD")
    maps = [argument for argument in kernel.binding.arguments if isinstance(argument, abi.TensorMap)]
    assert [each.tensor for each in maps] == ["k", "v"]
    row = 2 * 128 * 2  # bytes: two heads of a [B, S, H, D] row
    for each in maps:
        assert (each.shape, each.strides) == ((2, 2, 130, 128), (130 * row, 256, row))
        assert each.box.dtype == 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        assert each.box.extents[-1] * 2 <= 128  # bytes that a swizzle takes
    assert plan.problem.strides_k == (130 * row // 2, 128, row // 2)


def test_gluon_has_a_map_for_each_piece_of_each_tensor_and_a_counter():
    _, kernel = exported("triton gluon d96 gqa BSHD")
    maps = [argument for argument in kernel.binding.arguments if isinstance(argument, abi.TensorMap)]
    assert [each.tensor for each in maps] == ["q", "k", "v", "out"] * 2
    assert [each.box.extents[-1] for each in maps] == [64] * 4 + [32] * 4
    assert {each.shape for each in maps} == {(2, 4, 100, 96), (2, 2, 130, 96)}
    assert abi.Pointer(tensor=abi.WORKSPACE) in kernel.binding.arguments
    assert kernel.binding.workspace_bytes == 16


def test_triton_leaves_out_no_size_that_is_one():
    _, kernel = exported("triton d64 all ones")
    assert {"i32"} == {kernel.binding.constants[name] for name in ("heads_q", "group", "batch_heads", "seq_q")}


def test_cutile_hands_over_address_extents_and_strides_of_each_array():
    _, kernel = exported("cutile d64 BSHD")
    q = kernel.binding.arguments[:9]
    assert q[0] == abi.Pointer(tensor="q")
    assert [number.value for number in q[1:]] == [2, 2, 128, 64, 128 * 128, 64, 128, 1]
    assert len(kernel.binding.arguments) == 4 * 9 + 7 + 1 + 10  # arrays, lse, the scale, and the order of tiles
    assert cubin.host_of(kernel.cubin) == "x86_64"
    entry = entry_of(kernel)
    assert entry.param_bytes > entry.slots[-1].offset + 4 + 3 * 128  # tensor maps that no caller hands over


def test_cutile_refuses_what_its_tile_ir_does_not_take():
    from multiattn.cutile import bind

    _, kernel = exported("cutile d64 BSHD")
    text = kernel.texts["tileir"].decode()
    assert set(kernel.texts) == {"tileir"}
    assert text.startswith("entry @forward")
    binding = kernel.binding
    bind.prove(binding, text)
    changed = list(binding.arguments)
    changed[4] = abi.Number(kind="i32", value=128)  # head_dim, a constant of the Tile IR
    with pytest.raises(ValueError, match=r"arrays: argument 4 is .*128.*; the Tile IR has 64"):
        bind.prove(replace(binding, arguments=tuple(changed)), text)
    with pytest.raises(ValueError, match=r"the Tile IR assumes .*which nothing tells"):
        bind.prove(replace(binding, constants={**binding.constants, "q_row_stride": "any"}), text)
    with pytest.raises(ValueError, match="parameters: got "):
        bind.prove(replace(binding, arguments=binding.arguments[:-1]), text)
    swapped = re.sub(r"shape = \[(%\w+), (%\w+)", r"shape = [\2, \1", text, count=1)
    with pytest.raises(ValueError, match="arrays: argument 1 is"):
        bind.prove(binding, swapped)


def test_texts_are_those_that_were_asked_for():
    _, kernel = exported(WITH_PTX)
    assert set(kernel.texts) == {"ptx"}
    assert f".entry {kernel.kernel}(" in kernel.texts["ptx"].decode()
    assert exported("cuda d64")[1].texts == {}
    assert set(exported("triton d40 causal pointers")[1].texts) == {"ttgir"}
    assert "!Passed" in exported("cutile d64 BSHD")[1].remarks


def test_a_backward_is_code_alone():
    cuda = get("cuda")
    if cuda.probe_compiler():
        pytest.skip("no NVRTC")
    problem = Problem.contiguous(batch=1, heads_q=1, seq_q=64, head_dim=16)
    kernels = cuda.backward.export(make_plan(cuda, problem, ARCHS["sm80"], direction="backward", probe=False), ())
    assert len(kernels) > 1
    for kernel in kernels:
        assert kernel.binding is None
        assert kernel.cubin.startswith(b"\x7fELF")
        assert entry_of(kernel).threads == kernel.threads
