"""The interpreter is honest: bf16 rounds, out of bounds is caught, `triton.language` is left as it was."""

# ruff: noqa: N803 - constexprs of a Triton kernel are upper case

import importlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import multiattn
from multiattn.plan.support import OutOfBoundsError
from multiattn.triton.cpu import interpreter


@triton.jit
def axpy(x, y, out, factor, size, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < size
    scaled = tl.load(x + at, mask=inside) * factor.to(x.dtype.element_ty)
    total = scaled + tl.load(y + at, mask=inside)
    tl.store(out + at, total, mask=inside)


@triton.jit
def copy_rows(source, target, rows, TILE: tl.constexpr, SHIFT: tl.constexpr):
    for first in tl.range(0, rows, TILE):
        target.store([first, 0], source.load([first + SHIFT, 0]))


@triton.jit
def reduce_rows(x, out, TILE: tl.constexpr):
    tile = tl.load(x + tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]).to(tl.float32)
    tl.store(out + tl.arange(0, TILE), tl.sum(tile, 1) + tl.max(tile, 1) + tl.zeros([TILE], tl.float32))


@triton.jit
def product(a, b, out, TILE: tl.constexpr):
    at = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_arithmetic_rounds_as_torch_does(dtype):
    x, y = random(2, 100, dtype=dtype)
    out = torch.zeros_like(x)
    interpreter.run(axpy, 4, x, y, out, 3.0, 100, TILE=32)
    assert torch.equal(out, x * 3 + y)


def test_bf16_rounds_to_nearest_even_and_keeps_nan():
    one = 1.0
    bits = 2.0**-8  # half a unit in the last place of bf16 at 1
    x = torch.tensor([one, one + 2 * bits, float("inf"), float("nan")]).bfloat16()
    y = torch.tensor([bits, bits, 1.0, 1.0]).bfloat16()
    out = torch.zeros(4, dtype=torch.bfloat16)
    interpreter.run(axpy, 1, x, y, out, 1.0, 4, TILE=4)
    assert out[:3].tolist() == [one, one + 4 * bits, float("inf")]
    assert out[3].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dot_accumulates_in_fp32(dtype):
    a, b = random(2, 32, 32, dtype=dtype)
    out = torch.zeros(32, 32)
    interpreter.run(product, 1, a, b, out, TILE=32)
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-5, rtol=1e-5)


def test_tritons_own_library_of_jitted_functions():
    x = random(16, 16)
    out = torch.zeros(16)
    interpreter.run(reduce_rows, 1, x, out, TILE=16)
    torch.testing.assert_close(out, x.float().sum(1) + x.float().amax(1))


@pytest.mark.parametrize(
    ("what", "sizes"), [("load", (90, 100, 100)), ("load", (200, 100, 100)), ("store", (100, 100, 90))], ids=str
)
def test_a_pointer_out_of_bounds_is_caught(what, sizes):
    """Bounds are those of the view, not of its memory."""
    x, y, out = map(random, sizes)
    with pytest.raises(OutOfBoundsError, match=rf"{what} in program \(2, 0, 0\): 6 of 32 active lanes"):
        interpreter.run(axpy, 4, x[:90] if what == "load" else x, y, out, 3.0, 100, TILE=32)


def test_descriptors_pad_with_zeros_and_store_within_bounds():
    source, target = random(20, 16), torch.ones(20, 16, dtype=torch.bfloat16)
    blocks = (TensorDescriptor.from_tensor(tensor, [8, 16]) for tensor in (source, target))
    interpreter.run(copy_rows, 1, *blocks, 20, TILE=8, SHIFT=8)
    assert torch.equal(target[:12], source[8:])
    assert torch.equal(target[12:], torch.zeros(8, 16).bfloat16())


@pytest.mark.parametrize("what", ["load", "store"])
def test_a_descriptor_that_claims_too_much_is_caught(what):
    def claim(rows):
        return TensorDescriptor(random(20, 16), [rows, 16], [16, 1], [8, 16])

    source, target = (claim(24), claim(20)) if what == "load" else (claim(20), claim(24))
    with pytest.raises(OutOfBoundsError, match=f"{what} in program .* 64 of 128 active lanes"):
        interpreter.run(copy_rows, 1, source, target, 20, TILE=8, SHIFT=0)


def test_a_bug_in_the_kernel_passes_through():
    with pytest.raises(TypeError, match="missing"):
        interpreter.run(axpy, 1, random(4), random(4), TILE=4)


def test_the_language_is_left_as_it_was():
    owners = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(OutOfBoundsError):
        interpreter.run(axpy, 4, random(9), random(9), random(9), 3.0, 100, TILE=32)
    assert before == [dict(vars(owner)) for owner in owners]
    assert isinstance(axpy, triton.JITFunction)


@pytest.mark.parametrize("value", [pytest.param("0", marks=pytest.mark.nightly), "1"])
def test_it_works_whatever_triton_interpret_is(value):
    code = (
        "import os; os.environ['TRITON_INTERPRET'] = {!r}; import torch, multiattn\n"
        "q = torch.randn(1, 1, 20, 16).bfloat16()\n"
        "for variant in (None, 'warp_specialized'):\n"
        "    out = multiattn.fmha(q, q, q, backend='triton', variant=variant)\n"
        "    torch.testing.assert_close(out.float(), multiattn.reference(q, q, q)[0], atol=2e-2, rtol=2e-2)\n"
        "print([reason.got for reason in multiattn.plan.backend.get('triton').probe_compiler()])"
    )
    done = subprocess.run([sys.executable, "-c", code.format(value)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ("['TRITON_INTERPRET=1']" if value == "1" else "[]")


@triton.jit
def follow(out, TEXT: tl.constexpr):
    tl.inline_asm_elementwise(TEXT, "=r", [], tl.int32, is_pure=False, pack=1)
    tl.store(out, 1)


def test_ptx_that_orders_launches_does_nothing_and_other_ptx_is_refused():
    out = torch.zeros(1, dtype=torch.int32)
    interpreter.run(follow, 1, out, "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0")
    assert out == 1
    with pytest.raises(NotImplementedError, match="no PTX but griddepcontrol; got 'mov"):
        interpreter.run(follow, 1, out, "mov.b32 $0, 1;")


def test_the_language_is_for_one_to_patch_or_for_many_to_compile_with():
    language, order = interpreter._Language(), []
    compiling = threading.Barrier(2, timeout=60)

    def compile_one():
        with language.as_it_is():
            compiling.wait()  # both are in it
            time.sleep(0.02)
            order.append("compiled")

    def interpret():
        with language, language:  # a kernel that is interpreted may interpret
            order.append("begin")
            time.sleep(0.02)
            order.append("end")

    with ThreadPoolExecutor(4) as threads:
        with language.as_it_is():
            them = [threads.submit(it) for it in (interpret, compile_one, compile_one, interpret)]
            them[1].result()
            assert "begin" not in order
        for it in them:
            it.result()
    assert order == ["compiled"] * 2 + ["begin", "end"] * 2


@pytest.mark.parametrize(
    ("name", "backend", "variant"),
    [
        ("triton.cpu.interpreter", "triton", None),
        ("triton.cpu.gluon.run", "triton", "warp_specialized"),
        ("cutile.cpu.machine", "cutile", None),
    ],
)
def test_tiles_are_not_shared_by_threads_that_would_wait_for_each_other(name, backend, variant, monkeypatch):
    """Triton's interpreter took four times as long where other processes had work."""
    module = importlib.import_module(f"multiattn.{name}")
    seen, told = [], module.interpreting

    def interpreting(*work, **more):
        seen.append(torch.get_num_threads())
        return told(*work, **more)

    monkeypatch.setattr(module, "interpreting", interpreting)
    q = torch.randn(1, 1, 32, 16, dtype=torch.bfloat16)
    torch.set_num_threads(2)
    try:
        multiattn.fmha(q, q, q, backend=backend, variant=variant)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(1)
