"""Kernels ahead of time: exports are what languages and cubins say, and the loader launches what was written."""

import functools
import json
import math
import re
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module

import driver_fakes
import pytest
import torch
from aot_fakes import BOX, edit, emit, loaded, problem

from multiattn import aot
from multiattn.cutile.forward import together_of
from multiattn.operands import Operands, Options, with_score
from multiattn.plan import abi, cubin
from multiattn.plan.arch import ARCHS
from multiattn.plan.backend import BACKENDS, get, make_plan
from multiattn.plan.toolchain import find_cuobjdump
from multiattn.problem import Problem

exports = pytest.mark.xdist_group("exports")  # one process compiles each case, once
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


def problem_like(*, head_dim, strided=False, offset=0, causal=False, scale=None, **changes):
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
    plan = make_plan(get(name), problem_like(**sizes), ARCHS[arch], variant=variant, probe=False)
    (kernel,) = get(name).forward.export(plan, kinds)
    return plan, kernel


def entry_of(kernel):
    return cubin.read_entry(kernel.cubin, kernel.kernel)


@exports
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


@exports
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


@exports
def test_gluon_has_a_map_for_each_piece_of_each_tensor_and_a_counter():
    _, kernel = exported("triton gluon d96 gqa BSHD")
    maps = [argument for argument in kernel.binding.arguments if isinstance(argument, abi.TensorMap)]
    assert [each.tensor for each in maps] == ["q", "k", "v", "out"] * 2
    assert [each.box.extents[-1] for each in maps] == [64] * 4 + [32] * 4
    assert {each.shape for each in maps} == {(2, 4, 100, 96), (2, 2, 130, 96)}
    assert abi.Pointer(tensor=abi.WORKSPACE) in kernel.binding.arguments
    assert kernel.binding.workspace_bytes == 16


@exports
def test_triton_leaves_out_no_size_that_is_one():
    _, kernel = exported("triton d64 all ones")
    assert {"i32"} == {kernel.binding.constants[name] for name in ("heads_q", "group", "batch_heads", "seq_q")}


@exports
def test_cutile_hands_over_address_extents_and_strides_of_each_array():
    _, kernel = exported("cutile d64 BSHD")
    q = kernel.binding.arguments[:9]
    assert q[0] == abi.Pointer(tensor="q")
    assert [number.value for number in q[1:]] == [2, 2, 128, 64, 128 * 128, 64, 128, 1]
    assert len(kernel.binding.arguments) == 4 * 9 + 7 + 1 + 10  # arrays, lse, the scale, and the order of tiles
    assert cubin.host_of(kernel.cubin) == "x86_64"
    entry = entry_of(kernel)
    assert entry.param_bytes > entry.slots[-1].offset + 4 + 3 * 128  # tensor maps that no caller hands over


@exports
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


@exports
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


# ---------------------------------------------------------------- the loader, against a driver that only remembers


# ---------------------------------------------------------------- what code holds for


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"seq_q": 7, "seq_kv": 4096},
        {"batch": 5, "heads_q": 32, "heads_kv": 4},
        {"scale": 0.5},
        {"heads_q": 4, "heads_kv": 4},
        {"seq_q": 1, "seq_kv": 1},
    ],
)
def test_one_kernel_runs_many_problems(name, sizes, tmp_path):
    kernel = loaded(tmp_path, name, batch=3)
    other = problem(**sizes)
    binding = kernel._try_binding(other)
    assert binding.constants == kernel.entry["launch"]["constants"]
    tiles = math.ceil(other.seq_q / kernel.plan.config.tile_m) * other.batch * other.heads_q
    is_persistent = getattr(kernel.plan.config, "is_persistent", False)
    assert math.prod(binding.grid) == (min(tiles, 132) if is_persistent else tiles)  # SMs of an H200


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("emitted", "heads_q"), [(4, 4), (4, 8), (2, 6), (3, 5), (6, 4), (64, 11)])
def test_code_runs_any_number_of_heads_with_as_many_side_by_side_as_suit_them(emitted, heads_q, causal, tmp_path):
    sizes = {"heads_kv": 1, "seq_q": 1024, "causal": causal}
    kernel = loaded(tmp_path, "cutile", heads_q=emitted, **sizes)
    config = kernel.plan.config
    assert config.scheduler == "one_tile"
    wanted = problem(heads_q=heads_q, **sizes)
    binding = kernel._try_binding(wanted)
    assert binding.constants == kernel.entry["launch"]["constants"]
    together = together_of(wanted, config)
    assert binding.grid[0] == 1024 // config.tile_m * together.heads
    assert math.prod(binding.grid) == 1024 // config.tile_m * heads_q * 2
    assert abi.Number(kind="i32", value=together.heads) in binding.arguments


SQUARE = {"seq_q": 128, "seq_kv": 128, "causal": True}


@pytest.mark.parametrize(
    ("name", "emitted", "sizes", "message"),
    [
        ("triton", {}, {"scale": -1.0}, "scale_sign: got -1; allowed 1"),
        ("cutile", {}, {"scale": 0.0}, "scale_sign: got 0; allowed 1"),
        ("cutile", {}, {"head_dim": 56}, "head_dim: got 56; allowed 64"),
        ("cutile", {"seq_kv": 128}, {"seq_kv": 101}, "masked: got True; allowed False"),
        ("cutile", SQUARE, {"seq_q": 64, "seq_kv": 96}, "seq_kv_less_seq_q: got any; allowed multiple of 64"),
        ("cuda", {}, {"dtype": "fp16"}, "dtype: got fp16; allowed bf16"),
        ("cuda", {}, {"head_dim": 56}, "head_dim: got 56; allowed 64"),
        ("cuda", {"causal": True}, {}, "mask: got full; allowed causal"),
    ],
)
def test_code_is_refused_what_it_does_not_hold_for(name, emitted, sizes, message, tmp_path):
    kernel = loaded(tmp_path, name, **emitted)
    with pytest.raises(ValueError, match=f"{kernel.name} cannot run these tensors: .*{message}"):
        kernel._launcher(problem(**sizes), 0)


@pytest.mark.parametrize("name", BACKENDS)
def test_code_that_assumes_little_runs_what_is_better_aligned(name, tmp_path):
    variant = {"triton": "full"}.get(name)
    worse = replace(problem(), alignment=2)
    plan = make_plan(get(name), worse, ARCHS["sm90"], variant=variant, probe=False)
    module = import_module(f"multiattn.{name}.bind")
    image = abi.Image(threads=128)
    emitted = module.bind(plan, image)
    better = module.bind(replace(plan, problem=problem()), image, emitted.constants)
    assert better.constants == emitted.constants
    assert list(map(abi.size_of, better.arguments)) == list(map(abi.size_of, emitted.arguments))
    aligned = module.bind(replace(plan, problem=problem()), image)
    assert module.bind(plan, image, aligned.constants).constants != aligned.constants


def test_strides_beyond_31_bits_need_code_for_them():
    from multiattn.cutile.bind import IMAGE, bind

    plan = make_plan(get("cutile"), problem(), ARCHS["sm90"], probe=False)
    long = replace(plan, problem=replace(problem(), strides_q=(2**33, 64 * 101, 64)))
    wide, narrow = bind(long, IMAGE), bind(plan, IMAGE)
    assert {number.kind for number in wide.arguments[1:9]} == {"i64"}
    for made, emitted in ((long, None), (plan, wide.constants), (long, narrow.constants)):
        assert bind(made, IMAGE, emitted).constants["int64"] == "True"


def test_tensors_that_tma_cannot_walk_are_refused(tmp_path):
    kernel = loaded(tmp_path, "cuda")
    with pytest.raises(ValueError, match="alignment: got 2 bytes; allowed base addresses and strides that are mult"):
        kernel._launcher(replace(problem(), alignment=2), 0)


# ---------------------------------------------------------------- bytes


def test_arguments_become_bytes():
    addresses = {"q": 0x1122334455667788, "k": 16}
    pack = abi.pack

    def encode(tensor_map, address):
        return bytes([tensor_map.box.swizzle, address]) * 64

    assert pack(abi.Pointer(tensor="q"), addresses, encode) == struct.pack("<Q", 0x1122334455667788)
    assert pack(abi.Pointer(tensor=None), addresses, encode) == bytes(8)
    numbers = [("i8", 3, "<b"), ("i32", -7, "<i"), ("i64", 2**40, "<q"), ("f32", 0.25, "<f")]
    for kind, value, form in numbers:
        assert pack(abi.Number(kind=kind, value=value), addresses, encode) == struct.pack(form, value)
    assert pack(abi.Number(kind="f32", value=1e300), addresses, encode) == struct.pack("<f", math.inf)
    with pytest.raises(ValueError, match="got 2147483648; allowed i32"):  # not -2147483648
        pack(abi.Number(kind="i32", value=2**31), addresses, encode)
    data = pack(abi.Struct(data=bytes(range(24)), pointers={8: "q"}), addresses, encode)
    assert data == bytes(range(8)) + struct.pack("<Q", addresses["q"]) + bytes(range(16, 24))
    tensor_map = abi.TensorMap(tensor="k", shape=(1,), strides=(), box=BOX)
    assert pack(tensor_map, addresses, encode) == bytes([3, 16]) * 64
    mapped = abi.Struct(data=bytes(192), pointers={136: "q"}, maps={0: tensor_map})
    rest = bytes(8) + struct.pack("<Q", addresses["q"]) + bytes(48)
    assert pack(mapped, addresses, encode) == bytes([3, 16]) * 64 + rest
    assert (abi.size_of(mapped), abi.alignment_of(mapped)) == (192, 64)


# ---------------------------------------------------------------- launching


@pytest.fixture
def driver(monkeypatch):
    fake = driver_fakes.install(monkeypatch, driver_fakes.FakeDriver(), device=0)
    monkeypatch.setattr(aot, "detect", lambda device: ARCHS["sm90"])
    return fake


def tensors(*, seq_q=101, seq_kv=130, heads_q=4, batch=2, head_dim=64, dtype=torch.bfloat16):
    q = torch.zeros(batch, seq_q, heads_q, head_dim, dtype=dtype).transpose(1, 2)
    k = torch.zeros(batch, seq_kv, 2, head_dim, dtype=dtype).transpose(1, 2)
    return q, k, k.clone()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_launch_is_what_the_binding_says(name, driver, tmp_path):
    kernel = loaded(tmp_path, name)
    q, k, v = tensors()
    binding = kernel._try_binding(Problem.of(q, k, v))
    driver.sizes = [abi.size_of(argument) for argument in binding.arguments]
    out, lse = kernel(q, k, v)
    (launched,) = driver.launched
    known = driver_fakes.check_launches([launched], [binding], Operands(q, k, v, out, lse))
    areas = [known[abi.WORKSPACE]] if binding.workspace_bytes else []
    assert [address for address, *_ in driver.cleared] == areas
    smem = binding.image.dynamic_smem_bytes
    assert driver.attributes == ([(8, smem, launched.function, 0)] if smem else [])
    assert out.stride() == q.stride()
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 101), torch.float32, True)
    again = kernel(q, k, v, scale=0.5, out=out, lse=lse)
    assert again[0] is out
    assert again[1] is lse
    assert (len(driver.loaded), len(driver.launched)) == (1, 2)


def test_no_queries_and_no_keys_launch_nothing(driver, tmp_path):
    kernel = loaded(tmp_path, "cuda")
    out, lse = kernel(*tensors(seq_q=0))
    assert (out.shape, lse.shape) == ((2, 4, 0, 64), (2, 4, 0))
    out, lse = kernel(*tensors(seq_kv=0))
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()
    assert driver.launched == []


def test_tensors_that_the_kernel_is_not_for(driver, tmp_path, monkeypatch):
    kernel = loaded(tmp_path, "triton")
    refused = "cannot run these tensors: "
    with pytest.raises(ValueError, match=f"{refused}dtype: got fp16; allowed bf16; head_dim: got 72; allowed 64"):
        kernel(*tensors(dtype=torch.float16, head_dim=72))
    q, k, v = tensors()
    with pytest.raises(ValueError, match=f"{refused}strides: got a broadcast dimension"):
        kernel(q, k[:, :1].expand_as(k), v)
    with pytest.raises(ValueError, match="k and v must have one shape"):
        kernel(q, k, v[:, :, 1:])
    with pytest.raises(ValueError, match=r"gradients: got tensors that require them; allowed a call in torch.no_grad"):
        kernel(q.detach().requires_grad_(), k, v)
    monkeypatch.setattr(aot, "detect", lambda device: ARCHS["sm100"])
    with pytest.raises(ValueError, match=f"{refused}arch: got sm100; allowed sm90"):
        kernel(q, k, v)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"{refused}arch: got cpu; allowed sm90"):
        kernel(q, k, v)
    assert driver.launched == []


def test_results_that_no_kernel_can_write(driver, tmp_path):
    kernel = loaded(tmp_path, "cuda")
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"out: got strides .*; allowed strides \(25856, 64, 256, 1\)"):
        kernel(q, k, v, out=q.contiguous())
    with pytest.raises(ValueError, match=r"lse: got \(2, 4, 100\), torch.float32 on cpu; allowed \(2, 4, 101\)"):
        kernel(q, k, v, lse=torch.empty(2, 4, 100))
    with pytest.raises(TypeError, match=r"lse must be a torch.Tensor; got list"):
        kernel(q, k, v, lse=[])
    assert driver.launched == []


def test_threads_load_once(driver, tmp_path):
    kernel = loaded(tmp_path, "cuda")
    driver.sizes = [abi.size_of(argument) for argument in kernel._try_binding(kernel.plan.problem).arguments]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: kernel(*tensors()), range(4)))
    assert (len(driver.loaded), len(driver.launched)) == (1, 4)
    driver.status = 1
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx: CUDA_ERROR_OTHER: its words"):
        kernel(*tensors())


def test_the_loader_imports_no_language(tmp_path):
    for name in BACKENDS:
        emit(tmp_path, name)
    code = (
        "import sys\n"
        "for name in ('triton', 'cuda', 'nvidia'): sys.modules[name] = None\n"
        "import json, pathlib\n"
        "from multiattn import aot\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "names = [entry['name'] for entry in json.loads((folder / 'manifest.json').read_text())['kernels']]\n"
        "print(*(aot.load(folder, name=name).plan.backend for name in names))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout.split() == list(BACKENDS), done.stderr


# ---------------------------------------------------------------- scores, whose numbers and tensors come with each call


def captured(seq_q=101, seq_kv=130):
    """ALiBi's slopes, bias, and a table by distance."""
    return torch.rand(4), torch.rand(1, 4, seq_q, 1, dtype=torch.bfloat16), torch.rand(4, seq_q + seq_kv)


def scored(qkv, of_score, softcap):
    slopes, bias, table = of_score

    def score_mod(s, b, h, i, j):
        return s + table[h, (i - j).abs()]

    options = Options.of(causal=False, window=None, scale=None, backend="auto", variant=None, deterministic=False)
    return Problem.of_operands(*with_score(Operands(*qkv), options, softcap, slopes, bias, score_mod))


@pytest.mark.parametrize("name", BACKENDS)
def test_numbers_and_tensors_come_with_a_call(name, driver, tmp_path):
    own = scored(tensors(), captured(), 30.0)
    _, _, files = emit(tmp_path, name, whole=own)
    digest = own.score.program.digest
    entry = json.loads(files[-1].read_text())["kernels"][0]
    assert entry["problem"]["score"]["sha256"] == digest
    assert digest[:8] in entry["name"]
    kernel = aot.load(tmp_path)
    assert kernel.plan.problem == own
    assert kernel.entry["launch"]["constants"]["score"] == digest
    for sizes, softcap in (((101, 130), 30.0), ((64, 333), 50.0)):
        qkv, of_score = tensors(seq_q=sizes[0], seq_kv=sizes[1]), captured(*sizes)
        binding = kernel._try_binding(scored(qkv, of_score, softcap))
        driver.sizes = [abi.size_of(argument) for argument in binding.arguments]
        out, lse = kernel(*qkv, scalars={"softcap": softcap}, captured=of_score)
        operands = Operands(*qkv, out, lse, captured=of_score)
        driver_fakes.check_launches(driver.launched[-1:], [binding], operands)
        named = abi.names_of(binding)
        assert {"captured0", "captured1", "captured2"} <= set(named)
    assert len(driver.loaded) == 1


WRONG = {
    "no scalar": ({"scalars": {}}, "scalars: got none; allowed softcap"),
    "another scalar": ({"scalars": {"cap": 1.0}}, "scalars: got cap; allowed softcap"),
    "no tensors": ({"captured": ()}, "captured: got none; allowed float32 of rank 1, bfloat16 of rank 4, float32 of"),
    "a dtype": ({"captured": (captured()[0].double(), *captured()[1:])}, "captured: got float64 of rank 1, bfloat16"),
    "a size": ({"captured": (captured()[0][:2], *captured()[1:])}, r"captured tensor 0: got shape \(2,\)"),
    "a gradient": ({"captured": (captured()[0].requires_grad_(), *captured()[1:])}, "gradients: got tensors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_program_does_not_take_is_refused(name, driver, tmp_path):
    options, message = WRONG[name]
    kernel = loaded(tmp_path, "cuda", whole=scored(tensors(), captured(), 30.0))
    with pytest.raises(ValueError, match=message):
        kernel(*tensors(), **{"scalars": {"softcap": 30.0}, "captured": captured()} | options)
    assert driver.launched == []


def test_a_kernel_without_scores_takes_none(driver, tmp_path):
    kernel = loaded(tmp_path, "cuda")
    with pytest.raises(ValueError, match="captured: got float32 of rank 1; allowed none"):
        kernel(*tensors(), captured=(torch.rand(4),))


DAMAGED = {
    "program": (
        lambda score: score.update(program=score["program"].replace('"tanh"', '"exp2"', 1)),
        "problem: score: sha256: got .*; allowed",
    ),
    "text": (lambda score: score.update(program="{"), "damaged|no JSON|Expecting"),
    "fields": (lambda score: score.pop("shapes"), "problem: score: got no shapes"),
    "scalars": (lambda score: score.update(scalars=["x"]), "problem: score: scalars: got 'x'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_another_program_than_was_written_is_not_loaded(name, tmp_path):
    change, message = DAMAGED[name]
    emit(tmp_path, "cuda", whole=scored(tensors(), captured(), 30.0))
    edit(tmp_path, lambda entry: change(entry["problem"]["score"]))
    with pytest.raises(ValueError, match=message):
        aot.load(tmp_path)
